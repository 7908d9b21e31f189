"""A run's plan: whether it fits, on how few GPUs, time, disk space, and what to change."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from rloo_cli.config.schema import Frozen, LoggingConfig, RunConfig
from rloo_cli.planning import duration, peak_memory, vllm_memory
from rloo_cli.planning import plan_inputs as cases
from rloo_cli.planning.device import Device
from rloo_cli.planning.duration import MeanLengths, StepDuration
from rloo_cli.planning.peak_memory import PeakMemory
from rloo_cli.planning.plan_inputs import PlanInputs
from rloo_cli.planning.static_memory import MASTER, MOMENTS, trained_params, value_model_params
from rloo_cli.planning.vllm_memory import EngineMemory

MOST_GPUS = 4096
RECORDED_TOKEN_BYTES = 8  # a token's id, and about 4 characters of text
RECORDED_FIELDS_BYTES = 250  # recorded per completion besides its tokens, and per prompt
UTILIZATION_STEPS = (0.05, 0.1)  # added to a recommended share if vLLM does not start with it


@dataclass(frozen=True)
class PlanOptions:
    """Command-line options besides the config; None = not set."""

    gpus: int | None = None  # for training
    prompts: int | None = None  # in the data
    prompt_tokens: float | None = None  # mean of a prompt
    completion_tokens: float | None = None  # mean of a completion, without tool output
    turns: float | None = None  # mean of an episode
    observation_tokens: float | None = None  # mean tool output between two turns


@dataclass(frozen=True)
class RunPlan:
    """Everything that the plan reports."""

    inputs: PlanInputs
    memory: PeakMemory
    sampler: EngineMemory | None
    options: PlanOptions
    duration: StepDuration
    steps: int | None  # None = depends on the data
    checkpoint_bytes: float  # of one checkpoint
    disk_bytes: float  # of all kept checkpoints plus one, and of recorded rollouts
    rollouts_bytes: float  # of one recorded step
    rollouts_kept: int | None  # recorded steps at the end; None = depends on the data

    @property
    def needed_bytes(self) -> float:
        """Bytes of the fullest GPU (of the CPU's memory without one)."""
        return max(phase_bytes(self.inputs, self.memory, self.sampler).values())

    @property
    def fits(self) -> bool:
        return fits_device(self.inputs, self.memory, self.sampler)

    @property
    def tokens_per_step(self) -> float:
        """Tokens of a step: each prompt once, and every completion."""
        means, run = self.duration.mean_lengths, self.inputs.run
        each = means.prompt + run.algorithm.num_generations * means.completion
        return run.train.prompts_per_step * each


def make_run_plan(run: RunConfig, device: Device, options: PlanOptions | None = None) -> RunPlan:
    """The plan of a run on such devices. Raises MachineError if a config.json was not found."""
    options = options or PlanOptions()
    inputs = cases.collect_plan_inputs(run, device, options.gpus)
    memory, sampler = _estimate_memory(inputs)
    forward, size = memory.forward, checkpoint_size(inputs)
    means = duration.mean_token_lengths(
        inputs, options.prompt_tokens, options.completion_tokens, options.turns,
        options.observation_tokens,
    )  # fmt: skip
    step = duration.estimate_step_duration(
        inputs, means, sampler, forward.micro_batches, forward.recompute
    )
    steps = run.num_steps(options.prompts)
    recorded, kept = recorded_step_bytes(inputs, means), recorded_steps(run.logging, steps)
    return RunPlan(
        inputs=inputs,
        memory=memory,
        sampler=sampler,
        options=options,
        duration=step,
        steps=steps,
        checkpoint_bytes=size,
        disk_bytes=(run.checkpoint.keep_last + 1) * size + (kept or 0) * recorded,
        rollouts_bytes=recorded,
        rollouts_kept=kept,
    )


def recorded_step_bytes(inputs: PlanInputs, means: MeanLengths) -> float:
    """Bytes of one step's record of rollouts (data/rollout_record.py).

    A token has its id, its text, and log-probabilities of sampler, policy and reference. A prompt
    is recorded once with its columns, which are assumed to be as long as the prompt.
    """
    run = inputs.run
    compared = run.algorithm.needs_reference or run.algorithm.teacher_server is not None
    columns = 2 + bool(compared) + 3 * bool(run.algorithm.by_token)
    completion = RECORDED_FIELDS_BYTES + means.completion * (RECORDED_TOKEN_BYTES + 4 * columns)
    prompt = RECORDED_FIELDS_BYTES + 3 * RECORDED_TOKEN_BYTES * means.prompt / 2
    each = prompt + run.algorithm.num_generations * completion
    return float(run.train.prompts_per_step * each)


def recorded_steps(logging: LoggingConfig, steps: int | None) -> int | None:
    """The number of recorded steps of a run; None if its length is unknown."""
    every, keep = logging.rollouts_every, logging.rollouts_keep_last
    if not every:
        return 0
    if steps is None:
        return keep
    return min(steps // every, keep or steps)


def _estimate_memory(inputs: PlanInputs) -> tuple[PeakMemory, EngineMemory | None]:
    return peak_memory.estimate_peak_memory(inputs), vllm_memory.estimate_engine_memory(inputs)


def checkpoint_size(inputs: PlanInputs) -> float:
    """Bytes of a checkpoint: weights (or an adapter's), masters and moments."""
    whole, adapter = trained_params(inputs)
    size = 4 if adapter else inputs.bytes_per_weight
    masters = MASTER if size < 4 and inputs.run.distributed.master_weights == "float32" else 0
    each = size + masters + MOMENTS.get(inputs.run.train.optimizer, 8)
    return float(each * (whole + adapter + value_model_params(inputs)))


def phase_bytes(
    inputs: PlanInputs, memory: PeakMemory, sampler: EngineMemory | None
) -> dict[str, float]:
    """Bytes of one GPU in each phase, including a colocated engine; of a server's GPU too."""
    needed = {name: sum(parts.values()) for name, parts in memory.phases.items()}
    if sampler is not None and sampler.colocated:
        for name in needed:
            rollout = name == "rollout"
            needed[name] += sampler.total_bytes if rollout else sampler.bytes_while_training
    elif sampler is not None:
        needed["server"] = sampler.weight_bytes + sampler.forward_bytes + sampler.least_kv_bytes
    return needed


def fits_device(inputs: PlanInputs, memory: PeakMemory, sampler: EngineMemory | None) -> bool:
    """Whether every phase fits, and an engine holds its weights and at least one sequence."""
    if sampler is not None and sampler.kv_cache_bytes < sampler.least_kv_bytes:
        return False
    return all(
        need <= (inputs.device.usable_bytes if name != "server" else inputs.device.memory_bytes)
        for name, need in phase_bytes(inputs, memory, sampler).items()
    )


def smallest_gpu_count(plan: RunPlan) -> int | None:
    """The fewest training GPUs on which it fits; None if it fits on none of 1, 2, 4 ...

    From 8 on, whole machines of 8. `single` has only one.
    """
    case = plan.inputs
    if case.device.kind != "cuda":
        return None
    if case.parallel_strategy == "single":
        return 1 if plan.fits else None
    count = 1
    while count <= MOST_GPUS:
        other = case.with_ranks(count)
        if fits_device(other, *_estimate_memory(other)):
            return _fewer(case, count)
        count *= 2
    return None


def _fewer(inputs: PlanInputs, count: int) -> int:
    """Whole machines between the last power of two that did not fit and the first that did."""
    for less in range(count // 2 + 8, count, 8) if count >= 16 else ():
        other = inputs.with_ranks(less)
        if fits_device(other, *_estimate_memory(other)):
            return less
    return count


def recommended_gpu_utilization(plan: RunPlan) -> float | None:
    """generation.*.gpu_memory_utilization for this run; None without an engine on a GPU."""
    sampler, case = plan.sampler, plan.inputs
    if sampler is None:
        return None
    if not sampler.colocated:
        return sampler.smallest_utilization(case.device.usable_bytes)
    held = sum(plan.memory.phases["rollout"].values())
    if sampler.sleep == "none":
        held = plan.memory.peak_bytes
    return sampler.smallest_utilization(max(case.device.usable_bytes - held, 0.0))


SectionT = TypeVar("SectionT", bound=Frozen)
Change = tuple[str, str, object]  # an override, with its key and value


def best_changes(plan: RunPlan) -> list[tuple[str, float]]:
    """The two keys that save most, each alone: the override, and the bytes needed with it."""
    useful: list[tuple[str, float]] = []
    case = plan.inputs
    for override, key, value in possible_changes(plan):
        changed = with_key(case.run, key, value)
        other = cases.collect_plan_inputs(changed, case.device, case.ranks)
        memory, sampler = _estimate_memory(other)
        need = max(phase_bytes(other, memory, sampler).values())
        short = sampler is not None and sampler.kv_cache_bytes < sampler.least_kv_bytes
        helps = not short and not plan.fits and need <= plan.needed_bytes
        if helps or need < 0.98 * plan.needed_bytes:
            useful.append((override, need))
    return sorted(useful, key=lambda pair: pair[1])[:2]


def possible_changes(plan: RunPlan) -> Iterator[Change]:
    """Overrides that could make a run smaller."""
    run, case, sampler = plan.inputs.run, plan.inputs, plan.sampler
    values: dict[str, object] = {}  # by key
    if case.ranks > 1 and case.parallel_strategy not in ("zero3", "fsdp2"):
        yield "distributed=zero3", "distributed.engine", "zero3"
    if case.parallel_strategy.startswith("zero") and run.distributed.offload == "none":
        values["distributed.offload"] = "optimizer"
    if not plan.memory.forward.recompute:
        values["model.gradient_checkpointing"] = True
    fewer = max(plan.memory.forward.tokens // 4 // 64 * 64, 64)
    if fewer < plan.memory.forward.tokens and run.train.micro_batch_size is None:
        values["train.micro_batch_tokens"] = fewer
    if run.generation.samples_here:
        tokens = max(64, 4 * (case.max_prompt_tokens + case.max_completion_tokens))
        values["generation.transformers.batch_tokens"] = tokens
    if sampler is not None and sampler.colocated and sampler.sleep != "weights":
        values["generation.colocate.sleep"] = "weights"
    if sampler is not None:
        section = f"generation.{'colocate' if sampler.colocated else 'server'}"
        values[f"{section}.tensor_parallel_size"] = 2 * sampler.tensor_parallel_size
        share = round(min(0.9, sampler.gpu_memory_utilization + 0.2), 2)
        values[f"{section}.gpu_memory_utilization"] = share
    if case.reference_model is not None:
        values["model.ref_offload"] = True
    values["train.prompts_per_step"] = max(1, run.train.prompts_per_step // 2)
    for key, value in values.items():
        shown = str(value).lower() if isinstance(value, bool) else value
        yield f"{key}={shown}", key, value


def with_key(section: SectionT, key: str, value: object) -> SectionT:
    """A section of the config with another value of one key in it, such as a.b.c; not checked."""
    name, _, inside = key.partition(".")
    new = with_key(getattr(section, name), inside, value) if inside else value
    return section.model_copy(update={name: new})
