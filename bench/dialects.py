"""Dialects against the code that they are named after: verl, OpenRLHF and ms-swift as published.

    python bench/dialects.py [--batches 200] [--folder FOLDER]     rows of bench/dialects.jsonl

The packages of `PINNED` are downloaded from the package index and unpacked, not installed: of each
module only the named functions and classes are taken, unchanged, and given torch and what they
call. Random batches of three prompts with four completions each go through theirs and ours:
compared are the advantages of every token, the loss, and its gradient at every token, where the
policy has moved from the one that sampled. NeMo RL publishes no code on the package index.
"""

import argparse
import ast
import json
import random
import subprocess
import sys
import tempfile
import types
import zipfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import numpy as np
import results
import torch
from torch import Tensor

from rloo_cli.algorithms.common.base import Algorithm, load_algorithm
from rloo_cli.algorithms.common.family import charge_tokens, update_denominator
from rloo_cli.config import registry
from rloo_cli.config.compose import compose_config
from rloo_cli.plugin import AdvantageInputs, LossInputs

ROWS = Path(__file__).with_name("dialects.jsonl")
PINNED = {"verl": "verl==0.9.1", "openrlhf": "openrlhf==0.11.2", "ms_swift": "ms-swift==4.6.0"}
# Its DPPO is CISPO's loss with a ratio of at most 20, and epsilon is the trust region's.
REGION = (
    "algorithm.policy_loss=cispo algorithm.epsilon_high=20.0 algorithm.trust_region="
    "{kind:KIND,level:token,low:0.2,high:0.2}"
)
PROMPTS, K, LONGEST, BETA, EPSILON = 3, 4, 6, 0.1, 0.2


def taken(source: Path, names: set[str], given: dict[str, Any]) -> types.SimpleNamespace:
    """These functions, classes and constants of a module, as they stand there.

    Decorators and types are left out: they name the rest of the package. Raises ValueError for a
    name that the module does not have.
    """
    found = []
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        name = getattr(node, "name", None)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
        if name not in names or isinstance(node, ast.alias):
            continue
        for inner in ast.walk(node):
            if isinstance(inner, ast.FunctionDef):
                inner.decorator_list, inner.returns = [], None
            if isinstance(inner, ast.arg):
                inner.annotation = None
        found.append(node)
    missing = names - {getattr(n, "name", None) or n.targets[0].id for n in found}  # type: ignore[attr-defined]
    if missing:
        raise ValueError(f"{source.name} has no {', '.join(sorted(missing))}")
    space = {"torch": torch, "np": np, "nn": torch.nn, "defaultdict": defaultdict} | given
    space |= {"Optional": Optional, "Any": Any}
    module = ast.fix_missing_locations(ast.Module(found, []))  # type: ignore[arg-type]
    exec(compile(module, str(source), "exec"), space)
    return types.SimpleNamespace(**space)


class Batch:
    """Scores, lengths and log-probabilities of PROMPTS * K completions, padded on the right."""

    def __init__(self, seed: int):
        draw, count = random.Random(seed), PROMPTS * K
        g = torch.Generator().manual_seed(seed)
        self.lengths = [draw.randint(1, LONGEST) for _ in range(count)]
        self.scores = torch.tensor([draw.choice((0.0, 0.5, 1.0, draw.gauss(0, 1)))
                                    for _ in range(count)], dtype=torch.float64)  # fmt: skip
        self.mask = torch.arange(LONGEST) < torch.tensor(self.lengths)[:, None]

        def normal(scale: float) -> Tensor:
            return scale * torch.randn(count, LONGEST, generator=g, dtype=torch.float64)

        self.old = -normal(1).abs() - 0.1
        self.ref, self.new = self.old + normal(0.3), (self.old + normal(0.3)).clamp(max=-1e-3)
        self.index = np.repeat(np.arange(PROMPTS), K)

    def flat(self, values: Tensor) -> Tensor:
        """The tokens that are there, row by row. (N,)"""
        return values[self.mask]


Compared = tuple[Tensor, float, Tensor]  # advantages of tokens, loss, gradient at tokens


def compared(batch: Batch, advantage: Tensor, loss: Callable[[Tensor], Tensor]) -> Compared:
    """What is compared, from padded advantages and the loss of the moved log-probabilities."""
    new = batch.new.clone().requires_grad_()
    value = loss(new)
    (gradient,) = torch.autograd.grad(value, new)
    return batch.flat(advantage), float(value.detach()), batch.flat(gradient)


