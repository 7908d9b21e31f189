"""THE LOOP: sample and score a batch, update the policy on it, sync the new weights to the sampler.

One step is one batch of P prompts with K completions each. A group's completions stay together
from sampling to gradient: the leave-one-out baseline needs all of them. `step.py` has the updates,
`between_steps.py` evaluation, checkpoints and the log; `build.py` builds the `Run`.
"""

from rloo_cli.checkpoint.step_record import record_rollouts
from rloo_cli.data.batch import Batch
from rloo_cli.reporting.update_metrics import sum_over_ranks
from rloo_cli.run import Run, StepProgress
from rloo_cli.train.advantages import update_algorithm_state
from rloo_cli.train.between_steps import evaluate_and_checkpoint, log_step
from rloo_cli.train.step import update_policy
from rloo_cli.utils import rng


def run_training_loop(run: Run) -> None:
    """Train until `run.num_steps` steps are done.

    Raises RunError, and Stopped after a signal; earlier logs stay.
    """
    state = run.state
    sync_weights(run)
    while evaluate_and_checkpoint(run):
        if run.step_progress is None:  # else resumed in a step: with its batch, scores and updates
            seen = state.seen_by_rewards(run)
            run.step_progress = StepProgress(run.source.next_batch(state.step, state.place, seen))
        batch, updates = run.step_progress.batch, run.step_progress.updates
        begin_next_batch(run, batch)
        update_policy(run, run.step_progress)
        sync_weights(run)
        summed = sum_over_ranks(updates, run.world)
        record_rollouts(run, batch, summed)
        if run.world.is_main:
            run.ledger.step(batch, state.place, updates.num_updates, batch.updated)
        state.advance(batch)
        update_algorithm_state(run, batch)
        log_step(run, batch, summed)
        run.step_progress, run.rng = None, rng.capture_random_states()


def begin_next_batch(run: Run, batch: Batch) -> None:
    """Start sampling the batch after `batch` during the update, if the source supports it."""
    state = run.state
    if state.step + 1 < run.num_steps:
        seen = state.seen_by_rewards(run)
        run.source.begin_next(state.step + 1, state.place + batch.draws, seen)


def sync_weights(run: Run) -> None:
    """Send the policy's weights to the sampler, with the number of updates as their version."""
    with run.clock.phase("sync"):
        run.source.pause()  # no sampling while weights are sent, nor while an update changes them
        run.generator.load(run.policy, run.state.updates)
