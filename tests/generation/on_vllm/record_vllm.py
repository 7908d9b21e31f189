"""Record what rloo uses of a vLLM that is not installed: names and parameters, out of its sources.

python tests/generation/on_vllm/record_vllm.py FOLDER VERSION > vllm_0221.json

FOLDER is an unpacked wheel (`pip download vllm==VERSION --no-deps`, then unzip). Nothing of it is
imported. A function or method has its parameters' names, a class the names of its annotated fields;
a name that is not there has null, as has a module. `assigned` are module-level names.
"""

import ast
import json
import sys
from pathlib import Path
from typing import Any

NAMES: dict[str, list[str]] = {
    "vllm.config.model": ["ModelConfig.head_dtype"],
    "vllm.config.parallel": ["ParallelConfig"],
    "vllm.config.weight_transfer": ["WeightTransferConfig"],
    "vllm.distributed.device_communicators.pynccl": ["PyNcclCommunicator.broadcast"],
    "vllm.distributed.weight_transfer.base": [
        "WeightTransferEngine.__init__", "WeightTransferEngine.parse_init_info",
        "WeightTransferEngine.parse_update_info", "WeightTransferEngine.init_transfer_engine",
        "WeightTransferEngine.start_weight_update", "WeightTransferEngine.receive_weights",
        "WeightTransferEngine.finish_weight_update", "WeightTransferEngine.shutdown",
        "WeightTransferEngine.trainer_send_weights", "WeightTransferInitInfo",
        "WeightTransferUpdateInfo", "ParamMeta",
    ],
    "vllm.distributed.weight_transfer.factory": [
        "WeightTransferEngineFactory.register_engine", "WeightTransferEngineFactory.create_engine",
        "WeightTransferTrainerFactory.trainer_init",
    ],
    "vllm.distributed.weight_transfer.nccl_engine": [
        "NCCLWeightTransferInitInfo", "NCCLWeightTransferUpdateInfo", "NCCLTrainerInitInfo",
        "NCCLWeightTransferEngine.trainer_init", "NCCLWeightTransferEngine.receive_weights",
        "NCCLWeightTransferEngine.shutdown",
    ],
    "vllm.distributed.weight_transfer.ipc_engine": ["IPCTrainerInitInfo"],
    "vllm.engine.arg_utils": ["EngineArgs"],
    "vllm.entrypoints.common.cli_args": [],
    "vllm.entrypoints.launchers.cli_args": [],
    "vllm.entrypoints.launchers.api_server.entry": [],
    "vllm.entrypoints.serve.utils.api_utils": [],
    "vllm.entrypoints.llm": [
        "LLM.__init__", "LLM.collective_rpc", "LLM.init_weight_transfer_engine",
        "LLM.start_weight_update", "LLM.update_weights", "LLM.finish_weight_update",
        "LLM.get_weight_version", "LLM.reset_prefix_cache", "LLM.sleep", "LLM.wake_up",
        "LLM.release_kv_cache_memory",
    ],
    "vllm.entrypoints.openai.api_server": ["build_app", "run_server_worker"],
    "vllm.entrypoints.openai.cli_args": [
        "BaseFrontendArgs", "FrontendArgs", "make_arg_parser", "validate_parsed_serve_args",
    ],
    "vllm.entrypoints.openai.models.protocol": ["LoRAModulePath"],
    "vllm.entrypoints.utils": ["with_cancellation"],
    "vllm.logprobs": ["FlatLogprobs"],
    "vllm.lora.request": ["LoRARequest"],
    "vllm.lora.utils": ["parse_fine_tuned_lora_name"],
    "vllm.model_executor.layers.attention": ["is_deferred_attention_layer"],
    "vllm.model_executor.layers.attention.attention": ["Attention.process_weights_after_loading"],
    "vllm.model_executor.layers.attention.mla_attention": [
        "MLAAttention.process_weights_after_loading",
    ],
    "vllm.model_executor.layers.vocab_parallel_embedding": ["VocabParallelEmbeddingShardIndices"],
    "vllm.model_executor.model_loader.reload.layerwise": [
        "get_layerwise_info", "initialize_layerwise_reload", "finalize_layerwise_reload",
        "finalize_layerwise_processing",
    ],
    "vllm.model_executor.model_loader.reload.types": ["LayerReloadingInfo"],
    "vllm.model_executor.models.utils": ["WeightsMapper.get_rename_mapper"],
    "vllm.outputs": ["CompletionOutput"],
    "vllm.sampling_params": ["SamplingParams", "RequestOutputKind"],
    "vllm.utils.argparse_utils": ["FlexibleArgumentParser.parse_args"],
    "vllm.utils.system_utils": ["set_ulimit"],
    "vllm.v1.engine.async_llm": [
        "AsyncLLM.collective_rpc", "AsyncLLM.generate", "AsyncLLM.pause_generation",
        "AsyncLLM.reset_prefix_cache",
    ],
    "vllm.v1.engine.llm_engine": [
        "LLMEngine.add_request", "LLMEngine.abort_request", "LLMEngine.step",
        "LLMEngine.has_unfinished_requests",
    ],
    "vllm.v1.worker.gpu_worker": [
        "Worker.init_weight_transfer_engine", "Worker.start_weight_update",
        "Worker.update_weights", "Worker.finish_weight_update",
    ],
}  # fmt: skip
ASSIGNED = {"vllm.model_executor.model_loader.reload.meta": ["SKIP_TENSORS", "SKIP_LOAD_TENSORS"]}
IMPORTS = ["vllm.distributed.weight_transfer.ipc_engine"]  # what these need when they are imported
ROUTES = "entrypoints/**/*.py"
VARIABLES = "vllm.envs"
WORKERS = ["vllm.v1.worker.gpu_worker:Worker", "vllm.v1.worker.worker_base:WorkerBase"]


