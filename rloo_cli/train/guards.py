"""Stops a run before an update that would be wrong, or after a step that a guard of the config
refuses (`guards.NAME=fail`)."""

import math

import torch
from torch import Tensor

from rloo_cli.data.batch import Batch
from rloo_cli.data.packing import whole_group_slices
from rloo_cli.reporting.advice import guard_problem
from rloo_cli.reporting.log import write_debug_batch
from rloo_cli.run import Run
from rloo_cli.utils.errors import GenerationError, GuardError, NumbersError, Problem
from rloo_cli.utils.files import update_json

MAX_SKIPPED_UPDATES = 3  # non-finite updates in a row that train.on_nonfinite=skip lets pass
MAX_EMPTY_STEPS = 10  # steps in a row without one token to learn from


def check_finite_update(run: Run, batch: Batch, loss: float, grad_norm: float) -> bool:
    """Whether this update may be made; False if it is skipped (train.on_nonfinite=skip).

    Else raises NumbersError (exit 7) with nothing updated; the batch is in the run's debug folder.
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
    raise NumbersError(Problem(what, wrong[0], why, fix))


def check_sampler_logprobs(run: Run, batch: Batch, group_indices: list[int]) -> None:
    """Check that the sampler had the trainer's weights when it sampled these groups.

    Raises GenerationError (exit 6), with nothing updated, if its log-probabilities differ from
    the trainer's by more than rounding explains. With top_p and other filters they cannot be
    compared.
    """
    # Completions of older weights (generation.overlap) differ from the trainer's for that reason.
    compared = [
        (group.prompt_offset, k, old, logp)
        for group in (batch.groups[i] for i in group_indices)
        for k, (old, rollout) in enumerate(zip(group.old_logp or [], group.rollouts, strict=False))
        for logp in (rollout.sampled_logp,)
        if logp is not None and rollout.weight_version == run.state.updates
    ]
    _check_same_logprobs(run, batch, group_indices, compared)


@torch.no_grad()
def check_drawn_ahead(run: Run) -> None:
    """Check the same of the batch that was drawn beside this update, before the weights change.

    One group is forwarded for it, the one with the fewest tokens.
    """
    batch = None if run.ahead is None else run.ahead.batch
    if batch is None:
        return
    lengths = {i: sum(r.length for r in group.rollouts) for i, group in enumerate(batch.groups)}
    shortest = min((i for i in lengths if lengths[i]), key=lambda i: lengths[i], default=None)
    if shortest is None:
        return
    group = batch.groups[shortest]
    micro_batch = run.policy.pack(batch.groups, whole_group_slices(batch.groups, [shortest]))
    ours = run.policy.frozen_logp(micro_batch).logp.split([r.length for r in group.rollouts])
    compared = [
        (group.prompt_offset, k, old, logp)
        for k, (old, rollout) in enumerate(zip(ours, group.rollouts, strict=True))
        for logp in (rollout.sampled_logp,)
        if logp is not None
    ]
    _check_same_logprobs(run, batch, [shortest], compared)


def _check_same_logprobs(
    run: Run,
    batch: Batch,
    group_indices: list[int],
    compared: list[tuple[int, int, Tensor, list[float]]],
) -> None:
    """Raise where the sampler's log-probabilities differ: (offset, completion, ours, theirs)."""
    generation = run.config.generation
    bent = generation.top_p < 1 or generation.top_k or generation.min_p
    if bent or generation.repetition_penalty != 1 or generation.min_tokens or not compared:
        return
    # All at once: one completion after the other takes longer than the update on a GPU.
    ours = torch.cat([old for _, _, old, _ in compared]).double()
    flat = [x for *_, logp in compared for x in logp]
    theirs = torch.tensor(flat, dtype=torch.float64).to(ours.device)
    gap = (ours - theirs).abs().nan_to_num(0.0)
    count = int((~ours.isnan() & ~theirs.isnan()).sum())
    rms = math.sqrt(float(gap.square().sum()) / count) if count else 0.0
    if rms > run.generator.tolerance:
        lengths = torch.tensor([len(logp) for *_, logp in compared])
        at = int(torch.searchsorted(lengths.cumsum(0), int(gap.argmax()), right=True))
        worst = f"completion {compared[at][1]} of draw {compared[at][0]}: {float(gap.max()):.4g}"
        versions = {r.weight_version for i in group_indices for r in batch.groups[i].rollouts}
        why = (
            f"log-probabilities differ by {rms:.4g} nats (rms of {count} tokens), expected at most"
            f" {run.generator.tolerance:g}; most in {worst}; the completions say they are of"
            f" version {', '.join(map(str, sorted(versions)))}"
        )
        fix = "somebody else may have changed the server's weights"
        if generation.backend == "transformers":
            cause = "this model's decoding with a cache differs from its forward pass"
            fix = f"there is no server: {cause}; generation=vllm_server, or another model"
        what = f"step {batch.step + 1}: the sampler had other weights than the trainer"
        raise GenerationError(Problem(what, "nothing was updated", why, fix))


def skip_empty_update(run: Run, batch: Batch) -> None:
    """Take no optimizer step: weight decay and momentum would move the weights all the same.

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
    fix = "raise generation.max_completion_length, or look at the rewards and at EOS"
    raise NumbersError(Problem(what, f"step {batch.step + 1}", why, fix))


def check_health_guards(run: Run) -> None:
    """Raise GuardError (exit 7) on all ranks if a guard set to `fail` fired in the last step.

    Called between steps, where the state is whole: the caller saves it. Only steps that are
    logged are judged, and rank 0 judges for all.
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
