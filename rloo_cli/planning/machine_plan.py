"""The plan of a run on named, present or assumed devices, and why it does not fit."""

from rloo_cli.config import synthetic
from rloo_cli.config.schema import RunConfig
from rloo_cli.planning import device, plan
from rloo_cli.planning import text as planning_text
from rloo_cli.planning.plan import PlanOptions, RunPlan
from rloo_cli.utils.errors import MachineError, Problem, refuse


def plan_run(
    settings: RunConfig,
    gpu: str | None = None,
    request: PlanOptions | None = None,
    measured: bool = True,
) -> RunPlan:
    """The plan of a run on named, present or assumed GPUs.

    `measured`: measure a CPU's speeds, which imports torch.
    """
    request = request or PlanOptions()
    if request.gpus and request.gpus > 1 and settings.distributed.engine == "single":
        why, fix = "distributed.engine = single uses one process", "distributed=ddp, zero2 or zero3"
        refuse("command line", f"--gpus {request.gpus} needs several processes", fix, why)
    small = settings.model.path.startswith(synthetic.MAKE_PREFIX)
    return plan.make_run_plan(settings, device.find_device(gpu, small, measured), request)


def plan_on_this_machine(run: RunConfig) -> RunPlan:
    """The plan of a run on this machine.

    On the CPU if there are no GPUs and the run fits; else on the GPUs assumed by `plan_run`.
    A CPU's speeds are assumed: a dry run does not import torch to measure them.
    """
    here = device.find_device(None, small=True, measured=False)
    if here.kind == "cpu" and run.generation.samples_here:
        found = plan.make_run_plan(run, here, PlanOptions())
        if found.fits:
            return found
    return plan_run(run, measured=False)


def does_not_fit_error(run_plan: RunPlan) -> MachineError:
    """The error of a run that does not fit, with the two keys that save most."""
    case, needs = (
        run_plan.inputs,
        plan.phase_bytes(run_plan.inputs, run_plan.memory, run_plan.sampler),
    )
    worst = max(needs, key=lambda name: needs[name])
    phase = f"in the phase {worst!r}" if worst != "server" else "on the server's GPU"
    usable = planning_text.format_gib(case.device.usable_bytes)
    why = f"{planning_text.format_gib(run_plan.needed_bytes)} {phase}, {usable} usable on each"
    engine = run_plan.sampler
    if engine is not None and engine.kv_cache_bytes < engine.least_kv_bytes:
        left = planning_text.format_gib(max(engine.kv_cache_bytes, 0.0))
        least = planning_text.format_gib(engine.least_kv_bytes)
        why += f"\nvLLM has {left} for keys and values; one sequence needs {least}"
    lines = [
        f"{key}   ({planning_text.format_gib(need)})" for key, need in plan.best_changes(run_plan)
    ]
    fewest = plan.smallest_gpu_count(run_plan)
    if fewest is not None:
        lines.append(f"or {fewest} GPUs of this kind: --gpus {fewest}")
    fix = "\n".join(lines) or "a smaller model, or GPUs with more memory: --gpu 141GiB"
    what = f"{case.run.name or case.model.name} does not fit on {case.ranks} x {case.device.name}"
    return MachineError(Problem(what, "memory", why, fix))
