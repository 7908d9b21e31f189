"""The updates of one rollout batch: num_iterations x num_minibatches optimizer steps.

Where the policy still is the sampler, the log-probabilities of its training forward are the old
ones, and one pass is enough (`update_on_policy`). Else they are computed beforehand for the whole
batch (`update_with_old_logprobs`). An update's loss is divided by what the algorithm counts over
the whole update, never averaged over micro-batches.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rloo_cli.algorithms.common.kl import charge_tokens
from rloo_cli.algorithms.common.loss import LossInputs
from rloo_cli.data.batch import Batch
from rloo_cli.data.packing import COLUMNS, Micro, Part
from rloo_cli.policy.model import LogProbs
from rloo_cli.run import Cycle, Run
from rloo_cli.train import advantages, guards, token_advantages
from rloo_cli.train.advantages import ForwardPass
from rloo_cli.train.minibatches import Plan, plan_updates, together
from rloo_cli.utils.fault_injection import fault, poison


def update_policy(run: Run, cycle: Cycle) -> None:
    """All optimizer steps of one rollout batch; a resumed run goes on in the middle of them."""
    if is_single_pass(run, cycle):
        update_on_policy(run, cycle)
    update_with_old_logprobs(run, cycle)


def is_single_pass(run: Run, cycle: Cycle) -> bool:
    """Whether the first update's own forward can say what the old log-probabilities are."""
    if cycle.prepared or run.plan.separate or run.config.algorithm.num_minibatches > 1:
        return False
    return run.plan.by_scores or together(plan_updates(run, cycle.batch, 0))


def update_on_policy(run: Run, cycle: Cycle) -> None:
    """The batch's first update, with the training forward's log-probabilities as the old ones.

    Rewards may need a KL that is known only then: advantages are those of each micro-batch's whole
    groups, and what normalising them over the step would do is one factor on the gradient.
    """
    batch, updates = cycle.batch, cycle.updates
    advantages.prepare(run, batch, updates)
    cycle.mark()
    (plan,) = plan_updates(run, batch, 0)
    total, passes = _zero(run), []
    by_scores = batch.advantage is not None
    for parts, last in _micro_batches(run, plan):
        run.world.check_stop(often=True)
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
            total += backward(run, cycle, plan, found, now, last)
        passes.append(found)
    total = run.world.sum(total)
    factor = advantages.finish_advantages(run, batch, passes)
    take_step(run, batch, plan, total, cycle, 1.0 if by_scores else factor)
    cycle.prepared = True  # from here on the policy is not the sampler
    cycle.done += 1
    cycle.mark()
    cycle.next_iteration()


def compute_old_logprobs(run: Run, cycle: Cycle) -> None:
    """Everything that is known of the batch before its first update, by passes without gradient."""
    advantages.prepare(run, cycle.batch, cycle.updates)
    passes = [*advantages.old_logprobs(run, cycle, lambda: dummy_pass(run, cycle.batch))]
    advantages.finish_advantages(run, cycle.batch, passes)
    cycle.prepared = True
    cycle.mark()


def update_with_old_logprobs(run: Run, cycle: Cycle) -> None:
    """The updates that are left, once old log-probabilities and advantages of all are known."""
    batch = cycle.batch
    if not cycle.prepared:
        compute_old_logprobs(run, cycle)
    while cycle.iteration < run.config.algorithm.num_iterations:
        for plan in plan_updates(run, batch, cycle.iteration)[cycle.done :]:
            total = _zero(run)
            for parts, last in _micro_batches(run, plan):
                run.world.check_stop(often=True)
                if not parts:
                    dummy_pass(run, batch, last)
                    continue
                with run.clock.phase("update"):
                    micro = run.policy.pack(batch.groups, parts, batch.masked)
                    total += token_advantages.fit_value_model(run, cycle, micro, plan.tokens)
                    now = _policy_logprobs(run, micro)
                    total += backward(run, cycle, plan, ForwardPass(micro, None), now, last)
            take_step(run, batch, plan, run.world.sum(total), cycle)
            cycle.done += 1
            cycle.mark()
        cycle.next_iteration()


