"""What a batch's updates need to know: the other log-probabilities, KL, reward, advantage.

Where the policy still is the sampler, its own numbers of the training forward are the old ones:
`prepare` has then nothing to do but what the scores alone tell, `of_micro` gives a micro-batch its
advantages, and `finish` keeps what was found, once per update, with one transfer from the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rloo_cli import stop
from rloo_cli.minibatches import cut
from rloo_cli.packing import Micro, unpack
from rloo_cli.parts import Run
from rloo_cli.rollout import Batch
from rloo_cli.updates import Updates


@dataclass
class Pass:
    """A micro-batch with its log-probabilities, and the KL of its completions."""

    micro: Micro
    kl: Tensor | None  # (S,) float64, on the device


@torch.no_grad()
def prepare(run: Run, batch: Batch, updates: Updates, fused: bool) -> None:
    """What must be known before the first update: everything, or if `fused` what costs nothing."""
    if run.algorithm.early(run.config.algorithm):
        finish(run, batch, [])
    if fused:
        return
    passes = []
    for parts in cut(run, batch, batch.active, grad=False):
        stop.check()
        micro = run.policy.pack(batch.groups, parts, batch.masked)
        with run.clock.phase("old_logp"):
            found = run.policy.frozen_logp(micro)
            updates.did(micro, run.limits.shape)
        micro.old_logp, micro.kl_logp = found.logp, found.kl_logp
        refer(run, batch, micro, updates)
        passes.append(Pass(micro, measure(run, micro, updates)))
    finish(run, batch, passes)


@torch.no_grad()
def refer(run: Run, batch: Batch, micro: Micro, updates: Updates) -> None:
    """Give a micro-batch the reference's log-probabilities, where there is one to ask."""
    if run.reference is None or micro.ref_logp is not None:
        return
    with run.clock.phase("reference"):
        own = micro
        if run.reference.layout != run.policy.layout:
            own = run.reference.pack(batch.groups, micro.parts, batch.masked)
        micro.ref_logp = run.reference.frozen_logp(own).logp
        updates.did(own, run.limits.shape)


@torch.no_grad()
def measure(run: Run, micro: Micro, updates: Updates) -> Tensor | None:
    """KL of each completion to the reference, in float64. -> (S,) or None"""
    kl, ref = None, micro.ref_logp
    if ref is not None:
        kl = run.algorithm.sequence_kl(micro.kl_old, ref, micro, run.config.algorithm)
    updates.sampled(micro, kl)
    return None if kl is None else kl.detach().double()


@torch.no_grad()
def of_micro(run: Run, batch: Batch, found: Pass) -> tuple[Tensor, Tensor]:
    """Advantage and usable of a micro-batch's completions. -> (S,), (S,) bool, on the device

    From the batch's table where that is known. Else from the micro-batch's own whole groups, not
    normalised: `finish` says by what factor that would change the gradient.
    """
    micro, device = found.micro, run.world.device
    if batch.advantage is None:
        settings = run.config.algorithm
        if getattr(settings, "normalize_advantages", False):
            settings = settings.model_copy(update={"normalize_advantages": False})
        score = batch.shaped[micro.index].to(device, non_blocking=True)
        scorable = batch.scorable[micro.index].to(device, non_blocking=True)
        kl = None if found.kl is None else _table(found, score.shape)
        told = run.algorithm.advantages(score, kl, scorable, settings)
        value, usable = told.advantage, told.usable
    else:
        assert batch.usable is not None
        value = batch.advantage[micro.index].to(device, non_blocking=True)
        usable = batch.usable[micro.index].to(device, non_blocking=True)
    rows = micro.rows
    return value.reshape(-1)[rows].to(micro.mask.dtype), usable.reshape(-1)[rows]


@torch.no_grad()
def finish(run: Run, batch: Batch, passes: Sequence[Pass]) -> float:
    """Keep on the batch what these passes found, with reward and advantage of the whole step.

    -> the factor that normalising multiplies advantages by, 1 without it.
    """
    for name in ("old_logp", "kl_logp", "ref_logp"):
        columns = [c for p in passes if (c := getattr(p.micro, name)) is not None]
        if columns:
            sizes = [len(c) for c in columns]
            parts = torch.cat(columns).cpu().split(sizes)
            for p, column in zip(passes, parts, strict=True):
                unpack(column, p.micro, batch.groups, name)
    measured = [p for p in passes if p.kl is not None]
    if measured:
        k = batch.shaped.shape[1]
        tables = torch.cat([_table(p, (len(p.micro.parts), k)) for p in measured]).cpu()
        sizes = [len(p.micro.parts) for p in measured]
        for p, table in zip(measured, tables.split(sizes), strict=True):
            batch.keep_kl(p.micro.index, table)
    if not batch.active:
        return 1.0
    index, settings = batch.active, run.config.algorithm
    kl = None if batch.kl is None else batch.kl[index]
    found = run.algorithm.advantages(batch.shaped[index], kl, batch.scorable[index], settings)
    batch.settle(index, found)
    factor: float = found.factor
    return factor


def _table(found: Pass, shape: Sequence[int]) -> Tensor:
    """KL of a micro-batch's groups, 0 for completions that were not forwarded. -> (groups, K)"""
    assert found.kl is not None
    flat = found.kl.new_zeros(shape[0] * shape[1])
    return flat.index_copy(0, found.micro.rows, found.kl).view(*shape)
