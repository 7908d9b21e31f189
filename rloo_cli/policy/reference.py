"""What the KL is measured to: a model of its own, or the policy's own weights without an adapter.

With an adapter there is no second model: the base under the adapter is the reference, at no memory,
and exactly what it was. Where training goes on from an adapter, or the reference moves, it is a
second adapter on the same base. `ref_path` is always a second model; `ref_offload` keeps it in the
CPU's memory between its passes, of which there is then one per rollout batch.

A reference that moves is, every so many updates, alpha policy + (1 - alpha) reference, parameter by
parameter (TR-DPO, arXiv 2404.09656). Of an adapter these are its two factors, as in TRL and peft:
the average of B A would have no such factors.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rloo_cli.config.schema import ModelConfig, RefSyncConfig
from rloo_cli.data.packing import MicroBatch
from rloo_cli.policy import load, lora
from rloo_cli.policy.model import LogProbs, Policy


class Reference(Policy):
    """A frozen model, in eval mode. `device`: where it computes; `offload`: and nowhere else.

    `policy`: what it follows, if it moves.
    """

    def __init__(
        self,
        model: Any,
        temperature: float,
        sync: RefSyncConfig | None = None,
        policy: Policy | None = None,
        offload_from: torch.device | None = None,
        device: torch.device | None = None,
    ):
        super().__init__(model.eval().requires_grad_(False), temperature, device=device)
        self._set_up(sync, policy)
        self.offload_device, self.on_device_depth = offload_from, 0
        # Where it is when it is away. Views of these tensors are not copies: it costs no memory.
        self.cpu_weights = dict(_parameters_and_buffers(model)) if offload_from is not None else {}
        self.cpu_weights = {name: tensor.data for name, tensor in self.cpu_weights.items()}

    policy: Policy | None = None

    def _set_up(self, sync: RefSyncConfig | None, policy: Policy | None) -> None:
        self.sync, self.policy = sync, policy

    @property
    def is_second_model(self) -> bool:
        """It is a second model, whose layout has to be found; else it is laid out as the policy."""
        return True

    @property
    def offloaded(self) -> bool:
        """It comes to the device for each pass: better one per batch."""
        return self.offload_device is not None

    @property
    def follows_policy(self) -> bool:
        """It follows the policy, so a checkpoint has to hold it."""
        return self.sync is not None and self.sync.every > 0

    @property
    def device(self) -> torch.device:
        return self.offload_device or super().device

    @torch.no_grad()
    def frozen_logp(self, micro_batch: MicroBatch) -> LogProbs:
        with self.on_device():
            return super().frozen_logp(micro_batch)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """The weights are on the device inside. Nothing in here changes them: going home is
        dropping the copy."""
        if self.offload_device is None:
            yield
            return
        if not self.on_device_depth:
            self._move_weights(self.offload_device)
        self.on_device_depth += 1
        try:
            yield
        finally:
            self.on_device_depth -= 1
            if not self.on_device_depth:
                self._move_weights(None)

    def _move_weights(self, device: torch.device | None) -> None:
        for name, tensor in _parameters_and_buffers(self.model):
            tensor.data = (
                self.cpu_weights[name] if device is None else self.cpu_weights[name].to(device)
            )

    def sync_with_policy(self, num_updates: int) -> None:
        """After optimizer update `updates`: move towards the policy, where it is due."""
        if self.follows_policy and self.sync is not None and num_updates % self.sync.every == 0:
            self._blend_policy(self.sync.alpha)

    def _blend_policy(self, alpha: float) -> None:
        assert self.policy is not None
        now = dict(self.policy.model.named_parameters())
        _blend_tensors(dict(self.model.named_parameters()), now, alpha)

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint has to hold of it; {} where it stands."""
        if not self.follows_policy:
            return {}
        return {n: p.detach().contiguous() for n, p in self.model.named_parameters()}

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take `state` back. Raises KeyError, RuntimeError for another model's."""
        for name, parameter in self.model.named_parameters():
            parameter.copy_(tensors[name])


class AdapterReference(Reference):
    """The policy's own model with its adapter off, or with the adapter `reference` in its place."""

    def __init__(self, policy: Policy, temperature: float, keys: ModelConfig, seed: int):
        Policy.__init__(self, policy.model, temperature)
        self.logprob_module = (
            policy.logprob_module
        )  # one module, which an engine for many devices may wrap
        self._set_up(keys.ref_sync, policy)
        self.offload_device, self.on_device_depth, self.cpu_weights = None, 0, {}
        assert keys.lora is not None
        self.adapter_name: str | None = None
        if self.follows_policy or keys.lora.path is not None:
            self.adapter_name = lora.REFERENCE_ADAPTER
            self._attach_reference_adapter(keys, seed)
        self.adapter_layers = lora.adapter_layers(policy.model)

    def _attach_reference_adapter(self, keys: ModelConfig, seed: int) -> None:
        """The adapter as it was before any update, even where the policy's is a checkpoint's."""
        assert keys.lora is not None
        lora.attach_adapter(self.model, keys.lora, seed, lora.REFERENCE_ADAPTER)
        if keys.lora.path is not None:
            lora.read_adapter_weights(self.model, Path(keys.lora.path), lora.REFERENCE_ADAPTER)
        if keys.disable_dropout:
            load.zero_dropout(self.model)

    @property
    def call(self) -> Any:
        """The policy's, with whatever engine is around it."""
        return self._call if self.policy is None else self.policy.call

    @call.setter
    def call(self, forward_module: Any) -> None:
        self._call = forward_module

    @property
    def is_second_model(self) -> bool:
        return False

    @torch.no_grad()
    def frozen_logp(self, micro_batch: MicroBatch) -> LogProbs:
        with lora.use_adapter(self.adapter_layers, self.adapter_name):
            return super().frozen_logp(micro_batch)

    def _blend_policy(self, alpha: float) -> None:
        _blend_tensors(
            lora.adapter_tensors(self.model, lora.REFERENCE_ADAPTER),
            lora.adapter_tensors(self.model),
            alpha,
        )

    def state(self) -> dict[str, Tensor]:
        return lora.adapter_state(self.model, lora.REFERENCE_ADAPTER) if self.follows_policy else {}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        lora.copy_into_adapter(self.model, tensors, lora.REFERENCE_ADAPTER, "the checkpoint")


def build_reference(
    keys: ModelConfig, policy: Policy, device: torch.device, temperature: float, seed: int
) -> Reference:
    """The reference that `model.ref_*` and `model.lora` ask for. Raises ConfigError."""
    if keys.lora is not None and keys.ref_path is None:
        return AdapterReference(policy, temperature, keys, seed)
    path = keys.ref_path or keys.path
    if not keys.ref_offload:
        model = load.load_causal_lm(keys, path, device)
        return Reference(model, temperature, keys.ref_sync, policy)
    # Never whole on the device, but in the dtype that it has there.
    there = str(load.resolve_dtype(keys.dtype, device)).removeprefix("torch.")
    model = load.load_causal_lm(keys.model_copy(update={"dtype": there}), path, torch.device("cpu"))
    return Reference(model, temperature, keys.ref_sync, policy, offload_from=device)


@torch.no_grad()
def _blend_tensors(target: dict[str, Tensor], source: dict[str, Tensor], alpha: float) -> None:
    """target = alpha source + (1 - alpha) target, in float32, each rounded once."""
    for name, old in target.items():
        new = source[name].to(old.device).float()
        old.copy_(alpha * new + (1 - alpha) * old.float())


def _parameters_and_buffers(model: Any) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
