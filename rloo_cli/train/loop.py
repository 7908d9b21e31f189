"""THE LOOP: sample, score, compare with the siblings, step. Everything else is a part it is given.

One step is one rollout batch of P prompts with K completions each. Whole groups stay together in
every micro-batch, so the leave-one-out baseline needs no gather. `step.py` updates the policy.
"""

from rloo_cli.reporting.update_metrics import sum_over_ranks as together_updates
from rloo_cli.run import Run, StepProgress
from rloo_cli.train.advantages import update_algorithm_state
from rloo_cli.train.between_steps import evaluate_and_checkpoint, log_step
from rloo_cli.train.step import update_policy
from rloo_cli.utils import rng


def run_training_loop(run: Run) -> None:
    """Train to the run's last step. Raises RunError, Stopped too; what was logged before stays."""
    state = run.state
    sync_weights(run)
    while evaluate_and_checkpoint(run):
        if run.step_progress is None:  # a resumed run may be inside a step
            seen = state.seen_by_rewards(run)
            run.step_progress = StepProgress(run.rollouts.next_batch(state.step, state.place, seen))
        cycle = run.step_progress
        update_policy(run, cycle)
        sync_weights(run)
        if run.world.is_main:
            run.ledger.step(
                cycle.batch, state.place, cycle.updates.num_updates, cycle.batch.updated
            )
        state.advance(cycle.batch)
        update_algorithm_state(run, cycle.batch)
        log_step(run, cycle.batch, together_updates(cycle.updates, run.world))
        run.step_progress, run.rng = None, rng.capture_random_states()


def sync_weights(run: Run) -> None:
    """Give the sampler the policy's weights, under the number of updates that made them."""
    with run.clock.phase("sync"):
        run.generator.load(run.policy, run.state.updates)
