"""The optimizer, its schedule, and the step: check the numbers, clip, step.

Weights in bfloat16 or float16 get float32 masters here: otherwise an update of 1e-6 is silently
lost in bfloat16. The optimizer only ever sees float32.
"""

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.lr_scheduler import LRScheduler
from transformers import SchedulerType, get_scheduler

from rloo_cli.config import registry
from rloo_cli.config.schema import DistributedConfig, TrainConfig
from rloo_cli.policy.load import HALF_DTYPES
from rloo_cli.utils.errors import StorageError, refuse
from rloo_cli.utils.fault_injection import poison_tensor
from rloo_cli.utils.files import JsonObject

# These are compared before and after each update: if the dtype rounds it away, nothing trains.
SAMPLED_TENSORS, SAMPLED_NUMBERS = 16, 256


def _reduce_nothing(masters: Sequence[Tensor]) -> None:
    """Do nothing: no other rank has gradients to add."""


def _abort_nothing() -> None:
    """Do nothing: no sum of gradients has begun."""


class TrainingOptimizer(Protocol):
    """The interface of an engine's optimizer for the loop and the checkpoints (`Optimizer`)."""

    inner: torch.optim.Optimizer
    schedule: LRScheduler
    names: list[str]  # of the trained parameters
    weights: list[nn.Parameter]
    max_grad_norm: float | None
    weight_changes: dict[str, Tensor]  # of the last update; {} if not available

    @property
    def parts(self) -> "Sequence[TrainingOptimizer]": ...  # those with a torch optimizer each
    @property
    def learning_rate(self) -> float: ...
    @property
    def num_trained_parameters(self) -> int: ...
    @property
    def masters_bytes(self) -> int: ...
    def grad_norm(self, factor: float = 1.0) -> Tensor: ...
    def step(self, norm: Tensor) -> None: ...
    def zero_grad(self) -> None: ...
    def dump(self, rank: int, world_size: int) -> tuple[dict[str, Tensor], JsonObject]: ...
    def restore(self, tensors: Mapping[str, Tensor], metadata: JsonObject) -> None: ...


