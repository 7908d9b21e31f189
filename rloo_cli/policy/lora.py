"""Adapters (LoRA and peft's other kinds) inside a causal language model. The base never changes.

peft puts its layers in place of the linear ones; class, backbone and output embedding of the model
stay the same, so packing, attention and head need no changes. Only adapters, and whole copies
of the layers in `modules_to_save`, get gradients. Adapters are float32 whatever the dtype of the
base: they are small, and need no masters.

There may be two adapters: `default`, which is trained, and `reference`, which is not. `use_adapter`
chooses between them; with none, the numbers are exactly the base's own.
"""

import copy
import dataclasses
import importlib
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from rloo_cli.config.pasted import paste_setting
from rloo_cli.config.rules_lora import LAYER_KEYS, PEFT_ORIGIN
from rloo_cli.config.schema import LoraConfig, ModelConfig
from rloo_cli.policy import load, quantization, vision
from rloo_cli.policy.load import HALF_DTYPES
from rloo_cli.utils.errors import MachineError, check_missing_library, refuse
from rloo_cli.utils.files import JsonObject

TRAINED_ADAPTER, REFERENCE_ADAPTER = "default", "reference"
PEFT_NAME_PREFIX = "base_model.model."  # of every name in an adapter's file
PEFT_WEIGHTS_FILE, PEFT_CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"


class AdapterLayer(Protocol):
    """A layer of peft's, which computes with one adapter, another, or none."""

    _disable_adapters: bool
    _active_adapter: str | list[str]


def load_trained_model(
    config: ModelConfig,
    checkpoint: Path | None,
    device: torch.device,
    seed: int,
    compute_device: torch.device | None = None,
) -> PreTrainedModel:
    """Load the trained model, in full or with an adapter. `checkpoint`: where training resumes.

    For an adapter's checkpoint, only the adapter is read: the base is model.path's.
    `compute_device`: where it will compute, if it is loaded elsewhere. Raises ConfigError for an
    adapter that does not fit, MachineError for a package that is not installed.
    """
    if config.lora is None:
        path = str(checkpoint or config.path)
        model = load.load_causal_lm(config, path, device, compute_device)
        vision.freeze_parts(model, config.freeze)
        return model
    _check_arguments(config.lora)  # fail before the weights are loaded
    loaded = load.load_causal_lm(config, config.path, device, compute_device)
    attach_adapter(loaded, config.lora, seed)
    check_mergeable(loaded)
    folder = checkpoint or config.lora.path
    if folder is not None:
        read_adapter_weights(loaded, Path(folder))
    vision.freeze_parts(loaded, config.freeze)  # adapters within a frozen tower, too
    if config.disable_dropout:
        load.zero_dropout(loaded)
    return loaded


def attach_adapter(
    model: PreTrainedModel, keys: LoraConfig, seed: int, name: str = TRAINED_ADAPTER
) -> None:
    """Freeze the base and attach a new adapter, which changes nothing yet.

    Its random half is sampled only from `seed`, so it is the same on every rank, and torch's own
    state is unchanged. Raises ConfigError if it cannot be attached.
    """
    adapter = make_adapter_config(keys)
    before = [model.get_input_embeddings(), model.get_output_embeddings()]
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # peft warns that the rank of the experts matches no module: they are parameters.
        warnings.filterwarnings("ignore", message=".*pattern keys did not match")
        torch.manual_seed(seed)
        try:
            model.add_adapter(adapter, name)
        except (
            ImportError, ValueError, TypeError, NotImplementedError, AssertionError
        ) as error:  # fmt: skip
            check_missing_library(error, "model.lora")
            what = "the adapter does not fit the model"
            fix = "name layers that the model has; model.lora.target_modules=all-linear selects all"
            refuse("model.lora", what, fix, error)
    model.set_adapter(TRAINED_ADAPTER)  # of two adapters, the first one learns
    after = [model.get_input_embeddings(), model.get_output_embeddings()]
    tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    if tied and any(a is not b for a, b in zip(before, after, strict=True)):
        why = "its input and output embeddings are one tensor, which the adapter would split"
        fix = "leave both out of model.lora.target_modules and model.lora.modules_to_save"
        refuse("model.lora", "the model ties its embeddings", fix, why)
    prefix = _weight_prefix(model)
    for part, weight in model.named_parameters():
        if prefix in part and weight.dtype in HALF_DTYPES:
            weight.data = weight.data.float()
    if keys.peft_type == "LORA" and not keys.use_dora:  # DoRA reads weights directly
        multiply_in_base_dtype(model)
    if load.has_gradient_checkpointing(model):
        model.enable_input_require_grads()  # else nothing before the first adapter has a gradient


