"""Bytes of one rank that stay from step to step: weights, gradients, optimizer, other models.

By engine, after ZeRO (arXiv 1910.02054): of n trained numbers with weights of s bytes, and N ranks,

             weights  gradients  masters and Adam's moments
    single      s n       4 n        (4 + 8) n
    ddp         s n       4 n        (4 + 8) n
    zero1       s n       4 n        (4 + 8) n / N
    zero2       s n       4 n / N    (4 + 8) n / N
    zero3       s n / N   4 n / N    (4 + 8) n / N      fsdp2 likewise

Gradients of micro-batches add up in float32; float32 weights are their own masters.
"""

from dataclasses import dataclass

from rloo_cli.config.rules import SHARDED_ENGINES
from rloo_cli.planning.model_spec import ModelSpec
from rloo_cli.planning.plan_inputs import PlanInputs

# torch's and adamw's own are known; of another optimizer two moments are assumed.
MOMENTS = {"adamw": 8, "torch.optim:AdamW": 8, "torch.optim:Adam": 8, "torch.optim:SGD": 0}
MASTER = GRADIENT = 4
ZERO_BUCKET_PARAMS = (
    500_000_000  # numbers in DeepSpeed's buckets of gradients and of gathered weights
)
ZERO3_GATHERED_PARAMS = 1_000_000_000  # numbers that its third stage keeps gathered
DDP_BUCKET = 25 * 2**20  # bytes in flight; its buckets are the gradients themselves


@dataclass(frozen=True)
class StaticMemory:
    """Bytes of one rank."""

    weights: float
    gradients: float
    optimizer: float  # moments and float32 masters
    reference: float
    value_model: float  # weights of the value model
    reward_models: float
    buffers: float  # of communication
    gathered: float  # weights of other ranks, while a layer computes
    host_bytes: float  # in the CPU's memory

    @property
    def resting_bytes(self) -> float:
        """What lies there in every phase."""
        others = self.reference + self.value_model + self.reward_models
        return self.weights + self.optimizer + others + self.buffers


def trained_params(inputs: PlanInputs) -> tuple[int, int]:
    """Numbers that are trained: those of the model itself, and those of adapters."""
    lora, model = inputs.run.model.lora, inputs.model
    if lora is None:
        return model.total_params, 0
    count = (
        sum(lora.r * (i + o) + (o if lora.use_dora else 0) for _, i, o in adapter_targets(inputs))
        * model.sizes.layers
    )
    whole = sum(
        model.output_embedding_params
        for name in ("embed_tokens", "embed_in", "wte", "lm_head", "embed_out")
        if name in lora.modules_to_save
    )
    return 0, count + whole


def value_model_params(inputs: PlanInputs) -> int:
    """Numbers of a value model, all of which are trained; 0 without one."""
    return (
        0
        if inputs.value_model is None
        else inputs.value_model.total_params
        - inputs.value_model.head_params
        + inputs.value_model.sizes.hidden
    )


def adapter_targets(inputs: PlanInputs) -> list[tuple[str, int, int]]:
    """(name, in, out) of a layer's linear maps that get an adapter."""
    lora, model = inputs.run.model.lora, inputs.model
    if lora is None:
        return []
    found = [
        (name, i, o)
        for name, i, o in model.family.linears(model.sizes)
        if (lora.target_modules == "all-linear" or name.rpartition(".")[2] in lora.target_modules)
        and name not in lora.exclude_modules
    ]
    many = max(model.sizes.experts, 1)
    return [
        x
        for x in found
        for _ in range(many if "_proj" in x[0] and model.sizes.mlp_width in x[1:] else 1)
    ]


def policy_weight_bytes(inputs: PlanInputs, model: ModelSpec) -> float:
    """Bytes of the policy's own weights over all ranks, quantised or not, without adapters."""
    q, s = inputs.run.model.quantization, inputs.bytes_per_weight
    if q is None:
        return s * model.total_params
    maps = sum(i * o for _, i, o in model.family.linears(model.sizes)) * model.sizes.layers
    each = 1.0 if q.bits == 8 else 0.5 + (0.0159 if q.double_quant else 0.0625)  # with its scales
    return each * maps + s * (model.total_params - maps)


def estimate_static_memory(inputs: PlanInputs) -> StaticMemory:
    """What one rank holds. The fullest rank, where parts are uneven, has at most a layer more."""
    run, n, engine = inputs.run, inputs.ranks, inputs.parallel_strategy
    whole, adapter = trained_params(inputs)
    count, base = whole + adapter, policy_weight_bytes(inputs, inputs.model)
    held = 4 if adapter else inputs.bytes_per_weight  # peft keeps adapters in float32
    offload = run.distributed.offload
    of_optimizer = n if engine in ("zero1", "zero2", *SHARDED_ENGINES) else 1
    of_gradients = n if engine in ("zero2", *SHARDED_ENGINES) else 1
    masters = MASTER if held < 4 and run.distributed.master_weights == "float32" else 0
    every = count + value_model_params(
        inputs
    )  # a value model's whole state is on every rank, as ddp has it
    optimizer = (masters + MOMENTS.get(run.train.optimizer, 8)) * every / of_optimizer
    own = (base + 4 * adapter) / inputs.weight_shards
    reference = 0.0
    if inputs.reference_model is not None:
        reference = (
            inputs.bytes_per_weight * inputs.reference_model.total_params / inputs.weight_shards
        )
    rewards, host = _rewards(inputs)
    gathered, buffers = _communication(inputs, every, held)
    host += optimizer if offload != "none" else 0.0
    host += own if offload == "parameters" else 0.0
    host += reference if run.model.ref_offload else 0.0
    accumulate = GRADIENT if masters or held == 4 else held
    return StaticMemory(
        weights=0.0 if offload == "parameters" else own,
        gradients=accumulate * every / of_gradients,
        optimizer=0.0 if offload != "none" else optimizer,
        reference=0.0 if run.model.ref_offload else reference,
        value_model=inputs.bytes_per_weight * value_model_params(inputs),
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
    """Bytes of gathered weights, and of buffers that gradients and weights travel in."""
    model, s, n, engine = (
        inputs.model,
        inputs.bytes_per_weight,
        inputs.ranks,
        inputs.parallel_strategy,
    )
    if n == 1 or engine == "single":
        return 0.0, 0.0
    bucket = float(bytes_per_param * min(ZERO_BUCKET_PARAMS, count))
    if engine == "ddp":
        return 0.0, float(min(2 * DDP_BUCKET, bytes_per_param * count))
    if engine in ("zero1", "zero2"):
        return 0.0, 2 * bucket
    away = 1 - 1 / n  # of what is gathered, a rank has its own part already
    if engine == "zero3":
        live = max(ZERO3_GATHERED_PARAMS, model.layer_params + model.output_embedding_params)
        return s * min(live, model.total_params) * away, bucket
    ends = model.embedding_params + (
        model.head_params or 0
    )  # the root's own, gathered for the whole forward
    return s * (2 * model.layer_params + ends) * away, float(
        bytes_per_param * max(model.layer_params, model.output_embedding_params)
    )
