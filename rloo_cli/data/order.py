"""Which prompt stands at which place: a pure function that anybody can compute again.

The place is the one global counter of prompts consumed, over all epochs; each epoch has its own
permutation. Numpy alone, so that what only reads a run's folder needs no torch.

Of a mixture, an epoch has as many places as all sources have prompts. Each source has the part of
them that its weight says: after every epoch the draws of each, counted from the start, are what
its share makes of all of them, to within one. Inside an epoch a source's places lie evenly between
those of the others. Its prompts come by permutations of its own, the next one when all were drawn.
"""

import hashlib
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Source:
    """What the order needs to know of one source of a mixture."""

    name: str
    prompts: int
    weight: float
    fingerprint: str


def prompt_index_at(
    prompt_offset: int,
    num_prompts: int,
    seed: int,
    fingerprint: str,
    shuffle: bool,
    mixture: tuple[Source, ...] = (),
) -> int:
    """Index, among n prompts, of the one at a place of the endless order of draws.

    A mixture's prompts are counted through its sources, one after the other.
    """
    epoch, within = divmod(prompt_offset, num_prompts)
    if mixture:
        return int(mixture_permutation(seed, epoch, fingerprint, mixture, shuffle)[within])
    return (
        int(epoch_permutation(seed, epoch, fingerprint, num_prompts)[within]) if shuffle else within
    )


@lru_cache(maxsize=2)
def epoch_permutation(
    seed: int, epoch: int, fingerprint: str, num_prompts: int
) -> np.ndarray[Any, Any]:
    """The permutation of an epoch: nothing but its arguments goes into it. -> (n,)"""
    return _seeded_generator(seed, epoch, fingerprint).permutation(num_prompts)


def _seeded_generator(*parts: Any) -> np.random.Generator:
    text = "/".join(map(str, parts)).encode()
    key = int.from_bytes(hashlib.sha256(text).digest()[:16], "big")
    return np.random.Generator(np.random.PCG64(key))


@lru_cache(maxsize=2)
def mixture_permutation(
    seed: int, epoch: int, fingerprint: str, mixture: tuple[Source, ...], shuffle: bool
) -> np.ndarray[Any, Any]:
    """The prompts of one epoch of a mixture, in the order of its places. -> (n,)"""
    before, after = mixture_quotas(mixture, epoch)[-2:]
    begin = np.cumsum([0, *[s.prompts for s in mixture]])
    random = _seeded_generator(seed, epoch, fingerprint, "mixture")
    starts = random.random(len(mixture)) if shuffle else np.full(len(mixture), 0.5)
    keys, drawn = [], []
    for i, source in enumerate(mixture):
        count = after[i] - before[i]
        keys.append((np.arange(count) + starts[i]) / max(1, count))
        drawn.append(begin[i] + _source_indices(source, before[i], after[i], seed, shuffle))
    order = np.argsort(np.concatenate(keys), kind="stable")
    found: np.ndarray[Any, Any] = np.concatenate(drawn)[order]
    return found


def _source_indices(
    source: Source, first: int, end: int, seed: int, shuffle: bool
) -> np.ndarray[Any, Any]:
    """Indices of a source's own prompts for its draws `first` ... `end` - 1."""
    n = source.prompts
    turns = range(first // n, -(-end // n)) if end > first else range(0)
    name = f"{source.fingerprint}/{source.name}"
    parts = [epoch_permutation(seed, t, name, n) if shuffle else np.arange(n) for t in turns]
    whole: np.ndarray[Any, Any] = np.concatenate([np.arange(0), *parts])
    skipped = first // n * n
    return whole[first - skipped : end - skipped]


@lru_cache(maxsize=4)
def mixture_quotas(mixture: tuple[Source, ...], epoch: int) -> list[list[int]]:
    """Draws of each source before epochs `epoch` and `epoch` + 1: what its share says, rounded so
    that they add up; what rounding took is given in the next epoch.
    """
    n = sum(s.prompts for s in mixture)
    weights = [Fraction(s.weight) for s in mixture]
    share = [n * w / sum(weights) for w in weights]
    before, drawn = [0] * len(mixture), [0] * len(mixture)
    for done in range(epoch + 1):
        before = drawn
        due = [part * (done + 1) - d for part, d in zip(share, drawn, strict=True)]
        count = [max(0, int(d // 1)) for d in due]
        while (left := n - sum(count)) != 0:
            # The one that is furthest behind gets one more, or the one furthest ahead one less.
            open_to = [i for i in range(len(mixture)) if left > 0 or count[i]]
            sign = 1 if left > 0 else -1
            i = max(open_to, key=lambda i: sign * (due[i] - count[i]))
            count[i] += sign
        drawn = [d + c for d, c in zip(drawn, count, strict=True)]
    return [before, drawn]
