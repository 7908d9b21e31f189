"""Seconds of a step, by a cost model, with what it assumes (docs/plan.md).

    step = prefill + decode + passes without gradient + passes with it + reward models

Decoding is bound by what a GPU reads: all weights once for each token of the batch, and keys and
values of every sequence. The rest is bound by matrix products. A third bound is the network, where
weights or gradients are in parts.
"""

import math
from dataclasses import dataclass, replace

from rloo_cli.algorithms.common.base import load_algorithm
from rloo_cli.config.rules import SHARDED_ENGINES
from rloo_cli.data.bin_packing import ForwardCost
from rloo_cli.planning.model_spec import ModelSpec
from rloo_cli.planning.plan_inputs import PlanInputs
from rloo_cli.planning.static_memory import trained_params, value_model_params
from rloo_cli.planning.vllm_memory import EngineMemory

DECODE, NO_GRAD, GRAD = 0.60, 0.55, 0.45  # of the device's speed that is reached
MIN_DECODE_ITERATION_S = (
    0.004  # seconds of one decoding iteration, however small: launches and scheduling
)
ASSUMED_LENGTH_SHARE = 0.5  # of the longest, which a prompt and a completion have where nobody says


@dataclass(frozen=True)
class MeanLengths:
    """Mean tokens of prompts and completions."""

    prompt: float
    completion: float


@dataclass(frozen=True)
class StepDuration:
    """Seconds of one step by part."""

    phase_seconds: dict[str, float]
    mean_lengths: MeanLengths

    @property
    def total_seconds(self) -> float:
        """Seconds of a step."""
        return sum(self.phase_seconds.values())


def mean_token_lengths(
    inputs: PlanInputs, prompt: float | None, completion: float | None
) -> MeanLengths:
    """Means as they are given, else half of the limits."""
    return MeanLengths(
        prompt or ASSUMED_LENGTH_SHARE * inputs.max_prompt_tokens,
        completion or ASSUMED_LENGTH_SHARE * inputs.max_completion_tokens,
    )


def forward_cost(model: ModelSpec) -> ForwardCost:
    """What a forward costs, as the run itself counts it; of experts those that a token goes to."""
    s = model.sizes
    body = s.layers * model.active_params + model.final_params
    return ForwardCost(body, s.layers, s.q_width, s.hidden, s.vocab_size)


def estimate_step_duration(
    inputs: PlanInputs,
    means: MeanLengths,
    sampler: EngineMemory | None,
    micro_batches: int,
    recompute: bool,
) -> StepDuration:
    """Seconds of a step. `micros`: micro-batches of an update; `again`: with checkpointing."""
    run, device = inputs.run, inputs.device
    settings, p, c = run.algorithm, means.prompt, means.completion
    k, groups = settings.num_generations, run.train.prompts_per_step
    unit = groups * forward_cost(inputs.model).group_flops(round(p), [round(c)] * k)
    speed = device.flops_per_s * inputs.ranks
    separate = load_algorithm(settings).forward_plan(run).separate is not None
    parts = _generation(inputs, means, sampler)
    without = (inputs.reference_model is not None or _adapter_off(inputs)) + separate
    parts["reference and old_logp"] = without * unit / (NO_GRAD * speed)
    # An adapter's backward pass makes no gradients of the weights under it.
    each = (2 if run.model.lora else 3) + (1 if recompute else 0)
    parts["update"] = settings.num_iterations * each * unit / (GRAD * speed)
    if inputs.value_model is not None:
        alone = groups * replace(forward_cost(inputs.value_model), vocab_size=1).group_flops(
            round(p), [round(c)] * k
        )
        parts["reference and old_logp"] += alone / (NO_GRAD * speed)
        parts["update"] += settings.num_iterations * each * alone / (GRAD * speed)
    parts["reward models"] = sum(
        groups * forward_cost(m).group_flops(round(p), [round(c)] * k) / (NO_GRAD * speed)
        for m in inputs.reward_models.values()
    )
    busy = parts["reference and old_logp"] + parts["update"]
    parts["waiting for the network"] = max(_network(inputs, micro_batches) - busy, 0.0)
    parts["weights to the sampler"] = _transfer(inputs, sampler)
    return StepDuration({name: s for name, s in parts.items() if s > 0}, means)


def _adapter_off(inputs: PlanInputs) -> bool:
    return inputs.run.model.lora is not None and inputs.run.algorithm.needs_reference


def _generation(
    inputs: PlanInputs, means: MeanLengths, sampler: EngineMemory | None
) -> dict[str, float]:
    run, model, device = inputs.run, inputs.model, inputs.device
    rows, k = run.episodes_per_step, run.algorithm.num_generations
    copies, gpus, at_once = inputs.ranks, 1, math.ceil(rows / inputs.ranks)
    if sampler is not None:
        copies, gpus, at_once = sampler.copies, sampler.tensor_parallel_size, sampler.sequences
    alive = 2.0 * (
        model.sizes.layers * model.active_params
        + model.final_params
        + model.output_embedding_params
    )
    prefill = run.train.prompts_per_step * means.prompt * alive
    rounds = math.ceil(rows / copies / at_once)
    token = model.kv_bytes(inputs.bytes_per_weight)
    context = means.completion / 2 + (means.prompt if sampler is not None else means.prompt / k)
    read = inputs.bytes_per_weight * model.total_params + at_once * token * context
    iteration = (
        max(read / (gpus * device.bytes_per_s), at_once * alive / (gpus * device.flops_per_s))
        / DECODE
    )
    if device.kind == "cuda":
        iteration = max(iteration, MIN_DECODE_ITERATION_S)
    return {
        "prefill": prefill / (NO_GRAD * device.flops_per_s * copies * gpus),
        "decoding": rounds * means.completion * iteration,
    }


def _network(inputs: PlanInputs, micro_batches: int) -> float:
    """Seconds in which gradients and gathered weights travel, for all updates of a step."""
    if inputs.ranks == 1:
        return 0.0
    device, run = inputs.device, inputs.run
    speed = (
        device.inter_node_bytes_per_s
        if run.distributed.num_nodes > 1
        else device.intra_node_bytes_per_s
    )
    gradients = (
        2.0 * inputs.bytes_per_weight * (sum(trained_params(inputs)) + value_model_params(inputs))
    )
    weights = (
        3.0 * inputs.bytes_per_weight * inputs.model.total_params * micro_batches
        if inputs.parallel_strategy in SHARDED_ENGINES
        else 0.0
    )
    return run.updates_per_step * (gradients + weights) / speed


def _transfer(inputs: PlanInputs, sampler: EngineMemory | None) -> float:
    if sampler is None:
        return 0.0
    count = trained_params(inputs)[1] or inputs.model.total_params
    speed = (
        inputs.device.intra_node_bytes_per_s
        if sampler.colocated
        else inputs.device.inter_node_bytes_per_s
    )
    return inputs.bytes_per_weight * count / speed
