"""The temporary memory of one rank: activations, logits, keys and values, gradients.

Each phase of a step has its own peak; the largest decides. The size of a micro-batch follows the
rule by which a run splits its batches (`policy/token_budget.py`), with these figures instead of
measured ones.
"""

from dataclasses import dataclass, field

from rloo_cli.config.rules import SHARDED_ENGINES
from rloo_cli.planning.plan_inputs import MAX_LOGITS_TILE, PlanInputs
from rloo_cli.planning.static_memory import (
    GRADIENT,
    StaticMemory,
    adapter_rank,
    adapter_targets,
    estimate_static_memory,
    trained_params,
    value_model_params,
)
from rloo_cli.policy.token_budget import (
    MAX_USEFUL_TOKENS,
    ActivationMemory,
    choose_token_budget,
    gpu_bytes_left,
    samples_beside_training,
)

FIRST_KV_POSITIONS = 64  # completion positions in the first KV cache
SAMPLING_BYTES_PER_LOGIT = 16  # the model's own, in float32, processed, and its probability
# Measured on a CPU (docs/scale.md): memory of libraries loaded later, and the share of
# activations that glibc keeps in fragments too small for the next micro-batch.
LATE_LIBRARY_BYTES, FRAGMENTED_SHARE = 0.1 * 2**30, 0.5
IMAGE_LIBRARY_BYTES = 0.1 * 2**30  # further libraries for images
# Memory of Python and torch before a run starts, not counted in phases; partly shared.
PROCESS_BYTES = 0.5 * 2**30
NamedBytes = dict[str, float]


@dataclass(frozen=True)
class ForwardMemory:
    """The split of the training forward, and the memory it keeps."""

    tokens: int  # of the fullest micro-batch
    completion_tokens: int  # completion tokens among them
    micro_batches: int  # per update
    recompute: bool
    layer_bytes: float  # kept by all layers
    single_layer_bytes: float  # further memory of one layer during its backward pass
    kept_logits_bytes: float
    head_bytes: float  # tiles of logits, the head's gradient, and its surroundings


@dataclass(frozen=True)
class PeakMemory:
    """Peaks of one rank by phase, each as named parts in bytes."""

    phases: dict[str, NamedBytes]
    forward: ForwardMemory
    static: StaticMemory
    engine_bytes: float = 0.0  # held by a vLLM engine on the same device during training
    host_bytes: float = 0.0  # in the CPU's memory
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def worst_phase(self) -> str:
        """The phase with the highest peak."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def peak_bytes(self) -> float:
        """Peak bytes of one rank."""
        return sum(self.phases[self.worst_phase].values())


def estimate_peak_memory(inputs: PlanInputs) -> PeakMemory:
    """The memory of one rank of a run, without a vLLM engine."""
    static = estimate_static_memory(inputs)
    forward = plan_forward_memory(inputs, static)
    resting = {
        "weights": static.weights,
        "optimizer": static.optimizer,
        "reference": static.reference,
        "value model": static.value_model,
        "reward models": static.reward_models,
        "buffers": static.buffers,
        "libraries": _late_library_bytes(inputs),
    }
    phases = {"rollout": resting | _rollout_memory(inputs)}
    if inputs.reward_models:
        phases["reward"] = resting | _reward_model_memory(inputs, static)
    if inputs.run.model.ref_offload and inputs.reference_model is not None:
        size = inputs.bytes_per_weight * inputs.reference_model.total_params / inputs.weight_shards
        rows = forward.single_layer_bytes + forward.tokens * 4.0
        phases["reference"] = resting | {"reference": size, "rows": rows}
    phases["update"] = resting | _update_memory(inputs, static, forward)
    phases["optimizer step"] = resting | _optimizer_step_memory(inputs, static)
    nonzero = {n: {part: v for part, v in p.items() if v > 0} for n, p in phases.items()}
    return PeakMemory(nonzero, forward, static, host_bytes=static.host_bytes)


def _late_library_bytes(inputs: PlanInputs) -> float:
    if inputs.device.kind != "cpu":
        return 0.0
    return LATE_LIBRARY_BYTES + (IMAGE_LIBRARY_BYTES if inputs.model.tower is not None else 0.0)


def plan_forward_memory(inputs: PlanInputs, static: StaticMemory) -> ForwardMemory:
    """The split into micro-batches, by the rule of `policy/token_budget.py`."""
    run, group_tokens = inputs.run, inputs.group_tokens
    room = _activation_memory(inputs, static)
    wanted = run.model.gradient_checkpointing
    recompute = wanted is True if inputs.recompute is None else inputs.recompute
    fitting = room.tokens_that_fit(_bytes_per_forward_token(inputs, recompute))
    if wanted == "auto" and inputs.recompute is None and fitting < _tokens_in_one_pass(inputs):
        recompute = True
        fitting = room.tokens_that_fit(_bytes_per_forward_token(inputs, recompute))
    budget = inputs.token_budget or run.train.micro_batch_tokens
    budget = budget or choose_token_budget(MAX_USEFUL_TOKENS[room.kind], group_tokens, fitting)
    tokens, micro_batches = _micro_batch_sizes(inputs, budget)
    k, c = run.algorithm.num_generations, inputs.max_sampled_tokens  # those with logits
    shared = inputs.resolved_layout == "shared"
    longest = inputs.max_prompt_tokens + inputs.max_completion_tokens
    share = k * c / group_tokens if shared else c / longest
    completion_tokens = int(tokens * share)
    size, model = inputs.bytes_per_weight, inputs.model
    per_layer = kept_bytes_per_layer(inputs)
    kept = model.sizes.layers * tokens * (size * model.sizes.hidden if recompute else per_layer)
    one_layer = tokens * model.transient_bytes(size) + (tokens * per_layer if recompute else 0.0)
    logits = completion_tokens * room.logits_bytes_per_token
    kept_logits = logits if logits <= room.most_kept_logits else 0.0
    head = _head(inputs, tokens, completion_tokens)
    return ForwardMemory(
        tokens, completion_tokens, micro_batches, recompute, kept, one_layer, kept_logits, head
    )


def _tokens_in_one_pass(inputs: PlanInputs) -> int:
    """Tokens that must fit a forward, as in `train/build.py`: a group with a KL is not split."""
    settings = inputs.run.algorithm
    if settings.needs_reference or settings.teacher_server is not None:
        return inputs.group_tokens
    return inputs.max_prompt_tokens + inputs.max_completion_tokens


def _activation_memory(inputs: PlanInputs, static: StaticMemory) -> ActivationMemory:
    """The memory available to a training forward, as computed at the start of a run."""
    run, device = inputs.run, inputs.device
    left = device.memory_bytes
    if device.kind == "cuda":
        left = gpu_bytes_left(left, run.generation)
    logit_size = 4 if run.model.lm_head_fp32 else inputs.bytes_per_weight
    return ActivationMemory(
        device.kind,
        device.memory_bytes,
        max(left - static.resting_bytes - static.gradients, 0.0),
        float(inputs.model.sizes.vocab_size * logit_size),
        run.train.keep_logits_gb,
        samples_beside_training(run.generation),
    )


def kept_bytes_per_layer(inputs: PlanInputs) -> float:
    """Bytes per token kept by a layer, including adapters' inputs in float32."""
    kept, lora = inputs.model.saved_bytes(inputs.bytes_per_weight), inputs.run.model.lora
    if lora is None:
        return kept
    each = 4.0 * adapter_rank(lora)
    cast = inputs.bytes_per_weight < 4
    added = (x.copies * (each + 4.0 * x.inputs * cast) for x in adapter_targets(inputs))
    return kept + sum(added) / inputs.model.sizes.layers


