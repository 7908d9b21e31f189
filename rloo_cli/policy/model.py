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
from rloo_cli.data.packing import Micro, Part
from rloo_cli.policy.fused_head import token_logp
from rloo_cli.policy.shared_attention import PLAN
from rloo_cli.utils.fault_injection import poison


class LogProbs(NamedTuple):
    """Per completion token of a micro-batch, in float32."""

    logp: Tensor  # (N,) at the sampling temperature
    kl_logp: Tensor | None  # (N,) at the KL's own temperature; None = the same
    entropy: Tensor | None  # (N,) in nats, without gradient


class Scorer(nn.Module):
    """Backbone and head in one module, which is what an engine for many devices wraps.

    `fused`: the head in tiles instead of the model's own. `keep_bytes`: up to this size its
    logits are kept for the backward pass, which else makes them again.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.fused, self.keep_bytes, self.scale = False, 0, 1.0
        self.float32 = False  # `model.lm_head_fp32`
        self.entropy_grad = False  # the loss has an entropy bonus: never with a fused head
        self.head: nn.Module = model.get_output_embeddings()
        self.names_positions, self.takes_positions = positions(model)

    def forward(
        self, micro: Micro | Tensor, temperatures: Sequence[float], want_entropy: bool
    ) -> Any:
        """log p of the completion tokens at each temperature; entropy at the first. (N,) each

        Given ids (1, T) instead: the model's own logits (1, T, V). Whatever asks a model that is
        spread over devices has to come in by this door.
        """
        if isinstance(micro, Tensor):
            return self.model(input_ids=micro, use_cache=False).logits
        if not self.fused:
            logits = self.logits(micro)
            found = [segments.target_logp(logits, micro.target, t) for t in temperatures]
            if self.entropy_grad and torch.is_grad_enabled():
                return found, segments.entropy(logits, temperatures[0])
            if not want_entropy:
                return found, None
            with torch.no_grad():
                return found, segments.entropy(logits.detach(), temperatures[0])
        hidden = self.model.base_model(**self._inputs(micro))[0]
        rows = hidden.reshape(-1, hidden.shape[-1]).index_select(0, micro.source)
        head: Any = self.head

        def tiles(rows: Tensor) -> list[tuple[Tensor, Tensor | None]]:
            return [
                token_logp(
                    rows, head.weight, micro.target, bias=head.bias, scale=self.scale,
                    temperature=t, want_entropy=want_entropy and not i, float32=self.float32,
                    keep_bytes=self.keep_bytes // len(temperatures),
                )
                for i, t in enumerate(temperatures)
            ]  # fmt: skip

        with computing(head, tiles):
            told = head(rows)
        return [logp for logp, _ in told], told[0][1]

    def logits(self, micro: Micro) -> Tensor:
        """Logits of the rows that predict a completion token, by the model's own head. -> (N, V)"""
        with picked(self.head, micro.source):
            logits: Tensor = self.model(**self._inputs(micro)).logits
        return logits.squeeze(0)

    def _inputs(self, micro: Micro) -> dict[str, Any]:
        return inputs(micro, self.takes_positions)


def positions(model: Any) -> tuple[bool, bool]:
    """Whether a module's forward names `position_ids`, and whether it takes them at all."""
    taken = inspect.signature(model.forward).parameters
    names = "position_ids" in taken
    stars = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values())
    return names, names or stars


def inputs(micro: Micro, takes_positions: bool) -> dict[str, Any]:
    """What the forward of a model, or of its backbone, is given of a micro-batch."""
    given: dict[str, Any] = {"input_ids": micro.input_ids, "use_cache": False}
    if takes_positions:
        given["position_ids"] = micro.position_ids
    if micro.attention_mask is not None:
        given["attention_mask"] = micro.attention_mask
    if micro.shared is not None:
        given[PLAN] = micro.shared
    return given


@contextmanager
def computing(module: nn.Module, work: Callable[..., Any]) -> Iterator[None]:
    """A call of the module does this instead. An engine that brings a module its weights when it is
    called brings them for this too."""
    before = vars(module).get("forward")
    module.forward = work
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


@contextmanager
def picked(head: nn.Module, rows: Tensor) -> Iterator[None]:
    """The output embedding sees these rows of the hidden states and no others. (N,)"""

    def pick(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden = args[0]
        return (hidden.reshape(-1, hidden.shape[-1])[rows][None], *args[1:])

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
        self.scorer = Scorer(model)
        self.call: Any = self.scorer  # or an engine around it
        self.dtype: torch.dtype = next(model.parameters()).dtype  # that it computes in
        self.source: Any = None  # the weights of a shell (`distributed.pieces`)
        self.pieces: Any = None  # brings all weights, where no rank has them whole
        self._device = device
        self.temperature = temperature
        self.kl_temperature = temperature if kl_temperature is None else kl_temperature
        self.layout = "padded"  # until `levels.settle` found a better one

    @property
    def device(self) -> torch.device:
        found: torch.device = self._device or next(self.model.parameters()).device
        return found

    @property
    def words(self) -> int:
        """V, the words that it knows."""
        return size(self.model.get_input_embeddings().weight)[0]

    @property
    def names_positions(self) -> bool:
        """Whether the model says that it takes positions."""
        return self.scorer.names_positions

    def pack(
        self, groups: Sequence[Group], parts: Sequence[Part], masked: Tensor | None = None
    ) -> Micro:
        """These completions laid out as this model takes them, on its device."""
        return packing.pack(groups, parts, masked, self.device, self.layout)

    def logp(self, micro: Micro, want_entropy: bool = False) -> LogProbs:
        """Log-probabilities of the completion tokens, with gradient; entropy when asked for."""
        apart = self.kl_temperature != self.temperature
        temperatures = [self.temperature, *([self.kl_temperature] if apart else [])]
        found, entropy = self.call(micro, temperatures, want_entropy)
        return LogProbs(poison("logp", found[0]), found[1] if apart else None, entropy)

    @torch.no_grad()
    def frozen_logp(self, micro: Micro) -> LogProbs:
        """The same in eval mode and without gradient: for old_logp and the reference."""
        with evaluating(self.model):
            return self.logp(micro)


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Eval mode (no dropout, and a cache in spite of gradient checkpointing), then as before."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def size(weight: Any) -> tuple[int, ...]:
    """The shape of a weight, also of one that DeepSpeed keeps elsewhere until it is needed."""
    return tuple(getattr(weight, "ds_shape", weight.shape))
