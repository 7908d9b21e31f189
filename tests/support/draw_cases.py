"""Steps drawn at random: switches, completions and scores; and runs of one tiny model to try them.

A draw is reproducible by its number. `words` is what a person would write to get its config.
"""

import copy
import functools
import math
import random
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml
from loop_cases import alone, flat
from objective_reference import Completion, Forward, Given, forward
from torch import Tensor, nn

from rloo_cli.algorithms.common.base import load_algorithm
from rloo_cli.config import check
from rloo_cli.config.compose import ComposedConfig, compose_config
from rloo_cli.config.schema import RunConfig
from rloo_cli.data.batch import Group, Rollout
from rloo_cli.generation.common import across_ranks
from rloo_cli.generation.common.rollouts import Rollouts
from rloo_cli.rewards.engine.scoring import Scores
from rloo_cli.run import Run, RunState, StepProgress
from rloo_cli.train.step import update_policy
from rloo_cli.utils.errors import ConfigError
from rloo_cli.utils.paths import CONF

ALGORITHMS = (
    "rloo", "rloo", "rloo", "rloo", "reinforce", "reinforce_pp", "reinforce_pp_baseline", "grpo",
    "dapo", "dr_grpo", "gspo", "cispo", "sapo", "ppo", "remax",
)  # fmt: skip
DIALECTS = ("paper", "trl", "trl_0_21", "verl", "openrlhf", "ms_swift", "nemo_rl")
LONGEST = 8  # generation.max_completion_length
# Key -> how often a draw changes it, and to one of what.
SWITCHES: dict[str, tuple[float, list[Any]]] = {
    "beta": (0.5, [0.0, 0.0, 0.1, 0.3]),
    "kl_in": (0.25, ["reward", "loss", "loss", "none"]),
    "kl_estimator": (0.3, ["k1", "k2", "k3", "k3"]),
    "kl_in_baseline": (0.25, [True, False]),
    "kl_credit": (0.25, ["sequence", "to_go"]),
    "kl_temperature": (0.25, ["one"]),
    "kl_ratio_weighted": (0.1, [True]),
    "multi_reward": (0.15, ["normalize_then_sum"]),
    "normalize_rewards": (0.2, [True]),
    "reward_clip_range": (0.25, [[-0.3, 1.0], [-1.0, 0.5], [-5.0, 5.0]]),
    "missing_eos_penalty": (0.25, [{"mode": "replace", "value": -1.0}, 0.5]),
    "overlong_penalty": (0.15, [{"max_length": 7, "cache": 4, "weight": 0.7}]),
    "mask_truncated_completions": (0.4, [True, True, "drop"]),
    "baseline": (0.2, ["loo", "group_mean", "batch_mean", "ema", "none"]),
    "advantage_scale": (0.25, ["none", "group", "batch", "loo_std"]),
    "normalize_advantages": (0.35, [True]),
    "zero_std_groups": (0.2, ["drop", "resample"]),
    "policy_loss": (0.2, ["clip", "reinforce", "cispo", "sapo", "luspo", "vespo"]),
    "ratio_level": (0.3, ["sequence", "token", "geometric"]),
    "loss_type": (0.1, ["grpo", "dr_grpo", "bnpo", "dapo", "gspo", "cispo", "luspo", "vespo"]),
    "epsilon": (0.3, [0.05, 0.5]),
    "epsilon_high": (0.2, [0.28, 0.03, 5.0]),
    "delta": (0.15, [1.6, 3.0]),
    "allow_stale": (0.3, [True]),
    "off_policy_threshold": (0.15, [0.05, 0.2]),
    "entropy_coef": (0.3, [0.05]),
    "loss_agg": (0.25, ["sequence_sum", "sequence_mean", "token_mean", "constant",
                        "token_mean_local"]),
    "loss_denominator": (0.25, ["valid"]),
    "num_iterations": (0.25, [2]),
    "num_minibatches": (0.2, [2]),
    "num_generations": (0.7, [1, 2, 2, 3, 4]),
    "gamma": (0.4, [0.9]),
    "lam": (0.4, [0.7]),
    "whiten_rewards": (0.4, [True]),
    "minus_group_mean": (0.1, [True]),
}  # fmt: skip
# Of these, what leaves the formula of RLOO as it is: scores before it, and the updates around it.
PLAIN_SWITCHES = (
    "beta", "kl_temperature", "multi_reward", "normalize_rewards", "reward_clip_range",
    "missing_eos_penalty", "mask_truncated_completions", "zero_std_groups", "epsilon",
    "epsilon_high", "loss_denominator", "num_iterations", "num_minibatches", "num_generations",
)  # fmt: skip
CORRECTIONS = {
    "mode": ["none", "truncate", "truncate", "mask", "filter", "bypass"],
    "level": ["token", "sequence", "geometric"],
    "cap": [1.05, 1.3, 3.0], "floor": [0.0, 0.8],
    "geometric_range": ["null", "null", "[0.9,1.1]"],
}  # fmt: skip
# Combinations in which a shortcut is easily wrong, and which independent draws meet too seldom.
CORNERS: list[dict[str, list[Any]]] = [
    {
        "algorithm": ["rloo"], "algorithm.normalize_advantages": [True],
        "algorithm.entropy_coef": [0.05], "algorithm.beta": [0.1, 0.3],
    },
    {
        "algorithm": ["reinforce_pp_baseline", "reinforce_pp_baseline", "reinforce_pp", "ppo"],
        "algorithm.mask_truncated_completions": [True],
    },
    {
        "algorithm": ["rloo"], "algorithm.dialect": ["openrlhf"],
        "algorithm.kl_credit": ["sequence"], "algorithm.normalize_advantages": [True],
        "algorithm.reward_clip_range": [[-0.3, 1.0], [-1.0, 0.2], [0.1, 0.5]],
        "algorithm.kl_in_baseline": [True, False], "algorithm.beta": [0.0, 0.1],
    },
]  # fmt: skip


