"""Several processes that stand and fall together: signals, first causes, nobody left behind."""

import os
import signal
import time
from unittest import mock

import pytest
from assert_refused import assert_refused
from cli_cases import Ended
from rank_cases import Launchers, gone

from rloo_cli.utils import heartbeat

SOON = {"KILL_TIMEOUT_S": 1.5}


@pytest.mark.slow
def test_kill_9_of_one_of_two_ends_the_other_within_10_s_with_6_and_the_reason(
    launchers: Launchers,
) -> None:
    launched = launchers({0: "deaf", 1: "wait"})
    deaf, killed = launched.rank(0), launched.rank(1)
    began = time.monotonic()
    os.kill(killed["pid"], signal.SIGKILL)
    ended = Ended(launched.code(40), launched.said(), "")
    assert 7 < time.monotonic() - began < 30  # 10 are promised, on a quiet machine
    assert "SIGKILL" in assert_refused(ended, 6, "rank 1").what
    assert gone(deaf["pid"], deaf["child"])


def test_a_rank_that_was_stopped_is_killed_and_what_it_started_too(launchers: Launchers) -> None:
    launched = launchers({0: "deaf", 1: "exit:5:2"}, SOON)
    deaf = launched.rank(0)
    os.kill(deaf["pid"], signal.SIGSTOP)
    assert launched.code(15) == 5
    assert gone(deaf["pid"], deaf["child"]) and "killed" not in launched.said()


@pytest.mark.slow_but("plans0-5", "plans3-7", "plans6-6", "plans9-75")
@pytest.mark.parametrize(
    ("plans", "code"),
    [
        ({0: "exit:6:0.9", 1: "exit:5:0.3"}, 5),  # the first
        ({0: "exit:6:0.3", 1: "exit:5:0.5"}, 5),  # a lost connection gives way to its cause
        ({0: "exit:6:0.3", 1: "exit:7:1.8"}, 6),  # which came too late to be one
        ({0: "exit:7:0.3", 1: "exit:5:0.5"}, 7),
        ({0: "exit:0:0.3", 1: "exit:0:0.9"}, 0),
        ({0: "exit:0:0.3", 1: "exit:9:1.2"}, 9),
        ({0: "exit:1:0.6", 1: "kill:0.3"}, 6),  # what a bug makes of a rank that was killed
        ({0: "exit:6:0.3", 1: "kill:0.5"}, 6),
        ({0: "exit:75:0.3", 1: "kill:0.5"}, 6),
        ({0: "exit:75:0.3", 1: "exit:6:0.5"}, 75),
    ],
)
def test_the_code_is_that_of_the_first_cause(
    plans: dict[int, str], code: int, launchers: Launchers
) -> None:
    launched = launchers(plans, SOON)
    assert launched.code(15) == code
    named = "rank 1 was killed by SIGKILL" if plans[1].startswith("kill") else ""
    assert named in launched.said() and ("killed" in launched.said()) == bool(named)


def test_one_that_was_sent_a_signal_itself_has_told_the_others_who_may_end_by_themselves(
    launchers: Launchers,
) -> None:
    launched = launchers({0: "exit:75:0.2", 1: "exit:8:2"}, {"KILL_TIMEOUT_S": 0.8})
    assert launched.code(15) == 8  # what it was to save is not saved
    assert time.monotonic() - launched.began > 2  # not at 0.7 s, of a TERM


def test_those_who_do_not_are_ended_at_the_limit(launchers: Launchers) -> None:
    launched = launchers({0: "exit:75:0.2", 1: "deaf"}, {"STOP_TIMEOUT_S": 1})
    assert launched.code(8) == 75
    deaf = launched.facts(1)
    assert gone(deaf["pid"], deaf["child"])


