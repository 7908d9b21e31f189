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
from rloo_cli.data.packing import GroupSlice, MicroBatch, store_column
from rloo_cli.reporting.update_metrics import UpdateMetrics
from rloo_cli.run import Run, StepProgress
from rloo_cli.train import token_advantages
from rloo_cli.train.minibatches import cut_micro_batches


@dataclass
class ForwardPass:
    """A micro-batch with its log-probabilities, and the KL of its completions."""

    micro_batch: MicroBatch
    kl: Tensor | None  # (S,) float64, on the device


@torch.no_grad()
def prepare_advantages(run: Run, batch: Batch, updates: UpdateMetrics) -> None:
    """What is known of a batch before any pass of the policy over it."""
    if run.forward_plan.by_scores:
        finish_advantages(run, batch, [])
    if run.reference is not None and run.reference.offloaded:
        prefetch_reference(run, batch, updates)


@torch.no_grad()
def old_logprobs(
    run: Run, step_progress: StepProgress, dummy_pass: Callable[[], None]
) -> Iterator[ForwardPass]:
    """Passes without gradient of policy, reference and value model over the whole batch."""
    batch, updates = step_progress.batch, step_progress.updates
    for parts in cut_micro_batches(run, batch, batch.active, grad=False)[run.world.rank]:
        run.world.check_stop(frequent=True)
        if not parts:  # other ranks have more
            dummy_pass()
            continue
        micro = run.policy.pack(batch.groups, parts, batch.masked)
        with run.clock.phase("old_logp"):
            found = run.policy.frozen_logp(micro)
            updates.count_forward(micro, run.forward_limits.cost)
        micro.old_logp, micro.kl_logp = found.logp, found.kl_logp
        add_reference_logprobs(run, batch, micro, updates)
        token_advantages.add_values(run, batch, micro, updates)
        yield ForwardPass(micro, measure_kl(run, micro, updates))


@torch.no_grad()
def prefetch_reference(run: Run, batch: Batch, updates: UpdateMetrics) -> None:
    """The reference's log-probabilities of the whole batch, while it is on the device."""
    assert run.reference is not None
    passes = []
    with run.reference.on_device():
        for parts in cut_micro_batches(run, batch, batch.active, grad=False)[run.world.rank]:
            run.world.check_stop(frequent=True)
            if not parts:  # a reference that is offloaded is a rank's own: nobody waits
                continue
            micro = run.policy.pack(batch.groups, parts, batch.masked)
            add_reference_logprobs(run, batch, micro, updates)
            passes.append(ForwardPass(micro, None))
    gather_passes(run, batch, passes)


@torch.no_grad()
def add_reference_logprobs(
    run: Run, batch: Batch, micro_batch: MicroBatch, updates: UpdateMetrics
) -> None:
    """Give a micro-batch the reference's log-probabilities, where there is one to ask."""
    if run.reference is None or micro_batch.ref_logp is not None:
        return
    with run.clock.phase("reference"):
        own = micro_batch
        if run.reference.layout != run.policy.layout:
            own = run.reference.pack(batch.groups, micro_batch.group_slices, batch.masked)
        micro_batch.ref_logp = run.reference.frozen_logp(own).logp
        updates.count_forward(own, run.forward_limits.cost)


@torch.no_grad()
def measure_kl(run: Run, micro_batch: MicroBatch, updates: UpdateMetrics) -> Tensor | None:
    """KL of each completion to the reference, in float64. -> (S,) or None"""
    kl, ref = None, micro_batch.ref_logp
    if ref is not None:
        kl = common_kl.sequence_kl(micro_batch.kl_old_logp, ref, micro_batch, run.algorithm.config)
    updates.add_old_logprobs(micro_batch, kl)
    return None if kl is None else kl.detach().double()


