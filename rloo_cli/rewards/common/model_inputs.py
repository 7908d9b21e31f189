"""What a reward model is fed for a row: the sampled ids where it can read them, else text.

By ids: the prompt's ids and the completion's, as they were sampled. That is right only where
policy and reward model have one vocabulary, the same special tokens and, for conversations, the
same chat template, which is asked of them token by token and by encoding real prompts. By text: a
conversation goes through the reward model's own chat template, plain text is tokenised as one
string, and special tokens come once.

A completion's text is encoded as text: where it spells a special token, `<|im_end|>`, the reward
model is fed the characters and not the token, or a policy could write turns of the user's.

A completion that ended by itself keeps the EOS that such models were trained on (`keep_eos`); in a
conversation the chat template says how a turn ends. What stopped it otherwise, a stop string or
another id, is nothing that the model knows: such a row has its text in place of its ids.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rloo_cli.rewards.common.text import Completion, texts

if TYPE_CHECKING:  # both import torch
    from rloo_cli.data.batch import Prompt
    from rloo_cli.data.prompts import Prompts

PROBED = 8  # prompts that are encoded by both tokenizers
WORD = "Yes"
PRIVATE = 0xF0000  # from here on no character of Unicode has a meaning


@dataclass(frozen=True)
class Row:
    """A completion and its prompt."""

    prompt: "Prompt"
    completion: Completion
    prompt_ids: list[int]
    completion_ids: list[int]
    finish_reason: str

    @property
    def conversational(self) -> bool:
        """Whether it is of messages."""
        return not isinstance(self.prompt, str)


class Reader:
    """Rows -> ids, for one reward model. `own`: its tokenizer, `policy`: the policy's.

    `wanted`: auto, text or ids. `why`: what keeps it from reading ids, by whether the rows are
    conversations; None = nothing does. Kinds that no split has are not in it.
    """

    def __init__(
        self, own: Any, policy: Any, wanted: str, keep_eos: bool, max_length: int | None
    ) -> None:
        self.own, self.policy, self.wanted = own, policy, wanted
        self.keep_eos, self.max_length = keep_eos, max_length
        self.known = frozenset(own.get_vocab().values())
        special = {str(t) for t in own.added_tokens_decoder.values() if t.special}
        named = sorted({*special, *own.all_special_tokens}, key=len, reverse=True)
        self.marks_of = {token: chr(PRIVATE + n) for n, token in enumerate(named)}
        self.special_of = {mark: token for token, mark in self.marks_of.items()}
        self.marks = frozenset(self.special_of)
        # What matches nothing, where a tokenizer has no special tokens.
        self.spelled = re.compile("|".join(map(re.escape, named)) or "(?!)")
        self.split = re.compile(f"([{''.join(self.marks)}])" if named else "(?!)")
        self.tail: list[int] = []  # what the chat template puts after an assistant's words
        self.why: dict[bool, str | None] = {}

    def meet(self, prompts: "Prompts") -> None:
        """Find out whether the rows of this split can be read by their ids."""
        kind = prompts.conversational
        before = self.why.get(kind)
        found = "input is text" if self.wanted == "text" else self._difference(prompts)
        self.why[kind] = before or found

    def ids(self, row: Row) -> list[int]:
        """The exact ids the model is fed, without any padding."""
        by_ids = self.why.get(row.conversational, "not seen before") is None
        found = self._by_ids(row) if by_ids else self._by_text(row)
        return found[-self.max_length :] if self.max_length else found

    def _by_ids(self, row: Row) -> list[int]:
        eos, ids = self.own.eos_token_id, row.completion_ids
        at_eos = eos is not None and ids[-1:] == [eos]
        stopped = row.finish_reason == "stop"
        body = ids[:-1] if at_eos else list(ids)
        if (stopped and not at_eos) or not self.known.issuperset(body):
            body = self._encode_marked(self._mark(texts([row.completion])[0]))
        if row.conversational and self.wanted != "ids":
            return [*row.prompt_ids, *body, *self.tail]
        ends = (stopped or at_eos) and self.keep_eos and eos is not None
        return [*row.prompt_ids, *body, *([eos] if ends else [])]

    def _by_text(self, row: Row) -> list[int]:
        if isinstance(row.prompt, list):
            assert isinstance(row.completion, list)
            said = [
                m | {"content": self._mark(str(m.get("content") or ""))} for m in row.completion
            ]
            return self._rendered([*row.prompt, *said])
        marked = self._mark(texts([row.completion])[0])
        if self.marks.isdisjoint(marked):
            ids = list(self.own(row.prompt + marked)["input_ids"])
        else:
            first, last = self._around()
            ids = [*first, *self._encode_marked(row.prompt + marked), *last]
        eos, last_id = self.own.eos_token_id, self.policy.eos_token_id
        ended = row.finish_reason == "stop" or row.completion_ids[-1:] == [last_id]
        # A tokenizer that ends every text by itself has done so.
        ends = ended and self.keep_eos and eos is not None and ids[-1:] != [eos]
        return self._once([*ids, *([eos] if ends else [])])

    def _rendered(self, messages: list[dict[str, Any]]) -> list[int]:
        text = self.own.apply_chat_template(messages, tokenize=False)
        return self._once(self._encode_marked(text))

    def _encode(self, text: str) -> list[int]:
        return list(self.own(text, add_special_tokens=False)["input_ids"])

    def _mark(self, text: str) -> str:
        """A completion's text with a letter of no alphabet for each special token it spells.

        It would else end its own turn and write the user's: `_encode_marked` reads these letters
        as the characters that were spelled.
        """
        return self.spelled.sub(lambda found: self.marks_of[found[0]], text)

    def _marked(self, message: dict[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        return message | {"content": self._mark(content)} if isinstance(content, str) else message

    def _encode_marked(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in self.split.split(text):
            special = self.special_of.get(part)
            if special is None:
                ids += self._encode(part) if part else []
            else:
                keys = {"add_special_tokens": False, "split_special_tokens": True}
                ids += self.own(special, **keys)["input_ids"]
        return ids

    def _around(self) -> tuple[list[int], list[int]]:
        """The ids that the tokenizer puts before and after a text."""
        whole, bare = list(self.own(WORD)["input_ids"]), self._encode(WORD)
        starts = range(len(whole) - len(bare) + 1)
        at = next((i for i in starts if whole[i : i + len(bare)] == bare), 0)
        return whole[:at], whole[at + len(bare) :]

    def _once(self, ids: list[int]) -> list[int]:
        """One beginning of text, where a prompt brings its own beside the tokenizer's."""
        bos = self.own.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    def _difference(self, prompts: "Prompts") -> str | None:
        """Why ids of this split's rows would not say to the reward model what they say here."""
        said = difference(self.policy, self.own, prompts.conversational)
        if said is not None:
            return said
        pairs = list(zip(prompts.prompts, prompts.ids, strict=True))[:PROBED]
        if not prompts.conversational:
            for prompt, ids in pairs:
                found = list(self.own(prompt)["input_ids"])
                cut = prompts.truncated and len(found) > len(ids)
                if found != ids and not cut:
                    return f"they encode {str(prompt)[:40]!r} in different ways"
            return None
        return None if self.wanted == "ids" else self._find_tail(pairs)

    def _find_tail(self, pairs: "Sequence[tuple[Prompt, list[int]]]") -> str | None:
        """What its template adds after an answer; why the ids could not stand in its place."""
        tails = set()
        for prompt, ids in pairs:
            assert isinstance(prompt, list)
            start = [*ids, *self._encode(WORD)]
            found = self._rendered([*prompt, {"role": "assistant", "content": WORD}])
            if found[: len(start)] != start:
                return "its chat template does not leave the prompt as the policy reads it"
            tails.add(tuple(found[len(start) :]))
        if len(tails) != 1:
            return "its chat template ends an answer in more than one way"
        self.tail = list(tails.pop())
        return None


