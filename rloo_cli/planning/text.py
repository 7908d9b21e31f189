"""A plan as text for people, and as plain values for tools."""

from collections.abc import Iterator

from rloo_cli.config.agent import observation_token_limit
from rloo_cli.config.rules import SHARDED_ENGINES
from rloo_cli.config.teacher import TeacherConfig
from rloo_cli.planning import plan as planning
from rloo_cli.planning.model_counts import ModelSpec
from rloo_cli.planning.overlap_times import MODES, advised_mode
from rloo_cli.planning.peak_memory import PROCESS_BYTES
from rloo_cli.planning.plan import UTILIZATION_STEPS, RunPlan
from rloo_cli.planning.plan_inputs import PlanInputs
from rloo_cli.planning.static_memory import MOMENTS, trained_params, value_model_params
from rloo_cli.utils.files import JsonObject

GIB = 2**30


def format_gib(count: float) -> str:
    """Bytes as text, in GiB or MiB."""
    return f"{count / GIB:.3g} GiB" if count >= 0.01 * GIB else f"{count / 2**20:.3g} MiB"


def format_count(number: float) -> str:
    """A number of parameters as text, in billions, millions or thousands."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return f"{number:.0f}"


def plan_text(plan: RunPlan) -> str:
    """The whole plan as text."""
    return "\n".join([*plan_summary(plan), "", *_table(plan), "", *plan_assumptions(plan)])


def plan_summary(plan: RunPlan) -> Iterator[str]:
    """The main lines: whether it fits, number of GPUs, time and disk space."""
    case, run = plan.inputs, plan.inputs.run
    yield f"model      {_model(case.model)}"
    size = format_gib(case.device.memory_bytes)
    yield f"device     {case.device.name}, {size} each ({case.device.source})"
    yield f"ranks      {_ranks(case)}"
    what = "fits" if plan.fits else "DOES NOT FIT"
    usable = f"{format_gib(case.device.usable_bytes)} usable on each"
    yield f"memory     {format_gib(plan.needed_bytes)} of {usable}: {what}"
    if case.device.kind == "cpu":
        base = format_gib(PROCESS_BYTES)
        yield f"           plus about {base} for Python and torch in each process"
    if plan.memory.host_bytes:
        yield f"CPU memory {format_gib(plan.memory.host_bytes)} for each rank"
    if (fewest := planning.smallest_gpu_count(plan)) is not None and case.device.kind == "cuda":
        yield f"smallest   {_gpus(fewest)} of this kind for training"
    yield from _engine(plan)
    yield from teacher_line(run.algorithm.teacher_server)
    yield f"step       {plan.tokens_per_step:,.0f} tokens, {_time(plan.duration.total_seconds)}"
    yield from _overlap(plan)
    yield f"run        {_run(plan)}"
    count, size = run.checkpoint.keep_last + 1, format_gib(plan.checkpoint_bytes)
    records = ""
    if run.logging.rollouts_every:
        kept = "?" if plan.rollouts_kept is None else f"{plan.rollouts_kept:,}"
        records = f", {kept} records of rollouts of {format_gib(plan.rollouts_bytes)}"
    yield f"disk       {format_gib(plan.disk_bytes)}: {count} checkpoints of {size}{records}"


def teacher_line(keys: TeacherConfig | None) -> Iterator[str]:
    """Which server has the teacher of a distillation; nothing if it is loaded locally."""
    if keys is not None:
        name = "" if keys.model is None else f"{keys.model} "
        yield f"teacher    {name}at {keys.base_url}: not loaded locally"


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' if count > 1 else ''}"


def _model(model: ModelSpec) -> str:
    guessed = ", unknown family, counted as a Llama" if model.guessed else ""
    return f"{model.name}, {format_count(model.total_params)} parameters ({model.source}{guessed})"


def _ranks(inputs: PlanInputs) -> str:
    config = inputs.run.distributed
    offload = f", {config.offload} in the CPU's memory" if config.offload != "none" else ""
    on = f" on {config.num_nodes} machines" if config.num_nodes > 1 else ""
    kind = "processes" if inputs.ranks > 1 else "process"
    return f"{inputs.ranks} {kind}{on}, {inputs.parallel_strategy}{offload}"


def _engine(plan: RunPlan) -> Iterator[str]:
    engine, case = plan.sampler, plan.inputs
    if engine is None:
        return
    section, where = "server", f"{_gpus(engine.extra_gpus)} of their own"
    if engine.colocated:
        section, where = "colocate", "on the trainer's GPUs"
    weights, cache = format_gib(engine.weight_bytes), format_gib(max(engine.kv_cache_bytes, 0))
    yield (
        f"vLLM       {where}, {engine.tensor_parallel_size} for a copy: weights {weights}, "
        f"KV cache {cache} of each at {engine.gpu_memory_utilization:g}"
    )
    share = planning.recommended_gpu_utilization(plan)
    assert share is not None
    key = f"generation.{section}.gpu_memory_utilization"
    more = " or ".join(f"{min(share + m, 0.95):.2f}" for m in UTILIZATION_STEPS)
    length = case.max_prompt_tokens + case.max_completion_tokens
    asked = f"{engine.sequences} sequences of {length} tokens at once"
    cache = format_gib(engine.wanted_kv_bytes)
    yield f"           recommended: {key}={share:g} ({asked}, {cache} of KV cache);"
    yield f"           if vLLM does not start with it, +0.05 or +0.1: {more}"


def _overlap(plan: RunPlan) -> Iterator[str]:
    """Seconds of a step by generation.overlap, and the recommended mode; empty without a server."""
    seconds = plan.duration.overlap_seconds
    if not seconds:
        return
    gpus = plan.inputs.ranks + (plan.sampler.extra_gpus if plan.sampler else 0)
    none = seconds["none"]
    shown = [f"{m} {_time(seconds[m])} ({none / seconds[m]:.2f}x)" for m in MODES]
    yield f"overlap    {', '.join(shown)};"
    turns = f"{_time(seconds['turns'])} ({none / seconds['turns']:.2f}x)"
    yield f"           taking turns on the same {_gpus(gpus)} (generation=vllm_colocate): {turns}"
    mode = advised_mode(seconds)
    advice = {
        "turns": "generation=vllm_colocate on all of them, equally exact",
        "none": "generation.overlap=none: the others gain less than a tenth",
    }.get(mode, f"generation.overlap={mode}, with off-policy updates; compare it with none")
    yield f"           advice: {advice}"


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms" if seconds >= 0.001 else "less than 1 ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def _run(plan: RunPlan) -> str:
    if plan.steps is None:
        epochs = plan.inputs.run.train.epochs
        return f"{epochs:g} epochs: steps depend on the data; or set --prompts N"
    tokens, count = plan.steps * plan.tokens_per_step, plan.steps
    return (
        f"{count} steps, {tokens:,.0f} tokens, about {_time(count * plan.duration.total_seconds)}"
    )


def _table(plan: RunPlan) -> Iterator[str]:
    """Memory of one rank, part by part, in each phase; and the seconds of a step."""
    phases = plan.memory.phases
    needs = planning.phase_bytes(plan.inputs, plan.memory, plan.sampler)
    names = dict.fromkeys(name for parts in phases.values() for name in parts)
    lines = {name: [parts.get(name, 0.0) for parts in phases.values()] for name in names}
    if plan.sampler is not None and plan.sampler.colocated:
        lines["vLLM"] = [needs[p] - sum(phases[p].values()) for p in phases]
    yield f"{'one rank, GiB':<22}" + "".join(f"{phase:>16}" for phase in phases)
    for name, cells in lines.items():
        yield f"  {name:<20}" + "".join(f"{c / GIB:>16.3f}" if c else f"{'-':>16}" for c in cells)
    yield f"  {'together':<20}" + "".join(f"{needs[phase] / GIB:>16.3f}" for phase in phases)
    yield ""
    yield f"{'one step, seconds':<22}" + "".join(
        f"\n  {name:<20}{f'{seconds:.3g}' if seconds >= 0.001 else '< 0.001':>16}"
        for name, seconds in plan.duration.phase_seconds.items()
    )


def _time_assumptions(plan: RunPlan) -> Iterator[str]:
    """Speeds and lengths behind the seconds."""
    device, means = plan.inputs.device, plan.duration.mean_lengths
    speed = f"{device.flops_per_s / 1e12:.3g} TFLOP/s and {device.bytes_per_s / 1e12:.3g} TB/s"
    shares = device.shares
    yield f"  time: {speed}; decoding reaches {shares.decode:.0%} of it,"
    lengths = f"mean prompt {means.prompt:.0f}, completion {means.completion:.0f} tokens"
    yield f"  passes without gradient {shares.no_grad:.0%}, with it {shares.grad:.0%}; {lengths}"
    if device.kind == "cpu":
        yield "  Python overhead is not counted; it dominates the steps of a tiny model"
    if device.kind == "cuda" or plan.duration.overlap_seconds:
        yield "  completion lengths follow an exponential distribution, up to their limit"
    if plan.options.prompt_tokens is None or plan.options.completion_tokens is None:
        yield "  (half of the limits; set --prompt-tokens N, --completion-tokens N)"


def plan_assumptions(plan: RunPlan) -> Iterator[str]:
    """The assumptions behind the figures."""
    case, run, forward = plan.inputs, plan.inputs.run, plan.memory.forward
    device = case.device
    yield "assumed"
    whole, adapter = trained_params(case)
    size = {4: "float32", 2: "half precision"}[case.bytes_per_weight]
    masters = case.bytes_per_weight < 4 and run.distributed.master_weights == "float32"
    extra = "float32 masters, " if masters and not adapter else ""
    yield f"  {format_count(whole or adapter)} trained parameters; weights in {size}, {extra}"
    yield "  two float32 moments, gradients accumulated in float32"
    if adapter:
        yield "  adapters in float32; the base model has no gradient"
    yield (
        f"  prompts of up to {case.max_prompt_tokens} tokens and completions of "
        f"{case.max_completion_tokens}; a forward "
        f"of {forward.tokens} tokens ({case.resolved_layout}), {forward.micro_batches} per update"
    )
    yield from _episode_assumptions(plan)
    if forward.recompute:
        yield "  gradient checkpointing: activations are recomputed, one layer at a time"
    if case.parallel_strategy == "zero3":
        yield "  ZeRO-3: up to 1e9 gathered parameters, buckets of 5e8, DeepSpeed's defaults"
    if case.reference_model is not None:
        where = "in CPU memory" if run.model.ref_offload else "on the same device"
        sharded = case.parallel_strategy in SHARDED_ENGINES and case.ranks > 1
        parts = f", in {case.ranks} parts" if sharded else ""
        size = format_count(case.reference_model.total_params)
        yield f"  a reference of {size} parameters {where}{parts}"
    yield from _tower_assumptions(case)
    if case.value_model is not None:
        size = f"{format_count(value_model_params(case))} numbers ({case.value_model.name})"
        yield f"  a value model of {size}, also trained"
    for name, model in case.reward_models.items():
        size = f"{format_count(model.total_params)} parameters ({model.source})"
        yield f"  reward.{name}: {size}, whole on each rank"
    if device.kind == "cuda":
        reserved = format_gib(device.reserved_bytes)
        yield f"  {reserved} of each GPU are reserved for CUDA, NCCL and fragmentation"
    yield from _time_assumptions(plan)
    if run.train.optimizer not in MOMENTS:
        yield f"  train.optimizer={run.train.optimizer} is assumed to keep as much as AdamW"


def _tower_assumptions(case: PlanInputs) -> Iterator[str]:
    """The vision tower and the cost of images; nothing for a text model."""
    tower = case.model.tower
    if tower is None:
        return
    frozen = ", frozen" if "vision" in case.run.model.freeze else ""
    yield (
        f"  a vision tower of {format_count(tower.tower_params)} parameters{frozen}, and"
        f" {format_count(tower.projector_params)} in the projector; it sees each"
        " prompt's images once"
    )
    pixels, most = case.run.data.max_pixels, case.max_prompt_tokens
    each = f"{tower.pixels_per_token} pixels per token"
    if pixels is not None:
        each += f", {-(-pixels // tower.pixels_per_token)} of an image of data.max_pixels"
    yield f"  images: {each}; a prompt has at most {most} tokens, assumed to be all images"


def _episode_assumptions(plan: RunPlan) -> Iterator[str]:
    """The assumed length of episodes; nothing without an agent."""
    case, means = plan.inputs, plan.duration.mean_lengths
    if case.agent is None:
        return
    length = case.run.generation.max_completion_length
    yield (
        f"  episodes of up to {case.max_turns} turns of {length} sampled tokens, and up to"
        f" {observation_token_limit(case.agent, length)} of tool output after each"
    )
    read = means.completion - means.sampled
    yield (
        f"  mean: {means.turns:.3g} turns: {means.sampled:.0f} sampled tokens, and"
        f" {read:.0f} read tokens; tool time is not counted"
    )
    if plan.options.turns is None or plan.options.observation_tokens is None:
        yield "  (half of the limits; set --turns N, --observation-tokens N)"


def plan_values(plan: RunPlan) -> JsonObject:
    """The plan as plain values for tools: bytes, seconds, counts."""
    case, engine = plan.inputs, plan.sampler
    teacher = case.run.algorithm.teacher_server
    return {
        "fits": plan.fits,
        "need_bytes": plan.needed_bytes,
        "usable_bytes": case.device.usable_bytes,
        "process_bytes": PROCESS_BYTES if case.device.kind == "cpu" else 0.0,
        "device": {"name": case.device.name, "memory_bytes": case.device.memory_bytes,
                   "source": case.device.source},
        "model": {"path": case.model.name, "parameters": case.model.total_params,
                  "source": case.model.source, "guessed": case.model.guessed},
        "trained": sum(trained_params(case)) + value_model_params(case),
        "ranks": case.ranks,
        "engine": case.parallel_strategy,
        "teacher": None if teacher is None else teacher.base_url,
        "smallest_gpus": planning.smallest_gpu_count(plan),
        "phases_bytes": plan.memory.phases,
        "cpu_bytes": plan.memory.host_bytes,
        "forward": {"rows": plan.memory.forward.tokens,
                    "micro_batches": plan.memory.forward.micro_batches,
                    "gradient_checkpointing": plan.memory.forward.recompute},
        "vllm": None if engine is None else {
            "gpus": engine.extra_gpus, "tensor_parallel_size": engine.tensor_parallel_size,
            "weights_bytes": engine.weight_bytes, "kv_cache_bytes": max(engine.kv_cache_bytes, 0.0),
            "kv_cache_wanted_bytes": engine.wanted_kv_bytes,
            "gpu_memory_utilization": planning.recommended_gpu_utilization(plan),
        },
        "mean_lengths": vars(plan.duration.mean_lengths),
        "steps": plan.steps,
        "tokens_per_step": plan.tokens_per_step,
        "step_seconds": plan.duration.total_seconds,
        "step_parts_seconds": plan.duration.phase_seconds,
        "overlap_seconds": plan.duration.overlap_seconds,
        "checkpoint_bytes": plan.checkpoint_bytes,
        "disk_bytes": plan.disk_bytes,
        "rollouts_bytes": plan.rollouts_bytes,
        "rollouts_kept": plan.rollouts_kept,
        "assumed": list(plan_assumptions(plan))[1:],
    }  # fmt: skip
