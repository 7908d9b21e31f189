"""Loads a model that is to be sharded: rank 0 has its weights in CPU memory, all ranks a shell.

The shell is on torch's `meta` device and takes no memory. The engine fills it unit by unit
(`gather.materialize_unit`), and rank 0 frees what it has sent.
"""

from collections.abc import Callable
from pathlib import Path

from torch import nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from rloo_cli.config.schema import ModelConfig
from rloo_cli.config.value_model import ValueInit
from rloo_cli.distributed import gather
from rloo_cli.distributed.world import World
from rloo_cli.policy import load, lora, reference, value, vision

ModelConfigs = tuple[PretrainedConfig, GenerationConfig]
ReadModel = Callable[[], PreTrainedModel]  # on rank 0, in CPU memory


def load_policy_shell(
    keys: ModelConfig, seed: int, world: World, checkpoint: Path | None, has_reference: bool
) -> tuple[PreTrainedModel, gather.MetaWeights]:
    """Load the trained model, with its adapter if it has one. -> its shell, its weights

    `has_reference`: on the same base a reference may need a second adapter. Raises the errors of
    `lora.load_trained_model`, on all ranks.
    """
    second = has_reference and reference.needs_reference_adapter(keys)

    def read() -> PreTrainedModel:
        model = lora.load_trained_model(keys, checkpoint, gather.CPU, seed, world.device)
        if second:
            reference.attach_reference_adapter(model, keys, seed)
        return model

    def attach(shell: PreTrainedModel) -> None:
        if keys.lora is not None:
            attach_empty_adapters(shell, keys, seed, second)
        vision.freeze_parts(shell, keys.freeze)

    return load_causal_shell(keys, world, read, attach)


def attach_empty_adapters(
    shell: PreTrainedModel, keys: ModelConfig, seed: int, second: bool
) -> None:
    """Attach adapters without values to a shell. `second`: also the reference's."""
    assert keys.lora is not None
    lora.attach_adapter(shell, keys.lora, seed)
    if second:
        reference.attach_reference_adapter(shell, keys, seed)
    for module in shell.modules():  # peft gives a second adapter values even on meta
        for name, weight in list(module._parameters.items()):
            if weight is not None and not weight.is_meta:
                empty = nn.Parameter(weight.detach().to("meta"), requires_grad=weight.requires_grad)
                module._parameters[name] = empty
    if keys.disable_dropout:
        load.zero_dropout(shell)


def load_frozen_shell(
    keys: ModelConfig, world: World, path: str
) -> tuple[PreTrainedModel, gather.MetaWeights]:
    """Load a model that is never trained. -> its shell, its weights"""
    return load_causal_shell(
        keys, world, lambda: load.load_causal_lm(keys, path, gather.CPU, world.device)
    )


def load_value_shell(
    keys: ModelConfig, world: World, value_init: ValueInit, saved: Path | None
) -> tuple[PreTrainedModel, bool, gather.MetaWeights]:
    """Load a value model. -> its shell, whether its head is new, its weights

    `saved`: as for `value.load_value_weights`, whose errors it raises on all ranks.
    """
    is_new = [False]

    def read() -> PreTrainedModel:
        device = world.device
        model, is_new[0] = value.load_value_weights(keys, value_init, gather.CPU, device, saved)
        model.score.float()
        return model

    trust = {"trust_remote_code": value_init.trust_remote_code}
    shell, weights = load_classifier_shell(keys.model_copy(update=trust), world, read)
    shell.score.float()
    return shell, bool(world.broadcast_from_rank0(is_new[0])), weights


def load_causal_shell(
    keys: ModelConfig,
    world: World,
    read: ReadModel,
    prepare: Callable[[PreTrainedModel], None] = lambda shell: None,
) -> tuple[PreTrainedModel, gather.MetaWeights]:
    """Load a language model by `read`, on rank 0. -> its shell, its weights

    `prepare`: changes to a shell before its modules are compared with the model's.
    """
    loaded: list[PreTrainedModel] = []

    def read_configs() -> ModelConfigs:
        loaded.append(read())
        return loaded[0].config, loaded[0].generation_config

    shell = load.build_meta_model(keys, world.run_on_rank0(read_configs), world.device)
    prepare(shell)
    return shell, gather.MetaWeights(shell, loaded[0] if loaded else None)


def load_classifier_shell(
    keys: ModelConfig, world: World, read: ReadModel
) -> tuple[PreTrainedModel, gather.MetaWeights]:
    """Load a sequence classifier by `read`, on rank 0. -> its shell, its weights"""
    loaded: list[PreTrainedModel] = []

    def read_config() -> PretrainedConfig:
        loaded.append(read())
        config: PretrainedConfig = loaded[0].config
        return config

    shell = load.build_meta_classifier(keys, world.run_on_rank0(read_config), world.device)
    shell.config.architectures = [type(shell).__name__]  # so far the language model's
    return shell, gather.MetaWeights(shell, loaded[0] if loaded else None)
