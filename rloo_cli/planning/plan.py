"""A run's plan: does it fit, on how few GPUs would it, how long, how much disk, what to change."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from rloo_cli.config.schema import RunConfig
from rloo_cli.planning import case as cases
from rloo_cli.planning import duration, peak_memory, vllm_memory
from rloo_cli.planning.case import Case
from rloo_cli.planning.device import Device
from rloo_cli.planning.duration import Duration
from rloo_cli.planning.peak_memory import Memory
from rloo_cli.planning.static_memory import MASTER, MOMENTS, learned, trained
from rloo_cli.planning.vllm_memory import Engine

MOST_GPUS = 4096
MORE = (0.05, 0.1)  # to be added to a recommended share where vLLM does not start


@dataclass(frozen=True)
class Asked:
    """What the command line says beside the config."""

    gpus: int | None = None  # that train
    prompts: int | None = None  # in the data
    prompt_tokens: float | None = None  # mean
    completion_tokens: float | None = None


@dataclass(frozen=True)
class Plan:
    """Everything that is told of a run."""

    case: Case
    memory: Memory
    sampler: Engine | None
    asked: Asked
    duration: Duration
    steps: int | None  # None = known when the data is loaded
    checkpoint: float  # bytes
    disk: float  # of all checkpoints that are kept, and one more

    @property
    def need(self) -> float:
        """Bytes of the fullest GPU (of the CPU's memory without one)."""
        return max(needs(self.case, self.memory, self.sampler).values())

    @property
    def fits(self) -> bool:
        return fits(self.case, self.memory, self.sampler)

    @property
    def tokens(self) -> float:
        """Of a step: each prompt once, and every completion."""
        means, run = self.duration.lengths, self.case.run
        each = means.prompt + run.algorithm.num_generations * means.completion
        return run.train.prompts_per_step * each


def make(run: RunConfig, device: Device, asked: Asked | None = None) -> Plan:
    """The plan of a run on such devices. Raises MachineError where facts are not to be had."""
    asked = asked or Asked()
    found = cases.of(run, device, asked.gpus)
    memory, sampler = peak_memory.of(found), vllm_memory.of(found)
    means = duration.lengths(found, asked.prompt_tokens, asked.completion_tokens)
    cut = memory.forward
    size = checkpoint(found)
    return Plan(
        case=found,
        memory=memory,
        sampler=sampler,
        asked=asked,
        duration=duration.of(found, means, sampler, cut.micros, cut.recompute),
        steps=steps(run, asked.prompts),
        checkpoint=size,
        disk=(run.checkpoint.keep_last + 1) * size,
    )


def steps(run: RunConfig, prompts: int | None) -> int | None:
    """Rollout batches of a run; None where only the data tells."""
    if run.max_steps is not None:
        return run.max_steps
    if run.total_episodes is not None:
        return math.ceil(run.total_episodes / run.episodes_per_step)
    if prompts is None or run.train.epochs is None:
        return None
    return math.ceil(run.train.epochs * prompts / run.train.prompts_per_step)


def checkpoint(case: Case) -> float:
    """Bytes of one: weights (an adapter's alone), masters and moments of what is trained."""
    whole, adapter = trained(case)
    masters = MASTER if case.size < 4 and not adapter and _masters(case) else 0
    each = (4 if adapter else case.size) + masters + MOMENTS.get(case.run.train.optimizer, 8)
    return float(each * (whole + adapter + learned(case)))


def _masters(case: Case) -> bool:
    return case.run.distributed.master_weights == "float32"


def needs(case: Case, memory: Memory, sampler: Engine | None) -> dict[str, float]:
    """Bytes of one GPU in each phase, a colocated engine's among them; of a server's GPU too."""
    found: dict[str, float] = {}
    for name, parts in memory.phases.items():
        found[name] = sum(parts.values())
        if sampler is not None and sampler.colocated:
            found[name] += sampler.taken if name == "rollout" else sampler.awake
    if sampler is not None and not sampler.colocated:
        found["server"] = sampler.weights + sampler.forward + sampler.least
    return found


def fits(case: Case, memory: Memory, sampler: Engine | None) -> bool:
    """Whether every phase fits, and an engine holds its weights and one sequence at least."""
    if sampler is not None and sampler.cache < sampler.least:
        return False
    return all(
        need <= (case.device.usable if name != "server" else case.device.memory)
        for name, need in needs(case, memory, sampler).items()
    )


def smallest(plan: Plan) -> int | None:
    """The fewest GPUs that train on which it fits; None where none of 1, 2, 4 ... do.

    From 8 on, whole machines of 8. With `single` there is only one.
    """
    case = plan.case
    if case.device.kind != "cuda":
        return None
    if case.engine == "single":
        return 1 if plan.fits else None
    count = 1
    while count <= MOST_GPUS:
        other = case.on(count)
        if fits(other, peak_memory.of(other), vllm_memory.of(other)):
            return _fewer(case, count)
        count *= 2
    return None


def _fewer(case: Case, count: int) -> int:
    """Whole machines between the last power of two that did not fit, and the first that did."""
    for less in range(count // 2 + 8, count, 8) if count >= 16 else ():
        other = case.on(less)
        if fits(other, peak_memory.of(other), vllm_memory.of(other)):
            return less
    return count


def recommended(plan: Plan) -> float | None:
    """generation.*.gpu_memory_utilization for this run; None without an engine on a GPU."""
    sampler, case = plan.sampler, plan.case
    if sampler is None:
        return None
    if not sampler.colocated:
        return sampler.recommended(case.device.usable)
    held = {name: sum(parts.values()) for name, parts in plan.memory.phases.items()}
    room = case.device.usable - held["rollout"]
    if sampler.sleep == "none":
        room = case.device.usable - plan.memory.peak
    return sampler.recommended(max(room, 0.0))


Change = tuple[str, Callable[[RunConfig], RunConfig]]


def remedies(plan: Plan) -> list[tuple[str, float]]:
    """The two keys that bring most, each alone: what to add to the command, bytes then needed."""
    found: list[tuple[str, float]] = []
    for words, change in changes(plan):
        other = cases.of(change(plan.case.run), plan.case.device, plan.case.ranks)
        memory, sampler = peak_memory.of(other), vllm_memory.of(other)
        need = max(needs(other, memory, sampler).values())
        short = sampler is not None and sampler.cache < sampler.least
        if need < 0.98 * plan.need or (short is False and not plan.fits and need <= plan.need):
            found.append((words, need))
    return sorted(found, key=lambda pair: pair[1])[:2]


def changes(plan: Plan) -> Iterator[Change]:
    """What could make a run smaller."""
    run, case, sampler = plan.case.run, plan.case, plan.sampler
    if case.ranks > 1 and case.engine not in ("zero3", "fsdp2"):
        yield "distributed=zero3", lambda r: _with(r, "distributed", engine="zero3")
    if case.engine.startswith("zero") and run.distributed.offload == "none":
        offload = "distributed.offload=optimizer"
        yield offload, lambda r: _with(r, "distributed", offload="optimizer")
    if not plan.memory.forward.recompute:
        words = "model.gradient_checkpointing=true"
        yield words, lambda r: _with(r, "model", gradient_checkpointing=True)
    fewer = max(plan.memory.forward.rows // 4 // 64 * 64, 64)
    if fewer < plan.memory.forward.rows and run.train.micro_batch_size is None:
        words = f"train.micro_batch_tokens={fewer}"
        yield words, lambda r: _with(r, "train", micro_batch_tokens=fewer)
    if run.generation.backend == "transformers":
        places = max(64, 4 * (case.longest + case.completion))
        words = f"generation.transformers.batch_tokens={places}"
        yield words, lambda r: _in(r, "transformers", batch_tokens=places)
    if sampler is not None and sampler.colocated and sampler.sleep != "weights":
        yield "generation.colocate.sleep=weights", lambda r: _in(r, "colocate", sleep="weights")
    if sampler is not None:
        section = "colocate" if sampler.colocated else "server"
        wider = 2 * sampler.parallel
        words = f"generation.{section}.tensor_parallel_size={wider}"
        yield words, lambda r: _in(r, section, tensor_parallel_size=wider)
        share = round(min(0.9, sampler.share + 0.2), 2)
        words = f"generation.{section}.gpu_memory_utilization={share}"
        yield words, lambda r: _in(r, section, gpu_memory_utilization=share)
    if case.reference is not None:
        words = "model.ref_offload=true"
        yield words, lambda r: _with(r, "model", ref_offload=True)
    half = max(1, run.train.prompts_per_step // 2)
    words = f"train.prompts_per_step={half}"
    yield words, lambda r: _with(r, "train", prompts_per_step=half)


def _with(run: RunConfig, section: str, **values: Any) -> RunConfig:
    own = getattr(run, section)
    return run.model_copy(update={section: own.model_copy(update=values)})


def _in(run: RunConfig, section: str, **values: Any) -> RunConfig:
    """The same for a section of `generation`."""
    own = getattr(run.generation, section)
    return _with(run, "generation", **{section: own.model_copy(update=values)})


def on(plan: Plan, gpus: int) -> Plan:
    """The same run on another number of GPUs."""
    return make(plan.case.run, plan.case.device, replace(plan.asked, gpus=gpus))