@dataclass(frozen=True)
class Draw:
    """One step: its config, and what was sampled and scored."""

    number: int
    words: str
    settings: RunConfig
    refused: list[str]  # what was drawn before it and is refused


@functools.cache
def basis() -> tuple[dict[str, Any], Any]:
    """The smoke recipe's values, and where they came from."""
    found = compose_config(["+recipe=smoke", "data.eval_split=null", "model.lm_head_fp32=true"])
    return found.values, found.sources


@functools.cache
def section(name: str) -> dict[str, Any]:
    """A file of conf/algorithm, with what it inherits."""
    values = yaml.safe_load((CONF / "algorithm" / f"{name}.yaml").read_text())
    above = [v for v in values.pop("defaults", []) if isinstance(v, str) and v != "_self_"]
    return {k: v for of in above for k, v in section(of).items()} | values


def drawn_words(rng: random.Random) -> dict[str, Any]:
    """Dotted keys -> values of one config; `algorithm` and `algorithm.dialect` are choices."""
    words: dict[str, Any] = {"algorithm": rng.choice(ALGORITHMS)}
    if words["algorithm"] == "rloo" and rng.random() < 0.4:
        words["algorithm.dialect"] = rng.choice(DIALECTS)
    corner = rng.choice(CORNERS) if rng.random() < 0.2 else {}
    if corner:
        words = {key: rng.choice(values) for key, values in corner.items()}
    base = section(words["algorithm"])
    for key, (share, values) in SWITCHES.items():
        if key in base and rng.random() < share * (0.4 if corner else 1):
            words.setdefault(f"algorithm.{key}", rng.choice(values))
    if rng.random() < 0.35:
        words |= {f"algorithm.correction.{k}": rng.choice(v) for k, v in CORRECTIONS.items()}
    words["generation.temperature"] = rng.choice([1.0, 1.0, 0.7])
    words["train.prompts_per_step"] = rng.choice([2, 3, 4, 4])
    words["train.micro_batch_tokens"] = rng.choice([40, 100, 1024])
    return words


def plain_settings(number: int) -> RunConfig:
    """A config that `algorithms/rloo.py` computes without its family's switches."""
    for attempt in range(1000):
        rng = random.Random(f"{number}/{attempt}/plain")
        words: dict[str, Any] = {
            "algorithm": "rloo",
            "generation.temperature": rng.choice([1, 0.7]),
        }
        for key in PLAIN_SWITCHES:
            if rng.random() < 0.4:
                words[f"algorithm.{key}"] = rng.choice(SWITCHES[key][1])
        words["algorithm.correction.mode"] = rng.choice(["none", "truncate"])
        words["algorithm.correction.cap"] = rng.choice(CORRECTIONS["cap"])
        words["train.prompts_per_step"] = rng.choice([2, 3, 4, 4])
        words["train.micro_batch_tokens"] = rng.choice([40, 100, 1024])
        try:
            return checked(words)
        except ConfigError:
            continue
    raise AssertionError("nothing is accepted")


