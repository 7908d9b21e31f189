"""Makes a reward model's inputs: the sampled ids if it can read them, else the text.

By ids: the prompt's ids and the completion's, as sampled. That is correct only if
policy and reward model have the same vocabulary, the same special tokens and, for conversations,
the same chat template, which is checked token by token and by encoding real prompts. By text: a
conversation goes through the reward model's own chat template, plain text is tokenized as one
string, and special tokens are added once.

A completion's text is encoded as text: if it spells a special token, `<|im_end|>`, the reward
model gets the characters instead of the token; otherwise a policy could write user turns.

A completion that ended on its own keeps the EOS that such models were trained on (`keep_eos`); in a
conversation the chat template decides how a turn ends. The model does not know a stop string or
another stop id: the text of such a completion is encoded again instead of its ids.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rloo_cli.data.chat_templates import apply_chat_template
from rloo_cli.rewards.common.text import Completion, texts
from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:  # these import torch
    from transformers import PreTrainedTokenizerBase

    from rloo_cli.data.batch import Prompt
    from rloo_cli.data.prompts import Prompts

NUM_PROBED_PROMPTS = 8  # prompts that are encoded by both tokenizers
PROBE_WORD = "Yes"
PRIVATE_USE_START = 0xF0000  # private-use characters begin here


@dataclass(frozen=True)
class PromptCompletion:
    """A completion and its prompt."""

    prompt: "Prompt"
    completion: Completion
    prompt_ids: list[int]
    completion_ids: list[int]
    finish_reason: str

    @property
    def conversational(self) -> bool:
        return not isinstance(self.prompt, str)


class RewardInputEncoder:
    """Encodes prompts and completions for one reward model, which has `tokenizer`.

    `input_mode`: auto, text or ids. `max_length`: tokens of an input; longer ones are cut at the
    beginning. `why_not_ids`: why it cannot read ids (None = it can), by whether the prompts are
    conversations; it has an entry for each kind that `check_split` has seen.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", policy_tokenizer: "PreTrainedTokenizerBase",
        input_mode: str, keep_eos: bool, max_length: int | None,
    ) -> None:  # fmt: skip
        self.tokenizer, self.policy_tokenizer = tokenizer, policy_tokenizer
        self.input_mode, self.keep_eos, self.max_length = input_mode, keep_eos, max_length
        self.vocab_ids = frozenset(tokenizer.get_vocab().values())
        special = {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special}
        named = sorted({*special, *tokenizer.all_special_tokens}, key=len, reverse=True)
        self.mark_of_special = {token: chr(PRIVATE_USE_START + n) for n, token in enumerate(named)}
        self.special_of_mark = {mark: token for token, mark in self.mark_of_special.items()}
        self.marks = frozenset(self.special_of_mark)
        # (?!) matches nothing: the tokenizer may have no special tokens.
        self.special_pattern = re.compile("|".join(map(re.escape, named)) or "(?!)")
        self.mark_pattern = re.compile(f"([{''.join(self.marks)}])" if named else "(?!)")
        self.turn_end_ids: list[int] = []  # the chat template's ids after an answer
        self.why_not_ids: dict[bool, str | None] = {}

    def check_split(self, prompts: "Prompts") -> None:
        """Find out whether the reward model can read the ids of this split's completions."""
        before = self.why_not_ids.get(prompts.conversational)
        why = "input is text" if self.input_mode == "text" else self._why_ids_differ(prompts)
        self.why_not_ids[prompts.conversational] = before or why

    def encode(self, example: PromptCompletion) -> list[int]:
        """The exact input ids of the model, without padding."""
        by_ids = self.why_not_ids.get(example.conversational, "not seen before") is None
        ids = self._encode_by_ids(example) if by_ids else self._encode_by_text(example)
        return ids[-self.max_length :] if self.max_length else ids

    def _encode_by_ids(self, example: PromptCompletion) -> list[int]:
        eos, ids = self.tokenizer.eos_token_id, example.completion_ids
        at_eos = eos is not None and ids[-1:] == [eos]
        stopped = example.finish_reason == "stop"
        body = ids[:-1] if at_eos else list(ids)
        if (stopped and not at_eos) or not self.vocab_ids.issuperset(body):
            body = self._encode_marked(self._mark_specials(texts([example.completion])[0]))
        if example.conversational and self.input_mode != "ids":
            return [*example.prompt_ids, *body, *self.turn_end_ids]
        ends = (stopped or at_eos) and self.keep_eos and eos is not None
        return [*example.prompt_ids, *body, *([eos] if ends else [])]

    def _encode_by_text(self, example: PromptCompletion) -> list[int]:
        if isinstance(example.prompt, list):
            assert isinstance(example.completion, list)
            answer = [
                m | {"content": self._mark_specials(str(m.get("content") or ""))}
                for m in example.completion
            ]
            return self._encode_conversation([*example.prompt, *answer])
        marked = self._mark_specials(texts([example.completion])[0])
        if self.marks.isdisjoint(marked):
            ids = list(self.tokenizer(example.prompt + marked)["input_ids"])
        else:
            first, last = self._surrounding_ids()
            ids = [*first, *self._encode_marked(example.prompt + marked), *last]
        eos, last_id = self.tokenizer.eos_token_id, self.policy_tokenizer.eos_token_id
        ended = example.finish_reason == "stop" or example.completion_ids[-1:] == [last_id]
        # Some tokenizers append EOS to every text.
        ends = ended and self.keep_eos and eos is not None and ids[-1:] != [eos]
        return self._drop_second_bos([*ids, *([eos] if ends else [])])

    def _encode_conversation(self, messages: list[JsonObject]) -> list[int]:
        text = apply_chat_template(self.tokenizer, messages)
        return self._drop_second_bos(self._encode_marked(text))

    def _encode_plain(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _mark_specials(self, text: str) -> str:
        """A completion's text with a private character for each special token that it spells.

        Otherwise a completion could end its own turn and write the user's. `_encode_marked` turns
        these characters into the ids of the text that was spelled.
        """
        return self.special_pattern.sub(lambda found: self.mark_of_special[found[0]], text)

    def _encode_marked(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in self.mark_pattern.split(text):
            special = self.special_of_mark.get(part)
            if special is None:
                ids += self._encode_plain(part) if part else []
            else:
                keys = {"add_special_tokens": False, "split_special_tokens": True}
                ids += self.tokenizer(special, **keys)["input_ids"]
        return ids

    def _surrounding_ids(self) -> tuple[list[int], list[int]]:
        """The ids that the tokenizer adds before and after a text."""
        whole, bare = list(self.tokenizer(PROBE_WORD)["input_ids"]), self._encode_plain(PROBE_WORD)
        starts = range(len(whole) - len(bare) + 1)
        at = next((i for i in starts if whole[i : i + len(bare)] == bare), 0)
        return whole[:at], whole[at + len(bare) :]

    def _drop_second_bos(self, ids: list[int]) -> list[int]:
        """Drop one BOS if both the prompt and the tokenizer add one."""
        bos = self.tokenizer.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    def _why_ids_differ(self, prompts: "Prompts") -> str | None:
        """Why the policy's ids mean another text to the reward model; None if they do not."""
        why = tokenizer_difference(self.policy_tokenizer, self.tokenizer, prompts.conversational)
        if why is not None:
            return why
        few = slice(NUM_PROBED_PROMPTS)
        pairs = list(zip(prompts.prompts[few], prompts.prompt_ids[few], strict=True))
        if not prompts.conversational:
            for prompt, ids in pairs:
                found = list(self.tokenizer(prompt)["input_ids"])
                cut = prompts.truncated and len(found) > len(ids)
                if found != ids and not cut:
                    return f"they encode {str(prompt)[:40]!r} differently"
            return None
        return None if self.input_mode == "ids" else self._find_turn_end(pairs)

    def _find_turn_end(self, pairs: "Sequence[tuple[Prompt, list[int]]]") -> str | None:
        """Set `turn_end_ids` from encoded prompts. Returns why ids cannot be used, or None."""
        tails = set()
        for prompt, ids in pairs:
            assert isinstance(prompt, list)
            start = [*ids, *self._encode_plain(PROBE_WORD)]
            answer = {"role": "assistant", "content": PROBE_WORD}
            found = self._encode_conversation([*prompt, answer])
            if found[: len(start)] != start:
                return "its chat template changes the prompt that the policy reads"
            tails.add(tuple(found[len(start) :]))
        if len(tails) != 1:
            return "its chat template can end an answer in several ways"
        self.turn_end_ids = list(tails.pop())
        return None


def tokenizer_difference(
    policy_tokenizer: "PreTrainedTokenizerBase",
    reward_tokenizer: "PreTrainedTokenizerBase",
    conversational: bool,
) -> str | None:
    """The first difference between two tokenizers, or None if they agree.

    Pad tokens are ignored: they are never sampled or read. Chat templates are compared if
    the prompts are conversations (`conversational`).
    """
    policy = _vocab_without_pad(policy_tokenizer), "the policy's tokenizer"
    reward = _vocab_without_pad(reward_tokenizer), "the reward model's"
    for pair in ((policy, reward), (reward, policy)):
        if difference := _first_different_token(*pair[0], *pair[1]):
            return difference
    for name in ("bos_token", "eos_token"):
        if getattr(policy_tokenizer, f"{name}_id") != getattr(reward_tokenizer, f"{name}_id"):
            ours, its = getattr(policy_tokenizer, name), getattr(reward_tokenizer, name)
            return f"{name} is {ours!r} for the policy and {its!r} for the reward model"
    if conversational and policy_tokenizer.chat_template != reward_tokenizer.chat_template:
        return "their chat templates differ"
    return None


def _first_different_token(
    vocab: dict[str, int], name: str, other_vocab: dict[str, int], other_name: str
) -> str | None:
    """The first token that the other vocabulary lacks or gives another id."""
    for token, i in sorted(vocab.items(), key=lambda pair: pair[1]):
        if other_vocab.get(token) != i:
            other = f"is {other_vocab[token]}" if token in other_vocab else "missing"
            return f"token {token!r} is {i} in {name} and {other} in {other_name}"
    return None


def _vocab_without_pad(tokenizer: "PreTrainedTokenizerBase") -> dict[str, int]:
    vocab: dict[str, int] = dict(tokenizer.get_vocab())
    if tokenizer.pad_token_id != tokenizer.eos_token_id:
        vocab.pop(tokenizer.pad_token, None)
    return vocab
