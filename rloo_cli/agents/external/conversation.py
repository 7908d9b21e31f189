"""One episode as its agent sees it: what each request adds to it, and what is answered.

The ids of a request are those of all earlier turns, as sampled, followed by the new ones, rendered
by difference. An agent that truncates its history, or runs a second agent, sends requests that
continue none of the episode's histories: each begins its own row, up to `agent.max_rows`, and all
rows share the episode's score. Beyond that such a request is refused, and the episode has no score:
training on a conversation that the agent did not have would be wrong.
"""

import re
import time
from concurrent.futures import Future
from dataclasses import dataclass, field

from rloo_cli.agents.common.call_parsers import CallParser, ParsedCalls
from rloo_cli.agents.common.episode import CallCounts, Episode
from rloo_cli.agents.common.turn_rendering import TurnRenderer, call_id
from rloo_cli.agents.external.message_forms import (
    AgentRequest,
    RequestRefused,
    first_difference,
    message_for_template,
)
from rloo_cli.data.batch import Rollout, Turn
from rloo_cli.data.render import render_prompt
from rloo_cli.utils.errors import GenerationError
from rloo_cli.utils.files import JsonObject

# The starts of a call; the text before is the answer's content.
CALL_MARKS = re.compile(r"<tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>|<\|tool_call_start\|>|[\[{]")


@dataclass
class RequestCounts(CallCounts):
    """Counts of an episode's calls and requests by outcome."""

    refused: int = 0  # requests that got an error


@dataclass(frozen=True)
class ExternalRules:
    """Settings shared by all episodes of a run."""

    renderer: TurnRenderer
    parser: CallParser
    max_turns: int
    max_rows: int
    max_completion_length: int
    max_tokens: int  # of prompt and all turns


@dataclass(frozen=True)
class AgentAnswer:
    """The answer to a request. Its message is in the common form (`message_forms`)."""

    id: str
    message: JsonObject
    finish_reason: str  # stop, length, tool_calls
    num_prompt_tokens: int
    num_sampled_tokens: int


@dataclass
class History:
    """One row of an episode as its agent sees it."""

    row: int
    tools: list[JsonObject]
    messages: list[JsonObject] = field(default_factory=list)
    last_turn: Turn | None = None
    answer_id: str | None = None  # of the last answer


