"""An episode as a conversation: the policy's messages and calls, and the answers.

A sample written by a run has `turns`; here they become parts with a heading, for the panel, for
`rloo samples` and for a report. Texts are exactly as the model and the tools wrote them: whoever
shows a part has to clean it (`clean_line`, `show_control_characters`, a page's escapes).
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rloo_cli.utils.files import JsonObject

# Why an episode ended, for people; a reason that is missing here is shown as it is.
ENDS = {
    "answer": "an answer",
    "done": "the environment",
    "bad_call": "a call that was not right",
    "failed": "a failure",
    "turns": "agent.max_turns",
    "tokens": "agent.max_episode_tokens",
    "context": "the model's context",
    "completion": "generation.max_completion_length",
}


@dataclass(frozen=True)
class ConversationPart:
    """A message between the policy and its tools."""

    kind: Literal["told", "said", "called"]
    head: str  # the speaker: a tool's name, a role, or the turn's number
    text: str


def conversation_parts(sample: Mapping[str, Any]) -> list[ConversationPart]:
    """The parts of an episode in order; [] for one answer to a prompt."""
    turns = sample.get("turns")
    found: list[ConversationPart] = []
    for number, turn in enumerate(turns if isinstance(turns, list) else [], 1):
        if not isinstance(turn, dict):
            continue
        for message in _objects(turn.get("told")):
            head = str(message.get("name") or message.get("role") or "told")
            found.append(ConversationPart("told", head, _content_text(message.get("content"))))
        found.append(ConversationPart("said", f"turn {number}", str(turn.get("said", ""))))
        for call in _objects(turn.get("calls")):
            arguments = json.dumps(call.get("arguments"), ensure_ascii=False)
            text = f"{call.get('name')}({arguments})"
            found.append(ConversationPart("called", "calls", text))
    return found


def _objects(values: object) -> Iterator[JsonObject]:
    for value in values if isinstance(values, list) else []:
        if isinstance(value, dict):
            yield value


def _content_text(content: object) -> str:
    """A message's text; for blocks, the text of each, or its type if it has none."""
    if not isinstance(content, list):
        return str(content)
    blocks = [block if isinstance(block, dict) else {"text": block} for block in content]
    return "\n".join(str(b.get("text", f"[{b.get('type', 'block')}]")) for b in blocks)


def episode_end(sample: Mapping[str, Any]) -> str:
    """Why an episode ended, its calls, and why it has no score; "" without turns."""
    if not isinstance(sample.get("turns"), list):
        return ""
    facts = sample.get("episode")
    facts = facts if isinstance(facts, dict) else {}
    cause = str(facts.get("ended_by", "?"))
    counts = [(facts.get("calls"), "call"), (facts.get("bad_calls"), "bad call")]
    counts.append((facts.get("errors"), "error"))
    parts = [f"ended by {ENDS.get(cause, cause)}"]
    parts += [f"{n} {word}{'s' * (n != 1)}" for n, word in counts if isinstance(n, int) and n]
    if sample.get("failed"):
        parts.append(f"no score: {sample['failed']}")
    return ", ".join(parts)
