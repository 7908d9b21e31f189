"""vLLM's memory: weights, keys and values, and the share of a GPU to give it.

A copy of the model is spread over `tensor_parallel_size` GPUs, and takes of each the share that
`gpu_memory_utilization` says; what its weights leave of that is for keys and values.
"""

import math
from dataclasses import dataclass
from typing import Any

from rloo_cli.config.prompt_limit import BACKENDS
from rloo_cli.planning.case import Case

AT_ONCE = 256  # completions that vLLM decodes at once where max_num_seqs is null
BATCHED = 8192  # tokens of its largest forward where max_num_batched_tokens is null
OWN = 2.0 * 2**30  # CUDA graphs, workspaces, its share of NCCL
STEP = 0.05


@dataclass(frozen=True)
class Engine:
    """One copy of the model in vLLM, as one of its GPUs sees it. Bytes."""

    backend: str
    parallel: int  # tensor_parallel_size
    copies: int  # of the model, over all engines
    weights: float
    forward: float  # of its largest forward, with CUDA graphs and the like
    token: float  # keys and values of one token
    sequences: int  # decoded at once
    wanted: float  # keys and values of all of them at full length
    least: float  # of a single one
    share: float  # gpu_memory_utilization as it is
    memory: float  # of the GPU
    sleep: str  # of a colocated engine

    @property
    def taken(self) -> float:
        """Bytes that it takes."""
        return self.share * self.memory

    @property
    def cache(self) -> float:
        """Bytes that are left for keys and values."""
        return self.taken - self.weights - self.forward

    @property
    def colocated(self) -> bool:
        return self.backend == "vllm_colocate"

    @property
    def gpus(self) -> int:
        """GPUs beside those that train."""
        return 0 if self.colocated else self.parallel * self.copies

    @property
    def awake(self) -> float:
        """Bytes of it on the trainer's GPU while that trains."""
        if not self.colocated or self.sleep == "weights":
            return 0.0
        return self.taken if self.sleep == "none" else self.weights + self.forward / 2

    def recommended(self, room: float) -> float:
        """The smallest share, in steps of 0.05, with room for all sequences; at most `room`."""
        need = (self.weights + self.forward + max(self.wanted, self.least)) / self.memory
        most = math.floor(min(room / self.memory, 0.95) / STEP + 1e-9) * STEP
        least = (self.weights + self.forward + self.least) / self.memory
        share = min(math.ceil(need / STEP - 1e-9) * STEP, most)
        return round(max(share, math.ceil(least / STEP - 1e-9) * STEP, STEP), 2)


def of(case: Case) -> Engine | None:
    """The engine of a run on GPUs; None where none samples, or it has no GPU."""
    run, model = case.run, case.model
    section = BACKENDS.get(run.generation.backend)
    if section is None or case.device.kind != "cuda":
        return None
    keys: Any = getattr(run.generation, section)
    s, parallel = model.sizes, keys.tensor_parallel_size
    size = case.size if keys.dtype == "auto" else case.bytes_of(keys.dtype)
    each = {"fp8": 1.0, "bitsandbytes": 0.5}.get(keys.quantization or "", float(size))
    cached = 1 if "fp8" in (keys.kv_cache_dtype or "") else size
    heads = max(s.kv_heads / parallel, 1.0)  # a head is not cut: it is there more than once
    token = 2.0 * s.layers * heads * s.head_dim * cached
    colocated = section == "colocate"
    copies = max(case.ranks // parallel, 1) if colocated else _servers(keys)
    rows = -(-run.episodes_per_step // copies)
    sequences = min(rows, keys.max_num_seqs or AT_ONCE)
    k, p, c = run.algorithm.num_generations, case.longest, case.completion
    prompts = -(-sequences // k) if keys.enable_prefix_caching else sequences
    batched = keys.max_num_batched_tokens or BATCHED
    return Engine(
        backend=run.generation.backend,
        parallel=parallel,
        copies=copies,
        weights=each * model.total / parallel,
        forward=batched * model.passing(size) / parallel + OWN,
        token=token,
        sequences=sequences,
        wanted=token * (prompts * p + sequences * c),
        least=token * (p + c),
        share=keys.gpu_memory_utilization,
        memory=case.device.memory,
        sleep=keys.sleep if colocated else "none",
    )


def _servers(keys: Any) -> int:
    urls = keys.base_url if isinstance(keys.base_url, list) else [keys.base_url]
    return int(keys.data_parallel_size) * len(urls)
