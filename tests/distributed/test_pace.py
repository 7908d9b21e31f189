"""Ranks ask each other about once a second whether one was told to end, at the same places."""

import threading
from dataclasses import replace

import pytest
from two_ranks import two_ranks

from rloo_cli.distributed.world import MAX_POLLS_SKIPPED, StopPoll, World
from rloo_cli.utils import signals
from rloo_cli.utils.errors import Stopped


class Counted(StopPoll):
    """With a clock that a test sets, and the places at which the ranks met."""

    def __init__(self) -> None:
        super().__init__(lambda: self.now)
        self.now, self.index, self.places = 0.0, 0, list[int]()

    def record_poll(self, slowest_s: float, frequent: bool) -> None:
        self.places.append(self.index)
        super().record_poll(slowest_s, frequent)


def go(world: World, pace: Counted, seconds: list[float]) -> None:
    """Pieces of work that take so long."""
    for took in seconds:
        pace.index += 1
        world.check_stop(frequent=True)
        pace.now += took


def meetings(slow: list[list[float]]) -> list[list[int]]:
    """Where two ranks meet, whose pieces of work take so long."""

    def work(world: World) -> list[int]:
        pace = Counted()
        go(replace(world, stop_poll=pace), pace, slow[world.rank])
        return pace.places

    return two_ranks(work)


def test_ranks_meet_at_the_same_pieces_about_once_a_second_by_the_slower_clock():
    one, other = meetings([[1 / 64] * 100, [1 / 16] * 100])
    assert one == other
    assert one == [1, 2, *range(18, 100, 16)]


def test_long_pieces_are_never_skipped_and_short_ones_not_for_ever():
    one, other = meetings([[2.0] * 9, [0.001] * 9])
    assert one == other == [*range(1, 10)]
    one, other = meetings([[1e-6] * 100, [1e-6] * 100])
    assert (
        one
        == other
        == [1, 2, 2 + MAX_POLLS_SKIPPED, 2 + 2 * MAX_POLLS_SKIPPED, 2 + 3 * MAX_POLLS_SKIPPED]
    )
    sudden = [1 / 16] * 17 + [3.0] * 30
    one, _ = meetings([sudden, sudden])
    assert one[3:] == [*range(34, 48)]


def test_what_is_asked_alone_is_asked_always_and_the_next_piece_too():
    def work(world: World) -> list[int]:
        pace = Counted()
        own = replace(world, stop_poll=pace)
        go(own, pace, [1 / 16] * 5)
        pace.now += 60  # an evaluation is no piece of work
        pace.index = 0
        own.check_stop()
        own.check_stop()
        pace.now += 60
        go(own, pace, [1 / 16] * 30)
        return pace.places

    one, other = two_ranks(work)
    assert one == other == [1, 2, 0, 0, 1, 2, 18]


def test_small_pieces_say_nothing_of_what_comes_after_a_question_alone():
    def work(world: World) -> list[int]:
        pace = Counted()
        own = replace(world, stop_poll=pace)
        go(own, pace, [1 / 16] * 5)
        own.check_stop()
        go(own, pace, [1 / 16] * 5)
        return pace.places

    one, other = two_ranks(work)
    assert one == other == [1, 2, 5, 6, 7]


def test_a_signal_to_one_rank_is_heard_by_both_at_one_piece_within_a_second(monkeypatch):
    here = threading.local()  # a rank is a thread here
    monkeypatch.setattr(signals, "stop_requested_at", lambda: getattr(here, "asked", None))
    monkeypatch.setattr(signals, "raise_if_stopped", lambda: None)

    def work(world: World) -> tuple[int, float]:
        pace = Counted()
        own = replace(world, stop_poll=pace)
        go(own, pace, [1 / 16] * 30)
        if world.rank == 1:
            here.asked = 1.0
        began = pace.now
        with pytest.raises(Stopped):
            go(own, pace, [1 / 16] * 100)
        return pace.index, pace.now - began

    (one, after), (other, _) = two_ranks(work)
    assert one == other == 34 and after <= 1.0
