"""Which completions share a forward pass: bins of whole groups under a budget of tokens.

This is pure arithmetic on lengths, the same on every rank: ranks exchange only lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:  # a plan computes costs without torch
    from rloo_cli.data.batch import Group
    from rloo_cli.data.packing import GroupSlice

T = TypeVar("T")


@dataclass(frozen=True)
class ForwardCost:
    """The cost of a model's forward pass: FLOP = 2 N tokens + 4 L q pairs + 2 h V tokens."""

    layer_params: int  # N, parameters of all layers
    num_layers: int  # L
    attention_width: int  # q = heads * head_dim
    hidden_size: int  # h
    vocab_size: int  # V

    def group_flops(self, prompt_length: int, completion_lengths: Sequence[int]) -> float:
        """FLOP of one forward over a prompt and its completions, the prompt once."""
        completion_tokens = sum(completion_lengths)
        pairs = prompt_length**2 / 2 + sum(c * prompt_length + c**2 / 2 for c in completion_lengths)
        layers = 2.0 * self.layer_params * (prompt_length + completion_tokens)
        attention = 4.0 * self.num_layers * self.attention_width * pairs
        return layers + attention + 2.0 * self.hidden_size * self.vocab_size * completion_tokens


@dataclass(frozen=True)
class ForwardLimits:
    """The limits of one forward pass. A limit of completions replaces that of tokens."""

    cost: ForwardCost
    tokens: int
    no_grad_tokens: int  # for a pass without gradient, which keeps no activations
    completions: int | None = None
    no_grad_completions: int | None = None


@dataclass(frozen=True)
class PackingItem:
    """A group, or some completions of one, with the tokens and the cost of its forward pass."""

    group_slice: GroupSlice
    tokens: int
    flops: float
    longest_sequence: int  # prompt and longest completion


def forward_tokens(prompt_length: int, completion_lengths: Sequence[int], layout: str) -> int:
    """Tokens of a forward pass over a group alone, padding included."""
    if layout == "shared":
        return prompt_length + sum(completion_lengths)
    if layout == "packed":
        return prompt_length * len(completion_lengths) + sum(completion_lengths)
    return (prompt_length + max(completion_lengths)) * len(completion_lengths)


def split_group(
    group_slice: GroupSlice, prompt_length: int, lengths: Sequence[int], budget: int, layout: str
) -> list[GroupSlice]:
    """Split a group that is over the budget into parts that each repeat the prompt.

    One completion is never split, however long. `lengths` are those of the slice's completions.
    """
    i, ks = group_slice
    parts: list[list[int]] = [[]]
    for n in range(len(ks)):
        chosen = [lengths[m] for m in (*parts[-1], n)]
        if parts[-1] and forward_tokens(prompt_length, chosen, layout) > budget:
            parts.append([])
        parts[-1].append(n)
    return [(i, tuple(ks[n] for n in part)) for part in parts]


def packing_items(
    group_index: int,
    prompt_length: int,
    lengths: Mapping[int, int],
    budget: int,
    layout: str,
    cost: ForwardCost,
) -> list[PackingItem]:
    """A group as one item, or as several if it is over the budget of tokens.

    `lengths`: of the completions that are forwarded, by their index in the group.
    """
    slices = [(group_index, tuple(lengths))]
    values = list(lengths.values())
    if forward_tokens(prompt_length, values, layout) > budget:
        slices = split_group(slices[0], prompt_length, values, budget, layout)
    items = []
    for group_slice in slices:
        part = [lengths[k] for k in group_slice[1]]
        tokens = forward_tokens(prompt_length, part, layout)
        flops = cost.group_flops(prompt_length, part)
        items.append(PackingItem(group_slice, tokens, flops, prompt_length + max(part)))
    return items


def balance_micro_batches(
    groups: Sequence[Group],
    slices: Sequence[GroupSlice],
    layout: str,
    budget: int,
    cost: ForwardCost,
    ranks: int,
) -> list[list[list[GroupSlice]]]:
    """Each rank's micro-batches of equal work; a group above the budget of tokens is cut."""
    items = []
    for index, completions in slices:
        group = groups[index]
        lengths = {k: len(group.rollouts[k].completion_ids) for k in completions}
        items += packing_items(index, len(group.prompt_ids), lengths, budget, layout, cost)
    padded = layout == "padded"
    return (pack_padded_micro_batches if padded else pack_micro_batches)(items, budget, ranks)


