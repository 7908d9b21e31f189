"""Rows of a data set -> what `rloo sft` and `rloo reward-model` learn from.

Prompts are read exactly as a run reads them (template, system message, chat template). Rows that
are empty or too long are left out and counted; a column that is not there, or a value of another
kind, is refused.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rloo_cli.config.old_names import nearest_names
from rloo_cli.config.prompt_limit import DEFAULT_MAX_PROMPT_TOKENS
from rloo_cli.config.schema import DataConfig, RunConfig
from rloo_cli.data import prompts
from rloo_cli.data.dataset import is_messages
from rloo_cli.data.prompts import Prompts
from rloo_cli.train.supervised.reward_model import PreferencePair, tokenize_pair
from rloo_cli.train.supervised.sft import SftExample, tokenize_example, tokenize_with_eos
from rloo_cli.utils.errors import DataError, Problem
from rloo_cli.utils.files import JsonObject

DATA_KEY_PATTERN = re.compile(r"\bdata\.(path|name|revision|split|eval_split|prompt_column)\b")


@dataclass(frozen=True)
class PreparedExamples:
    """The rows that are left, and how many were not."""

    examples: list[Any]
    num_too_long: int
    num_empty: int
    max_tokens: int

    def describe(self, limit: int) -> str:
        """One line about them."""
        said = f"{len(self.examples)} rows, up to {self.max_tokens} tokens"
        over = f", {self.num_too_long} left out: longer than {limit} tokens (max_length)"
        none = f", {self.num_empty} left out: empty"
        return said + (over if self.num_too_long else "") + (none if self.num_empty else "")


def sft_examples(
    data: Any, source: DataConfig, settings: Any, tokenizer: Any, run: RunConfig, limit: int
) -> PreparedExamples:
    """Prompts with their completions. `limit`: most tokens of a row. Raises DataError."""
    key = "sft.completion_column"
    values = _require_column(data, settings.completion_column, key)
    prepared = _tokenize_prompts(data, source, tokenizer, run, limit)

    def read(place: int, number: int) -> SftExample | None:
        prompt, value = prepared.prompts[place], values[number]
        if _is_empty_completion(value, prepared.conversational, key, number):
            return None
        if not prepared.conversational:
            return tokenize_example(prepared.prompt_ids[place], value, tokenizer)
        asked = _render_chat(tokenizer, prompt, run, add_generation_prompt=True)
        whole = _render_chat(tokenizer, [*prompt, *_as_messages(value)], run)
        if not whole.startswith(asked):
            why = "a prompt with its completion does not begin with the prompt as it is asked"
            raise DataError(Problem("the chat template changes what came before",
                                    f"{key}, row {number}", why))  # fmt: skip
        ids = prepared.prompt_ids[place]
        return SftExample(
            [*ids, *tokenize_with_eos(whole[len(asked) :], tokenizer, False)], len(ids)
        )

    return _collect_examples(prepared, read, lambda row: len(row.ids), limit, key)


def preference_pairs(
    data: Any, source: DataConfig, settings: Any, tokenizer: Any, run: RunConfig, limit: int
) -> PreparedExamples:
    """Pairs of completions. `limit`: most tokens of either. Raises DataError.

    Conversations are read as the chat template writes them, as a reward of type `model` does.
    """
    keys = ("reward_model.chosen_column", "reward_model.rejected_column")
    columns = [
        _require_column(data, getattr(settings, key.rpartition(".")[2]), key) for key in keys
    ]
    prepared = _tokenize_prompts(data, source, tokenizer, run, limit)

    def read(place: int, number: int) -> PreferencePair | None:
        prompt, values = prepared.prompts[place], [column[number] for column in columns]
        talk = prepared.conversational
        named = zip(values, keys, strict=True)
        # Both are looked at: what is wrong with the second is not hidden by an empty first.
        if sum(_is_empty_completion(value, talk, key, number) for value, key in named):
            return None
        if not talk:
            chosen, rejected = values
            return tokenize_pair(str(prompt), chosen, rejected, tokenizer)
        texts = [_render_chat(tokenizer, [*prompt, *_as_messages(v)], run) for v in values]
        return PreferencePair(
            *(list(tokenizer(t, add_special_tokens=False)["input_ids"]) for t in texts)
        )

    longer: Callable[[PreferencePair], int] = lambda row: max(len(row.chosen), len(row.rejected))  # noqa: E731
    return _collect_examples(prepared, read, longer, limit, keys[0])


EXAMPLE_READERS: dict[str, Callable[..., PreparedExamples]] = {
    "sft": sft_examples,
    "reward_model": preference_pairs,
}


def section_key(section: str, text: str) -> str:
    """A text that speaks of keys of `data`, as one of those of `<section>.data`."""
    return DATA_KEY_PATTERN.sub(rf"{section}.data.\1", text)


def _require_column(data: Any, name: str, key: str) -> Any:
    if name in data.column_names:
        return data[name]
    close = nearest_names(name, data.column_names)
    fix = f"{key}={close[0] if close else 'COLUMN'}"
    columns = f"columns: {', '.join(data.column_names)}"
    raise DataError(Problem(f"the data has no column {name!r}", key, columns, fix))


def _tokenize_prompts(
    data: Any, source: DataConfig, tokenizer: Any, run: RunConfig, limit: int
) -> Prompts:
    # One place at least is the completion's.
    longest = min(limit - 1, source.max_prompt_length or DEFAULT_MAX_PROMPT_TOKENS)
    kwargs = run.generation.chat_template_kwargs
    return prompts.tokenize_prompts(data, source, tokenizer, kwargs, longest, run.seed)


def _is_empty_completion(value: Any, conversational: bool, key: str, number: int) -> bool:
    """Whether nothing is said. Raises DataError for what is no completion of such a prompt."""
    if isinstance(value, str):
        return not value.strip()
    if conversational and is_messages(value):
        return not any(str(message.get("content") or "").strip() for message in value)
    kind = "a string or a list of messages" if conversational else "a string"
    found = f"found {type(value).__name__}: {str(value)[:80]!r}"
    raise DataError(Problem(f"completion {number} is not {kind}", f"{key}, row {number}", found))


def _as_messages(value: Any) -> list[JsonObject]:
    said: list[JsonObject] = [{"role": "assistant", "content": value}]
    return said if isinstance(value, str) else value


def _render_chat(tokenizer: Any, messages: Any, run: RunConfig, **options: Any) -> str:
    kwargs = options | run.generation.chat_template_kwargs
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)
    return text


def _collect_examples(
    tokenized: Prompts,
    read_example: Callable[[int, int], Any],
    length: Callable[[Any], int],
    limit: int,
    key: str,
) -> PreparedExamples:
    rows = [read_example(place, number) for place, number in enumerate(tokenized.example_numbers)]
    said = [row for row in rows if row is not None]
    fitting = [row for row in said if length(row) <= limit]
    empty, long = len(rows) - len(said), len(said) - len(fitting) + tokenized.dropped
    if 2 * len(fitting) < len(rows) + tokenized.dropped:
        why = f"{empty} are empty, {long} longer than {limit} tokens"
        total = len(rows) + tokenized.dropped
        fix = f"{key}=COLUMN, or {key.partition('.')[0]}.max_length=N where the model has room"
        raise DataError(Problem(f"only {len(fitting)} of {total} rows are left", key, why, fix))
    return PreparedExamples(fitting, long, empty, max(map(length, fitting)))
