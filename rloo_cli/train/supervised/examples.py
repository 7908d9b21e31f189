"""Reads the examples of `rloo sft` and the preference pairs of `rloo reward-model`.

Prompts are read exactly as a run reads them (template, system message, chat template). Examples
that are empty or too long are left out and counted; a missing column, or a value of another type,
is refused.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from rloo_cli.config.old_names import nearest_names
from rloo_cli.config.prompt_limit import DEFAULT_MAX_PROMPT_TOKENS
from rloo_cli.config.schema import DataConfig, RewardModelConfig, RunConfig, SftConfig
from rloo_cli.data import prompts
from rloo_cli.data.cache import ONE_PROCESS, Ranks
from rloo_cli.data.chat_templates import apply_chat_template
from rloo_cli.data.dataset import is_messages, missing_prompts_error
from rloo_cli.data.fingerprint import fingerprint_of, kept_fingerprint
from rloo_cli.data.lazy import ReadWhenAsked, column_values, values_at
from rloo_cli.data.prompts import TOO_LONG_KEY, Prompts
from rloo_cli.data.render import with_system
from rloo_cli.data.survey import kept_arrays
from rloo_cli.data.value_types import nested_columns
from rloo_cli.train.supervised.reward_model import (
    PreferenceObjective,
    PreferencePair,
    tokenize_pair,
)
from rloo_cli.train.supervised.sft import (
    SftExample,
    SftObjective,
    tokenize_example,
    tokenize_with_eos,
)
from rloo_cli.utils.errors import DataError, Problem
from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:
    from datasets import Dataset

Completion = str | list[JsonObject]
# (prompt, its ids, the row's completions, the row's number) -> the example, None if it is empty
ReadExample = Callable[
    [Any, list[int], tuple[Completion, ...], int], SftExample | PreferencePair | None
]
WHOLE_COLUMNS = ("messages", "text")  # of a prompt together with its completion, as TRL names them
DATA_KEY_PATTERN = re.compile(r"\bdata\.(path|name|revision|split|eval_split|prompt_column)\b")
KEY_EXAMPLES = 100  # whose ids are part of the key of what is kept


@dataclass(frozen=True)
class PreparedExamples:
    """The examples that are used, and how many were left out."""

    examples: Sequence[SftExample | PreferencePair]
    lengths: npt.NDArray[np.int64]  # tokens of each
    num_too_long: int
    num_empty: int
    notes: Sequence[str] = ()

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest example."""
        return int(self.lengths.max())

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
    ranks: Ranks = ONE_PROCESS,
) -> PreparedExamples:
    """Read prompts with their completions. `limit`: most tokens of an example. Raises DataError.

    Data of TRL's other formats for supervised training, without a column of prompts, is trained on
    whole: `text`, or conversations in `messages`.
    """
    key = "sft.completion_column"
    if source.prompts_in not in data.column_names:
        return _whole_examples(data, source, tokenizer, run, limit, ranks)
    values = _require_column(data, settings.completion_column, key)
    prepared = _tokenize_prompts(data, source, tokenizer, run, limit, ranks, "sft")

    def read(
        prompt: Any, ids: list[int], completions: tuple[Completion, ...], number: int
    ) -> SftExample | None:
        (value,) = completions
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

    length, rendering = (
        SftObjective().length,
        _rendering(tokenizer, run, settings.completion_column),
    )
    return _collect_examples(prepared, [values], read, length, limit, key, ranks, rendering)


def _whole_examples(
    data: "Dataset",
    source: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    run: RunConfig,
    limit: int,
    ranks: Ranks = ONE_PROCESS,
) -> PreparedExamples:
    """Read texts or conversations that are trained on whole, as TRL does. Raises DataError."""
    column = next((name for name in WHOLE_COLUMNS if name in data.column_names), None)
    if column is None:
        raise missing_prompts_error(data, source, source.split)
    values = column_values(data, column)
    prepared = _without_prompts(data, values, source, ranks)

    def read(
        prompt: Any, ids: list[int], completions: tuple[Completion, ...], number: int
    ) -> SftExample | None:
        (value,) = completions
        if _is_empty_completion(value, prepared.conversational, column, number):
            return None
        if prepared.conversational:
            messages = with_system(_as_messages(value), source)
            ids = tokenize_with_eos(_render_chat(tokenizer, messages, run), tokenizer, False)
        else:
            ids = tokenize_with_eos(str(value), tokenizer, True)
        return SftExample(ids, 1)  # nothing predicts the first token

    key = "sft.completion_column"
    length, rendering = SftObjective().length, _rendering(tokenizer, run, column)
    return _collect_examples(prepared, [values], read, length, limit, key, ranks, rendering)


def _without_prompts(
    data: "Dataset", values: Sequence[Completion], source: DataConfig, ranks: Ranks
) -> Prompts:
    """An empty prompt for each value. Raises DataError for keys that are for prompts alone."""
    conversational = is_messages(values[0])
    for key in ("template", "chat", *(() if conversational else ("system",))):
        if getattr(source, key):
            what, why = f"data.{key} is set", "the data has no column of prompts"
            off = f"data.{key}={'false' if key == 'chat' else 'null'}"
            raise DataError(Problem(what, f"data.{key}", why, off))
    empty: Any = [] if conversational else ""
    return Prompts(
        prompts=ReadWhenAsked(len(values), lambda rows: [empty for _ in rows]),
        prompt_ids=ReadWhenAsked(len(values), lambda rows: [[] for _ in rows]),
        examples=(),
        conversational=conversational,
        fingerprint=kept_fingerprint(data, ranks),
        example_numbers=range(len(values)),
    )


