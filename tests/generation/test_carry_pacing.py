"""Capacity and order of overlap=carry: no group is too old or forgotten, whatever takes long."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rloo_cli.generation.common.pacing import group_capacity, keeps_deadlines


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 8), st.data())
def test_no_bound_is_passed_and_nobody_waits_for_ever(
    max_lag: int, per_step: int, num_steps: int, data: st.DataObject
) -> None:
    begun: list[int] = []  # the step whose weights each group was begun with
    finished: set[int] = set()
    for step in range(num_steps):
        most = group_capacity(step, max_lag, per_step, num_steps)
        while len(begun) < most and data.draw(st.booleans()):  # the sampler may be slow to begin
            begun.append(step)
        oldest = range(step * per_step, (step + 1) * per_step)
        while not finished >= {*oldest}:
            # Anything may happen next, in any order, but for nothing.
            unfinished = [g for g in range(len(begun)) if g not in finished]
            if len(begun) < most and (not unfinished or data.draw(st.booleans())):
                begun.append(step)
            else:
                assert unfinished, "it waits, and nothing is under way"
                finished.add(data.draw(st.sampled_from(unfinished)))
        assert all(step - begun[group] <= max_lag for group in oldest)
        left = [begun[group] + max_lag for group in range(oldest.stop, len(begun))]
        assert keeps_deadlines(left, step + 1, per_step)
    assert len(begun) == num_steps * per_step


@pytest.mark.parametrize(
    ("step", "most"), [(0, 12), (1, 16), (7, 40), (8, 40)], ids=["first", "second", "last", "end"]
)
def test_capacity_is_that_of_the_steps_that_may_still_train_on_it(step: int, most: int) -> None:
    assert group_capacity(step, 2, 4, 10) == most


def test_a_step_that_takes_fewer_groups_than_before_may_miss_a_deadline() -> None:
    deadlines = [2] * 4 + [3] * 4
    assert keeps_deadlines(deadlines, 2, 4) and not keeps_deadlines(deadlines, 2, 3)
