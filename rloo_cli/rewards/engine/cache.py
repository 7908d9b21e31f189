"""`cache: true`: an equal completion of an equal prompt is scored once, over the whole run."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rloo_cli.rewards.engine.arguments import Table
from rloo_cli.rewards.engine.build import Reward

REMEMBERED = 100_000  # scores kept per reward, the oldest go first


@dataclass
class Plan:
    """What a reward has to be asked in one step."""

    known: dict[int, float | None] = field(default_factory=dict)  # row -> remembered score
    twins: dict[int, int] = field(default_factory=dict)  # row -> the equal row that is asked
    first: dict[Any, int] = field(default_factory=dict)  # a row's key -> the row that is asked

    def add(self, reward: Reward, table: Table, rows: Sequence[int]) -> list[int]:
        """Which of these further rows to call it for: with `cache` those that are new, once."""
        if not reward.config.cache:
            return list(rows)
        asked = []
        for row in rows:
            key = key_of(table, row)
            if key in reward.memory:
                self.known[row] = reward.memory[key]
            elif key in self.first:
                self.twins[row] = self.first[key]
            else:
                self.first[key] = row
                asked.append(row)
        return asked


def remember(reward: Reward, table: Table, values: dict[int, float | None]) -> None:
    """With `cache`, keep the scores of rows that did not fail."""
    if not reward.config.cache:
        return
    for row, value in values.items():
        reward.memory[key_of(table, row)] = value
    while len(reward.memory) > REMEMBERED:
        del reward.memory[next(iter(reward.memory))]


def key_of(table: Table, row: int) -> Any:
    """Equal for rows that have the same score. The other columns count too: one prompt with two
    gold answers is not one question."""
    group, rollout = table.at(row)
    if not _plain(group.row) or not _plain(group.prompt):
        return object()  # an image's repr is its address, which another one may have later
    return repr(group.prompt), repr(group.row), tuple(rollout.completion_ids)


def _plain(value: Any) -> bool:
    """Whether repr() tells this value from every other."""
    if isinstance(value, dict):
        return all(_plain(v) for v in value.values())
    if isinstance(value, list | tuple):
        return all(_plain(v) for v in value)
    return isinstance(value, str | int | float | bytes | None)
