"""The updates of one rollout batch: num_iterations x num_minibatches optimizer steps.

old_logp is the policy's at the first update of a batch. The log-probabilities of that update's
training forward are old_logp, and no other pass is needed (`update_on_policy`); later iterations
reuse them. A pass without gradient over the whole batch (`compute_old_logprobs`) comes first where
one training forward cannot give them (`is_single_pass`): with several mini-batches, in an algorithm
whose advantages depend on other groups or on the value model (`run.forward_plan.separate`), and
where a group is cut and its advantages depend on the KL.

A `Batch` is a step's groups of K completions. An update takes some of its groups (`UpdatePlan`) in
`MicroBatch`es, each as large as the memory allows. The loss of a micro-batch is divided by a count
over the whole update of all ranks, such as its completions: then its gradient does not depend on
how the update was split. `StepProgress` records which updates are done; a checkpoint stores it.
"""

import itertools
import math
from dataclasses import replace

import torch
from torch import Tensor

from rloo_cli.algorithms.common.family import adapt_entropy, entropy_weight
from rloo_cli.algorithms.common.hooks import LossInputs
from rloo_cli.data.batch import Batch, Rollout
from rloo_cli.data.packing import TOKEN_COLUMNS, MicroBatch
from rloo_cli.data.pass_results import ForwardPass
from rloo_cli.policy.model import LogProbs, in_eval_mode
from rloo_cli.reporting.update_metrics import add_value_loss
from rloo_cli.run import Run, StepProgress
from rloo_cli.train import advantages, guards
from rloo_cli.train.advantages import UpdateResults
from rloo_cli.train.minibatches import (
    UpdatePlan,
    cut_micro_batches,
    keeps_groups_whole,
    plan_updates,
)
from rloo_cli.utils.fault_injection import poison_tensor, trigger_fault
from rloo_cli.utils.files import JsonObject


def update_policy(run: Run, step_progress: StepProgress) -> None:
    """Take all optimizer steps of one batch; a resumed run continues in the middle of them."""
    if is_single_pass(run, step_progress):
        update_on_policy(run, step_progress)
    update_with_old_logprobs(run, step_progress)  # all other updates


def is_single_pass(run: Run, step_progress: StepProgress) -> bool:
    """Whether the log-probabilities of the first update's training forward can be old_logp."""
    several = run.config.algorithm.num_minibatches > 1
    if step_progress.prepared or run.forward_plan.separate or several:
        return False
    plans = plan_updates(run, step_progress.batch, 0)
    return run.forward_plan.by_scores or keeps_groups_whole(plans)


def update_on_policy(run: Run, step_progress: StepProgress) -> None:
    """Take the batch's first update; the training forward's log-probabilities are old_logp.

    A KL in the rewards is known only after that forward, so advantages are computed for each
    micro-batch, which has whole groups. Normalizing them over the step subtracts their mean, which
    is 0 for leave-one-out advantages, and divides by their deviation, which is one factor: it
    multiplies the whole gradient at the end.
    """
    batch, updates = step_progress.batch, step_progress.updates
    advantages.prepare_advantages(run, batch, updates)
    step_progress.mark_position()
    (plan,) = plan_updates(run, batch, 0)
    loss, passes = _zero_scalar(run), []
    by_scores = batch.advantage is not None
    for group_slices, is_last in plan.iter_micro_batches():
        run.world.check_stop(frequent=True)
        if not group_slices:
            dummy_pass(run, batch, is_last, with_reference=True)
            continue
        with run.clock.phase("update"):
            micro_batch = run.policy.pack(batch.groups, group_slices, batch.masked)
            advantages.add_reference_logprobs(run, batch, micro_batch, updates)
            logprobs = run.policy.logp(micro_batch, want_entropy=True)
            micro_batch.old_logp = logprobs.logp.detach()
            micro_batch.kl_logp = None if logprobs.kl_logp is None else logprobs.kl_logp.detach()
            kl = advantages.measure_kl(run, micro_batch, updates)
            forward_pass = ForwardPass(micro_batch, kl)
            loss += backward_micro_batch(run, step_progress, plan, forward_pass, logprobs, is_last)
        passes.append(forward_pass)
    loss, factor = run.world.sum(loss), 1.0
    results = UpdateResults(run, batch, passes, guards.are_passes_sound(run, batch, passes))
    if not results.are_sound:
        results.store()  # the guards read the batch for their messages
    if run.algorithm.config.normalize_advantages and not by_scores:
        factor = results.store()
    take_optimizer_step(run, batch, plan, loss, step_progress, factor, results)
    results.store()  # once: repeated calls do nothing
    step_progress.prepared = True  # the batch has old_logp, and the weights have changed
    step_progress.done += 1
    step_progress.mark_position()
    step_progress.next_iteration()


