"""The results of a rank's forward passes, on their way from the device to every rank's groups."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rloo_cli.data.batch import Batch
from rloo_cli.data.packing import GroupSlice, MicroBatch, store_column


@dataclass
class ForwardPass:
    """A micro-batch with its log-probabilities, and the KL of its completions."""

    micro_batch: MicroBatch
    kl: Tensor | None  # (S,) float64, on the device

    def kl_table(self, num_groups: int, num_completions: int) -> Tensor:
        """KL of the groups, 0 for completions that were not forwarded. -> (groups, K)"""
        assert self.kl is not None
        flat = self.kl.new_zeros(num_groups * num_completions)
        index = self.micro_batch.completion_index
        return flat.index_copy(0, index, self.kl).view(num_groups, num_completions)


@dataclass
class JoinedColumn:
    """A column of several micro-batches, and how many of its rows each of them has.

    Ranks send it whole: pickle writes a tensor's whole storage even for a part of it.
    """

    values: Tensor  # (rows, ...) on the CPU
    sizes: list[int]

    def split(self) -> Sequence[Tensor]:
        """Each micro-batch's part."""
        return torch.split(self.values, self.sizes)


@dataclass
class PassResults:
    """The results of a rank's forward passes, on the CPU."""

    group_slices: list[list[GroupSlice]]  # of each micro-batch
    columns: dict[str, JoinedColumn]  # (N,) of all of them
    slices_with_kl: list[list[GroupSlice]]
    kl: JoinedColumn | None  # (groups, K) of those

    def store(self, batch: Batch) -> None:
        """Store the results on the batch's groups."""
        for name, column in self.columns.items():
            for group_slices, part in zip(self.group_slices, column.split(), strict=True):
                store_column(part, group_slices, batch.groups, name)
        if self.kl is not None:
            for group_slices, table in zip(self.slices_with_kl, self.kl.split(), strict=True):
                batch.add_kl([i for i, _ in group_slices], table)


def join_passes(passes: Sequence[ForwardPass], batch: Batch) -> PassResults:
    """The results of these passes, with one transfer from the device for each column."""
    results = PassResults([list(p.micro_batch.group_slices) for p in passes], {}, [], None)
    for name in ("old_logp", "kl_logp", "ref_logp", "value", "entropy"):
        columns = [c for p in passes if (c := getattr(p.micro_batch, name)) is not None]
        if columns:
            results.columns[name] = _join_columns(columns)
    with_kl = [p for p in passes if p.kl is not None]
    if with_kl:
        results.slices_with_kl = [list(p.micro_batch.group_slices) for p in with_kl]
        sizes, k = map(len, results.slices_with_kl), batch.shaped.shape[1]
        tables = [p.kl_table(size, k) for p, size in zip(with_kl, sizes, strict=True)]
        results.kl = _join_columns(tables)
    return results


def _join_columns(columns: Sequence[Tensor]) -> JoinedColumn:
    """(rows, ...) each, on any device"""
    return JoinedColumn(torch.cat([*columns]).cpu(), [len(column) for column in columns])


def highest_entropies(
    batch: Batch, groups: Sequence[int], share: float
) -> tuple[float | None, int | None]:
    """The least entropy of the update's tokens that are chosen, and how many these are.

    As in TRL 1.16, it is the 1 - share quantile over all unmasked tokens.
    None, None where all are, and before the pass that computes the entropies.
    """
    entropies = [
        column.numpy()
        for i in groups
        for k, column in enumerate(batch.groups[i].entropy or [])
        if not batch.masked[i, k]
    ]
    if share == 1 or not entropies:
        return None, None
    values = np.concatenate(entropies)
    least = np.quantile(values, 1 - share)
    return float(least), int((values >= least).sum())
