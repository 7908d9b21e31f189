"""Memory of a run, predicted and measured, at its end.

Measured is what tensors took at most on a GPU; on a CPU, what the whole process held at most above
what it held after its imports: so libraries that are loaded later, and what the allocator keeps,
are in it too.
"""

import contextlib
import re
from pathlib import Path
from typing import Any

import torch

from rloo_cli.planning import case, device, model_facts, peak_memory
from rloo_cli.planning import text as planning_text
from rloo_cli.planning.case import Case
from rloo_cli.planning.peak_memory import Memory
from rloo_cli.run import Run
from rloo_cli.utils.errors import RunError

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def begin() -> float:
    """Bytes that this process holds now; from here on its peak is counted anew."""
    with contextlib.suppress(OSError):
        CLEAR.write_text("5")  # VmHWM is then what is held now
    # A new process has no peak yet; and before it has chosen its GPU, whatever asks CUDA makes a
    # context on the first one, half a gigabyte that every rank would then hold there.
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    return _status("VmRSS")


def peak(run: Run, before: float) -> float | None:
    """Bytes that the run took at most; None where the system does not tell. `before`: `begin`'s."""
    if run.world.device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(run.world.device))
    most = _status("VmHWM")
    return most - before if most > before else None


def predict(run: Run) -> Memory | None:
    """What the plan says of one rank of this run, with what the run has settled: layout, rows of a
    forward, longest prompt. None where the model is none that a plan can count.
    """
    try:
        return peak_memory.of(of(run))
    except RunError:
        return None


def of(run: Run) -> Case:
    """The run as a plan sees it. Raises RunError where facts of a model are not to be had."""
    here = run.world.device
    settings = run.config
    model = model_facts.of(settings.model.path, settings.model.revision)
    whole = here.type == "cuda" and torch.cuda.get_device_properties(here).total_memory
    entries: dict[str, Any] = {n: e for n, e in settings.rewards.items() if e.type == "model"}
    return Case(
        run=settings,
        model=model,
        device=device.of_rank(here.type, float(whole)),
        ranks=run.world.size,
        longest=run.prompts.longest,
        reference=None if run.reference is None else case.reference_of(settings, model),
        value=case.value_of(settings),
        rewards={n: model_facts.of(e.path, e.revision) for n, e in entries.items()},
        budget=run.limits.rows,
        recompute=bool(run.policy.model.is_gradient_checkpointing),
        layout=run.level.layout,
    )


def compare(run: Run, before: float) -> dict[str, Any]:
    """Predicted and measured peak of this rank, for run.json; noted in the log. {} without both."""
    measured, found = peak(run, before), predict(run)
    if measured is None or found is None:
        return {}
    off = found.peak / measured - 1
    most, predicted = planning_text.gib(measured), planning_text.gib(found.peak)
    run.log.note(f"memory: {most} at most, {predicted} predicted ({off:+.0%})")
    return {
        "measured_bytes": int(measured),
        "predicted_bytes": int(found.peak),
        "predicted_phase": found.worst,
        "predicted_parts": {name: int(value) for name, value in found.phases[found.worst].items()},
    }


def _status(name: str) -> float:
    """A line of /proc/self/status in bytes; 0 where there is none."""
    try:
        text = STATUS.read_text()
    except OSError:
        return 0.0
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return float(found[1]) * 1024 if found else 0.0