def backward(
    run: Run, cycle: Cycle, plan: Plan, found: ForwardPass, now: LogProbs, last: bool
) -> Tensor:
    """The loss of one micro-batch, whose log-probabilities are `now`, backwards. Its share, ()."""
    micro, config = found.micro, run.algorithm.config
    assert micro.old_logp is not None
    a, usable = advantages.of_micro_batch(run, cycle.batch, found)
    a = charge_tokens(a, usable, micro.kl_old, micro.ref_logp, micro, config)
    inputs = LossInputs(
        now.logp, micro.old_logp, micro.ref_logp, micro, a, plan.denominator, now.kl_logp,
        now.entropy, plan.all_tokens,
    )  # fmt: skip
    loss = run.algorithm.loss(inputs)
    run.engine.backward(poison("loss", loss.total), last)
    cycle.updates.micro(loss, micro, now.entropy)
    cycle.updates.did(micro, run.limits.shape, 3, training=True)
    return loss.total.detach().double()


def take_step(
    run: Run, batch: Batch, plan: Plan, loss: Tensor, cycle: Cycle, factor: float = 1.0
) -> None:
    """Check the numbers, then take one optimizer step; with nothing to learn from, take none.

    `factor` on the gradient: what normalising advantages multiplies them by.
    """
    if not plan.tokens:
        guards.nothing_to_learn(run, batch)
        return
    guards.sampler(run, batch, plan.groups)
    with run.clock.phase("optimizer"):
        fault("step")
        cycle.updates.scale(factor)
        norm = run.optimizer.grad_norm(factor)
        if guards.finite(run, batch, float(loss) * factor, float(norm)):
            cycle.updates.update(run.optimizer, float(loss) * factor, float(norm))
            run.optimizer.step(norm)
            run.state.updates += 1
            if run.reference is not None:
                run.reference.follow(run.state.updates)
            batch.updated += plan.groups


def dummy_pass(
    run: Run, batch: Batch, last: bool | None = None, with_reference: bool = False
) -> None:
    """A pass over next to nothing, whose gradients are 0, beside ranks that have a real one.

    They would wait for this one for ever: sharded weights are gathered by all of them together.
    `last`: whether a backward pass is the update's last; None: there is none, the pass is one
    without gradient, which has its reference's, too.
    """
    if not run.engine.lockstep:
        if last is not None:
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
    with torch.no_grad():  # in the order of a real one: ranks that gather others would mix them
        if last is None:
            run.policy.frozen_logp(micro)
        if run.reference is not None and (with_reference or last is None):
            run.reference.frozen_logp(run.reference.pack(nothing, [(0, (0,))]))
    if last is not None:
        run.engine.backward(zero_loss(run, _policy_logprobs(run, micro)), last)


def zero_loss(run: Run, now: LogProbs) -> Tensor:
    """A loss of 0 whose gradient comes through the same outputs as that of the algorithm's loss. ()

    ZeRO-3 counts the outputs by which a backward pass enters the model. Ranks that count
    differently wait for each other for ever, so this takes neither fewer outputs nor more.
    """
    outputs = [now.logp]
    if now.kl_logp is not None and run.algorithm.config.kl_in == "loss":
        outputs.append(now.kl_logp)
    if now.entropy is not None and now.entropy.requires_grad:
        outputs.append(now.entropy)
    return torch.stack([out.sum() * 0.0 for out in outputs]).sum()


def _policy_logprobs(run: Run, micro: Micro) -> LogProbs:
    """The policy's forward pass with gradient; the entropy where this step's line shows it."""
    return run.policy.logp(micro, want_entropy=run.log.due(run.state.step + 1, run.steps))


def _micro_batches(run: Run, plan: Plan) -> list[tuple[list[Part], bool]]:
    """This rank's micro-batches, empty ones where others have more; whether it is the last."""
    return [(parts, n == len(plan.micros)) for n, parts in enumerate(plan.micros, 1)]


def _zero(run: Run) -> Tensor:
    return torch.zeros((), dtype=torch.float64, device=run.world.device)
