"""Builds real runs of the smoke recipe in a temporary folder, and computes a step by hand."""

import atexit
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.config.schema import RunConfig
from rloo_cli.data import segments
from rloo_cli.data.batch import Batch
from rloo_cli.policy.shared_attention import native_attention
from rloo_cli.reporting.update_metrics import UpdateMetrics
from rloo_cli.run import Run, StepProgress
from rloo_cli.train.between_steps import log_step
from rloo_cli.train.build import build_run as make_run
from rloo_cli.train.step import update_policy

EXACT = 5e-6  # relative, in float32 (docs/algorithms.md, Loss types)
# Every quarter of the byte tokens ends a completion: lengths and ways of ending differ.
ENDS = f"generation.stop_token_ids={[*range(10, 258, 16)]}".replace(" ", "")
# The gradient itself is the update, so that two of them can be compared.
PLAIN = ("train.optimizer=torch.optim:SGD", "train.learning_rate=0.01", "train.max_grad_norm=null")
PLAIN = (*PLAIN, "train.lr_scheduler=constant")


def digits(completion_ids: Any, **_: Any) -> list[float]:
    """A score of two digits for every completion: no two siblings are equal."""
    return [sum((7 * i + 3) % 11 for i in ids) / 10 - len(ids) / 2 for ids in completion_ids]


@functools.cache
def cache() -> str:
    """Where the tiny model lies, for this session."""
    folder = tempfile.mkdtemp(prefix="rloo-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def checked(rewards: tuple[str, ...], words: tuple[str, ...]) -> RunConfig:
    """The smoke recipe's config with `words`, and Python callables of these names as rewards."""
    first = ["+recipe=smoke", "distributed.threads=1", "logging.console=plain"]
    entry = "{type: function, path: 'python:NAME', kwargs: {}}"
    named = [f"+reward.{name}={entry.replace('NAME', name)}" for name in rewards]
    return check.check_config(
        compose_config([*first, *(["reward=[]", *named] if rewards else []), *words])
    )


def make(
    folder: Path,
    *words: str,
    rewards: Mapping[str, Callable[..., Any]] | None = None,
    noise: float = 0.05,
) -> Run:
    """A run of the smoke recipe, silent, on one CPU thread; `words` are overrides.

    `rewards`: Python callables in place of the recipe's (default: `digits`; {} leaves the
    recipe's own). `noise` moves the
    policy's weights away from the reference's, so that there is a KL.
    """
    rewards = {"digits": digits} if rewards is None else rewards
    settings = checked(tuple(rewards), words)
    root = folder / str(settings.name)
    root.mkdir(exist_ok=True)
    here = mock.patch.dict(os.environ, RLOO_CACHE=cache())
    with here, mock.patch("torch.cuda.is_available", return_value=False):
        run = make_run(check.resolve_config(settings), root, rewards)
    run.log.display = None
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in run.policy.model.parameters() if noise else ():
            weight += noise * torch.randn(weight.shape, generator=draw)
    return run


def flat(run: Run) -> Tensor:
    """All weights of the policy, copied, as one vector."""
    return torch.cat([w.detach().reshape(-1).clone() for w in run.policy.model.parameters()])


def sampled(run: Run) -> Batch:
    """The next step's batch."""
    return run.rollouts.next_batch(run.state.step, run.state.place, run.state.seen_by_rewards(run))


def updated(run: Run, batch: Batch) -> UpdateMetrics:
    """All optimizer steps of a batch."""
    cycle = StepProgress(batch)
    update_policy(run, cycle)
    return cycle.updates


def alone(folder: Path, *words: str, **options: Any) -> Run:
    """`make`, without a held-out set."""
    return make(folder, "data.eval_split=null", *words, **options)


def step(run: Run, batch: Batch | None = None) -> tuple[Tensor, dict[str, Any], Batch]:
    """One step's updates, without sampling for the next: what the weights moved by, the metrics
    as they would be logged, and the batch.
    """
    batch, before = batch or sampled(run), flat(run)
    updates = updated(run, batch)
    moved = flat(run) - before
    run.state.advance(batch)
    log_step(run, batch, updates)
    return moved, run.log.metrics_lines[-1], batch


def apart(a: Tensor, b: Tensor) -> float:
    """Relative distance of two vectors."""
    return float((a - b).double().norm() / b.double().norm())


def leave_one_out(rows: Sequence[Sequence[float | None]]) -> list[list[float]]:
    """The advantages of groups of rewards, None = unscorable, by the words of the definition."""
    found = []
    for group in rows:
        out = []
        for k, own in enumerate(group):
            others = [r for j, r in enumerate(group) if j != k and r is not None]
            out.append(own - sum(others) / len(others) if own is not None and others else 0.0)
        found.append(out)
    return found


def row_logp(policy: Any, batch: Batch, p: int, k: int, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of one completion, alone in a plain forward of the whole model. (T,)"""
    group = batch.groups[p]
    completion = group.rollouts[k].completion_ids
    ids = torch.tensor([group.prompt_ids + completion])
    with native_attention(policy.model):
        logits = policy.model(input_ids=ids).logits[0, len(group.prompt_ids) - 1 : -1]
    return segments.target_logprobs(logits, torch.tensor(completion), temperature)


@torch.no_grad()
def table(policy: Any, batch: Batch, temperature: float = 1.0) -> list[list[Tensor]]:
    """`row_logp` of every completion, without gradient."""
    p, k = batch.score.shape
    return [[row_logp(policy, batch, i, j, temperature) for j in range(k)] for i in range(p)]


def gradient(run: Run, loss: Tensor) -> Tensor:
    """Of a scalar with respect to all weights, as one vector."""
    weights = list(run.policy.model.parameters())
    parts = torch.autograd.grad(loss, weights, allow_unused=True)
    return torch.cat(
        [
            (torch.zeros_like(w) if g is None else g).reshape(-1)
            for w, g in zip(weights, parts, strict=True)
        ]
    )


def policy_gradient(run: Run, batch: Batch, value: Sequence[Sequence[float]]) -> Tensor:
    """The gradient of -1/B sum_i A_i log pi(y_i), row by row."""
    total = torch.zeros(())
    for p, row in enumerate(value):
        for k, a in enumerate(row):
            if a:
                total = total - a * row_logp(run.policy, batch, p, k).sum()
    return gradient(run, total / batch.score.numel())


def timeless(row: dict[str, Any]) -> dict[str, Any]:
    """A line of metrics without what clocks say."""
    clocks = ("time/", "perf/completions", "perf/tokens", "perf/rollout", "step_time", "eps")
    return {k: v for k, v in row.items() if not k.startswith(clocks) and not k.endswith("/time")}
