"""Turns the examples of a data set into tokenised prompts, in a reproducible order.

The order is a pure function of (seed, epoch, data set). Each prompt is rendered and tokenised once.
Nothing is dropped silently: what `data.overlong` filtered is counted, and its examples are known.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rloo_cli.config import registry, template
from rloo_cli.config.old_names import nearest_names
from rloo_cli.config.pasted import guess_prompt_column
from rloo_cli.config.schema import DataConfig
from rloo_cli.data import image_prompts, order
from rloo_cli.data.batch import Group, Prompt
from rloo_cli.data.chat_templates import apply_chat_template
from rloo_cli.data.dataset import is_messages, is_serialized_conversation, prompt_like_columns
from rloo_cli.data.exact_values import rows_of_dataset
from rloo_cli.data.fingerprint import content_fingerprint, fingerprint_of, tokenizer_digest
from rloo_cli.data.prompt_ends import prompt_warnings
from rloo_cli.utils.errors import DataError, Problem
from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from rloo_cli.data.media import Media

ToolsOf = Callable[[JsonObject], list[JsonObject]]  # an example -> descriptions of its tools
TOO_LONG_KEY = "data.max_prompt_length"  # where the error is of prompts that are too long
TEXTS_AT_ONCE = 10_000  # that a tokenizer is given
FIRST_PROMPTS = 1_000  # of a split, whose ids are part of its fingerprint
NOT_FOR_REWARDS = ("prompt", "completion", "completion_ids")  # docs/rewards.md


@dataclass
class Prompts:
    """The prompts of one split, tokenised, in the data set's own order."""

    prompts: list[Prompt]
    prompt_ids: list[list[int]]
    examples: list[JsonObject]  # the other columns, which the rewards get
    conversational: bool
    fingerprint: str  # of content and order, after filtering
    dropped: int = 0  # by overlong=filter
    truncated: int = 0  # by overlong=truncate_left
    shuffle: bool = True
    seed: int = 0
    unfiltered_lengths: list[int] = field(default_factory=list)  # tokens, before overlong=filter
    example_numbers: list[int] = field(default_factory=list)  # of each prompt, before that filter
    overlong_examples: list[int] = field(default_factory=list)  # numbers of those it left out
    length_limits: list[int] = field(default_factory=list)  # most tokens a prompt may have, if any
    filtered_out: int = 0  # examples that data.filter left out, which have no number
    value_notes: tuple[str, ...] = ()  # what was converted, and what looks wrong in the prompts
    mixture: tuple[order.Source, ...] = ()  # the sources of data.mixture
    media: "list[Media | None]" = field(default_factory=list)  # of each prompt; [] = no images
    bad_images: int = 0  # examples that data.on_bad_image left out, which have no number

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @property
    def max_length(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.prompt_ids))

    def groups_at(self, first: int, count: int) -> list[Group]:
        """Empty groups for the prompts at offsets `first` ... of the endless order.

        The offset is the one global counter of prompts consumed: epoch = offset // n.
        """
        return [self._group_at(offset) for offset in range(first, first + count)]

    def group_of(self, index: int) -> Group:
        """An empty group for the prompt `index` of the split itself."""
        group = Group(index, self.examples[index], self.prompts[index], self.prompt_ids[index])
        media = self.media[index] if self.media else None
        group.media = media.copy_unread() if media is not None else None
        return group

    def index_at(self, prompt_offset: int) -> int:
        """The index of the prompt at an offset of the endless order."""
        return order.prompt_index_at(
            prompt_offset, len(self), self.seed, self.fingerprint, self.shuffle, self.mixture
        )

    def _group_at(self, prompt_offset: int) -> Group:
        group = self.group_of(self.index_at(prompt_offset))
        group.prompt_offset = prompt_offset
        return group