@torch.no_grad()
def compute_old_logprobs(run: Run, step_progress: StepProgress) -> None:
    """Compute old_logp, KL, values and advantages of the whole batch, without gradient."""
    batch, updates, passes = step_progress.batch, step_progress.updates, []
    ranked = run.algorithm.config.top_entropy_quantile < 1
    advantages.prepare_advantages(run, batch, updates)
    for group_slices in cut_micro_batches(run, batch, batch.active, grad=False)[run.world.rank]:
        run.world.check_stop(frequent=True)
        if not group_slices:  # other ranks have more
            dummy_pass(run, batch)
            continue
        micro_batch = run.policy.pack(batch.groups, group_slices, batch.masked)
        with run.clock.phase("old_logp"):
            with in_eval_mode(run.policy.model):
                logprobs = run.policy.logp(micro_batch, want_entropy=ranked)
            updates.count_forward(micro_batch, run.forward_limits.cost)
        micro_batch.old_logp, micro_batch.kl_logp = logprobs.logp, logprobs.kl_logp
        micro_batch.entropy = logprobs.entropy if ranked else None
        advantages.add_reference_logprobs(run, batch, micro_batch, updates)
        if run.value_model is not None:
            with run.clock.phase("value"):
                packed = run.value_model.repack(batch, micro_batch, run.policy.layout)
                micro_batch.value = run.value_model.frozen_values(packed)
                updates.count_forward(packed, run.value_model.cost)
        passes.append(ForwardPass(micro_batch, advantages.measure_kl(run, micro_batch, updates)))
    advantages.finish_advantages(run, batch, passes)
    step_progress.prepared = True
    step_progress.mark_position()


def update_with_old_logprobs(run: Run, step_progress: StepProgress) -> None:
    """Take the remaining updates, with old_logp and advantages of the whole batch known."""
    batch = step_progress.batch
    if not step_progress.prepared:
        compute_old_logprobs(run, step_progress)
    while step_progress.iteration < run.config.algorithm.num_iterations:
        for plan in plan_updates(run, batch, step_progress.iteration)[step_progress.done :]:
            loss = _zero_scalar(run)
            for group_slices, is_last in plan.iter_micro_batches():
                run.world.check_stop(frequent=True)
                if not group_slices:
                    dummy_pass(run, batch, is_last)
                    continue
                with run.clock.phase("update"):
                    micro_batch = run.policy.pack(batch.groups, group_slices, batch.masked)
                    loss += fit_value_model(run, step_progress, micro_batch, plan, is_last)
                    forward_pass = ForwardPass(micro_batch, None)
                    logprobs = run.policy.logp(micro_batch, want_entropy=True)
                    loss += backward_micro_batch(
                        run, step_progress, plan, forward_pass, logprobs, is_last
                    )
            take_optimizer_step(run, batch, plan, run.world.sum(loss), step_progress)
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
    """Run the backward pass of one micro-batch's loss. -> its share of the update's loss, ()"""
    micro_batch = forward_pass.micro_batch
    assert micro_batch.old_logp is not None
    a = advantages.micro_batch_advantages(run, step_progress.batch, forward_pass)
    chosen, coef = None, entropy_weight(run.algorithm.config, run.state.entropy_control)
    if plan.least_entropy is not None and micro_batch.entropy is not None:
        chosen = micro_batch.entropy >= plan.least_entropy
    inputs = LossInputs(
        logprobs.logp, micro_batch.old_logp, micro_batch.ref_logp, micro_batch, a,
        plan.denominator, logprobs.kl_logp, logprobs.entropy, plan.num_all_tokens,
        logprobs.divergence, chosen, coef,
    )  # fmt: skip
    loss = run.algorithm.loss(inputs)
    run.engine.backward(poison_tensor("loss", loss.total), is_last)
    step_progress.updates.add_micro_batch(loss, micro_batch, logprobs.entropy)
    step_progress.updates.count_forward(micro_batch, run.forward_limits.cost, 3, training=True)
    return loss.total.detach().double()


