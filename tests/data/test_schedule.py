"""Bins of whole groups under a budget of rows: nothing lost, nothing twice, and evenly."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rloo_cli.data.bin_packing import (
    ForwardCost,
    PackingItem,
    forward_tokens,
    pack_micro_batches,
    pack_padded_micro_batches,
    split_group,
)

LAYOUTS = ["shared", "packed", "padded"]
SHAPE = ForwardCost(
    layer_params=1000, num_layers=2, attention_width=8, hidden_size=4, vocab_size=10
)
quick = settings(max_examples=60, deadline=None)
lengths = st.lists(st.integers(1, 60), min_size=1, max_size=9)
sizes = st.lists(st.tuples(st.integers(1, 90), st.floats(0.5, 1e3)), min_size=1, max_size=25)


def items_of(found):
    return [PackingItem((i, (0, 1)), rows, cost, rows) for i, (rows, cost) in enumerate(found)]


def lognormal(count, seed=0, rows=None):
    draw = random.Random(seed)
    costs = [draw.lognormvariate(0, 1) for _ in range(count)]
    return items_of([(rows or max(1, round(20 * c)), c) for c in costs])


def parts_of(ranks):
    return sorted(part for rank in ranks for micro in rank for part in micro)


def cost_of(micro, items):
    costs = {item.group_slice: item.flops for item in items}
    return sum(costs[part] for part in micro)


def rows_in(micro, items):
    rows = {item.group_slice: item.tokens for item in items}
    return sum(rows[part] for part in micro)


def test_a_group_costs_what_its_matrix_products_cost():
    # rows 5 + 2 + 3; pairs 5*5/2 for the prompt, c*5 + c*c/2 for each completion; head on 5 tokens
    pairs = 12.5 + (10 + 2) + (15 + 4.5)
    assert SHAPE.group_flops(5, [2, 3]) == 2 * 1000 * 10 + 4 * 2 * 8 * pairs + 2 * 4 * 10 * 5


def test_sharing_a_prompt_costs_less_than_computing_it_for_each_completion():
    apart = SHAPE.group_flops(50, [3]) + SHAPE.group_flops(50, [4])
    once = 2 * 1000 * 50 + 4 * 2 * 8 * 50**2 / 2  # what one prompt costs
    assert SHAPE.group_flops(50, [3, 4]) == apart - once


def test_rows_of_a_group_by_layout():
    assert [forward_tokens(5, [2, 3, 1], layout) for layout in LAYOUTS] == [11, 21, 24]
    assert [forward_tokens(5, [4], layout) for layout in LAYOUTS] == [9, 9, 9]


@quick
@given(sizes, st.integers(1, 200), st.integers(1, 3))
def test_every_item_is_in_one_bin_and_every_bin_is_under_the_budget(found, budget, ranks):
    items = items_of(found)
    made = pack_micro_batches(items, budget, ranks)
    assert parts_of(made) == [item.group_slice for item in items]
    for micro in (micro for rank in made for micro in rank):
        assert len(micro) <= 1 or rows_in(micro, items) <= budget
        assert micro == sorted(micro)


@quick
@given(sizes, st.integers(1, 200), st.integers(1, 3))
def test_ranks_have_equally_many_bins_and_the_dearest_first(found, budget, ranks):
    items = items_of(found)
    made = pack_micro_batches(items, budget, ranks)
    assert len(made) == ranks and len({len(rank) for rank in made}) == 1
    for rank in made:
        costs = [cost_of(micro, items) for micro in rank]
        assert costs == sorted(costs, reverse=True)
    assert any(all(rank) for rank in made)  # no more bins than the fullest rank can fill


@quick
@given(sizes, st.integers(1, 200), st.integers(1, 3), st.randoms())
def test_bins_do_not_depend_on_the_order_the_items_come_in(found, budget, ranks, draw):
    items = items_of(found)
    mixed = draw.sample(items, len(items))
    assert pack_micro_batches(mixed, budget, ranks) == pack_micro_batches(items, budget, ranks)
    assert pack_padded_micro_batches(mixed, budget) == pack_padded_micro_batches(items, budget)


def test_an_item_over_the_budget_is_alone():
    made = pack_micro_batches(items_of([(5, 1.0), (500, 9.0), (5, 1.0)]), 100)
    assert made == [[[(1, (0, 1))], [(0, (0, 1)), (2, (0, 1))]]]  # and none is empty for its rows


def test_as_few_bins_as_the_rows_need_when_everything_fits():
    assert [len(m) for m in pack_micro_batches(items_of([(10, 1.0)] * 12), 40)[0]] == [4, 4, 4]
    assert len(pack_micro_batches(items_of([(10, 1.0)] * 12), 1000)[0]) == 1
    assert pack_micro_batches([], 100, 2) == [[], []]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("seed", range(3))
def test_ranks_get_nearly_equal_work(ranks, seed):
    items = lognormal(512, seed)
    load = [sum(cost_of(m, items) for m in rank) for rank in pack_micro_batches(items, 2000, ranks)]
    assert max(load) / (sum(load) / ranks) < 1.05


@pytest.mark.parametrize("seed", range(3))
def test_bins_of_a_rank_are_nearly_equal_work(seed):
    items = lognormal(256, seed, rows=10)
    (rank,) = pack_micro_batches(items, 640)
    load = [cost_of(m, items) for m in rank]
    assert len(load) >= 4 and max(load) / (sum(load) / len(load)) < 1.05


def test_a_rank_without_an_item_has_empty_bins_at_the_end():
    made = pack_micro_batches(items_of([(60, 5.0), (60, 4.0), (60, 3.0)]), 70, 2)
    assert made == [[[(0, (0, 1))], []], [[(1, (0, 1))], [(2, (0, 1))]]]


@quick
@given(st.integers(1, 60), lengths, st.integers(1, 300), st.sampled_from(LAYOUTS))
def test_a_group_is_cut_into_parts_under_the_budget_and_no_completion_is(
    prompt, found, budget, layout
):
    chosen = tuple(range(1, 2 * len(found), 2))  # not all that the group has
    parts = split_group((4, chosen), prompt, found, budget, layout)
    assert [k for _, ks in parts for k in ks] == list(chosen)
    assert all(i == 4 and ks for i, ks in parts)
    length = dict(zip(chosen, found, strict=True))
    for n, (_, ks) in enumerate(parts):
        own = [length[k] for k in ks]
        assert len(ks) == 1 or forward_tokens(prompt, own, layout) <= budget
        if n + 1 < len(parts):  # and none is smaller than it has to be
            more = [*own, length[parts[n + 1][1][0]]]
            assert forward_tokens(prompt, more, layout) > budget


def test_a_group_under_the_budget_is_one_part():
    assert split_group((2, (0, 3)), 5, [4, 4], 13, "shared") == [(2, (0, 3))]
    assert split_group((2, (0, 3)), 5, [4, 4], 12, "shared") == [(2, (0,)), (2, (3,))]


@quick
@given(sizes, st.integers(1, 300))
def test_strips_hold_at_most_the_budget_in_places(found, budget):
    items = items_of(found)
    made, longest = (
        pack_padded_micro_batches(items, budget)[0],
        {item.group_slice: item.longest_sequence for item in items},
    )
    assert parts_of([made]) == [item.group_slice for item in items]
    for micro in made:
        rows = sum(len(ks) for _, ks in micro)
        assert len(micro) == 1 or rows * max(longest[part] for part in micro) <= budget


def test_strips_keep_like_lengths_together():
    items = [PackingItem((i, (0,)), n, 1.0, n) for i, n in enumerate([50, 9, 48, 10, 8, 49])]
    assert pack_padded_micro_batches(items, 150)[0] == [
        [(0, (0,)), (2, (0,)), (5, (0,))],
        [(1, (0,)), (3, (0,)), (4, (0,))],
    ]
