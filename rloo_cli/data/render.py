"""The rows of a split as prompts: each is read, rendered and tokenized on access.

The prompt is a pure function of the row, the config and the tokenizer, so it is the same whenever
it is drawn. Only the most recently read rows are cached.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NoReturn

from rloo_cli.config import template
from rloo_cli.config.column_names import column_of_field, refuse_unknown_column
from rloo_cli.config.pasted import guess_prompt_column
from rloo_cli.config.schema import DataConfig
from rloo_cli.data import image_prompts
from rloo_cli.data.batch import Prompt
from rloo_cli.data.chat_templates import apply_chat_template
from rloo_cli.data.dataset import is_messages, is_serialized_conversation, prompt_like_columns
from rloo_cli.data.exact_values import rows_of_table
from rloo_cli.data.lazy import ReadWhenAsked, Value, arrow_rows, arrow_view
from rloo_cli.data.order import IndexArray
from rloo_cli.utils.errors import DataError, refuse
from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from rloo_cli.data.image_prompts import PromptImages

ToolsOf = Callable[[JsonObject], list[JsonObject]]  # an example -> descriptions of its tools
NOT_FOR_REWARDS = ("prompt", "completion", "completion_ids")  # docs/rewards.md
ROWS_KEPT = 1_024  # read last: a step's rows are read more than once


@dataclass(frozen=True)
class PromptRow:
    """A row in the form in which it is used."""

    prompt: Prompt
    example: JsonObject  # the other columns, which the rewards get
    sources: Sequence[object] = ()  # of its images
    text: str = ""  # what is tokenized
    ids: Sequence[int] = ()


class PromptRows:
    """The rows of a data set as prompts, by their numbers in it.

    `tokenizer`: None if prompts are rendered without being tokenized. `tools_of`: the
    descriptions of an example's tools, which its prompt shows; None = none. `images`: the images of
    the prompts, if they have any.

    Raises DataError: an invalid first prompt, no chat template, a key without effect.
    """

    def __init__(
        self,
        data: "Dataset",
        config: DataConfig,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        template_kwargs: JsonObject | None = None,
        tools_of: ToolsOf | None = None,
        images: "PromptImages | None" = None,
    ):
        self.data, self.config, self.tokenizer = data, config, tokenizer
        self.template_kwargs, self.tools_of, self.images = template_kwargs or {}, tools_of, images
        hidden = (config.prompts_in, *NOT_FOR_REWARDS, image_prompts.image_column(data, config))
        self.example_columns = [c for c in data.column_names if c not in hidden]
        self._arrow_view = lru_cache(self._make_arrow_view)
        (first,) = self._values([0], [])
        value = first[config.prompts_in]
        self.are_messages = is_messages(value)  # conversations in the data, not made from text
        self.conversational = self.are_messages or config.chat
        self._check_value(value, 0)
        if isinstance(value, str) and is_serialized_conversation(value):
            refuse(
                f"{self._where}0",
                "prompt 0 is a conversation written as one string",
                "data.map=file.py:name, with row['prompt'] = json.loads(row['prompt']) in it",
                f"the model would see its brackets and quotes: {value[:80]!r}",
                error=DataError,
            )
        _refuse_idle_keys(self.are_messages, config)
        if tokenizer is not None:
            _check_template(tokenizer, self.conversational, tools_of)
        self._recent: dict[int, PromptRow] = {}

    def __len__(self) -> int:
        return len(self.data)

    @property
    def text_columns(self) -> list[str]:
        """The other columns that the texts of prompts depend on."""
        if self.tools_of is not None:
            return self.example_columns
        parts = template.split_template(self.config.template or "")
        names = [name for _, name in parts if name is not None]
        return [c for c in self.example_columns if any(column_of_field([c], n) for n in names)]

    def render(self, rows: Sequence[int], texts_alone: bool = False) -> list[PromptRow]:
        """Rows without their token ids. `texts_alone`: examples have only `text_columns`.

        Raises DataError: a prompt of another type than the first.
        """
        others = self.text_columns if texts_alone else self.example_columns
        found = []
        for row, values in zip(rows, self._values(rows, others), strict=True):
            value = values.pop(self.config.prompts_in)
            self._check_value(value, row)
            prompt = _render(value, values, self.config)
            sources: Sequence[object] = ()
            if self.images is not None:
                prompt, sources = self.images.structure(prompt, row)
            found.append(PromptRow(prompt, values, sources))
        return found

    def tokenize(self, rows: Sequence[int], texts_alone: bool = False) -> list[PromptRow]:
        """`render`, with the texts and their token ids. Raises DataError if the chat
        template refuses a prompt.
        """
        assert self.tokenizer is not None
        rendered = self.render(rows, texts_alone)
        texts = [self._text(row, one) for row, one in zip(rows, rendered, strict=True)]
        if self.images is None:
            ids = self.tokenizer(texts, add_special_tokens=not self.conversational)["input_ids"]
        else:
            ids = [self.images.expand(text, row) for text, row in zip(texts, rows, strict=True)]
        return [
            replace(one, text=text, ids=list(x))
            for one, text, x in zip(rendered, texts, ids, strict=True)
        ]

    def read(self, rows: Sequence[int]) -> list[PromptRow]:
        """`tokenize`, cached for the rows that were read last."""
        recent = self._recent
        missing = [row for row in dict.fromkeys(rows) if row not in recent]
        found = recent | dict(zip(missing, self.tokenize(missing) if missing else [], strict=True))
        # One assignment: a sampler that runs ahead reads prompts on its own thread.
        self._recent = dict([*found.items()][-ROWS_KEPT:])
        return [found[row] for row in rows]

    def view(
        self, rows: Sequence[int] | IndexArray, value_of: Callable[[PromptRow], Value]
    ) -> Sequence[Value]:
        """`value_of` of each of these rows, read on access."""

        def read(indices: Sequence[int]) -> list[Value]:
            return [value_of(row) for row in self.read([int(rows[i]) for i in indices])]

        return ReadWhenAsked(len(rows), read)

    def _values(self, rows: Sequence[int], others: Sequence[str]) -> list[JsonObject]:
        """The prompts' values and those of other columns, as stored."""
        table = arrow_rows(self._arrow_view(tuple(others)), rows)
        return rows_of_table(table, self.data.features)

    def _make_arrow_view(self, others: tuple[str, ...]) -> "Dataset":
        names = {self.config.prompts_in, *others}
        return arrow_view(self.data, [name for name in self.data.column_names if name in names])

    @property
    def _where(self) -> str:
        return f"data.prompt_column={self.config.prompts_in}, row "

    def _check_value(self, value: object, row: int) -> None:
        """Check that a prompt has the first one's type, a string or a list of messages."""
        if not (is_messages(value) if self.are_messages else isinstance(value, str)):
            kind = "a list of messages" if self.are_messages else "a string"
            strings = [c for c in prompt_like_columns(self.data) if c != self.config.prompts_in]
            guess = guess_prompt_column("prompt", strings)
            fix = f"data.prompt_column={guess}" if strings and not row else "correct that row"
            column = f"the column is of type {self.data.features[self.config.prompts_in]}"[:200]
            refuse(
                f"{self._where}{row}",
                f"prompt {row} is not {kind}" + (", as prompt 0 is" if row else ""),
                fix,
                f"found {type(value).__name__}: {str(value)[:80]!r}; {column}",
                more=f"columns of strings or messages: {', '.join(strings) or 'none'}",
                error=DataError,
            )
        if isinstance(value, list):
            _refuse_other_parts(value, f"{self._where}{row}")

    def _text(self, row: int, rendered: PromptRow) -> str:
        """The tokenizer's input: a conversation is rendered by the chat template."""
        if not self.conversational:
            return str(rendered.prompt)
        assert self.tokenizer is not None
        tools = {} if self.tools_of is None else {"tools": self.tools_of(rendered.example)}
        try:
            return render_text(rendered.prompt, self.tokenizer, self.template_kwargs | tools)
        except Exception as error:  # a template is code and can raise anything
            what = f"the chat template refuses prompt {row}"
            fix = "correct its messages, or model.chat_template=FILE.jinja that accepts them"
            refuse(f"data.prompt_column, row {row}", what, fix, error, error=DataError)


