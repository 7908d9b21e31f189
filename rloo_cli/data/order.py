"""The order in which prompts are sampled: a pure function that can be recomputed anywhere.

The prompt offset is the one global counter of prompts consumed, over all epochs; each epoch has its
own permutation. It needs only numpy: commands that read a run's folder import no torch.

An epoch of a mixture has as many prompts as all sources together, and each source gets a share by
weight: after every epoch the prompts taken from a source since the start are its share
of all prompts, to within one. Within an epoch a source's prompts are spread evenly among the
others. They come in a permutation of the source; after its end, in the next permutation.
"""

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
import numpy.typing as npt

IndexArray = npt.NDArray[np.int64] | npt.NDArray[np.int32]

# Every rank draws from the same order, and caches this many positions of it: an epoch of millions
# of prompts is permuted again (some 30 ms) when they are used up.
ORDER_BLOCK = 8_192
SORT_WINDOW = 16  # batches per sort by length


@dataclass(frozen=True)
class Source:
    """One source of a mixture, as far as the order depends on it."""

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
    """The index, among `num_prompts`, of the prompt at this offset of the endless order.

    A mixture's prompts are counted through its sources, one after the other.
    """
    epoch, within = divmod(prompt_offset, num_prompts)
    if mixture:
        return int(mixture_permutation(seed, epoch, fingerprint, mixture, shuffle)[within])
    if shuffle:
        block, offset = divmod(within, ORDER_BLOCK)
        return int(permutation_block(seed, epoch, fingerprint, num_prompts, block)[offset])
    return within


@lru_cache(maxsize=2)
def permutation_block(
    seed: int, epoch: int, fingerprint: str, num_prompts: int, block: int
) -> IndexArray:
    """Positions `block` * ORDER_BLOCK and on of a permuted epoch. -> (ORDER_BLOCK,) or fewer"""
    order = epoch_permutation(seed, epoch, fingerprint, num_prompts)
    return order[block * ORDER_BLOCK : (block + 1) * ORDER_BLOCK].copy()


def epoch_permutation(seed: int, epoch: int, fingerprint: str, num_prompts: int) -> IndexArray:
    """The permutation of an epoch, a function of its arguments only. -> (n,)"""
    return _seeded_generator(seed, epoch, fingerprint).permutation(num_prompts)


def _seeded_generator(*parts: int | str) -> np.random.Generator:
    text = "/".join(map(str, parts)).encode()
    key = int.from_bytes(hashlib.sha256(text).digest()[:16], "big")
    return np.random.Generator(np.random.PCG64(key))


@lru_cache(maxsize=2)
def mixture_permutation(
    seed: int, epoch: int, fingerprint: str, mixture: tuple[Source, ...], shuffle: bool
) -> IndexArray:
    """The indices of one epoch's prompts of a mixture, in their order. -> (n,)"""
    before, after = mixture_quotas(mixture, epoch)[-2:]
    begin = np.cumsum([0, *[s.prompts for s in mixture]])
    random = _seeded_generator(seed, epoch, fingerprint, "mixture")
    starts = random.random(len(mixture)) if shuffle else np.full(len(mixture), 0.5)
    keys, indices = [], []
    for i, source in enumerate(mixture):
        count = after[i] - before[i]
        keys.append((np.arange(count) + starts[i]) / max(1, count))
        indices.append(begin[i] + _source_indices(source, before[i], after[i], seed, shuffle))
    order = np.argsort(np.concatenate(keys), kind="stable")
    permutation: IndexArray = np.concatenate(indices)[order]
    return permutation


def _source_indices(source: Source, first: int, end: int, seed: int, shuffle: bool) -> IndexArray:
    """Indices of a source's own prompts for its samples `first` ... `end` - 1."""
    n = source.prompts
    passes = range(first // n, -(-end // n)) if end > first else range(0)
    name = f"{source.fingerprint}/{source.name}"
    parts = [epoch_permutation(seed, i, name, n) if shuffle else np.arange(n) for i in passes]
    indices: IndexArray = np.concatenate([np.arange(0), *parts])
    skipped = first // n * n
    return indices[first - skipped : end - skipped]


@lru_cache(maxsize=4)
def mixture_quotas(mixture: tuple[Source, ...], epoch: int) -> list[list[int]]:
    """How many prompts of each source come before epochs `epoch` and `epoch` + 1.

    Shares are rounded so that they add up; the next epoch compensates for the rounding.
    """
    n = sum(s.prompts for s in mixture)
    weights = [Fraction(s.weight) for s in mixture]
    share = [n * w / sum(weights) for w in weights]
    before, after = [0] * len(mixture), [0] * len(mixture)
    for done in range(epoch + 1):
        before = after
        due = [part * (done + 1) - taken for part, taken in zip(share, before, strict=True)]
        count = [max(0, int(d // 1)) for d in due]
        while (left := n - sum(count)) != 0:
            # The source that is furthest behind gets one more, or the furthest ahead one less.
            candidates = [i for i in range(len(mixture)) if left > 0 or count[i]]
            sign = 1 if left > 0 else -1
            i = max(candidates, key=lambda i: sign * (due[i] - count[i]))
            count[i] += sign
        after = [taken + c for taken, c in zip(before, count, strict=True)]
    return [before, after]


def like_length_batches(
    lengths: IndexArray | Sequence[int], batch_size: int, seed: int
) -> Iterator[list[int]]:
    """Iterate over batches of example indices without end; each pass has every example once.

    Examples of similar length share a batch, to reduce padding; the order of batches is still
    random. `lengths`: tokens of each example.
    """
    epoch, window_size = 0, SORT_WINDOW * batch_size
    while True:
        rng = random.Random(f"{seed}/{epoch}")
        indices = list(range(len(lengths)))
        rng.shuffle(indices)
        windows = [indices[i : i + window_size] for i in range(0, len(indices), window_size)]
        alike = [i for window in windows for i in sorted(window, key=lambda i: lengths[i])]
        batches = [alike[i : i + batch_size] for i in range(0, len(alike), batch_size)]
        rng.shuffle(batches)
        yield from batches
        epoch += 1