def tokenize_prompts(
    data: "Dataset",
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    template_kwargs: JsonObject,
    max_length: int | None,
    seed: int,
    headroom: int | None = None,
    tools_of: ToolsOf | None = None,
    load_vision: image_prompts.LoadVision | None = None,
) -> Prompts:
    """Render and tokenise every prompt once. `max_length`: most tokens of a prompt.

    `headroom`: tokens of the context that completions leave to a prompt; None = not known.
    `tools_of`: the descriptions of an example's tools, which its prompt shows; None = none.
    `load_vision` loads the model's processor where prompts have images; None = they may have none.
    Raises DataError: a prompt of another type than the first, no chat template, two BOS tokens, too
    many prompts over the limit, images that cannot be read or shown.
    """
    prompts, examples, conversational = render_prompts(data, config)
    images = image_prompts.collect_images(data, prompts, conversational, config)
    if images is not None:
        prompts, examples = images.prompts, [examples[row] for row in images.rows]
    tools = None if tools_of is None else [tools_of(example) for example in examples]
    texts = _render_all(prompts, conversational, tokenizer, template_kwargs, tools)
    if images is None:
        ids = _token_ids(texts, tokenizer, add_special_tokens=not conversational)
    else:
        ids = images.tokenize(texts, load_vision)
    _refuse_two_beginnings(ids, tokenizer, conversational)
    bos = tokenizer.bos_token_id
    found = _apply_overlong(
        prompts, ids, examples, conversational, config, max_length, seed, bos, headroom
    )
    found.fingerprint = _prompts_fingerprint(data, found, ids, config, tokenizer)
    found.value_notes = tuple(prompt_warnings(prompts, ids, examples, tokenizer, conversational))
    if images is not None:
        _add_images(found, images)
    return found


def _token_ids(
    texts: list[str], tokenizer: "PreTrainedTokenizerBase", add_special_tokens: bool
) -> list[list[int]]:
    """The ids of every text. Some at a time: beside ids, a tokenizer returns kilobytes a text."""
    ids: list[list[int]] = []
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        part = texts[start : start + TEXTS_AT_ONCE]
        found = tokenizer(part, add_special_tokens=add_special_tokens)["input_ids"]
        ids += map(list, found)
    return ids


def _add_images(prompts: Prompts, images: image_prompts.PromptImages) -> None:
    """Give prompts their images. Raises DataError where one was cut within its images."""
    from rloo_cli.data.media import Media  # lazy: it imports torch, which no text needs here

    if prompts.truncated:
        what, why = "a prompt with images is too long", "cut, it would show half of an image"
        fix = "data.overlong=filter, a larger data.max_prompt_length, or data.max_pixels"
        raise DataError(Problem(what, "data.overlong", why, fix))
    assert images.vision is not None
    prompts.media = [
        Media(images.sources[i], images.column, images.texts[i], images.token_ids[i],
              images.reader, images.vision)
        if images.sources[i] else None
        for i in prompts.example_numbers
    ]  # fmt: skip
    prompts.bad_images = images.bad_images
    shown = [images.digests[i] for i in prompts.example_numbers]
    prompts.fingerprint = fingerprint_of(prompts.fingerprint, shown, images.config.max_pixels)


def render_prompts(
    data: "Dataset", config: DataConfig
) -> tuple[list[Prompt], list[JsonObject], bool]:
    """Every prompt as the tokenizer gets it, its other columns, and whether they are conversations.

    Raises DataError: a prompt of another type than the first, a key that would do nothing.
    """
    values = data[config.prompts_in]
    conversational = is_messages(values[0])
    _check_values(data, values, config)
    _refuse_idle_keys(conversational, config)
    hidden = (config.prompts_in, *NOT_FOR_REWARDS, image_prompts.image_column(data, config))
    others = [c for c in data.column_names if c not in hidden]
    examples = rows_of_dataset(data.select_columns(others)) if others else [{} for _ in values]
    prompts: list[Prompt] = [_render(v, e, config) for v, e in zip(values, examples, strict=True)]
    return prompts, examples, conversational or config.chat


def _check_values(data: "Dataset", values: Sequence[object], config: DataConfig) -> None:
    """Check that all prompts are of the first one's type, a string or a list of messages.

    Raises DataError.
    """
    conversational = is_messages(values[0])
    where = f"data.prompt_column={config.prompts_in}, row "
    for row, value in enumerate(values):
        if not (is_messages(value) if conversational else isinstance(value, str)):
            kind = "a list of messages" if conversational else "a string"
            strings = [c for c in prompt_like_columns(data) if c != config.prompts_in]
            guess = guess_prompt_column("prompt", strings)
            fix = f"data.prompt_column={guess}" if strings and not row else "correct that row"
            column = f"the column is of type {data.features[config.prompts_in]}"[:200]
            raise DataError(
                Problem(
                    f"prompt {row} is not {kind}" + (", as prompt 0 is" if row else ""),
                    f"{where}{row}",
                    f"found {type(value).__name__}: {str(value)[:80]!r}; {column}",
                    fix,
                    f"columns of strings or messages: {', '.join(strings) or 'none'}",
                )
            )
        if isinstance(value, list):
            _refuse_other_parts(value, f"{where}{row}")
    if isinstance(values[0], str) and is_serialized_conversation(values[0]):
        raise DataError(
            Problem(
                "prompt 0 is a conversation that is written as one string",
                f"{where}0",
                f"the model would be given its brackets and quotes: {values[0][:80]!r}",
                "data.map=file.py:name, with row['prompt'] = json.loads(row['prompt']) in it",
            )
        )


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
            raise DataError(Problem(what, where, why, fix))