@torch.no_grad()
def micro_batch_advantages(
    run: Run, batch: Batch, forward_pass: ForwardPass
) -> tuple[Tensor, Tensor]:
    """Advantage and usable of a micro-batch's completions. -> (S,), (S,) bool, on the device

    Where every token has an advantage of its own, those: (N,).
    From the batch's table where that is known. Else from the micro-batch's own whole groups, not
    normalised: `finish_advantages` says by what factor that would change the gradient.
    """
    micro, device = forward_pass.micro_batch, run.world.device
    if batch.advantage is None:
        inputs = _advantage_inputs(run, batch, micro.group_indices, device, normalize=False)
        kl = None if forward_pass.kl is None else _kl_table(forward_pass, inputs.score.shape)
        made = run.algorithm.advantages(replace(inputs, kl=kl))
        value, usable = made.advantage, made.usable
    else:
        assert batch.usable is not None
        value = batch.advantage[micro.group_indices].to(device, non_blocking=True)
        usable = batch.usable[micro.group_indices].to(device, non_blocking=True)
    rows = micro.completion_index
    value = value.reshape(-1)[rows] if micro.advantage is None else micro.advantage
    return value.to(micro.mask.dtype), usable.reshape(-1)[rows]


@torch.no_grad()
def finish_advantages(run: Run, batch: Batch, passes: Sequence[ForwardPass]) -> float:
    """Keep on the batch what these passes found, with reward and advantage of the whole step.

    -> the factor that normalising multiplies advantages by, 1 without it.
    """
    gather_passes(run, batch, passes)
    if not batch.active:
        return 1.0
    index = batch.active
    inputs = _advantage_inputs(run, batch, index, torch.device("cpu"))
    kl = None if batch.kl is None else batch.kl[index]
    found = run.algorithm.advantages(replace(inputs, kl=kl))
    batch.set_advantages(index, found)
    if run.algorithm.config.by_token:
        token_advantages.add_token_advantages(run, batch)
    return found.factor


def _advantage_inputs(
    run: Run,
    batch: Batch,
    group_indices: Sequence[int],
    device: torch.device,
    normalize: bool = True,
) -> AdvantageInputs:
    """What the advantages of the groups `index` are made of, but for their KL."""
    chosen = list(group_indices)
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


def gather_passes(run: Run, batch: Batch, passes: Sequence[ForwardPass]) -> None:
    """Put what all ranks' micro-batches told on their completions, on every rank."""
    for found in [f for own in run.world.gather(_pass_results(passes, batch)) for f in own]:
        for name, column in found.columns.items():
            store_column(column, found.group_slices, batch.groups, name)
        if found.kl is not None:
            batch.add_kl([i for i, _ in found.group_slices], found.kl)


@dataclass
class PassResult:
    """What a micro-batch told, on the CPU: what every rank is to know of it."""

    group_slices: list[GroupSlice]
    columns: dict[str, Tensor]  # (N,) each
    kl: Tensor | None  # (groups, K)


def _pass_results(passes: Sequence[ForwardPass], batch: Batch) -> list[PassResult]:
    """The passes of this rank, with one transfer from the device for each column."""
    found = [PassResult(list(p.micro_batch.group_slices), {}, None) for p in passes]
    for name in ("old_logp", "kl_logp", "ref_logp", "value"):
        columns = [c for p in passes if (c := getattr(p.micro_batch, name)) is not None]
        if columns:
            parts = torch.cat(columns).cpu().split([len(c) for c in columns])
            for one, column in zip(found, parts, strict=True):
                one.columns[name] = column
    measured = [n for n, p in enumerate(passes) if p.kl is not None]
    if measured:
        k = batch.shaped.shape[1]
        sizes = [len(found[n].group_slices) for n in measured]
        tables = torch.cat(
            [_kl_table(passes[n], (len(found[n].group_slices), k)) for n in measured]
        ).cpu()
        for n, table in zip(measured, tables.split(sizes), strict=True):
            found[n].kl = table
    return found


def _kl_table(forward_pass: ForwardPass, shape: Sequence[int]) -> Tensor:
    """KL of a micro-batch's groups, 0 for completions that were not forwarded. -> (groups, K)"""
    assert forward_pass.kl is not None
    flat = forward_pass.kl.new_zeros(shape[0] * shape[1])
    return flat.index_copy(0, forward_pass.micro_batch.completion_index, forward_pass.kl).view(
        *shape
    )
