"""Scores a step: every reward on every completion, with failures kept apart from zeros.

A `ScoringStep` calls all rewards as groups arrive (step_calls.py), and failures.py decides, by
each reward's `on_error` and `max_error_rate`, whether the run stops. None ("this reward does not
apply") is NaN in `Scores.raw`; so is a completion that failed under `on_error: none`, which also
counts in `error_rate`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rloo_cli.data.batch import Group
from rloo_cli.rewards.engine import failures
from rloo_cli.rewards.engine.arguments import CompletionTable, RewardContext, TrainerState
from rloo_cli.rewards.engine.build import Reward
from rloo_cli.rewards.engine.failures import RewardFailed, RewardResult, ToleratedFailures
from rloo_cli.rewards.engine.results import CallResult
from rloo_cli.rewards.engine.step_calls import StepCalls

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
    metric_counts: dict[str, int] = field(default_factory=dict)  # its name -> calls that logged it
    warnings: list[str] = field(default_factory=list)  # to be printed once per run
    tolerated: list[ToleratedFailures] = field(default_factory=list)  # do not stop the run alone


class ScoringStep(StepCalls):
    """The scoring of one step: `submit_group` for each group, then `wait_for_scores`."""

    def wait_for_scores(self) -> Scores:
        """The scores of all completions, once every group was submitted.

        Raises RewardFailed (exit code 5).
        """
        results = self.wait_for_results()
        tolerated = failures.check_reward_failures(results, self.table, self.num_completions)
        return replace(_build_scores(results, self.table), tolerated=tolerated)


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
    scores.metric_counts = {name: len(logged) for name, logged in numbers.items()}


def _warn_unscored(scores: Scores, table: CompletionTable) -> None:
    unscored = scores.raw.isnan().all(dim=0).reshape(-1).nonzero().flatten().tolist()
    if unscored and scores.names:  # a distillation may have no reward
        group, _ = table.group_and_rollout(unscored[0])
        scores.warnings.append(
            f"no reward scored {len(unscored)} of {len(table)} rows; they are left out. The first: "
            f"{failures.describe_completion(table, unscored[0])}, columns {group.example!r:.200}"
        )
