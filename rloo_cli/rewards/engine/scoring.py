"""Scores a step: every reward on every row, failures kept apart from zeros.

A `Stage` calls all rewards at once (`running`), as groups arrive, puts their values in place and
lets `failures` decide, by each reward's `on_error` and `max_error_rate`, whether the run stops.
None ("this reward does not apply") is NaN in `Scores.raw`; so is a row that failed under
`on_error: none`, which also counts in `error_rate`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rloo_cli.data.batch import Group
from rloo_cli.data.filters import matches
from rloo_cli.rewards.engine import cache, failures
from rloo_cli.rewards.engine.arguments import Context, Table, TrainerState
from rloo_cli.rewards.engine.build import Reward
from rloo_cli.rewards.engine.failures import RewardFailed, Verdict
from rloo_cli.rewards.engine.results import Call, Outcome
from rloo_cli.rewards.engine.runner import Runner, finish

__all__ = ["Context", "RewardFailed", "Scores", "Stage", "TrainerState", "score"]

NAN = float("nan")


@dataclass
class Scores:
    """What F rewards said about P prompts' K completions each."""

    raw: Tensor  # (F, P, K) float64, unweighted, NaN = None
    names: list[str]  # F
    weights: Tensor  # (F,) float64
    error_rate: dict[str, float]  # reward -> share of rows that failed
    seconds: dict[str, float]  # reward -> wall seconds
    extras: dict[str, list[Any]] = field(default_factory=dict)  # log_extra's column -> P*K values
    metrics: dict[str, float] = field(default_factory=dict)  # log_metric's name -> mean
    warnings: list[str] = field(default_factory=list)  # to be printed once per run


class Stage:
    """Scoring one step, from its first whole group on. `k`: completions of each group.

    `arrived` tells that a group has its rollouts: what has the scope group or row is called then,
    while others are still being made; what has the scope batch is called by `finish`.
    """

    def __init__(
        self, rewards: Sequence[Reward], groups: Sequence[Group], context: Context, k: int
    ):
        self.table = Table(groups, context, k)
        rows = len(self.table)
        self.parts = [(reward, cache.Plan(), Runner(reward, rows)) for reward in rewards]

    def arrived(self, place: int) -> None:
        """Group `place` is whole. Returns at once, from any thread; once for each group."""
        rows = range(place * self.table.k, (place + 1) * self.table.k)
        for reward, plan, runner in self.parts:
            if reward.config.scope != "batch":
                self._submit(reward, plan, runner, rows)

    def finish(self) -> Scores:
        """The scores of all rows. Every group has arrived. Raises RewardFailed (exit code 5)."""
        table = self.table
        for reward, plan, runner in self.parts:
            if reward.config.scope == "batch":
                self._submit(reward, plan, runner, range(len(table)))
        try:
            finish([runner for _, _, runner in self.parts], table.context.poll)
        except BaseException:
            self.abandon()
            raise
        verdicts = [_verdict(reward, table, plan, runner) for reward, plan, runner in self.parts]
        failures.check(verdicts, table)
        return _scores(verdicts, table)

    def abandon(self) -> None:
        """The step will not be: make no further calls."""
        for _, _, runner in self.parts:
            runner.abandon()

    def _submit(
        self, reward: Reward, plan: cache.Plan, runner: Runner, rows: Sequence[int]
    ) -> None:
        asked = [row for row in rows if matches(self.table.at(row)[0].row, reward.config.only)]
        plan.known |= dict.fromkeys({*rows} - {*asked})
        asked = plan.add(reward, self.table, asked)
        each = [[row] for row in asked] if reward.config.scope == "row" else [asked]
        for part in filter(None, each):
            runner.submit(
                Call(part, partial(self.table.arguments, part, reward.wants, reward.fixed))
            )


def score(rewards: Sequence[Reward], groups: Sequence[Group], context: Context) -> Scores:
    """Score whole groups, all of one size K. Raises RewardFailed (exit code 5)."""
    sizes = {len(g.rollouts) for g in groups}
    if len(sizes) > 1:
        raise ValueError(f"groups of different sizes: {sorted(sizes)}")
    stage = Stage(rewards, groups, context, sizes.pop() if sizes else 0)
    for place in range(len(groups)):
        stage.arrived(place)
    return stage.finish()


def _scores(verdicts: Sequence[Verdict], table: Table) -> Scores:
    raw = torch.full((len(verdicts), len(table)), NAN, dtype=torch.float64)
    for f, verdict in enumerate(verdicts):
        for row, value in verdict.values.items():
            raw[f, row] = NAN if value is None else value
        on_error = verdict.reward.config.on_error
        raw[f, list(verdict.failures)] = on_error if isinstance(on_error, float) else NAN
    rewards = [v.reward for v in verdicts]
    scores = Scores(
        raw=raw.view(len(rewards), len(table.groups), table.k),
        names=[r.name for r in rewards],
        weights=torch.tensor([r.config.weight for r in rewards], dtype=torch.float64),
        error_rate={v.reward.name: len(v.failures) / max(1, len(table)) for v in verdicts},
        seconds={v.reward.name: v.seconds for v in verdicts},
    )
    _collect_logs(scores, [o for v in verdicts for o in v.outcomes], len(table))
    _warn_unscored(scores, table)
    return scores


def _verdict(reward: Reward, table: Table, plan: cache.Plan, runner: Runner) -> Verdict:
    outcomes = runner.outcomes()
    verdict = Verdict(reward, {}, {}, outcomes, runner.seconds)
    for outcome in outcomes:
        for at, (row, value) in enumerate(zip(outcome.rows, outcome.values, strict=True)):
            if at in outcome.failures:
                verdict.failures[row] = outcome.failures[at]
            else:
                verdict.values[row] = value
    cache.remember(reward, table, verdict.values)
    verdict.values |= plan.known
    for row, twin in plan.twins.items():
        if twin in verdict.failures:
            verdict.failures[row] = verdict.failures[twin]
        elif twin in verdict.values:  # it is in neither if calls were left out: the run stops
            verdict.values[row] = verdict.values[twin]
    verdict.failures = dict(sorted(verdict.failures.items()))  # groups arrive in any order
    return verdict


def _collect_logs(scores: Scores, outcomes: list[Outcome], rows: int) -> None:
    """Extras by row (None where no call logged one; the later reward wins), metrics' means."""
    told: dict[str, list[float]] = {}
    for outcome in outcomes:
        for column, values in outcome.log.extras.items():
            whole = scores.extras.setdefault(column, [None] * rows)
            for row, value in zip(outcome.rows, values, strict=True):
                whole[row] = value
        for name, number in outcome.log.metrics:
            told.setdefault(name, []).append(number)
    scores.metrics = {name: sum(numbers) / len(numbers) for name, numbers in told.items()}


def _warn_unscored(scores: Scores, table: Table) -> None:
    silent = scores.raw.isnan().all(dim=0).reshape(-1).nonzero().flatten().tolist()
    if silent:
        group, _ = table.at(silent[0])
        scores.warnings.append(
            f"no reward scored {len(silent)} of {len(table)} rows; they are left out. The first: "
            f"{failures.place(table, silent[0])}, columns {group.row!r:.200}"
        )
