"""Loads a causal language model and its tokenizer from a hub name, a folder, or `make:NAME`."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rloo_cli.config import hf_cache, rules_model, rules_paths, synthetic
from rloo_cli.config.schema import ModelConfig
from rloo_cli.config.vision_models import unknown_vision_reason, vision_family
from rloo_cli.policy import quantization
from rloo_cli.utils.errors import ConfigError, MachineError, RunError, check_missing_library, refuse
from rloo_cli.utils.files import JsonObject

HALF_DTYPES = (torch.bfloat16, torch.float16)

T = TypeVar("T")

log = logging.getLogger(__name__)


def load_policy_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer and give it a pad token.

    Pad and EOS are distinguished by position, never by id.
    """
    name = config.tokenizer or config.path
    path = synthetic.resolve_model_path(name)
    tokenizer: PreTrainedTokenizerBase = _load_pretrained(
        AutoTokenizer.from_pretrained, name, path, config
    )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if config.chat_template is not None:
        tokenizer.chat_template = synthetic.template_path(config.chat_template).read_text()
    return tokenizer


def read_max_positions(config: ModelConfig) -> int | None:
    """Read the model's maximum length from its config, before any weights load."""
    text_config = _load_text_config(config)
    length = getattr(text_config, "max_position_embeddings", None)
    length = length or getattr(text_config, "n_positions", None)
    return int(length) if length else None


def read_vocab_size(config: ModelConfig) -> int | None:
    """Read the size of the model's embedding from its config, before any weights load."""
    size = getattr(_load_text_config(config), "vocab_size", None)
    return size if isinstance(size, int) else None


def _load_text_config(config: ModelConfig) -> PretrainedConfig:
    path = synthetic.resolve_model_path(config.path)
    loaded = _load_pretrained(
        AutoConfig.from_pretrained, config.path, path, config, **config.init_kwargs
    )
    return loaded.get_text_config()


def load_reference_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of model.ref_path; None if it has none."""
    if config.ref_path is None or config.ref_path == config.path:
        return None
    changes = {"path": config.ref_path, "tokenizer": None, "revision": None, "chat_template": None}
    try:
        return load_policy_tokenizer(config.model_copy(update=changes))
    except (ConfigError, MachineError):  # a folder with only weights is enough for a reference
        return None


def load_causal_lm(
    config: ModelConfig, path: str, device: torch.device, compute_device: torch.device | None = None
) -> PreTrainedModel:
    """Load the model in `path` on `device`. Pickled weight files are refused.

    `compute_device`: the device that decides dtype=auto, if it is another one.

    Raises ConfigError for a folder that is not a loadable model, MachineError for one that was not
    found.
    """
    options = _quantized_load_options(config, device)
    loaded, missing = _load_weights(
        _language_class(config, path), config, path, compute_device or device, **options
    )
    if missing:
        what = f"{path} lacks {len(missing)} of the model's tensors"
        why = f"missing: {', '.join(missing[:5])}; they would be random numbers"
        fix = "download or save that model again completely, or use another one"
        refuse("model.path", what, fix, why)
    apply_model_settings(loaded, config)
    if config.quantization is not None:
        quantization.disable_avx512_kernel(loaded)
        return loaded  # a quantized model cannot be moved
    return loaded.to(device)


def _language_class(config: ModelConfig, path: str) -> Any:
    """The Auto class of the language model in `path`; a different one with a vision tower."""
    try:
        revision = config.revision if path == config.path else None
        values = hf_cache.read_model_config(synthetic.resolve_model_path(path), revision)
    except ValueError:  # `_refuse_bad_config` raises the error
        return AutoModelForCausalLM
    return AutoModelForImageTextToText if vision_family(values) else AutoModelForCausalLM


def apply_model_settings(model: PreTrainedModel, config: ModelConfig) -> None:
    """Apply the config's settings to a model, with or without its weights."""
    if config.disable_dropout:
        zero_dropout(model)
    if config.lm_head_fp32:
        compute_head_in_float32(model)
    if config.gradient_checkpointing is True:  # auto: policy.memory
        enable_gradient_checkpointing(model)


def build_meta_model(
    config: ModelConfig,
    real_configs: tuple[PretrainedConfig, GenerationConfig],
    device: torch.device,
) -> PreTrainedModel:
    """Build the model without weights (torch's `meta` device), for a rank that receives them.

    `real_configs`: config and generation config of the loaded model. `device`: where this one will
    compute.
    """
    has_tower = vision_family(real_configs[0].to_dict()) is not None
    auto_class = AutoModelForImageTextToText if has_tower else AutoModelForCausalLM
    empty = _build_on_meta(auto_class, config, real_configs[0], device)
    empty.generation_config = real_configs[1]
    apply_model_settings(empty, config)
    return empty


