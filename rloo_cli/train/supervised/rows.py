"""Reads the examples of `rloo sft` and the preference pairs of `rloo reward-model`, as token ids.

Prompts are read exactly as a run reads them (template, system message, chat template), and a
completion continues their ids, as in RLOO's sampling. TRL's trainers get the ids. Examples
that are empty or too long are left out and counted; a missing column, or a value of another type,
is refused.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from rloo_cli.config.old_names import nearest_names
from rloo_cli.config.prompt_limit import DEFAULT_MAX_PROMPT_TOKENS
from rloo_cli.config.schema import DataConfig, RewardModelConfig, RunConfig, SftConfig
from rloo_cli.data import prompts
from rloo_cli.data.cache import ONE_PROCESS, Ranks
from rloo_cli.data.chat_templates import apply_chat_template
from rloo_cli.data.dataset import is_messages, missing_prompts_error
from rloo_cli.data.lazy import ReadWhenAsked, column_values, values_at
from rloo_cli.data.prompts import TOO_LONG_KEY, Prompts
from rloo_cli.data.render import with_system
from rloo_cli.data.value_types import nested_columns
from rloo_cli.utils.errors import DataError, Problem
from rloo_cli.utils.files import JsonObject

Completion = str | list[JsonObject]
# (prompt, its ids, the row's completions, the row's number) -> columns of ids, None if empty
ReadExample = Callable[[Any, list[int], tuple[Completion, ...], int], dict[str, list[int]] | None]
WHOLE_COLUMNS = ("messages", "text")  # of a prompt together with its completion, as TRL names them
ID_COLUMNS = {"sft": ("input_ids", "labels"), "reward_model": ("chosen_ids", "rejected_ids")}
LENGTH_COLUMN = "length"  # tokens of an example's longest sequence; 0: empty
DATA_KEY_PATTERN = re.compile(r"\bdata\.(path|name|revision|split|eval_split|prompt_column)\b")
NOT_LEARNED = -100  # the label of a token that the loss leaves out


@dataclass(frozen=True)
class TrainingRows:
    """The used examples, with ID_COLUMNS and `length`; how many were left out."""

    dataset: Dataset
    num_too_long: int
    num_empty: int

    @property
    def lengths(self) -> list[int]:
        """Tokens of the longest sequence of each example."""
        return list(self.dataset[LENGTH_COLUMN])

    def describe(self, limit: int) -> str:
        """A line with their number. `limit`: the most tokens of an example."""
        line = f"{len(self.dataset)} examples, up to {max(self.lengths)} tokens"
        if self.num_too_long:
            line += f", {self.num_too_long} left out: longer than {limit} tokens (max_length)"
        return line + (f", {self.num_empty} left out: empty" if self.num_empty else "")


@dataclass(frozen=True)
class RowReader:
    """Reads the examples of one of the two trainings.

    `limit`: most tokens of an example. `ranks`: rank 0 reads, and the others get its results.
    """

    section: str
    source: DataConfig
    tokenizer: PreTrainedTokenizerBase
    run: RunConfig
    limit: int
    ranks: Ranks = ONE_PROCESS

    def read_rows(self, data: Dataset, file: Path | None = None) -> TrainingRows:
        """Read a split. `file`: where the ids are written; None = memory. Raises DataError."""
        if self.section == "sft":
            return self._sft_rows(data, self.run.sft, file)
        return self._preference_rows(data, self.run.reward_model, file)

    def _sft_rows(self, data: Dataset, settings: SftConfig, file: Path | None) -> TrainingRows:
        """Prompts with their completions, or texts and conversations that are trained on whole."""
        key = "sft.completion_column"
        if self.source.prompts_in not in data.column_names:
            return self._whole_rows(data, key, file)
        values = _require_column(data, settings.completion_column, key)
        prepared = self._tokenize_prompts(data)

        def read(
            prompt: Any, ids: list[int], completions: tuple[Completion, ...], number: int
        ) -> dict[str, list[int]] | None:
            (value,) = completions
            if _is_empty_completion(value, prepared.conversational, key, number):
                return None
            text = str(value)
            if prepared.conversational:
                text = self._continuation(prompt, _as_messages(value), f"{key}, row {number}")
            learned = tokenize_with_eos(text, self.tokenizer, False)
            return {
                "input_ids": [*ids, *learned], "labels": [*[NOT_LEARNED] * len(ids), *learned]
            }  # fmt: skip

        return self._collect(prepared, [values], read, key, file)

    def _whole_rows(self, data: Dataset, key: str, file: Path | None) -> TrainingRows:
        """Texts or conversations that are trained on whole, as TRL does."""
        column = next((name for name in WHOLE_COLUMNS if name in data.column_names), None)
        if column is None:
            raise missing_prompts_error(data, self.source, self.source.split)
        values = column_values(data, column)
        prepared = self._without_prompts(values)

        def read(
            prompt: Any, ids: list[int], completions: tuple[Completion, ...], number: int
        ) -> dict[str, list[int]] | None:
            (value,) = completions
            if _is_empty_completion(value, prepared.conversational, column, number):
                return None
            if prepared.conversational:
                text = self._render(with_system(_as_messages(value), self.source))
                ids = tokenize_with_eos(text, self.tokenizer, False)
            else:
                ids = tokenize_with_eos(str(value), self.tokenizer, True)
            return {"input_ids": ids, "labels": ids}

        return self._collect(prepared, [values], read, key, file)

    def _preference_rows(
        self, data: Dataset, settings: RewardModelConfig, file: Path | None
    ) -> TrainingRows:
        """Pairs of completions, tokenized as a reward of type `model` reads them.

        Without a prompt column, both columns contain the prompt (TRL: an implicit prompt).
        """
        keys = ("reward_model.chosen_column", "reward_model.rejected_column")
        names = (settings.chosen_column, settings.rejected_column)
        columns = [_require_column(data, name, key) for name, key in zip(names, keys, strict=True)]
        has_prompts = self.source.prompts_in in data.column_names
        prepared = (
            self._tokenize_prompts(data) if has_prompts else self._without_prompts(columns[0])
        )

        def read(
            prompt: Any, ids: list[int], values: tuple[Completion, ...], number: int
        ) -> dict[str, list[int]] | None:
            conversational = prepared.conversational
            named = zip(values, keys, strict=True)
            # Both are checked: an empty first completion must not hide an error in the second.
            if sum(_is_empty_completion(v, conversational, key, number) for v, key in named):
                return None
            if conversational:
                whole = [with_system([*prompt, *_as_messages(v)], self.source) for v in values]
                texts = [self._render(messages) for messages in whole]
                found = [self.tokenizer(t, add_special_tokens=False)["input_ids"] for t in texts]
            else:
                found = [tokenize_with_eos(f"{prompt}{v}", self.tokenizer, True) for v in values]
            return dict(zip(ID_COLUMNS["reward_model"], found, strict=True))

        return self._collect(prepared, columns, read, keys[0], file)

    def _without_prompts(self, values: Sequence[Completion]) -> Prompts:
        """An empty prompt for each value. Raises DataError for keys that only apply to prompts."""
        conversational = is_messages(values[0])
        for key in ("template", "chat", *(() if conversational else ("system",))):
            if getattr(self.source, key):
                what, why = f"data.{key} is set", "the data has no prompt column"
                off = f"data.{key}={'false' if key == 'chat' else 'null'}"
                raise DataError(Problem(what, f"data.{key}", why, off))
        empty: Any = [] if conversational else ""
        return Prompts(
            prompts=ReadWhenAsked(len(values), lambda rows: [empty for _ in rows]),
            prompt_ids=ReadWhenAsked(len(values), lambda rows: [[] for _ in rows]),
            examples=(),
            conversational=conversational,
            fingerprint="",
            example_numbers=range(len(values)),
        )

    def _tokenize_prompts(self, data: Dataset) -> Prompts:
        # A completion has at least one token.
        longest = self.source.max_prompt_length or DEFAULT_MAX_PROMPT_TOKENS
        kwargs, most = self.run.generation.chat_template_kwargs, min(self.limit - 1, longest)
        try:
            return prompts.tokenize_prompts(
                data, self.source, self.tokenizer, kwargs, most, self.run.seed, ranks=self.ranks
            )
        except DataError as error:
            # A truncated prompt would leave no room for a completion, which has to fit as well.
            room = f"data.max_prompt_length and {self.section}.max_length"
            fix = f"shorter prompts, or more room: {room}"
            raise DataError(
                *[replace(p, fix=fix) if p.where == TOO_LONG_KEY else p for p in error.problems]
            ) from None

    def _continuation(self, prompt: Any, completion: list[JsonObject], where: str) -> str:
        """The text that a completion adds to the text of its prompt. Raises DataError."""
        start = self._render(prompt, add_generation_prompt=True)
        whole = self._render([*prompt, *completion])
        if whole.startswith(start):
            return whole[len(start) :]
        what = "the chat template changes earlier text"
        why = "the text of a prompt with its completion does not begin with the prompt's text"
        fix = "model.chat_template=FILE.jinja, one that only appends"
        raise DataError(Problem(what, where, why, fix))

    def _render(self, messages: object, **options: object) -> str:
        kwargs = options | self.run.generation.chat_template_kwargs
        return apply_chat_template(self.tokenizer, messages, **kwargs)

    def _collect(
        self,
        prepared: Prompts,
        columns: Sequence[Sequence[Completion]],
        read_example: ReadExample,
        key: str,
        file: Path | None,
    ) -> TrainingRows:
        """Read all examples. `columns`: with the completions of all rows.

        Raises DataError if most are empty or too long.
        """
        names = ID_COLUMNS[self.section]

        def read(batch: dict[str, list[int]]) -> dict[str, list[Any]]:
            indices = batch["index"]
            numbers = [int(prepared.example_numbers[i]) for i in indices]
            parts = (values_at(x, indices) for x in (prepared.prompts, prepared.prompt_ids))
            values = zip(*(values_at(column, numbers) for column in columns), strict=True)
            found = [read_example(*one) for one in zip(*parts, values, numbers, strict=True)]
            read = [one or {name: [] for name in names} for one in found]
            longest = [max(map(len, one.values())) for one in read]
            return {name: [one[name] for one in read] for name in names} | {LENGTH_COLUMN: longest}

        every = self.ranks.rank0_first(lambda: _map_indices(len(prepared), read, names, file))
        lengths = np.array(every[LENGTH_COLUMN])
        kept = np.flatnonzero((lengths > 0) & (lengths <= self.limit))
        total, empty = len(lengths) + prepared.dropped, int((lengths == 0).sum())
        long = int((lengths > self.limit).sum()) + prepared.dropped
        if 2 * len(kept) < total:
            why = f"{empty} are empty, {long} longer than {self.limit} tokens"
            fix = f"{key}=COLUMN, or {self.section}.max_length=N if the model allows it"
            what = f"only {len(kept)} of {total} examples are left"
            raise DataError(Problem(what, key, why, fix))
        return TrainingRows(every.select(kept), long, empty)


def _map_indices(
    count: int,
    read: Callable[[dict[str, list[int]]], dict[str, list[Any]]],
    names: Sequence[str],
    file: Path | None,
) -> Dataset:
    """The results of `read` for the numbers up to `count`, in a file that is written only once."""
    ids = datasets.List(datasets.Value("int32"))
    features = datasets.Features(
        {**dict.fromkeys(names, ids), LENGTH_COLUMN: datasets.Value("int32")}
    )
    return Dataset.from_dict({"index": range(count)}).map(
        read, batched=True, remove_columns="index", features=features,
        cache_file_name=file and str(file), new_fingerprint=f"ids-{count}",
    )  # fmt: skip


def section_key(section: str, text: str) -> str:
    """Replace the names of keys of `data` in a text by those of `<section>.data`."""
    return DATA_KEY_PATTERN.sub(rf"{section}.data.\1", text)


def tokenize_with_eos(
    text: str, tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool
) -> list[int]:
    """The ids of a text, closed by one EOS. `add_special_tokens`: with the tokenizer's BOS.

    A chat template may close a turn with EOS and a newline: the newline is left out. Raises
    DataError if the tokenizer has no EOS.
    """
    if tokenizer.eos_token_id is None:
        what = "the tokenizer has no end-of-text token"
        why, fix = "a completion could never end", "model.tokenizer=PATH of one with it"
        raise DataError(Problem(what, "model.tokenizer", why, fix))
    bare = text.rstrip()
    text = bare.removesuffix(tokenizer.eos_token) if bare.endswith(tokenizer.eos_token) else text
    ids = tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
    return [*ids, tokenizer.eos_token_id]


def _require_column(data: Dataset, name: str, key: str) -> Sequence[Completion]:
    data = nested_columns(data, [name])
    if name in data.column_names:
        return column_values(data, name)
    fix = f"{key}={next(iter(nearest_names(name, data.column_names)), 'COLUMN')}"
    columns = f"columns: {', '.join(data.column_names)}"
    raise DataError(Problem(f"the data has no column {name!r}", key, columns, fix))


def _is_empty_completion(value: Completion, conversational: bool, key: str, number: int) -> bool:
    """Whether a completion is empty. Raises DataError for a type that is not allowed."""
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
