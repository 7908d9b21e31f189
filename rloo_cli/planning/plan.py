"""A run's plan: does it fit, on how few GPUs would it, how long, how much disk, what to change."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from rloo_cli.config.schema import RunConfig
from rloo_cli.planning import duration, peak_memory, vllm_memory
from rloo_cli.planning import plan_inputs as cases
from rloo_cli.planning.device import Device
from rloo_cli.planning.duration import StepDuration
from rloo_cli.planning.peak_memory import PeakMemory
from rloo_cli.planning.plan_inputs import PlanInputs
from rloo_cli.planning.static_memory import MASTER, MOMENTS, trained_params, value_model_params
from rloo_cli.planning.vllm_memory import EngineMemory

MOST_GPUS = 4096
UTILIZATION_STEPS = (0.05, 0.1)  # to be added to a recommended share where vLLM does not start


@dataclass(frozen=True)
class PlanOptions:
    """What the command line says beside the config."""

    gpus: int | None = None  # that train
    prompts: int | None = None  # in the data
    prompt_tokens: float | None = None  # mean
    completion_tokens: float | None = None


@dataclass(frozen=True)
class RunPlan:
    """Everything that is told of a run."""

    inputs: PlanInputs
    memory: PeakMemory
    sampler: EngineMemory | None
    options: PlanOptions
    duration: StepDuration
    steps: int | None  # None = known when the data is loaded
    checkpoint_bytes: float  # bytes
    disk_bytes: float  # of all checkpoints that are kept, and one more

    @property
    def needed_bytes(self) -> float:
        """Bytes of the fullest GPU (of the CPU's memory without one)."""
        return max(phase_bytes(self.inputs, self.memory, self.sampler).values())

    @property
    def fits(self) -> bool:
        return fits_device(self.inputs, self.memory, self.sampler)

    @property
    def tokens_per_step(self) -> float:
        """Of a step: each prompt once, and every completion."""
        means, run = self.duration.mean_lengths, self.inputs.run
        each = means.prompt + run.algorithm.num_generations * means.completion
        return run.train.prompts_per_step * each


def make_run_plan(run: RunConfig, device: Device, options: PlanOptions | None = None) -> RunPlan:
    """The plan of a run on such devices. Raises MachineError where facts are not to be had."""
    options = options or PlanOptions()
    found = cases.collect_plan_inputs(run, device, options.gpus)
    memory, sampler = (
        peak_memory.estimate_peak_memory(found),
        vllm_memory.estimate_engine_memory(found),
    )
    means = duration.mean_token_lengths(found, options.prompt_tokens, options.completion_tokens)
    cut = memory.forward
    size = checkpoint_size(found)
    return RunPlan(
        inputs=found,
        memory=memory,
        sampler=sampler,
        options=options,
        duration=duration.estimate_step_duration(
            found, means, sampler, cut.micro_batches, cut.recompute
        ),
        steps=run.num_steps(options.prompts),
        checkpoint_bytes=size,
        disk_bytes=(run.checkpoint.keep_last + 1) * size,
    )


def checkpoint_size(inputs: PlanInputs) -> float:
    """Bytes of one: weights (an adapter's alone), masters and moments of what is trained."""
    whole, adapter = trained_params(inputs)
    masters = MASTER if inputs.bytes_per_weight < 4 and not adapter and _masters(inputs) else 0
    each = (
        (4 if adapter else inputs.bytes_per_weight)
        + masters
        + MOMENTS.get(inputs.run.train.optimizer, 8)
    )
    return float(each * (whole + adapter + value_model_params(inputs)))


def _masters(inputs: PlanInputs) -> bool:
    return inputs.run.distributed.master_weights == "float32"


def phase_bytes(
    inputs: PlanInputs, memory: PeakMemory, sampler: EngineMemory | None
) -> dict[str, float]:
    """Bytes of one GPU in each phase, a colocated engine's among them; of a server's GPU too."""
    found: dict[str, float] = {}
    for name, parts in memory.phases.items():
        found[name] = sum(parts.values())
        if sampler is not None and sampler.colocated:
            found[name] += (
                sampler.total_bytes if name == "rollout" else sampler.bytes_while_training
            )
    if sampler is not None and not sampler.colocated:
        found["server"] = sampler.weight_bytes + sampler.forward_bytes + sampler.least_kv_bytes
    return found


def fits_device(inputs: PlanInputs, memory: PeakMemory, sampler: EngineMemory | None) -> bool:
    """Whether every phase fits, and an engine holds its weights and one sequence at least."""
    if sampler is not None and sampler.kv_cache_bytes < sampler.least_kv_bytes:
        return False
    return all(
        need <= (inputs.device.usable_bytes if name != "server" else inputs.device.memory_bytes)
        for name, need in phase_bytes(inputs, memory, sampler).items()
    )


def smallest_gpu_count(plan: RunPlan) -> int | None:
    """The fewest GPUs that train on which it fits; None where none of 1, 2, 4 ... do.

    From 8 on, whole machines of 8. With `single` there is only one.
    """
    case = plan.inputs
    if case.device.kind != "cuda":
        return None
    if case.parallel_strategy == "single":
        return 1 if plan.fits else None
    count = 1
    while count <= MOST_GPUS:
        other = case.with_ranks(count)
        if fits_device(
            other,
            peak_memory.estimate_peak_memory(other),
            vllm_memory.estimate_engine_memory(other),
        ):
            return _fewer(case, count)
        count *= 2
    return None


def _fewer(inputs: PlanInputs, count: int) -> int:
    """Whole machines between the last power of two that did not fit, and the first that did."""
    for less in range(count // 2 + 8, count, 8) if count >= 16 else ():
        other = inputs.with_ranks(less)
        if fits_device(
            other,
            peak_memory.estimate_peak_memory(other),
            vllm_memory.estimate_engine_memory(other),
        ):
            return less
    return count


def recommended_gpu_utilization(plan: RunPlan) -> float | None:
    """generation.*.gpu_memory_utilization for this run; None without an engine on a GPU."""
    sampler, case = plan.sampler, plan.inputs
    if sampler is None:
        return None
    if not sampler.colocated:
        return sampler.smallest_utilization(case.device.usable_bytes)
    held = {name: sum(parts.values()) for name, parts in plan.memory.phases.items()}
    room = case.device.usable_bytes - held["rollout"]
    if sampler.sleep == "none":
        room = case.device.usable_bytes - plan.memory.peak_bytes
    return sampler.smallest_utilization(max(room, 0.0))


Change = tuple[str, Callable[[RunConfig], RunConfig]]


def best_changes(plan: RunPlan) -> list[tuple[str, float]]:
    """The two keys that bring most, each alone: what to add to the command, bytes then needed."""
    found: list[tuple[str, float]] = []
    for words, change in possible_changes(plan):
        other = cases.collect_plan_inputs(
            change(plan.inputs.run), plan.inputs.device, plan.inputs.ranks
        )
        memory, sampler = (
            peak_memory.estimate_peak_memory(other),
            vllm_memory.estimate_engine_memory(other),
        )
        need = max(phase_bytes(other, memory, sampler).values())
        short = sampler is not None and sampler.kv_cache_bytes < sampler.least_kv_bytes
        if need < 0.98 * plan.needed_bytes or (
            short is False and not plan.fits and need <= plan.needed_bytes
        ):
            found.append((words, need))
    return sorted(found, key=lambda pair: pair[1])[:2]


def possible_changes(plan: RunPlan) -> Iterator[Change]:
    """What could make a run smaller."""
    run, case, sampler = plan.inputs.run, plan.inputs, plan.sampler
    if case.ranks > 1 and case.parallel_strategy not in ("zero3", "fsdp2"):
        yield "distributed=zero3", lambda r: _with_section(r, "distributed", engine="zero3")
    if case.parallel_strategy.startswith("zero") and run.distributed.offload == "none":
        offload = "distributed.offload=optimizer"
        yield offload, lambda r: _with_section(r, "distributed", offload="optimizer")
    if not plan.memory.forward.recompute:
        words = "model.gradient_checkpointing=true"
        yield words, lambda r: _with_section(r, "model", gradient_checkpointing=True)
    fewer = max(plan.memory.forward.tokens // 4 // 64 * 64, 64)
    if fewer < plan.memory.forward.tokens and run.train.micro_batch_size is None:
        words = f"train.micro_batch_tokens={fewer}"
        yield words, lambda r: _with_section(r, "train", micro_batch_tokens=fewer)
    if run.generation.backend == "transformers":
        places = max(64, 4 * (case.max_prompt_tokens + case.max_completion_tokens))
        words = f"generation.transformers.batch_tokens={places}"
        yield words, lambda r: _with_generation_section(r, "transformers", batch_tokens=places)
    if sampler is not None and sampler.colocated and sampler.sleep != "weights":
        yield (
            "generation.colocate.sleep=weights",
            lambda r: _with_generation_section(r, "colocate", sleep="weights"),
        )
    if sampler is not None:
        section = "colocate" if sampler.colocated else "server"
        wider = 2 * sampler.tensor_parallel_size
        words = f"generation.{section}.tensor_parallel_size={wider}"
        yield words, lambda r: _with_generation_section(r, section, tensor_parallel_size=wider)
        share = round(min(0.9, sampler.gpu_memory_utilization + 0.2), 2)
        words = f"generation.{section}.gpu_memory_utilization={share}"
        yield words, lambda r: _with_generation_section(r, section, gpu_memory_utilization=share)
    if case.reference_model is not None:
        words = "model.ref_offload=true"
        yield words, lambda r: _with_section(r, "model", ref_offload=True)
    half = max(1, run.train.prompts_per_step // 2)
    words = f"train.prompts_per_step={half}"
    yield words, lambda r: _with_section(r, "train", prompts_per_step=half)


def _with_section(run: RunConfig, section: str, **values: Any) -> RunConfig:
    own = getattr(run, section)
    return run.model_copy(update={section: own.model_copy(update=values)})


def _with_generation_section(run: RunConfig, section: str, **values: Any) -> RunConfig:
    """The same for a section of `generation`."""
    own = getattr(run.generation, section)
    return _with_section(run, "generation", **{section: own.model_copy(update=values)})


def plan_on_gpus(plan: RunPlan, gpus: int) -> RunPlan:
    """The same run on another number of GPUs."""
    return make_run_plan(plan.inputs.run, plan.inputs.device, replace(plan.options, gpus=gpus))