def _refuse_idle_keys(conversational: bool, config: DataConfig) -> None:
    """Raise DataError for a key that has no effect on prompts of this type."""
    idle = [k for k in ("template", "chat") if getattr(config, k)] if conversational else []
    if not conversational and not config.chat and config.system is not None:
        idle = ["system"]
    for key in idle:
        kind = "conversations" if conversational else "plain text"
        why = f"the prompts are {kind}: the key would do nothing"
        off = f"data.{key}={'false' if key == 'chat' else 'null'}"
        more = "data.chat=true makes a user's message of each" if key == "system" else ""
        raise DataError(Problem(f"data.{key} is set", f"data.{key}", why, off, more))


def _render(value: Prompt, example: JsonObject, config: DataConfig) -> Prompt:
    """The prompt as it goes to the tokenizer, or to its chat template."""
    if isinstance(value, str):
        text = value if config.template is None else _fill_prompt_template(value, example, config)
        if not config.chat:
            return text
        value = [{"role": "user", "content": text}]
    return with_system(value, config)


def with_system(conversation: Sequence[JsonObject], config: DataConfig) -> list[JsonObject]:
    """A conversation with the system message of the config, unless it has one of its own."""
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
        what = f"data.template names {{{error.args[0]}}}, which is not a column"
        why = f"columns: {', '.join(fields)}"
        close = nearest_names(str(error.args[0]), fields)
        fix = f"{{{close[0]}}} in its place" if close else "{{ and }} where braces are meant"
        raise DataError(Problem(what, "data.template", why, fix)) from None
    except ValueError as error:
        fix = "{column} for a column, {{ and }} for braces"
        what = "data.template cannot be read"
        raise DataError(Problem(what, "data.template", str(error), fix)) from None


def _with_text(message: JsonObject) -> JsonObject:
    """A message whose text parts are joined to one string: few chat templates take parts."""
    if not isinstance(message.get("content"), list) or image_prompts.has_image_parts([message]):
        return message
    return message | {"content": "".join(part["text"] for part in message["content"])}


def _render_all(
    prompts: list[Prompt],
    conversational: bool,
    tokenizer: "PreTrainedTokenizerBase",
    template_kwargs: JsonObject,
    tools: list[list[JsonObject]] | None,
) -> list[str]:
    """The text of every prompt, by the chat template where they are conversations."""
    if not conversational:
        if tools is not None:
            what, where = "the prompts are plain text, and tools need conversations", "agent"
            why = "the chat template tells the model of its tools, and of what they answer"
            raise DataError(Problem(what, where, why, "data.chat=true"))
        return [str(prompt) for prompt in prompts]
    if not tokenizer.chat_template:
        raise DataError(
            Problem(
                "the prompts are conversations, and the tokenizer has no chat template",
                "data.prompt_column",
                "a base model's tokenizer often has none",
                "model.chat_template=FILE.jinja, or data.prompt_column=COLUMN of plain strings",
            )
        )
    texts = []
    for row, prompt in enumerate(prompts):
        shown = {} if tools is None else {"tools": tools[row]}
        try:
            texts.append(render_text(prompt, tokenizer, template_kwargs | shown))
        except Exception as error:  # a template is a program, with a program's errors
            where, why = f"data.prompt_column, row {row}", f"{type(error).__name__}: {error}"
            what = f"the chat template refuses prompt {row}"
            fix = "correct its messages, or model.chat_template=FILE.jinja that takes them"
            raise DataError(Problem(what, where, why, fix)) from None
    return texts


def render_prompt(
    prompt: Prompt, tokenizer: "PreTrainedTokenizerBase", template_kwargs: JsonObject
) -> list[int]:
    """The ids of a conversation for the model to go on with. Raises what its template raises."""
    text = render_text(prompt, tokenizer, template_kwargs)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def render_text(
    prompt: Prompt, tokenizer: "PreTrainedTokenizerBase", template_kwargs: JsonObject
) -> str:
    """The text of a conversation for the model to go on with. Raises what its template raises."""
    answered = prompt[-1]["role"] == "assistant"  # type: ignore[index]
    return apply_chat_template(
        tokenizer, prompt, add_generation_prompt=not answered, continue_final_message=answered,
        **template_kwargs,
    )  # fmt: skip


