"""The reference of the KL: a separate model, or the policy's weights without an adapter.

With an adapter there is no second model: the base under the adapter is the reference, takes
no memory and has exactly its old values. If training resumes from an adapter, or the reference
moves, it is a second adapter on the same base. `ref_path` is always a second model; `ref_offload`
keeps it in CPU memory between its passes, of which there is then one per rollout batch.

A reference that moves becomes, every so many updates, alpha policy + (1 - alpha) reference,
parameter by parameter (TR-DPO, arXiv 2404.09656). For an adapter these are its two factors, as in
TRL and peft: the average of B A would have no such factors.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rloo_cli.config.schema import ModelConfig, RefSyncConfig
from rloo_cli.data.packing import MicroBatch
from rloo_cli.policy import load, lora
from rloo_cli.policy.model import LogProbs, Policy


class Reference(Policy):
    """A frozen model, in eval mode. `device`: where it computes.

    `offload_from`: the device that it is moved to for its passes, from the memory where it is
    otherwise. `policy`: the policy that it follows, if it moves.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        temperature: float,
        sync: RefSyncConfig | None = None,
        policy: Policy | None = None,
        offload_from: torch.device | None = None,
        device: torch.device | None = None,
    ):
        super().__init__(model.eval().requires_grad_(False), temperature, device=device)
        self._set_up(sync, policy)
        self.offload_device, self.on_device_depth = offload_from, 0
        # Its weights while it is off the device. These are views, not copies: they cost no memory.
        weights = {name: tensor.data for name, tensor in _parameters_and_buffers(model)}
        self.cpu_weights = weights if offload_from is not None else {}

    policy: Policy | None = None

    def _set_up(self, sync: RefSyncConfig | None, policy: Policy | None) -> None:
        self.sync, self.policy = sync, policy

    @property
    def is_second_model(self) -> bool:
        """Whether it is a second model, which needs its own layout, unlike an adapter's base."""
        return True

    @property
    def offloaded(self) -> bool:
        """Whether it is moved to the device for each pass: one per batch is best."""
        return self.offload_device is not None

    @property
    def follows_policy(self) -> bool:
        """Whether it follows the policy, so that checkpoints must hold it."""
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
        """Keep the weights on the device inside. They do not change, so leaving drops the copy."""
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
            weight = self.cpu_weights[name]
            tensor.data = weight if device is None else weight.to(device)

    def sync_with_policy(self, num_updates: int) -> None:
        """After optimizer update `num_updates`: move towards the policy if that is due."""
        if self.follows_policy and self.sync is not None and num_updates % self.sync.every == 0:
            self._blend_policy(self.sync.alpha)

    def _blend_policy(self, alpha: float) -> None:
        assert self.policy is not None
        now = dict(self.policy.model.named_parameters())
        _blend_tensors(dict(self.model.named_parameters()), now, alpha)

    def state(self) -> dict[str, Tensor]:
        """Its tensors for a checkpoint; {} if it never moves."""
        if not self.follows_policy:
            return {}
        return {n: p.detach().contiguous() for n, p in self.model.named_parameters()}

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restore the result of `state`. Raises KeyError, RuntimeError for another model's."""
        for name, parameter in self.model.named_parameters():
            parameter.copy_(tensors[name])


class AdapterReference(Reference):
    """The policy's own model with its adapter off, or with the adapter `reference` instead."""

    def __init__(self, policy: Policy, temperature: float, keys: ModelConfig, seed: int):
        Policy.__init__(self, policy.model, temperature, device=policy.device)
        self.logprob_module = policy.logprob_module  # shared: a parallel engine may wrap it
        self._set_up(keys.ref_sync, policy)
        self.offload_device, self.on_device_depth, self.cpu_weights = None, 0, {}
        assert keys.lora is not None
        self.adapter_name: str | None = None
        if needs_reference_adapter(keys):
            self.adapter_name = lora.REFERENCE_ADAPTER
            if lora.REFERENCE_ADAPTER not in self.model.peft_config:
                attach_reference_adapter(self.model, keys, seed)
        self.adapter_layers = lora.adapter_layers(policy.model)

    @property
    def call(self) -> nn.Module:
        """The policy's module, with the parallel engine that wraps it, if any."""
        return self._call if self.policy is None else self.policy.call

    @call.setter
    def call(self, forward_module: nn.Module) -> None:
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


def needs_reference_adapter(keys: ModelConfig) -> bool:
    """Whether a reference on the policy's own base is a second adapter, and not the bare base."""
    if keys.lora is None or keys.ref_path is not None:
        return False
    return keys.ref_sync.every > 0 or keys.lora.path is not None


def attach_reference_adapter(model: PreTrainedModel, keys: ModelConfig, seed: int) -> None:
    """Attach the adapter as it was before any update, even if the policy resumes."""
    assert keys.lora is not None
    lora.attach_adapter(model, keys.lora, seed, lora.REFERENCE_ADAPTER)
    if keys.lora.path is not None and model.device.type != "meta":
        lora.read_adapter_weights(model, Path(keys.lora.path), lora.REFERENCE_ADAPTER)
    if keys.disable_dropout:
        load.zero_dropout(model)


def build_reference(
    keys: ModelConfig, policy: Policy, device: torch.device, temperature: float, seed: int
) -> Reference:
    """Build the reference set by `model.ref_*` and `model.lora`. Raises ConfigError."""
    if keys.lora is not None and keys.ref_path is None:
        return AdapterReference(policy, temperature, keys, seed)
    path = keys.ref_path or keys.path
    if not keys.ref_offload:
        model = load.load_causal_lm(keys, path, device)
        return Reference(model, temperature, keys.ref_sync, policy)
    # It is loaded into CPU memory, in its dtype on the device.
    dtype = str(load.resolve_dtype(keys.dtype, device)).removeprefix("torch.")
    model = load.load_causal_lm(keys.model_copy(update={"dtype": dtype}), path, torch.device("cpu"))
    return Reference(model, temperature, keys.ref_sync, policy, offload_from=device)


@torch.no_grad()
def _blend_tensors(target: dict[str, Tensor], source: dict[str, Tensor], alpha: float) -> None:
    """Set target = alpha source + (1 - alpha) target, in float32, each rounded once."""
    for name, old in target.items():
        new = source[name].to(old.device).float()
        old.copy_(alpha * new + (1 - alpha) * old.float())


def _parameters_and_buffers(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
