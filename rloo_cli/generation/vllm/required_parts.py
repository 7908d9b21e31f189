"""Which vLLM was tried, and whether another one has the calls and the routes that rloo needs.

A version that was tried is taken as it is. Any other is asked: the installed one by its sources, of
which nothing is imported, and a server by its routes. It is refused by what it lacks, or else let
through with a warning. It imports neither torch nor vLLM.
"""

import ast
import functools
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rloo_cli.generation.vllm.versions import (
    MOVED_VLLM_MODULES,
    TRANSFER_PACKAGE,
    is_old_vllm,
    version_numbers,
)

TRIED_ON_CPU, TRIED_ON_GPU = (0, 32), (0, 22)  # the first two numbers of a version
Parts = dict[str, tuple[str, ...]]  # module:name -> parameters of a function, fields of a class
COMMON_PARTS: Parts = {
    "vllm.engine.arg_utils:EngineArgs": (
        "model", "tokenizer", "revision", "tokenizer_revision", "dtype", "trust_remote_code",
        "max_model_len", "gpu_memory_utilization", "enforce_eager", "enable_chunked_prefill",
        "seed", "logprobs_mode", "generation_config", "weight_transfer_config", "hf_overrides",
        "disable_log_stats", "enable_sleep_mode", "enable_lora", "max_loras", "max_lora_rank",
    ),
    "vllm.logprobs:FlatLogprobs": ("start_indices", "token_ids", "logprobs"),
    "vllm.model_executor.model_loader.reload.layerwise:get_layerwise_info": (),
    "vllm.sampling_params:RequestOutputKind": ("FINAL_ONLY",),
    "vllm.sampling_params:SamplingParams": (
        "seed", "temperature", "max_tokens", "min_tokens", "top_p", "top_k", "min_p", "stop",
        "ignore_eos", "stop_token_ids", "logprobs", "detokenize", "skip_special_tokens",
        "repetition_penalty", "flat_logprobs", "output_kind",
    ),
    f"{TRANSFER_PACKAGE}.factory:WeightTransferEngineFactory.register_engine": (),
}  # fmt: skip
ENGINE = f"{TRANSFER_PACKAGE}.base:WeightTransferEngine"
NEW_PARTS: Parts = {
    f"{ENGINE}.start_weight_update": (),
    f"{ENGINE}.receive_weights": ("update_info",),
    f"{ENGINE}.finish_weight_update": (),
    f"{TRANSFER_PACKAGE}.factory:WeightTransferTrainerFactory.trainer_init": ("client", "source"),
}
OLD_PARTS: Parts = {  # what the classes of `versions` for an older vLLM are built on
    f"{ENGINE}.receive_weights": ("load_weights",),
    f"{TRANSFER_PACKAGE}.nccl_engine:NCCLWeightTransferEngine.trainer_init": (),
    "vllm.entrypoints.llm:LLM.collective_rpc": ("method", "args"),
}
CORE = "vllm.v1.engine.llm_engine:LLMEngine"
COLOCATE_PARTS: Parts = {
    "vllm.entrypoints.llm:LLM.reset_prefix_cache": (),
    "vllm.lora.request:LoRARequest": (),
    f"{CORE}.add_request": ("request_id", "prompt", "params", "lora_request"),
    f"{CORE}.abort_request": (),
    f"{CORE}.has_unfinished_requests": (),
    f"{CORE}.step": (),
}
NEW_COLOCATE_PARTS: Parts = {
    "vllm.entrypoints.llm:LLM.init_weight_transfer_engine": ("request",),
    "vllm.entrypoints.llm:LLM.start_weight_update": (),
    "vllm.entrypoints.llm:LLM.update_weights": ("request",),
    "vllm.entrypoints.llm:LLM.finish_weight_update": ("weight_version",),
    "vllm.entrypoints.llm:LLM.get_weight_version": (),
}
SLEEP_PARTS: Parts = {
    "vllm.entrypoints.llm:LLM.sleep": ("level",),
    "vllm.entrypoints.llm:LLM.wake_up": ("tags",),
}
KV_PARTS: Parts = {"vllm.entrypoints.llm:LLM.release_kv_cache_memory": ()}
SERVER_PARTS: Parts = {
    "entry:run_server_worker": ("listen_address", "sock", "args"),
    "cli_args:make_arg_parser": (),
    "cli_args:validate_parsed_serve_args": (),
    "api_utils:with_cancellation": (),
    "vllm.v1.engine.async_llm:AsyncLLM.generate": ("lora_request",),
}  # a name without a dot is one of MOVED_VLLM_MODULES
NEW_SERVER_PARTS: Parts = {"vllm.outputs:CompletionOutput": ("weight_versions",)}
GENERATE_ROUTE = "/inference/v1/generate"
SERVER_ROUTES = (
    "POST /pause", "POST /resume", "GET /is_paused", "GET /get_world_size", "GET /weight_info",
    "POST /init_weight_transfer_engine", "POST /start_weight_update", "POST /update_weights",
    "POST /finish_weight_update", "POST /shutdown_weight_transfer_engine",
    "POST /reset_prefix_cache",
)  # fmt: skip


