"""Starts processes, each in its own session, and ends them with everything they started.

A process is identified by its pid and start time, never by its name: a pid alone soon belongs to
another process. A zombie counts as gone. Linux-only features are skipped on other systems.
"""

import contextlib
import ctypes
import fcntl
import logging
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import psutil

from rloo_cli.utils import console, paths
from rloo_cli.utils.files import JsonObject

log = logging.getLogger(__name__)
PR_SET_PDEATHSIG = 1
MAX_LINE_CHARS = 2000  # per printed line of a labelled child: a longer line is split
RELAY_END_S = 0.5
# The threads that print what labelled children print.
_relays: "WeakKeyDictionary[subprocess.Popen[Any], threading.Thread]" = WeakKeyDictionary()
POLL_S = 0.05


def python_command(*arguments: str) -> list[str]:
    """The command of this Python; -P: no file in the current folder can shadow a package."""
    return [sys.executable, "-P", *arguments]


def package_environment() -> dict[str, str]:
    """The variable by which a Python started elsewhere finds this package."""
    parts = [str(paths.PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(parts)}


def start_child(
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    inherit: bool = True,
    log: Path | None = None,
    death_signal: int = 0,
    label: str = "",
    **streams: Any,
) -> subprocess.Popen[Any]:
    """Start a process in its own session: a Ctrl-C only reaches it through us.

    env: its variables, including ours to inherit. log: the file that stdout and stderr are appended
    to; stdin is closed then. death_signal: the kernel sends it to the process when the calling
    thread has ended; 0 sends nothing. label: each line of its stdout and stderr is printed to our
    stderr and written to the log after this label, control characters shown. streams: other
    arguments of Popen.
    """
    with contextlib.ExitStack() as stack:
        if label:
            source, target = os.pipe()
            stack.callback(os.close, target)
            streams |= {"stdout": target, "stderr": target}
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            out = stack.enter_context(log.open("ab"))
            streams |= {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
        try:
            child = subprocess.Popen(
                command,
                env={**(os.environ if inherit else {}), **(env or {})},
                start_new_session=True,
                preexec_fn=_ask_for_signal(death_signal) if death_signal else None,
                **streams,
            )
        except BaseException:
            if label:
                os.close(source)
            raise
    if label:
        relay = threading.Thread(target=_relay_lines, args=(source, label), daemon=True)
        _relays[child] = relay
        relay.start()
    return child


def _relay_lines(source: int, label: str) -> None:
    """Print each line of a pipe with its label, until the last process that holds it has ended."""
    # User code in this process may close descriptors that it does not own.
    with contextlib.suppress(OSError), open(source, encoding="utf-8", errors="replace") as file:
        while line := file.readline(MAX_LINE_CHARS):
            text = f"{label}: {console.show_control_characters(line.rstrip())}"
            log.info("%s", text)
            print(text, file=sys.stderr, flush=True)


def _ask_for_signal(death_signal: int) -> Callable[[], None] | None:
    """A function for a child to call before it executes another program, so that it gets this
    signal when we end; None if the system lacks this."""
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None, use_errno=True).prctl, os.getpid()

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, death_signal)
        if os.getppid() != parent:  # the parent died before the call
            os._exit(1)

    return ask


def die_with_parent() -> None:
    """Called in a process that multiprocessing started: the kernel kills it when its parent dies.

    Does nothing in a server's first process, whose parent already arranged it. The kernel
    watches the thread that started us; vLLM starts its processes from main threads.
    """
    parent = multiprocessing.parent_process()
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:  # it died before the call
        os.kill(os.getpid(), signal.SIGKILL)


def die_with_pid(parent: int) -> None:
    """Called in a fork of process `parent`: the kernel kills us when its forking thread ends."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


def end_with_pipe(pipe: int) -> None:
    """Let the kernel end this process when the pipe's other end is closed."""
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(pipe, select.POLLHUP)
    if poll.poll(0):  # it was closed before O_ASYNC was set
        os._exit(1)


def stop_child(child: subprocess.Popen[Any], grace_s: float = 0.0) -> int:
    """End a process and its group: SIGTERM, `grace_s` seconds, SIGKILL. -> its exit code"""
    if grace_s and child.poll() is None:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(grace_s)
    kill_group(child.pid)
    code = child.wait()
    if (relay := _relays.pop(child, None)) is not None:
        relay.join(
            RELAY_END_S
        )  # its last lines; a process outside the group may hold the pipe open
    return code


def kill_group(group: int) -> None:
    """Kill a process group at once; nothing happens if it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def kill_group_except(group: int, spared_pid: int = 0) -> None:
    """Kill a process group, except one process and Python's tracker of shared memory.

    The tracker frees the memory left by the others, hundreds of megabytes, and then exits.
    """
    for pid in group_processes(group):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if pid != spared_pid and not any("resource_tracker" in s for s in process.cmdline()):
                process.kill()


def group_processes(group: int) -> list[int]:
    """The running pids of a process group."""
    pids = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if os.getpgid(pid) == group and process_start_time(pid):
                pids.append(pid)
    return pids


def wait_for_group(group: int, limit_s: float) -> list[int]:
    """Wait until a process group is gone, at most `limit_s` seconds. -> the pids that are left"""
    until = time.monotonic() + limit_s
    while (left := group_processes(group)) and time.monotonic() < until:
        time.sleep(POLL_S)
    return left


def kill_marked_processes(name: str, value: str) -> None:
    """Kill every process but ours whose environment has this variable with this value.

    Processes that left their group by setsid are found too.
    """
    for _ in range(3):  # a process being forked is found in the second pass
        others = (p for p in psutil.process_iter() if p.pid != os.getpid())
        marked = [p for p in others if _has_variable(p, name, value)]
        for process in marked:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if not marked:
            return


def _has_variable(process: psutil.Process, name: str, value: str) -> bool:
    try:
        return bool(process.environ().get(name) == value)
    except (psutil.Error, OSError):  # gone, or another user's
        return False


def process_start_time(pid: int) -> str:
    """When a process started, in the kernel's ticks since boot; "" when it is gone.

    psutil's time is counted from 1970, which moves when the clock is set; run.json keeps this one.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def is_process_alive(process: JsonObject) -> bool:
    """Whether the process that run.json names (`pid`, `pid_started`) still runs."""
    start_time = process_start_time(int(process.get("pid", -1)))
    return bool(start_time) and start_time == process.get("pid_started")


def kill_leftover_process(process: JsonObject, patience_s: float = 10.0) -> None:
    """Wait for a process that run.json names to end, then kill it and its group."""
    limit = time.monotonic() + patience_s
    while is_process_alive(process):
        if time.monotonic() > limit:
            print(f"process {process['pid']} is left over from an earlier attempt: killing it")
            kill_group(int(process["group"]))
            limit = time.monotonic() + patience_s
        time.sleep(POLL_S)
