"""Which completions share a forward pass: bins of whole groups under a budget of rows.

Pure arithmetic on lengths, the same on every rank: ranks need exchange nothing but these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:  # a plan asks what a forward costs, and imports no torch
    from rloo_cli.data.packing import Part

T = TypeVar("T")


@dataclass(frozen=True)
class Shape:
    """What a forward pass costs a model. u = 2 N rows + 4 L q pairs + 2 h V tokens."""

    body: int  # N, parameters of the layers
    layers: int  # L
    width: int  # q = heads * head_dim
    hidden: int  # h
    vocabulary: int  # V

    def group(self, prompt: int, completions: Sequence[int]) -> float:
        """FLOP of one forward over a prompt and its completions, the prompt once."""
        rows = prompt + sum(completions)
        pairs = prompt**2 / 2 + sum(c * prompt + c**2 / 2 for c in completions)
        head = 2.0 * self.hidden * self.vocabulary * sum(completions)
        return 2.0 * self.body * rows + 4.0 * self.layers * self.width * pairs + head


@dataclass(frozen=True)
class Limits:
    """How much one forward pass may hold. Completions, where given, count instead of rows."""

    shape: Shape
    rows: int
    no_grad_rows: int  # of a pass without gradient, which keeps nothing
    completions: int | None = None
    no_grad_completions: int | None = None


@dataclass(frozen=True)
class Item:
    """A group, or a part of one: what it takes and what it costs."""

    part: Part
    rows: int
    cost: float
    longest: int  # prompt and longest completion


def rows_of(prompt: int, completions: Sequence[int], layout: str) -> int:
    """Places a forward computes for a group alone."""
    if layout == "shared":
        return prompt + sum(completions)
    if layout == "packed":
        return prompt * len(completions) + sum(completions)
    return (prompt + max(completions)) * len(completions)


def split(part: Part, prompt: int, lengths: Sequence[int], budget: int, layout: str) -> list[Part]:
    """A group that is over the budget, cut into parts that each have the prompt again.

    One completion is never cut, however long. `lengths` are those of the part's completions.
    """
    i, ks = part
    parts: list[list[int]] = [[]]
    for n in range(len(ks)):
        chosen = [lengths[m] for m in (*parts[-1], n)]
        if parts[-1] and rows_of(prompt, chosen, layout) > budget:
            parts.append([])
        parts[-1].append(n)
    return [(i, tuple(ks[n] for n in found)) for found in parts]


def bins(items: Sequence[Item], budget: int, ranks: int = 1) -> list[list[list[Part]]]:
    """Micro-batches of each rank: equally many on each, none empty if it can be helped.

    The dearest item goes to the rank with the least work, and then likewise into that rank's
    micro-batches (LPT: R. L. Graham, 1969), of which there are as few as the fullest rank can do
    with; in each rank the dearest micro-batch comes first, so that ranks that wait for each other
    in every one wait little. A rank with too few items has empty micro-batches at the end.
    """
    shares = _shares(items, ranks)
    # One that is over the budget by itself fills one micro-batch.
    held = [sum(min(item.rows, budget) for item in share) for share in shares]
    count = max((-(-rows // budget) for rows in held), default=0)
    while True:
        made = [_fill(share, count, budget) for share in shares]
        if all(found is not None for found in made):
            return [found for found in made if found is not None]
        count += 1


def _shares(items: Sequence[Item], ranks: int) -> list[list[Item]]:
    """Each rank's items: the dearest goes to the rank with the least work."""
    shares: list[list[Item]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for item in sorted(items, key=lambda item: (-item.cost, item.part)):
        least = load.index(min(load))
        shares[least].append(item)
        load[least] += item.cost
    return shares


def strips(items: Sequence[Item], budget: int, ranks: int = 1) -> list[list[list[Part]]]:
    """Each rank's micro-batches for padded rows: like lengths together, at most `budget` places."""
    shares = _shares(items, ranks)
    return even([_strips(share, budget) for share in shares])


def deal(micros: Sequence[list[Part]], ranks: int) -> list[list[list[Part]]]:
    """Micro-batches dealt out to the ranks in turn."""
    return even([list(micros[rank::ranks]) for rank in range(ranks)])


def even(shares: list[list[list[Part]]]) -> list[list[list[Part]]]:
    """Equally many micro-batches for each rank: empty ones at the end make up the difference."""
    most = max(len(share) for share in shares)
    return [[*share, *([] for _ in range(most - len(share)))] for share in shares]


def _strips(items: Sequence[Item], budget: int) -> list[list[Part]]:
    made: list[list[Part]] = []
    held, width = 0, 0  # rows and places of the last
    for item in sorted(items, key=lambda item: (-item.longest, item.part)):
        rows = len(item.part[1])
        if made and (held + rows) * width <= budget:
            made[-1].append(item.part)
            held += rows
        else:
            made.append([item.part])
            held, width = rows, item.longest
    return [sorted(parts) for parts in made]


def _fill(items: Sequence[Item], count: int, budget: int) -> list[list[Part]] | None:
    """The items in `count` bins, the dearest bin first; None when one does not fit.

    An item that is over the budget by itself gets a bin by itself.
    """
    held: list[list[Item]] = [[] for _ in range(count)]
    for item in items:  # the dearest first
        fits = [b for b in held if not b or sum(i.rows for i in b) + item.rows <= budget]
        if not fits:
            return None
        min(fits, key=lambda b: sum(i.cost for i in b)).append(item)
    held.sort(key=lambda b: -sum(i.cost for i in b))
    return [sorted(item.part for item in b) for b in held]


def slices(index: Sequence[T], size: int) -> list[list[T]]:
    """Consecutive runs of at most `size`."""
    return [list(index[i : i + size]) for i in range(0, len(index), size)]