def difference(policy: Any, own: Any, conversational: bool) -> str | None:
    """The first thing in which two tokenizers differ, or None where they agree.

    Pad tokens aside: none is ever sampled or read.
    """
    ours, theirs = _vocabulary(policy), _vocabulary(own)
    mine, its = "the policy's tokenizer", "the reward model's"
    found = _first(ours, theirs, mine, its) or _first(theirs, ours, its, mine)
    if found is not None:
        return found
    for name in ("bos_token", "eos_token"):
        if getattr(policy, f"{name}_id") != getattr(own, f"{name}_id"):
            said = [repr(getattr(t, name)) for t in (policy, own)]
            return f"{name} is {said[0]} for the policy and {said[1]} for the reward model"
    if conversational and policy.chat_template != own.chat_template:
        return "their chat templates differ"
    return None


def _first(one: dict[str, int], other: dict[str, int], name: str, its_name: str) -> str | None:
    """The first token that the other vocabulary has not, or has at another place."""
    for token, i in sorted(one.items(), key=lambda pair: pair[1]):
        if other.get(token) != i:
            there = f"is {other[token]}" if token in other else "is not there"
            return f"token {token!r} is {i} in {name} and {there} in {its_name}"
    return None


def _vocabulary(tokenizer: Any) -> dict[str, int]:
    found: dict[str, int] = dict(tokenizer.get_vocab())
    if tokenizer.pad_token_id != tokenizer.eos_token_id:
        found.pop(tokenizer.pad_token, None)
    return found
