"""RLOO as `algorithms/rloo.py` has it, and with the switches of its family: the same bits.

Batches drawn at random go through both: completions without a score, masked ones, groups of equal
scores, gaps in what the sampler reported, a policy that has moved. What the numbers should be is
held by the vectors, by TRL's gradients and by the draws of tests/train; here both must agree.
"""

import dataclasses
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from algorithm_cases import config, corrected, micro
from hook_calls import HookCalls, rloo
from torch import Tensor

import rloo_cli
from rloo_cli.algorithms import rloo as module
from rloo_cli.algorithms.common.hooks import AdvantageInputs, LossInputs

DRAWS = 100
PACKAGE = f"{Path(rloo_cli.__file__).parent}/"


class Drawn:
    """P groups of K completions with scores, KL and log-probabilities in float32."""

    def __init__(self, seed: int):
        draw, g = random.Random(seed), torch.Generator().manual_seed(seed)
        p, k = draw.randint(1, 4), draw.randint(1, 5)
        lengths = [draw.randint(1, 6) for _ in range(p * k)]
        n = sum(lengths)
        scores = [[draw.choice((0.0, 0.35, 1.0, draw.gauss(0, 1))) for _ in range(k)]
                  for _ in range(p)]  # fmt: skip
        if draw.random() < 0.3:
            scores[0] = [0.35] * k
        self.score = torch.tensor(scores, dtype=torch.float64)
        self.scorable = torch.rand(p, k, generator=g) < draw.choice((0.6, 1.0))
        self.score = self.score.masked_fill(~self.scorable, 0.0)
        self.old = -torch.rand(n, generator=g) * 3
        self.ref = self.old + 0.3 * torch.randn(n, generator=g)
        moved = draw.choice((0.0, 0.05, 0.4, 30.0))  # 30: beyond log_ratio_clamp
        self.logp = (self.old + moved * torch.randn(n, generator=g)).requires_grad_()
        behaviour = self.old + 0.1 * torch.randn(n, generator=g)
        behaviour[torch.rand(n, generator=g) < 0.1] = float("nan")
        self.micro = micro(lengths, behaviour=draw.choice((None, behaviour, behaviour)))
        masked = torch.rand(p * k, generator=g) < draw.choice((0.0, 0.3))
        self.micro.mask = (~masked)[self.micro.sequence_ids].float()
        self.keys: dict[str, Any] = {"beta": draw.choice((0.0, 0.05, 0.3))}
        self.keys |= {"epsilon": draw.choice((0.05, 0.2)), "epsilon_high": draw.choice((None, 0.3))}
        self.config = config(**self.keys)
        if draw.random() < 0.5:
            cap, floor = draw.choice((1.05, 3.0)), draw.choice((0.0, 0.9))
            self.config = corrected("sequence", "truncate", cap, floor, **self.keys)


def computed(drawn: Drawn) -> dict[str, Tensor | None]:
    """KL, advantages, loss and gradient of a batch."""
    algorithm = rloo.of(drawn.config)
    kl = algorithm.sequence_kl(drawn.old, drawn.ref, drawn.micro)
    table = kl.reshape(drawn.score.shape) if drawn.keys["beta"] else None
    found = algorithm.advantages(AdvantageInputs(drawn.score, table, drawn.scorable))
    a = found.advantage.reshape(-1).float()
    count = float(len(a))
    loss = algorithm.loss(LossInputs(drawn.logp, drawn.old, drawn.ref, drawn.micro, a, count))
    (gradient,) = torch.autograd.grad(loss.total, drawn.logp)
    values = {"kl": kl, "gradient": gradient, "factor": torch.tensor(found.factor)}
    values |= {name: getattr(found, name) for name in ("reward", "advantage", "usable")}
    named = [f.name for f in dataclasses.fields(loss) if f.name not in ("metrics", "bonus")]
    return values | {f"loss.{name}": getattr(loss, name) for name in named}