class Optimizer:
    """AdamW (or the user's), schedule and clipping over a model's trainable parameters.

    Sharded weights (DTensors) are updated shard by shard. `reduce_gradients` sums gradients over
    ranks that have a copy each, `abort_reduce` cancels a sum. `value_module` is a
    second trained model; its names get a prefix.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        num_updates: int,
        distributed: DistributedConfig | None = None,
        value_module: nn.Module | None = None,
    ):
        found = [*model.named_parameters()]
        if value_module is not None:
            found += [(f"value.{n}", p) for n, p in value_module.named_parameters()]
        named = {n: p for n, p in found if p.requires_grad}
        self.names, self.weights = list(named), list(named.values())
        has_masters = distributed is None or distributed.master_weights == "float32"
        self.masters = [
            p.detach().float().requires_grad_() if has_masters and p.dtype in HALF_DTYPES else p
            for p in self.weights
        ]
        for weight in self.weights:
            if weight.dtype in HALF_DTYPES and has_masters:
                weight.grad_dtype = torch.float32  # micro-batches add up in float32
        self.max_grad_norm = config.max_grad_norm
        self.inner = build_optimizer(self.masters, config)
        self.schedule = build_lr_schedule(self.inner, config, num_updates)
        self.reduce_gradients: Callable[[Sequence[Tensor]], None] = _reduce_nothing
        self.abort_reduce: Callable[[], None] = _abort_nothing
        # Names of float32 shards that are gathered in a lower precision: they are masters.
        self.shard_masters: frozenset[str] = frozenset()
        self.weight_changes: dict[str, Tensor] = {}

    @property
    def parts(self) -> "Sequence[Optimizer]":
        """Itself: both models are in one torch optimizer."""
        return (self,)

    @property
    def learning_rate(self) -> float:
        """The rate of the next step."""
        return float(self.inner.param_groups[0]["lr"])

    @property
    def num_trained_parameters(self) -> int:
        """Trained parameters, over all ranks."""
        return sum(p.numel() for p in self.weights)

    @property
    def masters_bytes(self) -> int:
        """Bytes of float32 masters in a checkpoint."""
        pairs = zip(self.weights, self.masters, strict=True)
        return sum(4 * m.numel() for w, m in pairs if w is not m)

    def grad_norm(self, factor: float = 1.0) -> Tensor:
        """Move the gradients, times `factor`, to the masters. -> global L2 norm, unclipped, ()

        An update in which no completion needed a forward has a gradient of 0: without any the
        optimizer would not change its moments, and so the weights.
        """
        for weight, master in zip(self.weights, self.masters, strict=True):
            if weight is not master:
                master.grad = None if weight.grad is None else weight.grad.float()
                weight.grad = None
        self.reduce_gradients(self.masters)
        if all(m.grad is None for m in self.masters):
            for master in self.masters:
                master.grad = torch.zeros_like(master)
        gradients = [m.grad for m in self.masters if m.grad is not None]
        if factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        norm = gather_full_tensor(nn.utils.get_total_norm(gradients))
        return poison_tensor("grad", norm)

    def step(self, norm: Tensor) -> None:
        """Clip to max_grad_norm, update, advance the schedule. `norm` is from `grad_norm`."""
        if self.max_grad_norm is not None:
            nn.utils.clip_grads_with_norm_(self.masters, self.max_grad_norm, norm)
        before = self._sample_weights()
        self.inner.step()
        self.schedule.step()
        pairs = zip(self.weights, self.masters, strict=True)
        halves = [(weight, master) for weight, master in pairs if weight is not master]
        if halves:
            with torch.no_grad():
                torch._foreach_copy_([w for w, _ in halves], [m for _, m in halves])
        if before is not None and (after := self._sample_weights()) is not None:
            changed, sampled = (after != before).sum(), torch.tensor(before.numel())
            self.weight_changes = {"changed_weights": changed, "sampled_weights": sampled}
        self.zero_grad()

    @torch.no_grad()
    def _sample_weights(self) -> Tensor | None:
        """A few numbers of some weights, in the compute dtype. -> (at most 4096)

        None if that dtype is not the shards' own.
        """
        if self.shard_masters or not self.weights:
            return None
        chosen = self.weights[:: -(-len(self.weights) // SAMPLED_TENSORS)]
        rows = []
        for weight in chosen:
            local = weight.to_local() if isinstance(weight, DTensor) else weight
            flat = local.detach().reshape(-1)
            rows.append(flat[:: -(-flat.numel() // SAMPLED_NUMBERS) or 1])
        return torch.cat([row.to(rows[0]) for row in rows])

    def zero_grad(self) -> None:
        """Drop the gradients, so that they are never applied. All ranks call it together."""
        self.abort_reduce()
        for parameter in (*self.weights, *self.masters):
            parameter.grad = None

    def dump(self, rank: int = 0, world_size: int = 1) -> tuple[dict[str, Tensor], JsonObject]:
        """The state that a resumed run needs: `<what>/<parameter>` -> tensor, and plain values.

        All ranks call it, and each gets a share of the tensors, every one whole. float32 masters of
        half-precision weights are part of it. Raises StorageError for state that would need
        pickle.
        """
        saved = StateShard(rank, world_size)
        plain: JsonObject = {}
        columns = zip(self.names, self.weights, self.masters, strict=True)
        for number, (name, weight, master) in enumerate(columns):
            if weight is not master:
                saved.add(number, f"master/{name}", master)
            elif name in self.shard_masters:  # the weights' file has them in the model's dtype
                saved.add(number, f"master/{name}", gather_full_tensor(master.detach()))
            for what, value in self.inner.state.get(master, {}).items():
                if isinstance(value, Tensor):
                    saved.add(number, f"{what}/{name}", gather_full_tensor(value))
                else:
                    plain[f"{what}/{name}"] = value
        order = {id(m): n for n, m in zip(self.names, self.masters, strict=True)}
        names = [[order[id(p)] for p in g["params"]] for g in self.inner.param_groups]
        groups = named_param_groups(self.inner, names)
        metadata = {"state": plain, "groups": groups, "schedule": self.schedule.state_dict()}
        try:
            json.dumps(metadata, allow_nan=False)
        except (TypeError, ValueError) as error:
            why = f"{error}: it is neither a tensor nor a plain value, and rloo writes no pickles"
            what = "the optimizer's state cannot be saved"
            fix = "train.optimizer=adamw, or one that keeps only tensors and plain values"
            refuse("train.optimizer", what, fix, why, error=StorageError)
        return saved.tensors, metadata | {"learning_rate": self.learning_rate}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], metadata: JsonObject) -> None:
        """Restore what `dump` returned, on any number of ranks and with any engine.

        Raises ConfigError if it belongs to other parameters.
        """
        check_state_matches(self.names, tensors, metadata)
        masters = dict(zip(self.names, self.masters, strict=True))
        for key in (*tensors, *metadata["state"]):
            what, _, name = key.partition("/")
            value = tensors[key] if key in tensors else metadata["state"][key]
            master = masters[name]
            if what == "master":
                master.copy_(distribute_like(value, master).to(master.dtype))
            else:
                fused = bool(self.inner.param_groups[0].get("fused"))
                self.inner.state[master][what] = _state_on_device(value, master, fused)
        restore_param_groups(self, metadata)


class StateShard:
    """One rank's share of an optimizer's state: that of every world_size-th parameter."""

    def __init__(self, rank: int, world_size: int):
        self.rank, self.world_size = rank, world_size
        self.tensors: dict[str, Tensor] = {}

    def add(self, parameter_index: int, name: str, value: Tensor) -> None:
        """Keep this tensor of a parameter's state if the parameter is this rank's."""
        if parameter_index % self.world_size == self.rank:
            self.tensors[name] = value.detach().cpu().contiguous()


def named_param_groups(
    inner: torch.optim.Optimizer, names: Sequence[list[str]]
) -> list[JsonObject]:
    """The optimizer's groups as plain values, with the names of their parameters."""
    return [
        {k: v for k, v in group.items() if k != "params"} | {"names": own}
        for group, own in zip(inner.param_groups, names, strict=False)
        if own
    ]