def render_prompts(
    data: "Dataset", config: DataConfig
) -> tuple[list[Prompt], list[JsonObject], bool]:
    """Every prompt as the tokenizer gets it, its other columns, and whether they are conversations.

    Raises DataError: a prompt of another type than the first, a key without effect.
    """
    rows = PromptRows(data, config)
    rendered = rows.render(range(len(rows)))
    return [r.prompt for r in rendered], [r.example for r in rendered], rows.conversational


def _refuse_other_parts(messages: list[JsonObject], where: str) -> None:
    """Raise DataError for a message with parts that are not text."""
    for message in messages:
        parts = message["content"] if isinstance(message.get("content"), list) else []
        for part in parts:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind == "text" and isinstance(part.get("text"), str):
                continue
            if kind in image_prompts.IMAGE_PART_TYPES:
                continue
            what = f"a message has a part of type {kind!r}"
            why = f"found {str(part)[:80]!r} in a message of role {message['role']!r}"
            fix = "parts of text and images: {type: text, text: ...}, {type: image}; or a string"
            refuse(where, what, fix, why, error=DataError)


def _refuse_idle_keys(conversational: bool, config: DataConfig) -> None:
    """Raise DataError for a key that has no effect on prompts of this type."""
    idle = [k for k in ("template", "chat") if getattr(config, k)] if conversational else []
    if not conversational and not config.chat and config.system is not None:
        idle = ["system"]
    for key in idle:
        kind = "conversations" if conversational else "plain text"
        more = "data.chat=true turns each into a user message" if key == "system" else ""
        refuse_idle_key(key, f"the prompts are {kind}, so the key has no effect", more)


