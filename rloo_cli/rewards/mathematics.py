"""Is an answer mathematically equal to the gold one? Asked of math-verify, in a child process.

A model may write \\boxed{9^{9^{9^9}}}: sympy then computes for hours inside one C call that holds
Python's lock, so that no deadline of this process could fire. The child gives itself an alarm
that ends it (see math_worker); we take its end for "not shown to be equal" and start another.
"""

import atexit
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from rloo_cli.errors import MachineError, Problem

# How a child ends when an answer is too much for it: the alarm, no memory (GMP), no stack.
TOO_MUCH = {-signal.SIGALRM, -signal.SIGABRT, -signal.SIGSEGV}
_lock = threading.Lock()  # one question at a time; accuracy and cosine_length share the child
_child: subprocess.Popen[str] | None = None


def require() -> None:
    """Raises MachineError when math-verify is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise MachineError(
            Problem(
                "math-verify is not installed",
                why="the rewards accuracy, reasoning_accuracy and cosine_length compare with it",
                fix="pip install 'rloo-cli[math]'",
            )
        )


def correct(texts: list[str | None], golds: list[Any], seconds: int) -> list[bool | None]:
    """Whether each text's answer equals its gold one.

    None where the gold answer is None or cannot be parsed. False for a text that is None and
    for a comparison that takes longer than `seconds`. Raises RuntimeError if the child fails.
    """
    return [_one(text, gold, seconds) for text, gold in zip(texts, golds, strict=True)]


def _one(text: str | None, gold: Any, seconds: int) -> bool | None:
    if gold is None:
        return None
    question = json.dumps({"text": text or "", "gold": str(gold), "seconds": seconds})
    with _lock:
        child = _start()
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(question + "\n")
            child.stdin.flush()
        except BrokenPipeError as error:
            raise RuntimeError(_ended(child)) from error
        parsed = child.stdout.readline()
        if parsed == "no gold\n":
            return None
        answer = child.stdout.readline() if parsed else ""
        if answer:
            return answer == "yes\n"
        if child.wait() not in TOO_MUCH:
            raise RuntimeError(_ended(child))
        return False if parsed else None  # with no "gold" line it was the gold that took too long


def _start() -> subprocess.Popen[str]:
    global _child
    if _child is None or _child.poll() is not None:
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        _child = subprocess.Popen(
            [sys.executable, "-P", "-m", "rloo_cli.rewards.math_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # a Ctrl-C is ours to handle; it ends when its stdin closes
        )
    return _child


def _ended(child: subprocess.Popen[str]) -> str:
    return f"the math-verify process ended by itself with {child.wait()}"


@atexit.register
def _stop() -> None:
    if _child is not None and _child.poll() is None:
        _child.kill()
        _child.wait()
