"""Virtual time: the order of groups that no clock decides, and micro-batches filled in it."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rloo_cli.data.batch import Group, Rollout
from rloo_cli.data.bin_packing import ForwardCost, ForwardLimits
from rloo_cli.data.virtual_time import order_groups, released_groups, virtual_order

COST = ForwardCost(1, 1, 1, 1, 1)
Lengths = list[list[int]]  # of each group's completions
GROUPS = st.integers(1, 3).flatmap(
    lambda k: st.lists(st.lists(st.integers(1, 12), min_size=k, max_size=k), min_size=1, max_size=7)
)


@dataclass
class Draws:
    """What is known of completions of these lengths while they are drawn."""

    lengths: Lengths
    drawn: Lengths

    def released(self) -> list[int]:
        pairs = [[*zip(d, n, strict=True)] for d, n in zip(self.drawn, self.lengths, strict=True)]
        finished = [all(drawn == length for drawn, length in group) for group in pairs]
        at_least = [max(d + (d < length) for d, length in group) for group in pairs]
        return released_groups(at_least, finished)


@settings(max_examples=60, deadline=None)
@given(GROUPS, st.data())
def test_what_is_released_is_final_whatever_order_tokens_arrive_in(
    lengths: Lengths, data: st.DataObject
) -> None:
    final = virtual_order([max(group) for group in lengths])
    draws = Draws(lengths, [[0] * len(group) for group in lengths])
    unfinished = [(i, k) for i, group in enumerate(lengths) for k in range(len(group))]
    last: list[int] = []
    while unfinished:
        place = data.draw(st.integers(0, len(unfinished) - 1))
        i, k = unfinished[place]
        left = lengths[i][k] - draws.drawn[i][k]
        draws.drawn[i][k] += data.draw(st.integers(1, left))
        if draws.drawn[i][k] == lengths[i][k]:
            unfinished.pop(place)
        released = draws.released()
        assert released == final[: len(released)] and len(released) >= len(last)
        last = released
    assert last == final


def test_a_group_is_released_before_the_others_are_whole() -> None:
    draws = Draws([[2, 3], [9, 4], [3, 1]], [[2, 3], [4, 4], [2, 1]])
    assert draws.released() == [0]  # group 2 has drawn two tokens: it may end with its third
    draws.drawn[2][0] = 3
    assert draws.released() == [0, 2]
    assert Draws(draws.lengths, draws.lengths).released() == [0, 2, 1]


def group(prompt: int, *lengths: int) -> Group:
    rollouts = [Rollout([7] * n, "", "stop", True, 0, 0) for n in lengths]
    return Group(0, {}, "", [7] * prompt, rollouts)


@pytest.mark.parametrize(
    ("layout", "completions", "filled"),
    [
        ("shared", None, [[1, 2], [0], [3]]),  # 4+1+2 and 4+3+1; 4+5+2; 4+9+7: 20 at most
        ("packed", None, [[1], [2], [0], [3], [3]]),  # a prompt each; 4+9+4+7 is cut
        ("padded", None, [[1], [2], [0], [3], [3]]),  # 2*(4+2), 2*(4+3), 2*(4+5); 2*(4+9) is cut
        ("shared", 4, [[1, 2], [0, 3]]),
    ],
)
def test_micro_batches_are_filled_one_after_the_other(
    layout: str, completions: int | None, filled: list[list[int]]
) -> None:
    groups = [group(4, 5, 2), group(4, 1, 2), group(4, 3, 1), group(4, 9, 7)]
    limits = ForwardLimits(COST, 20, 40, completions, completions)
    filler = limits.make_filler(layout, 2, grad=True)
    order = order_groups(groups, range(4))
    assert order == [1, 2, 0, 3]
    items = [item for i in order for item in filler.group_items(groups, i, [0, 1])]
    (micro_batches,) = filler.pack_items(items, in_order=True, ranks=1)
    found = [[i for i, _ in slices] for slices in micro_batches]
    assert found == filled
    two = filler.pack_items(items, in_order=True, ranks=2)
    assert two[0] == micro_batches[::2] and [m for m in two[1] if m] == micro_batches[1::2]
