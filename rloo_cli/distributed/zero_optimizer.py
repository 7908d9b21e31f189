"""The optimizer of a DeepSpeed engine, with the interface of `optimizer.Optimizer`."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rloo_cli.config.schema import TrainConfig
from rloo_cli.distributed.optimizer import (
    StateShard,
    build_lr_schedule,
    check_state_matches,
    named_param_groups,
    restore_param_groups,
)
from rloo_cli.utils.errors import NumbersError
from rloo_cli.utils.fault_injection import poison_tensor
from rloo_cli.utils.files import JsonObject


class ZeroOptimizer:
    """`optimizer.Optimizer` over DeepSpeed's. `inner` is the torch optimizer that it was given."""

    def __init__(
        self,
        engine: Any,  # DeepSpeed's, which has no types
        inner: torch.optim.Optimizer,
        model: nn.Module,
        train: TrainConfig,
        num_updates: int,
        prefix: str = "",  # of the names of its parameters
    ):
        self.engine, self.zero_optimizer, self.inner = engine, engine.optimizer, inner
        named = {f"{prefix}{n}": p for n, p in model.named_parameters() if p.requires_grad}
        self.names, self.weights = list(named), list(named.values())
        self.stage3 = hasattr(self.weights[0], "ds_id")
        self.has_masters = self.weights[0].dtype in (torch.bfloat16, torch.float16)
        self.max_grad_norm = train.max_grad_norm
        self.weight_changes: dict[str, Tensor] = {}
        self.schedule = build_lr_schedule(inner, train, num_updates)
        self.gradient_factor = 1.0
        self.state = ZeroState(engine, inner, self.stage3)

    @property
    def parts(self) -> "Sequence[ZeroOptimizer]":
        """Itself: it has one torch optimizer."""
        return (self,)

    @property
    def learning_rate(self) -> float:
        """The rate of the next step."""
        return float(self.inner.param_groups[0]["lr"])

    @property
    def masters_bytes(self) -> int:
        """Bytes of float32 masters in a checkpoint, over all ranks."""
        return sum(4 * parameter_numel(p) for p in self.weights) if self.has_masters else 0

    @property
    def num_trained_parameters(self) -> int:
        """Trained parameters, over all ranks."""
        return sum(map(parameter_numel, self.weights))

    def grad_norm(self, factor: float = 1.0) -> Tensor:
        """Global L2 norm of the gradients times `factor`, unclipped. ()"""
        self.gradient_factor = factor
        if self.stage3:
            groups = self.zero_optimizer._get_norm_groups()
            norm = torch.stack([torch.as_tensor(n).double().cpu() for n in groups]).norm()
            bad = any(float(n) == -1.0 for n in groups)  # DeepSpeed's value for inf or NaN
        else:
            norm = torch.as_tensor(self.zero_optimizer.scaled_global_norm()).double().cpu()
            bad = not torch.isfinite(norm) or float(norm) < 0
        norm = torch.full_like(norm, torch.nan) if bad else norm
        return poison_tensor("grad", norm / self.zero_optimizer.loss_scale * factor)

    def step(self, norm: Tensor) -> None:
        """Clip to max_grad_norm, update, advance the schedule. `norm` is from `grad_norm`.

        Raises NumbersError if DeepSpeed finds an overflow that the norm did not show.
        """
        before = self.zero_optimizer.loss_scale
        if self.gradient_factor != 1.0:
            self.zero_optimizer.override_loss_scale(before / self.gradient_factor)
        try:
            self.engine.step()
        finally:
            if self.gradient_factor != 1.0:
                self.zero_optimizer.override_loss_scale(before)
        if getattr(self.zero_optimizer, "overflow", False):
            raise NumbersError(f"DeepSpeed skipped a step of norm {float(norm)}: overflow")
        self.schedule.step()

    def zero_grad(self) -> None:
        """Drop the gradients, so that they are never applied."""
        zero = self.zero_optimizer
        if self.stage3:
            zero._overflow_clean_up(zero.loss_scale)
            return
        zero.zero_grad(set_to_none=True)
        zero._release_preflattened_grad_buffers()
        zero.micro_step_id = -1
        if zero.cpu_offload:
            zero.reset_cpu_buffers()
            return
        for key in list(zero.averaged_gradients):
            zero.averaged_gradients[key] = zero.all_grad_tensors[key] = None

    def dump(self, rank: int, world_size: int) -> tuple[dict[str, Tensor], JsonObject]:
        """Dump the share of rank `rank`, as `Optimizer.dump`; all ranks call it together."""
        saved = StateShard(rank, world_size)
        counters = self.state.counters()
        for number, (name, weight) in enumerate(zip(self.names, self.weights, strict=True)):
            if self.has_masters:
                saved.add(number, f"master/{name}", self.state.get(weight, None))
            for what in self.state.tensor_names():
                saved.add(number, f"{what}/{name}", self.state.get(weight, what))
            for what, value in counters.items():
                saved.add(number, f"{what}/{name}", value.clone())  # one for all there
        groups = named_param_groups(self.inner, [self.names])
        metadata = {"state": {}, "groups": groups, "schedule": self.schedule.state_dict()}
        return saved.tensors, metadata | {"learning_rate": self.learning_rate}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], metadata: JsonObject) -> None:
        """Restore what `dump` returned, of any engine and number of ranks. Raises ConfigError."""
        check_state_matches(self.names, tensors, metadata)
        counters: dict[str, Tensor] = {}
        one = {k.partition("/")[0]: tensors[k] for k in tensors if k.endswith(f"/{self.names[0]}")}
        self.state.make_state([k for k, v in one.items() if k != "master" and v.dim()])
        weights = dict(zip(self.names, self.weights, strict=True))
        for key in tensors:
            what, _, name = key.partition("/")
            value = tensors[key]
            if what == "master":
                self.state.set(weights[name], value, None)
            elif value.dim() == 0:
                counters[what] = value
            else:
                self.state.set(weights[name], value, what)
        restore_counters(self.inner, counters)
        restore_param_groups(self, metadata)