def _bytes_per_forward_token(inputs: PlanInputs, recompute: bool) -> float:
    """Bytes per token of a training forward, the head's included; of one layer if recomputed."""
    s, size = inputs.model.sizes, inputs.bytes_per_weight
    per_layer = kept_bytes_per_layer(inputs)
    layers = s.layers * size * s.hidden + per_layer if recompute else s.layers * per_layer
    return layers + 3 * size * s.hidden


def _micro_batch_sizes(inputs: PlanInputs, budget: int) -> tuple[int, int]:
    """Tokens of the fullest micro-batch, and the number of micro-batches.

    They hold whole groups if these fit, evenly distributed.
    """
    size, each = inputs.run.train.micro_batch_size, inputs.group_tokens
    if size is None and each > budget:
        # A completion and its prompt are never split.
        longest = inputs.max_prompt_tokens + inputs.max_completion_tokens
        tokens = max(min(each, budget), longest)
        return tokens, inputs.groups_per_update * -(-each // tokens)
    many = max(1, budget // each if size is None else size // inputs.run.algorithm.num_generations)
    micro_batches = -(-inputs.groups_per_update // many)
    return -(-inputs.groups_per_update // micro_batches) * each, micro_batches


def _head(inputs: PlanInputs, tokens: int, completion_tokens: int) -> float:
    """Bytes of the head's tiles, of float32 hidden states with gradient, and of the last norm."""
    s, size = inputs.model.sizes, inputs.bytes_per_weight
    tile = min(MAX_LOGITS_TILE[inputs.device.kind], max(completion_tokens, 1) * s.vocab_size)
    work = size if inputs.device.kind == "cuda" else 4
    return (
        tile * (4.0 + work)
        + completion_tokens * s.hidden * (size + 4 + work)
        + 3.0 * tokens * size * s.hidden
    )


def tower_bytes(inputs: PlanInputs, tokens: int) -> float:
    """Bytes kept by a vision tower for its backward pass, if all prompts are images.

    A forward over `tokens` tokens contains its prompts' images once. A frozen tower keeps nothing.
    """
    tower, run = inputs.model.tower, inputs.run
    if tower is None or "vision" in run.model.freeze or run.model.lora is not None:
        return 0.0
    prompts = max(1, tokens // inputs.group_tokens)
    size, recompute = inputs.bytes_per_weight, run.model.gradient_checkpointing is True
    each = tower.saved_bytes(size) / (tower.layers if recompute else 1)
    return prompts * inputs.max_prompt_tokens * each


def _update_memory(inputs: PlanInputs, static: StaticMemory, forward: ForwardMemory) -> NamedBytes:
    """Forward and backward of the fullest micro-batch.

    When a backward pass starts, the forward's memory and the gradients of earlier micro-batches
    exist; when it ends, the gradients are complete. In between, one shrinks while the other grows.
    """
    adapter = trained_params(inputs)[1]
    table_params = 0 if adapter else inputs.model.output_embedding_params
    table = float(inputs.bytes_per_weight * table_params)
    several = forward.micro_batches > 1
    # A value model's backward pass comes first, so its gradients already exist.
    early = static.gradients if several else GRADIENT * float(value_model_params(inputs))
    fragmented = FRAGMENTED_SHARE if inputs.device.kind == "cpu" else 0.0
    begin: NamedBytes = {
        "gradients": early,
        "gathered": static.gathered,
        "activations": forward.layer_bytes + forward.single_layer_bytes,
        "vision tower": tower_bytes(inputs, forward.tokens),
        "kept logits": forward.kept_logits_bytes,
        "head": forward.head_bytes + table,
        "in pieces": fragmented * (forward.layer_bytes + forward.kept_logits_bytes),
    }
    end: NamedBytes = {
        "gradients": static.gradients,
        "gathered": static.gathered,
        "activations": forward.single_layer_bytes,
        # The gradient of a tied head waits for that of the token table.
        "head": table * (several + (not inputs.model.head_params)),
    }
    return max((begin, end), key=lambda parts: sum(parts.values()))


def _optimizer_step_memory(inputs: PlanInputs, static: StaticMemory) -> NamedBytes:
    """Clipping and Adam, which computes square roots of all second moments at once on a GPU.

    On a CPU it does so tensor by tensor.
    """
    if inputs.run.distributed.offload != "none":
        return {"gradients": static.gradients}
    whole, adapter = trained_params(inputs)
    if inputs.device.kind == "cuda":
        engine = inputs.parallel_strategy
        shards = inputs.ranks if engine.startswith("zero") or engine in SHARDED_ENGINES else 1
        temporary = GRADIENT * (whole + adapter + value_model_params(inputs)) / shards
    else:
        model = inputs.model
        widest = model.sizes.hidden**2 if adapter else model.output_embedding_params
        temporary = 2.0 * GRADIENT * widest
    return {"gradients": static.gradients, "temporary": temporary}


def _rollout_memory(inputs: PlanInputs) -> NamedBytes:
    """Decoding with the trainer's weights; empty if vLLM samples."""
    run, model, size = inputs.run, inputs.model, inputs.bytes_per_weight
    if not run.generation.samples_here:
        return {}
    parts: NamedBytes = {}
    # A full copy: token-by-token decoding would gather the weights for each token, and an
    # overlapped sampler must not see the update change them.
    if inputs.weight_shards > 1 or run.generation.overlap != "none":
        parts["replica"] = size * model.total_params
    k, p, c = run.algorithm.num_generations, inputs.max_prompt_tokens, inputs.max_completion_tokens
    prompts, completions = inputs.prompts_per_rank, inputs.prompts_per_rank * k
    if inputs.max_turns > 1:  # a later turn continues from the whole episode so far
        k, prompts, c = 1, completions, run.generation.max_completion_length
        p += inputs.max_completion_tokens - c
    batch_tokens = run.generation.own_keys.batch_tokens
    if batch_tokens is not None:
        completions = min(completions, max(1, batch_tokens // (p + c)))
        prompts = -(-completions // k)
    copies = prompts if inputs.resolved_layout == "shared" else completions
    positions = min(c, 1 << max(c - 1, 1).bit_length()) if c > FIRST_KV_POSITIONS else c
    parts["KV cache"] = float(model.kv_bytes(size) * (copies * p + completions * positions))
    prefill = prompts * p * (model.transient_bytes(size) + 2 * size * model.sizes.hidden)
    sampling = completions * model.sizes.vocab_size * SAMPLING_BYTES_PER_LOGIT
    parts["prefill and sampling"] = float(max(prefill, sampling))
    return parts


def _reward_model_memory(inputs: PlanInputs, static: StaticMemory) -> NamedBytes:
    """A running reward model: offloaded models that are moved to the device, and a batch."""
    moved = activations = 0.0
    longest = inputs.max_prompt_tokens + inputs.max_completion_tokens
    for name, model in inputs.reward_models.items():
        entry = inputs.run.rewards[name]
        size = inputs.dtype_bytes(entry.dtype)  # type: ignore[attr-defined]
        if getattr(entry, "offload", False) and inputs.device.kind == "cuda":
            moved += size * (model.total_params - model.head_params)
        per_token = model.transient_bytes(size) + 2.0 * size * model.sizes.hidden
        activations = max(activations, getattr(entry, "batch_size", 16) * longest * per_token)
    return {"reward models": static.reward_models + moved, "rows": activations}
