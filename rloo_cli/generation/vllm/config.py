"""The keys of a vLLM engine, which a server and a colocated engine share. Imports no torch.

They have vLLM's own names, and `null` leaves vLLM's own choice. `generation/vllm/arguments.py`
turns them into arguments; `extra` passes the rest of vLLM's engine arguments through.
"""

import ast
import contextlib
import functools
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from rloo_cli.config.old_names import nearest_names
from rloo_cli.config.schema import Frozen, GenerationConfig, Positive, Text, key
from rloo_cli.utils.errors import Problem, value_problem
from rloo_cli.utils.files import JsonObject

# What `extra` may not set, and the key to use instead: rloo relies on these values.
RESERVED_ARGUMENTS = {
    "model": "model.path",
    "tokenizer": "model.tokenizer",
    "revision": "model.revision",
    "dtype": "generation.*.dtype",
    "seed": "seed",
    "trust_remote_code": "model.trust_remote_code",
    "host": "generation.server.host",
    "port": "generation.server.port",
    "api_server_count": "generation.server.api_server_count",
    "api_key": "rloo: each server gets its own token",
    "middleware": "rloo: rloo adds its own guard",
    "logprobs_mode": "rloo: rloo needs processed log-probabilities",
    "return_sampling_mask": "generation.return_sampling_mask",
    "generation_config": "rloo: every sampling key is sent with each request",
    "weight_transfer_config": "generation.*.transfer",
    "worker_extension_cls": "rloo",
    "enable_scale_out": "rloo: tokens in, tokens out needs it",
    "enable_lora": "model.lora",
    "max_lora_rank": "model.lora.r",
    "max_loras": "rloo: there is only one adapter",
    "lora_modules": "rloo: the run's adapter is the only one",
}


class EngineKeys(Frozen):
    """Arguments of a vLLM engine."""

    tensor_parallel_size: Positive = key("GPUs per copy of the model (processes without GPUs)")
    gpu_memory_utilization: float = key("Share of each GPU's memory vLLM may take", gt=0, le=1)
    kv_cache_gb: float | None = key("Memory of the KV cache without a GPU; null = 1", gt=0)
    max_model_len: Positive | None = key("Most tokens, prompt and completion; null = as needed")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "Weights' dtype in the engine; auto = the trainer's (model.dtype)"
    )
    max_num_seqs: Positive | None = key(
        "Most completions decoded at once; null = vLLM's choice, on GPUs a step's if above 256"
    )
    max_num_batched_tokens: Positive | None = key("Most tokens in one forward pass")
    enforce_eager: bool | None = key(
        "No CUDA graphs; null = true without a GPU, else vLLM's choice"
    )
    kv_cache_dtype: Text | None = key("dtype of the KV cache, e.g. fp8")
    enable_prefix_caching: bool = key("Share a prompt's keys and values among its completions")
    quantization: Text | None = key("vLLM's quantization of the synced weights, e.g. fp8")
    model_impl: Text | None = key("vllm or transformers: whose modelling code the engine runs")
    batch_invariant: bool = key("vLLM's batch-invariant kernels: a sample ignores its neighbours")
    transfer: Literal["auto", "gloo", "nccl", "ipc"] = key(
        "Weight sync by; auto = nccl (server) or ipc (colocated) on GPUs, gloo without"
    )
    extra: JsonObject = key("Further arguments of vLLM's engine, by vLLM's names")

    @property
    def is_external(self) -> bool:
        """Whether the engine is a server started elsewhere, at an address of the config."""
        return False

    @property
    def is_local(self) -> bool:
        """Whether all clients of the engine are on its machine."""
        return True

    @property
    def freed_between_steps(self) -> str:
        """What the engine frees while the trainer trains: none, kv or weights."""
        return "none"

    @property
    def num_api_processes(self) -> int:
        """Processes that take requests, if the config sets their number."""
        return 1


class EngineConfig(GenerationConfig):
    """Keys of both backends that have a vLLM engine."""

    is_engine = True

    allow_untested: bool = key("Allow features not yet tested on GPUs")


@functools.cache
def engine_argument_names() -> frozenset[str]:
    """The arguments of the installed vLLM's engine, read from its source without importing it.

    Empty if vLLM is not installed, or if its source looks different.
    """
    package = importlib.util.find_spec("vllm")
    if package is None or package.origin is None:
        return frozenset()
    source = Path(package.origin).parent / "engine" / "arg_utils.py"
    names: set[str] = set()
    with contextlib.suppress(OSError, SyntaxError):
        for part in ast.parse(source.read_text(encoding="utf-8")).body:
            if isinstance(part, ast.ClassDef) and part.name in ("EngineArgs", "AsyncEngineArgs"):
                fields = [line.target for line in part.body if isinstance(line, ast.AnnAssign)]
                names |= {field.id for field in fields if isinstance(field, ast.Name)}
    return frozenset(names)


def _unknown_argument_problems(section: str, keys: EngineKeys) -> Iterator[Problem]:
    """Arguments in `extra` that the installed vLLM's engine does not have.

    A server takes more: its own process asks vLLM's parser.
    """
    known = engine_argument_names() if keys.extra and section.endswith(".colocate") else None
    for name in keys.extra if known else ():
        plain = name.lstrip("-").replace("-", "_")
        if known and plain not in known:
            why = "the installed vLLM's EngineArgs has no such field"
            yield unknown_argument_problem(section, name, known, why)


def unknown_argument_problem(section: str, name: str, known: Iterable[str], why: str) -> Problem:
    """The problem of SECTION.extra.NAME, which vLLM does not know."""
    close = nearest_names(name.lstrip("-").replace("-", "_"), known)
    key = f"{section}.extra.{name}"
    fix = f"write {close[0]}, or leave {name} out" if close else f"leave {name} out"
    return Problem(f"{key}: vLLM has no such argument", key, why, fix)


def engine_key_problems(section: str, keys: EngineKeys, need: int) -> Iterator[Problem]:
    """Faults of these keys that can be found without vLLM. `section`: where they are.

    `need`: tokens of the longest prompt with a completion, as far as the config says it.
    """
    for name in keys.extra:
        plain = name.replace("-", "_").lstrip("_")
        if plain in RESERVED_ARGUMENTS or plain in EngineKeys.model_fields:
            ours = RESERVED_ARGUMENTS.get(plain, f"{section}.{plain}")
            what = f"{section}.extra.{name} cannot be set here"
            yield Problem(what, f"{section}.extra", f"set by {ours}", f"leave out extra.{name}")
    yield from _unknown_argument_problems(section, keys)
    if keys.max_model_len is not None and keys.max_model_len < need:
        key, what = f"{section}.max_model_len", "cannot hold a prompt and a completion"
        why = f"data.max_prompt_length + generation.max_completion_length = {need}"
        yield value_problem(key, keys.max_model_len, what, need, why)
