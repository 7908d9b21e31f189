"""THE LOOP: sample, score, compare with the siblings, step. Everything else is a part it is given.

One step is one rollout batch of P prompts with K completions each. Whole groups stay together in
every micro-batch, so the leave-one-out baseline needs no gather. An update's loss is divided by
what the algorithm counts over the whole update, never averaged over micro-batches.
"""

import torch
from torch import Tensor

from rloo_cli import guards
from rloo_cli.evaluate import evaluate
from rloo_cli.measures import Updates
from rloo_cli.minibatches import Plan, plan_updates, slices
from rloo_cli.parts import Run
from rloo_cli.rollout import Batch, Micro, pack, unpack


def train(run: Run) -> None:
    """Train to the run's last step. Raises RunError; what was logged before stays."""
    state, every = run.state, run.config.eval.every
    while state.step < run.steps:
        batch = run.rollouts.next(state.step, state.place, state.seen_by_rewards(run))
        updates = Updates()
        update(run, batch, updates)
        with run.clock.phase("sync"):
            run.generator.load(run.policy, state.updates)
        state.advance(batch)
        run.log.step(run, batch, updates)
        if every and state.step % every == 0 and state.step < run.steps:
            evaluate(run)


def update(run: Run, batch: Batch, updates: Updates) -> None:
    """All optimizer steps of one rollout batch: num_iterations x num_minibatches."""
    prepare(run, batch, updates)
    for iteration in range(run.config.algorithm.num_iterations):
        for plan in plan_updates(run, batch, iteration):
            total = torch.zeros((), dtype=torch.float64, device=run.world.device)
            for index in plan.micros:
                total += backward(run, batch, index, plan, updates)
            step(run, batch, plan, total, updates)


@torch.no_grad()
def prepare(run: Run, batch: Batch, updates: Updates) -> None:
    """What must be known before the first update: ref_logp, and old_logp where it is not free."""
    passes = [("reference", run.reference, "ref_logp")] if run.reference else []
    passes += [] if run.fused else [("old_logp", run.policy, "old_logp")]
    for phase, model, name in passes:
        with run.clock.phase(phase):
            for index in slices(batch.active, run.no_grad_groups):
                micro = pack(batch.groups, index, batch.masked, run.world.device)
                found = model.frozen_logp(micro)
                unpack(found.logp, micro, batch.groups, name)
                if model is run.policy:
                    unpack(found.kl_logp, micro, batch.groups, "kl_logp")
    if not run.fused and batch.active:
        parts = slices(batch.active, run.no_grad_groups)
        micros = (pack(batch.groups, i, batch.masked, run.world.device) for i in parts)
        kl = [k for m in micros if (k := measure(run, m, updates)) is not None]
        advantages(run, batch, batch.active, torch.cat(kl) if kl else None)


def backward(run: Run, batch: Batch, index: list[int], plan: Plan, updates: Updates) -> Tensor:
    """One micro-batch of whole groups, forward and backward; its share of the loss. -> ()"""
    settings, algorithm = run.config.algorithm, run.algorithm
    with run.clock.phase("update"):
        micro = pack(batch.groups, index, batch.masked, run.world.device)
        now = run.policy.logp(micro, want_entropy=run.log.due(run.state.step + 1, run.steps))
        if micro.old_logp is None:  # the policy still is the sampler: its numbers are the old ones
            micro.old_logp = now.logp.detach()
            micro.kl_logp = None if now.kl_logp is None else now.kl_logp.detach()
            unpack(micro.old_logp, micro, batch.groups, "old_logp")
            unpack(micro.kl_logp, micro, batch.groups, "kl_logp")
            advantages(run, batch, index, measure(run, micro, updates))
        old, ref = micro.old_logp, micro.ref_logp
        value, usable = batch.advantages_of(index, old)
        value = algorithm.token_advantages(value, usable, micro.kl_old, ref, micro, settings)
        loss = algorithm.loss(
            now.logp, old, ref, micro, value, settings, plan.denominator, now.kl_logp
        )
        loss.total.backward()
        updates.micro(loss, micro, now.entropy)
    total: Tensor = loss.total.detach().double()
    return total


def measure(run: Run, micro: Micro, updates: Updates) -> Tensor | None:
    """KL of each sequence to the reference, in float64 on the CPU. -> (S,) or None"""
    kl, ref = None, micro.ref_logp
    if ref is not None:
        kl = run.algorithm.sequence_kl(micro.kl_old, ref, micro, run.config.algorithm)
    updates.sampled(micro, kl)
    return None if kl is None else kl.detach().double().cpu()


def advantages(run: Run, batch: Batch, index: list[int], kl: Tensor | None) -> None:
    """Fill in reward and advantage of these groups. kl (groups*K,) or None"""
    score, rows = batch.shaped[index], batch.scorable[index]
    kl = None if kl is None else kl.view_as(score)
    batch.settle(index, kl, run.algorithm.advantages(score, kl, rows, run.config.algorithm))


def step(run: Run, batch: Batch, plan: Plan, loss: Tensor, updates: Updates) -> None:
    """Check the numbers, then take one optimizer step; with nothing to learn from, take none."""
    if not plan.tokens:
        guards.nothing_to_learn(run, batch)
        return
    with run.clock.phase("optimizer"):
        norm = run.optimizer.grad_norm()
        if guards.finite(run, batch, float(loss), float(norm)):
            updates.update(run.optimizer, float(loss), float(norm))
            run.optimizer.step(norm)
            run.state.updates += 1
