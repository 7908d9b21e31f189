"""Which of vLLM's two model runners an engine uses, and the variable that selects the second.

Runner V1 launches one kernel for each seeded row and token, since each row has its own generator;
V2 draws all rows in one kernel. vLLM 0.32 uses V2 for every model it can. 0.22.1 does so for
one architecture, though it can run more: there `VLLM_USE_V2_MODEL_RUNNER` asks for V2. With it an
engine does not start if V2 cannot do something, so it is set only for architectures and arguments
that V2 takes by 0.22.1's sources.

It imports neither torch nor vLLM.
"""

import importlib.util
import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from rloo_cli.config import hf_cache, synthetic
from rloo_cli.config.rules_sampling import keeps_masks
from rloo_cli.config.schema import GenerationConfig, ModelConfig
from rloo_cli.distributed.device_count import visible_gpus
from rloo_cli.generation.vllm.config import EngineKeys
from rloo_cli.generation.vllm.versions import installed_vllm_version, is_old_vllm
from rloo_cli.utils.files import JsonObject

RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
# Dense decoders with their own code in 0.22.1, and no state besides keys and values.
V2_ARCHITECTURES = {
    "GPTNeoXForCausalLM", "GemmaForCausalLM", "GraniteForCausalLM", "LlamaForCausalLM",
    "MistralForCausalLM", "Olmo2ForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
}  # fmt: skip
# Further engine arguments that are compatible with V2. Any other leaves the choice to vLLM.
HARMLESS_ARGUMENTS = frozenset(
    {"cudagraph_capture_sizes", "load_format", "max_cudagraph_capture_size", "max_logprobs"}
)
STOCK_TORCH_COMPILE = 1  # the mode of vLLM's compilation config that V2 refuses


def runner_environment(
    model: ModelConfig,
    generation: GenerationConfig,
    version: str | None = None,
    on_gpu: bool | None = None,
    environment: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """The variable that selects V2 where it is needed, or where an older vLLM would use V1.

    `version`: vLLM's; `on_gpu`: whether its engine has GPUs; None: as on this machine. A variable
    that the user has set in `environment` stays, unless only V2 can send sampling masks.
    """
    if keeps_masks(generation):
        return {RUNNER_VARIABLE: "1"}  # V1 does not send masks
    version = installed_vllm_version() if version is None else version
    on_gpu = bool(visible_gpus()) if on_gpu is None else on_gpu
    if not is_old_vllm(version) or not on_gpu or RUNNER_VARIABLE in environment:
        return {}
    return {RUNNER_VARIABLE: "1"} if _old_vllm_takes_v2(model, generation.own_keys) else {}


def has_triton(on_gpu: bool) -> bool:
    """Whether Triton is installed, with a backend for CPUs if there is no GPU. Not imported."""
    spec = importlib.util.find_spec("triton")
    if spec is None or on_gpu:
        return spec is not None
    folders = spec.submodule_search_locations
    return any((Path(folder) / "backends" / "cpu").is_dir() for folder in folders or ())


def _old_vllm_takes_v2(model: ModelConfig, keys: EngineKeys) -> bool:
    """Whether 0.22.1 has V2 for this model, these arguments and this machine's packages."""
    values = _model_config(model)
    compilation = keys.extra.get("compilation_config")
    mode = compilation.get("mode") if isinstance(compilation, dict) else None
    others = {name.lstrip("-").replace("-", "_") for name in keys.extra} - HARMLESS_ARGUMENTS
    if isinstance(compilation, dict) and mode != STOCK_TORCH_COMPILE:
        others.discard("compilation_config")
    return (
        bool(V2_ARCHITECTURES.intersection(values.get("architectures") or ()))
        and has_triton(on_gpu=True)
        and not others
        and not _is_quantized(keys, values)
        and keys.model_impl in (None, "auto", "vllm")
        and not metadata.entry_points(group="vllm.logits_processors")
    )


def _is_quantized(keys: EngineKeys, values: JsonObject) -> bool:
    return keys.quantization is not None or "quantization_config" in values


def _model_config(model: ModelConfig) -> JsonObject:
    """The model's config.json; {} if it cannot be read, which other checks report."""
    try:
        path = synthetic.resolve_model_path(model.path)
        return hf_cache.read_model_config(path, model.revision)
    except ValueError:
        return {}
