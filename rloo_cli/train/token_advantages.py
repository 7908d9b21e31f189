"""Advantages of single tokens, for algorithms whose Config says `by_token`; and the value model."""

import torch
from torch import Tensor

from rloo_cli.algorithms.common.token_advantage import collect_step_tokens
from rloo_cli.algorithms.common.turn_credit import ENVIRONMENT
from rloo_cli.data.batch import Batch
from rloo_cli.data.packing import MicroBatch
from rloo_cli.reporting.update_metrics import UpdateMetrics, add_value_loss
from rloo_cli.run import Run, StepProgress
from rloo_cli.train.minibatches import UpdatePlan
from rloo_cli.utils.fault_injection import poison_tensor


@torch.no_grad()
def add_token_advantages(run: Run, batch: Batch) -> None:
    """Let the algorithm compute every token's advantage, and store it on the groups.

    This is done on the CPU and on every rank alike, since every rank knows the whole step.
    `batch.advantage` becomes the mean over each completion's tokens.
    """
    assert batch.usable is not None and batch.advantage is not None
    # Masked truncated completions need no forward, but their siblings are compared with them.
    active = set(batch.active)
    indices = [(i, k) for i, k in batch.usable.nonzero().tolist() if i in active]
    step, lengths = collect_step_tokens(batch, indices, _turn_weight(run))
    table = run.algorithm.token_advantages(step)
    batch.norm_skipped = table.norm_skipped
    for name in ("advantage", "returns"):
        values = getattr(table, name)
        if values is None:
            continue
        none = 0.0 if name == "advantage" else float("nan")
        for i in batch.active:  # completions that are forwarded and not usable have none
            blank = [torch.full((r.length,), none) for r in batch.groups[i].rollouts]
            setattr(batch.groups[i], name, blank)
        for (i, k), column in zip(indices, values.float().split(lengths), strict=True):
            getattr(batch.groups[i], name)[k] = column
    columns = zip(indices, table.advantage.split(lengths), step.mask.split(lengths), strict=True)
    for (i, k), advantage, mask in columns:
        batch.advantage[i, k] = (advantage * mask).sum() / mask.sum().clamp(min=1)


def _turn_weight(run: Run) -> float | None:
    """The weight of what turns earn in a completion's score; None where no turn gets a credit."""
    weights = [r.weight for r in run.config.rewards.values() if r.type == ENVIRONMENT]
    return sum(weights) if run.algorithm.config.turn_rewards == "credit" else None


@torch.no_grad()
def add_values(run: Run, batch: Batch, micro_batch: MicroBatch, updates: UpdateMetrics) -> None:
    """Set a micro-batch's values, if there is a value model."""
    if run.value_model is None:
        return
    with run.clock.phase("value"):
        packed = run.value_model.repack(batch, micro_batch, run.policy.layout)
        micro_batch.value = run.value_model.frozen_values(packed)
        updates.count_forward(packed, run.value_model.cost)


def fit_value_model(
    run: Run, step_progress: StepProgress, micro_batch: MicroBatch, plan: UpdatePlan, is_last: bool
) -> Tensor | float:
    """Forward and backward the value model on one micro-batch. -> its share of the loss, ()

    Its backward pass comes before the policy's forward, so that activations of only one are kept.
    """
    if run.value_model is None:
        return 0.0
    packed = run.value_model.repack(step_progress.batch, micro_batch, run.policy.layout)
    values = run.value_model.values(packed)
    loss = run.algorithm.value_loss(values, micro_batch, max(plan.num_tokens, 1))
    run.engine.backward_value(poison_tensor("value_loss", loss.total), is_last)
    add_value_loss(step_progress.updates, loss, micro_batch)
    step_progress.updates.count_forward(packed, run.value_model.cost, 3)
    return loss.total.detach().double()