def refuse_idle_key(name: str, why: str, more: str = "") -> NoReturn:
    """Raise DataError: `data.NAME` is set, but has no effect on these data."""
    off = f"data.{name}={'false' if name == 'chat' else 'null'}"
    refuse(f"data.{name}", f"data.{name} is set", off, why, more=more, error=DataError)


def _check_template(
    tokenizer: "PreTrainedTokenizerBase", conversational: bool, tools_of: ToolsOf | None
) -> None:
    """Raise DataError for conversations without a chat template, and for tools without one."""
    if not conversational and tools_of is not None:
        what, where = "the prompts are plain text, but tools need conversations", "agent"
        why = "the chat template shows the model its tools and their answers"
        refuse(where, what, "data.chat=true", why, error=DataError)
    if conversational and not tokenizer.chat_template:
        refuse(
            "data.prompt_column",
            "the prompts are conversations, but the tokenizer has no chat template",
            "model.chat_template=FILE.jinja, or data.prompt_column=COLUMN of plain strings",
            "tokenizers of base models often have none",
            error=DataError,
        )


def _render(value: Prompt, example: JsonObject, config: DataConfig) -> Prompt:
    """The input of the tokenizer, or of its chat template."""
    if isinstance(value, str):
        text = value if config.template is None else _fill_prompt_template(value, example, config)
        if not config.chat:
            return text
        value = [{"role": "user", "content": text}]
    return with_system(value, config)


def with_system(conversation: Sequence[JsonObject], config: DataConfig) -> list[JsonObject]:
    """A conversation with the config's system message, unless it has its own."""
    messages = [_with_text(message) for message in conversation]
    if config.system and messages[0]["role"] != "system":
        return [{"role": "system", "content": config.system}, *messages]
    return messages


def _fill_prompt_template(value: str, example: JsonObject, config: DataConfig) -> str:
    fields = example | {config.prompts_in: value, "prompt": value}
    assert config.template is not None
    try:
        return template.fill_template(config.template, fields)
    except KeyError as error:
        refuse_unknown_column("data.template", str(error.args[0]), [*fields], True)
    except ValueError as error:
        fix = "{column} for a column, {{ and }} for braces"
        what = "data.template cannot be read"
        refuse("data.template", what, fix, error, error=DataError)


def _with_text(message: JsonObject) -> JsonObject:
    """A message whose text parts are joined to one string: few chat templates accept parts."""
    if not isinstance(message.get("content"), list) or image_prompts.has_image_parts([message]):
        return message
    return message | {"content": "".join(part["text"] for part in message["content"])}


def render_prompt(
    prompt: Prompt, tokenizer: "PreTrainedTokenizerBase", template_kwargs: JsonObject
) -> list[int]:
    """The ids of a conversation up to the model's turn. Raises what its template raises."""
    text = render_text(prompt, tokenizer, template_kwargs)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def render_text(
    prompt: Prompt, tokenizer: "PreTrainedTokenizerBase", template_kwargs: JsonObject
) -> str:
    """The text of a conversation up to the model's turn. Raises what its template raises."""
    answered = prompt[-1]["role"] == "assistant"  # type: ignore[index]
    return apply_chat_template(
        tokenizer, prompt, add_generation_prompt=not answered, continue_final_message=answered,
        **template_kwargs,
    )  # fmt: skip
