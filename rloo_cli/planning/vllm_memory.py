"""vLLM's memory: weights, keys and values, and its share of a GPU.

A copy of the model uses `tensor_parallel_size` GPUs, and the share `gpu_memory_utilization` of
each; the rest of that share after its weights is for keys and values.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from rloo_cli.planning.plan_inputs import PlanInputs

if TYPE_CHECKING:
    from rloo_cli.generation.vllm.config import EngineKeys
    from rloo_cli.generation.vllm_colocate import ColocateSection
    from rloo_cli.generation.vllm_server import ServerSection

# An engine's values if these keys are null.
DEFAULT_MAX_NUM_SEQS = 1024  # completions of a step decoded at once, as set by `arguments`
DEFAULT_MAX_BATCHED_TOKENS = 8192  # tokens of its largest forward
ENGINE_OVERHEAD_BYTES = 2.0 * 2**30  # CUDA graphs, workspaces, its share of NCCL
UTILIZATION_STEP = 0.05


@dataclass(frozen=True)
class EngineMemory:
    """One copy of the model in vLLM, on one of its GPUs, in bytes."""

    colocated: bool  # on the trainer's own device
    tensor_parallel_size: int  # GPUs of one copy
    copies: int  # of the model, over all engines
    weight_bytes: float
    forward_bytes: float  # of its largest forward, with CUDA graphs and the like
    kv_bytes_per_token: float  # keys and values of one token
    sequences: int  # decoded at once
    wanted_kv_bytes: float  # keys and values of all sequences at full length
    least_kv_bytes: float  # keys and values of a single sequence
    gpu_memory_utilization: float  # the config's
    gpu_bytes: float  # of the whole GPU
    sleep: str  # a colocated engine's key; "none" for a server

    @property
    def total_bytes(self) -> float:
        """Bytes used by the engine."""
        return self.gpu_memory_utilization * self.gpu_bytes

    @property
    def kv_cache_bytes(self) -> float:
        """Bytes left for keys and values."""
        return self.total_bytes - self.weight_bytes - self.forward_bytes

    @property
    def extra_gpus(self) -> int:
        """GPUs besides the training GPUs."""
        return 0 if self.colocated else self.tensor_parallel_size * self.copies

    @property
    def bytes_while_training(self) -> float:
        """Bytes held by the engine on the trainer's GPU during training."""
        if not self.colocated or self.sleep == "weights":
            return 0.0
        if self.sleep == "none":
            return self.total_bytes
        return self.weight_bytes + self.forward_bytes / 2

    def smallest_utilization(self, available_bytes: float) -> float:
        """The smallest share, in steps of 0.05, that holds all sequences."""
        step, fixed = UTILIZATION_STEP, self.weight_bytes + self.forward_bytes
        needed = (fixed + max(self.wanted_kv_bytes, self.least_kv_bytes)) / self.gpu_bytes
        least = (fixed + self.least_kv_bytes) / self.gpu_bytes
        most = math.floor(min(available_bytes / self.gpu_bytes, 0.95) / step + 1e-9) * step
        share = min(math.ceil(needed / step - 1e-9) * step, most)
        return round(max(share, math.ceil(least / step - 1e-9) * step, step), 2)


def estimate_engine_memory(inputs: PlanInputs) -> EngineMemory | None:
    """The engine of a run on GPUs; None without an engine, or without a GPU."""
    run, model = inputs.run, inputs.model
    if not run.generation.is_engine or inputs.device.kind != "cuda":
        return None
    keys: EngineKeys = run.generation.own_keys
    s, parallel = model.sizes, keys.tensor_parallel_size
    size = inputs.bytes_per_weight if keys.dtype == "auto" else inputs.dtype_bytes(keys.dtype)
    each = {"fp8": 1.0, "bitsandbytes": 0.5}.get(keys.quantization or "", float(size))
    cached = 1 if "fp8" in (keys.kv_cache_dtype or "") else size
    heads = max(s.kv_heads / parallel, 1.0)  # a head is not split but replicated
    token = 2.0 * s.layers * heads * s.head_dim * cached
    if run.generation.shares_device:
        copies = max(inputs.ranks // parallel, 1)
        sleep: str = cast("ColocateSection", keys).sleep
    else:
        server, sleep = cast("ServerSection", keys), "none"
        num_servers = len(server.base_url) if isinstance(server.base_url, list) else 1
        copies = server.data_parallel_size * num_servers
    completions = -(-run.episodes_per_step // copies)
    sequences = min(completions, keys.max_num_seqs or DEFAULT_MAX_NUM_SEQS)
    k, p, c = run.algorithm.num_generations, inputs.max_prompt_tokens, inputs.max_completion_tokens
    prompts = -(-sequences // k) if keys.enable_prefix_caching else sequences
    batched = keys.max_num_batched_tokens or DEFAULT_MAX_BATCHED_TOKENS
    return EngineMemory(
        colocated=run.generation.shares_device,
        tensor_parallel_size=parallel,
        copies=copies,
        weight_bytes=each * model.total_params / parallel,
        forward_bytes=batched * model.transient_bytes(size) / parallel + ENGINE_OVERHEAD_BYTES,
        kv_bytes_per_token=token,
        sequences=sequences,
        wanted_kv_bytes=token * (prompts * p + sequences * c),
        least_kv_bytes=token * (p + c),
        gpu_memory_utilization=keys.gpu_memory_utilization,
        gpu_bytes=inputs.device.memory_bytes,
        sleep=sleep,
    )
