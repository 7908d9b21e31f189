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
from rloo_cli.data.filters import matches_columns
from rloo_cli.rewards.engine import cache, failures
from rloo_cli.rewards.engine.arguments import CompletionTable, RewardContext, TrainerState
from rloo_cli.rewards.engine.build import Reward
from rloo_cli.rewards.engine.failures import RewardFailed, RewardResult
from rloo_cli.rewards.engine.results import CallResult, RewardCall
from rloo_cli.rewards.engine.reward_calls import RewardCalls, wait_for_calls

__all__ = ["RewardContext", "RewardFailed", "Scores", "ScoringStep", "TrainerState", "score_groups"]

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


class ScoringStep:
    """Scoring one step, from its first whole group on. `k`: completions of each group.

    `arrived` tells that a group has its rollouts: what has the scope group or row is called then,
    while others are still being made; what has the scope batch is called by `finish`.
    """

    def __init__(
        self, rewards: Sequence[Reward], groups: Sequence[Group], context: RewardContext, k: int
    ):
        self.table = CompletionTable(groups, context, k)
        rows = len(self.table)
        self.calls_by_reward = [
            (reward, cache.CachePlan(), RewardCalls(reward, rows)) for reward in rewards
        ]

    def submit_group(self, group_index: int) -> None:
        """Group `place` is whole. Returns at once, from any thread; once for each group."""
        rows = range(group_index * self.table.k, (group_index + 1) * self.table.k)
        for reward, plan, runner in self.calls_by_reward:
            if reward.config.scope != "batch":
                self._submit_calls(reward, plan, runner, rows)

    def wait_for_scores(self) -> Scores:
        """The scores of all rows. Every group has arrived. Raises RewardFailed (exit code 5)."""
        table = self.table
        for reward, plan, runner in self.calls_by_reward:
            if reward.config.scope == "batch":
                self._submit_calls(reward, plan, runner, range(len(table)))
        try:
            wait_for_calls([runner for _, _, runner in self.calls_by_reward], table.context.poll)
        except BaseException:
            self.abandon()
            raise
        verdicts = [
            _build_reward_result(reward, table, plan, runner)
            for reward, plan, runner in self.calls_by_reward
        ]
        failures.check_reward_failures(verdicts, table)
        return _build_scores(verdicts, table)

    def abandon(self) -> None:
        """The step will not be: make no further calls."""
        for _, _, runner in self.calls_by_reward:
            runner.abandon()

    def _submit_calls(
        self,
        reward: Reward,
        plan: cache.CachePlan,
        reward_calls: RewardCalls,
        indices: Sequence[int],
    ) -> None:
        asked = [
            row
            for row in indices
            if matches_columns(self.table.group_and_rollout(row)[0].example, reward.config.only)
        ]
        plan.cached_scores |= dict.fromkeys({*indices} - {*asked})
        asked = plan.select_uncached(reward, self.table, asked)
        each = [[row] for row in asked] if reward.config.scope == "row" else [asked]
        for part in filter(None, each):
            reward_calls.submit(
                RewardCall(
                    part,
                    partial(
                        self.table.call_arguments,
                        part,
                        reward.parameter_names,
                        reward.fixed_arguments,
                    ),
                )
            )


def score_groups(
    rewards: Sequence[Reward], groups: Sequence[Group], context: RewardContext
) -> Scores:
    """Score whole groups, all of one size K. Raises RewardFailed (exit code 5)."""
    sizes = {len(g.rollouts) for g in groups}
    if len(sizes) > 1:
        raise ValueError(f"groups of different sizes: {sorted(sizes)}")
    stage = ScoringStep(rewards, groups, context, sizes.pop() if sizes else 0)
    for place in range(len(groups)):
        stage.submit_group(place)
    return stage.wait_for_scores()


def _build_scores(results: Sequence[RewardResult], table: CompletionTable) -> Scores:
    raw = torch.full((len(results), len(table)), NAN, dtype=torch.float64)
    for f, verdict in enumerate(results):
        for row, value in verdict.values.items():
            raw[f, row] = NAN if value is None else value
        on_error = verdict.reward.config.on_error
        raw[f, list(verdict.failures)] = on_error if isinstance(on_error, float) else NAN
    rewards = [v.reward for v in results]
    scores = Scores(
        raw=raw.view(len(rewards), len(table.groups), table.k),
        names=[r.name for r in rewards],
        weights=torch.tensor([r.config.weight for r in rewards], dtype=torch.float64),
        error_rate={v.reward.name: len(v.failures) / max(1, len(table)) for v in results},
        seconds={v.reward.name: v.seconds for v in results},
    )
    _collect_logs(scores, [o for v in results for o in v.call_results], len(table))
    _warn_unscored(scores, table)
    return scores


def _build_reward_result(
    reward: Reward, table: CompletionTable, plan: cache.CachePlan, reward_calls: RewardCalls
) -> RewardResult:
    outcomes = reward_calls.call_results()
    verdict = RewardResult(reward, {}, {}, outcomes, reward_calls.seconds)
    for outcome in outcomes:
        for at, (row, value) in enumerate(zip(outcome.indices, outcome.values, strict=True)):
            if at in outcome.failures:
                verdict.failures[row] = outcome.failures[at]
            else:
                verdict.values[row] = value
    cache.cache_scores(reward, table, verdict.values)
    verdict.values |= plan.cached_scores
    for row, twin in plan.duplicate_of.items():
        if twin in verdict.failures:
            verdict.failures[row] = verdict.failures[twin]
        elif twin in verdict.values:  # it is in neither if calls were left out: the run stops
            verdict.values[row] = verdict.values[twin]
    verdict.failures = dict(sorted(verdict.failures.items()))  # groups arrive in any order
    return verdict


def _collect_logs(scores: Scores, call_results: list[CallResult], num_completions: int) -> None:
    """Extras by row (None where no call logged one; the later reward wins), metrics' means."""
    told: dict[str, list[float]] = {}
    for outcome in call_results:
        for column, values in outcome.log.extras.items():
            whole = scores.extras.setdefault(column, [None] * num_completions)
            for row, value in zip(outcome.indices, values, strict=True):
                whole[row] = value
        for name, number in outcome.log.metrics:
            told.setdefault(name, []).append(number)
    scores.metrics = {name: sum(numbers) / len(numbers) for name, numbers in told.items()}


def _warn_unscored(scores: Scores, table: CompletionTable) -> None:
    silent = scores.raw.isnan().all(dim=0).reshape(-1).nonzero().flatten().tolist()
    if silent:
        group, _ = table.group_and_rollout(silent[0])
        scores.warnings.append(
            f"no reward scored {len(silent)} of {len(table)} rows; they are left out. The first: "
            f"{failures.describe_completion(table, silent[0])}, columns {group.example!r:.200}"
        )