@pytest.mark.slow_cases("SIGINT", "SIGUSR1")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP"])
def test_a_signal_reaches_every_rank_once(
    name: str, launchers: Launchers, hears_hangups: None
) -> None:
    launched = launchers({0: "signals", 1: "signals"})
    for rank in (0, 1):
        launched.rank(rank)
    launched.process.send_signal(signal.Signals[name])
    assert launched.code(15) == 75
    assert [launched.facts(i)["heard"] for i in (0, 1)] == [[signal.Signals[name]]] * 2


def test_a_closed_terminal_stops_nothing_under_nohup(launchers: Launchers) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup's doing; children inherit it
    try:
        launched = launchers({0: "exit:0:1.5", 1: "exit:0:1.5"})
    finally:
        signal.signal(signal.SIGHUP, before)
    launched.rank(0)
    launched.process.send_signal(signal.SIGHUP)
    assert launched.code(15) == 0


def test_a_second_interrupt_ends_all_at_once(launchers: Launchers) -> None:
    launched = launchers({0: "deaf", 1: "deaf"})
    pids = [launched.rank(i)[name] for i in (0, 1) for name in ("pid", "child")]
    launched.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    launched.process.send_signal(signal.SIGINT)
    assert launched.code(4) == 130
    assert gone(*pids) and "killed" not in launched.said()


def test_ranks_that_do_not_end_when_they_are_asked_are_ended_at_the_limit(
    launchers: Launchers,
) -> None:
    launched = launchers({0: "deaf", 1: "wait"}, {"STOP_TIMEOUT_S": 1.5})
    deaf = launched.rank(0)
    launched.rank(1)
    launched.process.send_signal(signal.SIGTERM)
    assert launched.code(8) == 75
    assert gone(deaf["pid"])


def test_a_save_that_is_being_written_may_end(launchers: Launchers) -> None:
    limits = {"KILL_TIMEOUT_S": 0.6, "SAVE_TIMEOUT_S": 3, "busy": True}
    launched = launchers({0: "deaf", 1: "exit:5:0.5"}, limits)
    deaf = launched.rank(0)
    launched.rank(1)
    began = time.monotonic()
    assert launched.code(8) == 5
    assert time.monotonic() - began > 2.5 and gone(deaf["pid"])


def test_what_ends_elsewhere_ends_these_too(launchers: Launchers) -> None:
    launched = launchers({0: "wait", 1: "wait"}, {"elsewhere": 7})
    pids = [launched.rank(i)["pid"] for i in (0, 1)]
    assert launched.code(8) == 7
    assert gone(*pids)


def test_kill_9_of_the_launcher_takes_all_ranks_along(launchers: Launchers) -> None:
    launched = launchers({0: "deaf", 1: "deaf", 2: "wait"})
    pids = [launched.rank(i)["pid"] for i in range(3)]
    launched.process.kill()
    assert gone(*pids)


def test_a_rank_that_gives_no_sign_of_life_is_killed_with_6_and_the_reason(
    launchers: Launchers,
) -> None:
    launched = launchers({0: "beats", 1: "beats"}, {"silence": 3})
    stopped = launched.rank(1)
    time.sleep(4)  # longer than the limit: whoever beats is left alone
    assert launched.process.poll() is None
    os.kill(stopped["pid"], signal.SIGSTOP)
    problem = assert_refused(Ended(launched.code(25), launched.said(), ""), 6, "rank 1")
    assert "no heartbeat" in problem.what
    assert "SIGKILL" not in launched.said() and gone(stopped["pid"], launched.rank(0)["pid"])


def test_time_in_which_nobody_listened_is_no_silence() -> None:
    with mock.patch.object(
        heartbeat.time, "monotonic", side_effect=[0.0, 1.0, 2.0, 5000.0, 5001.0]
    ):
        reader = heartbeat.HeartbeatReader()
        try:
            assert reader.silent_seconds() == 0  # it has not begun
            os.write(reader.write_end, b".")
            assert reader.silent_seconds() == 0
            assert reader.silent_seconds() == heartbeat.MOST_COUNTED_S  # this process stood still
            assert reader.silent_seconds() == heartbeat.MOST_COUNTED_S + 1
        finally:
            reader.close()