def pack_micro_batches(
    items: Sequence[PackingItem], budget: int, ranks: int = 1
) -> list[list[list[GroupSlice]]]:
    """Micro-batches of each rank: equally many on each, none empty if possible.

    The costliest item goes to the rank with the least work, and then likewise into that rank's
    micro-batches (LPT: R. L. Graham, 1969), of which there are as few as the fullest rank needs. In
    each rank the costliest micro-batch comes first, so that ranks that wait for each other in every
    micro-batch wait little. A rank with too few items has empty micro-batches at the end.
    """
    shares = _items_per_rank(items, ranks)
    # An item that alone is over the budget fills one micro-batch.
    rank_tokens = [sum(min(item.tokens, budget) for item in share) for share in shares]
    count = max((-(-tokens // budget) for tokens in rank_tokens), default=0)
    while True:
        packed = [_fill_micro_batches(share, count, budget) for share in shares]
        by_rank = [micro_batches for micro_batches in packed if micro_batches is not None]
        if len(by_rank) == len(packed):
            return by_rank
        count += 1


def _items_per_rank(items: Sequence[PackingItem], ranks: int) -> list[list[PackingItem]]:
    """Each rank's items: the costliest goes to the rank with the least work."""
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
    """Each rank's padded micro-batches: like lengths together, at most `budget` tokens."""
    shares = _items_per_rank(items, ranks)
    return equalize_micro_batches([_pack_by_length(share, budget) for share in shares])


def deal_micro_batches(
    slices: Sequence[GroupSlice], num_groups: int, ranks: int
) -> list[list[list[GroupSlice]]]:
    """Micro-batches of `num_groups` groups in their order, dealt out to the ranks in turn."""
    micro_batches = split_chunks(slices, num_groups)
    return equalize_micro_batches([micro_batches[rank::ranks] for rank in range(ranks)])


def equalize_micro_batches(
    rank_micro_batches: list[list[list[GroupSlice]]],
) -> list[list[list[GroupSlice]]]:
    """Give each rank equally many micro-batches, by adding empty ones at the end."""
    most = max(len(share) for share in rank_micro_batches)
    return [[*share, *([] for _ in range(most - len(share)))] for share in rank_micro_batches]


def _pack_by_length(items: Sequence[PackingItem], budget: int) -> list[list[GroupSlice]]:
    micro_batches: list[list[GroupSlice]] = []
    size, width = 0, 0  # completions of the last micro-batch, and tokens that each takes
    for item in sorted(items, key=lambda item: (-item.longest_sequence, item.group_slice)):
        count = len(item.group_slice[1])
        if micro_batches and (size + count) * width <= budget:
            micro_batches[-1].append(item.group_slice)
            size += count
        else:
            micro_batches.append([item.group_slice])
            size, width = count, item.longest_sequence
    return [sorted(group_slices) for group_slices in micro_batches]


def _fill_micro_batches(
    items: Sequence[PackingItem], count: int, budget: int
) -> list[list[GroupSlice]] | None:
    """Put the items in `count` bins, the costliest bin first; None if one does not fit.

    An item that alone is over the budget gets its own bin.
    """
    bins: list[list[PackingItem]] = [[] for _ in range(count)]
    for item in items:  # the costliest first
        fits = [b for b in bins if not b or sum(i.tokens for i in b) + item.tokens <= budget]
        if not fits:
            return None
        min(fits, key=lambda b: sum(i.flops for i in b)).append(item)
    bins.sort(key=lambda b: -sum(i.flops for i in b))
    return [sorted(item.group_slice for item in b) for b in bins]


def split_chunks(items: Sequence[T], size: int) -> list[list[T]]:
    """Cut into consecutive chunks of at most `size` items."""
    return [list(items[i : i + size]) for i in range(0, len(items), size)]