def checked(words: dict[str, Any]) -> RunConfig:
    """The config of these words. Raises ConfigError, as the command does."""
    values, sources = basis()
    values = copy.deepcopy(values)
    values["algorithm"] = copy.deepcopy(section(words["algorithm"]))
    name = words.get("algorithm.dialect")
    if name:
        file = CONF / "algorithm" / "dialect" / f"{name}.yaml"
        for part, keys in yaml.safe_load(file.read_text()).items():
            rule = values["algorithm"]["correction"] | keys.pop("correction", {})
            values[part] |= keys | ({"correction": rule} if part == "algorithm" else {})
    for key, value in words.items():
        *path, leaf = key.split(".")
        if path:
            inner = functools.reduce(lambda v, part: v[part], path, values)
            inner[leaf] = copy.deepcopy(value)
    values["generation"]["max_completion_length"] = LONGEST
    values["reward"] = {
        n: values["reward"]["length_tokens"] | {"weight": 1.0} for n in ("one", "two", "three")
    }
    return check.check_config(ComposedConfig(values, sources, "smoke"))


def spelled(words: dict[str, Any]) -> str:
    """The words as they are typed."""

    def value(x: Any) -> str:
        if isinstance(x, dict):
            return "{" + ",".join(f"{k}:{value(v)}" for k, v in x.items()) + "}"
        if isinstance(x, list):
            return "[" + ",".join(map(value, x)) + "]"
        return str(x).lower() if isinstance(x, bool) else str(x)

    return " ".join(f"'{k}={value(v)}'" for k, v in words.items())


@functools.cache
def draw(number: int) -> Draw:
    """The first config of this number that is not refused. Nothing but ConfigError refuses one."""
    refused: list[str] = []
    for attempt in range(1000):
        words = drawn_words(random.Random(f"{number}/{attempt}"))
        try:
            return Draw(number, spelled(words), checked(words), refused)
        except ConfigError:
            refused.append(spelled(words))
    raise AssertionError(f"nothing is accepted: {refused[-1]}")