def fit_value_model(
    run: Run, step_progress: StepProgress, micro_batch: MicroBatch, plan: UpdatePlan, is_last: bool
) -> Tensor | float:
    """Forward and backward the value model on one micro-batch. -> its share of the loss, ()

    Its backward pass comes before the policy's forward, so that only one model's activations exist.
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


def take_optimizer_step(
    run: Run,
    batch: Batch,
    plan: UpdatePlan,
    loss: Tensor,
    step_progress: StepProgress,
    factor: float = 1.0,
    results: UpdateResults | None = None,
) -> None:
    """Check the numbers, then take one optimizer step; with nothing to learn from, take none.

    `factor` multiplies the gradient, as normalizing multiplies the advantages.
    """
    # Before weights change, a sampler that works beside the update stops, and is checked.
    run.source.pause(run.policy)
    entropy = step_progress.updates.take_entropy()
    if not plan.num_tokens:
        guards.skip_empty_update(run, batch)
        return
    # A sampler that did not get the last weights has log-probabilities other than old_logp. The
    # passes of an on-policy update were compared already (`are_sound`).
    if results is None or not results.are_sound:
        guards.check_sampler_logprobs(run, batch, plan.groups)
    with run.clock.phase("optimizer"):
        trigger_fault("step")
        step_progress.updates.scale_policy_loss(factor)
        norm = run.optimizer.grad_norm(factor)
        scaled_loss = float(loss) * factor
        if results is not None and not math.isfinite(scaled_loss + float(norm)):
            results.store()  # they are written with the error
        if guards.check_finite_update(run, batch, scaled_loss, float(norm)):
            control = control_entropy(run, entropy)
            step_progress.updates.add_update(run.optimizer, scaled_loss, float(norm), control)
            run.optimizer.step(norm)
            step_progress.updates.add(**run.optimizer.weight_changes)
            run.state.updates += 1
            if run.reference is not None:
                run.reference.sync_with_policy(run.state.updates)
            batch.updated += plan.groups


def control_entropy(run: Run, share: Tensor | None) -> dict[str, float]:
    """Set the weight of the next update's entropy bonus by the mean entropy of this one.

    `share`: this rank's part of the mean. All ranks must call this.
    """
    config, state = run.algorithm.config, run.state
    if config.adaptive_entropy is not None:
        mean = run.world.sum(_zero_scalar(run) if share is None else share)
        state.entropy_control = adapt_entropy(config, state.entropy_control, float(mean))
    return state.entropy_control


def dummy_pass(
    run: Run, batch: Batch, is_last: bool | None = None, with_reference: bool = False
) -> None:
    """Join the collectives of ranks that have a micro-batch left, with one token of zero gradient.

    Otherwise they would wait for ever: sharded weights are gathered by all ranks together.
    `is_last`: whether this is the update's last backward pass; None = it is a pass without
    gradient, of the policy and the reference.
    """
    if not run.engine.lockstep:
        if is_last is not None:
            run.engine.skip_micro_batch(is_last)
        return
    group, never_sampled = batch.groups[0], run.policy.logprob_module.never_sampled
    ids = [next(i for i in itertools.count() if i not in never_sampled)]
    blank: JsonObject = dict.fromkeys((*TOKEN_COLUMNS, "media"))
    rollouts = [Rollout(ids, "", "length", False, 0, 0)]
    dummy = [replace(group, prompt_ids=ids, rollouts=rollouts, **blank)]
    micro_batch = run.policy.pack(dummy, [(0, (0,))])
    with torch.no_grad():  # in the order of a real pass: all ranks gather the same weights
        if is_last is None:
            run.policy.frozen_logp(micro_batch)
        if run.reference is not None and (with_reference or is_last is None):
            run.reference.frozen_logp(run.reference.pack(dummy, [(0, (0,))]))
    if run.value_model is not None:
        unused = run.value_model.dummy_loss(dummy, is_last is not None)
        if is_last is not None:
            run.engine.backward_value(unused, is_last)
    if is_last is not None:
        run.engine.backward(
            zero_loss(run, run.policy.logp(micro_batch, want_entropy=True)), is_last
        )


def zero_loss(run: Run, logprobs: LogProbs) -> Tensor:
    """A loss of 0 whose gradient enters the model by the same outputs as the algorithm's loss. ()

    ZeRO-3 counts these outputs; ranks with different counts wait for each other for ever.
    """
    outputs = [logprobs.logp]
    if logprobs.kl_logp is not None and run.algorithm.config.kl_in == "loss":
        outputs.append(logprobs.kl_logp)
    if logprobs.entropy is not None and logprobs.entropy.requires_grad:
        outputs.append(logprobs.entropy)
    return torch.stack([out.sum() * 0.0 for out in outputs]).sum()


def _zero_scalar(run: Run) -> Tensor:
    return torch.zeros((), dtype=torch.float64, device=run.world.device)
