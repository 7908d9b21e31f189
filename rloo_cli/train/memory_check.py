"""Memory of a run, predicted and measured, at its end.

Measured is what tensors took at most on a GPU; on a CPU, what the whole process held at most above
what it held after its imports: so libraries that are loaded later, and what the allocator keeps,
are in it too.
"""

import contextlib
import re
from pathlib import Path

import torch

from rloo_cli.planning import device, model_spec, peak_memory, plan_inputs
from rloo_cli.planning import text as planning_text
from rloo_cli.planning.peak_memory import PeakMemory
from rloo_cli.planning.plan_inputs import PlanInputs
from rloo_cli.run import Run
from rloo_cli.utils.errors import RunError
from rloo_cli.utils.files import JsonObject

STATUS_FILE, CLEAR_REFS_FILE = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak_memory() -> float:
    """Bytes that this process holds now; from here on its peak is counted anew."""
    with contextlib.suppress(OSError):
        CLEAR_REFS_FILE.write_text("5")  # VmHWM is then what is held now
    # A new process has no peak yet; and before it has chosen its GPU, whatever asks CUDA makes a
    # context on the first one, half a gigabyte that every rank would then hold there.
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    return _process_status_bytes("VmRSS")


def measured_peak_memory(run: Run, bytes_before: float) -> float | None:
    """Bytes that the run took at most; None where the system does not tell. `before`: `begin`'s."""
    if run.world.device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(run.world.device))
    most = _process_status_bytes("VmHWM")
    return most - bytes_before if most > bytes_before else None


def predict_peak_memory(run: Run) -> PeakMemory | None:
    """What the plan says of one rank of this run, with what the run has settled: layout, rows of a
    forward, longest prompt. None where the model is none that a plan can count.
    """
    try:
        return peak_memory.estimate_peak_memory(plan_inputs_of_run(run))
    except RunError:
        return None


def plan_inputs_of_run(run: Run) -> PlanInputs:
    """The run as a plan sees it. Raises RunError where facts of a model are not to be had."""
    here = run.world.device
    settings = run.config
    model = model_spec.load_model_spec(settings.model.path, settings.model.revision)
    whole = here.type == "cuda" and torch.cuda.get_device_properties(here).total_memory
    entries: JsonObject = {n: e for n, e in settings.rewards.items() if e.type == "model"}
    return PlanInputs(
        run=settings,
        model=model,
        device=device.rank_device(here.type, float(whole)),
        ranks=run.world.size,
        max_prompt_tokens=run.prompts.max_length,
        reference_model=None
        if run.reference is None
        else plan_inputs.reference_spec(settings, model),
        value_model=plan_inputs.value_model_spec(settings),
        reward_models={
            n: model_spec.load_model_spec(e.path, e.revision) for n, e in entries.items()
        },
        token_budget=run.forward_limits.tokens,
        recompute=bool(run.policy.model.is_gradient_checkpointing),
        layout=run.layout_choice.layout,
    )


def compare_peak_memory(run: Run, bytes_before: float) -> JsonObject:
    """Predicted and measured peak of this rank, for run.json; noted in the log. {} without both."""
    measured, found = measured_peak_memory(run, bytes_before), predict_peak_memory(run)
    if measured is None or found is None:
        return {}
    off = found.peak_bytes / measured - 1
    most, predicted = planning_text.format_gib(measured), planning_text.format_gib(found.peak_bytes)
    run.log.note(f"memory: {most} at most, {predicted} predicted ({off:+.0%})")
    return {
        "measured_bytes": int(measured),
        "predicted_bytes": int(found.peak_bytes),
        "predicted_phase": found.worst_phase,
        "predicted_parts": {
            name: int(value) for name, value in found.phases[found.worst_phase].items()
        },
    }


def _process_status_bytes(name: str) -> float:
    """A line of /proc/self/status in bytes; 0 where there is none."""
    try:
        text = STATUS_FILE.read_text()
    except OSError:
        return 0.0
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return float(found[1]) * 1024 if found else 0.0
