"""What a batch's updates need to know: the other log-probabilities, KL, reward, advantage.

Where the policy still is the sampler, its own numbers of the training forward are the old ones:
`prepare` has then nothing to do but what the scores alone tell, `of_micro` gives a micro-batch its
advantages, and `finish` keeps what was found, once per update, with one transfer from the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rloo_cli.algorithms.common.advantage import Known
from rloo_cli.data.batch import Batch
from rloo_cli.data.packing import COLUMNS, Micro, Part, unpack
from rloo_cli.policy.model import LogProbs
from rloo_cli.reporting.update_metrics import Updates
from rloo_cli.run import Run
from rloo_cli.train import token_advantages
from rloo_cli.train.minibatches import cut


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
    if run.reference is not None and run.reference.offloaded:
        ahead(run, batch, updates)
    if fused:
        return
    passes = []
    for parts in cut(run, batch, batch.active, grad=False)[run.world.rank]:
        run.world.check_stop(often=True)
        if not parts:
            idle(run, batch)
            continue
        micro = run.policy.pack(batch.groups, parts, batch.masked)
        with run.clock.phase("old_logp"):
            found = run.policy.frozen_logp(micro)
            updates.did(micro, run.limits.shape)
        micro.old_logp, micro.kl_logp = found.logp, found.kl_logp
        refer(run, batch, micro, updates)
        token_advantages.appraise(run, batch, micro, updates)
        passes.append(Pass(micro, measure(run, micro, updates)))
    finish(run, batch, passes)


@torch.no_grad()
def ahead(run: Run, batch: Batch, updates: Updates) -> None:
    """A reference that is kept elsewhere comes once, for all completions of the batch."""
    assert run.reference is not None
    passes = []
    with run.reference.there():
        for parts in cut(run, batch, batch.active, grad=False)[run.world.rank]:
            run.world.check_stop(often=True)
            if not parts:  # a reference that is kept elsewhere is a rank's own: nobody waits
                continue
            micro = run.policy.pack(batch.groups, parts, batch.masked)
            refer(run, batch, micro, updates)
            passes.append(Pass(micro, None))
    keep(run, batch, passes)


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

    Where every token has an advantage of its own, those: (N,).
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
        told = run.algorithm.advantages(
            score, kl, scorable, settings, known(run, batch, micro.index)
        )
        value, usable = told.advantage, told.usable
    else:
        assert batch.usable is not None
        value = batch.advantage[micro.index].to(device, non_blocking=True)
        usable = batch.usable[micro.index].to(device, non_blocking=True)
    rows = micro.rows
    value = value.reshape(-1)[rows] if micro.advantage is None else micro.advantage
    return value.to(micro.mask.dtype), usable.reshape(-1)[rows]


@torch.no_grad()
def finish(run: Run, batch: Batch, passes: Sequence[Pass]) -> float:
    """Keep on the batch what these passes found, with reward and advantage of the whole step.

    -> the factor that normalising multiplies advantages by, 1 without it.
    """
    keep(run, batch, passes)
    if not batch.active:
        return 1.0
    index, settings = batch.active, run.config.algorithm
    kl = None if batch.kl is None else batch.kl[index]
    found = run.algorithm.advantages(
        batch.shaped[index], kl, batch.scorable[index], settings, known(run, batch, index, True)
    )
    batch.settle(index, found)
    if settings.by_token:
        token_advantages.settle(run, batch)
    factor: float = found.factor
    return factor


def known(run: Run, batch: Batch, index: Sequence[int], on_cpu: bool = False) -> Known:
    """What advantages of the groups `index` need beside their rewards."""
    if batch.greedy is None:
        return Known(run.state.memory)
    greedy = batch.greedy[list(index)]
    return Known(run.state.memory, greedy if on_cpu else greedy.to(run.world.device))


def remember(run: Run, batch: Batch) -> None:
    """What the algorithm is to know of this step in later ones."""
    if batch.reward is not None and batch.usable is not None:
        settings, index = run.config.algorithm, batch.active
        run.state.memory = run.algorithm.remember(
            batch.reward[index], batch.usable[index], settings, run.state.memory
        )


def keep(run: Run, batch: Batch, passes: Sequence[Pass]) -> None:
    """Put what all ranks' micro-batches told on their completions, on every rank."""
    for found in [f for own in run.world.gather(_found(passes, batch)) for f in own]:
        for name, column in found.columns.items():
            unpack(column, found.parts, batch.groups, name)
        if found.kl is not None:
            batch.keep_kl([i for i, _ in found.parts], found.kl)