def multiply_in_base_dtype(model: PreTrainedModel) -> None:
    """Let float32 adapters multiply in the dtype of their input, like the layers next to them.

    peft casts the input to the adapter's float32 instead, keeps that for the backward pass, and
    multiplies in float32, which a GPU does 15 times as slowly. Weights, gradients and updates stay
    float32. For a model that is float32 this changes nothing.
    """
    kind = importlib.import_module("peft.tuners.lora.layer").LoraLayer
    wrapper = _parameter_wrapper()
    for module in model.modules():
        if not isinstance(module, kind) or isinstance(module, wrapper):
            continue
        module.cast_input_dtype_enabled = False
        for part in (*module.lora_A.values(), *module.lora_B.values()):
            if type(part) is nn.Linear:
                part.forward = MethodType(_linear_as_input, part)  # type: ignore[method-assign]


def _linear_as_input(layer: nn.Linear, x: Tensor) -> Tensor:
    """Compute a linear layer with its weights cast to the input's dtype. (..., in) -> (..., out)"""
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    return nn.functional.linear(x, layer.weight.to(x.dtype), bias)


def import_peft() -> ModuleType:
    """Import peft. Raises MachineError if it is not installed."""
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        fix = "pip install 'rloo-cli[peft]'"
        refuse("model.lora", "model.lora needs peft", fix, error, error=MachineError)


def has_adapter(model: PreTrainedModel) -> bool:
    """Whether the model has an adapter."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def adapter_parameters(
    model: PreTrainedModel, name: str = TRAINED_ADAPTER
) -> dict[str, nn.Parameter]:
    """An adapter's parameters by their names in peft's files; this rank's shares of them if an
    engine has sharded them.

    Whole layers that are trained (`modules_to_save`) are among them.
    """
    read = importlib.import_module("peft.utils").get_peft_model_state_dict
    given = {"state_dict": model.state_dict(keep_vars=True), "save_embedding_layers": False}
    parameters = read(model, adapter_name=name, **given)
    return {PEFT_NAME_PREFIX + part: parameter for part, parameter in parameters.items()}


def adapter_tensors(model: PreTrainedModel, name: str = TRAINED_ADAPTER) -> dict[str, Tensor]:
    """The live tensors of `adapter_parameters`, without gradient."""
    return {part: tensor.detach() for part, tensor in adapter_parameters(model, name).items()}


def adapter_state(model: PreTrainedModel, name: str = TRAINED_ADAPTER) -> dict[str, Tensor]:
    """The adapter's tensors, which this process has whole, in the form of a file."""
    return {part: tensor.contiguous() for part, tensor in adapter_tensors(model, name).items()}


