"""Any causal language model and its tokenizer, from a hub name, a folder, or made here."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)

from rloo_cli.config import hf_cache, rules_model, rules_paths, synthetic
from rloo_cli.config.schema import ModelConfig
from rloo_cli.policy import quantization
from rloo_cli.utils.errors import ConfigError, MachineError, Problem, RunError
from rloo_cli.utils.files import JsonObject

HALF_DTYPES = (torch.bfloat16, torch.float16)

log = logging.getLogger(__name__)


def load_policy_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer, with a pad token: pad is told from EOS by position, never by id."""
    path = synthetic.resolve_model_path(config.tokenizer or config.path)
    loaded: PreTrainedTokenizerBase = _load_pretrained(
        AutoTokenizer.from_pretrained, config.tokenizer or config.path, path, config
    )
    if loaded.pad_token_id is None:
        loaded.pad_token = loaded.eos_token
    if config.chat_template is not None:
        loaded.chat_template = Path(config.chat_template).read_text()
    return loaded


def read_max_positions(config: ModelConfig) -> int | None:
    """The most positions the model has, read from its config before any weights load."""
    found = _load_pretrained(
        AutoConfig.from_pretrained, config.path, synthetic.resolve_model_path(config.path), config
    )
    text = found.get_text_config()
    length = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    return int(length) if length else None


def read_vocab_size(config: ModelConfig) -> int | None:
    """Rows of the model's embedding, read from its config before any weights load."""
    found = _load_pretrained(
        AutoConfig.from_pretrained, config.path, synthetic.resolve_model_path(config.path), config
    )
    size = getattr(found.get_text_config(), "vocab_size", None)
    return size if isinstance(size, int) else None


def load_reference_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase | None:
    """The tokenizer of model.ref_path; None where it has none."""
    if config.ref_path is None or config.ref_path == config.path:
        return None
    changes = {"path": config.ref_path, "tokenizer": None, "revision": None, "chat_template": None}
    try:
        return load_policy_tokenizer(config.model_copy(update=changes))
    except (ConfigError, MachineError):  # a folder of weights alone is enough for a reference
        return None


def load_causal_lm(
    config: ModelConfig, path: str, device: torch.device, compute_device: torch.device | None = None
) -> Any:
    """Load the weights, in `dtype`, on `device`. Pickled weight files are refused.

    `computes`: the device that decides what `auto` is, where it is another one.

    Raises ConfigError for what is no model that can be loaded, MachineError for what is not here.
    """
    to = compute_device or device
    loaded, missing = _load_weights(
        AutoModelForCausalLM, config, path, to, **_quantized_load_options(config, device)
    )
    if missing:
        why = f"missing: {', '.join(missing[:5])}; they would be random numbers"
        raise ConfigError(
            Problem(f"{path} lacks {len(missing)} of the model's tensors", "model.path", why)
        )
    apply_model_settings(loaded, config)
    if config.quantization is not None:
        quantization.disable_avx512_kernel(loaded)
        return loaded  # which is where it stays
    return loaded.to(device)


def apply_model_settings(model: Any, config: ModelConfig) -> None:
    """What the config changes about a model, with or without its weights."""
    if config.disable_dropout:
        zero_dropout(model)
    if config.lm_head_fp32:
        compute_head_in_float32(model)
    if config.gradient_checkpointing is True:  # auto: policy.memory
        enable_gradient_checkpointing(model)


def build_meta_model(
    config: ModelConfig, real_configs: tuple[Any, Any], device: torch.device
) -> Any:
    """The same model without weights (torch's `meta` device), for a process that is sent them.

    `like`: config and generation config of the real one. `device`: where it will compute.
    """
    options: JsonObject = {"dtype": resolve_dtype(config.dtype, device)}
    if config.attn_implementation is not None:
        options["attn_implementation"] = config.attn_implementation
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(
            real_configs[0], trust_remote_code=config.trust_remote_code, **options
        )
    empty.generation_config = real_configs[1]
    apply_model_settings(empty, config)
    return empty


def _quantized_load_options(config: ModelConfig, device: torch.device) -> JsonObject:
    keys = config.quantization
    return (
        {}
        if keys is None
        else quantization.quantized_load_options(keys, resolve_dtype(config.dtype, device), device)
    )


def load_sequence_classifier(config: ModelConfig, path: str, device: torch.device) -> Any:
    """A language model as a sequence classifier with one label, whose head may be new.

    Raises ConfigError where there is no such class for it, or the rest of the weights is missing.
    """
    return load_classifier_with_head(config, path, device)[0]


def load_classifier_with_head(
    config: ModelConfig, path: str, device: torch.device
) -> tuple[Any, bool]:
    """The same, and whether its head is new: the files are a language model's."""
    kind = AutoModelForSequenceClassification
    loaded, lacking = _load_weights(kind, config, path, device, num_labels=1)
    missing = [name for name in lacking if name != "score.weight"]
    if missing or getattr(getattr(loaded, "score", None), "bias", 0) is not None:
        lacks = f"missing: {', '.join(missing[:5])}" if missing else "it has no plain `score` head"
        what = f"{path} cannot become a reward model"
        raise ConfigError(Problem(what, "model.path", f"{type(loaded).__name__}: {lacks}"))
    if config.disable_dropout:
        zero_dropout(loaded)
    if config.gradient_checkpointing is True:
        enable_gradient_checkpointing(loaded)
    return loaded.to(device), bool(lacking)