def was_tried(version: str, on_gpu: bool | None = None) -> bool:
    """Whether rloo was tried with this version. `on_gpu` None: on whichever device."""
    tried = {False: (TRIED_ON_CPU,), True: (TRIED_ON_GPU,), None: (TRIED_ON_CPU, TRIED_ON_GPU)}
    return version_numbers(version) in tried[on_gpu]


def tried_versions() -> str:
    """The versions that were tried, in words."""
    cpu, gpu = (".".join(map(str, numbers)) for numbers in (TRIED_ON_CPU, TRIED_ON_GPU))
    return f"rloo was tried with {cpu} on CPUs and with {gpu} on GPUs"


def untried_warning(version: str, on_gpu: bool | None = None) -> str:
    """The warning of a version that has all that is needed and was not tried; "" if it was."""
    if was_tried(version, on_gpu):
        return ""
    return f"vLLM {version} has the calls that rloo needs, and is untested: {tried_versions()}"


def required_parts(version: str, section: str, sleep: str) -> Parts:
    """What this version must have for the backend whose keys are in `section`, server or colocate;
    `sleep`: what its engine frees between steps."""
    old = is_old_vllm(version)
    parts = COMMON_PARTS | (OLD_PARTS if old else NEW_PARTS)
    if section == "server":
        return parts | SERVER_PARTS | ({} if old else NEW_SERVER_PARTS)
    parts = parts | COLOCATE_PARTS | ({} if old else NEW_COLOCATE_PARTS)
    return parts | (SLEEP_PARTS if sleep != "none" else {}) | (KV_PARTS if sleep == "kv" else {})


def missing_parts(version: str, section: str, sleep: str = "none") -> list[str]:
    """What the installed vLLM lacks for a backend; a version that was tried is not asked."""
    if was_tried(version):
        return []
    return list(_lacking(required_parts(version, section, sleep)))


def _lacking(parts: Parts) -> Iterator[str]:
    for name, wanted in parts.items():
        module, _, inner = name.partition(":")
        modules = [module] if "." in module else MOVED_VLLM_MODULES[module]
        found = next((p for m in modules if (p := find_parameters(m, inner)) is not None), None)
        if found is None:
            yield f"{inner} ({' or '.join(modules)})"
        elif lost := [w for w in wanted if w not in found and "**" not in found]:
            yield f"{inner}({', '.join(lost)})"


def find_parameters(module: str, name: str) -> list[str] | None:
    """Parameters of a function or method of vLLM, or names that a class assigns, as its sources
    have them; None if it is missing. A parameter like **options is "**"."""
    tree, (first, _, method) = _module_tree(module), name.partition(".")
    node = None if tree is None else _find_definition(tree.body, first)
    if node is None or not isinstance(node, ast.ClassDef):
        return None if node is None else _parameters(node)
    if not method:
        return [target.id for target in _targets(node) if isinstance(target, ast.Name)]
    if (inner := _find_definition(node.body, method)) is not None:
        return _parameters(inner)
    bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
    found = (find_parameters(_origin(tree, module, b), f"{b}.{method}") for b in bases)
    return next((parameters for parameters in found if parameters is not None), None)


@functools.cache
def _module_tree(module: str) -> ast.Module | None:
    """A module's source; None if vLLM or the module is missing."""
    if (folder := vllm_folder()) is None:
        return None
    path = folder.parent / module.replace(".", "/")
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return ast.parse(file.read_text(encoding="utf-8"))
    return None


def vllm_folder() -> Path | None:
    """The folder of the installed vLLM; None if it is not installed."""
    package = importlib.util.find_spec("vllm")
    return None if package is None or package.origin is None else Path(package.origin).parent


def _find_definition(body: list[ast.stmt], name: str) -> Any:
    """The last function or class of this name, also in a branch: overloads come before it."""
    for node in reversed(body):
        if isinstance(node, ast.If) and (inner := _find_definition(node.body + node.orelse, name)):
            return inner
        if getattr(node, "name", None) == name:
            return node
    return None


def _parameters(node: Any) -> list[str]:
    args = node.args
    names = [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    return names + ["**"] * (args.kwarg is not None)


def _targets(node: ast.ClassDef) -> Iterator[ast.expr]:
    for line in node.body:
        if isinstance(line, ast.AnnAssign):
            yield line.target
        elif isinstance(line, ast.Assign):
            yield from line.targets


def _origin(tree: Any, module: str, name: str) -> str:
    """The module that a name comes from: the one that this module imports it from, or itself."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            return node.module or module
    return module


def missing_routes(has_route: Callable[[str], bool], has_group_route: bool) -> list[str]:
    """The routes that a server lacks. `has_route` asks it for a path, and changes nothing."""
    routes = SERVER_ROUTES if has_group_route else (*SERVER_ROUTES, f"POST {GENERATE_ROUTE}")
    return [route for route in routes if not has_route(route.partition(" ")[2])]
