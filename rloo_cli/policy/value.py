"""The value model: a backbone with one number per position, the expected rest of the return.

V_t is read at the policy's logits for token t, at the positions that predict a completion's
tokens, so a micro-batch of the policy also works here: `shared`, `packed` and `padded` layouts and
our attention alike. The right layout is found as for a reward model,
by comparing hidden states, here at every one of these positions.

It starts as a reward model, head included, if one fits; else as the policy with a head of zeros.
Then V is 0 at first, whatever the seed, and a step's returns are plain sums of token rewards until
it has learned. The head is always float32: V is compared with returns, of which it
must resolve small differences.
"""

from collections.abc import Sequence
from math import prod
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from rloo_cli.config.schema import ModelConfig
from rloo_cli.config.value_model import ValueInit
from rloo_cli.data import packing
from rloo_cli.data.batch import Batch, Group
from rloo_cli.data.bin_packing import ForwardCost
from rloo_cli.data.packing import GroupSlice, MicroBatch, whole_group_slices
from rloo_cli.policy import layouts, load, shared_attention
from rloo_cli.policy.model import forward_inputs, in_eval_mode, position_ids_support, weight_shape
from rloo_cli.policy.row_selection import select_rows
from rloo_cli.utils.errors import refuse
from rloo_cli.utils.fault_injection import poison_tensor


class ValueModule(nn.Module):
    """Backbone and head in one module, which a parallel engine wraps."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.names_position_ids, self.takes_position_ids = position_ids_support(model.base_model)

    def forward(self, micro_batch: MicroBatch | Tensor, hidden_only: bool = False) -> Tensor:
        """V before each completion token, in float32. -> (N, 1)

        `hidden_only`: the hidden states that it is read from instead. -> (N, h). Given ids (1, T)
        instead of a micro-batch, the states of all positions. -> (1, T, h)
        """
        if isinstance(micro_batch, Tensor):
            states: Tensor = self.model.base_model(input_ids=micro_batch, use_cache=False)[0]
            return states
        states = self.model.base_model(**forward_inputs(micro_batch, self.takes_position_ids))[0]
        dtype = states.dtype if hidden_only else torch.float32
        rows = states.reshape(-1, states.shape[-1])
        hidden = select_rows(rows, micro_batch.logit_index, dtype)
        if hidden_only:
            return hidden
        values: Tensor = self.model.score(hidden)  # FSDP does not accept a view as an output
        return values


class ValueModel:
    """A sequence classifier with one label, read at every position. `device`: where it computes."""

    def __init__(self, model: PreTrainedModel, device: torch.device, new_head: bool = False):
        self.model, self.device = model, device
        self.new_head = new_head  # whether the head is newly initialized
        self.head: nn.Linear = model.score.float()
        self.head.forward = MethodType(_float32_linear, self.head)
        self.forward_module = ValueModule(model)
        self.call: nn.Module = self.forward_module  # or an engine around it
        # Of the weights, without the head; an engine may store them in another.
        self.dtype: torch.dtype = next(model.base_model.parameters()).dtype
        self.meta_weights: Any = None  # `distributed.gather`, if the model has no weights yet
        self.layout = "padded"  # until `choose_layout` finds a better one
        self.tokens_per_policy_token = 1.0  # of a forward: the policy may have another layout

    @property
    def names_position_ids(self) -> bool:
        """Whether the backbone's forward names `position_ids`."""
        return self.forward_module.names_position_ids

    @property
    def vocab_size(self) -> int:
        """V, the number of tokens in the embedding."""
        return weight_shape(self.model.get_input_embeddings().weight)[0]

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, over all ranks."""
        return sum(prod(weight_shape(p)) for p in self.model.parameters())

    @property
    def cost(self) -> ForwardCost:
        """The cost of a forward pass: that of its backbone, with a head of one number."""
        config = self.model.config.get_text_config()
        heads = getattr(config, "num_attention_heads", 0) or 0
        width = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
        table = self.model.get_input_embeddings().weight
        body = self.num_parameters - prod(weight_shape(table))
        return ForwardCost(body, config.num_hidden_layers, heads * width, config.hidden_size, 1)

    def choose_layout(self, requested: str, max_length: int | None) -> str:
        """Find the layout. -> why it has no better one

        `requested`, `max_length`: as for a policy. Raises ConfigError if the requested layout gives
        other numbers.
        """
        probe = ValueLayoutProbe(self)
        return "; ".join(layouts.set_best_layout(self, requested, max_length, probe))

    def pack(
        self,
        groups: Sequence[Group],
        group_slices: Sequence[GroupSlice],
        masked: Tensor | None = None,
    ) -> MicroBatch:
        """Pack these completions in this model's layout, on its device."""
        return packing.pack_micro_batch(groups, group_slices, masked, self.device, self.layout)

    def repack(self, batch: Batch, micro_batch: MicroBatch, layout: str) -> MicroBatch:
        """A micro-batch of another layout, in this model's `layout`."""
        if self.layout == layout:
            return micro_batch
        return self.pack(batch.groups, micro_batch.group_slices, batch.masked)

    def hidden(self, micro_batch: MicroBatch) -> Tensor:
        """Hidden states at the positions that predict a completion token. -> (N, h)"""
        states: Tensor = self.call(micro_batch, True)
        return states

    def values(self, micro_batch: MicroBatch) -> Tensor:
        """V before each completion token, with gradient, in float32. -> (N,)"""
        return poison_tensor("value", self.call(micro_batch).squeeze(-1))

    @torch.no_grad()
    def frozen_values(self, micro_batch: MicroBatch) -> Tensor:
        """`values` in eval mode and without gradient, for the start of a step. -> (N,)"""
        with in_eval_mode(self.model):
            return self.values(micro_batch)

    def dummy_loss(self, groups: Sequence[Group], with_grad: bool) -> Tensor:
        """Forward the first completion if only other ranks have a micro-batch. -> 0, ()"""
        micro_batch = self.pack(groups, [(0, (0,))])
        values = self.values(micro_batch) if with_grad else self.frozen_values(micro_batch)
        return values.sum() * 0.0

    def state(self) -> dict[str, Tensor]:
        """All weights, for a checkpoint."""
        return {n: p.detach().contiguous() for n, p in self.model.named_parameters()}


