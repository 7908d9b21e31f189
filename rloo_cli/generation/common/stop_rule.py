"""When a completion ends, and what its text is.

It ends at the first of: a stop id, a stop string, the length limit. The pad id is never consulted:
padding is known from lengths. The stop id, or the tokens that complete a stop string, belong to
the completion's ids and not to its text.
"""

from typing import TYPE_CHECKING

from rloo_cli.config.schema import GenerationConfig
from rloo_cli.utils.errors import ConfigError, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

STOP_WINDOW_SLACK = 8  # tokens before a stop string: decoding must not begin within a character


def stop_ids(
    tokenizer: "PreTrainedTokenizerBase", model: "PreTrainedModel", config: GenerationConfig
) -> set[int]:
    """Every id that ends a completion: EOS of tokenizer, generation config and model config, and
    `stop_token_ids`. With `ignore_eos` only the latter.

    Many models declare several EOS ids, in different files; comparing with only one would count
    finished completions as truncated.
    """
    ids = set(config.stop_token_ids)
    if config.ignore_eos:
        return ids
    for holder in (tokenizer, getattr(model, "generation_config", None), model.config):
        eos = getattr(holder, "eos_token_id", None)
        if eos is not None:
            ids.update([eos] if isinstance(eos, int) else eos)
    return ids


class StopRule:
    """The rule of one config. Raises ConfigError for a stop string that can never be found."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        model: "PreTrainedModel",
        config: GenerationConfig,
    ):
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids(tokenizer, model, config)
        self.stop_strings = config.stop
        self.max_completion_length = config.max_completion_length
        self.min_tokens = config.min_tokens
        self.special_tokens = _special_tokens(tokenizer)
        _check_stop_strings(self.stop_strings, self.special_tokens)
        # A token of the text has at least one byte: a stop string has no more tokens than bytes.
        longest = max((len(s.encode()) for s in self.stop_strings), default=0)
        self.stop_window = longest + STOP_WINDOW_SLACK

    def finish_reason(self, ids: list[int], max_tokens: int | None = None) -> str | None:
        """Why the completion `ids` has ended (`stop`, `length`), or None if it has not.

        It is called after each token, so a stop string, if there is one, ends in the last token.
        `max_tokens`: its own limit; None = max_completion_length.
        """
        if ids[-1] in self.stop_ids or self._ends_with_stop_string(ids):
            return "stop"
        return "length" if len(ids) >= (max_tokens or self.max_completion_length) else None

    def terminated(self, ids: list[int], finish_reason: str) -> bool:
        """Whether the completion ended on its own: an engine may report `length` if the last
        allowed token is a stop id."""
        return finish_reason == "stop" or ids[-1] in self.stop_ids

    def text(self, ids: list[int]) -> str:
        """The completion's text, without the stop id, or cut at the stop string."""
        if ids[-1] in self.stop_ids:
            return self._decode(ids[:-1])
        text = self._decode(ids)
        return text[: self._stop_string_index(text, ids)]

    def _ends_with_stop_string(self, ids: list[int]) -> bool:
        if not self.stop_strings:
            return False
        shown = [i for i in ids if i not in self.special_tokens][-self.stop_window :]
        tail = self._decode(shown)  # cheap: all is decoded only if the tail has a stop string
        hit = any(s in tail for s in self.stop_strings)
        return hit and self._stop_string_index(self._decode(ids), ids) is not None

    def _stop_string_index(self, text: str, ids: list[int]) -> int | None:
        """The index in `text` of the first stop string that ends after min_tokens.

        An earlier one does not count, as in vLLM: neither stop ids nor stop strings end a
        completion within min_tokens.
        """
        before = len(self._decode(ids[: self.min_tokens])) if self.min_tokens else 0
        starts = [text.find(s, max(0, before - len(s) + 1)) for s in self.stop_strings]
        return min((s for s in starts if s >= 0), default=None)

    def _decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text


def _special_tokens(tokenizer: "PreTrainedTokenizerBase") -> dict[int, str]:
    """id -> text of the tokens that `skip_special_tokens` leaves out."""
    named = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return dict(named) | {i: str(token) for i, token in added.items() if token.special}


def _check_stop_strings(strings: list[str], special_tokens: dict[int, str]) -> None:
    problems = []
    if "" in strings:
        why, fix = "it would end every completion at once", "leave '' out of generation.stop"
        problems.append(Problem("a stop string is empty", "generation.stop", why, fix))
    for stop in strings:
        for i, token in special_tokens.items():
            if token and token in stop:
                what = f"the stop string {stop!r} can never be found"
                why = f"{token!r} is a special token, which text never contains"
                fix = f"generation.stop_token_ids=[{i}]"
                problems.append(Problem(what, "generation.stop", why, fix))
    if problems:
        raise ConfigError(*problems)