def save_adapter(
    model: PreTrainedModel, folder: Path, gathered: dict[str, Tensor] | None = None
) -> None:
    """Write the trained adapter as peft does: its config, which names the base, and its tensors.

    `gathered`: the tensors, if the model has only shares of them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.copy(model.peft_config[TRAINED_ADAPTER])
    config.inference_mode = True  # as peft saves it
    for part in ("target_modules", "exclude_modules", "modules_to_save"):
        if isinstance(getattr(config, part, None), set | list):  # sets have no fixed order
            setattr(config, part, sorted(getattr(config, part)))
    config.save_pretrained(str(folder))
    tensors = adapter_state(model) if gathered is None else gathered
    tensors = {n: t.detach().cpu().contiguous() for n, t in tensors.items()}
    save_file(tensors, folder / PEFT_WEIGHTS_FILE, metadata={"format": "pt"})


@torch.no_grad()
def read_adapter_weights(model: PreTrainedModel, folder: Path, name: str = TRAINED_ADAPTER) -> None:
    """Load the values that `save_adapter` or peft wrote in this folder into an adapter.

    Raises ConfigError if the two do not have the same tensors.
    """
    try:
        tensors = load_file(folder / PEFT_WEIGHTS_FILE)
    except Exception as error:  # safetensors has its own errors
        what = f"the adapter {folder / PEFT_WEIGHTS_FILE} cannot be read"
        refuse("model.lora.path", what, f"name a folder with a whole {PEFT_WEIGHTS_FILE}", error)
    copy_into_adapter(model, tensors, name, str(folder))


@torch.no_grad()
def copy_into_adapter(
    model: PreTrainedModel, tensors: dict[str, Tensor], name: str, source: str
) -> None:
    """Copy tensors, by their names in peft's files, into an adapter. `source`: their origin.

    Raises ConfigError if they are not those of this adapter.
    """
    adapter = adapter_tensors(model, name)
    sizes = {n: tuple(t.shape) for n, t in adapter.items()}
    found = {n: tuple(t.shape) for n, t in tensors.items()}
    if sizes != found:
        odd = sorted(n for n in {**sizes, **found} if sizes.get(n) != found.get(n))
        lines = [f"{n}: {found.get(n, 'missing')}, expected {sizes.get(n, 'none')}" for n in odd]
        why = f"{len(odd)} tensors differ: {'; '.join(lines[:3])}"
        what = f"the adapter in {source} does not match model.lora"
        fix = f"copy r, target_modules, ... from its {PEFT_CONFIG_FILE} to model.lora"
        refuse("model.lora", what, fix, why)
    for part, tensor in adapter.items():
        tensor.copy_(tensors[part])


def tensors_to_save(model: PreTrainedModel) -> list[Tensor]:
    """The tensors in a checkpoint: the trained adapter's, or else every parameter."""
    parameters = adapter_parameters(model).values() if has_adapter(model) else model.parameters()
    return list(parameters)


def adapter_layers(model: PreTrainedModel) -> list[AdapterLayer]:
    """The modules that compute with one adapter, another, or none."""
    tuners = importlib.import_module("peft.tuners.tuners_utils")
    other = importlib.import_module("peft.utils.other")
    kinds = (tuners.BaseTunerLayer, other.AuxiliaryTrainingWrapper)
    return [module for module in model.modules() if isinstance(module, kinds)]


def adapter_scales(model: PreTrainedModel) -> dict[str, float]:
    """The factor of the trained adapter's product, by the name of the adapted layer."""
    kind = importlib.import_module("peft.tuners.tuners_utils").BaseTunerLayer
    modules = [(name, module) for name, module in model.named_modules() if isinstance(module, kind)]
    return {name: float(module.scaling[TRAINED_ADAPTER]) for name, module in modules}


@contextmanager
def use_adapter(layers: list[AdapterLayer], name: str | None) -> Iterator[None]:
    """Let these `layers` compute with the adapter `name` inside, or with none.

    peft's own functions also set `requires_grad` of parameters that an optimizer and a parallel
    engine already hold; this only sets the switch.
    """
    before = [(layer, layer._disable_adapters, layer._active_adapter) for layer in layers]
    for layer in layers:
        layer._disable_adapters = name is None
        if name is not None:
            layer._active_adapter = [name]
    try:
        yield
    finally:
        for layer, disabled, active in before:
            layer._disable_adapters, layer._active_adapter = disabled, active


# Merging the adapter into the base.


@torch.no_grad()
def merged_model(model: PreTrainedModel) -> PreTrainedModel:
    """A model of the same class with the trained adapter merged into its weights.

    The live one is unchanged: an adapted layer is merged in a copy, all others are shared.
    Quantized weights come back in the dtype that the model computes in.
    """
    whole = _empty_plain(model)
    whole.load_state_dict(_merged_state(model), assign=True, strict=False)
    whole.tie_weights()
    for name, module in whole.named_modules():
        for part, tensor in module.named_buffers(recurse=False):
            if tensor.is_meta:  # not in files: the frequencies of positions, for example
                module._buffers[part] = model.get_submodule(name).get_buffer(part)
    empty = [n for n, p in whole.named_parameters() if p.is_meta]
    if empty:
        raise RuntimeError(f"the merged model has no {', '.join(empty[:5])}")
    if model.can_generate():  # a reward model has no generation config
        whole.generation_config = model.generation_config
    whole.requires_grad_(False)
    return whole.eval()