def of_verl(folder: Path, kl_in_reward: bool, loss: str = "vanilla") -> Callable[[Batch], Compared]:
    """`main_ppo algorithm.adv_estimator=rloo`, loss_agg_mode=token-mean, loss_mode=`loss`."""
    sums = taken(folder / "verl/utils/torch_functional.py", {"masked_sum", "masked_mean"}, {})
    names = {"compute_rloo_outcome_advantage", f"compute_policy_loss_{loss}", "agg_loss"}
    names |= {"kl_penalty", "kl_penalty_forward"}
    theirs = taken(
        folder / "verl/trainer/ppo/core_algos.py", names, {"verl_F": sums, "AlgoConfig": type(None)}
    )

    class Actor(dict[str, Any]):
        clip_ratio = clip_ratio_low = clip_ratio_high = EPSILON
        global_batch_info: dict[str, Any] = {}  # noqa: RUF012

    def computed(batch: Batch) -> Compared:
        mask = batch.mask.double()
        last = torch.tensor(batch.lengths)[:, None] - 1
        rewards = torch.zeros_like(batch.old).scatter(1, last, batch.scores[:, None])
        if kl_in_reward:  # ray_trainer.py's apply_kl_penalty
            rewards = rewards - BETA * theirs.kl_penalty(batch.old, batch.ref, "kl") * mask
        a, _ = theirs.compute_rloo_outcome_advantage(rewards, mask, batch.index)
        policy_loss = getattr(theirs, f"compute_policy_loss_{loss}")
        return compared(batch, a, lambda new: policy_loss(
            batch.old, new, a, mask, "token-mean", Actor())[0])  # fmt: skip

    return computed


def of_openrlhf(folder: Path) -> Callable[[Batch], Compared]:
    """`train_ppo_ray --algo.advantage.estimator rloo`, as its maker of experience goes about it."""
    package = next(folder.glob("*.data/purelib/openrlhf"))
    names = {"compute_approx_kl", "compute_reward", "masked_mean"}
    helpers = taken(package / "models/utils.py", names, {})
    loss = taken(package / "models/loss.py", {"PolicyLoss", "aggregate_loss"}, vars(helpers))
    method = "compute_advantages_and_returns"
    given = {"itertools": __import__("itertools"), "apply_length_penalties": lambda *_: None}
    maker = taken(package / "trainer/ppo_utils/experience_maker.py",
                  {method, "get_cumulative_returns"}, vars(helpers) | given)  # fmt: skip
    space = types.SimpleNamespace

    def computed(batch: Batch) -> Compared:
        experience = space(
            rewards=batch.scores.clone(), index=list(range(PROMPTS * K)), action_mask=batch.mask,
            kl=helpers.compute_approx_kl(batch.old, batch.ref).double() * batch.mask, info={},
        )  # fmt: skip
        advantage = space(estimator="rloo", gamma=1.0, no_std_norm=True)
        args = space(rollout=space(n_samples_per_prompt=K), algo=space(advantage=advantage),
                     reward=space(clip_range=(-10, 10)))  # fmt: skip
        own = space(
            strategy=space(args=args), kl_ctl=space(value=BETA), advantage_estimator="rloo",
            get_cumulative_returns=lambda *of: maker.get_cumulative_returns(None, *of),
        )  # fmt: skip
        getattr(maker, method)(own, [experience])
        a = experience.advantages
        policy = loss.PolicyLoss(EPSILON, EPSILON)
        return compared(batch, a, lambda new: policy(new, batch.old, a, batch.mask)[0])

    return computed


def of_ms_swift(folder: Path) -> Callable[[Batch], Compared]:
    """`swift rlhf --rlhf_type grpo --advantage_estimator rloo`, loss_type grpo."""
    given = {"nanmin": torch.min, "nanmax": torch.max}  # of metrics alone
    theirs = taken(folder / "swift/rl_core/advantage.py", {"compute_advantages"}, given)
    trainer = taken(
        folder / "swift/rlhf_trainers/grpo_trainer.py", {"_compute_loss_and_metrics"}, given
    )
    space = types.SimpleNamespace

    def computed(batch: Batch) -> Compared:
        kl = ((batch.old - batch.ref) * batch.mask).sum(1)
        a, _ = theirs.compute_advantages(
            batch.scores[:, None], torch.ones(1, dtype=torch.float64), K,
            advantage_estimator="rloo", scale_rewards="none", kl_in_reward=True, beta=BETA,
            kl_values=kl,
        )  # fmt: skip
        padded = a[:, None].expand_as(batch.old)
        held = space(completion_mask=batch.mask, truncated_mask=None, advantages=padded,
                     old_per_token_logps=batch.old, rollout_per_token_logps=None,
                     teacher_per_token_logps=None)  # fmt: skip

        def loss(new: Tensor) -> Tensor:
            own = space(
                model=space(training=True), compute_entropy=False, overlong_filter=False, beta=BETA,
                kl_in_reward=True, rollout_importance_sampling_mode=None, _has_teacher=False,
                log_rollout_offpolicy_metrics=False, disable_rollout_importance_sampling=True,
                importance_sampling_level="token", loss_type="grpo", epsilon_low=EPSILON,
                epsilon_high=EPSILON, args=space(delta=None), off_policy_sequence_mask_delta=None,
                sdar_loss_coef=0, chord_sft_iterator=None,
                accelerator=space(gather_for_metrics=lambda x: x),
                _get_per_token_logps_and_entropies=lambda *_, **__: (new, None),
            )  # fmt: skip
            found = trainer._compute_loss_and_metrics(own, own.model, {}, held)
            return found[0] if isinstance(found, tuple) else found

        return compared(batch, padded, loss)

    return computed


