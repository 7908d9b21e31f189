"""Scores a step: every reward on every completion, with failures kept apart from zeros.

A `ScoringStep` calls all rewards as groups arrive (reward_calls.py), collects their scores and lets
failures.py decide, by each reward's `on_error` and `max_error_rate`, whether the run stops. None
("this reward does not apply") is NaN in `Scores.raw`; so is a completion that failed under
`on_error: none`, which also counts in `error_rate`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

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
    """The scores of F rewards for K completions of each of P prompts."""

    raw: Tensor  # (F, P, K) float64, unweighted, NaN = None
    names: list[str]  # F
    weights: Tensor  # (F,) float64
    error_rate: dict[str, float]  # reward -> share of completions that failed
    seconds: dict[str, float]  # reward -> wall seconds
    extras: dict[str, list[object]] = field(default_factory=dict)  # log_extra: column -> P*K values
    metrics: dict[str, float] = field(default_factory=dict)  # log_metric's name -> mean
    warnings: list[str] = field(default_factory=list)  # to be printed once per run


class ScoringStep:
    """The scoring of one step whose groups have `k` completions each.

    `submit_group` is called once a group has its rollouts: rewards of scope group or row are called
    then, while other groups are still being sampled; those of scope batch by `wait_for_scores`.
    """

    def __init__(
        self, rewards: Sequence[Reward], groups: Sequence[Group], context: RewardContext, k: int
    ):
        self.table = CompletionTable(groups, context, k)
        count = len(self.table)
        self.calls_by_reward = [(r, cache.CachePlan(), RewardCalls(r, count)) for r in rewards]

    def submit_group(self, group_index: int) -> None:
        """Score a group that is complete. Returns at once; call it once a group, in any thread."""
        indices = range(group_index * self.table.k, (group_index + 1) * self.table.k)
        for reward, plan, calls in self.calls_by_reward:
            if reward.config.scope != "batch":
                self._submit_calls(reward, plan, calls, indices)

    def wait_for_scores(self) -> Scores:
        """The scores of all completions, once every group was submitted.

        Raises RewardFailed (exit code 5).
        """
        table = self.table
        for reward, plan, calls in self.calls_by_reward:
            if reward.config.scope == "batch":
                self._submit_calls(reward, plan, calls, range(len(table)))
        try:
            wait_for_calls([calls for _, _, calls in self.calls_by_reward], table.context.poll)
        except BaseException:
            self.abandon()
            raise
        results = [_build_reward_result(r, table, p, calls) for r, p, calls in self.calls_by_reward]
        failures.check_reward_failures(results, table)
        return _build_scores(results, table)

    def abandon(self) -> None:
        """Make no further calls: the step is given up."""
        for _, _, calls in self.calls_by_reward:
            calls.abandon()

    def _is_scored(self, index: int, reward: Reward) -> bool:
        """Whether a reward is asked about a completion: not where its environment failed."""
        group, rollout = self.table.group_and_rollout(index)
        return rollout.failed is None and matches_columns(group.example, reward.config.only)

    def _submit_calls(
        self, reward: Reward, plan: cache.CachePlan, reward_calls: RewardCalls,
        indices: Sequence[int],
    ) -> None:  # fmt: skip
        asked = [row for row in indices if self._is_scored(row, reward)]
        plan.cached_scores |= dict.fromkeys({*indices} - {*asked})
        asked = plan.select_uncached(reward, self.table, asked)
        parts = [[index] for index in asked] if reward.config.scope == "row" else [asked]
        parameters = reward.parameter_names, reward.fixed_arguments
        for part in filter(None, parts):
            make_arguments = partial(self.table.call_arguments, part, *parameters)
            reward_calls.submit(RewardCall(part, make_arguments))


def score_groups(
    rewards: Sequence[Reward], groups: Sequence[Group], context: RewardContext
) -> Scores:
    """Score whole groups, all of one size K. Raises RewardFailed (exit code 5)."""
    sizes = {len(g.rollouts) for g in groups}
    if len(sizes) > 1:
        raise ValueError(f"groups of different sizes: {sorted(sizes)}")
    scoring_step = ScoringStep(rewards, groups, context, sizes.pop() if sizes else 0)
    for group_index in range(len(groups)):
        scoring_step.submit_group(group_index)
    return scoring_step.wait_for_scores()


def _build_scores(results: Sequence[RewardResult], table: CompletionTable) -> Scores:
    raw = torch.full((len(results), len(table)), NAN, dtype=torch.float64)
    for f, result in enumerate(results):
        for index, value in result.values.items():
            raw[f, index] = NAN if value is None else value
        on_error = result.reward.config.on_error
        raw[f, list(result.failures)] = on_error if isinstance(on_error, float) else NAN
    rewards = [result.reward for result in results]
    scores = Scores(
        raw=raw.view(len(rewards), len(table.groups), table.k),
        names=[r.name for r in rewards],
        weights=torch.tensor([r.config.weight for r in rewards], dtype=torch.float64),
        error_rate={r.reward.name: len(r.failures) / max(1, len(table)) for r in results},
        seconds={r.reward.name: r.seconds for r in results},
    )
    _collect_logs(scores, [call for r in results for call in r.call_results], len(table))
    _warn_unscored(scores, table)
    return scores


def _build_reward_result(
    reward: Reward, table: CompletionTable, plan: cache.CachePlan, reward_calls: RewardCalls
) -> RewardResult:
    call_results = reward_calls.call_results()
    result = RewardResult(reward, {}, {}, call_results, reward_calls.seconds)
    for call in call_results:
        for i, (index, value) in enumerate(zip(call.indices, call.values, strict=True)):
            if i in call.failures:
                result.failures[index] = call.failures[i]
            else:
                result.values[index] = value
    cache.cache_scores(reward, table, result.values)
    result.values |= plan.cached_scores
    for index, twin in plan.duplicate_of.items():
        if twin in result.failures:
            result.failures[index] = result.failures[twin]
        elif twin in result.values:  # it is in neither if calls were left out: the run stops
            result.values[index] = result.values[twin]
    result.failures = dict(sorted(result.failures.items()))  # groups arrive in any order
    return result


def _collect_logs(scores: Scores, call_results: list[CallResult], num_completions: int) -> None:
    """Set the extras (None where no call logged one; a later reward wins) and mean metrics."""
    numbers: dict[str, list[float]] = {}
    for call in call_results:
        for column, values in call.log.extras.items():
            column_values = scores.extras.setdefault(column, [None] * num_completions)
            for index, value in zip(call.indices, values, strict=True):
                column_values[index] = value
        for name, number in call.log.metrics:
            numbers.setdefault(name, []).append(number)
    scores.metrics = {name: sum(logged) / len(logged) for name, logged in numbers.items()}


def _warn_unscored(scores: Scores, table: CompletionTable) -> None:
    unscored = scores.raw.isnan().all(dim=0).reshape(-1).nonzero().flatten().tolist()
    if unscored:
        group, _ = table.group_and_rollout(unscored[0])
        scores.warnings.append(
            f"no reward scored {len(unscored)} of {len(table)} rows; they are left out. The first: "
            f"{failures.describe_completion(table, unscored[0])}, columns {group.example!r:.200}"
        )
