"""How many tokens fit a forward pass, from the memory that it keeps for its backward pass.

This is measured, not estimated: a small forward with gradient counts the bytes that autograd
saves. They are compared with the machine's memory, not with the currently free part, so a run
has the same micro-batches, and the same bits, on every restart on such a machine.
"""

import os
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rloo_cli.config.schema import GenerationConfig, ModelConfig, TrainConfig
from rloo_cli.data.bin_packing import ForwardCost, ForwardLimits
from rloo_cli.data.packing import MicroBatch, whole_group_slices
from rloo_cli.policy import load
from rloo_cli.policy.layouts import probe_groups
from rloo_cli.policy.model import Policy, weight_shape
from rloo_cli.policy.token_budget import (
    CUDA_CONTEXT_SHARE,
    MAX_USEFUL_TOKENS,
    ActivationMemory,
    choose_token_budget,
    gpu_bytes_left,
    samples_beside_training,
)
from rloo_cli.policy.value import ValueModel
from rloo_cli.utils import environment
from rloo_cli.utils.errors import OutOfMemory, refuse

MAX_MASKED_TOKENS = 4096  # with a tokens-by-tokens mask, of 16 million entries then
NO_GRAD_TOKEN_FACTOR = 4  # times as many tokens if nothing is kept for a backward pass
CGROUP_MEMORY_FILE = Path("/sys/fs/cgroup/memory.max")


def model_forward_cost(model: PreTrainedModel) -> ForwardCost:
    """The cost of a forward pass of this model, from its config and its parameters."""
    config = model.config.get_text_config()
    head = model.get_output_embeddings().weight
    tables = {id(head): prod(weight_shape(head))}
    embedding = model.get_input_embeddings().weight
    tables[id(embedding)] = prod(weight_shape(embedding))
    heads = getattr(config, "num_attention_heads", 0) or 0
    width = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
    return ForwardCost(
        layer_params=sum(prod(weight_shape(p)) for p in model.parameters()) - sum(tables.values()),
        num_layers=config.num_hidden_layers,
        attention_width=heads * width,
        hidden_size=weight_shape(head)[1],
        vocab_size=weight_shape(head)[0],
    )


def measure_forward_limits(
    policy: Policy,
    model_keys: ModelConfig,
    train: TrainConfig,
    generation: GenerationConfig,
    max_group_tokens: int,
    has_reference_model: bool,
    held_share: tuple[float, int] = (1.0, 1),
    value_model: ValueModel | None = None,
    required_tokens: int | None = None,
    other_bytes: float = 0.0,
) -> ForwardLimits:
    """The budget of a forward pass; sets the policy up to keep and recompute accordingly.

    `max_group_tokens`: tokens of the largest group that can occur. `has_reference_model`: a second
    model is in memory. `held_share`: share of weights and optimizer that this process holds, and
    how many processes share its memory. `value_model`: it is trained too, with its own backward
    passes. `required_tokens`: tokens that have to fit without recomputing; None = the largest
    group. Splitting a group, if that costs nothing, is better than recomputing everything.
    `other_bytes`: bytes of the device that other models take.
    """
    shape = model_forward_cost(policy.model)
    free = _free_bytes(policy, generation, has_reference_model, held_share, value_model)
    beside = samples_beside_training(generation)
    room = _activation_memory(policy, train, beside, max(free - other_bytes, 0.0))
    fitting = room.tokens_that_fit(_bytes_per_policy_token(policy, value_model))
    auto = model_keys.gradient_checkpointing == "auto" and can_recompute(policy.model)
    if auto and fitting < (max_group_tokens if required_tokens is None else required_tokens):
        load.enable_gradient_checkpointing(policy.model)
        if value_model is not None:
            load.enable_gradient_checkpointing(value_model.model)
        fitting = room.tokens_that_fit(_bytes_per_policy_token(policy, value_model))
    most = MAX_MASKED_TOKENS if has_attention_mask(policy) else MAX_USEFUL_TOKENS[room.kind]
    tokens = train.micro_batch_tokens or choose_token_budget(most, max_group_tokens, fitting)
    policy.logprob_module.keep_logits_bytes = int(room.most_kept_logits)
    size = train.micro_batch_size
    no_grad_size = train.no_grad_batch_size or (None if size is None else 2 * size)
    # More than `most` is not faster, and slower on a CPU, whose caches are smaller.
    no_grad_tokens = max(tokens, min(NO_GRAD_TOKEN_FACTOR * tokens, most))
    return ForwardLimits(shape, tokens, no_grad_tokens, size, no_grad_size)


def has_attention_mask(policy: Policy) -> bool:
    """Whether attention builds a mask of tokens by tokens.

    A model's own attention does so on packed sequences on a GPU, unless it is flash attention,
    which gets the documents' lengths.
    """
    name = str(getattr(policy.model.config, "_attn_implementation", ""))
    return policy.device.type == "cuda" and policy.layout == "packed" and "flash" not in name


def _activation_memory(
    policy: Policy, train: TrainConfig, samples_beside: bool, free_bytes: float
) -> ActivationMemory:
    """The memory available to a training forward of the policy."""
    kind = "cpu" if policy.device.type == "cpu" else "cuda"
    itemsize = 4 if policy.logprob_module.float32_head else policy.dtype.itemsize
    return ActivationMemory(
        kind,
        _device_memory_bytes(policy.device),
        free_bytes,
        weight_shape(policy.model.get_output_embeddings().weight)[0] * itemsize,
        train.keep_logits_gb,
        samples_beside,
    )