def check_state_matches(
    names: Sequence[str], tensors: Mapping[str, Tensor], metadata: JsonObject
) -> None:
    """Raises ConfigError if a checkpoint's optimizer belongs to other parameters than these."""
    saved = {n.partition("/")[2] for n in (*tensors, *metadata["state"])}
    saved |= {n for g in metadata["groups"] for n in g["names"]}
    if others := sorted(saved - set(names)):
        what = "the checkpoint's optimizer belongs to other parameters"
        why = f"{len(others)} of its parameters are not trained here"
        fix = "use that run's model.path, model.lora and model.freeze, or resume=never name=OTHER"
        refuse(others[0], what, fix, why)


def restore_param_groups(optimizer: TrainingOptimizer, metadata: JsonObject) -> None:
    """Restore options and schedule. Raises ConfigError if the learning rate would differ."""
    saved_groups = metadata["groups"]
    for number, group in enumerate(optimizer.inner.param_groups):
        saved = saved_groups[0] if len(saved_groups) == 1 else saved_groups[number]
        # How it is computed depends on the machine: a CPU's checkpoint can resume on a GPU.
        own = ("names", "fused", "foreach", "capturable")
        group |= {k: _with_tuples(v, group.get(k)) for k, v in saved.items() if k not in own}
    optimizer.schedule.load_state_dict(metadata["schedule"])
    if optimizer.learning_rate != metadata["learning_rate"]:
        why = f"{optimizer.learning_rate}, but the run stopped with {metadata['learning_rate']}"
        what, fix = (
            "the learning rate differs from the checkpoint's",
            "resume=RUN/checkpoint-STEP, an older one",
        )
        refuse("train.learning_rate", what, fix, why)


