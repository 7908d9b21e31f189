"""Computes what a batch's updates need besides old_logp: ref_logp, KL, rewards and advantages.

On-policy, the training forward's log-probabilities are old_logp: `prepare_advantages` computes what
depends only on the scores, `micro_batch_advantages` a micro-batch's advantages, and
`finish_advantages` stores the results on the batch, with one transfer from the device per update.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from rloo_cli.algorithms.common.completion_rules import ENVIRONMENT
from rloo_cli.algorithms.common.family import charge_tokens
from rloo_cli.algorithms.common.hooks import AdvantageInputs, Advantages
from rloo_cli.algorithms.common.importance_weights import sampler_logprobs
from rloo_cli.algorithms.common.token_advantage import collect_step_tokens
from rloo_cli.data.batch import Batch
from rloo_cli.data.packing import MicroBatch
from rloo_cli.data.pass_results import ForwardPass, join_passes
from rloo_cli.reporting.update_metrics import UpdateMetrics
from rloo_cli.run import Run
from rloo_cli.train.minibatches import cut_micro_batches, forwarded_completions


@torch.no_grad()
def prepare_advantages(run: Run, batch: Batch, updates: UpdateMetrics) -> None:
    """Compute what does not depend on the policy's first pass over the batch."""
    if run.forward_plan.by_scores:
        finish_advantages(run, batch, [])
    if run.reference is not None and run.reference.offloaded:
        prefetch_reference(run, batch, updates)
    if run.teacher is not None:
        forwarded = forwarded_completions(run, batch)
        with run.clock.phase("reference"):
            run.teacher.fill_reference(batch, forwarded, run.world.run_on_rank0)


@torch.no_grad()
def prefetch_reference(run: Run, batch: Batch, updates: UpdateMetrics) -> None:
    """Compute ref_logp of the whole batch while the offloaded reference is on the device."""
    assert run.reference is not None
    passes = []
    with run.reference.on_device():
        for group_slices in cut_micro_batches(run, batch, batch.active, grad=False)[run.world.rank]:
            run.world.check_stop(frequent=True)
            if not group_slices:  # each rank has a whole offloaded reference: no rank waits
                continue
            micro_batch = run.policy.pack(batch.groups, group_slices, batch.masked)
            add_reference_logprobs(run, batch, micro_batch, updates)
            passes.append(ForwardPass(micro_batch, None))
    gather_passes(run, batch, passes)


@torch.no_grad()
def add_reference_logprobs(
    run: Run, batch: Batch, micro_batch: MicroBatch, updates: UpdateMetrics
) -> None:
    """Set a micro-batch's ref_logp, if there is a reference and it is not computed yet."""
    if run.reference is None or micro_batch.ref_logp is not None:
        return
    with run.clock.phase("reference"):
        packed = micro_batch
        if run.reference.layout != run.policy.layout:
            packed = run.reference.pack(batch.groups, micro_batch.group_slices, batch.masked)
        micro_batch.ref_logp = run.reference.frozen_logp(packed).logp
        updates.count_forward(packed, run.forward_limits.cost)


@torch.no_grad()
def measure_kl(run: Run, micro_batch: MicroBatch, updates: UpdateMetrics) -> Tensor | None:
    """KL of each completion to the reference, in float64. -> (S,) or None"""
    kl, ref, old = None, micro_batch.ref_logp, micro_batch.kl_old_logp
    if run.config.generation.overlap != "none":  # the KL of the policy that sampled
        old = sampler_logprobs(old, micro_batch)
    if ref is not None:
        kl = run.algorithm.sequence_kl(old, ref, micro_batch)
    updates.add_old_logprobs(micro_batch, kl)
    return None if kl is None else kl.detach().double()


@torch.no_grad()
def micro_batch_advantages(run: Run, batch: Batch, forward_pass: ForwardPass) -> Tensor:
    """Advantages of a micro-batch's completions, or of its tokens. -> (S,) or (N,), on the device

    They are (N,) if each token has its own advantage. They come from the batch's table if it is
    computed; else from the micro-batch's whole groups, not normalized: `finish_advantages` returns
    the factor on the gradient that replaces normalizing.
    """
    micro_batch, device = forward_pass.micro_batch, run.world.device
    group_indices, index = micro_batch.group_indices, micro_batch.completion_index
    if batch.advantage is None:
        shape = len(group_indices), batch.shaped.shape[1]
        kl = None if forward_pass.kl is None else forward_pass.kl_table(*shape)
        table = group_advantages(run, batch, group_indices, kl, device, normalize=False)
        advantage, usable = table.advantage, table.usable
    else:
        assert batch.usable is not None
        advantage = batch.advantage[group_indices].to(device, non_blocking=True)
        usable = batch.usable[group_indices].to(device, non_blocking=True)
    by_token = micro_batch.advantage
    advantage = advantage.reshape(-1)[index] if by_token is None else by_token
    # With kl_credit=to_go the KL is not in the reward: each token is charged for what follows it.
    return charge_tokens(
        advantage.to(micro_batch.mask.dtype), usable.reshape(-1)[index],
        micro_batch.kl_old_logp, micro_batch.ref_logp, micro_batch, run.algorithm.config,
    )  # fmt: skip


