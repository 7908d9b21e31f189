"""Log-probabilities of completion tokens under a causal language model.

The head runs on the positions that predict a completion token and on no others. The fused head
never makes their logits whole (`fused_head`). With the model's own head, a hook picks these
positions out of the hidden states as they enter the output embedding, so whatever a model does to
its logits afterwards (soft-capping) still happens. `layouts` decides which head and which layout.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rloo_cli.data import packing, segments
from rloo_cli.data.batch import Group
from rloo_cli.data.packing import GroupSlice, MicroBatch
from rloo_cli.policy.fused_head import token_logp
from rloo_cli.policy.shared_attention import SHARED_LAYOUT_ARGUMENT
from rloo_cli.utils.fault_injection import poison_tensor
from rloo_cli.utils.files import JsonObject


class LogProbs(NamedTuple):
    """Results per completion token of a micro-batch, in float32."""

    logp: Tensor  # (N,) at the sampling temperature
    kl_logp: Tensor | None  # (N,) at the KL's own temperature; None = the same
    entropy: Tensor | None  # (N,) in nats, without gradient


class LogprobModule(nn.Module):
    """Backbone and head in one module, which is what a parallel engine wraps.

    With `use_fused_head` the head is computed in tiles instead of by the model's own forward. Up to
    `keep_logits_bytes` of logits are kept for the backward pass, which recomputes the others.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.use_fused_head, self.keep_logits_bytes, self.logit_scale = False, 0, 1.0
        self.float32_head = False  # `model.lm_head_fp32`
        self.entropy_grad = False  # the loss has an entropy bonus: never with a fused head
        self.head: nn.Module = model.get_output_embeddings()
        self.names_position_ids, self.takes_position_ids = position_ids_support(model)

    def forward(
        self, micro_batch: MicroBatch | Tensor, temperatures: Sequence[float], want_entropy: bool
    ) -> Tensor | tuple[list[Tensor], Tensor | None]:
        """log p of the completion tokens at each temperature; entropy at the first. (N,) each

        Given ids (1, T) instead of a micro-batch, return the model's own logits (1, T, V). A
        sharded model must always be called through this module, which gathers its weights.
        """
        if isinstance(micro_batch, Tensor):
            return self.model(input_ids=micro_batch, use_cache=False).logits
        if not self.use_fused_head:
            logits = self.logits(micro_batch)
            logp = [segments.target_logprobs(logits, micro_batch.target, t) for t in temperatures]
            if self.entropy_grad and torch.is_grad_enabled():
                return logp, segments.token_entropy(logits, temperatures[0])
            if not want_entropy:
                return logp, None
            with torch.no_grad():
                return logp, segments.token_entropy(logits.detach(), temperatures[0])
        states = self.model.base_model(**self._forward_inputs(micro_batch))[0]
        states = states.reshape(-1, states.shape[-1]).index_select(0, micro_batch.logit_index)
        head = cast(nn.Linear, self.head)

        def tiles(hidden: Tensor) -> list[tuple[Tensor, Tensor | None]]:
            return [
                token_logp(
                    hidden, head.weight, micro_batch.target, bias=head.bias, scale=self.logit_scale,
                    temperature=t, want_entropy=want_entropy and not i, float32=self.float32_head,
                    keep_bytes=self.keep_logits_bytes // len(temperatures),
                )
                for i, t in enumerate(temperatures)
            ]  # fmt: skip

        with replaced_forward(head, tiles):
            results = head(states)
        return [result[0] for result in results], results[0][1]

    def logits(self, micro_batch: MicroBatch) -> Tensor:
        """Logits that predict a completion token, by the model's own head. -> (N, V)"""
        with head_on_positions(self.head, micro_batch.logit_index):
            logits: Tensor = self.model(**self._forward_inputs(micro_batch)).logits
        return logits.squeeze(0)

    def _forward_inputs(self, micro_batch: MicroBatch) -> JsonObject:
        return forward_inputs(micro_batch, self.takes_position_ids)


