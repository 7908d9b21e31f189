"""Reads the examples of `rloo sft` and the preference pairs of `rloo reward-model`.

Prompts are read exactly as a run reads them (template, system message, chat template). Examples
that are empty or too long are left out and counted; a missing column, or a value of another type,
is refused.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from transformers import PreTrainedTokenizerBase

from rloo_cli.config.old_names import nearest_names
from rloo_cli.config.prompt_limit import DEFAULT_MAX_PROMPT_TOKENS
from rloo_cli.config.schema import DataConfig, RewardModelConfig, RunConfig, SftConfig
from rloo_cli.data import prompts
from rloo_cli.data.chat_templates import apply_chat_template
from rloo_cli.data.dataset import is_messages, missing_prompts_error
from rloo_cli.data.prompts import TOO_LONG_KEY, Prompts
from rloo_cli.data.value_types import nested_columns
from rloo_cli.train.supervised.reward_model import (
    PreferenceObjective,
    PreferencePair,
    tokenize_pair,
)
from rloo_cli.train.supervised.sft import SftExample, tokenize_example, tokenize_with_eos
from rloo_cli.utils.errors import DataError, Problem
from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:
    from datasets import Dataset

Example = TypeVar("Example", SftExample, PreferencePair)
Completion = str | list[JsonObject]
WHOLE_COLUMNS = ("messages", "text")  # of a prompt together with its completion, as TRL names them
DATA_KEY_PATTERN = re.compile(r"\bdata\.(path|name|revision|split|eval_split|prompt_column)\b")


@dataclass(frozen=True)
class PreparedExamples:
    """The examples that are used, and how many were left out."""

    examples: Sequence[SftExample | PreferencePair]
    num_too_long: int
    num_empty: int
    max_tokens: int

    def describe(self, limit: int) -> str:
        """A line that says how many there are. `limit`: the most tokens of an example."""
        line = f"{len(self.examples)} examples, up to {self.max_tokens} tokens"
        if self.num_too_long:
            line += f", {self.num_too_long} left out: longer than {limit} tokens (max_length)"
        return line + (f", {self.num_empty} left out: empty" if self.num_empty else "")


def sft_examples(
    data: "Dataset",
    source: DataConfig,
    settings: SftConfig,
    tokenizer: PreTrainedTokenizerBase,
    run: RunConfig,
    limit: int,
) -> PreparedExamples:
    """Read prompts with their completions. `limit`: most tokens of an example. Raises DataError.

    Data of TRL's other formats for supervised training, without a column of prompts, is trained on
    whole: `text`, or conversations in `messages`.
    """
    key = "sft.completion_column"
    if source.prompts_in not in data.column_names:
        return _whole_examples(data, source, tokenizer, run, limit)
    values = _require_column(data, settings.completion_column, key)
    prepared = _tokenize_prompts(data, source, tokenizer, run, limit, "sft")

    def read(index: int, number: int) -> SftExample | None:
        prompt, value = prepared.prompts[index], values[number]
        ids = prepared.prompt_ids[index]
        if _is_empty_completion(value, prepared.conversational, key, number):
            return None
        if not prepared.conversational:
            return tokenize_example(ids, str(value), tokenizer)
        start = _render_chat(tokenizer, prompt, run, add_generation_prompt=True)
        whole = _render_chat(tokenizer, [*prompt, *_as_messages(value)], run)
        if not whole.startswith(start):
            what = "the chat template changes what came before"
            why = "the text of a prompt with its completion does not begin with that of the prompt"
            fix = "model.chat_template=FILE.jinja of one that only adds to what came before"
            raise DataError(Problem(what, f"{key}, row {number}", why, fix))
        completion_ids = tokenize_with_eos(whole[len(start) :], tokenizer, False)
        return SftExample([*ids, *completion_ids], len(ids))

    return _collect_examples(prepared, read, lambda example: len(example.ids), limit, key)


def _whole_examples(
    data: "Dataset",
    source: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    run: RunConfig,
    limit: int,
) -> PreparedExamples:
    """Read texts or conversations that are trained on whole, as TRL does. Raises DataError."""
    column = next((name for name in WHOLE_COLUMNS if name in data.column_names), None)
    if column is None:
        raise missing_prompts_error(data, source, source.split)
    values = data[column]
    prepared = _without_prompts(values, source)

    def read(index: int, number: int) -> SftExample | None:
        value = values[number]
        if _is_empty_completion(value, prepared.conversational, column, number):
            return None
        if prepared.conversational:
            messages = prompts.with_system(_as_messages(value), source)
            ids = tokenize_with_eos(_render_chat(tokenizer, messages, run), tokenizer, False)
        else:
            ids = tokenize_with_eos(str(value), tokenizer, True)
        return SftExample(ids, 1)  # nothing predicts the first token

    key = "sft.completion_column"
    return _collect_examples(prepared, read, lambda example: len(example.ids), limit, key)


def _without_prompts(values: Sequence[Completion], source: DataConfig) -> Prompts:
    """An empty prompt for each value. Raises DataError for keys that are for prompts alone."""
    conversational = is_messages(values[0])
    for key in ("template", "chat", *(() if conversational else ("system",))):
        if getattr(source, key):
            what, why = f"data.{key} is set", "the data has no column of prompts"
            off = f"data.{key}={'false' if key == 'chat' else 'null'}"
            raise DataError(Problem(what, f"data.{key}", why, off))
    empty: list[Any] = [[] if conversational else "" for _ in values]
    ids: list[list[int]] = [[] for _ in values]
    numbers = list(range(len(values)))
    return Prompts(empty, ids, [], conversational, "", example_numbers=numbers)


def preference_pairs(
    data: "Dataset",
    source: DataConfig,
    settings: RewardModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    run: RunConfig,
    limit: int,
) -> PreparedExamples:
    """Read pairs of completions. `limit`: most tokens of either. Raises DataError.

    The chat template renders conversations, as it does for a reward of type `model`. Without a
    column of prompts both columns hold them (TRL: an implicit prompt).
    """
    keys = ("reward_model.chosen_column", "reward_model.rejected_column")
    names = (settings.chosen_column, settings.rejected_column)
    columns = [_require_column(data, name, key) for name, key in zip(names, keys, strict=True)]
    if source.prompts_in in data.column_names:
        prepared = _tokenize_prompts(data, source, tokenizer, run, limit, "reward_model")
    else:
        prepared = _without_prompts(columns[0], source)

    def read(index: int, number: int) -> PreferencePair | None:
        prompt, values = prepared.prompts[index], [column[number] for column in columns]
        conversational = prepared.conversational
        named = zip(values, keys, strict=True)
        # Both are checked: an empty first completion must not hide an error in the second.
        if sum(_is_empty_completion(value, conversational, key, number) for value, key in named):
            return None
        if not conversational:
            chosen, rejected = map(str, values)
            return tokenize_pair(str(prompt), chosen, rejected, tokenizer)
        whole = [prompts.with_system([*prompt, *_as_messages(v)], source) for v in values]
        texts = [_render_chat(tokenizer, messages, run) for messages in whole]
        ids = (list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)
        return PreferencePair(*ids)

    return _collect_examples(prepared, read, PreferenceObjective().length, limit, keys[0])


EXAMPLE_READERS: dict[str, Callable[..., PreparedExamples]] = {
    "sft": sft_examples,
    "reward_model": preference_pairs,
}


def section_key(section: str, text: str) -> str:
    """Replace the names of keys of `data` in a text by those of `<section>.data`."""
    return DATA_KEY_PATTERN.sub(rf"{section}.data.\1", text)


def _require_column(data: "Dataset", name: str, key: str) -> Sequence[Completion]:
    data = nested_columns(data, [name])
    if name in data.column_names:
        return data[name]
    fix = f"{key}={next(iter(nearest_names(name, data.column_names)), 'COLUMN')}"
    columns = f"columns: {', '.join(data.column_names)}"
    raise DataError(Problem(f"the data has no column {name!r}", key, columns, fix))


def _tokenize_prompts(
    data: "Dataset",
    source: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    run: RunConfig,
    limit: int,
    section: str,
) -> Prompts:
    # A completion has at least one token.
    max_tokens = min(limit - 1, source.max_prompt_length or DEFAULT_MAX_PROMPT_TOKENS)
    kwargs = run.generation.chat_template_kwargs
    try:
        return prompts.tokenize_prompts(data, source, tokenizer, kwargs, max_tokens, run.seed)
    except DataError as error:
        # A prompt that is cut leaves no room for a completion, which has to fit as well.
        fix = f"shorter prompts, or more room: data.max_prompt_length and {section}.max_length"
        raise DataError(
            *[replace(p, fix=fix) if p.where == TOO_LONG_KEY else p for p in error.problems]
        ) from None


def _is_empty_completion(value: Completion, conversational: bool, key: str, number: int) -> bool:
    """Whether a completion is empty. Raises DataError if it is of a type that is not allowed."""
    if isinstance(value, str):
        return not value.strip()
    if conversational and is_messages(value):
        return not any(str(message.get("content") or "").strip() for message in value)
    kind = "a string or a list of messages" if conversational else "a string"
    why = f"found {type(value).__name__}: {str(value)[:80]!r}"
    what, fix = f"completion {number} is not {kind}", f"{key}=COLUMN, of which each row is {kind}"
    raise DataError(Problem(what, f"{key}, row {number}", why, fix))


def _as_messages(value: Completion) -> list[JsonObject]:
    return [{"role": "assistant", "content": value}] if isinstance(value, str) else value


def _render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: object,
    run: RunConfig,
    **options: object,
) -> str:
    kwargs = options | run.generation.chat_template_kwargs
    return apply_chat_template(tokenizer, messages, **kwargs)


def _collect_examples(
    tokenized: Prompts,
    read_example: Callable[[int, int], Example | None],
    length: Callable[[Example], int],
    limit: int,
    key: str,
) -> PreparedExamples:
    examples = [read_example(i, number) for i, number in enumerate(tokenized.example_numbers)]
    non_empty = [example for example in examples if example is not None]
    fitting = [example for example in non_empty if length(example) <= limit]
    total = len(examples) + tokenized.dropped
    empty = len(examples) - len(non_empty)
    long = len(non_empty) - len(fitting) + tokenized.dropped
    if 2 * len(fitting) < total:
        why = f"{empty} are empty, {long} longer than {limit} tokens"
        fix = f"{key}=COLUMN, or {key.partition('.')[0]}.max_length=N if the model allows it"
        raise DataError(Problem(f"only {len(fitting)} of {total} examples are left", key, why, fix))
    return PreparedExamples(fitting, long, empty, max(map(length, fitting)))
