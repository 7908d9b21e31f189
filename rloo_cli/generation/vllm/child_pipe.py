"""A child process that holds an engine, and the pipe to it."""

import signal
import time
from pathlib import Path
from typing import Any

from rloo_cli.generation.vllm.engine import EngineLost, EngineRefused
from rloo_cli.utils import signals
from rloo_cli.utils.child_process import (
    kill_group,
    kill_group_except,
    python_command,
    start_child,
    wait_for_group,
)
from rloo_cli.utils.message_socket import MessageSocket, PeerGone

CHILD_BOOT = "from rloo_cli.generation.vllm.child_main import main; main()"
PIPE_CALL_TIMEOUT_S = 60.0
POLL_S = 0.1  # seconds between two checks for a signal
TRACKER_TIMEOUT_S = 2.0  # Python's shared-memory tracker cleans up last


class ChildPipe:
    """Start it from the main thread: the kernel ends the child when that thread is gone."""

    def __init__(self, environment: dict[str, str], log: Path):
        self.messages, theirs = MessageSocket.pair()
        with theirs:
            self.process = start_child(
                python_command("-c", CHILD_BOOT, str(theirs.fileno())),
                env={**environment, "RLOO_SERVER": "1"},
                pass_fds=[theirs.fileno()],
                log=log,
                death_signal=signal.SIGKILL,
            )

    def call(self, name: str, *args: Any, limit_s: float = PIPE_CALL_TIMEOUT_S) -> Any:
        """Call one of `ChildEngineCalls`' methods. Raises EngineLost, EngineRefused."""
        self.send(("call", name, args))
        return self.wait_for_result(limit_s, name)

    def wait_for_result(self, limit_s: float, what: str, interruptible: bool = False) -> Any:
        """Wait for the child's answer. Raises EngineLost, EngineRefused."""
        kind, *value = self.receive(limit_s, what, interruptible)
        if kind == "error":
            raise EngineRefused(f"{what}: {exception_line(value[0])}")
        return value[0] if value else None

    def send(self, message: tuple[Any, ...]) -> None:
        """Send a message. Raises EngineLost if the child is gone."""
        try:
            self.messages.send_pickled(message)
        except PeerGone:
            raise EngineLost("the engine's process has exited") from None

    def receive(self, limit_s: float, what: str, interruptible: bool = False) -> Any:
        """Receive a message. `interruptible`: a signal ends it (Stopped). Raises EngineLost."""
        end = time.monotonic() + limit_s
        try:
            while not self.messages.has_input(POLL_S):
                if interruptible:
                    signals.raise_if_stopped()
                if time.monotonic() > end:
                    raise TimeoutError
            return self.messages.receive_pickled(end)
        except TimeoutError:
            message = f"{what}: no message from the engine within {limit_s:g} s"
            raise EngineLost(message) from None
        except PeerGone:
            code = self.process.wait()
            raise EngineLost(f"{what}: the engine's process exited with {code}") from None

    def kill(self) -> None:
        """End the child with everything that it started."""
        self.messages.close()
        kill_group_except(self.process.pid)
        self.process.wait()
        wait_for_group(self.process.pid, TRACKER_TIMEOUT_S)
        kill_group(self.process.pid)


def exception_line(traceback: str) -> str:
    """The last line of a traceback: the exception itself."""
    lines = [line for line in traceback.strip().splitlines() if line.strip()]
    return lines[-1] if lines else "an error without a message"


def last_log_lines(log: Path, count: int = 12) -> str:
    """The end of a log file."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-count:])
    except OSError:
        return "it left no log"
