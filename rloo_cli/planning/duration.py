"""Seconds of a step, by a cost model, with what it assumes (docs/plan.md).

    step = prefill + decode + passes without gradient + passes with it + reward models

Decoding is bound by what a GPU reads: all weights once for each token of the batch, and keys and
values of every sequence. The rest is bound by matrix products. A third bound is the network, where
weights or gradients are in parts.
"""

import math
from dataclasses import dataclass, replace

from rloo_cli.algorithms.common.base import load_algorithm
from rloo_cli.data.bin_packing import Shape
from rloo_cli.planning.case import SHARDED, Case
from rloo_cli.planning.model_facts import Facts
from rloo_cli.planning.static_memory import learned, trained
from rloo_cli.planning.vllm_memory import Engine

DECODE, NO_GRAD, GRAD = 0.60, 0.55, 0.45  # of the device's speed that is reached
SLOWEST = 0.004  # seconds of one decoding iteration, however small: launches and scheduling
HALF = 0.5  # of the longest, which a prompt and a completion have where nobody says


@dataclass(frozen=True)
class Lengths:
    """Mean tokens of prompts and completions."""

    prompt: float
    completion: float


@dataclass(frozen=True)
class Duration:
    """Seconds of one step by part."""

    parts: dict[str, float]
    lengths: Lengths

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return sum(self.parts.values())


def lengths(case: Case, prompt: float | None, completion: float | None) -> Lengths:
    """Means as they are given, else half of the limits."""
    return Lengths(prompt or HALF * case.longest, completion or HALF * case.completion)


def shape(model: Facts) -> Shape:
    """What a forward costs, as the run itself counts it; of experts those that a token goes to."""
    s = model.sizes
    body = s.layers * model.active + model.final
    return Shape(body, s.layers, s.q, s.hidden, s.vocabulary)


def of(case: Case, means: Lengths, sampler: Engine | None, micros: int, again: bool) -> Duration:
    """Seconds of a step. `micros`: micro-batches of an update; `again`: with checkpointing."""
    run, device = case.run, case.device
    settings, p, c = run.algorithm, means.prompt, means.completion
    k, groups = settings.num_generations, run.train.prompts_per_step
    unit = groups * shape(case.model).group(round(p), [round(c)] * k)
    speed = device.flops * case.ranks
    separate = load_algorithm(settings).forward_plan(run).separate is not None
    parts = _generation(case, means, sampler)
    without = (case.reference is not None or _adapter_off(case)) + separate
    parts["reference and old_logp"] = without * unit / (NO_GRAD * speed)
    # An adapter's backward pass makes no gradients of the weights under it.
    each = (2 if run.model.lora else 3) + (1 if again else 0)
    parts["update"] = settings.num_iterations * each * unit / (GRAD * speed)
    if case.value is not None:
        alone = groups * replace(shape(case.value), vocabulary=1).group(round(p), [round(c)] * k)
        parts["reference and old_logp"] += alone / (NO_GRAD * speed)
        parts["update"] += settings.num_iterations * each * alone / (GRAD * speed)
    parts["reward models"] = sum(
        groups * shape(m).group(round(p), [round(c)] * k) / (NO_GRAD * speed)
        for m in case.rewards.values()
    )
    busy = parts["reference and old_logp"] + parts["update"]
    parts["waiting for the network"] = max(_network(case, micros) - busy, 0.0)
    parts["weights to the sampler"] = _transfer(case, sampler)
    return Duration({name: s for name, s in parts.items() if s > 0}, means)


def _adapter_off(case: Case) -> bool:
    return case.run.model.lora is not None and case.run.algorithm.needs_reference


def _generation(case: Case, means: Lengths, sampler: Engine | None) -> dict[str, float]:
    run, model, device = case.run, case.model, case.device
    rows, k = run.episodes_per_step, run.algorithm.num_generations
    copies, gpus, at_once = case.ranks, 1, math.ceil(rows / case.ranks)
    if sampler is not None:
        copies, gpus, at_once = sampler.copies, sampler.parallel, sampler.sequences
    alive = 2.0 * (model.sizes.layers * model.active + model.final + model.table)
    prefill = run.train.prompts_per_step * means.prompt * alive
    rounds = math.ceil(rows / copies / at_once)
    token = model.kv(case.size)
    context = means.completion / 2 + (means.prompt if sampler is not None else means.prompt / k)
    read = case.size * model.total + at_once * token * context
    iteration = (
        max(read / (gpus * device.bytes_per_s), at_once * alive / (gpus * device.flops)) / DECODE
    )
    if device.kind == "cuda":
        iteration = max(iteration, SLOWEST)
    return {
        "prefill": prefill / (NO_GRAD * device.flops * copies * gpus),
        "decoding": rounds * means.completion * iteration,
    }


def _network(case: Case, micros: int) -> float:
    """Seconds in which gradients and gathered weights travel, for all updates of a step."""
    if case.ranks == 1:
        return 0.0
    device, run = case.device, case.run
    speed = device.between if run.distributed.num_nodes > 1 else device.inside
    gradients = 2.0 * case.size * (sum(trained(case)) + learned(case))
    weights = 3.0 * case.size * case.model.total * micros if case.engine in SHARDED else 0.0
    return run.updates_per_step * (gradients + weights) / speed


def _transfer(case: Case, sampler: Engine | None) -> float:
    if sampler is None:
        return 0.0
    count = trained(case)[1] or case.model.total
    speed = case.device.inside if sampler.colocated else case.device.between
    return case.size * count / speed