def build_meta_classifier(
    config: ModelConfig, real_config: PretrainedConfig, device: torch.device
) -> PreTrainedModel:
    """Build a sequence classifier without weights, as `build_meta_model` does a language model."""
    empty = _build_on_meta(AutoModelForSequenceClassification, config, real_config, device)
    if config.disable_dropout:
        zero_dropout(empty)
    if config.gradient_checkpointing is True:
        enable_gradient_checkpointing(empty)
    return empty


def _build_on_meta(
    auto_class: Any, config: ModelConfig, real_config: PretrainedConfig, device: torch.device
) -> PreTrainedModel:
    options: JsonObject = {"dtype": resolve_dtype(config.dtype, device)}
    if config.attn_implementation is not None:
        options["attn_implementation"] = config.attn_implementation
    with torch.device("meta"):
        empty: PreTrainedModel = auto_class.from_config(
            real_config, trust_remote_code=config.trust_remote_code, **options
        )
    return empty


def _quantized_load_options(config: ModelConfig, device: torch.device) -> JsonObject:
    if config.quantization is None:
        return {}
    dtype = resolve_dtype(config.dtype, device)
    return quantization.quantized_load_options(config.quantization, dtype, device)


def load_sequence_classifier(
    config: ModelConfig, path: str, device: torch.device
) -> PreTrainedModel:
    """Load a language model as a sequence classifier with one label, whose head may be new.

    Raises ConfigError if transformers has no such class, or the rest of the weights is missing.
    """
    return load_classifier_with_head(config, path, device)[0]


def load_classifier_with_head(
    config: ModelConfig, path: str, device: torch.device, compute_device: torch.device | None = None
) -> tuple[PreTrainedModel, bool]:
    """Load a model as `load_sequence_classifier` does. -> the model, whether its head is new

    `compute_device`: the device that decides dtype=auto, if it is another one.
    """
    auto_class = AutoModelForSequenceClassification
    loaded, lacking = _load_weights(
        auto_class, config, path, compute_device or device, num_labels=1
    )
    missing = [name for name in lacking if name != "score.weight"]
    if missing or getattr(getattr(loaded, "score", None), "bias", 0) is not None:
        lacks = f"missing: {', '.join(missing[:5])}" if missing else "it has no plain `score` head"
        fix = "use a complete model, whose classifier in transformers has a `score` without bias"
        what, why = f"{path} cannot become a reward model", f"{type(loaded).__name__}: {lacks}"
        refuse("model.path", what, fix, why)
    if config.disable_dropout:
        zero_dropout(loaded)
    if config.gradient_checkpointing is True:
        enable_gradient_checkpointing(loaded)
    return loaded.to(device), bool(lacking)


@contextmanager
def errors_naming_key(key: str) -> Iterator[None]:
    """Let errors inside name this key instead of model.path."""
    try:
        yield
    except RunError as error:
        renamed = [
            replace(p, where=key if p.where == "model.path" else p.where) for p in error.problems
        ]
        raise type(error)(*renamed) from None


def _load_weights(
    auto_class: Any, config: ModelConfig, path: str, device: torch.device, **load_options: object
) -> tuple[PreTrainedModel, list[str]]:
    """Load a model of this Auto class. -> it, and the names of its tensors that no file has"""
    _refuse_bad_config(path, config, auto_class)
    options: JsonObject = {"dtype": resolve_dtype(config.dtype, device), "use_safetensors": True}
    options |= {"output_loading_info": True} | load_options | config.init_kwargs
    if config.attn_implementation is not None:
        options["attn_implementation"] = config.attn_implementation
    folder = synthetic.resolve_model_path(path)
    loaded, info = _load_pretrained(auto_class.from_pretrained, path, folder, config, **options)
    _check_unused(path, loaded, sorted(info["unexpected_keys"]))
    return loaded, sorted(info["missing_keys"])


def _check_unused(path: str, loaded: PreTrainedModel, unused: list[str]) -> None:
    """Log the tensors of the files that the model does not use.

    Raises ConfigError for unused layers: the loaded model would be another one.
    """
    if layers := rules_model.uncounted_layers(loaded.config.to_dict(), unused):
        why = f"its config.json leaves out {len(layers)} tensors: {', '.join(layers[:5])}"
        what = f"{path} has more layers in its weights than in its config.json"
        fix = "correct num_hidden_layers in its config.json"
        refuse("model.path", what, fix, why)
    if unused:
        log.warning("%s: %d tensors are not used: %s", path, len(unused), ", ".join(unused[:5]))


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of this name; `auto` is bfloat16 on a GPU that has it, else float32."""
    on_gpu = device.type == "cuda"
    if name == "auto":
        return torch.bfloat16 if on_gpu and torch.cuda.is_bf16_supported() else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    if dtype is torch.bfloat16 and on_gpu and not torch.cuda.is_bf16_supported():
        what, why = (
            "model.dtype = bfloat16",
            f"{torch.cuda.get_device_name(device)} does not support bfloat16",
        )
        refuse("model.dtype", what, "model.dtype=float32", why, error=MachineError)
    return dtype


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Turn gradient checkpointing on. The reentrant form would drop the layers' arguments."""
    older = model.gradient_checkpointing_enable  # its name before transformers 5.23
    getattr(model, "activation_checkpointing_enable", older)({"use_reentrant": False})


