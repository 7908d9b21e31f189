"""The sampler of overlap=carry with a clock of its own: lags, prompts, and the time it saves."""

from unittest import mock

import pytest
from carry_cases import carrying, lockstep
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rloo_cli.generation.common import carry
from rloo_cli.run import Run

STEPS = 8


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """For its prompts and rewards; its own sampler is not used."""
    return carrying(tmp_path_factory.mktemp("carry"), "algorithm.num_generations=2")


def check_batch(batch: object, step: int, max_lag: int) -> set[int]:
    """A step's batch: every token's version is the one that its id tells. -> its prompts"""
    for group in batch.groups:  # type: ignore[attr-defined]
        for rollout in group.rollouts:
            got = [i - 20 for i in rollout.completion_ids]
            assert rollout.token_versions == got == sorted(got)
            assert rollout.behaviour_logp == [-1.0 - version for version in got]
            assert all(0 <= step - version <= max_lag for version in got)
            assert rollout.weight_version == got[0]
    offsets = [g.prompt_offset for g in batch.groups]  # type: ignore[attr-defined]
    assert offsets == sorted(offsets) and batch.left_out == []  # type: ignore[attr-defined]
    return {*offsets}


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.integers(1, 3), st.lists(st.integers(1, 30), min_size=64, max_size=64),
    st.lists(st.integers(1, 9), min_size=6, max_size=6), st.booleans(),
)  # fmt: skip
def test_every_tokens_version_is_told_and_no_prompt_is_lost_or_too_old(
    run: Run, max_lag: int, lengths: list[int], ticks: list[int], waits: bool
) -> None:
    generation = run.config.generation.model_copy(update={"max_lag": max_lag})
    config = run.config.model_copy(update={"generation": generation})
    with (
        mock.patch.object(run.rollouts, "config", config),
        mock.patch.object(carry, "WAITED_S", -1.0 if waits else 1e9),
    ):
        fake, sampler = lockstep(run, 6, lambda offset, k: lengths[2 * offset % 64 + k])
        trained: set[int] = set()
        for step, batch in enumerate(fake.drive(run, lambda step: ticks[step])):
            offsets = check_batch(batch, step, max_lag)
            assert len(offsets) == sampler.per_step and not offsets & trained
            trained |= offsets
            assert batch.pending is not None
            assert trained | {*batch.pending} == {*range(sampler.next_offset or 0)}
        assert trained == {*range(6 * sampler.per_step)} and not sampler.groups


def test_a_step_trains_on_the_prompts_that_it_has_without_overlap_however_long_they_take(
    run: Run,
) -> None:
    lengths = [1 + 37 * n % 29 for n in range(2 * STEPS * 16)]
    fake, sampler = lockstep(run, STEPS, lambda offset, k: lengths[2 * offset + k])
    for step, batch in enumerate(fake.drive(run, lambda step: 3)):
        first = step * sampler.per_step
        offsets = [group.prompt_offset for group in batch.groups]
        assert offsets == [*range(first, first + sampler.per_step)]


def test_more_groups_are_under_way_each_time_that_a_step_had_to_wait(run: Run) -> None:
    with mock.patch.object(carry, "WAITED_S", -1.0):
        fake, sampler = lockstep(run, STEPS, lambda offset, k: 1)
        under_way = [
            len(batch.pending or []) // sampler.per_step for batch in fake.drive(run, lambda _: 1)
        ]
    assert under_way == [1, 1, 2, 2, 2, 2, 1, 0]


def serial_starts(length: int, update: int, max_lag: int, num_steps: int) -> list[int]:
    """When each update begins: once the one before has ended, and its groups, which are begun
    `max_lag` updates before it is asked for, have finished."""
    starts: list[int] = []
    asked: list[int] = []
    for step in range(num_steps):
        asked.append(starts[-1] + update if starts else 0)
        begun = asked[step - max_lag] if step > max_lag else 0
        starts.append(max(asked[step], begun + length))
    return starts


@pytest.mark.parametrize(
    ("length", "update", "max_lag"), [(4, 5, 1), (10, 5, 2), (14, 7, 2), (30, 5, 2), (30, 5, 3)]
)
def test_the_makespan_is_that_of_the_formula(
    run: Run, length: int, update: int, max_lag: int
) -> None:
    """So sampling and training do happen at the same time; no wall clock is asked."""
    steps = STEPS
    generation = run.config.generation.model_copy(update={"max_lag": max_lag})
    config = run.config.model_copy(update={"generation": generation})
    with (
        mock.patch.object(run.rollouts, "config", config),
        mock.patch.object(carry, "WAITED_S", -1.0),  # as many groups as the bound allows
    ):
        fake, _ = lockstep(run, steps, lambda offset, k: length)
        fake.sampler.depth = max_lag + 1
        starts = [fake.now for _ in fake.drive(run, lambda step: update)]
    assert starts == serial_starts(length, update, max_lag, steps)
    assert fake.now == starts[-1] + update
    if length <= max_lag * update:
        assert fake.now == length + steps * update  # all but the first batch is hidden
    assert fake.now < steps * (length + update)
