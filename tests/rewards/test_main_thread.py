"""Rewards and tools that need the main thread of a process are noticed, also if they catch it."""

import signal

import pytest
from cli_cases import Rloo

from rloo_cli.agents.common.tool_processes import ToolThread
from rloo_cli.utils.errors import GenerationError
from rloo_cli.utils.main_thread_calls import note_main_thread_calls

CALLS = {
    "signal": "signal.signal(signal.SIGALRM, lambda *_: None)",
    "alarm": "signal.alarm(5)",
    "setitimer": "signal.setitimer(signal.ITIMER_REAL, 5)",
}
REWARD = """
import signal
{kind}def f(completions, **kwargs):
    try:
        {call}
        return [1.0] * len(completions)
    except Exception:
        return [0.0] * len(completions)
"""


def settings(*more: str) -> tuple[str, ...]:
    """A run of the reward in code.py."""
    words = ("train", "+recipe=smoke", "max_steps=1", "reward=function")
    return (*words, "reward.function.path=code.py:f", *more)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", ["", "async "])
def test_a_reward_that_needs_the_main_thread_stops_the_run_and_names_workers(
    kind: str, call: str, rloo: Rloo
) -> None:
    (rloo.folder / "code.py").write_text(REWARD.format(kind=kind, call=CALLS[call]))
    ended = rloo(*settings("reward.function.on_error=none"))
    assert ended.code == 5, ended.said
    assert f"signal.{call}" in ended.err and "reward.function.workers=1" in ended.err


@pytest.mark.parametrize("call", CALLS)
def test_the_same_reward_works_in_a_process_of_its_own(call: str, rloo: Rloo) -> None:
    (rloo.folder / "code.py").write_text(REWARD.format(kind="", call=CALLS[call]))
    ended = rloo(*settings("reward.function.workers=1"))
    assert ended.code == 0 and "reward 1" in ended.said, ended.said


def test_a_tool_in_a_thread_that_sets_an_alarm_stops_the_run() -> None:
    tool = ToolThread()

    def answer(message: object) -> dict[str, object]:
        try:
            signal.alarm(5)
        except ValueError:
            return {"text": "not now"}
        return {"text": "done"}

    tool.worker.answer_object = answer  # type: ignore[method-assign, assignment]
    with pytest.raises(GenerationError, match=r"signal\.alarm"):
        tool.request({}, timeout_s=10)


def test_nothing_is_noted_in_the_main_thread() -> None:
    with note_main_thread_calls() as noted:
        before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        signal.signal(signal.SIGUSR2, before)
    assert noted == []