def allocated_bytes(device: torch.device) -> float:
    """Bytes of tensors on a GPU so far; 0 on a CPU, where they are not counted."""
    return float(torch.cuda.memory_allocated(device)) if device.type == "cuda" else 0.0


def can_recompute(model: PreTrainedModel) -> bool:
    """Whether the model supports gradient checkpointing."""
    return bool(getattr(model, "supports_gradient_checkpointing", False))


def _bytes_per_policy_token(policy: Policy, value_model: ValueModel | None) -> float:
    """Bytes per token of the policy for the policy or the value model, whichever is more."""
    policy_bytes = _working_bytes_per_token(policy)
    if value_model is None:
        return policy_bytes
    value_bytes = value_model.tokens_per_policy_token * _working_bytes_per_token(value_model)
    return max(policy_bytes, value_bytes)


def _working_bytes_per_token(policy: Policy | ValueModel) -> float:
    """Bytes per token that a training forward keeps, and one layer's if it is recomputed.

    With gradient checkpointing the backward pass has one layer's activations at a time, which are
    more than all that the forward keeps.
    """
    kept = activation_bytes_per_token(policy)
    if not load.has_gradient_checkpointing(policy.model):
        return kept
    load.disable_gradient_checkpointing(policy.model)
    try:
        whole = activation_bytes_per_token(policy)
    finally:
        load.enable_gradient_checkpointing(policy.model)
    return kept + whole / policy.model.config.get_text_config().num_hidden_layers


def activation_bytes_per_token(policy: Policy | ValueModel) -> float:
    """Bytes that autograd keeps per token of a training forward, without weights."""
    held: dict[int, int] = {}
    weights: set[int] = set()

    def seen(module: nn.Module, _: object) -> None:
        """Note the weights as they are used: gathered ones are not activations."""
        parameters = module.parameters(recurse=False)
        weights.update(p.untyped_storage().data_ptr() for p in parameters)

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    groups = probe_groups(policy)
    micro_batch = policy.pack(groups, whole_group_slices(groups, range(len(groups))))
    hooks = [m.register_forward_pre_hook(seen) for m in policy.model.modules()]
    try:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            if isinstance(policy, ValueModel):
                policy.values(micro_batch)
            else:
                _forward_without_logits(policy, micro_batch)
    finally:
        for hook in hooks:
            hook.remove()
    return sum(held.values()) / micro_batch.input_ids.numel()


def _forward_without_logits(policy: Policy, micro_batch: MicroBatch) -> None:
    """A training forward that keeps no logits, which are counted separately."""
    keep, policy.logprob_module.keep_logits_bytes = policy.logprob_module.keep_logits_bytes, 0
    try:
        policy.call(micro_batch, [policy.temperature], False)
    finally:
        policy.logprob_module.keep_logits_bytes = keep


def _free_bytes(
    policy: Policy,
    generation: GenerationConfig,
    has_reference_model: bool,
    held_share: tuple[float, int] = (1.0, 1),
    value_model: ValueModel | None = None,
) -> float:
    """Bytes of the device that weights, gradients, masters and optimizer leave free."""
    weights = [p for p in policy.model.parameters() if p.requires_grad]
    count, each = sum(prod(weight_shape(p)) for p in weights), policy.dtype.itemsize
    every = sum(prod(weight_shape(p)) * min(p.element_size(), each)
                for p in policy.model.parameters())  # fmt: skip
    half = max(p.element_size() for p in weights) < 4 or each < 4
    held = every + count * (4 + 8 + (4 if half else 0)) + (every if has_reference_model else 0)
    if value_model is not None:
        learned = value_model.num_parameters
        held += learned * (value_model.dtype.itemsize + 4 + 8 + (4 if half else 0))
    held *= held_share[0]
    total = _device_memory_bytes(policy.device)
    if policy.device.type != "cuda":
        total /= held_share[1]
    else:
        if generation.shares_device:
            _check_engine_fits(generation, held, total)
        contexts = 2 if generation.shares_device else 1  # of a waiting trial
        total = gpu_bytes_left(total, generation)
        total -= contexts * environment.offloaded_trials_bytes()
    return max(total - held, 0.0)


def _check_engine_fits(generation: Any, held_bytes: float, total_bytes: float) -> None:
    """Raise OutOfMemory if a sleeping inference engine could not wake up.

    Memory that the trainer keeps between two updates stays occupied while the engine samples.
    """
    share = generation.colocate.gpu_memory_utilization
    fits = 1 - CUDA_CONTEXT_SHARE - held_bytes / total_bytes
    if share > fits:
        what, where = "trainer and sampler do not fit on one GPU", "gpu_memory_utilization"
        where = f"generation.colocate.{where}"
        why = f"weights, optimizer and reference keep {held_bytes / 1e9:.1f} GB of"
        why += f" {total_bytes / 1e9:.1f}, the engine needs {share:.0%}"
        fix = "model.lora, distributed=zero2 with more GPUs, or generation=vllm_server"
        fix = f"{where}={max(fits, 0.0):.2f}" if fits > 0.05 else fix
        refuse(where, what, fix, why, error=OutOfMemory)


def _device_memory_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    whole_machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = CGROUP_MEMORY_FILE.read_text().strip() if CGROUP_MEMORY_FILE.is_file() else "max"
    return float(min(whole_machine, int(limit) if limit.isdigit() else whole_machine))
