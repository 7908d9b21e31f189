"""Where the requests of agents wait for the sampler.

The server's thread adds requests, the generator's thread takes all waiting ones as one wave, and
any thread delivers the answers. One lock guards every conversation.
"""

import hmac
import secrets
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

from rloo_cli.agents.common.episode import Episode
from rloo_cli.agents.common.tool_set import Environment
from rloo_cli.agents.external.conversation import (
    AgentAnswer,
    Conversation,
    ExternalRules,
    RequestCounts,
)
from rloo_cli.agents.external.message_forms import AgentRequest, RequestRefused
from rloo_cli.data.batch import Group, Rollout
from rloo_cli.utils.files import JsonObject

KEY_START = "rloo-"
MAX_REFUSED = 64  # errors of one episode before it is ended


class RequestQueue:
    """The running conversations."""

    def __init__(self, rules: ExternalRules):
        self.rules = rules
        self.changed = threading.Condition()
        self.live: dict[str, Conversation] = {}  # by the episode's part of the URL
        self.ready: list[Conversation] = []  # waiting to be sampled
        self.offered: list[Conversation] = []  # for agents that connect on their own
        self.num_opened = 0
        self.num_given = 0  # to agents that connect on their own, since the run began
        self.wrong_keys = 0  # requests since the run began

    @property
    def fetched(self) -> list[Conversation]:
        """Episodes with an agent."""
        return [talk for talk in list(self.live.values()) if talk.began_at is not None]

    def open_conversation(self, group: Group, k: int, seed: int) -> Conversation:
        """A conversation of a new episode, which is not live yet."""
        self.num_opened += 1
        counts = RequestCounts()
        episode = Episode(group, k, seed, Environment([], {}), group.prompt_ids, counts=counts)
        key = KEY_START + secrets.token_urlsafe(32)
        return Conversation(episode, str(self.num_opened), key, counts)

    def add_live(self, conversation: Conversation, offer: bool) -> None:
        """Let an agent use it; `offer`: one that connects on its own."""
        with self.changed:
            self.live[conversation.slug] = conversation
            if offer:
                self.offered.append(conversation)

    def close_conversation(self, conversation: Conversation) -> None:
        """End an episode: its key is invalid from now on; a waiting request gets an error."""
        with self.changed:
            self.live.pop(conversation.slug, None)
            for waiting in (self.ready, self.offered):
                if conversation in waiting:
                    waiting.remove(conversation)
            answer = conversation.answer
            if answer is not None and not answer.done():
                answer.set_exception(RequestRefused(410, "episode_over", "the episode has ended"))

    def find_conversation(self, slug: str, key: str) -> Conversation:
        """The episode of a part of the URL. Raises RequestRefused for another episode's key."""
        with self.changed:
            found = self.live.get(slug)
            if found is not None and same_secret(found.key, key):
                return found
            self.wrong_keys += 1
            if any(same_secret(other.key, key) for other in self.live.values()):
                raise RequestRefused(403, "wrong_key", "the key belongs to another episode")
        what = "the key is unknown, or its episode has ended"
        raise RequestRefused(401, "wrong_key", what)

    def take_offer(self) -> Conversation | None:
        """An episode for an agent that connects on its own; None = none is waiting."""
        with self.changed:
            if not self.offered:
                return None
            found = self.offered.pop(0)
            found.began_at = time.monotonic()
            self.num_given += 1
            self.changed.notify_all()
            return found

    def ask_policy(
        self, conversation: Conversation, request: AgentRequest
    ) -> "Future[AgentAnswer]":
        """Queue a request for the sampler. -> its future answer. Raises RequestRefused.

        A repeated request gets the answer to the first one: clients retry on their own.
        """
        with self.changed:
            episode = conversation.episode
            if conversation.answer is not None and request == conversation.request:
                return conversation.answer
            if conversation.is_waiting:
                what = "another request of this episode is waiting; send one at a time"
                raise RequestRefused(409, "busy", what)
            if episode.ended_by is not None:
                what = f"the episode has ended ({episode.failed or episode.ended_by})"
                raise RequestRefused(400, "episode_over", what)
            conversation.take_request(request, self.rules)
            now = time.monotonic()
            if episode.turns and episode.turns[-1].calls:
                conversation.counts.tool_s += now - conversation.answered_at
            conversation.request, conversation.answer = request, Future()
            conversation.asked_at, conversation.undelivered = now, False
            self.ready.append(conversation)
            self.changed.notify_all()
            return conversation.answer

    def note_refusal(self, conversation: Conversation, refused: RequestRefused) -> None:
        """Count an error returned to an episode's agent; some cost the episode its score."""
        with self.changed:
            conversation.counts.refused += 1
            if refused.ends_episode:
                conversation.episode.fail(str(refused))
            elif conversation.counts.refused > MAX_REFUSED:
                conversation.episode.fail(f"more than {MAX_REFUSED} of its requests were refused")
                conversation.is_done = True

    def note_lost_answer(self, conversation: Conversation, request: AgentRequest) -> None:
        """Note that the connection was gone when a request's answer was ready."""
        with self.changed:
            if conversation.request is request:
                conversation.undelivered = True

    def take_reward(self, conversation: Conversation, value: float) -> None:
        """Store the agent's own reward for its episode; the last one counts."""
        with self.changed:
            conversation.episode.reward = value

    def end_conversation(self, conversation: Conversation, error: str | None) -> None:
        """The agent reports that it is done, or why it failed."""
        with self.changed:
            if error is not None:
                conversation.episode.fail(f"the agent: {error[:200]}")
            conversation.is_done = True
            self.changed.notify_all()

    def take_wave(self, in_flight: int, patience_s: float, most_s: float) -> list[Conversation]:
        """All waiting requests: once every running agent waits, or after `patience_s`.

        Waits at most `most_s` seconds for a first one. -> in the order of their episodes
        """
        limit = time.monotonic() + most_s
        with self.changed:
            while not self.ready:
                left = limit - time.monotonic()
                if left <= 0 or not self.changed.wait(left):
                    return []
            first = min(c.asked_at or 0.0 for c in self.ready)
            while len(self.ready) < in_flight:
                left = first + patience_s - time.monotonic()
                if left <= 0 or not self.changed.wait(min(left, most_s)):
                    break
            if len(self.ready) < in_flight and time.monotonic() < first + patience_s:
                return []  # so that the caller can check its agents
            wave = sorted(self.ready, key=_episode_order)
            self.ready.clear()
            return wave

    def answer_request(
        self, conversation: Conversation, sampled: Rollout, prompt_ids: Sequence[int]
    ) -> None:
        """Deliver the sampled answer to a request. Called from any thread."""
        with self.changed:
            conversation.add_answer(sampled, list(prompt_ids), self.rules)


def row_of_group(group: Group) -> JsonObject:
    """What an agent gets: the row's columns, and the prompt."""
    return {**group.example, "prompt": group.prompt}


def _episode_order(conversation: Conversation) -> tuple[int, int]:
    return conversation.episode.group.prompt_offset, conversation.episode.k


def same_secret(known: str, given: str) -> bool:
    """Whether two secrets are equal, in constant time."""
    return hmac.compare_digest(known.encode(), given.encode())
