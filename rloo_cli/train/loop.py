"""THE LOOP: sample, score, compare with the siblings, step. Everything else is a part it is given.

One step is one rollout batch of P prompts with K completions each. Whole groups stay together in
every micro-batch, so the leave-one-out baseline needs no gather. An update's loss is divided by
what the algorithm counts over the whole update, never averaged over micro-batches.
"""

import torch
from torch import Tensor

from rloo_cli.data.batch import Batch
from rloo_cli.data.packing import Part
from rloo_cli.reporting.update_metrics import Updates
from rloo_cli.reporting.update_metrics import together as together_updates
from rloo_cli.run import Cycle, Run
from rloo_cli.train import advantages, guards, token_advantages
from rloo_cli.train.advantages import Pass
from rloo_cli.train.between_steps import log_step, pause
from rloo_cli.train.minibatches import Plan, plan_updates, together
from rloo_cli.utils import rng
from rloo_cli.utils.fault_injection import fault, poison


def train(run: Run) -> None:
    """Train to the run's last step. Raises RunError, Stopped too; what was logged before stays."""
    state = run.state
    with run.clock.phase("sync"):
        run.generator.load(run.policy, state.updates)
    while pause(run):
        if run.cycle is None:  # a resumed run may be inside a step
            seen = state.seen_by_rewards(run)
            run.cycle = Cycle(run.rollouts.next(state.step, state.place, seen))
        cycle = run.cycle
        update(run, cycle)
        with run.clock.phase("sync"):
            run.generator.load(run.policy, state.updates)
        if run.world.is_main:
            run.ledger.step(cycle.batch, state.place, cycle.updates.made, cycle.batch.updated)
        state.advance(cycle.batch)
        advantages.remember(run, cycle.batch)
        log_step(run, cycle.batch, together_updates(cycle.updates, run.world))
        run.cycle, run.rng = None, rng.take()


def update(run: Run, cycle: Cycle) -> None:
    """All optimizer steps of one rollout batch: num_iterations x num_minibatches."""
    batch, updates = cycle.batch, cycle.updates
    if not cycle.prepared:
        early = run.algorithm.early(run.config.algorithm)
        fused = not run.separate and (early or together(plan_updates(run, batch, 0)))
        advantages.prepare(run, batch, updates, fused)
        cycle.prepared = not fused
        cycle.mark()
    while cycle.iteration < run.config.algorithm.num_iterations:
        for plan in plan_updates(run, batch, cycle.iteration)[cycle.done :]:
            total = torch.zeros((), dtype=torch.float64, device=run.world.device)
            passes, known = [], batch.advantage is not None
            for number, parts in enumerate(plan.micros, 1):
                run.world.check_stop(often=True)
                last = number == len(plan.micros)
                if not parts:  # other ranks have more
                    advantages.idle(run, batch, True, last, refer=not cycle.prepared)
                    continue
                loss, found = backward(run, batch, parts, plan, updates, last)
                total += loss
                passes.append(found)
            total = run.world.sum(total)
            factor = 1.0 if cycle.prepared else advantages.finish(run, batch, passes)
            step(run, batch, plan, total, updates, 1.0 if known else factor)
            cycle.prepared = True  # from here on the policy is not the sampler
            cycle.done += 1
            cycle.mark()
        cycle.next_iteration()


def backward(
    run: Run, batch: Batch, parts: list[Part], plan: Plan, updates: Updates, last: bool
) -> tuple[Tensor, Pass]:
    """One micro-batch, forward and backward; its share of the loss, (), and what it found."""
    settings, algorithm, kl = run.config.algorithm, run.algorithm, None
    with run.clock.phase("update"):
        micro = run.policy.pack(batch.groups, parts, batch.masked)
        advantages.refer(run, batch, micro, updates)
        fitted = token_advantages.fit_value(run, batch, micro, plan.tokens, updates)
        now = run.policy.logp(micro, want_entropy=run.log.due(run.state.step + 1, run.steps))
        if micro.old_logp is None:  # the policy still is the sampler: its numbers are the old ones
            micro.old_logp = now.logp.detach()
            micro.kl_logp = None if now.kl_logp is None else now.kl_logp.detach()
            kl = advantages.measure(run, micro, updates)
        old, ref, found = micro.old_logp, micro.ref_logp, Pass(micro, kl)
        value, usable = advantages.of_micro(run, batch, found)
        value = algorithm.token_advantages(value, usable, micro.kl_old, ref, micro, settings)
        loss = algorithm.loss(
            now.logp, old, ref, micro, value, settings, plan.denominator, now.kl_logp,
            now.entropy, plan.all_tokens,
        )  # fmt: skip
        run.engine.backward(poison("loss", loss.total), last)
        updates.micro(loss, micro, now.entropy)
        updates.did(micro, run.limits.shape, 3, training=True)
    total: Tensor = loss.total.detach().double() + fitted
    return total, found


def step(run: Run, batch: Batch, plan: Plan, loss: Tensor, updates: Updates, factor: float) -> None:
    """Check the numbers, then take one optimizer step; with nothing to learn from, take none."""
    if not plan.tokens:
        guards.nothing_to_learn(run, batch)
        return
    guards.sampler(run, batch, plan.groups)
    with run.clock.phase("optimizer"):
        fault("step")
        updates.scale(factor)
        norm = run.optimizer.grad_norm(factor)
        if guards.finite(run, batch, float(loss) * factor, float(norm)):
            updates.update(run.optimizer, float(loss) * factor, float(norm))
            run.optimizer.step(norm)
            run.state.updates += 1
            if run.reference is not None:
                run.reference.follow(run.state.updates)
            batch.updated += plan.groups
