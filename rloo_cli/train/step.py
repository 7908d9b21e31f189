"""The updates of one rollout batch: num_iterations x num_minibatches optimizer steps.

Where the policy still is the sampler, the log-probabilities of its training forward are the old
ones, and one pass is enough (`update_on_policy`). Else they are computed beforehand for the whole
batch (`update_with_old_logprobs`). An update's loss is divided by what the algorithm counts over
the whole update, never averaged over micro-batches.
"""

from dataclasses import replace

import torch
from torch import Tensor

from rloo_cli.algorithms.common.kl import charge_tokens
from rloo_cli.algorithms.common.loss import LossInputs
from rloo_cli.data.batch import Batch
from rloo_cli.data.packing import TOKEN_COLUMNS, GroupSlice, MicroBatch
from rloo_cli.policy.model import LogProbs
from rloo_cli.run import Run, StepProgress
from rloo_cli.train import advantages, guards, token_advantages
from rloo_cli.train.advantages import ForwardPass
from rloo_cli.train.minibatches import UpdatePlan, keeps_groups_whole, plan_updates
from rloo_cli.utils.fault_injection import poison_tensor, trigger_fault
from rloo_cli.utils.files import JsonObject


def update_policy(run: Run, step_progress: StepProgress) -> None:
    """All optimizer steps of one rollout batch; a resumed run goes on in the middle of them."""
    if is_single_pass(run, step_progress):
        update_on_policy(run, step_progress)
    update_with_old_logprobs(run, step_progress)


def is_single_pass(run: Run, step_progress: StepProgress) -> bool:
    """Whether the first update's own forward can say what the old log-probabilities are."""
    if (
        step_progress.prepared
        or run.forward_plan.separate
        or run.config.algorithm.num_minibatches > 1
    ):
        return False
    return run.forward_plan.by_scores or keeps_groups_whole(
        plan_updates(run, step_progress.batch, 0)
    )


def update_on_policy(run: Run, step_progress: StepProgress) -> None:
    """The batch's first update, with the training forward's log-probabilities as the old ones.

    Rewards may need a KL that is known only then: advantages are those of each micro-batch's whole
    groups, and what normalising them over the step would do is one factor on the gradient.
    """
    batch, updates = step_progress.batch, step_progress.updates
    advantages.prepare_advantages(run, batch, updates)
    step_progress.mark_position()
    (plan,) = plan_updates(run, batch, 0)
    total, passes = _zero_scalar(run), []
    by_scores = batch.advantage is not None
    for parts, last in _micro_batches(run, plan):
        run.world.check_stop(frequent=True)
        if not parts:
            dummy_pass(run, batch, last, with_reference=True)
            continue
        with run.clock.phase("update"):
            micro = run.policy.pack(batch.groups, parts, batch.masked)
            advantages.add_reference_logprobs(run, batch, micro, updates)
            now = _policy_logprobs(run, micro)
            micro.old_logp = now.logp.detach()
            micro.kl_logp = None if now.kl_logp is None else now.kl_logp.detach()
            found = ForwardPass(micro, advantages.measure_kl(run, micro, updates))
            total += backward_micro_batch(run, step_progress, plan, found, now, last)
        passes.append(found)
    total = run.world.sum(total)
    factor = advantages.finish_advantages(run, batch, passes)
    take_optimizer_step(run, batch, plan, total, step_progress, 1.0 if by_scores else factor)
    step_progress.prepared = True  # from here on the policy is not the sampler
    step_progress.done += 1
    step_progress.mark_position()
    step_progress.next_iteration()


def compute_old_logprobs(run: Run, step_progress: StepProgress) -> None:
    """Everything that is known of the batch before its first update, by passes without gradient."""
    advantages.prepare_advantages(run, step_progress.batch, step_progress.updates)
    passes = [
        *advantages.old_logprobs(run, step_progress, lambda: dummy_pass(run, step_progress.batch))
    ]
    advantages.finish_advantages(run, step_progress.batch, passes)
    step_progress.prepared = True
    step_progress.mark_position()


def update_with_old_logprobs(run: Run, step_progress: StepProgress) -> None:
    """The updates that are left, once old log-probabilities and advantages of all are known."""
    batch = step_progress.batch
    if not step_progress.prepared:
        compute_old_logprobs(run, step_progress)
    while step_progress.iteration < run.config.algorithm.num_iterations:
        for plan in plan_updates(run, batch, step_progress.iteration)[step_progress.done :]:
            total = _zero_scalar(run)
            for parts, last in _micro_batches(run, plan):
                run.world.check_stop(frequent=True)
                if not parts:
                    dummy_pass(run, batch, last)
                    continue
                with run.clock.phase("update"):
                    micro = run.policy.pack(batch.groups, parts, batch.masked)
                    total += token_advantages.fit_value_model(
                        run, step_progress, micro, plan.num_tokens
                    )
                    now = _policy_logprobs(run, micro)
                    total += backward_micro_batch(
                        run, step_progress, plan, ForwardPass(micro, None), now, last
                    )
            take_optimizer_step(run, batch, plan, run.world.sum(total), step_progress)
            step_progress.done += 1
            step_progress.mark_position()
        step_progress.next_iteration()


