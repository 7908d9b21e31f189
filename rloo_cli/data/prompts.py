"""Turns the examples of a data set into tokenized prompts, in a reproducible order.

The order is a pure function of (seed, epoch, data set). A prompt is rendered and tokenized when it
is drawn; `survey` has checked all of them before.
Nothing is dropped silently: examples filtered by `data.overlong` are counted and listed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rloo_cli.config import registry
from rloo_cli.config.schema import DataConfig
from rloo_cli.data import image_prompts, order
from rloo_cli.data.batch import Group, Prompt
from rloo_cli.data.cache import ONE_PROCESS, Ranks
from rloo_cli.data.fingerprint import fingerprint_of, kept_fingerprint, tokenizer_digest
from rloo_cli.data.lazy import values_at
from rloo_cli.data.order import IndexArray
from rloo_cli.data.prompt_ends import prompt_warnings
from rloo_cli.data.render import PromptRow, PromptRows, ToolsOf
from rloo_cli.data.survey import survey_prompts
from rloo_cli.utils.errors import DataError, Problem, refuse
from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from rloo_cli.data.media import Media

NUM_IMAGE_EXAMPLES = 2  # prompts with images, to try layouts on
TOO_LONG_KEY = "data.max_prompt_length"  # the key named by errors about long prompts
FIRST_PROMPTS = 1_000  # part of the fingerprint, and checked for warnings


@dataclass
class Prompts:
    """The prompts of one split, in the data set's own order."""

    prompts: Sequence[Prompt]
    prompt_ids: Sequence[list[int]]
    examples: Sequence[JsonObject]  # the other columns, which the rewards get
    conversational: bool
    fingerprint: str  # of content and order, after filtering
    dropped: int = 0  # by overlong=filter
    truncated: int = 0  # by overlong=truncate_left
    shuffle: bool = True
    seed: int = 0
    # Tokens before data.overlong; 0: not tokenized, as the text cannot be over a limit.
    unfiltered_lengths: Sequence[int] | IndexArray = ()
    example_numbers: Sequence[int] | IndexArray = ()  # of each prompt, before that filter
    overlong_examples: Sequence[int] = ()  # numbers of the examples it left out
    length_limits: Sequence[int] = ()  # most tokens a prompt may have, if any
    filtered_out: int = 0  # examples that data.filter left out; they have no number
    value_notes: tuple[str, ...] = ()  # conversions, and suspicious prompts
    mixture: tuple[order.Source, ...] = ()  # the sources of data.mixture
    media: "Sequence[Media | None]" = ()  # of each prompt; () = no images
    image_counts: Sequence[int] | IndexArray = ()  # of each prompt; () = no images
    bad_images: int = 0  # examples that data.on_bad_image left out; they have no number
    used_ids: Sequence[int] | IndexArray = ()  # token ids that occur in what was tokenized

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @property
    def lengths(self) -> IndexArray:
        """Tokens of the prompts that were tokenized at the start, in order. (m,)

        All of them; of short texts, of which many were not tokenized, those with most bytes.
        """
        lengths = np.asarray(self.unfiltered_lengths)
        if len(self.example_numbers) < len(lengths):
            lengths = lengths[np.asarray(self.example_numbers, np.int64)]
        lengths = lengths[lengths > 0]
        return np.minimum(lengths, max(self.length_limits)) if self.truncated else lengths

    @property
    def max_length(self) -> int:
        """Tokens of the longest prompt."""
        return int(self.lengths.max())

    @property
    def mean_length(self) -> float:
        """Mean tokens of a prompt; of the first prompts if not all were tokenized."""
        some = self.lengths if np.all(self.unfiltered_lengths) else self.lengths[:FIRST_PROMPTS]
        return float(some.mean())

    def groups_at(self, first: int, count: int) -> list[Group]:
        """Empty groups for the prompts at offsets `first` ... of the endless order.

        The offset is the one global counter of prompts consumed: epoch = offset // n.
        """
        offsets = range(first, first + count)
        groups = self._groups([self.index_at(offset) for offset in offsets])
        for group, offset in zip(groups, offsets, strict=True):
            group.prompt_offset = offset
        return groups

    def group_of(self, index: int) -> Group:
        """An empty group for the prompt `index` of the split itself."""
        return self._groups([index])[0]

    def image_examples(self) -> list[Group]:
        """The shortest prompts with most images, as empty groups: layouts are tried on them."""
        if not len(self.image_counts):
            return []
        counts = np.asarray(self.image_counts, np.int64)
        lengths = np.asarray(self.unfiltered_lengths)[np.asarray(self.example_numbers, np.int64)]
        shown = [i for i in np.lexsort((lengths, -counts)).tolist() if counts[i]]
        return [self.group_of(i) for i in shown[:NUM_IMAGE_EXAMPLES]]

    def _groups(self, indices: Sequence[int]) -> list[Group]:
        columns = self.examples, self.prompts, self.prompt_ids
        parts = [indices, *(values_at(column, indices) for column in columns)]
        groups = [Group(*values) for values in zip(*parts, strict=True)]
        if self.media:
            for group, media in zip(groups, values_at(self.media, indices), strict=True):
                group.media = media
        return groups

    def index_at(self, prompt_offset: int) -> int:
        """The index of the prompt at an offset of the endless order."""
        return order.prompt_index_at(
            prompt_offset, len(self), self.seed, self.fingerprint, self.shuffle, self.mixture
        )


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
    vocab_size: int | None = None,
    ranks: Ranks = ONE_PROCESS,
) -> Prompts:
    """Check every prompt once. `max_length`: most tokens of a prompt.

    `headroom`: tokens of the context that completions leave to a prompt; None = unknown.
    `tools_of`: the descriptions of an example's tools, which its prompt shows; None = none.
    `load_vision` loads the model's processor if prompts have images; None = images not allowed.
    `vocab_size`: of the model's embedding, None = not known.
    Raises DataError: a prompt of another type than the first, no chat template, two BOS tokens, too
    many prompts over the limit, images that cannot be read or shown.
    """
    rows = PromptRows(data, config, tokenizer, template_kwargs, tools_of)
    images, used = _read_images(rows, load_vision)
    first = rows.tokenize(used[:FIRST_PROMPTS])
    key = _key_of_rows(kept_fingerprint(data, ranks), config, tokenizer, first)
    survey, notes = survey_prompts(rows, key, max_length, vocab_size, ranks)
    numbers, overlong, cut = _apply_limit(survey.lengths, config, max_length, headroom)
    most, bos = max_length if cut else None, tokenizer.bos_token_id
    chosen = numbers if images is None else [used[i] for i in numbers]
    found = Prompts(
        prompts=rows.view(chosen, lambda row: row.prompt),
        prompt_ids=rows.view(chosen, lambda row: _cut_left(row.ids, most, bos)),
        examples=rows.view(chosen, lambda row: row.example),
        conversational=rows.conversational,
        fingerprint=fingerprint_of(key, overlong, [most] if cut else []),
        dropped=len(overlong),
        truncated=cut,
        shuffle=config.shuffle,
        seed=seed,
        unfiltered_lengths=survey.lengths,
        example_numbers=numbers,
        overlong_examples=overlong,
        length_limits=[] if max_length is None else [max_length],
        used_ids=survey.used_ids,
        value_notes=(*notes, *prompt_warnings(first, tokenizer, rows.conversational)),
    )
    if images is not None:
        _add_images(found, images, rows, chosen)
    return found


