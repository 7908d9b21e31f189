"""`cache: true`: an equal completion of an equal prompt is scored once, over the whole run."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rloo_cli.rewards.engine.arguments import CompletionTable
from rloo_cli.rewards.engine.build import Reward

MAX_CACHED_SCORES = 100_000  # scores kept per reward, the oldest go first


@dataclass
class CachePlan:
    """What a reward has to be asked in one step."""

    cached_scores: dict[int, float | None] = field(default_factory=dict)  # row -> remembered score
    duplicate_of: dict[int, int] = field(default_factory=dict)  # row -> the equal row that is asked
    index_of_key: dict[Any, int] = field(
        default_factory=dict
    )  # a row's key -> the row that is asked

    def select_uncached(
        self, reward: Reward, table: CompletionTable, indices: Sequence[int]
    ) -> list[int]:
        """Which of these further rows to call it for: with `cache` those that are new, once."""
        if not reward.config.cache:
            return list(indices)
        asked = []
        for row in indices:
            key = score_cache_key(table, row)
            if key in reward.score_cache:
                self.cached_scores[row] = reward.score_cache[key]
            elif key in self.index_of_key:
                self.duplicate_of[row] = self.index_of_key[key]
            else:
                self.index_of_key[key] = row
                asked.append(row)
        return asked


def cache_scores(reward: Reward, table: CompletionTable, values: dict[int, float | None]) -> None:
    """With `cache`, keep the scores of rows that did not fail."""
    if not reward.config.cache:
        return
    for row, value in values.items():
        reward.score_cache[score_cache_key(table, row)] = value
    while len(reward.score_cache) > MAX_CACHED_SCORES:
        del reward.score_cache[next(iter(reward.score_cache))]


def score_cache_key(table: CompletionTable, index: int) -> Any:
    """Equal for rows that have the same score. The other columns count too: one prompt with two
    gold answers is not one question."""
    group, rollout = table.group_and_rollout(index)
    if not _has_exact_repr(group.example) or not _has_exact_repr(group.prompt):
        return object()  # an image's repr is its address, which another one may have later
    return repr(group.prompt), repr(group.example), tuple(rollout.completion_ids)


def _has_exact_repr(value: Any) -> bool:
    """Whether repr() tells this value from every other."""
    if isinstance(value, dict):
        return all(_has_exact_repr(v) for v in value.values())
    if isinstance(value, list | tuple):
        return all(_has_exact_repr(v) for v in value)
    return isinstance(value, str | int | float | bytes | None)
