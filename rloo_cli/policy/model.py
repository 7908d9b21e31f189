"""Log-probabilities of completion tokens under a causal language model.

The head runs on the rows that predict a completion token and on no others: a hook picks them out
of the hidden states as they enter the output embedding. Whatever a model does to its logits
afterwards (scaling, soft-capping) still happens.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rloo_cli import tensors
from rloo_cli.faults import poison
from rloo_cli.rollout import Micro


class LogProbs(NamedTuple):
    """Per completion token of a micro-batch, in float32."""

    logp: Tensor  # (N,) at the sampling temperature
    kl_logp: Tensor | None  # (N,) at the KL's own temperature; None = the same
    entropy: Tensor | None  # (N,) in nats, without gradient


class Policy:
    """A causal language model seen as a distribution over completions, at one temperature.

    `kl_temperature`: that of the KL, where it is another one.
    """

    def __init__(self, model: Any, temperature: float, kl_temperature: float | None = None):
        self.model = model
        self.temperature = temperature
        self.kl_temperature = temperature if kl_temperature is None else kl_temperature
        self.head: nn.Module = model.get_output_embeddings()
        taken = inspect.signature(model.forward).parameters
        self.takes_positions = "position_ids" in taken or any(
            p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values()
        )

    @property
    def device(self) -> torch.device:
        found: torch.device = next(self.model.parameters()).device
        return found

    def logits(self, micro: Micro) -> Tensor:
        """Logits of the rows that predict a completion token. -> (N, V)"""
        positions = {"position_ids": micro.position_ids} if self.takes_positions else {}
        with self._rows(micro.source):
            out = self.model(
                input_ids=micro.input_ids,
                attention_mask=micro.attention_mask,
                use_cache=False,
                **positions,
            )
        logits: Tensor = out.logits
        return logits.squeeze(0)

    def logp(self, micro: Micro, want_entropy: bool = False) -> LogProbs:
        """Log-probabilities of the completion tokens, with gradient; entropy when asked for."""
        logits, kl_logp, entropy = self.logits(micro), None, None
        logp = tensors.target_logp(logits, micro.target, self.temperature)
        logp = poison("logp", logp)
        if self.kl_temperature != self.temperature:
            kl_logp = tensors.target_logp(logits, micro.target, self.kl_temperature)
        if want_entropy:
            with torch.no_grad():
                entropy = tensors.entropy(logits.detach(), self.temperature)
        return LogProbs(logp, kl_logp, entropy)

    @torch.no_grad()
    def frozen_logp(self, micro: Micro) -> LogProbs:
        """The same in eval mode and without gradient: for old_logp and the reference."""
        training = self.model.training
        self.model.eval()
        try:
            return self.logp(micro)
        finally:
            self.model.train(training)

    @contextmanager
    def _rows(self, source: Tensor) -> Iterator[None]:
        def pick(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            hidden = args[0]
            return (hidden.reshape(-1, hidden.shape[-1])[source][None], *args[1:])

        handle = self.head.register_forward_pre_hook(pick)
        try:
            yield
        finally:
            handle.remove()


def reference(model: Any, temperature: float) -> Policy:
    """A frozen policy, in eval mode: what the KL is measured to."""
    model.eval().requires_grad_(False)
    return Policy(model, temperature)
