"""Compares answers with gold answers by math-verify, which runs in a child process.

A model may write \boxed{9^{9^{9^9}}}: sympy then computes for hours inside one C call that holds
Python's lock, so that no deadline of this process could fire. The child sets itself an alarm (see
math_worker). An answer that the alarm ends counts as not equal, and as slow.

Such answers must not use up the time of the reward's whole call, for that would stop the run: one
comparison may take a twentieth of the time that is left, and once no time is left the rest of the
answers count as too slow.
"""

import atexit
import importlib.util
import json
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from rloo_cli.rewards.common.text import gold_texts
from rloo_cli.utils import child_process
from rloo_cli.utils.errors import MachineError, Problem

CALL_TIME_SHARE = 0.8  # of a call's timeout_s; the rest is for what is not in our hands
QUESTION_TIME_SHARE = 0.05  # of the time that is left, for one question
STRONGEST_FIRST = ("yes", "no", "slow", "no gold", "slow gold", "none")  # of several gold answers
_idle_lock = threading.Lock()  # guards the list below
_idle_children: list["subprocess.Popen[str]"] = []  # children that wait for a question


class MathConfig(Protocol):
    """The keys of a reward's config that a comparison needs."""

    @property
    def type(self) -> str: ...
    @property
    def answer_timeout_s(self) -> int: ...
    @property
    def timeout_s(self) -> float: ...


@dataclass
class AnswerComparison:
    """Which answers equal their gold answers."""

    correct: list[bool | None] = field(default_factory=list)  # (B,) None: there is no gold answer
    num_slow: int = 0  # answers that took too long; they count as not equal
    num_unread_gold: int = 0  # completions whose gold answer cannot be read


def require_math_verify() -> None:
    """Raises MachineError when math-verify is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        why = "the rewards accuracy, reasoning_accuracy and cosine_length compare with it"
        fix = "pip install 'rloo-cli[math]'"
        raise MachineError(Problem("math-verify is not installed", "this machine", why, fix))


def grade_answers(
    texts: list[str | None],
    golds: list[object],
    config: MathConfig,
    log_metric: Callable[[str, float], None] | None,
) -> list[bool | None]:
    """`compare_answers` with a reward's config; logs which share was slow or had no readable gold.

    Raises RuntimeError if the child fails.
    """
    budget_s = CALL_TIME_SHARE * config.timeout_s
    comparison = compare_answers(texts, golds, config.answer_timeout_s, budget_s)
    if log_metric is not None and texts:
        log_metric(f"{config.type}/timeout_frac", comparison.num_slow / len(texts))
        log_metric(f"{config.type}/gold_unread_frac", comparison.num_unread_gold / len(texts))
    return comparison.correct


def compare_answers(
    texts: list[str | None], golds: list[object], answer_timeout_s: float, budget_s: float
) -> AnswerComparison:
    """Whether each text's answer equals its gold one.

    None where there is no gold answer, only white space, or none that can be read. One gold answer
    of a list has to be equal. False for a text that is None, and for a comparison that takes longer
    than `answer_timeout_s`, or begins when all of them together have taken `budget_s` seconds.

    Raises RuntimeError if the child fails.
    """
    comparison = AnswerComparison()
    child: subprocess.Popen[str] | None = None
    deadline = time.monotonic() + budget_s
    try:
        for text, gold in zip(texts, golds, strict=True):
            told = ["none"]
            for gold_text in gold_texts(gold):
                child = child or _take_child()
                left = deadline - time.monotonic()
                limit = min(answer_timeout_s, QUESTION_TIME_SHARE * left)
                told += [_ask_child(child, text, gold_text, limit) if left > 0 else "slow"]
            answer = next((one for one in STRONGEST_FIRST if one in told), told[0])
            comparison.correct.append({"yes": True, "no": False, "slow": False}.get(answer))
            comparison.num_slow += answer == "slow"
            unread = gold is not None and answer in ("no gold", "slow gold", "none")
            comparison.num_unread_gold += unread
    except BaseException:
        if child is not None:
            child_process.stop_child(child)
        raise
    if child is not None:
        with _idle_lock:
            _idle_children.append(child)
    return comparison


def _ask_child(
    child: "subprocess.Popen[str]", text: str | None, gold: str, answer_timeout_s: float
) -> str:
    assert child.stdin is not None and child.stdout is not None
    question = {"text": text or "", "gold": gold, "seconds": max(answer_timeout_s, 1e-3)}
    try:
        child.stdin.write(json.dumps(question) + "\n")
        child.stdin.flush()
    except BrokenPipeError as error:
        raise RuntimeError(_child_ended_message(child)) from error
    answer = child.stdout.readline().strip()
    if not answer:
        raise RuntimeError(_child_ended_message(child))
    return answer


def _take_child() -> "subprocess.Popen[str]":
    """An idle child, or a new one: each call has its own, so that calls do not wait for each other.

    Raises RuntimeError when the child does not start.
    """
    with _idle_lock:
        while _idle_children:
            if (child := _idle_children.pop()).poll() is None:
                return child
    child = child_process.start_child(  # it ends when its stdin closes
        child_process.python_command("-m", "rloo_cli.rewards.common.math_worker"),
        env=child_process.package_environment(),
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
        child_process.stop_child(child)