def preference_pairs(
    data: "Dataset",
    source: DataConfig,
    settings: RewardModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    run: RunConfig,
    limit: int,
    ranks: Ranks = ONE_PROCESS,
) -> PreparedExamples:
    """Read pairs of completions. `limit`: most tokens of either. Raises DataError.

    The chat template renders conversations, as it does for a reward of type `model`. Without a
    column of prompts both columns hold them (TRL: an implicit prompt).
    """
    keys = ("reward_model.chosen_column", "reward_model.rejected_column")
    names = (settings.chosen_column, settings.rejected_column)
    columns = [_require_column(data, name, key) for name, key in zip(names, keys, strict=True)]
    if source.prompts_in in data.column_names:
        prepared = _tokenize_prompts(data, source, tokenizer, run, limit, ranks, "reward_model")
    else:
        prepared = _without_prompts(data, columns[0], source, ranks)

    def read(
        prompt: Any, ids: list[int], values: tuple[Completion, ...], number: int
    ) -> PreferencePair | None:
        conversational = prepared.conversational
        named = zip(values, keys, strict=True)
        # Both are checked: an empty first completion must not hide an error in the second.
        if sum(_is_empty_completion(value, conversational, key, number) for value, key in named):
            return None
        if not conversational:
            chosen, rejected = map(str, values)
            return tokenize_pair(str(prompt), chosen, rejected, tokenizer)
        whole = [with_system([*prompt, *_as_messages(v)], source) for v in values]
        texts = [_render_chat(tokenizer, messages, run) for messages in whole]
        both = (list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)
        return PreferencePair(*both)

    length, rendering = PreferenceObjective().length, _rendering(tokenizer, run, *names)
    return _collect_examples(prepared, columns, read, length, limit, keys[0], ranks, rendering)


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
        return column_values(data, name)
    fix = f"{key}={next(iter(nearest_names(name, data.column_names)), 'COLUMN')}"
    columns = f"columns: {', '.join(data.column_names)}"
    raise DataError(Problem(f"the data has no column {name!r}", key, columns, fix))


def _tokenize_prompts(
    data: "Dataset",
    source: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    run: RunConfig,
    limit: int,
    ranks: Ranks,
    section: str,
) -> Prompts:
    # A completion has at least one token.
    max_tokens = min(limit - 1, source.max_prompt_length or DEFAULT_MAX_PROMPT_TOKENS)
    kwargs = run.generation.chat_template_kwargs
    try:
        return prompts.tokenize_prompts(
            data, source, tokenizer, kwargs, max_tokens, run.seed, ranks=ranks
        )
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


def _rendering(
    tokenizer: PreTrainedTokenizerBase, run: RunConfig, *columns: str
) -> tuple[object, ...]:
    """What examples depend on beside the rows and the tokens of the tokenizer."""
    return tokenizer.chat_template, run.generation.chat_template_kwargs, columns


def _collect_examples(
    tokenized: Prompts,
    columns: Sequence[Sequence[Completion]],
    read_example: ReadExample,
    length: Callable[[Any], int],
    limit: int,
    key: str,
    ranks: Ranks,
    rendering: tuple[object, ...],
) -> PreparedExamples:
    """Look at all examples once; they are read again when they are trained on.

    `columns`: with the completions of all rows. Raises DataError if most are empty or too long.
    """

    def read(indices: Sequence[int]) -> list[SftExample | PreferencePair | None]:
        numbers = [int(tokenized.example_numbers[i]) for i in indices]
        prompts = (values_at(some, indices) for some in (tokenized.prompts, tokenized.prompt_ids))
        completions = zip(*(values_at(column, numbers) for column in columns), strict=True)
        return [read_example(*one) for one in zip(*prompts, completions, numbers, strict=True)]

    def look() -> dict[str, Any]:
        every = ReadWhenAsked(len(tokenized), read)
        return {"lengths": np.array([0 if one is None else length(one) for one in every])}

    first = [repr(one) for one in read(range(min(KEY_EXAMPLES, len(tokenized))))]
    parts = fingerprint_of(tokenized.fingerprint, first, key, rendering)
    arrays, notes = kept_arrays(parts, len(tokenized), look, ranks)
    lengths = arrays["lengths"]
    kept = np.flatnonzero((lengths > 0) & (lengths <= limit))
    total, empty = len(lengths) + tokenized.dropped, int((lengths == 0).sum())
    long = int((lengths > limit).sum()) + tokenized.dropped
    if 2 * len(kept) < total:
        why = f"{empty} are empty, {long} longer than {limit} tokens"
        fix = f"{key}=COLUMN, or {key.partition('.')[0]}.max_length=N if the model allows it"
        raise DataError(Problem(f"only {len(kept)} of {total} examples are left", key, why, fix))
    examples: Any = ReadWhenAsked(len(kept), lambda some: read(kept[list(some)].tolist()))
    return PreparedExamples(examples, lengths[kept], long, empty, notes)