def disable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Turn gradient checkpointing off."""
    older = model.gradient_checkpointing_disable
    getattr(model, "activation_checkpointing_disable", older)()


def has_gradient_checkpointing(model: PreTrainedModel) -> bool:
    """Whether gradient checkpointing is on. transformers has two names for this question."""
    return any(getattr(part, "gradient_checkpointing", False) for part in model.modules())


def compute_head_in_float32(model: PreTrainedModel) -> None:
    """Let the output embedding compute in float32, whatever the dtype of its weights.

    In bfloat16 two kernels with other summation orders differ by more than sampling can tolerate;
    most of that is the head's (arXiv 2506.13585).
    """
    head = model.get_output_embeddings()

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        bias = getattr(head, "bias", None)
        bias = None if bias is None else bias.float()
        return nn.functional.linear(hidden.float(), head.weight.float(), bias)

    head.forward = forward


def zero_dropout(model: nn.Module) -> None:
    """Set every dropout to 0: otherwise the ratio of a token to itself is not 1.

    Layers hold it as a module or as a number, or read it from the config in each forward.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for holder in (module, getattr(module, "config", None)):
            for name, value in list(vars(holder).items()) if holder is not None else ():
                if "drop" in name and isinstance(value, float):
                    setattr(holder, name, 0.0)


def _refuse_bad_config(path: str, config: ModelConfig, auto_class: object) -> None:
    """Refuse a config.json that would exceed the memory, or whose weights have another head."""
    revision = config.revision if path == config.path else None
    try:
        values = hf_cache.read_model_config(synthetic.resolve_model_path(path), revision)
        why = hf_cache.model_config_problem(values)
        if auto_class in (AutoModelForCausalLM, AutoModelForImageTextToText):
            why = why or rules_model.wrong_head_reason(values)
            if values.get("model_type") not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
                why = why or unknown_vision_reason(values)
    except ValueError as error:
        why = str(error)
    if why:
        fix = "use another model, or correct its config.json"
        refuse("model.path", f"{path} cannot be loaded", fix, why)


def _load_pretrained(
    load: Callable[..., T], name: str, path: str, config: ModelConfig, **options: object
) -> T:
    """Call a `from_pretrained`, and turn its many errors into one with a fix."""
    revision = config.revision if name == config.path else None  # the revision is model.path's
    remote = {"trust_remote_code": config.trust_remote_code, "revision": revision}
    try:
        return load(path, **{k: v for k, v in remote.items() if v is not None}, **options)
    except RunError:  # from a signal
        raise
    except Exception as error:  # libraries may raise anything for a damaged file
        fix = "name a folder that save_pretrained has written"
        refuse_unloadable(error, name, path, "model.path", fix, ConfigError)


def refuse_unloadable(
    error: Exception, name: str, path: str, key: str, fix: str, refusal: type[RunError]
) -> NoReturn:
    """Turn one of the many errors of `from_pretrained` into one with a fix.

    path: the folder or hub name that was read, `name` as the user wrote it. fix, refusal: for a
    folder that cannot be loaded. Raises MachineError for a model that is not here.
    """
    check_missing_library(error, key)
    why = "\n".join(line[:300] for line in str(error).strip().splitlines()[:4])
    if "trust_remote_code" in str(error):
        section = key.rpartition(".")[0]
        fix = f"{section}.trust_remote_code=true, if you trust its authors; nothing was run"
        refuse(key, f"{name} comes with its own Python code", fix, why, error=refusal)
    if Path(path).exists():
        refuse(key, f"{name} cannot be loaded", fix, why, error=refusal)
    if rules_paths.looks_like_path(path):
        what, fix = f"{name} does not exist", "name a folder that exists, or a hub's ORG/NAME"
        refuse(key, what, fix, f"looked at {Path(path).absolute()}", error=refusal)
    why = f"not a local folder, not in the cache {hf_cache.hub_cache_folder()}, and the hub:\n{why}"
    fix = f"on a machine with network: {hf_cache.fetch_command()}; or name a local folder"
    refuse(key, f"{name!r} was not found", fix, why, error=MachineError)