def position_ids_support(model: PreTrainedModel) -> tuple[bool, bool]:
    """Whether a module's forward names `position_ids`, and whether it takes them at all."""
    parameters = inspect.signature(model.forward).parameters
    is_named = "position_ids" in parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return is_named, is_named or takes_any


def forward_inputs(micro_batch: MicroBatch, takes_position_ids: bool) -> JsonObject:
    """The arguments of the model's, or its backbone's, forward for a micro-batch."""
    inputs: JsonObject = {"input_ids": micro_batch.input_ids, "use_cache": False}
    if takes_position_ids:
        inputs["position_ids"] = micro_batch.position_ids
    if micro_batch.attention_mask is not None:
        inputs["attention_mask"] = micro_batch.attention_mask
    if micro_batch.shared_layout is not None:
        inputs[SHARED_LAYOUT_ARGUMENT] = micro_batch.shared_layout
    return inputs


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., object]) -> Iterator[None]:
    """Let calls of the module run this function inside.

    A parallel engine that gathers a module's weights at each call gathers them for these calls too.
    """
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


@contextmanager
def head_on_positions(head: nn.Module, positions: Tensor) -> Iterator[None]:
    """Let the output embedding compute these positions of the hidden states only. (N,)"""

    def pick(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden = args[0]
        return (hidden.reshape(-1, hidden.shape[-1])[positions][None], *args[1:])

    handle = head.register_forward_pre_hook(pick)
    try:
        yield
    finally:
        handle.remove()


class Policy:
    """A causal language model as a distribution over completions, at one temperature.

    `kl_temperature`: that of the KL, if it is another one. `device`: where it computes, if its
    weights are not there yet.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        temperature: float,
        kl_temperature: float | None = None,
        device: torch.device | None = None,
    ):
        self.model = model
        self.logprob_module = LogprobModule(model)
        self.call: nn.Module = self.logprob_module  # or an engine around it
        self.dtype: torch.dtype = next(model.parameters()).dtype  # of its products
        self.meta_weights: Any = None  # `distributed.gather`, if the model has no weights yet
        self.gather_weights: Any = None  # gathers all weights if no rank has them whole
        self._device = device
        self.temperature = temperature
        self.kl_temperature = temperature if kl_temperature is None else kl_temperature
        self.layout = "padded"  # until `layouts` finds a better one

    @property
    def device(self) -> torch.device:
        return self._device or next(self.model.parameters()).device

    @property
    def vocab_size(self) -> int:
        """V, the number of tokens in the embedding."""
        return weight_shape(self.model.get_input_embeddings().weight)[0]

    @property
    def names_position_ids(self) -> bool:
        """Whether the model's forward names `position_ids`."""
        return self.logprob_module.names_position_ids

    def pack(
        self,
        groups: Sequence[Group],
        group_slices: Sequence[GroupSlice],
        masked: Tensor | None = None,
    ) -> MicroBatch:
        """Pack these completions in the layout of this model, on its device."""
        return packing.pack_micro_batch(groups, group_slices, masked, self.device, self.layout)

    def logp(self, micro_batch: MicroBatch, want_entropy: bool = False) -> LogProbs:
        """Log-probabilities of the completion tokens, with gradient; entropy if wanted."""
        apart = self.kl_temperature != self.temperature
        temperatures = [self.temperature, *([self.kl_temperature] if apart else [])]
        logp, entropy = self.call(micro_batch, temperatures, want_entropy)
        return LogProbs(poison_tensor("logp", logp[0]), logp[1] if apart else None, entropy)

    @torch.no_grad()
    def frozen_logp(self, micro_batch: MicroBatch) -> LogProbs:
        """As `logp`, in eval mode and without gradient: for old_logp and the reference."""
        with in_eval_mode(self.model):
            return self.logp(micro_batch)


@contextmanager
def in_eval_mode(model: PreTrainedModel) -> Iterator[None]:
    """Keep the model in eval mode inside: no dropout, and a cache despite checkpointing."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def weight_shape(weight: Tensor) -> tuple[int, ...]:
    """The shape of a weight, also of one that DeepSpeed has partitioned."""
    return tuple(getattr(weight, "ds_shape", weight.shape))
