"""Seconds of a step, by a cost model, with its assumptions (docs/scale.md).

    step = prefill + decode + passes without gradient + passes with it + reward models

Decoding is bound by a GPU's memory reads: all weights once per token of the batch, and keys and
values of every unfinished sequence; on a CPU, reading and computing add up. The rest is bound by
matrix products, or by the network if weights or gradients are sharded.
"""

import math
from dataclasses import dataclass, field, replace

from rloo_cli.algorithms.common.base import load_algorithm
from rloo_cli.config.agent import observation_token_limit
from rloo_cli.config.rules import SHARDED_ENGINES
from rloo_cli.data.bin_packing import ForwardCost
from rloo_cli.planning import overlap_times
from rloo_cli.planning.model_counts import ModelSpec
from rloo_cli.planning.overlap_times import StepParts
from rloo_cli.planning.plan_inputs import PlanInputs
from rloo_cli.planning.static_memory import trained_params, value_model_params
from rloo_cli.planning.vllm_memory import EngineMemory

MIN_DECODE_ITERATION_S = 0.004  # minimum of one decoding iteration: launches, scheduling
ASSUMED_LENGTH_SHARE = 0.5  # assumed mean length as a share of the limit
SAMPLING_PHASES = ("prefill", "decoding")
PLANNED_MAX_LAG = 2  # of overlap=carry


@dataclass(frozen=True)
class MeanLengths:
    """Mean tokens of prompts and completions, and sampled turns of a completion."""

    prompt: float
    completion: float  # including tool output
    sampled: float  # of these, by the policy
    turns: float = 1.0


@dataclass(frozen=True)
class StepDuration:
    """Seconds of one step by part."""

    phase_seconds: dict[str, float]
    mean_lengths: MeanLengths
    # By mode of generation.overlap, if the sampler has its own GPUs; and `turns`: trainer and
    # sampler take turns on all of them.
    overlap_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def total_seconds(self) -> float:
        """Seconds of a step."""
        return sum(self.phase_seconds.values())


def mean_token_lengths(
    inputs: PlanInputs,
    prompt: float | None,
    completion: float | None,
    turns: float | None = None,
    observation: float | None = None,
) -> MeanLengths:
    """The mean lengths of the options; half of the limits if an option is not set.

    `completion`: sampled by the policy, over all turns; `observation`: between two turns.
    """
    half, agent = ASSUMED_LENGTH_SHARE, inputs.agent
    prompt = prompt or half * inputs.max_prompt_tokens
    if agent is None:
        sampled = completion or half * inputs.max_completion_tokens
        return MeanLengths(prompt, sampled, sampled)
    turns = max(1.0, turns or half * agent.max_turns)
    length = inputs.run.generation.max_completion_length
    sampled = completion or min(turns * half * length, inputs.max_sampled_tokens)
    observed = (turns - 1) * (observation or half * observation_token_limit(agent, length))
    room = max(inputs.max_completion_tokens - sampled, 0.0)
    return MeanLengths(prompt, sampled + min(observed, room), sampled, turns)


def forward_cost(model: ModelSpec) -> ForwardCost:
    """The cost of a forward pass as the run counts it, with the experts used by a token."""
    s = model.sizes
    return ForwardCost(model.active_params, s.layers, s.q_width, s.hidden, s.vocab_size)


