"""The value model: a backbone with one number per place, what the rest of a completion will earn.

V_t is read where the policy's logits for token t are, at the places that predict a completion's
tokens, so a micro-batch of the policy serves it too: `shared`, `packed` and `padded` rows and our
attention alike. Which of them gives the backbone's own numbers is found as for a reward model, by
comparing hidden states, here at every one of these places.

It begins as a reward model, head and all, where there is one that fits; else as the policy with a
head of zeros. So V is 0 at first, whatever the seed, and a step's returns are plain sums of token
rewards until it has learned. The head is float32 whatever the rest is: V is compared with
returns, of which it must tell small differences.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

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
    """A sequence classifier with one label, asked at every place. `device`: where it computes."""

    def __init__(self, model: Any, device: torch.device, new_head: bool = False):
        self.model, self.device, self.new_head = (
            model,
            device,
            new_head,
        )  # new: the head's beginning
        self.head: torch.nn.Linear = model.score.float()
        self.names_position_ids, self.takes_position_ids = position_ids_support(model.base_model)
        self.layout = "padded"  # until `settle` found a better one
        self.tokens_per_policy_token = (
            1.0  # rows of a forward for each of the policy's, whose layout may be another
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, the head's aside."""
        found: torch.dtype = next(self.model.base_model.parameters()).dtype
        return found

    @property
    def vocab_size(self) -> int:
        """V, the words that it knows."""
        return weight_shape(self.model.get_input_embeddings().weight)[0]

    @property
    def cost(self) -> ForwardCost:
        """What a forward pass costs: that of its backbone, with a head of one number."""
        config = self.model.config.get_text_config()
        heads = getattr(config, "num_attention_heads", 0) or 0
        width = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
        table = self.model.get_input_embeddings().weight
        body = sum(p.numel() for p in self.model.parameters()) - table.numel()
        return ForwardCost(body, config.num_hidden_layers, heads * width, config.hidden_size, 1)

    def choose_layout(self, requested: str, max_length: int | None) -> str:
        """Find the layout; what kept it from better ones. `wanted`, `longest`: as for a policy.

        Raises ConfigError where the layout that is wanted would give other numbers.
        """
        return "; ".join(
            layouts.set_best_layout(self, requested, max_length, ValueLayoutProbe(self))
        )

    def pack(
        self,
        groups: Sequence[Group],
        group_slices: Sequence[GroupSlice],
        masked: Tensor | None = None,
    ) -> MicroBatch:
        """These completions laid out as this model takes them, on its device."""
        return packing.pack_micro_batch(groups, group_slices, masked, self.device, self.layout)

    def hidden(self, micro_batch: MicroBatch) -> Tensor:
        """Hidden states of the places that predict a completion token. -> (N, h)"""
        states = self.model.base_model(**forward_inputs(micro_batch, self.takes_position_ids))[0]
        found: Tensor = states.reshape(-1, states.shape[-1]).index_select(
            0, micro_batch.logit_index
        )
        return found

    def values(self, micro_batch: MicroBatch) -> Tensor:
        """V before each completion token, with gradient, in float32. -> (N,)"""
        found: Tensor = self.head(self.hidden(micro_batch).float()).squeeze(-1)
        poisoned: Tensor = poison_tensor("value", found)
        return poisoned

    @torch.no_grad()
    def frozen_values(self, micro_batch: MicroBatch) -> Tensor:
        """The same in eval mode and without gradient: as a step begins. -> (N,)"""
        with in_eval_mode(self.model):
            return self.values(micro_batch)

    def state(self) -> dict[str, Tensor]:
        """All weights, for a checkpoint."""
        return {n: p.detach().contiguous() for n, p in self.model.named_parameters()}

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take `state` back. Raises KeyError, RuntimeError for another model's."""
        for name, parameter in self.model.named_parameters():
            parameter.copy_(tensors[name])


class ValueLayoutProbe(layouts.LayoutProbe):
    """The backbone's hidden states at the places that predict the probe's completions. (N, h)"""

    mismatch_text = "hidden states are off by {:.2g}"

    @torch.no_grad()
    def values_alone(self, attention: str | None = None) -> Tensor:
        """Each row by itself, through the plain backbone; `name`: by that attention. -> (N, h)"""
        model, found = self.policy.model, []
        with in_eval_mode(model), shared_attention.native_attention(model, attention):
            for group in self.groups:
                for rollout in group.rollouts:
                    row = torch.tensor([group.prompt_ids + rollout.completion_ids])
                    states = model.base_model(input_ids=row.to(self.policy.device), use_cache=False)
                    found.append(states[0][0, len(group.prompt_ids) - 1 : -1])
        return torch.cat(found).double()

    @torch.no_grad()
    def layout_values(self, layout: str) -> Tensor:
        """The same in rows of this layout. -> (N, h)"""
        critic: ValueModel = self.policy
        parts = whole_group_slices(self.groups, range(len(self.groups)))
        micro = packing.pack_micro_batch(self.groups, parts, device=critic.device, layout=layout)
        with in_eval_mode(critic.model):
            found = critic.hidden(micro).double()
        layouts.check_attention_calls(critic.model, micro)
        return found

    def differences(self, values: Tensor) -> Tensor:
        """Distance from the truth, relative to its length. -> (N,)"""
        return (values - self.expected).norm(dim=-1) / self.expected.norm(dim=-1).clamp_min(1e-12)


def build_value_model(
    keys: ModelConfig, value_init: ValueInit, vocab_size: int, device: torch.device
) -> ValueModel:
    """The value model from where it begins, to be trained. `words`: those that the policy knows.

    Raises ConfigError, MachineError, with the key that named it.
    """
    given = {
        "path": value_init.path,
        "revision": value_init.revision,
        "trust_remote_code": value_init.trust_remote_code,
    }
    with load.errors_naming_key(value_init.key):
        model, new = load.load_classifier_with_head(
            keys.model_copy(update=given), value_init.path, device
        )
    if new:
        with torch.no_grad():
            model.score.weight.zero_()
    critic = ValueModel(model.train().requires_grad_(True), device, new)
    if critic.vocab_size != vocab_size:
        why = f"the policy knows {vocab_size} tokens, the value model {critic.vocab_size}"
        raise ConfigError(
            Problem("policy and value model differ in vocabulary", value_init.key, why)
        )
    return critic