class Sampled:
    """Prompts, completions and scores by the number of the prompt's draw; a generator too."""

    conversational, metrics, tolerance = False, types.MappingProxyType({}), math.inf

    def __init__(self, number: int, k: int):
        rng = random.Random(f"{number}/sampled")
        self.number, self.k = number, k
        self.weights = [rng.choice([1.0, 0.5, -0.7]) for _ in range(rng.choice([1, 1, 2, 3]))]
        if len(self.weights) > 1 and rng.random() < 0.2:
            self.weights[-1] = 0.0
        self.kind = rng.choice(["binary", "binary", "real", "real", "rare", "equal"])
        self.none = rng.choice([0.0, 0.0, 0.2, 0.6])
        self.behaves = rng.choice([0.0, 0.05, 0.2])  # noise of the sampler's log-probabilities
        self.truncated = rng.choice([0.0, 0.3, 0.3, 0.7])
        self.behaviour: dict[tuple[int, int], list[float] | None] = {}

    def __len__(self) -> int:
        return 10**6

    def rng(self, *of: Any) -> random.Random:
        return random.Random("/".join(map(str, (self.number, *of))))

    def completion(self, draw: int, k: int) -> Completion:
        """Completion k of a prompt's draw; -1 is the greedy one."""
        rng = self.rng(draw, k)
        ids = [rng.randrange(2, 258) for _ in range(rng.randint(1, LONGEST))]
        mask = [1] * len(ids)
        if rng.random() < 0.2:  # some are a tool's
            mask = [int(rng.random() < 0.6) for _ in ids]
            mask[0] = 1
        ended = rng.random() >= self.truncated
        return Completion(ids, mask, ended, self.behaviour.get((draw, k)))

    def prompt(self, draw: int) -> list[int]:
        rng = self.rng(draw, "prompt")
        return [rng.randrange(2, 258) for _ in range(rng.randint(2, 7))]

    def said(self, draw: int, k: int) -> list[float]:
        """What each reward says of a completion, NaN = None."""
        rng, flat_group = self.rng(draw, k, "said"), self.rng(draw, "group").random() < 0.35
        own = self.rng(draw, "equal") if flat_group or self.kind == "equal" else rng
        made = {
            "binary": lambda: float(own.random() < 0.5), "real": lambda: own.gauss(0.2, 1.0),
            "rare": lambda: float(own.random() < 0.15), "equal": lambda: float(own.random() < 0.5),
        }[self.kind]  # fmt: skip
        found = [made() for _ in self.weights]
        return [math.nan if rng.random() < self.none else x for x in found]

    def raw(self, draws: list[int], ks: range) -> Tensor:
        """(F, P, K)"""
        rows = [[self.said(d, k) for k in ks] for d in draws]
        return torch.tensor(rows, dtype=torch.float64).permute(2, 0, 1)

    def groups_at(self, at: int, count: int) -> list[Group]:
        """Prompts, as `Prompts` gives them."""
        return [Group(d, {}, "", self.prompt(d)) for d in range(at, at + count)]

    def generate(self, groups: list[Group], seeds: Any, greedy: bool = False, **_: Any) -> None:
        """Fill in the rollouts, as a generator does."""
        for group in groups:
            ks = range(-1, 0) if greedy else range(self.k)
            rows = [self.completion(group.prompt_offset, k) for k in ks]
            group.rollouts = [
                Rollout(r.ids, "", "stop" if r.ended else "length", r.ended, 0, 0, r.behaviour,
                        r.mask)
                for r in rows
            ]  # fmt: skip

    def answer(
        self, world: Any, generator: Any, groups: list[Group], sample: Any, *_: Any
    ) -> Scores:
        """What `across_ranks.answer` does, with these scores."""
        sample(range(len(groups)))
        ks = range(self.k) if len(groups[0].rollouts) > 1 or not self.greedy else range(-1, 0)
        raw, names = self.raw([g.prompt_offset for g in groups], ks), ["one", "two", "three"]
        count = len(self.weights)
        weights = torch.tensor(self.weights, dtype=torch.float64)
        return Scores(raw, names[:count], weights, {}, {})

    greedy = False


