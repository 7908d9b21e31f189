"""What a batch's updates need to know: the other log-probabilities, KL, reward, advantage.

On-policy the training forward's own log-probabilities are the old ones: what the scores alone tell
is known beforehand (`prepare`), `of_micro_batch` gives a micro-batch its advantages, and
`finish_advantages` keeps what was found, once per update, with one transfer from the device.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rloo_cli.algorithms.common import kl as common_kl
from rloo_cli.algorithms.common.advantage import AdvantageInputs
from rloo_cli.data.batch import Batch
from rloo_cli.data.packing import Micro, Part, unpack
from rloo_cli.reporting.update_metrics import Updates
from rloo_cli.run import Cycle, Run
from rloo_cli.train import token_advantages
from rloo_cli.train.minibatches import cut


@dataclass
class ForwardPass:
    """A micro-batch with its log-probabilities, and the KL of its completions."""

    micro: Micro
    kl: Tensor | None  # (S,) float64, on the device


@torch.no_grad()
def prepare(run: Run, batch: Batch, updates: Updates) -> None:
    """What is known of a batch before any pass of the policy over it."""
    if run.plan.by_scores:
        finish_advantages(run, batch, [])
    if run.reference is not None and run.reference.offloaded:
        prefetch_reference(run, batch, updates)


@torch.no_grad()
def old_logprobs(run: Run, cycle: Cycle, dummy_pass: Callable[[], None]) -> Iterator[ForwardPass]:
    """Passes without gradient of policy, reference and value model over the whole batch."""
    batch, updates = cycle.batch, cycle.updates
    for parts in cut(run, batch, batch.active, grad=False)[run.world.rank]:
        run.world.check_stop(often=True)
        if not parts:  # other ranks have more
            dummy_pass()
            continue
        micro = run.policy.pack(batch.groups, parts, batch.masked)
        with run.clock.phase("old_logp"):
            found = run.policy.frozen_logp(micro)
            updates.did(micro, run.limits.shape)
        micro.old_logp, micro.kl_logp = found.logp, found.kl_logp
        add_reference_logprobs(run, batch, micro, updates)
        token_advantages.add_values(run, batch, micro, updates)
        yield ForwardPass(micro, measure_kl(run, micro, updates))


@torch.no_grad()
def prefetch_reference(run: Run, batch: Batch, updates: Updates) -> None:
    """The reference's log-probabilities of the whole batch, while it is on the device."""
    assert run.reference is not None
    passes = []
    with run.reference.there():
        for parts in cut(run, batch, batch.active, grad=False)[run.world.rank]:
            run.world.check_stop(often=True)
            if not parts:  # a reference that is offloaded is a rank's own: nobody waits
                continue
            micro = run.policy.pack(batch.groups, parts, batch.masked)
            add_reference_logprobs(run, batch, micro, updates)
            passes.append(ForwardPass(micro, None))
    keep(run, batch, passes)


@torch.no_grad()
def add_reference_logprobs(run: Run, batch: Batch, micro: Micro, updates: Updates) -> None:
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
def measure_kl(run: Run, micro: Micro, updates: Updates) -> Tensor | None:
    """KL of each completion to the reference, in float64. -> (S,) or None"""
    kl, ref = None, micro.ref_logp
    if ref is not None:
        kl = common_kl.sequence_kl(micro.kl_old, ref, micro, run.algorithm.config)
    updates.sampled(micro, kl)
    return None if kl is None else kl.detach().double()


@torch.no_grad()
def of_micro_batch(run: Run, batch: Batch, found: ForwardPass) -> tuple[Tensor, Tensor]:
    """Advantage and usable of a micro-batch's completions. -> (S,), (S,) bool, on the device

    Where every token has an advantage of its own, those: (N,).
    From the batch's table where that is known. Else from the micro-batch's own whole groups, not
    normalised: `finish_advantages` says by what factor that would change the gradient.
    """
    micro, device = found.micro, run.world.device
    if batch.advantage is None:
        inputs = _inputs(run, batch, micro.index, device, normalize=False)
        kl = None if found.kl is None else _table(found, inputs.score.shape)
        made = run.algorithm.advantages(replace(inputs, kl=kl))
        value, usable = made.advantage, made.usable
    else:
        assert batch.usable is not None
        value = batch.advantage[micro.index].to(device, non_blocking=True)
        usable = batch.usable[micro.index].to(device, non_blocking=True)
    rows = micro.rows
    value = value.reshape(-1)[rows] if micro.advantage is None else micro.advantage
    return value.to(micro.mask.dtype), usable.reshape(-1)[rows]


@torch.no_grad()
def finish_advantages(run: Run, batch: Batch, passes: Sequence[ForwardPass]) -> float:
    """Keep on the batch what these passes found, with reward and advantage of the whole step.

    -> the factor that normalising multiplies advantages by, 1 without it.
    """
    keep(run, batch, passes)
    if not batch.active:
        return 1.0
    index = batch.active
    inputs = _inputs(run, batch, index, torch.device("cpu"))
    kl = None if batch.kl is None else batch.kl[index]
    found = run.algorithm.advantages(replace(inputs, kl=kl))
    batch.settle(index, found)
    if run.algorithm.config.by_token:
        token_advantages.add_token_advantages(run, batch)
    return found.factor


def _inputs(
    run: Run, batch: Batch, index: Sequence[int], device: torch.device, normalize: bool = True
) -> AdvantageInputs:
    """What the advantages of the groups `index` are made of, but for their KL."""
    chosen = list(index)
    greedy = None if batch.greedy is None else batch.greedy[chosen].to(device)
    return AdvantageInputs(
        score=batch.shaped[chosen].to(device, non_blocking=True),
        kl=None,
        scorable=batch.scorable[chosen].to(device, non_blocking=True),
        state=run.state.memory,
        greedy_score=greedy,
        normalize=normalize,
    )


def update_algorithm_state(run: Run, batch: Batch) -> None:
    """What the algorithm is to know of this step in later ones."""
    if batch.reward is not None and batch.usable is not None:
        index = batch.active
        run.state.memory = run.algorithm.next_state(
            batch.reward[index], batch.usable[index], run.state.memory
        )


def keep(run: Run, batch: Batch, passes: Sequence[ForwardPass]) -> None:
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


def _found(passes: Sequence[ForwardPass], batch: Batch) -> list[Found]:
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


def _table(found: ForwardPass, shape: Sequence[int]) -> Tensor:
    """KL of a micro-batch's groups, 0 for completions that were not forwarded. -> (groups, K)"""
    assert found.kl is not None
    flat = found.kl.new_zeros(shape[0] * shape[1])
    return flat.index_copy(0, found.micro.rows, found.kl).view(*shape)
