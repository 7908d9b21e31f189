"""What stops a run before an update that would be wrong."""

import math

import torch

from rloo_cli.data.batch import Batch
from rloo_cli.reporting.log import write_debug_batch
from rloo_cli.run import Run
from rloo_cli.utils.errors import GenerationError, NumbersError, Problem

MAX_SKIPPED_UPDATES = 3  # non-finite updates in a row that train.on_nonfinite=skip lets pass
MAX_EMPTY_STEPS = 10  # steps in a row without one token to learn from


def check_finite_update(run: Run, batch: Batch, loss: float, grad_norm: float) -> bool:
    """Whether this update may be made; False when it is skipped, as the config asked for.

    Raises NumbersError (exit 7) with nothing updated; the batch is kept in the run's debug folder.
    """
    # A NaN reward is no NaN loss: no two rewards of its group differ, so it gets no advantage.
    known = batch.reward is None or bool(batch.reward.isfinite().all())
    right = {"reward": known, "loss": math.isfinite(loss), "gradient": math.isfinite(grad_norm)}
    wrong = [name for name, fine in right.items() if not fine]
    if not wrong:
        run.state.nonfinite = run.state.empty = 0
        return True
    run.optimizer.zero_grad()
    folder = write_debug_batch(run.folder, batch, run.world.is_main)
    run.state.nonfinite += 1
    if run.config.train.on_nonfinite == "skip" and run.state.nonfinite <= MAX_SKIPPED_UPDATES:
        found = f"loss {loss}, gradient norm {grad_norm}"
        run.log.note(f"step {batch.step + 1}: non-finite {wrong[0]} ({found}): update skipped")
        return False
    raise NumbersError(
        Problem(
            f"non-finite numbers in step {batch.step + 1}: nothing was updated",
            wrong[0],
            f"loss {loss}, gradient norm {grad_norm}; the batch is in {folder}",
            "a lower train.learning_rate, or model.dtype=float32",
        )
    )


def check_sampler_logprobs(run: Run, batch: Batch, group_indices: list[int]) -> None:
    """The sampler drew the groups `index` with the weights that they are about to train.

    Raises GenerationError (exit 6), with nothing updated, where its log-probabilities and the
    trainer's differ by more than numerics can. With filters on they are of different things.
    """
    generation = run.config.generation
    bent = generation.top_p < 1 or generation.top_k or generation.min_p
    if bent or generation.repetition_penalty != 1 or generation.min_tokens:
        return
    compared = [
        (group.prompt_offset, k, old, rollout.behaviour_logp)
        for group in (batch.groups[i] for i in group_indices)
        for k, (old, rollout) in enumerate(zip(group.old_logp or [], group.rollouts, strict=False))
        if rollout.behaviour_logp is not None
    ]
    if not compared:
        return
    # All at once: one completion after the other takes longer than the update on a GPU.
    ours = torch.cat([old for _, _, old, _ in compared]).double()
    theirs = torch.tensor([x for *_, logp in compared for x in logp], dtype=torch.float64)
    gap = (ours - theirs.to(ours.device)).abs().nan_to_num(0.0)
    count = int((~ours.isnan() & ~theirs.to(ours.device).isnan()).sum())
    rms = math.sqrt(float(gap.square().sum()) / count) if count else 0.0
    if rms > run.generator.tolerance:
        lengths = torch.tensor([len(logp) for *_, logp in compared])
        at = int(torch.searchsorted(lengths.cumsum(0), int(gap.argmax()), right=True))
        worst = f"completion {compared[at][1]} of draw {compared[at][0]}: {float(gap.max()):.4g}"
        versions = sorted(
            {r.weight_version for i in group_indices for r in batch.groups[i].rollouts}
        )
        raise GenerationError(
            Problem(
                f"step {batch.step + 1}: the sampler had other weights than the trainer",
                "nothing was updated",
                f"log-probabilities differ by {rms:.4g} nats (rms of {count} tokens), expected at"
                f" most {run.generator.tolerance:g}; most in {worst}; the completions say they are"
                f" of version {', '.join(map(str, versions))}",
                _mismatch_hint(generation.backend),
            )
        )


def _mismatch_hint(backend: str) -> str:
    """What a person can do about a sampler that differs, which is no server with every backend."""
    if backend == "transformers":
        return (
            "there is no server: this model's decoding with a cache differs from its forward pass;"
            " generation=vllm_server, or another model"
        )
    return "somebody else may have changed the server's weights"


def skip_empty_update(run: Run, batch: Batch) -> None:
    """No optimizer step: weight decay and momentum would move the weights all the same.

    Raises NumbersError after PATIENCE steps of these in a row.
    """
    run.optimizer.zero_grad()
    run.state.empty += 1
    if run.state.empty < MAX_EMPTY_STEPS * run.config.updates_per_step:
        run.log.note(f"step {batch.step + 1}: no row to learn from, no update made")
        return
    unscored = float((~batch.scorable).double().mean())
    masked = float(batch.masked.double().mean())
    raise NumbersError(
        Problem(
            f"{MAX_EMPTY_STEPS} steps in a row had nothing to learn from",
            f"step {batch.step + 1}",
            f"{unscored:.0%} of the rows have no score, {masked:.0%} are masked out as truncated",
            "raise generation.max_completion_length, or look at the rewards and at EOS",
        )
    )
