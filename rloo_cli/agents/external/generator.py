"""A `Generator` whose episodes are played by external agents behind the proxy.

All agents of a step run at once (`agent.workers` at most). Their requests are sampled in waves by
the run's own generator, once every agent waits, or after as long as the last wave took: a slow
agent delays only its own episode. An episode whose agent fails has no score; never a score of 0.
"""

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rloo_cli.agents.common.build import EpisodeSetup
from rloo_cli.agents.common.call_parsers import ParsedCalls, choose_parser
from rloo_cli.agents.common.episode import finish_group
from rloo_cli.agents.common.episode_sampler import EpisodeSampler, EpisodeStep
from rloo_cli.agents.common.turn_rendering import TurnRenderer
from rloo_cli.agents.external.agent_host import AgentHost
from rloo_cli.agents.external.agent_process import (
    MARK_VARIABLE,
    AgentGuard,
    AgentProcess,
    agent_environment,
    describe_exit,
    start_error,
)
from rloo_cli.agents.external.conversation import Conversation, ExternalRules
from rloo_cli.agents.external.message_forms import MODEL_NAME
from rloo_cli.agents.external.request_queue import RequestQueue, row_of_group
from rloo_cli.agents.external.server import ProxyServer
from rloo_cli.data.batch import Group
from rloo_cli.generation import Generator
from rloo_cli.utils import signals
from rloo_cli.utils.child_process import kill_marked_processes
from rloo_cli.utils.errors import ConfigError, GenerationError, refuse
from rloo_cli.utils.fault_injection import trigger_fault
from rloo_cli.utils.files import JsonObject
from rloo_cli.utils.rng import turn_seed

if TYPE_CHECKING:
    pass

SHORTEST_WAIT_S = 0.05  # for agents, after a wave that took less
OPENING_WAIT_S = 1.0  # for agents to start, before the first wave
POLL_S = 0.1  # seconds between two looks at the agents' processes
STARTS_AT_ONCE = 8  # agents started between two looks


@dataclass(frozen=True)
class AgentLaunch:
    """How agents start: by a command, or on their own with the run's token."""

    command: list[str] | None
    token: str
    per_run: bool = False  # the command plays all episodes and fetches them with the token

    @property
    def per_episode(self) -> list[str] | None:
        """The command that is started for each episode."""
        return None if self.per_run else self.command


class ProxyKeys(Protocol):
    """The agent's keys that the generator reads."""

    @property
    def max_seconds(self) -> float: ...
    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def workers(self) -> int: ...


def build_proxy(keys: Any, launch: AgentLaunch, setup: EpisodeSetup) -> "ProxyGenerator":
    """The generator for the agent's `keys`. Raises ConfigError for an unsuitable template."""
    renderer = setup.build_renderer(keys.renderer)
    _check_user_turns(renderer)
    length = setup.generation.max_completion_length
    limits = [n for n in (setup.context_tokens, keys.max_episode_tokens) if n is not None]
    most = min(limits) if limits else setup.episode_tokens
    try:
        name, parser = choose_parser(keys.parser, setup.tokenizer)
    except ConfigError:
        if keys.parser != "auto":
            raise
        name, parser = "text: the chat template shows no calls", lambda text: ParsedCalls()
    rules = ExternalRules(renderer, parser, keys.max_turns, keys.max_rows, length, most)
    generator = ProxyGenerator(setup.inner, rules, keys, launch)
    if launch.command is not None:
        started = "one process, started" if launch.per_run else "started"
        come = f"{started} as: {' '.join(launch.command)}"
    else:
        come = f"that connect on their own (POST {generator.server.url}/rloo/next)"
    said = f"episodes of up to {keys.max_turns} turns by agents {come}; calls are read as {name}"
    setup.note(said)
    return generator


def _check_user_turns(renderer: TurnRenderer) -> None:
    """Refuse a template that cannot continue after an assistant turn. Raises ConfigError."""
    stop = next(iter(sorted(renderer.stop_ids)), -1)
    try:
        renderer.new_ids([], [{"role": "user", "content": "?"}], [], stop)
    except GenerationError as error:
        raise ConfigError(*error.problems) from None
    except Exception as error:  # a template is code and can raise anything
        what = "the chat template refuses a second question"
        fix = "model.chat_template=FILE.jinja, one that allows a user message after the assistant's"
        refuse("model.chat_template", what, fix, error)


METRICS = {"Episodes": [  # read by utils.metrics
    ("agent/wrong_keys", "count", "last",
     "requests to the proxy (rank 0's) with a key of no episode, or of another, since the run "
     "began"),
]}  # fmt: skip


