"""Several sources as one split: data.mixture. `order` decides when each prompt comes.

An epoch is as long as all sources together; sources are sampled by weight. An example has the
columns of all sources, None if its source lacks one, and `source`, that source's name.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rloo_cli.config.pasted import rename_column
from rloo_cli.config.schema import DataConfig
from rloo_cli.data.dataset import OpenedSplit
from rloo_cli.data.lazy import ReadWhenAsked, join_sequences, values_at
from rloo_cli.data.order import Source
from rloo_cli.data.prompts import FIRST_PROMPTS, Prompts
from rloo_cli.data.render import NOT_FOR_REWARDS
from rloo_cli.utils.errors import DataError, refuse
from rloo_cli.utils.files import JsonObject

SOURCE_COLUMN = "source"  # holds the name of the source that an example is from


def mixture_columns(
    opened: Mapping[str, OpenedSplit], sources: Mapping[str, DataConfig]
) -> list[str]:
    """The columns of all sources, without the prompts, and `source`.

    Raises DataError if a source has a column of that name.
    """
    union: dict[str, None] = {}
    for name, split in opened.items():
        own = [c for c in split.column_names if c != sources[name].prompts_in]
        if SOURCE_COLUMN in own:
            key = f"data.mixture.{name}"
            what = f"{key} has a column named {SOURCE_COLUMN!r}"
            why = "in a mixture that column holds the name of the row's source"
            fix = rename_column(SOURCE_COLUMN, f"its_{SOURCE_COLUMN}", f"{key}.columns")
            refuse(f"{key}.columns", what, fix, why, error=DataError)
        union |= dict.fromkeys(own)
    return [*union, SOURCE_COLUMN]


def join_prompts(
    prompts_by_source: Mapping[str, Prompts], weights: Mapping[str, float], seed: int
) -> Prompts:
    """The prompts of all sources, one source after the other, to be sampled by weight.

    Raises DataError if some are conversations and others plain text.
    """
    kinds = {part.conversational: name for name, part in prompts_by_source.items()}
    if len(kinds) > 1:
        what = f"data.mixture.{kinds[True]} has conversations, {kinds[False]} plain text"
        fix = "rewards get one kind: convert one source, or remove it"
        refuse("data.mixture", what, fix, "one kind per run", error=DataError)
    mix = tuple(Source(n, len(p), weights[n], p.fingerprint) for n, p in prompts_by_source.items())
    named, all_of = prompts_by_source, list(prompts_by_source.values())
    # Examples are numbered through all sources, including those that data.overlong left out.
    before = [sum(len(p.unfiltered_lengths) for p in all_of[:i]) for i in range(len(all_of))]
    numbered = list(zip(all_of, before, strict=True))
    names = dict.fromkeys(c for p in all_of for example in p.examples[:1] for c in example)
    empty = dict.fromkeys(n for n in names if n not in NOT_FOR_REWARDS)

    media: list[Sequence[Any]] = [p.media or [None] * len(p) for p in all_of]
    with_images = any(p.media for p in all_of)
    whole = not any(len(p.overlong_examples) for p in all_of)
    counts = [p.image_counts if p.media else [0] * len(p) for p in all_of]
    numbers = [np.asarray(p.example_numbers, np.int64) + b for p, b in numbered]
    return Prompts(
        prompts=join_sequences([p.prompts for p in all_of]),
        prompt_ids=join_sequences([p.prompt_ids for p in all_of]),
        examples=join_sequences([_labelled(p.examples, n, empty) for n, p in named.items()]),
        conversational=all_of[0].conversational,
        fingerprint=hashlib.blake2b(repr(mix).encode(), digest_size=16).hexdigest(),
        dropped=sum(p.dropped for p in all_of),
        truncated=sum(p.truncated for p in all_of),
        shuffle=all_of[0].shuffle,
        seed=seed,
        unfiltered_lengths=np.concatenate([p.unfiltered_lengths for p in all_of]),
        example_numbers=range(sum(map(len, all_of))) if whole else np.concatenate(numbers),
        overlong_examples=[x + b for p, b in numbered for x in p.overlong_examples],
        length_limits=sorted({x for p in all_of for x in p.length_limits}),
        filtered_out=sum(p.filtered_out for p in all_of),
        mixture=mix,
        media=join_sequences(media) if with_images else (),
        image_counts=np.concatenate(counts) if with_images else (),
        used_ids=np.unique(np.concatenate([p.used_ids for p in all_of])),
        bad_images=sum(p.bad_images for p in all_of),
        value_notes=(*(n for p in all_of for n in p.value_notes), *_type_notes(prompts_by_source)),
    )  # fmt: skip


def _labelled(
    examples: Sequence[JsonObject], source: str, empty: JsonObject
) -> ReadWhenAsked[JsonObject]:
    """A source's examples with its name, and with the columns of `empty` that they lack."""

    def read(indices: Sequence[int]) -> list[JsonObject]:
        return [empty | one | {SOURCE_COLUMN: source} for one in values_at(examples, indices)]

    return ReadWhenAsked(len(examples), read)


def _type_notes(prompts_by_source: Mapping[str, Prompts]) -> list[str]:
    """A line for each column whose type differs between sources."""
    types: dict[str, dict[str, str]] = {}  # column -> source -> its types
    for name, part in prompts_by_source.items():
        first = part.examples[:FIRST_PROMPTS]
        for column in first[0]:
            kinds = {type(example.get(column)).__name__ for example in first}
            if shown := " or ".join(sorted(kinds - {"NoneType"})):
                types.setdefault(column, {})[name] = shown
    return [
        f"column {column} has different types in the sources: "
        f"{', '.join(f'{kind} in {name}' for name, kind in by_source.items())}"
        " (data.types converts)"
        for column, by_source in types.items()
        if len({*by_source.values()}) > 1
    ]


def mixture_notes(mixture: Sequence[Source]) -> list[str]:
    """Lines about the sources for the log."""
    n, weights = sum(s.prompts for s in mixture), sum(s.weight for s in mixture)
    parts = [
        f"{s.name} {s.prompts} prompts, {s.weight / weights:.1%} of the draws, "
        f"{n * s.weight / weights / s.prompts:.2f} passes an epoch"
        for s in mixture
    ]
    return [f"mixture: {'; '.join(parts)}"]
