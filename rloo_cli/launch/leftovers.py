"""Finds and kills processes left on this machine by a run that ended or was killed.

A process belongs to a run if run.json or server.json has its pid and start time, if it is in the
group of such a process, or, when that process is gone, if its environment has the run's mark.
Program names are not used: a pid is soon reused.
"""

import contextlib
import os
import platform
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import psutil

from rloo_cli.checkpoint.run_folder import RUN_FILE, read_run_metadata
from rloo_cli.generation.vllm import server_file
from rloo_cli.launch.processes import RUN_MARK_VARIABLE
from rloo_cli.utils import child_process
from rloo_cli.utils.errors import refuse
from rloo_cli.utils.files import JsonObject

SERVER_LOG_VARIABLE = "RLOO_SERVER_LOG"  # in a server's environment: a file in its run's logs
TERM_TIMEOUT_S = 5.0  # from TERM to KILL: vLLM exits cleanly in two seconds
KILL_TIMEOUT_S = 5.0
CLOCK_SLACK_S = 5.0  # the clock may have been set between two readings
RUNNING_STATES = ("starting", "training")


@dataclass(frozen=True)
class LeftoverProcess:
    """A leftover process of a run."""

    pid: int
    started: str  # in the kernel's ticks since boot
    role: str  # its role in the run: rank 0, server, group of rank 0, started by the run
    command: str

    def is_alive(self) -> bool:
        """Whether it still runs; a zombie does not count."""
        return child_process.process_start_time(self.pid) == self.started


def find_leftovers(folder: Path) -> list[LeftoverProcess]:
    """The leftover processes of this folder's run; [] if its launcher still runs."""
    facts = read_run_metadata(folder)
    if facts.get("host", platform.node()) != platform.node() or is_run_alive(facts):
        return []
    found: dict[int, LeftoverProcess] = {}
    for role, record in _recorded_processes(folder, facts):
        for pid, what in _group_of_record(role, record):
            _add_leftover(found, pid, what)
    for pid in _marked_processes(folder, facts):
        _add_leftover(found, pid, "started by the run")
    return list(found.values())


def is_run_alive(facts: JsonObject) -> bool:
    """Whether the launcher that run.json names still trains."""
    return facts.get("state") in RUNNING_STATES and child_process.is_process_alive(facts)


def refuse_busy_folder(folder: Path, pid: object) -> NoReturn:
    """Refuse to write to a run's folder in use by another process."""
    why = "only one process at a time can write to a run's folder"
    refuse("name", f"{folder} is being trained by process {pid}", "name=OTHER", why)


def check_run_ended(folder: Path) -> None:
    """Raises ConfigError for a run that is training, and for one of another machine."""
    facts = read_run_metadata(folder)
    host = facts.get("host", platform.node())
    if host != platform.node():
        what, why = f"{folder} ran on {host}", f"its processes are not visible on {platform.node()}"
        fix = f"ssh {host}, and there: rloo doctor --kill-orphans {folder}"
        refuse("command line", what, fix, why)
    if is_run_alive(facts):
        why = "it is still running, so it has no leftovers"
        fix = f"kill {facts['pid']}, which saves and stops it"
        refuse("command line", f"{folder} is being trained by process {facts['pid']}", fix, why)


def end_leftovers(leftovers: list[LeftoverProcess]) -> list[LeftoverProcess]:
    """End these processes: SIGTERM, a few seconds, SIGKILL. -> those that did not exit"""
    for number, limit_s in ((signal.SIGTERM, TERM_TIMEOUT_S), (signal.SIGKILL, KILL_TIMEOUT_S)):
        for process in leftovers:
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process.pid, number)
        until = time.monotonic() + limit_s
        while any(p.is_alive() for p in leftovers) and time.monotonic() < until:
            time.sleep(child_process.POLL_S)
    return [process for process in leftovers if process.is_alive()]


def _recorded_processes(folder: Path, facts: JsonObject) -> Iterator[tuple[str, JsonObject]]:
    """Ranks and server by run.json, and servers that the run started by their server.json.

    A server of `rloo vllm-serve` belongs to the user, and waits for the next run.
    """
    for record in facts.get("ranks", []):
        yield f"rank {record.get('rank', '?')}", record
    if facts.get("server"):
        yield "server", facts["server"]
    for path in server_file.server_file_paths(folder):
        number = re.search(r"\d+", path.name)
        server = server_file.read_server_file(folder, int(number[0]) if number else 1)
        if server is not None and server.by == "train" and server.host == platform.node():
            started = {"pid_started": server.pid_started}
            yield "server", {"pid": server.pid, "group": server.group, **started}


def _group_of_record(role: str, record: JsonObject) -> Iterator[tuple[int, str]]:
    """A recorded process that still runs, and the others of its group, each with its role."""
    if not child_process.is_process_alive(record):
        return
    yield int(record["pid"]), role
    for pid in child_process.group_processes(int(record["group"])):
        yield pid, f"group of {role}"


def _marked_processes(folder: Path, facts: JsonObject) -> Iterator[int]:
    """Processes with this run's mark of its launcher or server in their environment."""
    logs = str(folder.absolute() / "logs") + os.sep
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            environment = process.environ()
            log = environment.get(SERVER_LOG_VARIABLE, "")
            by_server = log.startswith(logs) and not _is_users_server(folder, process.pid)
            if by_server or _is_mark_of_run(environment.get(RUN_MARK_VARIABLE, ""), folder, facts):
                yield process.pid


def _is_users_server(folder: Path, pid: int) -> bool:
    """Whether a process belongs to a server of `rloo vllm-serve` for this folder."""
    server = server_file.running_server(folder)
    return server is not None and server.by != "train" and os.getpgid(pid) == server.group


def _is_mark_of_run(mark: str, folder: Path, facts: JsonObject) -> bool:
    """Whether a mark (`processes.run_processes`: launcher's pid and time) is the last attempt's.

    Its time lies between the launcher's start and the last change of run.json: another launcher may
    have had the same pid.
    """
    pid, _, nanoseconds = mark.partition(".")
    if not nanoseconds.isdigit() or pid != str(facts.get("pid")):
        return False
    ticks = str(facts.get("pid_started", ""))
    if not ticks.isdigit():
        return False
    began = psutil.boot_time() + int(ticks) / os.sysconf("SC_CLK_TCK")
    changed = (folder / RUN_FILE).stat().st_mtime
    return began - CLOCK_SLACK_S <= int(nanoseconds) / 1e9 <= changed + CLOCK_SLACK_S


def _add_leftover(found: dict[int, LeftoverProcess], pid: int, role: str) -> None:
    started = child_process.process_start_time(pid)
    if started and pid != os.getpid() and pid not in found:
        command = ""
        with contextlib.suppress(psutil.Error):
            command = " ".join(psutil.Process(pid).cmdline())
        found[pid] = LeftoverProcess(pid, started, role, command)