def check_mergeable(model: PreTrainedModel) -> None:
    """Check that merging would leave no parameter of the plain model without values.

    Otherwise only the final save, after the training, would reveal that a model cannot be merged.
    Raises ConfigError with the layers that can be adapted.
    """
    names = {n for n, _ in model.named_parameters() if f".{_weight_prefix(model)}" not in n}
    for name, _, plain in _plain_layers(model):
        names |= {f"{name}.{part}" for part, _ in plain.named_parameters()}
    missing = [n for n, _ in _empty_plain(model).named_parameters() if n not in names]
    if missing:
        why = f"merged into the model it would leave {', '.join(missing[:3])} without values"
        fix = f"model.lora.target_modules=[{','.join(linear_targets(model))}]"
        refuse("model.lora", "this adapter could not be saved", fix, why)


def adapted_parameters(model: PreTrainedModel) -> list[str]:
    """Names of adapted parameters outside linear layers.

    The experts of a mixture, whose weights are one tensor, are such parameters.
    """
    kind = _parameter_wrapper()
    wrappers = [(n, m) for n, m in model.named_modules() if isinstance(m, kind)]
    return [f"{n.replace('.base_layer', '')}.{m.parameter_name}" for n, m in wrappers]


def linear_targets(model: PreTrainedModel) -> list[str]:
    """Last names of the adapted linear layers, in the form of `target_modules`."""
    kind = importlib.import_module("peft.tuners.tuners_utils").BaseTunerLayer
    skipped = _parameter_wrapper()
    layers = ((n, m) for n, m in model.named_modules() if isinstance(m, kind))
    return sorted({n.rpartition(".")[2] for n, m in layers if not isinstance(m, skipped)})


def adapted_beside_language(model: PreTrainedModel) -> list[str]:
    """Names of an adapter's weights in a vision tower, or between it and the language model."""
    apart = vision.modules_beside_language(model)
    return [n for n in (adapter_parameters(model) if apart else ()) if apart & {*n.split(".")}]


def _parameter_wrapper() -> type[nn.Module]:
    """The class of peft's layer around one parameter of a module; several of them are nested."""
    return importlib.import_module("peft.tuners.lora.layer").ParamWrapper


def _empty_plain(model: PreTrainedModel) -> PreTrainedModel:
    """A plain model of the same class, on torch's `meta` device."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        return type(model)(config)


def _plain_layers(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Iterate (name, layer, plain layer) of every layer that peft or bitsandbytes replaced.

    The plain layer has the base's values: `_merged_layer` merges the adapter.
    """
    kinds = importlib.import_module("peft.tuners.tuners_utils").BaseTunerLayer
    wrapper = importlib.import_module("peft.utils.other").ModulesToSaveWrapper
    done: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if name.startswith(done):
            continue
        if isinstance(module, wrapper):
            inner = module.modules_to_save[TRAINED_ADAPTER]
        elif isinstance(module, kinds):
            inner = module.get_base_layer()
        elif quantization.is_quantized(module):
            inner = module
        else:
            continue
        done = (*done, f"{name}.")
        yield name, module, inner


def _merged_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors of a plain model with the adapter merged, by name."""
    adapted = importlib.import_module("peft.tuners.tuners_utils").BaseTunerLayer
    state: dict[str, Tensor] = {}
    done: tuple[str, ...] = ()
    for name, module, plain in _plain_layers(model):
        if isinstance(module, adapted):
            plain = _merged_layer(module)
        elif quantization.is_quantized(module):
            plain = quantization.dequantized_linear(module)
        state |= {f"{name}.{part}": tensor.detach() for part, tensor in plain.state_dict().items()}
        done = (*done, f"{name}.")
    for name, module in model.named_modules():
        if f"{name}.".startswith(done):
            continue
        tensors = dict(module.named_parameters(recurse=False))
        tensors |= {part: buffer for part, buffer in module.named_buffers(recurse=False)
                    if part not in module._non_persistent_buffers_set}  # fmt: skip
        state |= {f"{name}.{part}" if name else part: t for part, t in tensors.items()}
    return state


def _merged_layer(layer: Any) -> nn.Module:
    """A copy of an adapted layer's base layer, with its adapter merged."""
    if quantization.is_quantized(layer.base_layer):
        return quantization.merged_linear(layer, TRAINED_ADAPTER)
    alone = copy.deepcopy(layer)
    while isinstance(alone, type(layer)):  # layers are nested, one per adapted parameter
        alone.merge(adapter_names=[TRAINED_ADAPTER])
        alone = alone.base_layer
    return alone


