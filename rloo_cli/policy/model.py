"""Log-probabilities of completion tokens under a causal language model.

The head runs on the rows that predict a completion token and on no others. Fused, it never makes
their logits whole (`head`). As the model's own, a hook picks the rows out of the hidden states as
they enter the output embedding, and whatever a model does to its logits afterwards (soft-capping)
still happens. Which of the two, and which layout, `levels` decides.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rloo_cli.data import packing, segments
from rloo_cli.data.batch import Group
from rloo_cli.data.packing import GroupSlice, MicroBatch
from rloo_cli.policy.fused_head import token_logp
from rloo_cli.policy.shared_attention import SHARED_LAYOUT_ARGUMENT
from rloo_cli.utils.fault_injection import poison_tensor
from rloo_cli.utils.files import JsonObject


class LogProbs(NamedTuple):
    """Per completion token of a micro-batch, in float32."""

    logp: Tensor  # (N,) at the sampling temperature
    kl_logp: Tensor | None  # (N,) at the KL's own temperature; None = the same
    entropy: Tensor | None  # (N,) in nats, without gradient


class LogprobModule(nn.Module):
    """Backbone and head in one module, which is what an engine for many devices wraps.

    `fused`: the head in tiles instead of the model's own. `keep_bytes`: up to this size its
    logits are kept for the backward pass, which else makes them again.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.use_fused_head, self.keep_logits_bytes, self.logit_scale = False, 0, 1.0
        self.float32_head = False  # `model.lm_head_fp32`
        self.entropy_grad = False  # the loss has an entropy bonus: never with a fused head
        self.head: nn.Module = model.get_output_embeddings()
        self.names_position_ids, self.takes_position_ids = position_ids_support(model)

    def forward(
        self, micro_batch: MicroBatch | Tensor, temperatures: Sequence[float], want_entropy: bool
    ) -> Any:
        """log p of the completion tokens at each temperature; entropy at the first. (N,) each

        Given ids (1, T) instead: the model's own logits (1, T, V). Whatever asks a model that is
        spread over devices has to come in by this door.
        """
        if isinstance(micro_batch, Tensor):
            return self.model(input_ids=micro_batch, use_cache=False).logits
        if not self.use_fused_head:
            logits = self.logits(micro_batch)
            found = [segments.target_logprobs(logits, micro_batch.target, t) for t in temperatures]
            if self.entropy_grad and torch.is_grad_enabled():
                return found, segments.token_entropy(logits, temperatures[0])
            if not want_entropy:
                return found, None
            with torch.no_grad():
                return found, segments.token_entropy(logits.detach(), temperatures[0])
        hidden = self.model.base_model(**self._forward_inputs(micro_batch))[0]
        rows = hidden.reshape(-1, hidden.shape[-1]).index_select(0, micro_batch.logit_index)
        head: Any = self.head

        def tiles(rows: Tensor) -> list[tuple[Tensor, Tensor | None]]:
            return [
                token_logp(
                    rows, head.weight, micro_batch.target, bias=head.bias, scale=self.logit_scale,
                    temperature=t, want_entropy=want_entropy and not i, float32=self.float32_head,
                    keep_bytes=self.keep_logits_bytes // len(temperatures),
                )
                for i, t in enumerate(temperatures)
            ]  # fmt: skip

        with replaced_forward(head, tiles):
            told = head(rows)
        return [logp for logp, _ in told], told[0][1]

    def logits(self, micro_batch: MicroBatch) -> Tensor:
        """Logits of the rows that predict a completion token, by the model's own head. -> (N, V)"""
        with head_on_positions(self.head, micro_batch.logit_index):
            logits: Tensor = self.model(**self._forward_inputs(micro_batch)).logits
        return logits.squeeze(0)

    def _forward_inputs(self, micro_batch: MicroBatch) -> JsonObject:
        return forward_inputs(micro_batch, self.takes_position_ids)


