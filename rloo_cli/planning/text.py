"""A plan as text for people, and as plain values for tools."""

from collections.abc import Iterator
from typing import Any

from rloo_cli.planning import plan as planning
from rloo_cli.planning.case import SHARDED, Case
from rloo_cli.planning.model_facts import Facts
from rloo_cli.planning.plan import MORE, Plan
from rloo_cli.planning.static_memory import MOMENTS, learned, trained

GIB = 2**30
NAMES = {"single": "one process", "ddp": "a copy in each", "fsdp2": "torch's fully_shard"}


def gib(count: float) -> str:
    """Bytes as GiB."""
    return f"{count / GIB:.3g} GiB" if count >= 0.01 * GIB else f"{count / 2**20:.3g} MiB"


def count(number: float) -> str:
    """Parameters as billions, millions or thousands."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return f"{number:.0f}"


def of(plan: Plan) -> str:
    """The whole plan."""
    return "\n".join([*summary(plan), "", *_table(plan), "", *assumed(plan)])


def summary(plan: Plan) -> Iterator[str]:
    """The lines that matter: does it fit, on how many, how long, how much disk."""
    case, run = plan.case, plan.case.run
    yield f"model      {_model(case.model)}"
    yield f"device     {case.device.name}, {gib(case.device.memory)} each ({case.device.source})"
    yield f"ranks      {_ranks(case)}"
    what = "fits" if plan.fits else "DOES NOT FIT"
    room = case.device.usable
    yield f"memory     {gib(plan.need)} of {gib(room)} usable on each: {what}"
    if plan.memory.host:
        yield f"CPU memory {gib(plan.memory.host)} for each rank"
    if (fewest := planning.smallest(plan)) is not None and case.device.kind == "cuda":
        yield f"smallest   {_gpus(fewest)} of this kind for training"
    yield from _engine(plan)
    yield f"step       {plan.tokens:,.0f} tokens, {_time(plan.duration.step)}"
    yield f"run        {_run(plan)}"
    kept = run.checkpoint.keep_last + 1
    yield f"disk       {gib(plan.disk)}: {kept} checkpoints of {gib(plan.checkpoint)}"


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' if count > 1 else ''}"


def _model(model: Facts) -> str:
    guessed = ", counted as a Llama: its family is not known" if model.guessed else ""
    return f"{model.name}, {count(model.total)} parameters ({model.source}{guessed})"


def _ranks(case: Case) -> str:
    spread = case.run.distributed
    offload = f", {spread.offload} in the CPU's memory" if spread.offload != "none" else ""
    on = f" on {spread.num_nodes} machines" if spread.num_nodes > 1 else ""
    kind = "processes" if case.ranks > 1 else "process"
    return f"{case.ranks} {kind}{on}, {case.engine}{offload}"


def _engine(plan: Plan) -> Iterator[str]:
    engine, case = plan.sampler, plan.case
    if engine is None:
        return
    where = "on the trainer's GPUs" if engine.colocated else f"{_gpus(engine.gpus)} of their own"
    section = "colocate" if engine.colocated else "server"
    yield (
        f"vLLM       {where}, {engine.parallel} for a copy: weights {gib(engine.weights)}, "
        f"KV cache {gib(max(engine.cache, 0))} of each at {engine.share:g}"
    )
    share = planning.recommended(plan)
    assert share is not None
    key = f"generation.{section}.gpu_memory_utilization"
    more = " or ".join(f"{min(share + m, 0.95):.2f}" for m in MORE)
    asked = f"{engine.sequences} sequences of {case.longest + case.completion} tokens at once"
    yield f"           recommended: {key}={share:g} ({asked}, {gib(engine.wanted)} of KV cache);"
    yield f"           if vLLM does not start with it, +0.05 or +0.1: {more}"


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms" if seconds >= 0.001 else "less than 1 ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def _run(plan: Plan) -> str:
    if plan.steps is None:
        epochs = plan.case.run.train.epochs
        return f"{epochs:g} epochs: steps are known when the data is, or with --prompts N"
    whole, count = plan.steps * plan.tokens, plan.steps
    return f"{count} steps, {whole:,.0f} tokens, about {_time(count * plan.duration.step)}"


def _table(plan: Plan) -> Iterator[str]:
    """Memory of one rank, part by part, in each phase."""
    phases = plan.memory.phases
    names = list(dict.fromkeys(name for parts in phases.values() for name in parts))
    yield f"{'one rank, GiB':<22}" + "".join(f"{phase:>16}" for phase in phases)
    for name in names:
        cells = (parts.get(name, 0.0) for parts in phases.values())
        yield f"  {name:<20}" + "".join(f"{c / GIB:>16.3f}" if c else f"{'-':>16}" for c in cells)
    needs = planning.needs(plan.case, plan.memory, plan.sampler)
    if plan.sampler is not None and plan.sampler.colocated:
        cells = (needs[p] - sum(phases[p].values()) for p in phases)
        yield f"  {'vLLM':<20}" + "".join(f"{c / GIB:>16.3f}" if c else f"{'-':>16}" for c in cells)
    yield f"  {'together':<20}" + "".join(f"{needs[phase] / GIB:>16.3f}" for phase in phases)
    yield ""
    yield f"{'one step, seconds':<22}" + "".join(
        f"\n  {name:<20}{f'{seconds:.3g}' if seconds >= 0.001 else '< 0.001':>16}"
        for name, seconds in plan.duration.parts.items()
    )


def assumed(plan: Plan) -> Iterator[str]:
    """What the figures rest on."""
    case, run, cut = plan.case, plan.case.run, plan.memory.forward
    device, means = case.device, plan.duration.lengths
    yield "assumed"
    whole, adapter = trained(case)
    size = {4: "float32", 2: "half precision"}[case.size]
    masters = case.size < 4 and run.distributed.master_weights == "float32"
    kept = "float32 masters, " if masters and not adapter else ""
    yield f"  {count(whole or adapter)} numbers are trained; weights in {size}, {kept}"
    yield "  two float32 moments, gradients added up in float32"
    if adapter:
        yield "  adapters in float32; the model under them has no gradient"
    yield (
        f"  prompts of up to {case.longest} tokens and completions of {case.completion}; a forward "
        f"of {cut.rows} rows ({case.placing}), {cut.micros} an update"
    )
    if cut.recompute:
        yield "  gradient checkpointing: activations are made again, one layer at a time"
    if case.engine == "zero3":
        yield "  ZeRO-3: up to 1e9 gathered numbers, buckets of 5e8, as DeepSpeed has them"
    if case.reference is not None:
        where = "in the CPU's memory" if run.model.ref_offload else "beside it"
        parts = f", in {case.ranks} parts" if case.engine in SHARDED and case.ranks > 1 else ""
        yield f"  a reference of {count(case.reference.total)} parameters {where}{parts}"
    if case.value is not None:
        size = f"{count(learned(case))} numbers ({case.value.name})"
        yield f"  a value model of {size}, trained too"
    for name, model in case.rewards.items():
        size = f"{count(model.total)} parameters ({model.source})"
        yield f"  reward.{name}: {size}, whole on each rank"
    if device.kind == "cuda":
        yield f"  {gib(device.reserve)} of each GPU are CUDA's, NCCL's, and lost between tensors"
    yield (
        f"  time: {device.flops / 1e12:.3g} TFLOP/s and {device.bytes_per_s / 1e12:.3g} TB/s, of "
        "which decoding reaches 60 %,"
    )
    yield (
        f"  passes without gradient 55 %, with it 45 %; mean prompt {means.prompt:.0f}, completion "
        f"{means.completion:.0f} tokens"
    )
    if plan.asked.prompt_tokens is None or plan.asked.completion_tokens is None:
        yield "  (half of what they may be; --prompt-tokens N, --completion-tokens N say better)"
    if run.train.optimizer not in MOMENTS:
        yield f"  train.optimizer={run.train.optimizer} keeps as much as AdamW"


def values(plan: Plan) -> dict[str, Any]:
    """The plan for tools: bytes, seconds, counts."""
    case, engine = plan.case, plan.sampler
    return {
        "fits": plan.fits,
        "need_bytes": plan.need,
        "usable_bytes": case.device.usable,
        "device": {"name": case.device.name, "memory_bytes": case.device.memory,
                   "source": case.device.source},
        "model": {"path": case.model.name, "parameters": case.model.total,
                  "source": case.model.source, "guessed": case.model.guessed},
        "trained": sum(trained(case)) + learned(case),
        "ranks": case.ranks,
        "engine": case.engine,
        "smallest_gpus": planning.smallest(plan),
        "phases_bytes": plan.memory.phases,
        "cpu_bytes": plan.memory.host,
        "forward": {"rows": plan.memory.forward.rows, "micro_batches": plan.memory.forward.micros,
                    "gradient_checkpointing": plan.memory.forward.recompute},
        "vllm": None if engine is None else {
            "gpus": engine.gpus, "tensor_parallel_size": engine.parallel,
            "weights_bytes": engine.weights, "kv_cache_bytes": max(engine.cache, 0.0),
            "kv_cache_wanted_bytes": engine.wanted,
            "gpu_memory_utilization": planning.recommended(plan),
        },
        "steps": plan.steps,
        "tokens_per_step": plan.tokens,
        "step_seconds": plan.duration.step,
        "step_parts_seconds": plan.duration.parts,
        "checkpoint_bytes": plan.checkpoint,
        "disk_bytes": plan.disk,
        "assumed": list(assumed(plan))[1:],
    }  # fmt: skip
