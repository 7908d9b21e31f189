"""Which groups share an update, which completions share a forward pass, and which need none."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rloo_cli.algorithms.common.family import update_denominator, usable_completions
from rloo_cli.algorithms.common.forward_plan import needed_completions
from rloo_cli.config.agent import agent_config, sampled_token_limit
from rloo_cli.data import bin_packing
from rloo_cli.data.batch import Batch
from rloo_cli.data.packing import GroupSlice
from rloo_cli.data.pass_results import highest_entropies
from rloo_cli.run import Run

RankMicroBatches = list[list[list[GroupSlice]]]  # by rank, then by micro-batch


@dataclass
class UpdatePlan:
    """One optimizer update: its micro-batches, and the divisor of its loss."""

    micro_batches_by_rank: RankMicroBatches
    rank: int
    groups: list[int]  # indices of the trained groups, forwarded or not
    num_tokens: int  # unmasked tokens of completions with an advantage; 0 = skip
    num_all_tokens: int  # unmasked tokens of every completion, at least 1
    denominator: float  # divisor of the summed loss (docs/algorithms.md, Loss types)
    least_entropy: float | None = None  # of a chosen token (top_entropy_quantile)

    @property
    def micro_batches(self) -> list[list[GroupSlice]]:
        """This rank's micro-batches; an empty one if only other ranks have one."""
        return self.micro_batches_by_rank[self.rank]

    def iter_micro_batches(self) -> Iterator[tuple[list[GroupSlice], bool]]:
        """This rank's micro-batches (empty if only others have one); whether each is the last."""
        count = len(self.micro_batches)
        yield from ((slices, n == count) for n, slices in enumerate(self.micro_batches, 1))


def plan_updates(run: Run, batch: Batch, iteration: int) -> list[UpdatePlan]:
    """Split a step's groups into num_minibatches updates, permuted again in each iteration.

    Groups that are not trained on still count in the denominator (loss_denominator=all), as do
    completions that need no forward.
    """
    settings = run.algorithm.config
    order = np.arange(len(batch.groups))
    if settings.num_minibatches > 1:
        seed = [run.config.seed, batch.step, iteration]
        order = np.random.Generator(np.random.PCG64(seed)).permutation(order)
    active = set(batch.active)
    lengths = batch.rollout_values("length") * ~batch.masked
    # A masked completion is part of its siblings' baseline; one without a score is not.
    valid = usable_completions(batch.scorable, settings) & ~batch.masked
    seen = ~batch.masked if settings.trains_kl_of_unscored else valid
    counted = torch.ones_like(valid) if settings.loss_denominator == "all" else seen
    plans, generation = [], run.config.generation
    for share in np.array_split(order, settings.num_minibatches):
        groups = sorted(int(i) for i in share)
        trained = [i for i in groups if i in active]
        by_rank = cut_micro_batches(run, batch, trained)
        denominator = update_denominator(
            settings, int(counted[groups].sum()), int((lengths * counted)[groups].sum()),
            sum(bool(slices) for micro_batches in by_rank for slices in micro_batches),
            sampled_token_limit(agent_config(run.config), generation.max_completion_length),
        )  # fmt: skip
        tokens = int((lengths * valid)[trained].sum())
        least, chosen = highest_entropies(batch, trained, settings.top_entropy_quantile)
        all_tokens = max(int(lengths[trained].sum()) if chosen is None else chosen, 1)
        plan = UpdatePlan(by_rank, run.world.rank, trained, tokens, all_tokens, denominator, least)
        plans.append(plan)
    return plans


def forwarded_completions(run: Run, batch: Batch) -> Tensor:
    """The completions of active groups that need a forward pass. -> (P, K) bool

    The loss does not depend on the others; `train.forward_all` forwards them too.
    """
    forwarded = torch.zeros_like(batch.scorable)
    forwarded[batch.active] = True
    if run.config.train.forward_all:
        return forwarded
    return forwarded & needed_completions(
        batch.shaped, batch.scorable, batch.masked, run.algorithm.config, run.forward_plan
    )


def cut_micro_batches(
    run: Run, batch: Batch, group_indices: Sequence[int], grad: bool = True
) -> RankMicroBatches:
    """Split the forwarded completions into micro-batches, equally many for each rank.

    They hold `train.micro_batch_size` completions, in order. Without that key they are balanced and
    hold at most `train.micro_batch_tokens` tokens. `grad` False: for a pass without gradient.
    """
    forwarded, limits = forwarded_completions(run, batch), run.forward_limits
    chosen = [(i, tuple(forwarded[i].nonzero().flatten().tolist())) for i in group_indices]
    slices: list[GroupSlice] = [(i, completions) for i, completions in chosen if completions]
    size = limits.completions if grad else limits.no_grad_completions
    if size is not None:
        num_groups = max(1, size // run.config.algorithm.num_generations)
        by_rank = bin_packing.deal_micro_batches(slices, num_groups, run.world.size)
    else:
        budget = limits.tokens if grad else limits.no_grad_tokens
        by_rank = bin_packing.balance_micro_batches(
            batch.groups, slices, run.policy.layout, budget, limits.cost, run.world.size
        )
    # Ranks that synchronize in every backward pass have at least one micro-batch, even if empty.
    return [[[]] for _ in by_rank] if run.engine.lockstep and not by_rank[0] else by_rank


def keeps_groups_whole(plans: Sequence[UpdatePlan]) -> bool:
    """Whether no group is spread over two micro-batches."""
    by_rank = [micro_batches for plan in plans for micro_batches in plan.micro_batches_by_rank]
    indices = [i for micro_batches in by_rank for slices in micro_batches for i, _ in slices]
    return len(indices) == len(set(indices))