def estimate_step_duration(
    inputs: PlanInputs,
    means: MeanLengths,
    sampler: EngineMemory | None,
    micro_batches: int,
    recompute: bool,
) -> StepDuration:
    """Seconds of a step. `sampler`: the vLLM engine; None = the transformers backend samples.

    `micro_batches`: per update; `recompute`: with gradient checkpointing.
    """
    run, device = inputs.run, inputs.device
    settings, p, c = run.algorithm, means.prompt, means.completion
    k, groups = settings.num_generations, run.train.prompts_per_step
    speed, shares = device.flops_per_s * inputs.ranks, device.shares

    def batch_flops(cost: ForwardCost) -> float:
        return groups * cost.group_flops(round(p), [round(c)] * k)

    policy = batch_flops(forward_cost(inputs.model))
    separate = load_algorithm(settings).forward_plan(run).separate is not None
    parts = _generation(inputs, means, sampler)
    # The reference is the model with the adapter disabled.
    is_adapter = run.model.lora is not None and settings.needs_reference
    no_grad_passes = (inputs.reference_model is not None or is_adapter) + separate
    parts["reference and old_logp"] = no_grad_passes * policy / (shares.no_grad * speed)
    # An adapter's backward pass computes no gradients of the weights under it.
    each = (2 if run.model.lora else 3) + (1 if recompute else 0)
    parts["update"] = settings.num_iterations * each * policy / (shares.grad * speed)
    if inputs.value_model is not None:
        value = batch_flops(replace(forward_cost(inputs.value_model), vocab_size=1))
        parts["reference and old_logp"] += value / (shares.no_grad * speed)
        parts["update"] += settings.num_iterations * each * value / (shares.grad * speed)
    parts["reward models"] = sum(
        batch_flops(forward_cost(m)) / (shares.no_grad * speed)
        for m in inputs.reward_models.values()
    )
    busy = parts["reference and old_logp"] + parts["update"]
    parts["waiting for the network"] = max(_network(inputs, micro_batches) - busy, 0.0)
    parts["weights to the sampler"] = _transfer(inputs, sampler)
    step = StepDuration({name: s for name, s in parts.items() if s > 0}, means)
    if sampler is None or sampler.colocated:
        return step
    return replace(step, overlap_seconds=_overlap_seconds(inputs, step, sampler))


