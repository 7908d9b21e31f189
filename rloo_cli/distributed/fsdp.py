"""`fsdp2`: weights, gradients and optimizer state in shards, by torch's `fully_shard`.

Each decoder layer is a unit that is gathered for its own forward and backward; embeddings and head
belong to the root, which is the `Scorer`: all calls for logits go through it. Weights of half
precision are shards of float32 (they are the masters) that are gathered in half precision, and
gradients are summed in float32.

accelerate's `fsdp2_prepare_model` calls the same torch function, but it needs the
whole model on each rank or a whole state dict on rank 0 (accelerate 1.15, utils/fsdp_utils.py:828),
whereas weights come unit by unit here; it has one mesh (:773), whereas a frozen model has its own
group here; and it does not support CPUs (state.py:1010).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from rloo_cli.config.schema import DistributedConfig, LoraConfig, TrainConfig
from rloo_cli.distributed import gather
from rloo_cli.distributed.engine import ParallelEngine
from rloo_cli.distributed.optimizer import Optimizer, TrainingOptimizer, gather_full_tensor
from rloo_cli.distributed.world import World
from rloo_cli.policy import lora
from rloo_cli.policy.load import HALF_DTYPES
from rloo_cli.policy.model import Policy
from rloo_cli.policy.value import ValueModel
from rloo_cli.utils.errors import refuse
from rloo_cli.utils.files import JsonObject


class FSDPEngine(ParallelEngine):
    """Everything in shards."""

    lockstep = sharded = True

    def __init__(
        self,
        world: World,
        train: TrainConfig,
        distributed: DistributedConfig,
        lora: LoraConfig | None = None,
    ):
        super().__init__(world, train, distributed, lora)
        self.mesh = init_device_mesh(world.device.type, (world.size,))
        self.root_module: FSDPModule | None = None  # the outermost module, once it is sharded

    def distribute_policy(self, policy: Policy, num_updates: int) -> TrainingOptimizer:
        """Shard the policy, whose weights come from rank 0 unit by unit. -> its optimizer"""
        train, distributed = self.train_config, self.distributed_config
        # Adapters are float32 over a base of any dtype, and cast when they are multiplied.
        keeps_masters = distributed.master_weights == "float32"
        has_masters = keeps_masters and not lora.has_adapter(policy.model)
        self._shard(policy, torch.float32 if has_masters else None)
        check_trained_dtypes(policy.model, self.lora_config, distributed.engine)
        self.root_module = cast(FSDPModule, policy.logprob_module)
        masters = _master_names(policy.model) if has_masters and policy.dtype in HALF_DTYPES else []
        value_module = None
        if (value := self.value_model) is not None:
            self._shard_value(value, torch.float32 if keeps_masters else None)
            value_module = value.model
            if keeps_masters and value.dtype in HALF_DTYPES:
                head = _master_names(value.head, "score.")  # float32 in every pass
                masters += [f"value.{n}" for n in _master_names(value.model) if n not in head]
        optimizer = Optimizer(policy.model, train, num_updates, distributed, value_module)
        optimizer.shard_masters = frozenset(masters)
        return optimizer

    def distribute_frozen(self, policy: Policy) -> None:
        """Shard a policy that is never trained, in its own dtype."""
        # In its own group: ranks that gathered two models in different orders would get each
        # other's weights in one group, and wait for each other in two.
        group = dist.new_group(timeout=timedelta(seconds=self.distributed_config.timeout_s))
        self._shard(policy, None, DeviceMesh.from_group(group, self.world.device.type))

    def backward(self, loss: Tensor, is_last: bool) -> None:
        """Run a backward pass, in which FSDP averages gradients.

        With `reduce=last` it does so only in the update's last one: they are sent once, and held
        whole until then.
        """
        assert self.root_module is not None
        self._backward(self.root_module, loss, is_last)

    def backward_value(self, loss: Tensor, is_last: bool) -> None:
        """Run a backward pass of the value model, as `backward` does the policy's."""
        assert self.value_model is not None
        self._backward(cast(FSDPModule, self.value_model.forward_module), loss, is_last)

    def _backward(self, root: FSDPModule, loss: Tensor, is_last: bool) -> None:
        if self.distributed_config.reduce == "last":
            root.set_requires_gradient_sync(is_last)
        (loss * self.world.size).backward()

    @contextmanager
    def gathered_parameters(
        self, parameters: Sequence[nn.Parameter], dtype: torch.dtype | None = None
    ) -> Iterator[list[Tensor]]:
        """These weights, gathered: a copy on each rank."""
        yield [
            gather_full_tensor(p.detach() if dtype is None else p.detach().to(dtype))
            for p in parameters
        ]

    def _shard(
        self, policy: Policy, storage_dtype: torch.dtype | None, mesh: DeviceMesh | None = None
    ) -> None:
        """Shard every unit. `storage_dtype`: of the shards; None = that of the weights."""
        units = [*gather.decoder_layers(policy.model), policy.logprob_module]
        self._shard_units(units, policy.meta_weights, policy.dtype, storage_dtype, mesh)
        policy.meta_weights = None

    def _shard_value(self, value: ValueModel, storage_dtype: torch.dtype | None) -> None:
        """Shard a value model. Its head, which is float32 in every pass, is its own unit."""
        weights, model = value.meta_weights, value.model
        self._shard_units([value.head], weights, torch.float32, None)
        units = [*gather.decoder_layers(model), value.forward_module]
        self._shard_units(units, weights, value.dtype, storage_dtype)
        value.meta_weights = None

    def _shard_units(
        self,
        units: Sequence[nn.Module],
        meta_weights: "gather.MetaWeights | None",
        dtype: torch.dtype,
        storage_dtype: torch.dtype | None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        """Fill and shard these modules, which compute in `dtype`, in this order."""
        offload: OffloadPolicy = OffloadPolicy()
        if self.offloads and self.distributed_config.offload == "parameters":
            offload = CPUOffloadPolicy(pin_memory=True)
        mixed = MixedPrecisionPolicy()
        if dtype in HALF_DTYPES and storage_dtype is not None:
            mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        given: JsonObject = {
            "mesh": mesh or self.mesh,
            "mp_policy": mixed,
            "offload_policy": offload,
        }
        stored = storage_dtype if dtype in HALF_DTYPES else None
        for unit in units:
            gather.materialize_unit(unit, meta_weights, self.world, stored)
            fully_shard(unit, **given)


def _master_names(module: nn.Module, prefix: str = "") -> list[str]:
    """Names of the trained parameters."""
    return [f"{prefix}{n}" for n, p in module.named_parameters() if p.requires_grad]


def check_trained_dtypes(model: nn.Module, keys: LoraConfig | None, engine: str) -> None:
    """Check that all trained weights of a unit can be reduced together.

    Raises ConfigError for float32 adapters beside whole layers or biases of half precision.
    """
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
    if len(dtypes) < 2 or keys is None:
        return
    key = "model.lora.modules_to_save" if keys.modules_to_save else "model.lora.bias"
    value = keys.modules_to_save or keys.bias
    names = " and ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
    what = f"{key} = {value} does not go with distributed.engine = {engine}"
    why = f"trained weights would be {names}, but shards of one layer are reduced in one dtype"
    good = "[]" if keys.modules_to_save else "none"
    fix = f"{key}={good}, or model.dtype=float32, or distributed=zero2"
    refuse(key, what, fix, why)