def tree(folder: Path, module: str) -> ast.Module | None:
    """A module's source; None where there is no such module."""
    root = folder / module.replace(".", "/")
    for file in (root.with_suffix(".py"), root / "__init__.py"):
        if file.is_file():
            return ast.parse(file.read_text())
    return None


def find(body: list[ast.stmt], name: str) -> Any:
    """The function or class of this name, at any depth of `if`s but not inside functions."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name == name:
                return node
        elif isinstance(node, ast.If) and (inner := find(node.body + node.orelse, name)):
            return inner
    return None


def recorded(module: ast.Module | None, name: str) -> list[str] | None:
    """Parameters of a function, fields of a class; None where it is not there."""
    node: Any = module
    for part in name.split("."):
        node = None if node is None else find(node.body, part)
    if node is None:
        return None
    if isinstance(node, ast.ClassDef):
        return fields(node)
    args = node.args
    names = [a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    return names + [f"{stars}{a.arg}" for stars, a in (("*", args.vararg), ("**", args.kwarg)) if a]


def fields(node: ast.ClassDef) -> list[str]:
    """Annotated names, and members of an enumeration."""
    found = [n.target.id for n in node.body if isinstance(n, ast.AnnAssign)]  # type: ignore[union-attr]
    plain = [n.targets[0] for n in node.body if isinstance(n, ast.Assign)]
    return found + [t.id for t in plain if isinstance(t, ast.Name)]


def imports(module: ast.Module | None) -> list[str]:
    """First parts of the names that a module imports at its top."""
    found = set()
    for node in module.body if module else []:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return sorted(found)


def routes(folder: Path) -> list[str]:
    """METHOD /path of every decorator that names both."""
    found = set()
    for file in sorted((folder / "vllm").glob(ROUTES)):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr in ("get", "post") and node.args:
                path = node.args[0]
                if isinstance(path, ast.Constant) and str(path.value).startswith("/"):
                    found.add(f"{node.func.attr.upper()} {path.value}")
    return sorted(found)


def main(folder: Path, version: str) -> dict[str, Any]:
    """The whole record."""
    modules: dict[str, Any] = {}
    for name, names in NAMES.items():
        source = tree(folder, name)
        modules[name] = None if source is None else {n: recorded(source, n) for n in names}
    assigned = {
        name: [n for n in names if any(n == t for t in top_names(tree(folder, name)))]
        for name, names in ASSIGNED.items()
    }
    workers: set[str] = set()
    for one in WORKERS:
        module, _, name = one.partition(":")
        node = find(tree(folder, module).body, name)  # type: ignore[union-attr]
        workers |= {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
    return {
        "version": version,
        "modules": modules,
        "assigned": assigned,
        "imports": {name: imports(tree(folder, name)) for name in IMPORTS},
        "routes": routes(folder),
        "variables": sorted(n for n in top_names(tree(folder, VARIABLES)) if n.startswith("VLLM_")),
        "worker": sorted(workers),
    }


def top_names(module: ast.Module | None) -> list[str]:
    """Names that a module assigns at its top, those for type checkers among them."""
    found = []
    for node in module.body if module else []:
        for inner in node.body if isinstance(node, ast.If) else [node]:
            if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                found.append(inner.target.id)
            elif isinstance(inner, ast.Assign):
                found += [t.id for t in inner.targets if isinstance(t, ast.Name)]
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2]), indent=1))
