"""Stops a run before an update that would be wrong, or after a step that a guard
refuses (`guards.NAME=fail`)."""

import math
from collections.abc import Sequence

from rloo_cli.config.rules_sampling import inexact_settings
from rloo_cli.data.batch import Batch
from rloo_cli.data.pass_results import ForwardPass
from rloo_cli.generation.common.weights_check import (
    TokenLogprobs,
    check_same_weights,
    sum_squared_gaps,
)
from rloo_cli.reporting.health.advisor import guard_problem
from rloo_cli.reporting.log import write_debug_batch
from rloo_cli.run import Run
from rloo_cli.utils.errors import GuardError, NumbersError, refuse
from rloo_cli.utils.files import update_json

MAX_SKIPPED_UPDATES = 3  # non-finite updates in a row allowed by train.on_nonfinite=skip
MAX_EMPTY_STEPS = 10  # steps in a row without a trainable token


def check_finite_update(run: Run, batch: Batch, loss: float, grad_norm: float) -> bool:
    """Whether this update may be made; False if it is skipped (train.on_nonfinite=skip).

    Otherwise raises NumbersError (exit 7) with nothing updated; the batch is in the debug folder.
    """
    # A NaN reward gives no NaN loss: no two rewards of its group differ, so it has no advantage.
    rewards = batch.reward is None or bool(batch.reward.isfinite().all())
    finite = {"reward": rewards, "loss": math.isfinite(loss), "gradient": math.isfinite(grad_norm)}
    wrong = [name for name, is_finite in finite.items() if not is_finite]
    if not wrong:
        run.state.nonfinite = run.state.empty = 0
        return True
    run.optimizer.zero_grad()
    folder = write_debug_batch(run.folder, batch, run.world.is_main)
    run.state.nonfinite += 1
    if run.config.train.on_nonfinite == "skip" and run.state.nonfinite <= MAX_SKIPPED_UPDATES:
        numbers = f"loss {loss}, gradient norm {grad_norm}"
        run.log.note(f"step {batch.step + 1}: non-finite {wrong[0]} ({numbers}): update skipped")
        return False
    what = f"non-finite numbers in step {batch.step + 1}: nothing was updated"
    why = f"loss {loss}, gradient norm {grad_norm}; the batch is in {folder}"
    fix = "a lower train.learning_rate, or model.dtype=float32"
    refuse(f"the {wrong[0]}", what, fix, why, error=NumbersError)


def are_passes_sound(run: Run, batch: Batch, passes: Sequence[ForwardPass]) -> bool:
    """Whether the passes' log-probabilities are the sampler's, and every KL and score is finite.

    One copy of three numbers decides. If it is False, `check_sampler_logprobs` and
    `check_finite_update` report why. All ranks must call it.
    """
    generation = run.config.generation
    if generation.overlap != "none":
        return False  # older weights' tokens must be left out: needs their counts
    sums = sum_squared_gaps(passes, run.world.device)
    squares, count, not_finite = run.world.sum(sums).tolist()
    score = batch.shaped[batch.active]
    if not_finite or not score[batch.scorable[batch.active]].isfinite().all():
        return False
    rms = math.sqrt(squares / count) if count else 0.0
    return bool(inexact_settings(generation)) or rms <= run.generator.tolerance


def check_sampler_logprobs(run: Run, batch: Batch, group_indices: list[int]) -> None:
    """Check that the sampler had the trainer's weights when it sampled these groups.

    Completions of older weights (generation.overlap) were checked before these changed. Raises
    GenerationError (exit 6), with nothing updated.
    """
    overlaps = run.config.generation.overlap != "none"
    compared = [
        TokenLogprobs(group.prompt_offset, k, old[len(old) - count :], rollout)
        for group in (batch.groups[i] for i in group_indices)
        for k, (old, rollout) in enumerate(zip(group.old_logp or [], group.rollouts, strict=False))
        if (count := rollout.count_tokens(run.state.updates) if overlaps else rollout.length)
    ]
    check_same_weights(batch.step, compared, run.config.generation, run.generator.tolerance)


def skip_empty_update(run: Run, batch: Batch) -> None:
    """Take no optimizer step: weight decay and momentum would still move the weights.

    Raises NumbersError after MAX_EMPTY_STEPS such steps in a row.
    """
    run.optimizer.zero_grad()
    run.state.empty += 1
    if run.state.empty < MAX_EMPTY_STEPS * run.config.updates_per_step:
        run.log.note(f"step {batch.step + 1}: no completion to learn from, no update made")
        return
    unscored = float((~batch.scorable).double().mean())
    masked = float(batch.masked.double().mean())
    what = f"{MAX_EMPTY_STEPS} steps in a row had nothing to learn from"
    why = f"{unscored:.0%} of the completions have no score, {masked:.0%} are masked as truncated"
    fix = "raise generation.max_completion_length, or check the rewards and EOS"
    refuse(f"step {batch.step + 1}", what, fix, why, error=NumbersError)


def check_health_guards(run: Run) -> None:
    """Raise GuardError (exit 7) on all ranks if a guard set to `fail` fired in the last step.

    Called between steps, when the state is complete: the caller saves it. Only logged steps are
    judged, by rank 0 for all.
    """
    has_teeth = "fail" in run.log.advisor.levels.values()
    if has_teeth and run.log.is_due(run.state.step, run.num_steps):
        run.world.run_on_rank0(lambda: _raise_failed_guards(run))


def _raise_failed_guards(run: Run) -> None:
    failed, run.log.failed_guards = run.log.failed_guards, {}
    if not failed:
        return
    step = run.state.step
    facts = [{"name": name, "step": step, "figures": text} for name, text in failed.items()]
    update_json(run.folder / "run.json", guards=facts)
    raise GuardError(*(guard_problem(name, step, text) for name, text in failed.items()))