@torch.no_grad()
def finish_advantages(run: Run, batch: Batch, passes: Sequence[ForwardPass]) -> float:
    """Store the passes' results on the batch, with rewards and advantages of the whole step.

    -> the factor by which normalizing multiplies the advantages, 1 without it.
    """
    gather_passes(run, batch, passes)
    if not batch.active:
        return 1.0
    kl = None if batch.kl is None else batch.kl[batch.active]
    table = group_advantages(run, batch, batch.active, kl, torch.device("cpu"))
    batch.set_advantages(batch.active, table)
    if run.algorithm.config.by_token:
        add_token_advantages(run, batch)
    return table.factor


class UpdateResults:
    """The results of an update's passes, on the device until they are stored on the batch.

    Storing takes copies and lists of every token: the optimizer step should not wait for it.
    """

    def __init__(self, run: Run, batch: Batch, passes: Sequence[ForwardPass], are_sound: bool):
        self.run, self.batch, self.passes = run, batch, passes
        self.are_sound, self.factor = are_sound, cast(float | None, None)

    def store(self) -> float:
        """`finish_advantages`, once. -> its factor; all ranks must call this"""
        if self.factor is None:
            self.factor = finish_advantages(self.run, self.batch, self.passes)
        return self.factor


def group_advantages(
    run: Run,
    batch: Batch,
    group_indices: Sequence[int],
    kl: Tensor | None,
    device: torch.device,
    normalize: bool = True,
) -> Advantages:
    """Rewards and advantages of these groups, by the algorithm. (groups, K) -> (groups, K) each"""
    index = list(group_indices)
    score = batch.shaped[index].to(device, non_blocking=True)
    scorable = batch.scorable[index].to(device, non_blocking=True)
    greedy = None if batch.greedy is None else batch.greedy[index].to(device)
    inputs = AdvantageInputs(score, kl, scorable, run.state.memory, greedy, normalize)
    return run.algorithm.advantages(inputs)


@torch.no_grad()
def add_token_advantages(run: Run, batch: Batch) -> None:
    """Let the algorithm compute every token's advantage, and store it on the groups.

    This runs on the CPU and on every rank, since every rank has the whole step.
    `batch.advantage` becomes the mean over each completion's tokens.
    """
    assert batch.usable is not None and batch.advantage is not None
    # Masked truncated completions need no forward, but their siblings are compared with them.
    active = set(batch.active)
    indices = [(i, k) for i, k in batch.usable.nonzero().tolist() if i in active]
    weights = [r.weight for r in run.config.rewards.values() if r.type == ENVIRONMENT]
    by_turn = run.algorithm.config.turn_rewards == "credit"
    step, lengths = collect_step_tokens(batch, indices, sum(weights) if by_turn else None)
    table = run.algorithm.token_advantages(step)
    batch.norm_skipped = table.norm_skipped
    for name in ("advantage", "returns"):
        values = getattr(table, name)
        if values is None:
            continue
        none = 0.0 if name == "advantage" else float("nan")
        for i in batch.active:  # forwarded but unusable completions have none
            blank = [torch.full((r.length,), none) for r in batch.groups[i].rollouts]
            setattr(batch.groups[i], name, blank)
        for (i, k), column in zip(indices, values.float().split(lengths), strict=True):
            getattr(batch.groups[i], name)[k] = column
    columns = zip(indices, table.advantage.split(lengths), step.mask.split(lengths), strict=True)
    for (i, k), advantage, mask in columns:
        batch.advantage[i, k] = (advantage * mask).sum() / mask.sum().clamp(min=1)


def update_algorithm_state(run: Run, batch: Batch) -> None:
    """Let the algorithm compute the state that it needs in later steps."""
    if batch.reward is not None and batch.usable is not None:
        reward, usable = batch.reward[batch.active], batch.usable[batch.active]
        run.state.memory = run.algorithm.next_state(reward, usable, run.state.memory)


def gather_passes(run: Run, batch: Batch, passes: Sequence[ForwardPass]) -> None:
    """Store the results of all ranks' micro-batches on the groups, on every rank."""
    for results in run.world.gather(join_passes(passes, batch)):
        results.store(batch)