@contextmanager
def errors_naming_key(key: str) -> Iterator[None]:
    """Errors inside that name model.path name this key instead, which said what to load."""
    try:
        yield
    except RunError as error:
        told = [replace(p, where=key if p.where == "model.path" else p.where)
                for p in error.problems]  # fmt: skip
        raise type(error)(*told) from None


def _load_weights(
    auto_class: Any, config: ModelConfig, path: str, device: torch.device, **load_options: Any
) -> tuple[Any, list[str]]:
    """A model of this Auto class, and the names of its tensors that the files lack."""
    _refuse_bad_config(path, config, auto_class)
    options: JsonObject = {
        "dtype": resolve_dtype(config.dtype, device),
        "use_safetensors": True,
    } | load_options
    if config.attn_implementation is not None:
        options["attn_implementation"] = config.attn_implementation
    loaded, info = _load_pretrained(
        auto_class.from_pretrained,
        path,
        synthetic.resolve_model_path(path),
        config,
        output_loading_info=True,
        **options,
    )
    _check_unused(path, loaded, sorted(info["unexpected_keys"]))
    return loaded, sorted(info["missing_keys"])


def _check_unused(path: str, loaded: Any, unused: list[str]) -> None:
    """Tensors of the files that the model has no use for are said in the log. Raises ConfigError
    for whole layers: without them it would be another model."""
    if layers := rules_model.uncounted_layers(loaded.config.to_dict(), unused):
        why = f"its config.json leaves out {len(layers)} tensors: {', '.join(layers[:5])}"
        what = f"{path} has more layers in its weights than in its config.json"
        fix = "correct num_hidden_layers in its config.json"
        raise ConfigError(Problem(what, "model.path", why, fix))
    if unused:
        log.warning("%s: %d tensors are not used: %s", path, len(unused), ", ".join(unused[:5]))


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the GPU has it, float32 elsewhere."""
    if name != "auto":
        chosen: torch.dtype = getattr(torch, name)
        if (
            chosen is torch.bfloat16
            and device.type == "cuda"
            and not torch.cuda.is_bf16_supported()
        ):
            why = f"{torch.cuda.get_device_name(device)} has no bfloat16"
            raise MachineError(
                Problem("model.dtype = bfloat16", "model.dtype", why, "model.dtype=float32")
            )
        return chosen
    half = device.type == "cuda" and torch.cuda.is_bf16_supported()
    return torch.bfloat16 if half else torch.float32


def enable_gradient_checkpointing(model: Any) -> None:
    """Turn gradient checkpointing on. The reentrant form would forget the layers' arguments."""
    model.gradient_checkpointing_enable({"use_reentrant": False})


def compute_head_in_float32(model: Any) -> None:
    """Let the output embedding compute in float32, whatever the dtype of its weights.

    In bfloat16 two kernels that sum in another order differ by more than the samples they draw
    can bear; most of that is the head's (arXiv 2506.13585).
    """
    head = model.get_output_embeddings()

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        bias = getattr(head, "bias", None)
        return nn.functional.linear(
            hidden.float(), head.weight.float(), None if bias is None else bias.float()
        )

    head.forward = forward


def zero_dropout(model: nn.Module) -> None:
    """Set every dropout to 0: with one, the ratio of a token to itself is noise.

    Layers hold it as a module, as a number of their own, or read the config's in each forward.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for holder in (module, getattr(module, "config", None)):
            for name, value in list(vars(holder).items()) if holder is not None else ():
                if "drop" in name and isinstance(value, float):
                    setattr(holder, name, 0.0)


def _refuse_bad_config(path: str, config: ModelConfig, auto_class: Any) -> None:
    """Before anything is built: a config.json that asks for what would fill the memory, or that
    is of weights with another head."""
    try:
        values = hf_cache.read_model_config(
            synthetic.resolve_model_path(path), config.revision if path == config.path else None
        )
        why = hf_cache.model_config_problem(values)
        if auto_class is AutoModelForCausalLM:
            why = why or rules_model.wrong_head_reason(values)
    except ValueError as error:
        why = str(error)
    if why:
        raise ConfigError(Problem(f"{path} cannot be loaded", "model.path", why))


def _load_pretrained(load: Any, name: str, path: str, config: ModelConfig, **options: Any) -> Any:
    """Call a `from_pretrained`, and turn its many errors into one that says what to do."""
    revision = config.revision if name == config.path else None  # of model.path, and no other
    remote = {"trust_remote_code": config.trust_remote_code, "revision": revision}
    try:
        return load(path, **{k: v for k, v in remote.items() if v is not None}, **options)
    except RunError:  # a signal's, which came meanwhile
        raise
    except Exception as error:  # what a damaged or a hostile file makes a library raise
        why = "\n".join(line[:300] for line in str(error).strip().splitlines()[:4])
        if "trust_remote_code" in str(error):
            fix = "model.trust_remote_code=true, if you trust its authors; nothing was run"
            raise ConfigError(
                Problem(f"{name} brings Python code of its own", "model.path", why, fix)
            ) from None
        if Path(path).exists():
            raise ConfigError(Problem(f"{name} cannot be loaded", "model.path", why)) from None
        if rules_paths.looks_like_path(path):
            looked = f"looked at {Path(path).absolute()}"
            raise ConfigError(Problem(f"{name} does not exist", "model.path", looked)) from None
        why = (
            f"not a folder here, not in the cache {hf_cache.hub_cache_folder()}, and the "
            f"hub:\n{why}"
        )
        fix = f"on a machine with network: {hf_cache.fetch_command()}; or name a local folder"
        raise MachineError(Problem(f"{name!r} is not to be had", "model.path", why, fix)) from None