def of_rloo(*words: str) -> Callable[[Batch], Compared]:
    """Our dialect."""
    values = compose_config([*words, "algorithm.correction.mode=none"]).values["algorithm"]
    algorithm: Algorithm[Any] = load_algorithm(
        registry.config_class("algorithms", values["name"])(**values)
    )
    config = algorithm.config

    def computed(batch: Batch) -> Compared:
        count = len(batch.lengths)
        sequence = torch.repeat_interleave(torch.arange(count), torch.tensor(batch.lengths))
        rows: Any = types.SimpleNamespace(sequence_ids=sequence, mask=torch.ones(len(sequence)),
                                          num_sequences=count, behaviour_logp=None)  # fmt: skip
        old, ref = batch.flat(batch.old), batch.flat(batch.ref)
        kl = algorithm.sequence_kl(old, ref, rows).reshape(PROMPTS, K)
        score = batch.scores.reshape(PROMPTS, K)
        found = algorithm.advantages(AdvantageInputs(score, kl, score == score))
        flat = found.advantage.reshape(-1), found.usable.reshape(-1)
        a = charge_tokens(*flat, old, ref, rows, config)
        n = update_denominator(config, count, sum(batch.lengths), 1, LONGEST)
        padded = torch.zeros_like(batch.old)
        padded[batch.mask] = a if len(a) == len(sequence) else a[sequence]
        return compared(batch, padded, lambda new: algorithm.loss(
            LossInputs(batch.flat(new), old, ref, rows, a, n)).total)  # fmt: skip

    return computed


def unpacked(name: str, folder: Path) -> Path:
    """The package of `PINNED`, unpacked in the folder; downloaded if it is not there."""
    root = folder / name
    if not root.exists():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
        subprocess.run([*command, PINNED[name]], check=True)
        (wheel,) = folder.glob(f"{name}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(root)
    return root


def main() -> None:
    """Compare them all; exit 1 where one is apart."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--folder", type=Path, help="where packages lie unpacked, or are put")
    args = parser.parse_args()
    base = [f"algorithm.beta={BETA}", f"algorithm.epsilon={EPSILON}"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        pairs = {
            ("verl", "KL in reward"): (of_verl(unpacked("verl", folder), True), base),
            ("verl", "KL off"): (of_verl(unpacked("verl", folder), False), ["algorithm.beta=0"]),
            **{
                ("verl", f"DPPO, {kind}"): (
                    of_verl(unpacked("verl", folder), False, f"dppo_{kind}"),
                    ["algorithm.beta=0", *REGION.replace("KIND", kind).split()],
                )
                for kind in ("tv", "kl")
            },
            ("openrlhf", ""): (of_openrlhf(unpacked("openrlhf", folder)), base),
            ("ms_swift", ""): (of_ms_swift(unpacked("ms_swift", folder)), base),
        }
        apart = False
        for (name, what), (theirs, words) in pairs.items():
            ours = of_rloo("algorithm=rloo", f"algorithm.dialect={name}", *words)
            most = [0.0, 0.0, 0.0]
            for seed in range(args.batches):
                batch = Batch(seed)
                for i, (x, y) in enumerate(zip(theirs(batch), ours(batch), strict=True)):
                    x, y = (torch.as_tensor(z, dtype=torch.float64) for z in (x, y))
                    most[i] = max(most[i], float((x - y).abs().max()))
            row = {"bench": "dialects", "package": PINNED[name], "what": what,
                   "batches": args.batches, "advantages": most[0], "loss": most[1],
                   "gradient": most[2]}  # fmt: skip
            results.append([row], ROWS)
            print(json.dumps(row))
            apart = apart or max(most) > 1e-5
    sys.exit(1 if apart else 0)


if __name__ == "__main__":
    main()
