"""How many rows a forward pass may have, from what one keeps for its backward pass.

Measured, not estimated: a small forward with gradient counts the bytes that autograd saves. The
memory it is compared with is the machine's, not what happens to be free, so that a run is cut
alike, and gives the same bits, whenever it is started again on such a machine.
"""

import os
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rloo_cli.config.schema import RunConfig
from rloo_cli.data.bin_packing import Limits, Shape
from rloo_cli.data.packing import Micro, whole
from rloo_cli.policy.layouts import probes
from rloo_cli.policy.load import recompute
from rloo_cli.policy.model import Policy, size
from rloo_cli.policy.value import Critic
from rloo_cli.utils import environment
from rloo_cli.utils.errors import OutOfMemory, Problem

SHARE = 0.5  # of what weights and optimizer leave: the rest is for the sampler, and for error
MOST = {"cpu": 1024, "cuda": 32768}  # rows beyond which nothing gets faster
MASKED = 4096  # rows of a mask of rows by rows: 16 million of its entries
CONTEXT = 0.02  # of a GPU: CUDA's own, its libraries', and buffers of the backward pass
NO_GRAD = 4  # times as many rows where nothing is kept
CGROUP = Path("/sys/fs/cgroup/memory.max")


def shape_of(model: Any) -> Shape:
    """What a forward pass of this model costs (`Shape`), from its config and its parameters."""
    config = model.config.get_text_config()
    head = model.get_output_embeddings().weight
    tables = {id(head): prod(size(head))}
    found = model.get_input_embeddings().weight
    tables[id(found)] = prod(size(found))
    heads = getattr(config, "num_attention_heads", 0) or 0
    width = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
    return Shape(
        body=sum(prod(size(p)) for p in model.parameters()) - sum(tables.values()),
        layers=config.num_hidden_layers,
        width=heads * width,
        hidden=size(head)[1],
        vocabulary=size(head)[0],
    )


def limits(
    policy: Policy,
    config: RunConfig,
    longest: int,
    reference: bool,
    share: tuple[float, int] = (1.0, 1),
    critic: Critic | None = None,
    least: int | None = None,
    others: float = 0.0,
) -> Limits:
    """The budget of a forward pass; sets the policy up to keep and recompute accordingly.

    `longest`: rows of the largest group there can be. `reference`: a second model is held.
    `share`: part of weights and optimizer that this process holds; processes with one memory.
    `critic`: a value model that learns too, whose backward pass comes apart from the policy's.
    `least`: rows that have to fit without recomputing; None = those of the largest group. To cut a
    group where that costs nothing is better than to compute everything once more.
    `others`: bytes of the device that other models have.
    """
    train, shape = config.train, shape_of(policy.model)
    room = SHARE * max(_left(policy, config, reference, share, critic) - others, 0.0)
    each = _each(policy, critic)
    auto = config.model.gradient_checkpointing == "auto" and can_recompute(policy.model)
    if auto and room / each < (longest if least is None else least):
        recompute(policy.model)
        if critic is not None:
            recompute(critic.model)
        each = _each(policy, critic)
    most = MASKED if has_masks(policy) else MOST.get(policy.device.type, MOST["cuda"])
    rows = train.micro_batch_tokens or _budget(most, longest, room / each)
    policy.scorer.keep_bytes = int(min(_logits_kept(policy, train.keep_logits_gb), room / 4))
    size = train.micro_batch_size
    again = train.no_grad_batch_size or (None if size is None else 2 * size)
    return Limits(shape, rows, NO_GRAD * rows, size, again)


def has_masks(policy: Policy) -> bool:
    """Whether attention makes a mask of rows by rows: packed rows by a model's own attention on a
    GPU, unless that is flash attention, which is told the documents' lengths."""
    own = str(getattr(policy.model.config, "_attn_implementation", ""))
    return policy.device.type == "cuda" and policy.layout == "packed" and "flash" not in own


def _logits_kept(policy: Policy, given: float | None) -> float:
    """Bytes of logits that the head may keep: as the key says, else a tenth of a GPU."""
    if given is not None:
        return given * 1e9
    return 0.1 * _total(policy.device) if policy.device.type == "cuda" else 2e9


def held_now(device: torch.device) -> float:
    """Bytes of tensors on a GPU so far; 0 on a CPU, where nobody counts them."""
    return float(torch.cuda.memory_allocated(device)) if device.type == "cuda" else 0.0


