"""The process that does the work: started, its signals passed on, its whole tree ended with it."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rloo_cli.stop import AGAIN_S, SIGNALS

# Threads that spin long while they wait for each other make a machine that is shared many times
# slower.
CALM = {"GOMP_SPINCOUNT": "1000", "TOKENIZERS_PARALLELISM": "false"}
LIMIT_S = 600.0  # after a signal: code that holds Python's lock would never let a run end
# Until the worker can say how it ended, an interrupt ends it without a traceback.
BOOT = "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); " \
    "from rloo_cli.{module} import main; main()"  # fmt: skip


def run(
    module: str,
    words: Sequence[str],
    started: Callable[[int], None] = lambda pid: None,
    busy: Callable[[], bool] = lambda: False,
    look: Callable[[], None] = lambda: None,
    env: Mapping[str, str] | None = None,
) -> int:
    """Run `rloo_cli.<module>`.main with these arguments to its end; its exit code.

    TERM, INT, USR1 and USR2 reach it once each; a second Ctrl-C within 5 s ends it at once (130).
    It is ended LIMIT_S after the first signal unless `busy` (a save is being written). A child
    that a signal killed counts as 75 where an end was asked for, else as 6. `look` is called twice
    a second meanwhile; `env` is added to its environment.
    """
    child = subprocess.Popen(
        # -P: no file in the current folder can pass for a package.
        [sys.executable, "-P", "-c", BOOT.format(module=module), *words],
        env={**CALM, **os.environ, **(env or {})},
        start_new_session=True,  # a Ctrl-C reaches it once, from us
        preexec_fn=_die_with_parent(),
    )
    with _passing_signals_on(child) as heard:
        started(child.pid)
        while child.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(0.5)
            look()
            if heard and time.monotonic() - heard[0][1] > LIMIT_S and not busy():
                kill(child.pid)
    if child.returncode >= 0:
        return child.returncode
    interrupts = [n for n, _ in heard if n == signal.SIGINT]
    return 130 if len(interrupts) > 1 else 75 if heard else 6


def kill(group: int) -> None:
    """End a process group at once; nothing where it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


@contextmanager
def _passing_signals_on(child: subprocess.Popen[bytes]) -> Iterator[list[tuple[int, float]]]:
    """While inside, signals go to the child; afterwards nothing that it started is left."""
    heard: list[tuple[int, float]] = []  # signal, when

    def forward(number: int, frame: Any) -> None:
        now = time.monotonic()
        again = [n for n, then in heard if n == number == signal.SIGINT and now - then < AGAIN_S]
        heard.append((number, now))
        if again:
            kill(child.pid)  # the second Ctrl-C means now
        else:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(number)

    before = {n: signal.signal(n, forward) for n in SIGNALS}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        kill(child.pid)  # whatever it started and left


def _die_with_parent() -> Callable[[], None] | None:
    """For the child: be killed when the process that started us dies (Linux)."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    return lambda: prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
