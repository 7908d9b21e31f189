"""Is an answer mathematically equal to the gold one? Asked of math-verify, in a child process.

A model may write \boxed{9^{9^{9^9}}}: sympy then computes for hours inside one C call that holds
Python's lock, so that no deadline of this process could fire. The child gives itself an alarm
(see math_worker); what the alarm ends counts as "not shown to be equal", and is counted.

Such answers may not add up to the time that the reward's whole call has, for that would stop the
run: a question may take a twentieth of what is left of the call's budget, and once nothing is left
the rest of the answers count as too slow.
"""

import atexit
import importlib.util
import json
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rloo_cli.utils.child_process import (
    package_environment,
    python_command,
    start_child,
    stop_child,
)
from rloo_cli.utils.errors import MachineError, Problem

CALL_TIME_SHARE = 0.8  # of a call's timeout_s; the rest is for what is not in our hands
QUESTION_TIME_SHARE = 0.05  # of the time that is left, for one question
_idle_lock = threading.Lock()  # of the list below
_idle_children: list["subprocess.Popen[str]"] = []  # children that wait for a question


@dataclass
class AnswerComparison:
    """What came of comparing answers with gold ones."""

    correct: list[bool | None] = field(default_factory=list)  # (B,) None: there is no gold answer
    num_slow: int = 0  # answers that took too long; they count as not equal
    num_unread_gold: int = 0  # rows whose gold answer cannot be read


def require_math_verify() -> None:
    """Raises MachineError when math-verify is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise MachineError(
            Problem(
                "math-verify is not installed",
                why="the rewards accuracy, reasoning_accuracy and cosine_length compare with it",
                fix="pip install 'rloo-cli[math]'",
            )
        )


def grade_answers(
    texts: list[str | None],
    golds: list[Any],
    config: Any,
    log_metric: Callable[[str, float], None] | None,
) -> list[bool | None]:
    """`compare` as a reward's config says, its counts logged as shares of the rows.

    `config` has type, answer_timeout_s and timeout_s. Raises RuntimeError if the child fails.
    """
    found = compare_answers(
        texts, golds, config.answer_timeout_s, CALL_TIME_SHARE * config.timeout_s
    )
    if log_metric is not None and texts:
        log_metric(f"{config.type}/timeout_frac", found.num_slow / len(texts))
        log_metric(f"{config.type}/gold_unread_frac", found.num_unread_gold / len(texts))
    return found.correct


def compare_answers(
    texts: list[str | None], golds: list[Any], answer_timeout_s: float, budget_s: float
) -> AnswerComparison:
    """Whether each text's answer equals its gold one.

    None where the gold answer is None or cannot be read. False for a text that is None and for a
    comparison that takes longer than `seconds`, or than all of them together may (`budget`
    seconds). Raises RuntimeError if the child fails.
    """
    found = AnswerComparison()
    child: subprocess.Popen[str] | None = None
    deadline = time.monotonic() + budget_s
    try:
        for text, gold in zip(texts, golds, strict=True):
            said = "none"
            if gold is not None:
                child = child or _take_child()
                left = deadline - time.monotonic()
                said = (
                    "slow"
                    if left <= 0
                    else _ask_child(
                        child, text, gold, min(answer_timeout_s, QUESTION_TIME_SHARE * left)
                    )
                )
            found.correct.append({"yes": True, "no": False, "slow": False}.get(said))
            found.num_slow += said == "slow"
            found.num_unread_gold += said in ("no gold", "slow gold")
    except BaseException:
        if child is not None:
            stop_child(child)
        raise
    if child is not None:
        with _idle_lock:
            _idle_children.append(child)
    return found


def _ask_child(
    child: "subprocess.Popen[str]", text: str | None, gold: Any, answer_timeout_s: float
) -> str:
    assert child.stdin is not None and child.stdout is not None
    question = {"text": text or "", "gold": str(gold), "seconds": max(answer_timeout_s, 1e-3)}
    try:
        child.stdin.write(json.dumps(question) + "\n")
        child.stdin.flush()
    except BrokenPipeError as error:
        raise RuntimeError(_child_ended_message(child)) from error
    said = child.stdout.readline().strip()
    if not said:
        raise RuntimeError(_child_ended_message(child))
    return said


def _take_child() -> "subprocess.Popen[str]":
    """One that waits, or a new one. A call has a child of its own, so that none waits for another.

    Raises RuntimeError when it does not start.
    """
    with _idle_lock:
        while _idle_children:
            if (child := _idle_children.pop()).poll() is None:
                return child
    child = start_child(  # it ends when its stdin closes
        python_command("-m", "rloo_cli.rewards.common.math_worker"),
        env=package_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )
    assert child.stdout is not None
    if child.stdout.readline() != "ready\n":
        raise RuntimeError(_child_ended_message(child))
    return child


def _child_ended_message(child: "subprocess.Popen[str]") -> str:
    return f"the math-verify process ended by itself with {child.wait()}"


@atexit.register
def _kill_idle_children() -> None:
    for child in _idle_children:
        stop_child(child)
