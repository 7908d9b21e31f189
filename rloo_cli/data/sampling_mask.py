"""The ids that a sampler chose each token from: those that top_k, top_p and min_p kept.

Such a sampler's distribution is the model's, renormalized over these ids. The trainer's
log-probabilities match only over the same ids, and recomputing the set could change its last
members by rounding. So the ids are kept, and the policy is restricted to them
("Keep Sampling Mask", DeepSeek-V3.2, arXiv 2512.02556, section 3.1). Imports no torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from rloo_cli.utils.errors import GenerationError, Problem

if TYPE_CHECKING:
    from torch import Tensor

MASK_TENSORS = ("sampling_mask_ids", "sampling_mask_counts")  # in checkpoints and records
ID_TYPE: Final = "i"  # of array: a signed number of ID_BYTES bytes
ID_BYTES = array(ID_TYPE).itemsize


@dataclass
class SamplingMask:
    """For each of S sampled tokens the ids that it was chosen from; the token is one of them."""

    ids: array[int] = field(default_factory=lambda: array(ID_TYPE))  # (M,) one token after another
    counts: array[int] = field(default_factory=lambda: array(ID_TYPE))  # (S,) ids of each token

    def __len__(self) -> int:
        """The number of tokens, S."""
        return len(self.counts)

    @classmethod
    def from_lists(cls, kept: Iterable[Sequence[int]]) -> SamplingMask:
        """The mask of these lists of ids, one for each token."""
        mask = cls()
        for ids in kept:
            mask.append_token(ids)
        return mask

    def append_token(self, ids: Sequence[int]) -> None:
        """Add the ids that one more token was chosen from."""
        self.ids.extend(ids)
        self.counts.append(len(ids))

    def append_mask(self, other: SamplingMask) -> None:
        """Add the tokens of another mask."""
        self.ids.extend(other.ids)
        self.counts.extend(other.counts)

    def slice_tokens(self, begin: int, end: int) -> SamplingMask:
        """The mask of the tokens from `begin` on, before `end`."""
        first = sum(self.counts[:begin])
        last = first + sum(self.counts[begin:end])
        return SamplingMask(self.ids[first:last], self.counts[begin:end])

    @property
    def num_bytes(self) -> int:
        """Its bytes in memory and in files, without headers."""
        return ID_BYTES * (len(self.ids) + len(self.counts))

    def check_tokens(self, sampled_ids: Sequence[int], max_ids: int) -> None:
        """Raise GenerationError unless each token is among its ids, at most `max_ids`."""
        key = "generation.return_sampling_mask"
        if len(self) != len(sampled_ids):
            what = f"{len(sampled_ids)} tokens came with sampling masks of {len(self)}"
            raise GenerationError(f"{what}; {key}=false trains without masks")
        end = 0
        for index, (token, count) in enumerate(zip(sampled_ids, self.counts, strict=True)):
            begin, end = end, end + count
            if count > max_ids:
                raise too_many_ids(index, count, max_ids)
            if token not in self.ids[begin:end]:
                what = f"token {index} of a completion, id {token}, is not in its own sampling mask"
                raise GenerationError(f"{what} of {count} ids; {key}=false trains without masks")


def too_many_ids(index: int, count: int, max_ids: int) -> GenerationError:
    """The error of a token whose mask has more ids than the run allows."""
    key = "generation.max_sampling_mask_ids"
    more = f"{count} or more" if count == max_ids + 1 else str(count)
    what = f"token {index} of a completion was chosen from {more} ids"
    why = f"{key} is {max_ids}, and a mask takes {ID_BYTES} bytes an id, in memory and in records"
    fix = f"a lower generation.top_p, generation.top_k={max_ids}, or {key}={2 * max_ids}"
    return GenerationError(Problem(what, key, why, fix))


def join_masks(masks: Sequence[SamplingMask | None], lengths: Sequence[int]) -> SamplingMask | None:
    """The masks of completions of these numbers of sampled tokens, as one; None if there are none.

    A completion without one gets counts of 0, which `split_mask` recognizes.
    """
    if all(mask is None for mask in masks):
        return None
    joined = SamplingMask()
    for mask, length in zip(masks, lengths, strict=True):
        joined.append_mask(mask or SamplingMask(counts=array(ID_TYPE, [0] * length)))
    return joined


METRICS = {"Sampler against trainer": [  # read by utils.metrics
    ("sampling/mask_ids/mean", "count", "mean:mask_tokens",
     "ids that a token was chosen from (generation.return_sampling_mask)"),
    ("sampling/mask_ids/max", "count", "max", "most of them"),
    ("sampling/mask_bytes", "bytes", "mean:mask_tokens",
     "bytes of a token's sampling mask, in memory, in records and checkpoints"),
]}  # fmt: skip


def mask_metrics(found: Iterable[SamplingMask | None]) -> dict[str, float]:
    """How many ids completions' tokens were chosen from, and their bytes; {} without masks."""
    masks = [mask for mask in found if mask is not None and len(mask)]
    if not masks:
        return {}
    tokens = sum(map(len, masks))
    return {
        "sampling/mask_ids/mean": sum(len(mask.ids) for mask in masks) / tokens,
        "sampling/mask_ids/max": float(max(max(mask.counts) for mask in masks)),
        "sampling/mask_bytes": sum(mask.num_bytes for mask in masks) / tokens,
    }


def mask_tensors(masks: Sequence[SamplingMask | None], lengths: Sequence[int]) -> dict[str, Tensor]:
    """The masks of completions of these numbers of sampled tokens as the tensors MASK_TENSORS,
    int32; {} where none has one."""
    import numpy as np
    import torch

    joined = join_masks(masks, lengths)
    if joined is None:
        return {}
    parts = zip(MASK_TENSORS, (joined.ids, joined.counts), strict=True)
    return {name: torch.from_numpy(np.array(values, np.int32)) for name, values in parts}


def read_mask_tensors(
    tensors: Mapping[str, Tensor], lengths: Sequence[int]
) -> list[SamplingMask | None]:
    """The masks of `mask_tensors`, for completions of these numbers of sampled tokens."""
    if MASK_TENSORS[0] not in tensors:
        return [None] * len(lengths)
    ids, counts = (array(ID_TYPE, tensors[name].numpy().tobytes()) for name in MASK_TENSORS)
    return split_mask(SamplingMask(ids, counts), lengths)


def split_mask(joined: SamplingMask, lengths: Sequence[int]) -> list[SamplingMask | None]:
    """The masks that `join_masks` was given, for completions of these numbers of tokens."""
    found: list[SamplingMask | None] = []
    token = first = 0
    for length in lengths:
        counts = joined.counts[token : token + length]
        last = first + sum(counts)
        found.append(SamplingMask(joined.ids[first:last], counts) if last > first else None)
        token, first = token + length, last
    return found
