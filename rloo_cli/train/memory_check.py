"""Predicted and measured memory and seconds of a run, at its end.

On a GPU the peak of its tensors is measured; on a CPU, the peak of the whole process above its
size after the imports, which includes libraries loaded later and the allocator's reserve.
"""

import contextlib
import os
import re
from pathlib import Path
from statistics import fmean, median

import torch

from rloo_cli.planning import (
    device,
    duration,
    model_spec,
    peak_memory,
    plan_inputs,
    vllm_memory,
)
from rloo_cli.planning import text as planning_text
from rloo_cli.planning.peak_memory import PeakMemory
from rloo_cli.planning.plan_inputs import PlanInputs
from rloo_cli.policy import load
from rloo_cli.run import Run
from rloo_cli.utils.errors import RunError
from rloo_cli.utils.files import JsonObject

STATUS_FILE, CLEAR_REFS_FILE = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak_memory() -> float:
    """Reset the peak. -> the bytes that this process now uses"""
    with contextlib.suppress(OSError):
        CLEAR_REFS_FILE.write_text("5")  # resets VmHWM to the current size
    # A new process has no peak yet; and before it has chosen its GPU, any CUDA call creates a
    # context on the first one, half a gigabyte that every rank would then use there.
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    return _process_status_bytes("VmRSS")


def measured_peak_memory(run: Run, bytes_before: float) -> float | None:
    """Peak bytes of the run; None if the system does not report them.

    `bytes_before`: from `reset_peak_memory`.
    """
    if run.world.device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(run.world.device))
    peak = _process_status_bytes("VmHWM")
    return peak - bytes_before if peak > bytes_before else None


def predict_peak_memory(run: Run) -> PeakMemory | None:
    """The plan's memory of one rank, with the run's actual layout, limits and longest prompt.

    None for a model that a plan cannot compute.
    """
    try:
        return peak_memory.estimate_peak_memory(plan_inputs_of_run(run))
    except RunError:
        return None


def plan_inputs_of_run(run: Run) -> PlanInputs:
    """The run in the form of a plan. Raises RunError if a model's config.json was not found."""
    config, rank_device = run.config, run.world.device
    model = model_spec.load_model_spec(config.model.path, config.model.revision)
    is_gpu = rank_device.type == "cuda"
    gpu_bytes = torch.cuda.get_device_properties(rank_device).total_memory if is_gpu else 0
    gpu_name = torch.cuda.get_device_name(rank_device) if is_gpu else ""
    has_reference = run.reference is not None
    return PlanInputs(
        run=config,
        model=model,
        device=device.rank_device(rank_device.type, float(gpu_bytes), gpu_name),
        ranks=run.world.size,
        max_prompt_tokens=run.prompts.max_length,
        reference_model=plan_inputs.reference_spec(config.model, model) if has_reference else None,
        value_model=plan_inputs.value_model_spec(config.algorithm, config.model, config.rewards),
        reward_models=plan_inputs.reward_model_specs(config.rewards),
        token_budget=run.forward_limits.tokens,
        recompute=load.has_gradient_checkpointing(run.policy.model),
        layout=run.layout_choice.layout,
    )


def compare_peak_memory(run: Run, bytes_before: float) -> JsonObject:
    """Log the predicted and the measured peak of this rank. -> them for run.json, {} without both

    `bytes_before`: from `reset_peak_memory`.
    """
    measured, predicted = measured_peak_memory(run, bytes_before), predict_peak_memory(run)
    if measured is None or predicted is None:
        return {}
    peak, gib = predicted.peak_bytes, planning_text.format_gib
    difference = f"{peak / measured - 1:+.0%}"
    parts = predicted.phases[predicted.worst_phase]
    if (libraries := parts.get("libraries", 0.0)) > peak / 2:
        difference += f"; {gib(libraries)} of it for libraries, which differ between machines"
    run.log.note(f"memory: {gib(measured)} at most, {gib(peak)} predicted ({difference})")
    return {
        "measured_bytes": int(measured),
        "predicted_bytes": int(peak),
        "predicted_phase": predicted.worst_phase,
        "predicted_parts": {name: int(value) for name, value in parts.items()},
    }


def compare_step_time(run: Run) -> JsonObject:
    """Predicted and measured seconds of a step, for run.json; {} without both.

    The prediction knows the run's mean lengths, and assumes the speeds of its kind of device.
    """
    lines = run.log.training_lines
    times = [line["step_time"] for line in lines]
    lengths = [
        line["completions/mean_length"] for line in lines if "completions/mean_length" in line
    ]
    if not times or not lengths:
        return {}
    turns = [line["agent/turns"] for line in lines if "agent/turns" in line]
    prompt = run.prompts.mean_length
    try:
        inputs = plan_inputs_of_run(run)
        forward = peak_memory.estimate_peak_memory(inputs).forward
        sampler = vllm_memory.estimate_engine_memory(inputs)
        mean_turns = fmean(turns) if turns else None
        means = duration.mean_token_lengths(inputs, prompt, fmean(lengths), mean_turns)
        predicted = duration.estimate_step_duration(
            inputs, means, sampler, forward.micro_batches, forward.recompute
        )
    except RunError:
        return {}
    return {
        "measured_step_s": median(times),
        "predicted_step_s": predicted.total_seconds,
        "predicted_parts_s": predicted.phase_seconds,
        "assumed_device": inputs.device.name,
        "load_average": os.getloadavg()[0],  # of the last minute: a busy CPU slows steps down
    }


def _process_status_bytes(name: str) -> float:
    """A line of /proc/self/status in bytes; 0 if missing."""
    try:
        text = STATUS_FILE.read_text()
    except OSError:
        return 0.0
    match = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return float(match[1]) * 1024 if match else 0.0
