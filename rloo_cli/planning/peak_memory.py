"""Bytes of one rank that come and go: activations, the head, keys and values, the optimizer's own.

Each phase of a step has a peak of its own, and the largest of them decides. What a micro-batch may
hold follows the rule by which a run cuts its batches (`policy.memory`), with these figures in the
place of measured ones.
"""

from dataclasses import dataclass, field

from rloo_cli.config.rules import SHARDED_ENGINES
from rloo_cli.planning.plan_inputs import (
    MAX_FORWARD_TOKENS,
    MAX_LOGITS_TILE,
    PlanInputs,
)
from rloo_cli.planning.static_memory import (
    GRADIENT,
    StaticMemory,
    adapter_targets,
    estimate_static_memory,
    trained_params,
    value_model_params,
)

ACTIVATION_SHARE = (
    0.5  # of what weights and optimizer leave, that rows may take: as `policy.memory`
)
FIRST_KV_POSITIONS = 64  # places for completions that decoding begins with
SAMPLING_BYTES_PER_LOGIT = (
    16  # bytes a word of each row: the model's own, in float32, processed, probabilities
)
# Of a CPU, as measured (docs/plan.md): what libraries take that are loaded later, and the share of
# activations that glibc keeps in pieces which the next micro-batch does not fit into.
LATE_LIBRARY_BYTES, FRAGMENTED_SHARE = 0.1 * 2**30, 0.5
NamedBytes = dict[str, float]


@dataclass(frozen=True)
class ForwardMemory:
    """How the training forward is cut, and what it keeps."""

    tokens: int  # of the fullest micro-batch
    completion_tokens: int  # completion tokens among them
    micro_batches: int  # micro-batches of an update
    recompute: bool
    layer_bytes: float  # bytes that all layers keep
    single_layer_bytes: float  # bytes that one layer needs beside, while its gradient is computed
    kept_logits_bytes: float  # bytes of kept logits
    head_bytes: float  # bytes of tiles, of the head's gradient, and around it


@dataclass(frozen=True)
class PeakMemory:
    """Peaks of one rank by phase, each as named parts in bytes."""

    phases: dict[str, NamedBytes]
    forward: ForwardMemory
    static: StaticMemory
    engine_bytes: float = 0.0  # what a vLLM engine on the same device holds while we train
    host_bytes: float = 0.0
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def worst_phase(self) -> str:
        """The phase with the highest peak."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def peak_bytes(self) -> float:
        """Bytes of one rank at most."""
        return sum(self.phases[self.worst_phase].values())


def estimate_peak_memory(inputs: PlanInputs) -> PeakMemory:
    """The memory of one rank of a run, without a vLLM engine."""
    held = estimate_static_memory(inputs)
    cut = plan_forward_memory(inputs, held)
    resting = {
        "weights": held.weights,
        "optimizer": held.optimizer,
        "reference": held.reference,
        "value model": held.value_model,
        "reward models": held.reward_models,
        "buffers": held.buffers,
        "libraries": LATE_LIBRARY_BYTES if inputs.device.kind == "cpu" else 0.0,
    }
    phases = {"rollout": resting | _rollout_memory(inputs, held)}
    if inputs.reward_models:
        phases["reward"] = resting | _reward_model_memory(inputs, held)
    if inputs.run.model.ref_offload and inputs.reference_model is not None:
        size = inputs.bytes_per_weight * inputs.reference_model.total_params / inputs.weight_shards
        phases["reference"] = resting | {
            "reference": size,
            "rows": cut.single_layer_bytes + cut.tokens * 4.0,
        }
    phases["update"] = resting | _update_memory(inputs, held, cut)
    phases["optimizer step"] = resting | _optimizer_step_memory(inputs, held)
    return PeakMemory(
        phases={n: _nonzero_parts(p) for n, p in phases.items()},
        forward=cut,
        static=held,
        host_bytes=held.host_bytes,
    )


def plan_forward_memory(inputs: PlanInputs, static: StaticMemory) -> ForwardMemory:
    """How micro-batches are cut, as `policy.memory.limits` does it."""
    run, longest = inputs.run, inputs.group_tokens
    room = ACTIVATION_SHARE * max(
        inputs.device.memory_bytes - static.resting_bytes - static.gradients, 0.0
    )
    wanted = run.model.gradient_checkpointing
    recompute = bool(wanted) if inputs.recompute is None else inputs.recompute
    if wanted == "auto" and inputs.recompute is None:
        recompute = room / kept_bytes_per_forward_token(inputs, False) < longest
    fit = room / kept_bytes_per_forward_token(inputs, recompute)
    budget = (
        inputs.token_budget or run.train.micro_batch_tokens or _token_budget(inputs, longest, fit)
    )
    rows, micros = _micro_batch_sizes(inputs, budget)
    k = run.algorithm.num_generations
    c = inputs.max_completion_tokens
    targets = int(
        rows
        * (
            k * c / longest
            if inputs.resolved_layout == "shared"
            else c / (inputs.max_prompt_tokens + c)
        )
    )
    size, model = inputs.bytes_per_weight, inputs.model
    kept = (
        model.sizes.layers
        * rows
        * (size * model.sizes.hidden if recompute else kept_bytes_per_layer(inputs))
    )
    one = rows * model.transient_bytes(size) + (
        rows * kept_bytes_per_layer(inputs) if recompute else 0.0
    )
    whole = targets * model.sizes.vocab_size * (4 if run.model.lm_head_fp32 else size)
    keep = min(_logits_kept(inputs), room / 4)
    return ForwardMemory(
        rows, targets, micros, recompute, kept, one, float(whole if whole <= keep else 0),
        head_bytes=_head(inputs, rows, targets),
    )  # fmt: skip


def _logits_kept(inputs: PlanInputs) -> float:
    """Bytes of logits that the head may keep, as `policy.memory` has it."""
    if (given := inputs.run.train.keep_logits_gb) is not None:
        return given * 1e9
    return 0.1 * inputs.device.memory_bytes if inputs.device.kind == "cuda" else 2e9


def kept_bytes_per_layer(inputs: PlanInputs) -> float:
    """Bytes that a layer keeps of one row, adapters' inputs in float32 among them."""
    found = inputs.model.saved_bytes(inputs.bytes_per_weight)
    if inputs.bytes_per_weight < 4:
        found += sum(4.0 * i for _, i, _ in adapter_targets(inputs))
    lora = inputs.run.model.lora
    return found + (sum(4.0 * lora.r for _ in adapter_targets(inputs)) if lora else 0.0)