class ProxyGenerator(EpisodeSampler):
    """Samples the turns that agents request with `inner`, the generator of single turns."""

    def __init__(
        self, inner: Generator, rules: ExternalRules, keys: ProxyKeys, launch: AgentLaunch
    ):
        super().__init__(inner)
        self.rules, self.keys, self.launch = rules, keys, launch
        self.queue = RequestQueue(rules)
        self.server = ProxyServer(self.queue, keys.host, keys.port, launch.token, keys.max_seconds)
        self.mark = secrets.token_hex(8)
        self.guard = None if launch.command is None else AgentGuard(self.mark)
        self.host: AgentHost | None = None
        if launch.command is not None and launch.per_run:
            self.host = self._start_host(launch.command)

    def _start_host(self, command: Sequence[str]) -> AgentHost:
        keys = self.keys
        try:
            return AgentHost(
                command, self.server, self.queue, keys.host, keys.workers, keys.max_seconds,
                f"{self.mark}.host",
            )  # fmt: skip
        except GenerationError:
            self.close()
            raise

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the inner generator, and the number of requests with a wrong key."""
        return {**self.inner.metrics, "agent/wrong_keys": float(self.queue.wrong_keys)}

    def close(self) -> None:
        """Close the port, end host and agents, and release the sampler."""
        if self.host is not None:
            self.host.close()
        if self.guard is not None:
            self.guard.close()
            self.guard = None
        self.server.close()
        super().close()

    def begin_step(
        self,
        groups: list[Group],
        seeds: list[list[int]],
        options: JsonObject,
        arrived: Callable[[int], None],
    ) -> EpisodeStep:
        """The episodes of these groups."""
        return _ProxyStep(self, groups, seeds, options, arrived)


@dataclass
class _Played:
    """A conversation and the agent that has it."""

    conversation: Conversation
    group_index: int  # of its group
    process: AgentProcess | None = None
    is_over: bool = False  # the agent is done, exited or late; it is then killed


class _ProxyStep:
    """The episodes of one call of `generate`."""

    def __init__(
        self, proxy: ProxyGenerator, groups: list[Group], seeds: list[list[int]],
        options: JsonObject, arrived: Callable[[int], None],
    ):  # fmt: skip
        self.proxy, self.queue, self.groups = proxy, proxy.queue, groups
        self.options, self.arrived = options, arrived
        self.mark = f"{proxy.mark}.{secrets.token_hex(4)}"
        self.family = [
            [
                _Played(self.queue.open_conversation(group, k, seed), i)
                for k, seed in enumerate(group_seeds)
            ]
            for i, (group, group_seeds) in enumerate(zip(groups, seeds, strict=True))
        ]
        self.to_start = deque(played for siblings in self.family for played in siblings)
        self.playing: list[_Played] = []
        self.unfinished = [len(siblings) for siblings in self.family]
        self.alone_since = time.monotonic()  # since when no agent has had an episode
        self.ended = threading.Event()
        self.watch = threading.Thread(target=self._watch_agents, name="agents", daemon=True)
        if proxy.host is not None:
            proxy.host.begin_step()

    def run(self) -> None:
        """Let agents play until every episode has ended."""
        self.watch.start()
        patience = OPENING_WAIT_S
        while self.to_start or self.playing:
            signals.raise_if_stopped()
            self._look_after_host()
            self._start_agents()
            self._end_episodes()
            self._check_that_agents_come()
            pause = POLL_S if not self.to_start or self._is_full else 0.0
            wave = self.queue.take_wave(len(self.playing), patience, pause)
            if wave:
                began = time.monotonic()
                if any(talk.episode.turns for talk in wave):
                    trigger_fault("turn")
                self._sample_wave(wave)
                patience = max(SHORTEST_WAIT_S, time.monotonic() - began)

    @property
    def _is_full(self) -> bool:
        by_us = self.proxy.launch.command is not None
        return by_us and len(self.playing) >= self.proxy.keys.workers

    def _look_after_host(self) -> None:
        """Restart a host that has exited; the episodes that it had have no score."""
        host = self.proxy.host
        if host is None or (why := host.revive()) is None:
            return
        for played in self.playing:
            talk = played.conversation
            if talk in self.queue.fetched and not talk.is_done:
                self.queue.end_conversation(talk, f"its host was lost: {why}")

    def abandon(self) -> None:
        """End every agent, including those that have left their process group."""
        self.ended.set()
        if self.watch.is_alive():
            self.watch.join()
        for played in [*self.playing, *self.to_start]:
            self.queue.close_conversation(played.conversation)
            if played.process is not None:
                played.process.kill()
        if self.proxy.launch.per_episode is not None:
            kill_marked_processes(MARK_VARIABLE, self.mark)

    def _start_agents(self) -> None:
        for _ in range(STARTS_AT_ONCE):
            if not self.to_start or self._is_full:
                return
            played = self.to_start.popleft()
            self.playing.append(played)
            command = self.proxy.launch.per_episode
            self.queue.add_live(played.conversation, offer=command is None)
            if command is not None:
                played.process = self._start_process(played.conversation, command)
                played.conversation.began_at = time.monotonic()

    def _start_process(self, conversation: Conversation, command: Sequence[str]) -> AgentProcess:
        server, group = self.proxy.server, conversation.episode.group
        url = server.base_url(conversation)
        env = agent_environment(row_of_group(group), url, conversation.key, self.proxy.keys.host)
        env |= {
            MARK_VARIABLE: self.mark,
            "RLOO_MODEL": MODEL_NAME,
            "RLOO_SEED": str(conversation.episode.seed),
        }
        try:
            return AgentProcess(command, env, server.thread.loop)
        except OSError as error:
            raise start_error(command, error) from None

    def _end_episodes(self) -> None:
        for played in list(self.playing):
            self._look_after(played)
            if played.is_over:
                self._finish(played)

    def _watch_agents(self) -> None:
        """End agents that time out while a wave is sampled; a wave may outlast their limit.

        An agent whose request is in the wave is waiting for us, and is checked afterwards.
        """
        while not self.ended.wait(POLL_S):
            for played in list(self.playing):
                if not played.conversation.is_waiting:
                    self._look_after(played)

    def _look_after(self, played: _Played) -> None:
        """Note that an episode is over, and why it failed if its agent did not finish cleanly."""
        talk, most = played.conversation, self.proxy.keys.max_seconds
        with self.queue.changed:
            if played.is_over:
                return
            code = played.process.exit_code() if played.process is not None else None
            late = code is None and talk.thinking_s(time.monotonic()) > most
            if code is None and not late and not talk.is_done:
                return
            # If a limit ended it first, the agent's reaction to that error does not matter; a
            # signal is not a reaction to an error.
            ended_by = talk.episode.ended_by
            if late and not talk.is_done and ended_by is None:
                talk.episode.fail(f"the agent took more than {most:g} s (agent.max_seconds)")
            elif code and (code < 0 or ended_by is None) and played.process is not None:
                talk.episode.fail(describe_exit(code, played.process.last_line()))
            played.is_over = True
        if played.process is not None:
            played.process.kill()

    def _check_that_agents_come(self) -> None:
        """Raise GenerationError if agents that connect on their own stay away for too long."""
        offered, now = self.queue.offered, time.monotonic()
        if self.proxy.host is not None:  # it has its own check
            return
        if len(offered) < len(self.playing) or not offered:
            self.alone_since = now
        most = self.proxy.keys.max_seconds
        if now - self.alone_since <= most:
            return
        what = f"no agent has fetched an episode within {most:g} s, and {len(offered)} are waiting"
        why = f"agents that connect on their own call POST {self.proxy.server.url}/rloo/next"
        if self.queue.wrong_keys:
            why += f"; {self.queue.wrong_keys} requests had a wrong token or key"
        fix = "start the agents, set agent.command to start them, or raise agent.max_seconds"
        refuse("agent.max_seconds", what, fix, why, error=GenerationError)

    def _finish(self, played: _Played) -> None:
        """Finish an episode; with the last one of its group, finish the group."""
        talk = played.conversation
        self.queue.close_conversation(talk)
        self.playing.remove(played)
        if played.process is not None:
            played.process.kill()
        if not talk.episode.turns:
            talk.episode.fail("the agent made no request that was sampled")
        elif talk.undelivered:
            talk.episode.fail("the agent closed the connection before its last answer")
        i = played.group_index
        self.unfinished[i] -= 1
        if not self.unfinished[i]:
            episodes = [p.conversation.episode for p in self.family[i]]
            finish_group(self.groups[i], episodes)
            self.arrived(i)

    def _sample_wave(self, wave: Sequence[Conversation]) -> None:
        asked: dict[tuple[int, tuple[int, ...]], list[Conversation]] = {}
        for talk in wave:  # siblings' first turns share one prompt
            key = talk.episode.group.prompt_offset, tuple(talk.episode.sent_ids)
            asked.setdefault(key, []).append(talk)
        together = list(asked.values())
        stand_ins, seeds = [], []
        for talks in together:
            group = talks[0].episode.group
            ids = talks[0].episode.sent_ids
            stand_ins.append(Group(group.prompt_offset, group.example, group.prompt, ids))
            seeds.append([turn_seed(t.episode.seed, len(t.episode.turns)) for t in talks])

        def heard(index: int) -> None:
            stand_in = stand_ins[index]
            for talk, sampled in zip(together[index], stand_in.rollouts, strict=True):
                self.queue.answer_request(talk, sampled, stand_in.prompt_ids)

        self.proxy.inner.generate(stand_ins, seeds, arrived=heard, **self.options)