def _overlap_seconds(
    inputs: PlanInputs, step: StepDuration, sampler: EngineMemory
) -> dict[str, float]:
    """Seconds of a step by mode of generation.overlap, and with `turns` on the same GPUs."""
    seconds, run = step.phase_seconds, inputs.run
    speed = decode_speed(inputs, step.mean_lengths, sampler)
    sampled = sum(seconds.get(name, 0.0) for name in SAMPLING_PHASES)
    sent = seconds.get("weights to the sampler", 0.0)
    scored = seconds.get("reward models", 0.0)

    def parts_with_copies(copies: int, trained: float) -> StepParts:
        return StepParts(
            _copy_lengths(inputs, step.mean_lengths, copies),
            speed.iteration_s,
            sampler.sequences,
            prefill_s=seconds.get("prefill", 0.0) * sampler.copies / copies,
            train_s=trained * (step.total_seconds - sampled - sent - scored),
            reward_s=trained * scored,
            sync_s=sent,
        )

    max_lag = getattr(run.generation, "max_lag", None) or PLANNED_MAX_LAG
    times = overlap_times.simulate_overlap(parts_with_copies(sampler.copies, 1.0), max_lag)
    gpus = inputs.ranks + sampler.extra_gpus
    turns = parts_with_copies(max(1, gpus // sampler.tensor_parallel_size), inputs.ranks / gpus)
    return times | {"turns": overlap_times.simulate_overlap(turns, max_lag)["none"]}


@dataclass(frozen=True)
class DecodeSpeed:
    """The cost of one decoding iteration for one copy of the model, on its GPUs."""

    token_flops: float
    flops_per_s: float
    weight_bytes: float
    context_bytes: float  # mean keys and values of a completion
    bytes_per_s: float
    share: float  # of these speeds that is reached
    adds_up: bool  # reading and computing alternate, as on a CPU

    def read_s(self, completions: int) -> float:
        """Seconds of reading weights, keys and values, at full speed."""
        return (self.weight_bytes + completions * self.context_bytes) / self.bytes_per_s

    def compute_s(self, completions: int) -> float:
        """Seconds of matrix products, at full speed."""
        return completions * self.token_flops / self.flops_per_s

    def iteration_s(self, completions: int) -> float:
        """Seconds of an iteration that gives this many completions a token."""
        read, compute = self.read_s(completions), self.compute_s(completions)
        if self.adds_up:
            return (read + compute) / self.share
        return max(max(read, compute) / self.share, MIN_DECODE_ITERATION_S)


def decode_speed(
    inputs: PlanInputs, means: MeanLengths, sampler: EngineMemory | None
) -> DecodeSpeed:
    """The cost of decoding. `sampler`: the vLLM engine; None = the transformers backend."""
    model, device = inputs.model, inputs.device
    gpus = 1 if sampler is None else sampler.tensor_parallel_size
    shared = 1 if sampler is not None else inputs.run.algorithm.num_generations
    return DecodeSpeed(
        token_flops=2.0 * (model.active_params + model.output_embedding_params),
        flops_per_s=gpus * device.flops_per_s,
        weight_bytes=inputs.bytes_per_weight * model.total_params,
        context_bytes=model.kv_bytes(inputs.bytes_per_weight)
        * (means.completion / 2 + means.prompt / shared),
        bytes_per_s=gpus * device.bytes_per_s,
        share=device.shares.decode,
        adds_up=device.kind != "cuda",
    )


def _copy_lengths(inputs: PlanInputs, means: MeanLengths, copies: int) -> list[list[int]]:
    """Sampled lengths of a step's completions at one of this many copies of the model."""
    run = inputs.run
    limit = max(inputs.max_sampled_tokens, math.ceil(means.sampled))
    prompts = max(1, math.ceil(run.train.prompts_per_step / copies))
    k = run.algorithm.num_generations
    return overlap_times.spread_lengths(prompts, k, means.sampled, limit)


def _generation(
    inputs: PlanInputs, means: MeanLengths, sampler: EngineMemory | None
) -> dict[str, float]:
    run, device = inputs.run, inputs.device
    completions = run.episodes_per_step
    copies, gpus, at_once = inputs.ranks, 1, math.ceil(completions / inputs.ranks)
    if sampler is not None:
        copies, gpus, at_once = sampler.copies, sampler.tensor_parallel_size, sampler.sequences
    speed = decode_speed(inputs, means, sampler)
    prefill = prefilled_tokens(inputs, means) * speed.token_flops
    if device.kind == "cuda":
        parts = StepParts(_copy_lengths(inputs, means, copies), speed.iteration_s, at_once)
        decoding = overlap_times.simulate_overlap(parts)["none"]
    else:
        # A CPU reads the weights until the longest completion has ended, and computes for the
        # unfinished ones.
        rounds = math.ceil(completions / copies / at_once)
        turns = means.turns * run.generation.max_completion_length
        longest = max(min(turns, inputs.max_sampled_tokens), means.sampled)
        computing = means.sampled * speed.compute_s(at_once)
        decoding = rounds * (longest * speed.read_s(at_once) + computing) / device.shares.decode
    return {
        "prefill": prefill / (device.shares.no_grad * device.flops_per_s * copies * gpus),
        "decoding": decoding,
    }


def prefilled_tokens(inputs: PlanInputs, means: MeanLengths) -> float:
    """Tokens of a step that the sampler prefills.

    A group's prompt is read once. A later turn reads the tool output if the sampler has kept
    earlier keys and values (vLLM's prefix cache), else the whole episode so far.
    """
    run, later = inputs.run, means.turns - 1
    prompts = run.train.prompts_per_step * means.prompt
    if run.generation.is_engine and run.generation.own_keys.enable_prefix_caching:
        return prompts + run.episodes_per_step * (means.completion - means.sampled)
    grown = means.completion / means.turns * later * means.turns / 2  # sum of all histories
    return prompts + run.episodes_per_step * (later * means.prompt + grown)


def _network(inputs: PlanInputs, micro_batches: int) -> float:
    """Seconds in which gradients and gathered weights are sent, for all updates of a step."""
    if inputs.ranks == 1:
        return 0.0
    device, run, size = inputs.device, inputs.run, inputs.bytes_per_weight
    several = run.distributed.num_nodes > 1
    speed = device.inter_node_bytes_per_s if several else device.intra_node_bytes_per_s
    num_bytes = 2.0 * size * (sum(trained_params(inputs)) + value_model_params(inputs))
    if inputs.parallel_strategy in SHARDED_ENGINES:
        num_bytes += 3.0 * size * inputs.model.total_params * micro_batches
    return run.updates_per_step * num_bytes / speed


def _transfer(inputs: PlanInputs, sampler: EngineMemory | None) -> float:
    if sampler is None:
        return 0.0
    count, device = trained_params(inputs)[1] or inputs.model.total_params, inputs.device
    colocated = sampler.colocated
    speed = device.intra_node_bytes_per_s if colocated else device.inter_node_bytes_per_s
    return inputs.bytes_per_weight * count / speed
