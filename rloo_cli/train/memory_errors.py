"""Reports where memory ran out: the phase, the longest sequence, and the keys for this phase.

Phases are those of the log (`log.phase`, `clock.phase`): the one started last when torch failed to
allocate memory for a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rloo_cli.utils.errors import OutOfMemory, Problem

if TYPE_CHECKING:
    from rloo_cli.config.schema import ModelConfig, RunConfig
    from rloo_cli.run import Run

BUILDING = ("the start", "loading", "making", "finding", "checking", "waiting")  # their prefixes
SAMPLING = ("generation", "exposed", "sync")
NO_GRADIENT = ("old_logp", "reference", "value")
SAVING = ("save", "saving")


def out_of_memory_error(
    error: Exception, when: str, phase: str, settings: RunConfig, run: Run | None = None
) -> OutOfMemory:
    """The error of a full GPU, with the keys that matter in this phase of this run."""
    why = str(error).splitlines()[0]
    limits = settings.generation.max_completion_length, settings.data.max_prompt_length
    why += f"; {describe_longest(*limits, run)}"
    fix = " or ".join(memory_keys(phase, settings))
    return OutOfMemory(Problem(f"out of memory {when}", "the GPU", why, fix))


def describe_longest(most: int, limit: int | None, run: Run | None) -> str:
    """The longest sequence of the step in tokens; before there is one, its limits.

    `most`: tokens that a completion may have; `limit`: those of a prompt, None = not set by a key.
    """
    progress = None if run is None else run.step_progress
    if progress is None:
        prompt = "" if limit is None else f" after prompts of up to {limit}"
        return f"completions may have {most} tokens{prompt}"
    pairs = [(len(g.prompt_ids), r.length) for g in progress.batch.groups for r in g.rollouts]
    prompt_tokens, tokens = max(pairs, key=sum)
    return (
        f"the longest sequence of the step has {prompt_tokens + tokens} tokens,"
        f" {tokens} of them sampled"
    )


def memory_keys(phase: str, settings: RunConfig) -> Iterator[str]:
    """Keys to change to need less memory in a phase, the most effective first."""
    generation = settings.generation
    colocated = "generation.colocate.gpu_memory_utilization lower"
    if phase.startswith(BUILDING):
        yield from _loading_keys(settings.model, settings.algorithm.needs_reference)
        if generation.samples_here:
            yield "generation=vllm_server on another GPU"
    elif phase in SAMPLING or phase == "evaluation":
        if phase == "evaluation":
            yield f"eval.batch_size lower than {settings.eval.batch_size}"
        if generation.samples_here:
            yield "generation.transformers.batch_tokens=N, tokens decoded at once"
        yield f"generation.max_completion_length below {settings.generation.max_completion_length}"
    elif phase == "reward":
        yield "reward.NAME.batch_size lower, or reward.NAME.offload=true"
    elif phase in NO_GRADIENT:
        yield "train.no_grad_batch_size lower, or train.micro_batch_tokens"
    elif phase == "optimizer":
        yield "lora=default, distributed=zero2, or distributed.offload=optimizer"
    else:  # an update, or a save on top of what it left
        yield "train.micro_batch_tokens lower"
        if settings.model.gradient_checkpointing is not True and phase not in SAVING:
            yield "model.gradient_checkpointing=true"
    if generation.shares_device:
        yield colocated


def _loading_keys(model: ModelConfig, needs_reference: bool) -> Iterator[str]:
    """Weights, and what is allocated for them between updates."""
    if model.dtype == "float32":
        yield "model.dtype=bfloat16"
    if model.lora is None:
        yield "lora=default"
    if model.quantization is None:
        yield "quantization=4bit"
    if needs_reference and not model.ref_offload:
        yield "model.ref_offload=true"