def _read_images(
    rows: PromptRows, load_vision: image_prompts.LoadVision | None
) -> tuple[image_prompts.PromptImages | None, Sequence[int]]:
    """The images of the prompts, each of which was read once, and the rows that are used.

    Raises DataError.
    """
    images = image_prompts.find_images(rows.data, rows.config, rows.conversational, load_vision)
    if images is None:
        return None, range(len(rows))
    rows.images = images
    images.read_all(lambda some: [one.sources for one in rows.render(some, texts_alone=True)])
    used: list[int] = np.delete(np.arange(len(rows)), images.bad_rows).tolist()
    return images, used


def _key_of_rows(
    content: str, config: DataConfig, tokenizer: "PreTrainedTokenizerBase",
    first: Sequence[PromptRow],
) -> str:  # fmt: skip
    """A hash of a split's prompts and examples, and their order.

    `content`: the fingerprint of the rows.

    The ids of the first prompts cover whatever renders them: chat template, tools, date.
    """
    keys = (config.prompts_in, config.template, config.system, config.chat)
    code = None if config.map is None else registry.code_fingerprint(config.map)
    parts = content, keys, code, tokenizer_digest(tokenizer)
    return fingerprint_of(*parts, [one.ids for one in first])


def _apply_limit(
    lengths: IndexArray, config: DataConfig, max_length: int | None, headroom: int | None
) -> tuple[Sequence[int] | IndexArray, list[int], int]:
    """The numbers of the used prompts and of those left out, and how many were truncated.

    Raises DataError if too many are over the limit.
    """
    if max_length is None:
        return range(len(lengths)), [], 0
    over: list[int] = np.flatnonzero(lengths > max_length).tolist()
    count = len(lengths)
    allowed = {"filter": count / 2, "error": 0, "truncate_left": count if max_length else 0}
    if len(over) > allowed[config.overlong]:
        raise DataError(_too_long(lengths, over, max_length, headroom))
    if config.overlong == "filter" and over:
        return np.delete(np.arange(count), over), over, 0
    return range(count), [], len(over)


