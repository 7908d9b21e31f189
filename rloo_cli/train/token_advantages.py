"""Advantages of a step's single tokens, for algorithms whose Config says `by_token`; and values."""

import torch
from torch import Tensor

from rloo_cli.algorithms.common.token_advantage import StepTokens
from rloo_cli.data.batch import Batch
from rloo_cli.data.packing import MicroBatch
from rloo_cli.reporting.update_metrics import UpdateMetrics, add_value_loss
from rloo_cli.run import Run, StepProgress
from rloo_cli.utils.fault_injection import poison_tensor

CompletionIndex = tuple[int, int]  # a group's place in the step, a completion's in the group


@torch.no_grad()
def add_token_advantages(run: Run, batch: Batch) -> None:
    """Ask the algorithm for every token's advantage, and keep it on the groups.

    On the CPU and on every rank alike, since every rank knows the whole step.
    `batch.advantage` becomes the mean over each row's tokens.
    """
    assert batch.usable is not None and batch.advantage is not None
    # Truncated rows that are masked out need no forward, but their siblings are compared with them.
    active = set(batch.active)
    rows = [(i, k) for i, k in batch.usable.nonzero().tolist() if i in active]
    step, lengths = _step_tokens(batch, rows)
    table = run.algorithm.token_advantages(step)
    batch.norm_skipped = table.norm_skipped
    for name in ("advantage", "returns"):
        values = getattr(table, name)
        if values is None:
            continue
        none = 0.0 if name == "advantage" else float("nan")
        for i in batch.active:  # rows that are forwarded and not usable have none
            blank = [torch.full((len(r.completion_ids),), none) for r in batch.groups[i].rollouts]
            setattr(batch.groups[i], name, blank)
        for (i, k), own in zip(rows, values.float().split(lengths), strict=True):
            getattr(batch.groups[i], name)[k] = own
    parts = zip(rows, table.advantage.split(lengths), step.mask.split(lengths), strict=True)
    for (i, k), own, kept in parts:
        batch.advantage[i, k] = (own * kept).sum() / kept.sum().clamp(min=1)


@torch.no_grad()
def add_values(run: Run, batch: Batch, micro_batch: MicroBatch, updates: UpdateMetrics) -> None:
    """Give a micro-batch the value model's values, where there is one to ask."""
    if run.value_model is None:
        return
    with run.clock.phase("value"):
        own = _value_micro_batch(run, batch, micro_batch)
        micro_batch.value = run.value_model.frozen_values(own)
        updates.count_forward(own, run.value_model.cost)


def fit_value_model(
    run: Run, step_progress: StepProgress, micro_batch: MicroBatch, num_tokens: int
) -> Tensor | float:
    """Forward and backward of the value model on one micro-batch; its share of the loss, ().

    A backward pass of its own: what its forward keeps is gone before the policy's is kept.
    """
    if run.value_model is None:
        return 0.0
    own = _value_micro_batch(run, step_progress.batch, micro_batch)
    values = run.value_model.values(own)
    loss = run.algorithm.value_loss(values, micro_batch, max(num_tokens, 1))
    run.engine.backward(poison_tensor("value_loss", loss.total), False)
    add_value_loss(step_progress.updates, loss, micro_batch)
    step_progress.updates.count_forward(own, run.value_model.cost, 3)
    return loss.total.detach().double()


def _value_micro_batch(run: Run, batch: Batch, micro_batch: MicroBatch) -> MicroBatch:
    """The micro-batch as the value model takes it."""
    assert run.value_model is not None
    if run.value_model.layout == run.policy.layout:
        return micro_batch
    return run.value_model.pack(batch.groups, micro_batch.group_slices, batch.masked)


def _step_tokens(
    batch: Batch, completion_indices: list[CompletionIndex]
) -> tuple[StepTokens, list[int]]:
    """Flat columns of these rows, and how many tokens each has."""
    groups = batch.groups
    rollouts = [groups[i].rollouts[k] for i, k in completion_indices]
    lengths = [len(r.completion_ids) for r in rollouts]

    def column(name: str) -> Tensor | None:
        """A completion that was not forwarded has NaN, and a mask of 0."""
        given = [getattr(groups[i], name) for i, _ in completion_indices]
        if all(values is None for values in given):
            return None
        parts = [
            torch.full((length,), float("nan")) if values is None else values[k]
            for values, (_, k), length in zip(given, completion_indices, lengths, strict=True)
        ]
        return torch.cat(parts).double()

    sequence = torch.repeat_interleave(
        torch.arange(len(completion_indices)), torch.tensor(lengths).long()
    )
    mask = torch.tensor(
        [float(m) for r in rollouts for m in (r.mask or [1] * len(r.completion_ids))]
    )
    out = torch.tensor([bool(batch.masked[i, k]) for i, k in completion_indices], dtype=torch.bool)
    old = column("kl_logp")
    old = column("old_logp") if old is None else old
    step = StepTokens(
        score=torch.tensor(
            [float(batch.shaped[i, k]) for i, k in completion_indices], dtype=torch.float64
        ),
        group=torch.tensor([i for i, _ in completion_indices]).long(),
        sequence=sequence,
        mask=mask.double() * (~out)[sequence],
        old=torch.zeros(0, dtype=torch.float64) if old is None else old,
        ref=column("ref_logp"),
        value=column("value"),
    )
    return step, lengths
