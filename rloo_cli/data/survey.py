"""Checks all prompts of a split once: is every row a prompt, and how many tokens does it have?

Only the lengths are kept. Rows that can be neither invalid nor too long are not tokenized:
for plain text, Arrow can tell, so a run of two steps on millions of rows starts
without tokenizing them. Results for many rows are cached.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from rloo_cli.data.cache import Ranks, cached_folder, report_progress
from rloo_cli.data.fingerprint import drop_mapped_pages, fingerprint_of, iter_tables
from rloo_cli.data.image_prompts import is_text
from rloo_cli.data.render import PromptRows
from rloo_cli.utils.errors import DataError, MachineError, Problem, refuse

ROWS_AT_ONCE, PARTS_BETWEEN_DROPS = 1_000, 20
ROWS_WORTH_KEEPING = 10_000  # fewer rows are checked again at each start
LONGEST_ROWS = 1_000  # by bytes; always tokenized
# Unicode's normal forms turn one byte into at most 11, and leave ASCII unchanged. No tokenizer
# makes more tokens than bytes of a text, apart from those that it adds before and after.
MOST_BYTES_PER_BYTE, TOKENS_AROUND = 11, 16
Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Survey:
    """The result. n used rows."""

    lengths: npt.NDArray[np.int32]  # (n,) tokens; 0: not tokenized
    used_ids: npt.NDArray[np.int64]  # that occur in the tokenized rows, sorted


def survey_prompts(
    rows: PromptRows, key: str, max_length: int | None, vocab_size: int | None, ranks: Ranks
) -> tuple[Survey, list[str]]:
    """Check all rows, or read what an earlier run found for this `key`, which identifies them.

    `max_length`: a row with more tokens is tokenized in any case. `vocab_size`: of the model's
    embedding, if known. Also returns lines for the log. Raises DataError for a row that is not a
    valid prompt.
    """

    def look() -> Survey:
        return _look_at_rows(rows, max_length, vocab_size)

    if rows.images is not None:  # whose files may change under the same names
        return look(), []
    # The key has only the ids of the first rows, and a template may render others differently.
    template = getattr(rows.tokenizer, "chat_template", None), rows.template_kwargs
    key = fingerprint_of(key, template, max_length, vocab_size)
    arrays, notes = kept_arrays(key, len(rows), lambda: vars(look()), ranks)
    return Survey(**arrays), notes


def kept_arrays(
    key: str, num_rows: int, make: Callable[[], Arrays], ranks: Ranks
) -> tuple[Arrays, list[str]]:
    """The result of `make` for so many rows, or the cached one. -> also notes

    `key` covers everything that it depends on. Rank 0 makes it, and the others read it.
    """
    if num_rows < ROWS_WORTH_KEEPING:
        return make(), []
    made: Arrays = {}

    def write(folder: Path) -> None:
        made.update(make())
        for name, array in made.items():
            array.tofile(folder / f"{name}.{array.dtype}")

    try:
        folder = ranks.rank0_first(lambda: cached_folder("lengths", key, write))
    except MachineError as error:
        what = error.problems[0].what
        return made or make(), [f"warning: rows are tokenized again at each start: {what}"]
    return {path.stem: np.memmap(path, path.suffix[1:], "r") for path in folder.iterdir()}, []


def _look_at_rows(rows: PromptRows, max_length: int | None, vocab_size: int | None) -> Survey:
    lengths = np.zeros(len(rows), np.int32)
    used = np.zeros(0, bool)
    wanted: Sequence[int] = range(len(rows))
    if _is_plain_text(rows) and _largest_id(rows) < (vocab_size or np.inf):
        wanted = _rows_to_tokenize(rows, max_length)
    elif rows.images is not None:
        wanted = np.delete(np.arange(len(rows)), rows.images.bad_rows).tolist()
    files = [file["filename"] for file in rows.data.cache_files]
    twice: list[int] = []
    for number, part in enumerate(_parts(wanted), 1):
        found = rows.tokenize(part, texts_alone=True)
        for row, one in zip(part, found, strict=True):
            if not one.ids:
                what, where = f"prompt {row} has no tokens", f"data.prompt_column, row {row}"
                fix = "give the row a prompt, or remove it"
                refuse(where, what, fix, f"found {one.prompt!r:.80}", error=DataError)
            lengths[row] = len(one.ids)
            if _begins_twice(one.ids, rows):
                twice.append(row)
        ids = np.fromiter(itertools.chain.from_iterable(one.ids for one in found), np.int64)
        used = _mark(used, ids)
        if number % PARTS_BETWEEN_DROPS == 0:
            drop_mapped_pages(files)
        report_progress(f"tokenizing prompts: {part[-1] + 1:,} of {len(rows):,}")
    if twice:
        raise DataError(_two_beginnings(rows, twice))
    if rows.images is not None:
        lengths = np.delete(lengths, rows.images.bad_rows)
    return Survey(lengths, np.flatnonzero(used))


def _parts(wanted: Sequence[int]) -> Iterator[Sequence[int]]:
    return (wanted[i : i + ROWS_AT_ONCE] for i in range(0, len(wanted), ROWS_AT_ONCE))


def _mark(used: npt.NDArray[np.bool_], ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """`used` with these ids among the used ones."""
    if len(used) <= ids.max():
        used = np.pad(used, (0, int(ids.max()) + 1 - len(used)))
    used[ids] = True
    return used


def _largest_id(rows: PromptRows) -> int:
    assert rows.tokenizer is not None
    return int(max(rows.tokenizer.get_vocab().values()))


def _is_plain_text(rows: PromptRows) -> bool:
    """Whether the column's values are the tokenizer's input, for a tokenizer that is known."""
    feature = rows.data.features[rows.config.prompts_in]
    rendered = rows.conversational or rows.config.template is not None
    return bool(is_text(feature) and not rendered and rows.tokenizer.is_fast)  # type: ignore


def _rows_to_tokenize(rows: PromptRows, max_length: int | None) -> list[int]:
    """For plain text: rows that may be too long or invalid, and those with most bytes.

    Raises DataError for a row without a value.
    """
    column = rows.data.select_columns([rows.config.prompts_in])
    sizes, doubtful, start = np.zeros(len(rows), np.int64), [], 0
    bos = rows.tokenizer.bos_token  # type: ignore[union-attr]
    for table in iter_tables(column):
        texts = table.column(0)
        if texts.null_count:
            rows.render([start + pc.index(pc.is_null(texts), True).as_py()])  # raises the error
        size = pc.binary_length(texts).to_numpy().astype(np.int64)
        size[~pc.string_is_ascii(texts).to_numpy()] *= MOST_BYTES_PER_BYTE
        wrong = pc.equal(pc.utf8_length(pc.utf8_trim_whitespace(texts)), 0).to_numpy().copy()
        if bos:
            wrong |= pc.starts_with(pc.utf8_ltrim_whitespace(texts), bos).to_numpy()
        if max_length is not None:
            wrong |= size + TOKENS_AROUND > max_length
        sizes[start : start + len(size)] = size
        doubtful += (np.flatnonzero(wrong) + start).tolist()
        start += len(size)
    longest = np.argpartition(sizes, -min(LONGEST_ROWS, len(sizes)))[-LONGEST_ROWS:].tolist()
    return sorted({*range(min(ROWS_AT_ONCE, len(rows))), *doubtful, *longest})


def _begins_twice(ids: Sequence[int], rows: PromptRows) -> bool:
    bos = rows.tokenizer.bos_token_id  # type: ignore[union-attr]
    return bos is not None and list(ids[:2]) == [bos, bos]


def _two_beginnings(rows: PromptRows, twice: list[int]) -> Problem:
    tokenizer: Any = rows.tokenizer
    who, fix = "the tokenizer", "remove it from the prompts"
    if rows.conversational:
        who = "the chat template"
        fix = f"{fix}, or model.chat_template=FILE.jinja, one that writes it once"
    first = list(rows.read(twice[:1])[0].ids[:5])
    verb = "prompts begin" if len(twice) > 1 else "prompt begins"
    return Problem(
        f"{len(twice)} {verb} with two beginning-of-text tokens",
        f"data.prompt_column, row {twice[0]}",
        f"first ids {first}: the text has {tokenizer.bos_token!r}, and {who} adds another",
        fix,
    )