def read_adapter_config(folder: Path) -> JsonObject:
    """Read the config of an adapter's folder; {} if there is none. Raises ValueError."""
    path = folder / PEFT_CONFIG_FILE
    return json.loads(path.read_text()) if path.is_file() else {}


def make_adapter_config(keys: LoraConfig) -> Any:
    """peft's config of the kind `keys.peft_type`.

    Raises ConfigError for arguments that it does not accept, MachineError without peft.
    """
    kinds = import_peft().mapping.PEFT_TYPE_TO_CONFIG_MAPPING
    if keys.peft_type not in kinds:
        why, fix = "it is newer than the installed peft", "pip install --upgrade peft"
        what = f"peft has no {keys.peft_type}"
        refuse("model.lora.peft_type", what, fix, why, error=MachineError)
    kind, arguments = kinds[keys.peft_type], _adapter_arguments(keys)
    known = {field.name for field in dataclasses.fields(kind)}
    for name in [name for name in arguments if name not in known]:
        key = f"kwargs.{name}" if name in keys.kwargs else name
        what = f"{kind.__name__} has no argument {name}"
        why = f"it has {', '.join(sorted(known - PEFT_ORIGIN))}"
        refuse(f"model.lora.{key}", what, "leave it out", why)
    try:
        return kind(**arguments)
    except (ValueError, TypeError) as error:
        what = f"{kind.__name__} rejects these arguments"
        fix = "correct the named argument, in model.lora or in model.lora.kwargs"
        refuse("model.lora.kwargs", what, fix, error)


def _check_arguments(keys: LoraConfig) -> None:
    """Check peft's arguments, and that an adapter to continue from was made with the same.

    Raises ConfigError: a scale is in no tensor, so another one would go unnoticed.
    """
    ours = make_adapter_config(keys).to_dict()
    if keys.path is None or keys.peft_type == "LORA":  # a LoRA's: config/rules_lora.py
        return
    theirs = read_adapter_config(Path(keys.path))
    for name in sorted({*ours} - PEFT_ORIGIN - LAYER_KEYS):
        mine, found = (sorted(v) if isinstance(v, set | list) else v
                       for v in (ours[name], theirs.get(name, ours[name])))  # fmt: skip
        if mine != found:
            what = f"model.lora.kwargs: {name} is {mine}, but the adapter's is {found}"
            fix = paste_setting("model.lora.kwargs", {name: found})
            refuse("model.lora.kwargs", what, fix, f"the adapter is in {keys.path}")


def _adapter_arguments(keys: LoraConfig) -> JsonObject:
    """The arguments of peft's config: all keys for a LoRA, those that choose layers for others."""
    found: JsonObject = {"target_modules": keys.target_modules, "task_type": "CAUSAL_LM"}
    for name in ("exclude_modules", "modules_to_save"):
        if value := getattr(keys, name):
            found[name] = value
    if keys.peft_type == "LORA":
        found |= {
            "r": keys.r, "lora_alpha": keys.alpha, "lora_dropout": keys.dropout, "bias": keys.bias,
            "use_rslora": keys.use_rslora, "use_dora": keys.use_dora,
        }  # fmt: skip
    return found | keys.kwargs


def _weight_prefix(model: PreTrainedModel) -> str:
    """The prefix of the names of the adapter's own weights."""
    kind = model.peft_config[TRAINED_ADAPTER].peft_type
    return str(import_peft().mapping.PEFT_TYPE_TO_PREFIX_MAPPING[kind])