def backward_micro_batch(
    run: Run,
    step_progress: StepProgress,
    plan: UpdatePlan,
    forward_pass: ForwardPass,
    logprobs: LogProbs,
    is_last: bool,
) -> Tensor:
    """The loss of one micro-batch, whose log-probabilities are `now`, backwards. Its share, ()."""
    micro, config = forward_pass.micro_batch, run.algorithm.config
    assert micro.old_logp is not None
    a, usable = advantages.micro_batch_advantages(run, step_progress.batch, forward_pass)
    a = charge_tokens(a, usable, micro.kl_old_logp, micro.ref_logp, micro, config)
    inputs = LossInputs(
        logprobs.logp, micro.old_logp, micro.ref_logp, micro, a, plan.denominator, logprobs.kl_logp,
        logprobs.entropy, plan.num_all_tokens,
    )  # fmt: skip
    loss = run.algorithm.loss(inputs)
    run.engine.backward(poison_tensor("loss", loss.total), is_last)
    step_progress.updates.add_micro_batch(loss, micro, logprobs.entropy)
    step_progress.updates.count_forward(micro, run.forward_limits.cost, 3, training=True)
    return loss.total.detach().double()


def take_optimizer_step(
    run: Run,
    batch: Batch,
    plan: UpdatePlan,
    loss: Tensor,
    step_progress: StepProgress,
    factor: float = 1.0,
) -> None:
    """Check the numbers, then take one optimizer step; with nothing to learn from, take none.

    `factor` on the gradient: what normalising advantages multiplies them by.
    """
    if not plan.num_tokens:
        guards.skip_empty_update(run, batch)
        return
    guards.check_sampler_logprobs(run, batch, plan.groups)
    with run.clock.phase("optimizer"):
        trigger_fault("step")
        step_progress.updates.scale_policy_loss(factor)
        norm = run.optimizer.grad_norm(factor)
        if guards.check_finite_update(run, batch, float(loss) * factor, float(norm)):
            step_progress.updates.add_update(run.optimizer, float(loss) * factor, float(norm))
            run.optimizer.step(norm)
            run.state.updates += 1
            if run.reference is not None:
                run.reference.sync_with_policy(run.state.updates)
            batch.updated += plan.groups


def dummy_pass(
    run: Run, batch: Batch, is_last: bool | None = None, with_reference: bool = False
) -> None:
    """A pass over next to nothing, whose gradients are 0, beside ranks that have a real one.

    They would wait for this one for ever: sharded weights are gathered by all of them together.
    `last`: whether a backward pass is the update's last; None: there is none, the pass is one
    without gradient, which has its reference's, too.
    """
    if not run.engine.lockstep:
        if is_last is not None:
            run.engine.skip_micro_batch(is_last)
        return
    group = batch.groups[0]
    rollout = replace(
        group.rollouts[0], completion_ids=group.rollouts[0].completion_ids[:1], mask=None,
        behaviour_logp=None,
    )  # fmt: skip
    blank: JsonObject = dict.fromkeys(TOKEN_COLUMNS)
    nothing = [replace(group, prompt_ids=group.prompt_ids[:1], rollouts=[rollout], **blank)]
    micro = run.policy.pack(nothing, [(0, (0,))])
    with torch.no_grad():  # in the order of a real one: ranks that gather others would mix them
        if is_last is None:
            run.policy.frozen_logp(micro)
        if run.reference is not None and (with_reference or is_last is None):
            run.reference.frozen_logp(run.reference.pack(nothing, [(0, (0,))]))
    if is_last is not None:
        run.engine.backward(zero_loss(run, _policy_logprobs(run, micro)), is_last)


def zero_loss(run: Run, logprobs: LogProbs) -> Tensor:
    """A loss of 0 whose gradient comes through the same outputs as that of the algorithm's loss. ()

    ZeRO-3 counts the outputs by which a backward pass enters the model. Ranks that count
    differently wait for each other for ever, so this takes neither fewer outputs nor more.
    """
    outputs = [logprobs.logp]
    if logprobs.kl_logp is not None and run.algorithm.config.kl_in == "loss":
        outputs.append(logprobs.kl_logp)
    if logprobs.entropy is not None and logprobs.entropy.requires_grad:
        outputs.append(logprobs.entropy)
    return torch.stack([out.sum() * 0.0 for out in outputs]).sum()


def _policy_logprobs(run: Run, micro_batch: MicroBatch) -> LogProbs:
    """The policy's forward pass with gradient; the entropy where this step's line shows it."""
    return run.policy.logp(
        micro_batch, want_entropy=run.log.is_due(run.state.step + 1, run.num_steps)
    )


def _micro_batches(run: Run, plan: UpdatePlan) -> list[tuple[list[GroupSlice], bool]]:
    """This rank's micro-batches, empty ones where others have more; whether it is the last."""
    return [(parts, n == len(plan.micro_batches)) for n, parts in enumerate(plan.micro_batches, 1)]


def _zero_scalar(run: Run) -> Tensor:
    return torch.zeros((), dtype=torch.float64, device=run.world.device)