def kept_bytes_per_forward_token(inputs: PlanInputs, recompute: bool) -> float:
    """Bytes that one row of a training forward keeps, the head's among them."""
    s, size = inputs.model.sizes, inputs.bytes_per_weight
    each = size * s.hidden if recompute else kept_bytes_per_layer(inputs)
    return s.layers * each + 3 * size * s.hidden


def _token_budget(inputs: PlanInputs, longest: int, fit: float) -> int:
    wanted = max(MAX_FORWARD_TOKENS[inputs.device.kind], longest)
    return wanted if wanted <= fit else max(64, 1 << (int(max(fit, 1)).bit_length() - 1))


def _micro_batch_sizes(inputs: PlanInputs, budget: int) -> tuple[int, int]:
    """Rows of the fullest micro-batch, and how many there are: whole groups where they fit, as
    many in each as in the others.
    """
    size, each = inputs.run.train.micro_batch_size, inputs.group_tokens
    if size is None and each > budget:
        rows = max(min(each, budget), _longest_sequence(inputs))
        return rows, inputs.groups_per_update * -(-each // rows)
    many = max(1, budget // each if size is None else size // inputs.run.algorithm.num_generations)
    micros = -(-inputs.groups_per_update // many)
    return -(-inputs.groups_per_update // micros) * each, micros


def _longest_sequence(inputs: PlanInputs) -> int:
    """Rows of one completion with its prompt: what no budget cuts."""
    return inputs.max_prompt_tokens + inputs.max_completion_tokens


def _head(inputs: PlanInputs, tokens: int, completion_tokens: int) -> float:
    """The head's tiles, hidden states in float32 with their gradient, and the last norm's."""
    s, size = inputs.model.sizes, inputs.bytes_per_weight
    tile = min(MAX_LOGITS_TILE[inputs.device.kind], max(completion_tokens, 1) * s.vocab_size)
    work = size if inputs.device.kind == "cuda" else 4
    return (
        tile * (4.0 + work)
        + completion_tokens * s.hidden * (size + 4 + work)
        + 3.0 * tokens * size * s.hidden
    )


def _update_memory(inputs: PlanInputs, static: StaticMemory, forward: ForwardMemory) -> NamedBytes:
    """Forward and backward of the fullest micro-batch.

    As a backward pass begins, everything is kept that the forward kept, with the gradients of
    earlier micro-batches; as it ends, the gradients are whole. In between one falls as the other
    grows.
    """
    adapter = trained_params(inputs)[1]
    table = (
        0.0 if adapter else float(inputs.bytes_per_weight * inputs.model.output_embedding_params)
    )
    begin: NamedBytes = {
        # A value model's backward pass comes first: its gradients are there by then.
        "gradients": static.gradients
        if forward.micro_batches > 1
        else GRADIENT * float(value_model_params(inputs)),
        "gathered": static.gathered,
        "activations": forward.layer_bytes + forward.single_layer_bytes,
        "kept logits": forward.kept_logits_bytes,
        "head": forward.head_bytes + table,
        "in pieces": FRAGMENTED_SHARE * (forward.layer_bytes + forward.kept_logits_bytes)
        if inputs.device.kind == "cpu"
        else 0.0,
    }
    end: NamedBytes = {
        "gradients": static.gradients,
        "gathered": static.gathered,
        "activations": forward.single_layer_bytes,
        # The gradient of a head that is the token table waits for the table's own.
        "head": table * ((forward.micro_batches > 1) + (not inputs.model.head_params)),
    }
    return max((begin, end), key=lambda parts: sum(parts.values()))


def _optimizer_step_memory(inputs: PlanInputs, static: StaticMemory) -> NamedBytes:
    """Clipping and Adam: on a GPU square roots of all second moments at once, on a CPU of one."""
    if inputs.run.distributed.offload != "none":
        return {"gradients": static.gradients}
    count = sum(trained_params(inputs)) + value_model_params(inputs)
    parts = (
        inputs.ranks
        if inputs.parallel_strategy.startswith("zero")
        or inputs.parallel_strategy in SHARDED_ENGINES
        else 1
    )
    widest = (
        inputs.model.output_embedding_params
        if not trained_params(inputs)[1]
        else inputs.model.sizes.hidden**2
    )
    extra = GRADIENT * count / parts if inputs.device.kind == "cuda" else 2.0 * GRADIENT * widest
    return {"gradients": static.gradients, "temporary": extra}


def _rollout_memory(inputs: PlanInputs, static: StaticMemory) -> NamedBytes:
    """Decoding by the trainer's own weights; nothing where vLLM samples."""
    run, model, size = inputs.run, inputs.model, inputs.bytes_per_weight
    if run.generation.backend != "transformers":
        return {}
    found: NamedBytes = {}
    # A whole copy: decoding token by token would gather the weights for each token.
    if inputs.weight_shards > 1:
        found["replica"] = size * model.total_params
    k, p, c = run.algorithm.num_generations, inputs.max_prompt_tokens, inputs.max_completion_tokens
    prompts, rows = inputs.prompts_per_rank, inputs.prompts_per_rank * k
    most = getattr(run.generation, "transformers").batch_tokens  # noqa: B009
    if most is not None:
        rows = min(rows, max(1, most // (p + c)))
        prompts = -(-rows // k)
    copies = prompts if inputs.resolved_layout == "shared" else rows
    places = min(c, 1 << max(c - 1, 1).bit_length()) if c > FIRST_KV_POSITIONS else c
    found["KV cache"] = float(model.kv_bytes(size) * (copies * p + rows * places))
    prefill = prompts * p * (model.transient_bytes(size) + 2 * size * model.sizes.hidden)
    sampling = rows * model.sizes.vocab_size * SAMPLING_BYTES_PER_LOGIT
    found["prefill and sampling"] = float(max(prefill, sampling))
    return found


def _reward_model_memory(inputs: PlanInputs, static: StaticMemory) -> NamedBytes:
    """A reward model at work: those that are brought for it, and one batch of rows."""
    found = rows = 0.0
    for name, model in inputs.reward_models.items():
        entry = inputs.run.rewards[name]
        size = inputs.dtype_bytes(entry.dtype)  # type: ignore[attr-defined]
        if getattr(entry, "offload", False) and inputs.device.kind == "cuda":
            found += size * (model.total_params - model.head_params)
        places = getattr(entry, "batch_size", 16) * (
            inputs.max_prompt_tokens + inputs.max_completion_tokens
        )
        rows = max(rows, places * (model.transient_bytes(size) + 2.0 * size * model.sizes.hidden))
    return {"reward models": static.reward_models + found, "rows": rows}


def _nonzero_parts(parts: NamedBytes) -> NamedBytes:
    return {name: value for name, value in parts.items() if value > 0}
