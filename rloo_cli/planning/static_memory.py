"""Persistent bytes of one rank: weights, gradients, optimizer, other models.

For each engine, n trained parameters of s bytes each and N ranks, after ZeRO (arXiv 1910.02054):

             weights  gradients  masters and Adam's moments
    single      s n       4 n        (4 + 8) n
    ddp         s n       4 n        (4 + 8) n
    zero1       s n       4 n        (4 + 8) n / N
    zero2       s n       4 n / N    (4 + 8) n / N
    zero3       s n / N   4 n / N    (4 + 8) n / N      fsdp2 likewise

Gradients of micro-batches accumulate in float32; float32 weights are their own masters.
"""

from dataclasses import dataclass

from rloo_cli.config.rules import SHARDED_ENGINES
from rloo_cli.config.schema import LoraConfig
from rloo_cli.planning.model_counts import Linear, ModelSpec
from rloo_cli.planning.plan_inputs import PlanInputs

# Bytes per parameter. Unlisted optimizers are assumed to have two moments.
MOMENTS = {"adamw": 8, "torch.optim:AdamW": 8, "torch.optim:Adam": 8, "torch.optim:SGD": 0}
MASTER = GRADIENT = 4
ZERO_BUCKET_PARAMS = 500_000_000  # in DeepSpeed's buckets of gradients and of gathered weights
ZERO3_GATHERED_PARAMS = 1_000_000_000  # parameters that ZeRO-3 keeps gathered
DDP_BUCKET = 25 * 2**20  # bytes in flight; its buckets are the gradients themselves


@dataclass(frozen=True)
class StaticMemory:
    """Bytes of one rank, by purpose."""

    weights: float
    gradients: float
    optimizer: float  # moments and float32 masters
    reference: float
    value_model: float  # its weights
    reward_models: float
    buffers: float  # for communication
    gathered: float  # weights of other ranks, during a layer's computation
    host_bytes: float  # in the CPU's memory

    @property
    def resting_bytes(self) -> float:
        """Bytes present in every phase."""
        others = self.reference + self.value_model + self.reward_models
        return self.weights + self.optimizer + others + self.buffers


def trained_params(inputs: PlanInputs) -> tuple[int, int]:
    """The number of trained parameters: the model's own, and adapters'."""
    lora, model = inputs.run.model.lora, inputs.model
    if lora is None:
        return model.total_params - frozen_params(inputs), 0
    r = adapter_rank(lora)
    count = sum(
        x.copies * (r * (x.inputs + x.outputs) + (x.outputs if lora.use_dora else 0))
        for x in adapter_targets(inputs)
    )
    tables = {"embed_tokens", "embed_in", "wte", "lm_head", "embed_out"} & {*lora.modules_to_save}
    return 0, count + len(tables) * model.output_embedding_params


def adapter_rank(lora: LoraConfig) -> int:
    """The rank of a LoRA; for other types, that of a LoRA with at least as many parameters.

    Most have far fewer; LoHa, the largest, has two pairs of factors.
    """
    return lora.r if lora.peft_type == "LORA" else 2 * int(lora.kwargs.get("r") or 8)


def frozen_params(inputs: PlanInputs) -> int:
    """Parameters of a vision-language model frozen by `model.freeze`."""
    tower, parts = inputs.model.tower, inputs.run.model.freeze
    if tower is None:
        return 0
    sizes = {"vision": tower.tower_params, "projector": tower.projector_params}
    return sum(sizes[part] for part in parts)


def value_model_params(inputs: PlanInputs) -> int:
    """Parameters of a value model, all of which are trained; 0 without one."""
    model = inputs.value_model
    return 0 if model is None else model.total_params - model.head_params + model.sizes.hidden


def adapter_targets(inputs: PlanInputs) -> list[Linear]:
    """The linear layers with an adapter."""
    lora = inputs.run.model.lora
    if lora is None:
        return []
    wanted, excluded = lora.target_modules, lora.exclude_modules
    return [
        linear
        for linear in inputs.model.linears
        if (wanted == "all-linear" or linear.name in wanted) and linear.name not in excluded
    ]