@dataclass
class Conversation:
    """A running episode, with its agent's key. Hold the queue's lock to change it."""

    episode: Episode
    slug: str  # its part of the URL
    key: str
    counts: RequestCounts
    request: AgentRequest | None = None  # the last accepted one
    answer: "Future[AgentAnswer] | None" = None  # to that request
    histories: list[History] = field(default_factory=list)  # of each row
    asked_in: History | None = None  # the one that the request continues
    answered_at: float = 0.0
    began_at: float | None = None  # when its agent started or fetched it
    asked_at: float | None = None  # since when its agent waits for the policy
    waited_s: float = 0.0
    is_done: bool = False  # the agent has reported so
    undelivered: bool = False  # its connection was gone when the last answer was ready

    @property
    def is_waiting(self) -> bool:
        """Whether its agent is waiting for the policy."""
        return self.asked_at is not None

    def thinking_s(self, now: float) -> float:
        """Seconds that its agent has used, without its waits for the policy."""
        if self.began_at is None:
            return 0.0
        waiting = 0.0 if self.asked_at is None else now - self.asked_at
        return now - self.began_at - self.waited_s - waiting

    def take_request(self, request: AgentRequest, rules: ExternalRules) -> None:
        """Set the ids that the next turn continues to those of a request.

        Raises RequestRefused, and then leaves the episode unchanged.
        """
        history, messages = self._find_history(request, rules)
        new = messages[len(history.messages) :]
        if not new or messages[-1]["role"] == "assistant":
            why = "the last message is the assistant's, so nothing is left to answer"
            raise RequestRefused(400, "invalid_request", why)
        if history.last_turn is not None and any(m["role"] == "assistant" for m in new):
            raise _refuse_history("an assistant message was not sampled by this policy")
        ids = self._new_ids(new, request, history, rules)
        self._check_limits(len(ids), rules)
        shown = [message_for_template(m) for m in new]
        self.episode.row = history.row
        if self.episode.turns:
            self.episode.new_ids, self.episode.new_messages = ids, shown
        else:
            self.episode.base_ids = ids
            self.episode.new_messages = [] if shown == self.episode.group.prompt else shown
        if history not in self.histories:
            self.histories.append(history)
        self.asked_in, history.messages = history, messages

    def _find_history(
        self, request: AgentRequest, rules: ExternalRules
    ) -> tuple[History, list[JsonObject]]:
        """The history that a request continues, or a new one, and all of its messages."""
        if request.previous_id is not None:
            return self._history_by_answer(request)
        why = ""
        for history in sorted(self.histories, key=lambda h: -len(h.messages)):
            if request.tools != history.tools:
                why = why or "its tools are not those of the episode's first request"
            elif difference := first_difference(history.messages, request.messages):
                why = why or difference
            else:
                return history, request.messages
        if not self.histories or (self.episode.turns and len(self.histories) < rules.max_rows):
            return History(len(self.histories), request.tools), request.messages
        raise _refuse_history(why)

    def _history_by_answer(self, request: AgentRequest) -> tuple[History, list[JsonObject]]:
        found = [h for h in self.histories if h.answer_id == request.previous_id]
        if not found:
            raise _refuse_history("previous_response_id is not the episode's last answer")
        (history,), new = found, request.messages
        if request.tools != history.tools:
            raise _refuse_history("its tools are not those of the episode's first request")
        if new[0] == history.messages[0] and new[0]["role"] == "system":
            new = new[1:]  # instructions, which each request repeats
        return history, [*history.messages, *new]

    def _new_ids(
        self,
        new: list[JsonObject],
        request: AgentRequest,
        history: History,
        rules: ExternalRules,
    ) -> list[int]:
        renderer = rules.renderer
        shown = [
            message_for_template(m)
            if m["role"] == "assistant"
            else message_for_template(m) | {"content": renderer.split_specials(m["content"])}
            for m in new
        ]
        try:
            turn = history.last_turn
            if turn is None:
                kwargs = renderer.template_kwargs | {"tools": request.tools or None}
                return render_prompt(shown, renderer.tokenizer, kwargs)
            calls = history.messages[-1].get("tool_calls", [])
            call_indices = {c["id"]: i for i, c in enumerate(calls)}
            for message in shown:
                if message["role"] == "tool" and message["tool_call_id"] not in call_indices:
                    what = f"no call has the id {message['tool_call_id']!r:.80}"
                    raise RequestRefused(400, "invalid_request", what)
                if message["role"] == "tool":
                    index = call_indices[message["tool_call_id"]]
                    message |= {"tool_call_id": call_id(index), "name": turn.calls[index]["name"]}
            return renderer.new_ids(turn.calls, shown, request.tools, turn.sampled_ids[-1])
        except GenerationError as error:
            raise RequestRefused(400, "template", error.problems[0].what, True) from None
        except RequestRefused:
            raise
        except Exception as error:  # a template is code and can raise anything
            what = f"the chat template refuses these messages: {type(error).__name__}: {error}"
            raise RequestRefused(400, "template", what[:500]) from None

    def _check_limits(self, num_new: int, rules: ExternalRules) -> None:
        """Raise RequestRefused if a limit leaves no room; that limit then ends the episode."""
        episode = self.episode
        before = len(episode.base_ids) + episode.num_tokens if episode.turns else 0
        whole = before + num_new + rules.max_completion_length
        if len(episode.turns) >= rules.max_turns:
            episode.ended_by = "turns"
            what = f"the episode has had its {rules.max_turns} turns (agent.max_turns)"
        elif whole > rules.max_tokens:
            episode.ended_by = "tokens"
            what = f"{before + num_new} tokens plus an answer of {rules.max_completion_length} are"
            what += f" more than the episode's {rules.max_tokens} (agent.max_episode_tokens, or the"
            what += " model's context)"
        else:
            return
        raise RequestRefused(400, "episode_over", what)

    def add_answer(self, sampled: Rollout, prompt_ids: list[int], rules: ExternalRules) -> None:
        """Take the sampled turn, and answer the request."""
        assert self.request is not None and self.answer is not None
        history = self.asked_in
        assert history is not None
        calls = self._read_calls(sampled, rules) if self.request.reads_calls else ParsedCalls()
        episode, ended = self.episode, sampled.terminated
        found = calls.calls if ended else []
        history.last_turn = episode.add_turn(sampled, prompt_ids, found)
        assert not episode.retokenised, "a turn was sampled from ids other than those before it"
        self.counts.calls += len(found)
        self.counts.bad_calls += len(calls.unreadable)
        if not ended:
            episode.ended_by = episode.ended_by or "completion"  # it may have failed already
        message = _answer_message(sampled.text, found, len(episode.turns))
        history.messages = [*history.messages, message]
        reason = "length" if not ended else "tool_calls" if found else "stop"
        number = history.answer_id = f"{self.slug}-{len(episode.turns)}"
        self.answered_at = time.monotonic()
        self.waited_s += self.answered_at - (self.asked_at or self.answered_at)
        self.asked_at = None
        self.answer.set_result(
            AgentAnswer(number, message, reason, len(prompt_ids), len(sampled.completion_ids))
        )

    def _read_calls(self, sampled: Rollout, rules: ExternalRules) -> ParsedCalls:
        ids, renderer = sampled.completion_ids, rules.renderer
        kept = ids[:-1] if ids[-1] in renderer.stop_ids else ids
        return rules.parser(renderer.tokenizer.decode(kept, skip_special_tokens=False))


def _answer_message(text: str, calls: list[JsonObject], turn: int) -> JsonObject:
    """The assistant's message; the ids of its calls are unique in the episode."""
    if not calls:
        return {"role": "assistant", "content": text}
    mark = CALL_MARKS.search(text)
    before = text[: mark.start()] if mark is not None else ""
    named = [
        {"id": f"t{turn:04d}c{i:03d}", "name": c["name"], "arguments": c["arguments"]}
        for i, c in enumerate(calls)
    ]
    return {"role": "assistant", "content": before.strip(), "tool_calls": named}


def _refuse_history(why: str) -> RequestRefused:
    what = f"the request does not continue this episode: {why}. An episode is one conversation"
    what += " that grows (or agent.max_rows of them); it has no score now"
    return RequestRefused(400, "history_differs", what, True)
