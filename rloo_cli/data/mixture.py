"""Several sources as one split: data.mixture. `order` says which of them stands at which place.

An epoch is as long as all sources together; draws follow the weights. A row has the columns of all
sources, None where its own has no such column, and `source`, the name of its own.
"""

import hashlib
from collections.abc import Mapping, Sequence

from rloo_cli.config.schema import DataConfig
from rloo_cli.data.dataset import Opened
from rloo_cli.data.order import Source
from rloo_cli.data.prompts import NOT_FOR_REWARDS, Prompts
from rloo_cli.utils.errors import DataError, Problem

COLUMN = "source"  # with its name a row says where it comes from


def columns(found: Mapping[str, Opened], sources: Mapping[str, DataConfig]) -> list[str]:
    """The columns of all sources, their prompts left out, and `source`.

    Raises DataError where a source has a column of that name.
    """
    union: dict[str, None] = {}
    for name, rows in found.items():
        own = [c for c in rows.column_names if c != sources[name].prompt_column]
        if COLUMN in own:
            raise DataError(
                Problem(
                    f"data.mixture.{name} has a column named {COLUMN!r}",
                    f"data.mixture.{name}.columns",
                    "in a mixture that column says which of its sources a row is from",
                    f"data.mixture.{name}.columns={{{COLUMN}: its_{COLUMN}}}",
                )
            )
        union |= dict.fromkeys(own)
    return [*union, COLUMN]


def joined(parts: Mapping[str, Prompts], weights: Mapping[str, float], seed: int) -> Prompts:
    """The prompts of all sources, one source after the other, drawn by weight.

    Raises DataError where some are conversations and others plain text.
    """
    kinds = {part.conversational: name for name, part in parts.items()}
    if len(kinds) > 1:
        what = f"data.mixture.{kinds[True]} has conversations, {kinds[False]} plain text"
        fix = "rewards are given one kind: convert one of them, or take it out"
        raise DataError(Problem(what, "data.mixture", "one kind per run", fix))
    mix = tuple(Source(n, len(p), weights[n], p.fingerprint) for n, p in parts.items())
    all_of = list(parts.values())
    # Rows are counted through the sources, with those that data.overlong left out.
    before = [sum(len(p.lengths) for p in all_of[:i]) for i in range(len(all_of))]
    names = dict.fromkeys(c for p in all_of for row in p.rows[:1] for c in row)
    empty = dict.fromkeys(n for n in names if n not in NOT_FOR_REWARDS)
    return Prompts(
        prompts=[x for p in all_of for x in p.prompts],
        ids=[x for p in all_of for x in p.ids],
        rows=[empty | row | {COLUMN: n} for n, p in parts.items() for row in p.rows],
        conversational=all_of[0].conversational,
        fingerprint=hashlib.blake2b(repr(mix).encode(), digest_size=16).hexdigest(),
        dropped=sum(p.dropped for p in all_of),
        truncated=sum(p.truncated for p in all_of),
        shuffle=all_of[0].shuffle,
        seed=seed,
        lengths=[x for p in all_of for x in p.lengths],
        numbers=[x + b for p, b in zip(all_of, before, strict=True) for x in p.numbers],
        filtered=[x + b for p, b in zip(all_of, before, strict=True) for x in p.filtered],
        limits=sorted({x for p in all_of for x in p.limits}),
        left_out=sum(p.left_out for p in all_of),
        mix=mix,
    )


def notes(mix: Sequence[Source]) -> list[str]:
    """What a reader of the log should know of the sources."""
    n, weights = sum(s.prompts for s in mix), sum(s.weight for s in mix)
    parts = [
        f"{s.name} {s.prompts} prompts, {s.weight / weights:.1%} of the draws, "
        f"{n * s.weight / weights / s.prompts:.2f} passes an epoch"
        for s in mix
    ]
    return [f"mixture: {'; '.join(parts)}"]