def position_ids_support(model: Any) -> tuple[bool, bool]:
    """Whether a module's forward names `position_ids`, and whether it takes them at all."""
    taken = inspect.signature(model.forward).parameters
    names = "position_ids" in taken
    stars = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values())
    return names, names or stars


def forward_inputs(micro_batch: MicroBatch, takes_position_ids: bool) -> JsonObject:
    """What the forward of a model, or of its backbone, is given of a micro-batch."""
    given: JsonObject = {"input_ids": micro_batch.input_ids, "use_cache": False}
    if takes_position_ids:
        given["position_ids"] = micro_batch.position_ids
    if micro_batch.attention_mask is not None:
        given["attention_mask"] = micro_batch.attention_mask
    if micro_batch.shared_layout is not None:
        given[SHARED_LAYOUT_ARGUMENT] = micro_batch.shared_layout
    return given


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """A call of the module does this instead. An engine that brings a module its weights when it is
    called brings them for this too."""
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
    """The output embedding sees these rows of the hidden states and no others. (N,)"""

    def pick(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden = args[0]
        return (hidden.reshape(-1, hidden.shape[-1])[positions][None], *args[1:])

    handle = head.register_forward_pre_hook(pick)
    try:
        yield
    finally:
        handle.remove()


class Policy:
    """A causal language model seen as a distribution over completions, at one temperature.

    `kl_temperature`: that of the KL, where it is another one. `device`: where it computes, if
    its weights are not there yet.
    """

    def __init__(
        self,
        model: Any,
        temperature: float,
        kl_temperature: float | None = None,
        device: torch.device | None = None,
    ):
        self.model = model
        self.logprob_module = LogprobModule(model)
        self.call: Any = self.logprob_module  # or an engine around it
        self.dtype: torch.dtype = next(model.parameters()).dtype  # that it computes in
        self.meta_weights: Any = None  # the weights of a shell (`distributed.pieces`)
        self.gather_weights: Any = None  # brings all weights, where no rank has them whole
        self._device = device
        self.temperature = temperature
        self.kl_temperature = temperature if kl_temperature is None else kl_temperature
        self.layout = "padded"  # until `levels.settle` found a better one

    @property
    def device(self) -> torch.device:
        found: torch.device = self._device or next(self.model.parameters()).device
        return found

    @property
    def vocab_size(self) -> int:
        """V, the words that it knows."""
        return weight_shape(self.model.get_input_embeddings().weight)[0]

    @property
    def names_position_ids(self) -> bool:
        """Whether the model says that it takes positions."""
        return self.logprob_module.names_position_ids

    def pack(
        self,
        groups: Sequence[Group],
        group_slices: Sequence[GroupSlice],
        masked: Tensor | None = None,
    ) -> MicroBatch:
        """These completions laid out as this model takes them, on its device."""
        return packing.pack_micro_batch(groups, group_slices, masked, self.device, self.layout)

    def logp(self, micro_batch: MicroBatch, want_entropy: bool = False) -> LogProbs:
        """Log-probabilities of the completion tokens, with gradient; entropy when asked for."""
        apart = self.kl_temperature != self.temperature
        temperatures = [self.temperature, *([self.kl_temperature] if apart else [])]
        found, entropy = self.call(micro_batch, temperatures, want_entropy)
        return LogProbs(poison_tensor("logp", found[0]), found[1] if apart else None, entropy)

    @torch.no_grad()
    def frozen_logp(self, micro_batch: MicroBatch) -> LogProbs:
        """The same in eval mode and without gradient: for old_logp and the reference."""
        with in_eval_mode(self.model):
            return self.logp(micro_batch)


@contextmanager
def in_eval_mode(model: Any) -> Iterator[None]:
    """Eval mode (no dropout, and a cache in spite of gradient checkpointing), then as before."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def weight_shape(weight: Any) -> tuple[int, ...]:
    """The shape of a weight, also of one that DeepSpeed keeps elsewhere until it is needed."""
    return tuple(getattr(weight, "ds_shape", weight.shape))
