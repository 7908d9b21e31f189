"""Which completions share a forward pass: bins of whole groups under a budget of rows.

Pure arithmetic on lengths, the same on every rank: ranks need exchange nothing but these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:  # a plan asks what a forward costs, and imports no torch
    from rloo_cli.data.packing import GroupSlice

T = TypeVar("T")


@dataclass(frozen=True)
class ForwardCost:
    """What a forward pass costs a model. u = 2 N rows + 4 L q pairs + 2 h V tokens."""

    layer_params: int  # N, parameters of the layers
    num_layers: int  # L
    attention_width: int  # q = heads * head_dim
    hidden_size: int  # h
    vocab_size: int  # V

    def group_flops(self, prompt_length: int, completion_lengths: Sequence[int]) -> float:
        """FLOP of one forward over a prompt and its completions, the prompt once."""
        rows = prompt_length + sum(completion_lengths)
        pairs = prompt_length**2 / 2 + sum(c * prompt_length + c**2 / 2 for c in completion_lengths)
        head = 2.0 * self.hidden_size * self.vocab_size * sum(completion_lengths)
        return (
            2.0 * self.layer_params * rows
            + 4.0 * self.num_layers * self.attention_width * pairs
            + head
        )


@dataclass(frozen=True)
class ForwardLimits:
    """How much one forward pass may hold. Completions, where given, count instead of rows."""

    cost: ForwardCost
    tokens: int
    no_grad_tokens: int  # of a pass without gradient, which keeps nothing
    completions: int | None = None
    no_grad_completions: int | None = None


@dataclass(frozen=True)
class PackingItem:
    """A group, or a part of one: what it takes and what it costs."""

    group_slice: GroupSlice
    tokens: int
    flops: float
    longest_sequence: int  # prompt and longest completion


def forward_tokens(prompt_length: int, completion_lengths: Sequence[int], layout: str) -> int:
    """Places a forward computes for a group alone."""
    if layout == "shared":
        return prompt_length + sum(completion_lengths)
    if layout == "packed":
        return prompt_length * len(completion_lengths) + sum(completion_lengths)
    return (prompt_length + max(completion_lengths)) * len(completion_lengths)


def split_group(
    group_slice: GroupSlice, prompt_length: int, lengths: Sequence[int], budget: int, layout: str
) -> list[GroupSlice]:
    """A group that is over the budget, cut into parts that each have the prompt again.

    One completion is never cut, however long. `lengths` are those of the part's completions.
    """
    i, ks = group_slice
    parts: list[list[int]] = [[]]
    for n in range(len(ks)):
        chosen = [lengths[m] for m in (*parts[-1], n)]
        if parts[-1] and forward_tokens(prompt_length, chosen, layout) > budget:
            parts.append([])
        parts[-1].append(n)
    return [(i, tuple(ks[n] for n in found)) for found in parts]


def pack_micro_batches(
    items: Sequence[PackingItem], budget: int, ranks: int = 1
) -> list[list[list[GroupSlice]]]:
    """Micro-batches of each rank: equally many on each, none empty if it can be helped.

    The dearest item goes to the rank with the least work, and then likewise into that rank's
    micro-batches (LPT: R. L. Graham, 1969), of which there are as few as the fullest rank can do
    with; in each rank the dearest micro-batch comes first, so that ranks that wait for each other
    in every one wait little. A rank with too few items has empty micro-batches at the end.
    """
    shares = _items_per_rank(items, ranks)
    # One that is over the budget by itself fills one micro-batch.
    held = [sum(min(item.tokens, budget) for item in share) for share in shares]
    count = max((-(-rows // budget) for rows in held), default=0)
    while True:
        made = [_fill_micro_batches(share, count, budget) for share in shares]
        if all(found is not None for found in made):
            return [found for found in made if found is not None]
        count += 1


def _items_per_rank(items: Sequence[PackingItem], ranks: int) -> list[list[PackingItem]]:
    """Each rank's items: the dearest goes to the rank with the least work."""
    shares: list[list[PackingItem]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for item in sorted(items, key=lambda item: (-item.flops, item.group_slice)):
        least = load.index(min(load))
        shares[least].append(item)
        load[least] += item.flops
    return shares


def pack_padded_micro_batches(
    items: Sequence[PackingItem], budget: int, ranks: int = 1
) -> list[list[list[GroupSlice]]]:
    """Each rank's micro-batches for padded rows: like lengths together, at most `budget` places."""
    shares = _items_per_rank(items, ranks)
    return equalize_micro_batches([_pack_by_length(share, budget) for share in shares])


def deal_micro_batches(
    micro_batches: Sequence[list[GroupSlice]], ranks: int
) -> list[list[list[GroupSlice]]]:
    """Micro-batches dealt out to the ranks in turn."""
    return equalize_micro_batches([list(micro_batches[rank::ranks]) for rank in range(ranks)])


def equalize_micro_batches(
    rank_micro_batches: list[list[list[GroupSlice]]],
) -> list[list[list[GroupSlice]]]:
    """Equally many micro-batches for each rank: empty ones at the end make up the difference."""
    most = max(len(share) for share in rank_micro_batches)
    return [[*share, *([] for _ in range(most - len(share)))] for share in rank_micro_batches]


def _pack_by_length(items: Sequence[PackingItem], budget: int) -> list[list[GroupSlice]]:
    made: list[list[GroupSlice]] = []
    held, width = 0, 0  # rows and places of the last
    for item in sorted(items, key=lambda item: (-item.longest_sequence, item.group_slice)):
        rows = len(item.group_slice[1])
        if made and (held + rows) * width <= budget:
            made[-1].append(item.group_slice)
            held += rows
        else:
            made.append([item.group_slice])
            held, width = rows, item.longest_sequence
    return [sorted(parts) for parts in made]


def _fill_micro_batches(
    items: Sequence[PackingItem], count: int, budget: int
) -> list[list[GroupSlice]] | None:
    """The items in `count` bins, the dearest bin first; None when one does not fit.

    An item that is over the budget by itself gets a bin by itself.
    """
    held: list[list[PackingItem]] = [[] for _ in range(count)]
    for item in items:  # the dearest first
        fits = [b for b in held if not b or sum(i.tokens for i in b) + item.tokens <= budget]
        if not fits:
            return None
        min(fits, key=lambda b: sum(i.flops for i in b)).append(item)
    held.sort(key=lambda b: -sum(i.flops for i in b))
    return [sorted(item.group_slice for item in b) for b in held]


def split_chunks(items: Sequence[T], size: int) -> list[list[T]]:
    """Consecutive runs of at most `size`."""
    return [list(items[i : i + size]) for i in range(0, len(items), size)]
