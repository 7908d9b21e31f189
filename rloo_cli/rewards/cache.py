"""`cache: true`: an equal completion of an equal prompt is scored once, over the whole run."""

from dataclasses import dataclass, field
from typing import Any

from rloo_cli.rewards.arguments import Table
from rloo_cli.rewards.build import Reward

REMEMBERED = 100_000  # scores kept per reward, the oldest go first


@dataclass
class Plan:
    """What a reward has to be asked."""

    rows: list[int]  # to call it for
    known: dict[int, float | None] = field(default_factory=dict)  # row -> remembered score
    twins: dict[int, int] = field(default_factory=dict)  # row -> the equal row that is asked


def plan(reward: Reward, table: Table) -> Plan:
    """All rows; with `cache`, only those that are new, equal ones once."""
    if not reward.config.cache:
        return Plan(list(range(len(table))))
    made = Plan([])
    first: dict[Any, int] = {}
    for row in range(len(table)):
        key = key_of(table, row)
        if key in reward.memory:
            made.known[row] = reward.memory[key]
        elif key in first:
            made.twins[row] = first[key]
        else:
            first[key] = row
            made.rows.append(row)
    return made


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
