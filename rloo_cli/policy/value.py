"""The value model: a backbone with one number per position, the expected rest of the return.

V_t is read where the policy's logits for token t are, at the positions that predict a completion's
tokens, so a micro-batch of the policy serves it too: `shared`, `packed` and `padded` layouts and
our attention alike. Which of them gives the backbone's own numbers is found as for a reward model,
by comparing hidden states, here at every one of these positions.

It starts as a reward model, head included, if one fits; else as the policy with a head of zeros.
Then V is 0 at first, whatever the seed, and a step's returns are plain sums of token rewards until
it has learned. The head is float32 whatever the rest is: V is compared with returns, of which it
must resolve small differences.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rloo_cli.config.schema import ModelConfig
from rloo_cli.config.value_model import ValueInit
from rloo_cli.data import packing
from rloo_cli.data.batch import Group
from rloo_cli.data.bin_packing import ForwardCost
from rloo_cli.data.packing import GroupSlice, MicroBatch, whole_group_slices
from rloo_cli.policy import layouts, load, shared_attention
from rloo_cli.policy.model import forward_inputs, in_eval_mode, position_ids_support, weight_shape
from rloo_cli.utils.errors import ConfigError, Problem
from rloo_cli.utils.fault_injection import poison_tensor


class ValueModel:
    """A sequence classifier with one label, read at every position. `device`: where it computes."""

    def __init__(self, model: PreTrainedModel, device: torch.device, new_head: bool = False):
        self.model, self.device = model, device
        self.new_head = new_head  # whether the head had no weights to start from
        self.head: torch.nn.Linear = model.score.float()
        self.names_position_ids, self.takes_position_ids = position_ids_support(model.base_model)
        self.layout = "padded"  # until `choose_layout` finds a better one
        self.tokens_per_policy_token = 1.0  # of a forward: the policy may have another layout

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights, without the head."""
        return next(self.model.base_model.parameters()).dtype

    @property
    def vocab_size(self) -> int:
        """V, the number of tokens in the embedding."""
        return weight_shape(self.model.get_input_embeddings().weight)[0]

    @property
    def cost(self) -> ForwardCost:
        """The cost of a forward pass: that of its backbone, with a head of one number."""
        config = self.model.config.get_text_config()
        heads = getattr(config, "num_attention_heads", 0) or 0
        width = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
        table = self.model.get_input_embeddings().weight
        body = sum(p.numel() for p in self.model.parameters()) - table.numel()
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
        """Pack these completions in the layout of this model, on its device."""
        return packing.pack_micro_batch(groups, group_slices, masked, self.device, self.layout)

    def hidden(self, micro_batch: MicroBatch) -> Tensor:
        """Hidden states at the positions that predict a completion token. -> (N, h)"""
        states = self.model.base_model(**forward_inputs(micro_batch, self.takes_position_ids))[0]
        return states.reshape(-1, states.shape[-1]).index_select(0, micro_batch.logit_index)

    def values(self, micro_batch: MicroBatch) -> Tensor:
        """V before each completion token, with gradient, in float32. -> (N,)"""
        values = self.head(self.hidden(micro_batch).float()).squeeze(-1)
        return poison_tensor("value", values)

    @torch.no_grad()
    def frozen_values(self, micro_batch: MicroBatch) -> Tensor:
        """`values` in eval mode and without gradient, for the start of a step. -> (N,)"""
        with in_eval_mode(self.model):
            return self.values(micro_batch)

    def state(self) -> dict[str, Tensor]:
        """All weights, for a checkpoint."""
        return {n: p.detach().contiguous() for n, p in self.model.named_parameters()}

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `state` returned. Raises KeyError, RuntimeError for another model's."""
        for name, parameter in self.model.named_parameters():
            parameter.copy_(tensors[name])


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
                    states = model.base_model(input_ids=ids.to(self.policy.device), use_cache=False)
                    hidden.append(states[0][0, len(group.prompt_ids) - 1 : -1])
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


def build_value_model(
    keys: ModelConfig, value_init: ValueInit, vocab_size: int, device: torch.device
) -> ValueModel:
    """Build the value model from its initial weights. `vocab_size`: the policy's.

    Raises ConfigError, MachineError, with the key that named it.
    """
    names = ("path", "revision", "trust_remote_code")
    keys = keys.model_copy(update={name: getattr(value_init, name) for name in names})
    with load.errors_naming_key(value_init.key):
        model, new = load.load_classifier_with_head(keys, value_init.path, device)
    if new:
        with torch.no_grad():
            model.score.weight.zero_()
    value_model = ValueModel(model.train().requires_grad_(True), device, new)
    if value_model.vocab_size != vocab_size:
        what = "policy and value model differ in vocabulary"
        why = f"the policy knows {vocab_size} tokens, the value model {value_model.vocab_size}"
        raise ConfigError(Problem(what, value_init.key, why))
    return value_model