def restore_counters(inner: torch.optim.Optimizer, counters: Mapping[str, Tensor]) -> None:
    """Restore one-element state for each of the flat shares that the optimizer updates.

    It is on the CPU, or on the share's device if the optimizer is fused, whose kernel reads it.
    """
    fused = bool(inner.param_groups[0].get("fused"))
    for flat, state in inner.state.items():
        where = flat.device if fused else torch.device("cpu")
        state |= {what: value.to(where, copy=True) for what, value in counters.items()}


def parameter_numel(parameter: Tensor) -> int:
    """Elements of a weight, over all ranks."""
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())


class ZeroState:
    """A torch optimizer's state per parameter, from DeepSpeed's flat shares."""

    def __init__(self, engine: Any, inner: torch.optim.Optimizer, stage3: bool):
        self.engine, self.zero_optimizer = engine, engine.optimizer
        self.inner, self.stage3 = inner, stage3

    def tensor_names(self) -> list[str]:
        """Names of state with one element per element of a parameter."""
        state: JsonObject = next(iter(self.inner.state.values()), {})
        return [k for k, v in state.items() if isinstance(v, Tensor) and v.dim() > 0]

    def counters(self) -> dict[str, Tensor]:
        """State that is one number for all."""
        state: JsonObject = next(iter(self.inner.state.values()), {})
        return {k: v for k, v in state.items() if isinstance(v, Tensor) and v.dim() == 0}

    def make_state(self, names: Sequence[str]) -> None:
        """Allocate state of these names, which the optimizer itself only makes at its first step.

        Stages 1 and 2 have made it do so at the start.
        """
        flats = (
            self.zero_optimizer.fp32_partitioned_groups_flat
            if self.stage3
            else [flat for group in self.inner.param_groups for flat in group["params"]]
        )
        for flat in flats:
            if not self.inner.state.get(flat):
                self.inner.state[flat] = {kind: torch.zeros_like(flat) for kind in names}
        if not self.stage3:  # the mapping to each parameter's share
            self.zero_optimizer._lazy_init_hp_params_optimizer_state()

    def get(self, weight: Any, name: str | None) -> Tensor:
        """A parameter's master (name None) or state, whole, on every rank."""
        owner = self.zero_optimizer if self.stage3 else weight
        arguments = (weight, name) if self.stage3 else (name,)
        whole: Tensor = owner.get_full_hp_param(*arguments)
        return whole.view(getattr(weight, "ds_shape", weight.shape))

    def set(self, weight: Any, value: Tensor, name: str | None) -> None:
        """Write this rank's share of a whole value."""
        if not self.stage3:
            weight.set_full_hp_param(value.to(weight.device), name)
            return
        part, _ = self.zero_optimizer._get_fp32_opt_state_partition(weight, False, name)
        rank = self.zero_optimizer._get_param_partition_rank(weight)
        flat = value.reshape(-1)
        padded = torch.cat([flat, flat.new_zeros(part.numel() * self.engine.world_size)])
        part.data.copy_(padded.narrow(0, part.numel() * rank, part.numel()))
