"""Early stopping by halving: at a step, the best go on and the others stop.

A member's worth there is the mean of a metric over the last chunk of steps up to that step: one
step alone is noise. Who comes first waits for the others, so that all are compared at one step.
"""

from collections.abc import Mapping, Sequence
from math import isfinite, nan
from typing import Any

from rloo_cli.launch.sweep.state import Rung

LEAST = ":min"  # behind a metric of which less is better


def pending(rungs: Sequence[Rung]) -> Rung | None:
    """The next one that is not decided."""
    return next((rung for rung in rungs if not rung.done), None)


def until(step: int, chunk: int, rung: Rung | None) -> int:
    """Where the chunk after `step` ends: at multiples of the chunk, and at the rung."""
    end = (step // chunk + 1) * chunk
    return min(end, rung.at) if rung is not None and step < rung.at else end


def worth(rows: Sequence[Mapping[str, Any]], rung: Rung, chunk: int) -> float:
    """What a member is worth at a rung, more is better; NaN where it has no such metric."""
    name = rung.by.removesuffix(LEAST)
    known = [row for row in rows if row["step"] <= rung.at and isfinite(row.get(name, nan))]
    recent = [row[name] for row in known if row["step"] > rung.at - chunk]
    values = recent or [row[name] for row in known[-1:]]
    if not values:
        return nan
    mean: float = sum(values) / len(values)
    return -mean if rung.by.endswith(LEAST) else mean


def sorted_out(worths: Mapping[int, float], rung: Rung) -> list[int]:
    """Numbers of the members that stop, the best of them first; an unknown worth is the worst."""

    def order(number: int) -> tuple[bool, float, int]:
        value = worths[number]
        return not isfinite(value), -value if isfinite(value) else 0.0, number

    return sorted(worths, key=order)[rung.keep :]
