"""What ranks send each other of their forward passes: every number once."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_cases import ENDS, sampled, updated
from loop_cases import alone as make

from rloo_cli.data.batch import Batch
from rloo_cli.data.pass_results import ForwardPass, join_passes
from rloo_cli.distributed.world import World
from rloo_cli.run import Run
from rloo_cli.train import advantages


def passes_of(run: Run, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> list[ForwardPass]:
    """The passes of one update, as the loop hands them over."""
    found: list[ForwardPass] = []
    whole = advantages.finish_advantages

    def heard(run: Run, batch: Batch, passes: Any) -> float:
        found.extend(passes)
        return whole(run, batch, passes)

    monkeypatch.setattr(advantages, "finish_advantages", heard)
    updated(run, batch)
    return found


def sent_bytes(passes: list[ForwardPass], batch: Batch) -> int:
    """The bytes of the message that a rank sends."""
    return len(pickle.dumps(join_passes(passes, batch)))


def test_a_rank_sends_every_number_once_however_many_micro_batches_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(tmp_path, ENDS, "algorithm.beta=0.1", "train.micro_batch_tokens=30")
    batch = sampled(run)
    passes = passes_of(run, batch, monkeypatch)
    assert len(passes) >= 3
    before = sent_bytes(passes, batch)
    columns = join_passes(passes, batch).columns
    assert set(columns) >= {"old_logp", "ref_logp"}
    # a hundred times as many tokens a micro-batch: four bytes for each of them, and no more
    for forward_pass in passes:
        micro_batch = forward_pass.micro_batch
        for name in columns:
            setattr(micro_batch, name, getattr(micro_batch, name).repeat(100))
    numbers = sum(99 * len(column.values) for column in columns.values())
    grown = sent_bytes(passes, batch) - before
    assert 4 * numbers <= grown < 4.2 * numbers


def test_what_is_sent_is_stored_as_if_nobody_had_sent_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(tmp_path, ENDS, "algorithm.beta=0.1", "train.micro_batch_tokens=30")
    batch = sampled(run)
    passes = passes_of(run, batch, monkeypatch)
    blank = {"old_logp": None, "ref_logp": None}
    other = replace(batch, kl=None, groups=[replace(group, **blank) for group in batch.groups])

    def send(_: World, value: Any) -> list[Any]:
        return [pickle.loads(pickle.dumps(value))]

    monkeypatch.setattr(World, "gather", send)
    advantages.gather_passes(run, other, passes)
    assert batch.kl is not None and other.kl is not None and torch.equal(batch.kl, other.kl)
    for ours, theirs in zip(batch.groups, other.groups, strict=True):
        for name in blank:
            columns = zip(getattr(ours, name), getattr(theirs, name), strict=True)
            assert all(torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0)) for a, b in columns)
