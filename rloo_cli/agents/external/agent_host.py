"""One process that plays all episodes of a run: it fetches them with the run's token.

It is restarted when it exits, or when it takes no episode although some are waiting. The episodes
that it had then have no score; the run continues with the others.
"""

import time
from collections.abc import Sequence

from rloo_cli.agents.external.agent_process import (
    MARK_VARIABLE,
    AgentProcess,
    agent_environment,
    describe_exit,
    start_error,
)
from rloo_cli.agents.external.request_queue import RequestQueue
from rloo_cli.agents.external.server import ProxyServer
from rloo_cli.utils.errors import GenerationError, refuse

MOST_IDLE_STARTS = 2  # restarts in a row without a taken episode before it is an error


class AgentHost:
    """The process, and when it was last active. Raises GenerationError if it cannot start.

    `mark`: the environment entry by which AgentGuard finds it after the run was killed.
    """

    def __init__(
        self, command: Sequence[str], server: ProxyServer, queue: RequestQueue,
        host: str, workers: int, max_seconds: float, mark: str,
    ):  # fmt: skip
        self.command, self.server, self.queue = command, server, queue
        self.host, self.workers, self.max_seconds = host, workers, max_seconds
        self.mark = mark
        self.num_given = 0
        self.idle_starts = 0
        self._start()

    def _start(self) -> None:
        env = agent_environment({}, self.server.url, self.server.token, self.host)
        env = {name: env[name] for name in ("NO_PROXY", "no_proxy", "PYTHONUNBUFFERED")}
        env |= {"RLOO_PROXY_URL": self.server.url, "RLOO_TOKEN": self.server.token}
        env[MARK_VARIABLE] = self.mark
        self.idle_since = time.monotonic()
        self.idle_starts += 1
        try:
            self.process = AgentProcess(self.command, env, self.server.thread.loop)
        except OSError as error:
            raise start_error(self.command, error) from None

    def begin_step(self) -> None:
        """Note that episodes are waiting from now on."""
        self.idle_since = time.monotonic()

    def revive(self) -> str | None:
        """Restart it if it exited or hangs. -> the reason; None if it is alive.

        Raises GenerationError if it took no episode between two starts.
        """
        now = time.monotonic()
        if self.num_given != self.queue.num_given:
            self.num_given, self.idle_since, self.idle_starts = self.queue.num_given, now, 0
        has_room = len(self.queue.fetched) < self.workers
        waits = any(talk.is_waiting for talk in self.queue.fetched)
        if not self.queue.offered or not has_room or waits:
            self.idle_since = now
        code = self.process.exit_code()
        if code is None and now - self.idle_since <= self.max_seconds:
            return None
        if code is None:
            why = f"it took no episode for {self.max_seconds:g} s (agent.max_seconds)"
            fix = f"agent.max_seconds={2 * self.max_seconds:g}"
        else:
            why = describe_exit(code, self.process.last_line())
            fix = "fix the program of agent.command"
        self.process.kill()
        if self.idle_starts >= MOST_IDLE_STARTS:
            what = f"agent.command plays no episodes: {' '.join(self.command)}"
            refuse("agent.command", what, fix, why, error=GenerationError)
        self._start()
        return why

    def close(self) -> None:
        """Kill it, and all of its process group."""
        self.process.kill()