class ValueLayoutProbe(layouts.LayoutProbe):
    """The hidden states at the positions that predict the probe's completions. (N, h)"""

    mismatch_text = "hidden states are off by {:.2g}"

    @torch.no_grad()
    def values_alone(self, attention: str | None = None) -> Tensor:
        """Each sequence alone, through the plain backbone, by this `attention`. -> (N, h)"""
        model, hidden = self.policy.model, []
        with in_eval_mode(model), shared_attention.native_attention(model, attention):
            for group in self.groups:
                for rollout in group.rollouts:
                    ids = torch.tensor([group.prompt_ids + rollout.completion_ids])
                    states = self.policy.call(ids.to(self.policy.device))
                    hidden.append(states[0, len(group.prompt_ids) - 1 : -1])
        return torch.cat(hidden).double()

    @torch.no_grad()
    def layout_values(self, layout: str) -> Tensor:
        """The hidden states in this layout. -> (N, h)"""
        value_model: ValueModel = self.policy
        parts, device = whole_group_slices(self.groups, range(len(self.groups))), value_model.device
        batch = packing.pack_micro_batch(self.groups, parts, device=device, layout=layout)
        with in_eval_mode(value_model.model):
            hidden = value_model.hidden(batch).double()
        layouts.check_attention_calls(value_model.model, batch)
        return hidden

    def differences(self, values: Tensor) -> Tensor:
        """The distance of each state from that of its sequence alone, by its norm. -> (N,)"""
        return (values - self.expected).norm(dim=-1) / self.expected.norm(dim=-1).clamp_min(1e-12)


def _float32_linear(layer: nn.Linear, hidden: Tensor) -> Tensor:
    """Compute the head in float32, also of weights that an engine keeps in less. (N, h) -> (N, 1)

    They are float32 except under DeepSpeed in half precision, whose masters are.
    """
    return nn.functional.linear(hidden, layer.weight.float())


def load_value_weights(
    keys: ModelConfig,
    value_init: ValueInit,
    device: torch.device,
    compute_device: torch.device | None = None,
    saved: Path | None = None,
) -> tuple[PreTrainedModel, bool]:
    """Load the value model's weights. -> the model, whether its head is new

    `compute_device`: where it will compute, if it is loaded elsewhere. `saved`: the file of a
    checkpoint with the trained weights. Raises ConfigError, MachineError, with the key that
    named it.
    """
    names = ("path", "revision", "trust_remote_code")
    keys = keys.model_copy(update={name: getattr(value_init, name) for name in names})
    with load.errors_naming_key(value_init.key):
        model, new = load.load_classifier_with_head(keys, value_init.path, device, compute_device)
    if new:
        with torch.no_grad():
            model.score.weight.zero_()
    if saved is not None:
        model.score.float()
        _read_saved_weights(model, saved)
    return model, new


@torch.no_grad()
def _read_saved_weights(model: PreTrainedModel, file: Path) -> None:
    """Read the weights in a checkpoint. Raises ConfigError if missing or another model's."""
    try:
        tensors = load_file(file)
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[name])
    except (KeyError, RuntimeError, OSError, SafetensorError) as error:
        what = f"{file.parent.parent} cannot be restored"
        refuse("resume", what, "an older checkpoint", error)


def build_value_model(
    model: PreTrainedModel,
    new_head: bool,
    value_init: ValueInit,
    vocab_size: int,
    device: torch.device,
) -> ValueModel:
    """Build the value model from its weights, or from a shell. `vocab_size`: the policy's.

    Raises ConfigError with the key that named it.
    """
    value_model = ValueModel(model.train().requires_grad_(True), device, new_head)
    if value_model.vocab_size != vocab_size:
        what = "policy and value model have different vocabularies"
        why = f"the policy has {vocab_size} tokens, the value model {value_model.vocab_size}"
        fix = "model.value.path=PATH of a model with the policy's vocabulary"
        refuse(value_init.key, what, fix, why)
    return value_model
