"""`cache: true`: equal completions of equal prompts are scored only once per run."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from rloo_cli.rewards.engine.arguments import CompletionTable
from rloo_cli.rewards.engine.build import Reward

MAX_CACHED_SCORES = 100_000  # scores kept per reward; the oldest are dropped first


@dataclass
class CachePlan:
    """The completions of one step to call a reward for, and the sources of the others' scores."""

    cached_scores: dict[int, float | None] = field(default_factory=dict)  # index -> earlier score
    duplicate_of: dict[int, int] = field(default_factory=dict)  # index -> index of the equal one
    index_of_key: dict[Hashable, int] = field(default_factory=dict)  # of those to call it for

    def select_uncached(
        self, reward: Reward, table: CompletionTable, indices: Sequence[int]
    ) -> list[int]:
        """The completions among `indices` to call the reward for: with `cache` only new ones."""
        if not reward.config.cache:
            return list(indices)
        uncached = []
        for index in indices:
            key = score_cache_key(table, index)
            if key in reward.score_cache:
                self.cached_scores[index] = reward.score_cache[key]
            elif key in self.index_of_key:
                self.duplicate_of[index] = self.index_of_key[key]
            else:
                self.index_of_key[key] = index
                uncached.append(index)
        return uncached


def cache_scores(reward: Reward, table: CompletionTable, values: dict[int, float | None]) -> None:
    """With `cache`, store the scores of completions (by index) that did not fail."""
    if not reward.config.cache:
        return
    for index, value in values.items():
        reward.score_cache[score_cache_key(table, index)] = value
    while len(reward.score_cache) > MAX_CACHED_SCORES:
        del reward.score_cache[next(iter(reward.score_cache))]


def score_cache_key(table: CompletionTable, index: int) -> Hashable:
    """A key that is equal for completions that must have the same score.

    All columns are part of it: one prompt with two gold answers makes two questions.
    """
    group, rollout = table.group_and_rollout(index)
    if group.media is not None:
        return object()  # two prompts may have equal text but different images
    if not _has_exact_repr(group.example) or not _has_exact_repr(group.prompt):
        return object()  # an image's repr is its address, which may be reused
    return repr(group.prompt), repr(group.example), tuple(rollout.completion_ids)


def _has_exact_repr(value: object) -> bool:
    """Whether equal repr() means an equal value."""
    if isinstance(value, dict):
        return all(_has_exact_repr(v) for v in value.values())
    if isinstance(value, list | tuple):
        return all(_has_exact_repr(v) for v in value)
    return isinstance(value, str | int | float | bytes | None)