def policy_weight_bytes(inputs: PlanInputs, model: ModelSpec) -> float:
    """Bytes of the policy's own weights over all ranks, quantized or not, without adapters."""
    q, s = inputs.run.model.quantization, inputs.bytes_per_weight
    if q is None:
        return s * model.total_params
    maps = sum(x.inputs * x.outputs * x.copies for x in model.linears if not x.is_expert)
    each = 1.0 if q.bits == 8 else 0.5 + (0.0159 if q.double_quant else 0.0625)  # with its scales
    return each * maps + s * (model.total_params - maps)


def estimate_static_memory(inputs: PlanInputs) -> StaticMemory:
    """What one rank holds. With uneven shards the fullest rank has at most one extra layer."""
    run, n, engine = inputs.run, inputs.ranks, inputs.parallel_strategy
    whole, adapter = trained_params(inputs)
    count, base = whole + adapter, policy_weight_bytes(inputs, inputs.model)
    size = 4 if adapter else inputs.bytes_per_weight  # peft keeps adapters in float32
    offload = run.distributed.offload
    optimizer_shards = n if engine in ("zero1", "zero2", *SHARDED_ENGINES) else 1
    gradient_shards = n if engine in ("zero2", *SHARDED_ENGINES) else 1
    masters = MASTER if size < 4 and run.distributed.master_weights == "float32" else 0
    every = count + value_model_params(inputs)  # a value model is sharded like the policy
    optimizer = (masters + MOMENTS.get(run.train.optimizer, 8)) * every / optimizer_shards
    weights = (base + 4 * adapter) / inputs.weight_shards
    ref_params = 0 if inputs.reference_model is None else inputs.reference_model.total_params
    reference = inputs.bytes_per_weight * ref_params / inputs.weight_shards
    rewards, host = _rewards(inputs)
    gathered, buffers = _communication(inputs, every, size)
    host += optimizer if offload != "none" else 0.0
    host += weights if offload == "parameters" else 0.0
    host += reference if run.model.ref_offload else 0.0
    accumulate = GRADIENT if masters or size == 4 else size
    return StaticMemory(
        weights=0.0 if offload == "parameters" else weights,
        gradients=accumulate * every / gradient_shards,
        optimizer=0.0 if offload != "none" else optimizer,
        reference=0.0 if run.model.ref_offload else reference,
        value_model=inputs.bytes_per_weight * value_model_params(inputs) / inputs.weight_shards,
        reward_models=rewards,
        buffers=buffers,
        gathered=gathered,
        host_bytes=host,
    )


def _rewards(inputs: PlanInputs) -> tuple[float, float]:
    """Bytes of reward models: a whole copy on each rank's device, and in the CPU's memory."""
    here = host = 0.0
    for name, model in inputs.reward_models.items():
        entry = inputs.run.rewards[name]
        size = inputs.dtype_bytes(entry.dtype) * (model.total_params - model.head_params)  # type: ignore[attr-defined]
        away = inputs.device.kind == "cuda" and (
            entry.offload or entry.device == "cpu"  # type: ignore[attr-defined]
        )
        here, host = (here, host + size) if away else (here + size, host)
    return here, host


def _communication(inputs: PlanInputs, count: int, bytes_per_param: int) -> tuple[float, float]:
    """Bytes of gathered weights, and of buffers for sending gradients and weights."""
    model, s = inputs.model, inputs.bytes_per_weight
    n, engine = inputs.ranks, inputs.parallel_strategy
    if n == 1 or engine == "single":
        return 0.0, 0.0
    bucket = float(bytes_per_param * min(ZERO_BUCKET_PARAMS, count))
    if engine == "ddp":
        return 0.0, float(min(2 * DDP_BUCKET, bytes_per_param * count))
    if engine in ("zero1", "zero2"):
        return 0.0, 2 * bucket
    received = 1 - 1 / n  # a rank already has its own part of the gathered weights
    if engine == "zero3":
        live = max(ZERO3_GATHERED_PARAMS, model.layer_params + model.output_embedding_params)
        return s * min(live, model.total_params) * received, bucket
    # FSDP's root unit is gathered for the whole forward, beside two layers.
    gathered = 2 * model.layer_params + model.embedding_params + model.head_params
    largest = max(model.layer_params, model.output_embedding_params)
    return s * gathered * received, float(bytes_per_param * largest)