def _refuse_two_beginnings(
    ids: list[list[int]], tokenizer: "PreTrainedTokenizerBase", conversational: bool
) -> None:
    bos = tokenizer.bos_token_id
    twice = [row for row, x in enumerate(ids) if bos is not None and x[:2] == [bos, bos]]
    who, fix = "the tokenizer", "leave it out of the prompts"
    if conversational:
        who = "the chat template"
        fix = f"{fix}, or model.chat_template=FILE.jinja of one that writes it once"
    if twice:
        raise DataError(
            Problem(
                f"{len(twice)} prompts begin with two beginning-of-text tokens",
                f"data.prompt_column, row {twice[0]}",
                f"first ids {ids[twice[0]][:5]}: the text has {tokenizer.bos_token!r}, "
                f"and {who} adds one more",
                fix,
            )
        )


def _apply_overlong(
    prompts: list[Prompt],
    ids: list[list[int]],
    examples: list[JsonObject],
    conversational: bool,
    config: DataConfig,
    max_length: int | None,
    seed: int,
    bos_token_id: int | None,
    headroom: int | None,
) -> Prompts:
    """Apply data.overlong, and fingerprint what is left."""
    lengths = [len(x) for x in ids]
    if min(lengths) == 0:
        at = lengths.index(0)
        what, where = f"prompt {at} has no tokens", f"data.prompt_column, row {at}"
        fix = "give the row a prompt, or take it out"
        raise DataError(Problem(what, where, f"found {prompts[at]!r:.80}", fix))
    over = [max_length is not None and n > max_length for n in lengths]
    allowed = {"filter": len(over) / 2, "error": 0, "truncate_left": len(over) if max_length else 0}
    if sum(over) > allowed[config.overlong]:
        raise DataError(_too_long(lengths, over, max_length, headroom))
    if config.overlong == "truncate_left":
        ids = [_cut_left(x, max_length, bos_token_id) for x in ids]
    keep = [i for i in range(len(ids)) if not (over[i] and config.overlong == "filter")]
    return Prompts(
        prompts=[prompts[i] for i in keep],
        prompt_ids=[ids[i] for i in keep],
        examples=[examples[i] for i in keep],
        conversational=conversational,
        fingerprint="",
        dropped=len(ids) - len(keep),
        truncated=sum(over) if config.overlong == "truncate_left" else 0,
        shuffle=config.shuffle,
        seed=seed,
        unfiltered_lengths=lengths,
        example_numbers=keep,
        overlong_examples=sorted({*range(len(ids))} - {*keep}),
        length_limits=[max_length] if max_length is not None else [],
    )


def _prompts_fingerprint(
    data: "Dataset",
    prompts: Prompts,
    ids: Sequence[list[int]],
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
) -> str:
    """What stands for a split's prompts and examples, and for their order.

    The ids of the first prompts stand for what renders them: chat template, tools, date.
    """
    keys = (config.prompts_in, config.template, config.system, config.chat)
    code = None if config.map is None else registry.code_fingerprint(config.map)
    parts = content_fingerprint(data), keys, code, tokenizer_digest(tokenizer)
    key = fingerprint_of(*parts, list(ids[:FIRST_PROMPTS]))
    cut = prompts.length_limits if prompts.truncated else []
    return fingerprint_of(key, prompts.overlong_examples, cut)


def _too_long(
    lengths: list[int], over: list[bool], max_length: int | None, headroom: int | None
) -> Problem:
    fix = f"data.max_prompt_length={max(lengths)}"
    if headroom is not None and max(lengths) > headroom:
        now = f"(a prompt may have {headroom} tokens now)"
        fix = f"a smaller generation.max_completion_length {now}"
    return Problem(
        f"{sum(over)} of {len(over)} prompts are longer than {max_length} tokens",
        TOO_LONG_KEY,
        f"the longest has {max(lengths)}, the first of them is row {over.index(True)}",
        f"{fix}, or data.overlong=truncate_left",
    )


def _cut_left(ids: list[int], max_length: int | None, bos_token_id: int | None) -> list[int]:
    """The last `max_length` ids, but for the BOS token, which stays in front."""
    if max_length is None or len(ids) <= max_length:
        return ids
    head = ids[:1] if ids[0] == bos_token_id else []
    return head + ids[len(ids) - max_length + len(head) :]