def gather_full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor, on all ranks together; other tensors are returned unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def distribute_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Shard a tensor, which every rank has whole, as `like` is sharded, on its device."""
    if not isinstance(like, DTensor):
        return tensor.to(like.device)
    tensor = tensor.to(like.to_local().device)
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def _with_tuples(value: object, before: object) -> object:
    """JSON has no tuples, but betas must be one."""
    return tuple(value) if isinstance(before, tuple) and isinstance(value, list) else value


def _state_on_device(value: object, master: Tensor, fused: bool) -> object:
    """Move a parameter's state to its device.

    Counters of one element stay on the CPU, where torch's optimizers keep them, except that a fused
    optimizer has them on its device.
    """
    if not isinstance(value, Tensor):
        return value
    if value.dim() == 0:
        return value.to(master.device) if fused else value
    return distribute_like(value, master)


def build_optimizer(parameters: Iterable[Tensor], config: TrainConfig) -> torch.optim.Optimizer:
    """Build the config's optimizer. Raises ConfigError for arguments that it does not accept.

    torch's fused AdamW is one pass over the memory: five times as fast as torch's default on a CPU,
    and as fast as DeepSpeed's CPU Adam (20 million float32 weights on two cores: 0.21, 0.04 and
    0.04 s), which needs a compiler and two minutes at the start, and no sharded tensors.
    """
    arguments: JsonObject = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    parameters = list(parameters)
    if config.optimizer == "adamw" and can_use_fused(parameters):
        arguments["fused"] = True  # a third of the passes over memory, and no temporaries
    arguments |= config.optimizer_kwargs
    adamw: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    own = config.optimizer != "adamw"
    build = registry.load_code(config.optimizer) if own else adamw
    try:
        optimizer: torch.optim.Optimizer = build(parameters, **arguments)
        return optimizer
    except (TypeError, ValueError) as error:
        refuse(
            "train.optimizer_kwargs",
            f"train.optimizer = {config.optimizer!r} does not accept these arguments",
            "train.optimizer_kwargs={}, or a function that accepts all of them",
            f"{error}; it is called as {config.optimizer}(parameters, **{arguments})",
        )


def can_use_fused(parameters: Sequence[Tensor]) -> bool:
    """Whether torch's fused AdamW supports these: all on GPUs, or all on the CPU."""
    devices = {parameter.device.type for parameter in parameters}
    return devices in ({"cuda"}, {"cpu"}) and all(p.is_floating_point() for p in parameters)


def warmup_updates(config: TrainConfig, num_updates: int) -> int:
    """Updates of warm-up: as configured, or a tenth of the run if the run would end within it."""
    if config.lr_scheduler == "constant" or config.warmup_steps < num_updates:
        return config.warmup_steps
    return num_updates // 10


def warmup_note(config: TrainConfig, num_updates: int) -> str:
    """A line for the user if the warm-up is shorter than configured; else ""."""
    shorter = warmup_updates(config, num_updates)
    if shorter == config.warmup_steps:
        return ""
    return (
        f"the warm-up takes {shorter} updates instead of warmup_steps={config.warmup_steps}:"
        f" there are only {num_updates} updates"
    )


def build_lr_schedule(
    optimizer: torch.optim.Optimizer, config: TrainConfig, num_updates: int
) -> LRScheduler:
    """Build the learning rate's schedule. Raises ConfigError for one that cannot be built."""
    try:
        return _make_lr_schedule(optimizer, config, num_updates)
    except (TypeError, ValueError) as error:
        refuse(
            "train.lr_scheduler",
            f"train.lr_scheduler = {config.lr_scheduler!r} cannot be built",
            f"one of {', '.join(s.value for s in SchedulerType)}, or file.py:name",
            f"{error}; train.lr_scheduler_kwargs = {config.lr_scheduler_kwargs}",
        )


def _make_lr_schedule(
    optimizer: torch.optim.Optimizer, config: TrainConfig, num_updates: int
) -> LRScheduler:
    warmup = warmup_updates(config, num_updates)
    lengths = {"num_warmup_steps": warmup, "num_training_steps": num_updates}
    schedule: LRScheduler
    if ":" in config.lr_scheduler:
        build = registry.load_code(config.lr_scheduler)
        wanted = inspect.signature(build).parameters
        lengths = {k: v for k, v in lengths.items() if k in wanted}
        schedule = build(optimizer, **lengths, **config.lr_scheduler_kwargs)
    else:
        kwargs = config.lr_scheduler_kwargs or None
        schedule = get_scheduler(
            config.lr_scheduler, optimizer, **lengths, scheduler_specific_kwargs=kwargs
        )
    return schedule