@dataclass
class Found:
    """What a micro-batch told, on the CPU: what every rank is to know of it."""

    parts: list[Part]
    columns: dict[str, Tensor]  # (N,) each
    kl: Tensor | None  # (groups, K)


def _found(passes: Sequence[Pass], batch: Batch) -> list[Found]:
    """The passes of this rank, with one transfer from the device for each column."""
    found = [Found(list(p.micro.parts), {}, None) for p in passes]
    for name in ("old_logp", "kl_logp", "ref_logp", "value"):
        columns = [c for p in passes if (c := getattr(p.micro, name)) is not None]
        if columns:
            parts = torch.cat(columns).cpu().split([len(c) for c in columns])
            for one, column in zip(found, parts, strict=True):
                one.columns[name] = column
    measured = [n for n, p in enumerate(passes) if p.kl is not None]
    if measured:
        k = batch.shaped.shape[1]
        sizes = [len(found[n].parts) for n in measured]
        tables = torch.cat([_table(passes[n], (len(found[n].parts), k)) for n in measured]).cpu()
        for n, table in zip(measured, tables.split(sizes), strict=True):
            found[n].kl = table
    return found


def idle(run: Run, batch: Batch, grad: bool = False, last: bool = True, refer: bool = True) -> None:
    """A pass over next to nothing, whose gradients are 0, beside ranks that have a real one.

    They would wait for this one for ever: sharded weights are gathered by all of them together.
    """
    if not run.engine.lockstep:
        if grad:
            run.engine.nothing(last)
        return
    group = batch.groups[0]
    rollout = replace(
        group.rollouts[0], completion_ids=group.rollouts[0].completion_ids[:1], mask=None,
        behaviour_logp=None,
    )  # fmt: skip
    blank: dict[str, Any] = dict.fromkeys(COLUMNS)
    nothing = [replace(group, prompt_ids=group.prompt_ids[:1], rollouts=[rollout], **blank)]
    micro = run.policy.pack(nothing, [(0, (0,))])
    if not grad:  # in the order of a real one: ranks that gather different weights would mix them
        run.policy.frozen_logp(micro)
    if run.reference is not None and refer:
        run.reference.frozen_logp(run.reference.pack(nothing, [(0, (0,))]))
    if grad:
        now = run.policy.logp(micro, want_entropy=run.log.due(run.state.step + 1, run.steps))
        run.engine.backward(zero_loss(run, now), last)


def zero_loss(run: Run, now: LogProbs) -> Tensor:
    """A loss of 0 whose gradient comes through the same outputs as that of `objective.loss`. ()

    ZeRO-3 counts the outputs by which a backward pass enters the model. Ranks that count
    differently wait for each other for ever, so this takes neither fewer outputs nor more.
    """
    outputs = [now.logp]
    if now.kl_logp is not None and getattr(run.config.algorithm, "kl_in", "") == "loss":
        outputs.append(now.kl_logp)
    if now.entropy is not None and now.entropy.requires_grad:
        outputs.append(now.entropy)
    return torch.stack([out.sum() * 0.0 for out in outputs]).sum()


def _table(found: Pass, shape: Sequence[int]) -> Tensor:
    """KL of a micro-batch's groups, 0 for completions that were not forwarded. -> (groups, K)"""
    assert found.kl is not None
    flat = found.kl.new_zeros(shape[0] * shape[1])
    return flat.index_copy(0, found.micro.rows, found.kl).view(*shape)
