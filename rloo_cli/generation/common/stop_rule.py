"""When a completion ends, and what its text is.

It ends at the first of: a stop id, a stop string, the length limit. Ids decide, never the pad id:
what is padding is known from lengths. The stop id, or the tokens that complete a stop string,
belong to the completion's ids and not to its text.
"""

from typing import Any

from rloo_cli.config.schema import GenerationConfig
from rloo_cli.utils.errors import ConfigError, Problem

STOP_WINDOW_SLACK = (
    8  # tokens decoded before a stop string, so that it never starts in half a character
)


def stop_ids(tokenizer: Any, model: Any, config: GenerationConfig) -> set[int]:
    """Every id that ends a completion: EOS of tokenizer, generation config and model config, and
    `stop_token_ids`. With `ignore_eos` only the latter.

    Many models declare several EOS ids, and in different places; comparing with one of them
    counts completions that ended as truncated.
    """
    found = set(config.stop_token_ids)
    if config.ignore_eos:
        return found
    for holder in (tokenizer, getattr(model, "generation_config", None), model.config):
        eos = getattr(holder, "eos_token_id", None)
        if eos is not None:
            found.update([eos] if isinstance(eos, int) else eos)
    return found


class StopRule:
    """The rule for one config, with the tokenizer that spells ids.

    Raises ConfigError for a stop string that could never be found.
    """

    def __init__(self, tokenizer: Any, model: Any, config: GenerationConfig):
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids(tokenizer, model, config)
        self.stop_strings = config.stop
        self.max_completion_length = config.max_completion_length
        self.min_tokens = config.min_tokens
        self.special_tokens = _special_tokens(tokenizer)
        _check_stop_strings(self.stop_strings, self.special_tokens)
        # A token that is shown spells at least one byte, so a stop string spans no more than its
        # bytes in tokens.
        self.stop_window = (
            max((len(s.encode()) for s in self.stop_strings), default=0) + STOP_WINDOW_SLACK
        )

    def finish_reason(self, ids: list[int]) -> str | None:
        """Why `ids` is a complete completion (`stop`, `length`), or None: sample on.

        `ids` is called once per token, so a stop string, if any, ends in its last token.
        """
        if ids[-1] in self.stop_ids or self._ends_with_stop_string(ids):
            return "stop"
        return "length" if len(ids) >= self.max_completion_length else None

    def terminated(self, ids: list[int], finish_reason: str) -> bool:
        """It ended by itself. An engine may say `length` when the last token allowed is a stop
        id; that is an end all the same."""
        return finish_reason == "stop" or ids[-1] in self.stop_ids

    def text(self, ids: list[int]) -> str:
        """The completion's text: no stop id, no stop string nor anything after it."""
        if ids[-1] in self.stop_ids:
            return self._decode(ids[:-1])
        text = self._decode(ids)
        return text[: self._stop_string_index(text, ids)]

    def _ends_with_stop_string(self, ids: list[int]) -> bool:
        if not self.stop_strings:
            return False
        shown = [i for i in ids if i not in self.special_tokens][-self.stop_window :]
        tail = self._decode(shown)  # cheap: the whole is decoded only when its tail has a hit
        hit = any(s in tail for s in self.stop_strings)
        return hit and self._stop_string_index(self._decode(ids), ids) is not None

    def _stop_string_index(self, text: str, ids: list[int]) -> int | None:
        """Where the first stop string that ends after min_tokens begins in `text`.

        An earlier one does not count, as in vLLM: neither stop ids nor stop strings end a
        completion within min_tokens.
        """
        before = len(self._decode(ids[: self.min_tokens])) if self.min_tokens else 0
        starts = [text.find(s, max(0, before - len(s) + 1)) for s in self.stop_strings]
        return min((s for s in starts if s >= 0), default=None)

    def _decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text


def _special_tokens(tokenizer: Any) -> dict[int, str]:
    """id -> spelling of the tokens that `skip_special_tokens` leaves out."""
    named = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return dict(named) | {i: str(token) for i, token in added.items() if token.special}


def _check_stop_strings(strings: list[str], special_tokens: dict[int, str]) -> None:
    problems = [Problem("a stop string is empty", "generation.stop")] if "" in strings else []
    for stop in strings:
        for i, token in special_tokens.items():
            if token and token in stop:
                problems.append(
                    Problem(
                        f"the stop string {stop!r} can never be found",
                        "generation.stop",
                        why=f"{token!r} is a special token, which text never contains",
                        fix=f"generation.stop_token_ids=[{i}]",
                    )
                )
    if problems:
        raise ConfigError(*problems)