class Recorder:
    """Plain descent by steps of one length; keeps the weights and the gradient of each update."""

    max_grad_norm, learning_rate = None, 1.0
    weight_changes: dict[str, Tensor] = {}  # noqa: RUF012

    def __init__(self, parameters: list[nn.Parameter], length: float):
        self.parameters, self.length = parameters, length
        self.before: list[Tensor] = []
        self.gradients: list[Tensor] = []

    def grad_norm(self, factor: float = 1.0) -> Tensor:
        found = [
            (torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in self.parameters
        ]
        self.before.append(nn.utils.parameters_to_vector(self.parameters).detach().clone())
        self.gradients.append(torch.cat(found) * factor)
        return self.gradients[-1].norm()

    @torch.no_grad()
    def step(self, norm: Tensor) -> None:
        moved = self.before[-1]
        if float(norm) > 0:
            moved = moved - self.length * self.gradients[-1] / norm
        nn.utils.vector_to_parameters(moved, self.parameters)
        self.zero_grad()

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None


class Bench:
    """One tiny model, built once, on which every draw is tried; and its twins in float64."""

    def __init__(self, folder: Path):
        self.run = alone(folder, "algorithm.beta=0.1", "model.lm_head_fp32=true")
        critic = alone(folder, "algorithm=ppo", "model.lm_head_fp32=true").value_model
        assert critic is not None
        self.critic = critic
        noise = torch.Generator().manual_seed(3)
        with torch.no_grad():  # its head begins as zeros
            critic.head.weight += 0.3 * torch.randn(critic.head.weight.shape, generator=noise)
        self.start, self.start_value = flat(self.run), vector(critic.model)
        self.twin = doubled(self.run.policy.model)
        self.twin_value = doubled(critic.model)
        assert self.run.reference is not None
        self.twin_ref = doubled(self.run.reference.model)
        self.fused = self.run.policy.logprob_module.use_fused_head

    def prepared(self, settings: RunConfig, sampled: Sampled, length: float) -> Run:
        """The run with another config, from the beginning."""
        settings = check.resolve_config(settings)
        algorithm = load_algorithm(settings.algorithm)
        keys = algorithm.config
        run, temperature = self.run, settings.generation.temperature
        nn.utils.vector_to_parameters(self.start.clone(), list(run.policy.model.parameters()))
        nn.utils.vector_to_parameters(
            self.start_value.clone(), list(self.critic.model.parameters())
        )
        policy, reference = run.policy, run.reference
        assert reference is not None
        policy.temperature = temperature
        policy.kl_temperature = 1.0 if keys.kl_temperature == "one" else temperature
        reference.temperature = reference.kl_temperature = policy.kl_temperature
        policy.logprob_module.entropy_grad = keys.entropy_coef > 0
        policy.logprob_module.use_fused_head = self.fused and not keys.entropy_coef
        critic = self.critic if keys.name == "ppo" else None
        learned = [*policy.model.parameters(), *(critic.model.parameters() if critic else ())]
        prompts: Any = sampled
        rows = settings.train.micro_batch_tokens or 1024
        limits = replace(run.forward_limits, tokens=rows, no_grad_tokens=2 * rows)
        if keys.loss_agg == "token_mean_local":
            size = 2 * keys.num_generations
            limits = replace(limits, completions=size, no_grad_completions=size)
        optimizer: Any = Recorder(learned, length)
        return replace(
            run, config=settings, algorithm=algorithm, prompts=prompts, generator=prompts,
            rollouts=Rollouts(
                settings, algorithm, prompts, prompts, [], run.clock, run.world
            ),
            reference=reference if keys.needs_reference else None,
            value_model=critic, optimizer=optimizer, forward_limits=limits,
            forward_plan=algorithm.forward_plan(settings), state=RunState(), step_progress=None,
        )  # fmt: skip

    def trained(
        self, settings: RunConfig, sampled: Sampled, length: float, memory: dict[str, float]
    ) -> tuple[Recorder, Any]:
        """All updates of the draw's step, and its batch. Raises what a run raises."""
        run = self.prepared(settings, sampled, length)
        run.state.memory = dict(memory)
        sampled.greedy = settings.algorithm.needs_greedy
        with mock.patch.object(across_ranks, "sample_and_score", sampled.answer):
            batch = run.rollouts.next_batch(0, 0, run.state.seen_by_rewards(run))
        update_policy(run, StepProgress(batch))
        optimizer: Any = run.optimizer
        return optimizer, batch

    def twins(self, weights: Tensor, values: bool) -> list[nn.Parameter]:
        """Give the float64 twins these weights; their parameters."""
        parameters = list(self.twin.parameters())
        parameters += list(self.twin_value.parameters()) if values else []
        nn.utils.vector_to_parameters(weights.double(), parameters)
        return parameters

    def forward(self, given: Given, settings: RunConfig, values: bool) -> Forward:
        """What the twins say."""
        keys: Any = settings.algorithm
        temperature = settings.generation.temperature
        other = 1.0 if keys.kl_temperature == "one" else temperature
        return forward(self.twin, given, temperature, other, self.twin_value if values else None)

    def reference_logp(self, given: Given, settings: RunConfig) -> list[list[Tensor]] | None:
        """What the twin of the reference says, where the formulas ask for one."""
        keys: Any = settings.algorithm
        if keys.beta == 0 or keys.kl_in == "none":
            return None
        other = 1.0 if keys.kl_temperature == "one" else settings.generation.temperature
        with torch.no_grad():
            return forward(self.twin_ref, given, other, other).logp


def vector(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def doubled(model: Any) -> Any:
    """The same architecture and weights in float64, with transformers' own attention."""
    kind = type(model)
    settings = copy.deepcopy(model.config)
    settings._attn_implementation = "eager"
    twin = kind(settings).double().eval()
    twin.load_state_dict(model.state_dict())
    return twin


def given_of(draws: list[int], sampled: Sampled, settings: RunConfig, memory: Any) -> Given:
    """What the reference is told of a step."""
    keys: Any = settings.algorithm
    ks = range(keys.num_generations)
    return Given(
        prompts=[sampled.prompt(d) for d in draws],
        rows=[[sampled.completion(d, k) for k in ks] for d in draws],
        raw=sampled.raw(draws, ks),
        weights=sampled.weights,
        greedy_rows=[sampled.completion(d, -1) for d in draws],
        greedy_raw=sampled.raw(draws, range(-1, 0)),
        memory=memory, step=0, seed=settings.seed, longest=LONGEST, groups_per_micro=2,
    )  # fmt: skip


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