def can_recompute(model: Any) -> bool:
    """Whether the model knows gradient checkpointing."""
    return bool(getattr(model, "supports_gradient_checkpointing", False))


def _each(policy: Policy, critic: Critic | None) -> float:
    """Bytes for each of the policy's rows, of whichever model keeps more."""
    found = bytes_per_row(policy)
    return found if critic is None else max(found, critic.wide * bytes_per_row(critic))


def bytes_per_row(policy: Policy | Critic) -> float:
    """What autograd keeps of one row of a training forward, weights not counted."""
    held: dict[int, int] = {}
    weights: set[int] = set()

    def seen(module: nn.Module, _: Any) -> None:
        """Weights as they are when they are used: gathered ones are nobody's activations."""
        own = module.parameters(recurse=False)
        weights.update(p.untyped_storage().data_ptr() for p in own)

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    groups = probes(policy)
    micro = policy.pack(groups, whole(groups, range(len(groups))))
    hooks = [m.register_forward_pre_hook(seen) for m in policy.model.modules()]
    try:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            if isinstance(policy, Critic):
                policy.values(micro)
            else:
                _forward(policy, micro)
    finally:
        for hook in hooks:
            hook.remove()
    return sum(held.values()) / micro.input_ids.numel()


def _forward(policy: Policy, micro: Micro) -> None:
    """A training forward that keeps no logits: they have a share of their own."""
    keep, policy.scorer.keep_bytes = policy.scorer.keep_bytes, 0
    try:
        policy.call(micro, [policy.temperature], False)
    finally:
        policy.scorer.keep_bytes = keep


def _left(
    policy: Policy,
    config: RunConfig,
    reference: bool,
    share: tuple[float, int] = (1.0, 1),
    critic: Critic | None = None,
) -> float:
    """Bytes of the device that weights, gradients, masters and optimizer leave."""
    weights = [p for p in policy.model.parameters() if p.requires_grad]
    count, each = sum(prod(size(p)) for p in weights), policy.dtype.itemsize
    own = [(prod(size(p)), min(p.element_size(), each)) for p in policy.model.parameters()]
    every = sum(numbers * width for numbers, width in own)
    half = max(p.element_size() for p in weights) < 4 or each < 4
    held = every + count * (4 + 8 + (4 if half else 0)) + (every if reference else 0)
    if critic is not None:
        learned = sum(p.numel() for p in critic.model.parameters())
        held += learned * (critic.dtype.itemsize + 4 + 8 + (4 if half else 0))
    held *= share[0]
    total, generation = _total(policy.device), config.generation
    if generation.backend == "vllm_colocate" and policy.device.type == "cuda":
        _leave_room(generation, held, total)
    total /= 1 if policy.device.type == "cuda" else share[1]
    if generation.backend == "vllm_colocate" and policy.device.type == "cuda":
        engine: Any = generation.colocate  # type: ignore[attr-defined]
        total *= 1 - (0.0 if engine.sleep == "weights" else engine.gpu_memory_utilization)
    if policy.device.type == "cuda":
        total = total * (1 - CONTEXT) - environment.beside_bytes()
    return max(total - held, 0.0)


def _leave_room(generation: Any, held: float, total: float) -> None:
    """Raises OutOfMemory where an engine that sleeps could not wake up: what the trainer keeps
    between two updates stays while it samples."""
    share = generation.colocate.gpu_memory_utilization
    fits = 1 - CONTEXT - held / total
    if share > fits:
        raise OutOfMemory(
            Problem(
                "trainer and sampler do not fit on one GPU",
                "generation.colocate.gpu_memory_utilization",
                f"weights, optimizer and reference keep {held / 1e9:.1f} GB of"
                f" {total / 1e9:.1f}, the engine wants {share:.0%}",
                f"generation.colocate.gpu_memory_utilization={max(fits, 0.0):.2f}"
                if fits > 0.05
                else "model.lora, distributed=zero2 with more GPUs, or generation=vllm_server",
            )
        )


def _total(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    whole_machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = CGROUP.read_text().strip() if CGROUP.is_file() else "max"
    return float(min(whole_machine, int(limit) if limit.isdigit() else whole_machine))


def _budget(most: int, longest: int, fit: float) -> int:
    """`most` rows, or the longest group where it needs more: to cut it can cost a pass more.

    Where so many do not `fit`, a power of two that does: a little more memory changes nothing.
    """
    wanted = max(most, longest)
    return wanted if wanted <= fit else max(64, 1 << (int(max(fit, 1)).bit_length() - 1))
