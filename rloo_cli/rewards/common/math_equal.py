"""Compares answers with gold answers by math-verify.

A model may write \boxed{9^{9^{9^9}}}: sympy then computes for hours inside one C call that holds
Python's lock, so no deadline in its own process could fire. It runs in worker processes, which
are killed at their deadline: such an answer counts as not equal, and as slow.

Such answers must not use up the time of the reward's whole call, since that would stop the run:
one comparison may take a twentieth of the remaining time, and once no time is left the remaining
answers count as too slow.
"""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from rloo_cli.rewards.common.math_gold import MathWorkerCode
from rloo_cli.rewards.common.text import gold_texts
from rloo_cli.utils.errors import require_package
from rloo_cli.utils.worker_pool import WorkerGone, WorkerPool

CALL_TIME_SHARE = 0.8  # of a call's timeout_s; the rest is a reserve
QUESTION_TIME_SHARE = 0.05  # of the remaining time, for one question
STRONGEST_FIRST = ("yes", "no", "slow", "no gold", "slow gold", "none")  # of several gold answers
# How a worker exits if a question is too much for it: no memory (GMP), no stack.
TOO_MUCH_EXIT_CODES = (-signal.SIGABRT, -signal.SIGSEGV)
MOST_KEPT = 64  # workers: one per call, so that calls do not wait for each other
_pool = WorkerPool(MathWorkerCode(), "math-verify", MOST_KEPT)


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

    correct: list[bool | None] = field(default_factory=list)  # (B,) None: no gold answer
    num_slow: int = 0  # answers that took too long; they count as not equal
    num_unread_gold: int = 0  # completions whose gold answer cannot be read


def require_math_verify() -> None:
    """Raises MachineError when math-verify is not installed."""
    why = "the rewards accuracy, reasoning_accuracy and cosine_length need it"
    require_package("this machine", "math-verify", "math", why)


def grade_answers(
    texts: list[str | None],
    golds: list[object],
    config: MathConfig,
    log_metric: Callable[[str, float], None] | None,
) -> list[bool | None]:
    """`compare_answers` with a reward's config; logs the shares of slow and unreadable answers.

    Raises RuntimeError if a worker fails.
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

    None if there is no gold answer, only white space, or none that can be read. One gold answer
    of a list has to be equal. False for a text that is None, and for a comparison that takes longer
    than `answer_timeout_s`, or starts after all of them together have taken `budget_s` seconds.

    Raises RuntimeError if a worker fails.
    """
    comparison = AnswerComparison()
    deadline = time.monotonic() + budget_s
    for text, gold in zip(texts, golds, strict=True):
        results = ["none"]
        for gold_text in gold_texts(gold):
            left = deadline - time.monotonic()
            limit = min(answer_timeout_s, QUESTION_TIME_SHARE * left)
            results += [_compare(text or "", gold_text, limit) if left > 0 else "slow"]
        answer = next((one for one in STRONGEST_FIRST if one in results), results[0])
        comparison.correct.append({"yes": True, "no": False, "slow": False}.get(answer))
        comparison.num_slow += answer == "slow"
        unread = gold is not None and answer in ("no gold", "slow gold", "none")
        comparison.num_unread_gold += unread
    return comparison


def _compare(text: str, gold: str, answer_timeout_s: float) -> str:
    """One of STRONGEST_FIRST. Raises RuntimeError if the worker exits on its own."""
    too_much = "slow gold"
    try:
        with _pool.idle_worker() as worker:
            # A gold answer is short and not written by a model: it gets at least a second.
            found = worker.request({"gold": gold}, max(1.0, answer_timeout_s))
            if found == b"no gold":
                return "no gold"
            too_much = "slow"
            return worker.request({"text": text}, max(answer_timeout_s, 1e-3)).decode()
    except TimeoutError:
        return too_much
    except WorkerGone as gone:
        if gone.exit_code in TOO_MUCH_EXIT_CODES:
            return too_much
        raise RuntimeError(f"the math-verify process exited unexpectedly with {gone}") from None
