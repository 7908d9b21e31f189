"""The process of one external agent: it is killed with everything that it started.

It gets its row, the policy's address and the episode's key in its environment. Its output is
read and dropped except for the end, which says why it failed.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rloo_cli.utils.child_process import kill_group, start_child, stop_child
from rloo_cli.utils.errors import GenerationError, Problem
from rloo_cli.utils.files import JsonObject

MARK_VARIABLE = "RLOO_AGENT_STEP"  # RUN.STEP, the same for all agents of one generate call
GUARD = Path(__file__).with_name("agent_guard.py")
MOST_ROW_BYTES = 100_000  # of RLOO_ROW; Linux limits a variable to 128 KiB
KEPT_BYTES = 2000  # of an agent's last output
READ_BYTES = 1 << 16


def agent_environment(row: JsonObject, base_url: str, key: str, host: str) -> dict[str, str]:
    """The variables that an agent reads."""
    text = json.dumps(row, default=str)
    around = ",".join(filter(None, [os.environ.get("NO_PROXY"), host]))
    found = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": key}
    found |= {"NO_PROXY": around, "no_proxy": around, "PYTHONUNBUFFERED": "1"}
    return found | ({"RLOO_ROW": text} if len(text) <= MOST_ROW_BYTES else {})


class AgentProcess:
    """A running agent. Raises OSError if it cannot be started."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], loop: asyncio.AbstractEventLoop
    ):
        self.loop, self.tail = loop, b""
        ours, theirs = os.pipe()
        try:
            self.process = start_child(
                command, env=env, death_signal=signal.SIGKILL, stdin=subprocess.DEVNULL,
                stdout=theirs, stderr=theirs,
            )  # fmt: skip
        except OSError:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        self.pipe: int | None = ours
        os.set_blocking(ours, False)
        loop.call_soon_threadsafe(loop.add_reader, ours, self._read_some)

    def _read_some(self) -> None:
        if self.pipe is None:
            return
        try:
            part = os.read(self.pipe, READ_BYTES)
        except BlockingIOError:
            return
        self.tail = (self.tail + part)[-KEPT_BYTES:]
        if not part:
            self._close_pipe()

    def _close_pipe(self) -> None:
        if self.pipe is not None:
            self.loop.remove_reader(self.pipe)
            os.close(self.pipe)
            self.pipe = None

    def exit_code(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self.process.poll()

    def last_line(self) -> str:
        """The end of its output."""
        lines = self.tail.decode(errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else ""

    def kill(self) -> None:
        """Kill it and its whole process group."""
        kill_group(self.process.pid)
        self.process.wait()
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self.loop.call_soon_threadsafe(self._close_pipe)


class AgentGuard:
    """A process that ends all agents of a run if the run is killed (agent_guard.py)."""

    def __init__(self, run_mark: str):
        its_pipe, self.pipe = os.pipe()
        entry = f"{MARK_VARIABLE}={run_mark}."
        command = [sys.executable, "-I", "-S", str(GUARD), str(its_pipe), entry]
        nothing = subprocess.DEVNULL
        try:
            self.process = start_child(
                command, stdin=nothing, stdout=nothing, stderr=nothing, pass_fds=[its_pipe]
            )
        finally:
            os.close(its_pipe)

    def close(self) -> None:
        """End it: the run has ended its agents itself."""
        stop_child(self.process)
        os.close(self.pipe)


def start_error(command: Sequence[str], error: OSError) -> GenerationError:
    """The error of a run whose agent.command cannot be started."""
    what, where = f"the agent cannot be started: {command[0]}", "agent.command"
    fix = f"make {command[0]} executable, or agent.command='python agent.py'"
    return GenerationError(Problem(what, where, str(error), fix))


def describe_exit(code: int, last_line: str) -> str:
    """Why an agent that exited on its own has no score."""
    name = signal.Signals(-code).name if code < 0 else ""
    what = f"the agent was killed by {name}" if name else f"the agent exited with code {code}"
    return f"{what}: {last_line}" if last_line else what
