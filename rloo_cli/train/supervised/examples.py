"""Rows of a data set -> what `rloo sft` and `rloo reward-model` learn from.

Prompts are read exactly as a run reads them (template, system message, chat template). Rows that
are empty or too long are left out and counted; a column that is not there, or a value of another
kind, is refused.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rloo_cli.config.old_names import nearest
from rloo_cli.config.prompt_limit import MOST_BY_DEFAULT
from rloo_cli.config.schema import DataConfig, RunConfig
from rloo_cli.data import prompts
from rloo_cli.data.dataset import is_messages
from rloo_cli.data.prompts import Prompts
from rloo_cli.train.supervised.reward_model import Pair, pair
from rloo_cli.train.supervised.sft import Example, ended, example
from rloo_cli.utils.errors import DataError, Problem

OWN = re.compile(r"\bdata\.(path|name|revision|split|eval_split|prompt_column)\b")


@dataclass(frozen=True)
class Kept:
    """The rows that are left, and how many were not."""

    rows: list[Any]
    long: int
    empty: int
    longest: int

    def told(self, limit: int) -> str:
        """One line about them."""
        said = f"{len(self.rows)} rows, up to {self.longest} tokens"
        over = f", {self.long} left out: longer than {limit} tokens (max_length)"
        none = f", {self.empty} left out: empty"
        return said + (over if self.long else "") + (none if self.empty else "")


def of_sft(
    data: Any, source: DataConfig, settings: Any, tokenizer: Any, run: RunConfig, limit: int
) -> Kept:
    """Prompts with their completions. `limit`: most tokens of a row. Raises DataError."""
    key = "sft.completion_column"
    values = _column(data, settings.completion_column, key)
    prepared = _prepared(data, source, tokenizer, run, limit)

    def read(place: int, number: int) -> Example | None:
        prompt, value = prepared.prompts[place], values[number]
        if _empty(value, prepared.conversational, key, number):
            return None
        if not prepared.conversational:
            return example(prepared.ids[place], value, tokenizer)
        asked = _rendered(tokenizer, prompt, run, add_generation_prompt=True)
        whole = _rendered(tokenizer, [*prompt, *_messages(value)], run)
        if not whole.startswith(asked):
            why = "a prompt with its completion does not begin with the prompt as it is asked"
            raise DataError(Problem("the chat template changes what came before",
                                    f"{key}, row {number}", why))  # fmt: skip
        ids = prepared.ids[place]
        return Example([*ids, *ended(whole[len(asked) :], tokenizer, False)], len(ids))

    return _kept(prepared, read, lambda row: len(row.ids), limit, key)


def of_pairs(
    data: Any, source: DataConfig, settings: Any, tokenizer: Any, run: RunConfig, limit: int
) -> Kept:
    """Pairs of completions. `limit`: most tokens of either. Raises DataError.

    Conversations are read as the chat template writes them, as a reward of type `model` does.
    """
    keys = ("reward_model.chosen_column", "reward_model.rejected_column")
    columns = [_column(data, getattr(settings, key.rpartition(".")[2]), key) for key in keys]
    prepared = _prepared(data, source, tokenizer, run, limit)

    def read(place: int, number: int) -> Pair | None:
        prompt, values = prepared.prompts[place], [column[number] for column in columns]
        talk = prepared.conversational
        named = zip(values, keys, strict=True)
        # Both are looked at: what is wrong with the second is not hidden by an empty first.
        if sum(_empty(value, talk, key, number) for value, key in named):
            return None
        if not talk:
            chosen, rejected = values
            return pair(str(prompt), chosen, rejected, tokenizer)
        texts = [_rendered(tokenizer, [*prompt, *_messages(v)], run) for v in values]
        return Pair(*(list(tokenizer(t, add_special_tokens=False)["input_ids"]) for t in texts))

    longer: Callable[[Pair], int] = lambda row: max(len(row.chosen), len(row.rejected))  # noqa: E731
    return _kept(prepared, read, longer, limit, keys[0])


READ: dict[str, Callable[..., Kept]] = {"sft": of_sft, "reward_model": of_pairs}


def own_key(section: str, text: str) -> str:
    """A text that speaks of keys of `data`, as one of those of `<section>.data`."""
    return OWN.sub(rf"{section}.data.\1", text)


def _column(data: Any, name: str, key: str) -> Any:
    if name in data.column_names:
        return data[name]
    close = nearest(name, data.column_names)
    fix = f"{key}={close[0] if close else 'COLUMN'}"
    columns = f"columns: {', '.join(data.column_names)}"
    raise DataError(Problem(f"the data has no column {name!r}", key, columns, fix))


def _prepared(data: Any, source: DataConfig, tokenizer: Any, run: RunConfig, limit: int) -> Prompts:
    # One place at least is the completion's.
    longest = min(limit - 1, source.max_prompt_length or MOST_BY_DEFAULT)
    kwargs = run.generation.chat_template_kwargs
    return prompts.prepare(data, source, tokenizer, kwargs, longest, run.seed)


def _empty(value: Any, conversational: bool, key: str, number: int) -> bool:
    """Whether nothing is said. Raises DataError for what is no completion of such a prompt."""
    if isinstance(value, str):
        return not value.strip()
    if conversational and is_messages(value):
        return not any(str(message.get("content") or "").strip() for message in value)
    kind = "a string or a list of messages" if conversational else "a string"
    found = f"found {type(value).__name__}: {str(value)[:80]!r}"
    raise DataError(Problem(f"completion {number} is not {kind}", f"{key}, row {number}", found))


def _messages(value: Any) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = [{"role": "assistant", "content": value}]
    return said if isinstance(value, str) else value


def _rendered(tokenizer: Any, messages: Any, run: RunConfig, **options: Any) -> str:
    kwargs = options | run.generation.chat_template_kwargs
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)
    return text


def _kept(
    prepared: Prompts,
    read: Callable[[int, int], Any],
    length: Callable[[Any], int],
    limit: int,
    key: str,
) -> Kept:
    rows = [read(place, number) for place, number in enumerate(prepared.numbers)]
    said = [row for row in rows if row is not None]
    fitting = [row for row in said if length(row) <= limit]
    empty, long = len(rows) - len(said), len(said) - len(fitting) + prepared.dropped
    if 2 * len(fitting) < len(rows) + prepared.dropped:
        why = f"{empty} are empty, {long} longer than {limit} tokens"
        total = len(rows) + prepared.dropped
        fix = f"{key}=COLUMN, or {key.partition('.')[0]}.max_length=N where the model has room"
        raise DataError(Problem(f"only {len(fitting)} of {total} rows are left", key, why, fix))
    return Kept(fitting, long, empty, max(map(length, fitting)))