def _add_images(
    prompts: Prompts,
    images: image_prompts.PromptImages,
    rows: PromptRows,
    chosen: Sequence[int] | IndexArray,
) -> None:
    """Give prompts their images. Raises DataError if one was cut within its images."""
    from rloo_cli.data.media import Media  # lazy: it imports torch, which no text needs here

    if prompts.truncated:
        what, why = "a prompt with images is too long", "cutting it would split an image"
        fix = "data.overlong=filter, a larger data.max_prompt_length, or data.max_pixels"
        refuse("data.overlong", what, fix, why, error=DataError)

    def media_of(row: PromptRow) -> Media | None:
        where = images.column, row.text, list(row.ids), images.reader, images.vision
        return Media(list(row.sources), *where) if row.sources else None

    prompts.media = rows.view(chosen, media_of)
    prompts.image_counts, prompts.bad_images = images.counts[chosen], len(images.bad_rows)
    number, rows_shown = prompts.image_counts.sum(), (prompts.image_counts > 0).sum()
    note = f"{number} image{'s' * int(number != 1)} in {rows_shown} of {len(prompts)} prompts"
    tokens = images.tokens_of_rows(chosen) / max(1, number)
    prompts.value_notes = (f"{note}, {tokens:.0f} tokens an image", *prompts.value_notes)
    shown = [images.digests[i] for i in prompts.example_numbers]
    prompts.fingerprint = fingerprint_of(prompts.fingerprint, shown, images.config.max_pixels)


def _too_long(
    lengths: IndexArray, over: Sequence[int], max_length: int, headroom: int | None
) -> Problem:
    longest = int(lengths.max())
    fix = f"data.max_prompt_length={longest}"
    if headroom is not None and longest > headroom:
        now = f"(prompts may now have {headroom} tokens)"
        fix = f"a smaller generation.max_completion_length {now}"
    return Problem(
        f"{len(over)} of {len(lengths)} prompts are longer than {max_length} tokens",
        TOO_LONG_KEY,
        f"the longest has {longest}, the first one is row {over[0]}",
        f"{fix}, or data.overlong=truncate_left",
    )


def _cut_left(ids: Sequence[int], max_length: int | None, bos_token_id: int | None) -> list[int]:
    """The last `max_length` ids, with the BOS token kept in front."""
    if max_length is None or len(ids) <= max_length:
        return list(ids)
    head = list(ids[:1]) if ids[0] == bos_token_id else []
    return [*head, *ids[len(ids) - max_length + len(head) :]]
