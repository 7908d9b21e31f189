"""Calls every reward on a step's completions as its groups arrive, and collects the results.

`scoring.py` makes tensors of the results; no torch is needed here, so that a reward can be tried
without it (`rloo reward test`).
"""

from collections.abc import Sequence
from functools import partial

from rloo_cli.data.batch import Group
from rloo_cli.data.filters import matches_columns
from rloo_cli.rewards.engine import cache
from rloo_cli.rewards.engine.arguments import CompletionTable, RewardContext
from rloo_cli.rewards.engine.build import Reward
from rloo_cli.rewards.engine.failures import RewardResult
from rloo_cli.rewards.engine.results import RewardCall
from rloo_cli.rewards.engine.reward_calls import RewardCalls, wait_for_calls


class StepCalls:
    """The calls of one step whose groups have `k` completions each.

    `submit_group` is called once a group has its rollouts: rewards of scope group or row are called
    then, while other groups are still being sampled; those of scope batch by `wait_for_results`.
    """

    def __init__(
        self, rewards: Sequence[Reward], groups: Sequence[Group], context: RewardContext, k: int
    ):
        fields = [c for reward in rewards for c in reward.required_columns if "." in c]
        self.table = CompletionTable(groups, context, k, fields)
        count = len(self.table)
        self.calls_by_reward = [(r, cache.CachePlan(), RewardCalls(r, count)) for r in rewards]
        self.num_completions = count  # of the whole step, including other ranks' shares

    def count_all_ranks(self, num_completions: int) -> None:
        """Use this number for `max_error_rate`, the step's completions, over all ranks."""
        self.num_completions = num_completions
        for _, _, calls in self.calls_by_reward:
            calls.num_completions = num_completions

    def submit_group(self, group_index: int) -> None:
        """Score a group that is complete. Returns at once; call it once a group, in any thread."""
        indices = range(group_index * self.table.k, (group_index + 1) * self.table.k)
        for reward, plan, calls in self.calls_by_reward:
            if reward.config.scope != "batch":
                self._submit_calls(reward, plan, calls, indices)

    def wait_for_results(self) -> list[RewardResult]:
        """Every reward's results, once every group was submitted. Failures are in the results."""
        table = self.table
        for reward, plan, calls in self.calls_by_reward:
            if reward.config.scope == "batch":
                self._submit_calls(reward, plan, calls, range(len(table)))
        try:
            wait_for_calls([calls for _, _, calls in self.calls_by_reward], table.context.poll)
        except BaseException:
            self.abandon()
            raise
        return [_build_reward_result(r, table, p, calls) for r, p, calls in self.calls_by_reward]

    def abandon(self) -> None:
        """Make no further calls: the step is given up."""
        for _, _, calls in self.calls_by_reward:
            calls.abandon()

    def _is_scored(self, index: int, reward: Reward) -> bool:
        """Whether rewards are called for a completion: not if its environment failed."""
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
        elif twin in result.values:  # in neither if calls were skipped: the run stops
            result.values[index] = result.values[twin]
    result.failures = dict(sorted(result.failures.items()))  # groups arrive in any order
    return result
