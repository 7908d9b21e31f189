"""Which groups share an update, which completions share a forward pass, and which need none."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rloo_cli.algorithms.common.advantage import usable_completions as usable_rows
from rloo_cli.algorithms.common.aggregate import update_denominator as loss_denominator
from rloo_cli.algorithms.common.forward_plan import needed_completions
from rloo_cli.data import bin_packing
from rloo_cli.data.batch import Batch
from rloo_cli.data.bin_packing import PackingItem
from rloo_cli.data.packing import GroupSlice
from rloo_cli.run import Run


@dataclass(frozen=True)
class UpdatePlan:
    """One optimizer update."""

    micro_batches_by_rank: list[
        list[list[GroupSlice]]
    ]  # of each rank: the completions of each micro-batch
    rank: int
    groups: list[int]  # trained on, forwarded or not
    num_tokens: int  # unmasked tokens of rows that have an advantage; 0 = nothing to learn from
    num_all_tokens: int  # unmasked tokens of every row, at least 1
    denominator: float  # what the summed loss is divided by (docs/OBJECTIVES.md, Loss types)

    @property
    def micro_batches(self) -> list[list[GroupSlice]]:
        """Those of this rank; empty ones where others have more."""
        return self.micro_batches_by_rank[self.rank]


def plan_updates(run: Run, batch: Batch, iteration: int) -> list[UpdatePlan]:
    """Cut a step's groups into num_minibatches updates, permuted anew in each iteration.

    Groups that are not trained on still count in the denominator (loss_denominator=all), and so do
    completions that need no forward.
    """
    settings = run.algorithm.config
    order = np.arange(len(batch.groups))
    if settings.num_minibatches > 1:
        seed = [run.config.seed, batch.step, iteration]
        order = np.random.Generator(np.random.PCG64(seed)).permutation(order)
    active = set(batch.active)
    lengths = batch.rollout_values("length") * ~batch.masked
    # A masked row still is its siblings' baseline: only what has no score leaves a row alone.
    valid = usable_rows(batch.scorable, settings) & ~batch.masked
    counted = torch.ones_like(valid) if settings.loss_denominator == "all" else valid
    plans = []
    for share in np.array_split(order, settings.num_minibatches):
        groups = sorted(int(i) for i in share)
        used = [i for i in groups if i in active]
        ranks = cut_micro_batches(run, batch, used)
        denominator = loss_denominator(
            settings,
            int(counted[groups].sum()),
            int((lengths * counted)[groups].sum()),
            sum(bool(micro) for own in ranks for micro in own),
            run.config.generation.max_completion_length,
        )
        tokens = int((lengths * valid)[used].sum())
        every = max(int(lengths[used].sum()), 1)
        plans.append(UpdatePlan(ranks, run.world.rank, used, tokens, every, denominator))
    return plans


def forwarded_completions(run: Run, batch: Batch) -> Tensor:
    """Completions of active groups that are forwarded. -> (P, K) bool

    On the others nothing depends (`needed_completions`); `train.forward_all` takes them too.
    """
    rows = torch.zeros_like(batch.scorable)
    rows[batch.active] = True
    if run.config.train.forward_all:
        return rows
    return rows & needed_completions(
        batch.shaped, batch.scorable, batch.masked, run.algorithm.config, run.forward_plan
    )


def cut_micro_batches(
    run: Run, batch: Batch, group_indices: Sequence[int], grad: bool = True
) -> list[list[list[GroupSlice]]]:
    """Each rank's micro-batches of what these groups have to forward: equally many for each.

    Of so many completions as `train.micro_batch_size` says, in order; without it, balanced ones of
    at most `train.micro_batch_tokens` rows. `grad` False: for a pass without gradient.
    """
    rows, limits = forwarded_completions(run, batch), run.forward_limits
    parts: list[GroupSlice] = [
        (i, tuple(k for k, wanted in enumerate(rows[i].tolist()) if wanted)) for i in group_indices
    ]
    parts = [part for part in parts if part[1]]
    size = limits.completions if grad else limits.no_grad_completions
    if size is not None:
        each = max(1, size // run.config.algorithm.num_generations)
        return _fill_lockstep_ranks(
            run,
            bin_packing.deal_micro_batches(
                [*bin_packing.split_chunks(parts, each)], run.world.size
            ),
        )
    budget = limits.tokens if grad else limits.no_grad_tokens
    items = [item for part in parts for item in _packing_items(run, batch, part, budget)]
    if run.policy.layout == "padded":
        return _fill_lockstep_ranks(
            run, bin_packing.pack_padded_micro_batches(items, budget, run.world.size)
        )
    return _fill_lockstep_ranks(run, bin_packing.pack_micro_batches(items, budget, run.world.size))


def _fill_lockstep_ranks(
    run: Run, micro_batches_by_rank: list[list[list[GroupSlice]]]
) -> list[list[list[GroupSlice]]]:
    """Ranks that meet in every backward pass have at least one, if only of nothing."""
    return (
        [[[]] for _ in micro_batches_by_rank]
        if run.engine.lockstep and not micro_batches_by_rank[0]
        else micro_batches_by_rank
    )


def _packing_items(
    run: Run, batch: Batch, group_slice: GroupSlice, max_tokens: int
) -> list[PackingItem]:
    """A group as one item, or as several where it is over the budget and may be cut."""
    group, layout = batch.groups[group_slice[0]], run.policy.layout
    prompt = len(group.prompt_ids)
    lengths = [len(group.rollouts[k].completion_ids) for k in group_slice[1]]
    parts = [group_slice]
    if bin_packing.forward_tokens(prompt, lengths, layout) > max_tokens:
        parts = bin_packing.split_group(group_slice, prompt, lengths, max_tokens, layout)
    items = []
    for found in parts:
        own = [len(group.rollouts[k].completion_ids) for k in found[1]]
        rows, cost = (
            bin_packing.forward_tokens(prompt, own, layout),
            run.forward_limits.cost.group_flops(prompt, own),
        )
        items.append(PackingItem(found, rows, cost, prompt + max(own)))
    return items


def keeps_groups_whole(plans: Sequence[UpdatePlan]) -> bool:
    """Whether no group is spread over two micro-batches."""
    seen = [
        i for plan in plans for own in plan.micro_batches_by_rank for micro in own for i, _ in micro
    ]
    return len(seen) == len(set(seen))