def test_both_ways_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    clipped = corrected_draws = 0
    for seed in range(DRAWS):
        drawn = Drawn(seed)
        assert rloo.of(drawn.config).is_plain
        straight = computed(drawn)
        with monkeypatch.context() as patched:
            patched.setattr(HookCalls, "by_family", True)
            by_family = computed(drawn)
        for name, value in straight.items():
            other = by_family[name]
            if value is None or other is None:
                assert value is other, (seed, name)
            else:
                assert value.dtype == other.dtype and torch.equal(value, other), (seed, name)
        clipped += bool((straight["loss.low"] | straight["loss.high"]).any())  # type: ignore[operator]
        corrected_draws += straight["loss.weight"] is not None
    assert clipped > 10 and corrected_draws > 20


SWITCHED: list[dict[str, Any]] = [
    {"dialect": "trl"}, {"turn_rewards": "credit"}, {"kl_in": "loss"}, {"kl_estimator": "k3"},
    {"kl_in_baseline": False}, {"kl_credit": "to_go"}, {"baseline": "group_mean"},
    {"advantage_scale": "group"}, {"normalize_advantages": True}, {"policy_loss": "reinforce"},
    {"ratio_level": "token"}, {"loss_agg": "token_mean"}, {"epsilon_tokens": 100}, {"delta": 3.0},
    {"off_policy_threshold": 0.1}, {"entropy_coef": 0.01},
    {"policy_loss": None, "ratio_level": None, "loss_agg": None, "loss_type": "dapo"},
]  # fmt: skip


@pytest.mark.parametrize("keys", SWITCHED, ids=lambda keys: next(iter(keys)))
def test_a_switch_of_the_family_is_not_plain(keys: dict[str, Any]) -> None:
    assert not rloo.of(config(**keys)).is_plain


@pytest.mark.parametrize(
    ("level", "mode", "keys"),
    [
        ("token", "truncate", {}), ("sequence", "mask", {}), ("sequence", "bypass", {}),
        ("sequence", "truncate", {"rule": {"geometric_range": [0.8, 1.25]}}),
    ],
)  # fmt: skip
def test_another_correction_is_not_plain(level: str, mode: str, keys: dict[str, Any]) -> None:
    assert not rloo.of(corrected(level, mode, **keys)).is_plain


def test_all_arithmetic_of_plain_rloo_is_in_its_file() -> None:
    entered: set[str] = set()

    def record(frame: Any, event: str, _: Any) -> None:
        entered.add(frame.f_code.co_filename)

    drawn = next(d for d in map(Drawn, range(DRAWS)) if d.config.correction.mode != "none")
    algorithm = rloo.of(drawn.config)
    a = torch.ones(drawn.score.numel())
    sys.setprofile(record)
    try:
        kl = algorithm.sequence_kl(drawn.old, drawn.ref, drawn.micro)
        kl = kl.reshape(drawn.score.shape)
        algorithm.advantages(AdvantageInputs(drawn.score, kl, drawn.scorable))
        algorithm.loss(LossInputs(drawn.logp, drawn.old, drawn.ref, drawn.micro, a, 1.0))
    finally:
        sys.setprofile(None)
    ours = {name.removeprefix(PACKAGE) for name in entered if name.startswith(PACKAGE)}
    # base.py hands out the config, packing.py the number of completions.
    assert ours == {"algorithms/rloo.py", "algorithms/common/base.py", "data/packing.py"}


# Switches that the formula reads as they are, and those that it can leave to other parts.
READ = {"beta", "epsilon", "epsilon_high", "log_ratio_clamp", "correction"}
ELSEWHERE = {
    "name", "num_generations", "num_iterations", "num_minibatches", "loss_type",
    "loss_denominator",  # counted where updates are planned
    "turn_rewards",  # credit is `by_token`, the others are parts of the score
    "zero_std_groups", "max_resample", "multi_reward", "normalize_rewards", "reward_clip_range",
    "missing_eos_penalty", "overlong_penalty", "mask_truncated_completions",  # scores and groups
    "kl_temperature",  # the log-probabilities that are handed over
    "kl_ratio_weighted", "sapo_temperature_pos", "sapo_temperature_neg", "allow_stale",
    # of losses that are not plain
}  # fmt: skip


def test_every_switch_is_read_by_the_formula_or_makes_it_not_plain_or_lies_elsewhere() -> None:
    """A switch that is added later must not be left out by the straight way without a word."""
    switches = {*module.Config.model_fields}
    assert switches <= {*module.PLAIN, *READ, *ELSEWHERE}
    assert switches >= READ | ELSEWHERE
