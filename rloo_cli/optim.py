"""The optimizer, its schedule, and the step: check the numbers, clip, step.

Weights in bfloat16 or float16 get float32 masters here: an update of 1e-6 is lost in bfloat16
otherwise, silently. The optimizer only ever sees float32.
"""

import inspect
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import SchedulerType, get_scheduler

from rloo_cli import registry
from rloo_cli.errors import ConfigError, Problem, StorageError
from rloo_cli.faults import poison
from rloo_cli.schema import TrainConfig


class Optimizer:
    """AdamW (or the user's), schedule and clipping over a model's trainable parameters."""

    def __init__(self, model: nn.Module, config: TrainConfig, updates: int):
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.names, self.weights = list(named), list(named.values())
        half = (torch.bfloat16, torch.float16)
        self.masters = [
            p.detach().float().requires_grad_() if p.dtype in half else p for p in self.weights
        ]
        for weight in self.weights:
            if weight.dtype in half:
                weight.grad_dtype = torch.float32  # micro-batches add up in float32
        self.max_grad_norm = config.max_grad_norm
        self.inner = _optimizer(self.masters, config)
        self.schedule = _schedule(self.inner, config, updates)

    @property
    def learning_rate(self) -> float:
        """The rate the next step uses."""
        return float(self.inner.param_groups[0]["lr"])

    def grad_norm(self, factor: float = 1.0) -> Tensor:
        """Move the gradients, times `factor`, to the masters; their global L2 norm, unclipped. ()

        An update in which no completion needed a forward has a gradient of 0: with none at all the
        optimizer would leave its moments, and so the weights, as they are.
        """
        for weight, master in zip(self.weights, self.masters, strict=True):
            if weight is not master:
                master.grad = None if weight.grad is None else weight.grad.float()
                weight.grad = None
        if all(m.grad is None for m in self.masters):
            for master in self.masters:
                master.grad = torch.zeros_like(master)
        found = [m.grad for m in self.masters if m.grad is not None]
        if factor != 1.0:
            torch._foreach_mul_(found, factor)
        norm = nn.utils.get_total_norm(found)
        return poison("grad", norm)

    def step(self, norm: Tensor) -> None:
        """Clip to max_grad_norm, update, advance the schedule. `norm` is from `grad_norm`."""
        if self.max_grad_norm is not None:
            nn.utils.clip_grads_with_norm_(self.masters, self.max_grad_norm, norm)
        self.inner.step()
        self.schedule.step()
        with torch.no_grad():
            for weight, master in zip(self.weights, self.masters, strict=True):
                if weight is not master:
                    weight.copy_(master)
        self.zero()

    def zero(self) -> None:
        """Forget the gradients, so that nothing of them is ever applied."""
        for parameter in (*self.weights, *self.masters):
            parameter.grad = None

    def dump(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything a restart needs: `<what>/<parameter>` -> tensor, and plain values.

        float32 masters of half-precision weights are part of it. Raises StorageError for state
        that only a pickle could hold.
        """
        tensors: dict[str, Tensor] = {}
        plain: dict[str, Any] = {}
        for name, weight, master in zip(self.names, self.weights, self.masters, strict=True):
            if weight is not master:
                tensors[f"master/{name}"] = master
            for what, value in self.inner.state.get(master, {}).items():
                (tensors if isinstance(value, Tensor) else plain)[f"{what}/{name}"] = value
        order = {id(m): n for n, m in zip(self.names, self.masters, strict=True)}
        groups = [
            {k: v for k, v in g.items() if k != "params"} | {"names": [order[id(p)] for p in ps]}
            for g in self.inner.param_groups
            if (ps := g["params"])
        ]
        facts = {"state": plain, "groups": groups, "schedule": self.schedule.state_dict()}
        try:
            json.dumps(facts, allow_nan=False)
        except (TypeError, ValueError) as error:
            why = f"{error}: it is neither a tensor nor a plain value, and no pickle is written"
            raise StorageError(
                Problem("the optimizer's state cannot be saved", "train.optimizer", why)
            ) from None
        tensors = {n: t.detach().cpu().contiguous() for n, t in tensors.items()}
        return tensors, facts | {"learning_rate": self.learning_rate}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Put back what `dump` gave. Raises ConfigError when it is of other parameters."""
        masters = dict(zip(self.names, self.masters, strict=True))
        of = {n.partition("/")[2] for n in (*tensors, *facts["state"])}
        of |= {n for g in facts["groups"] for n in g["names"]}
        if of - set(masters):
            name = sorted(of - set(masters))[0]
            raise ConfigError(Problem("the checkpoint's optimizer is of other parameters", name))
        for group, known in zip(self.inner.param_groups, facts["groups"], strict=True):
            group |= {k: _as(v, group.get(k)) for k, v in known.items() if k != "names"}
        everything = (*tensors.items(), *facts["state"].items())
        for what, name, value in ((*k.partition("/")[::2], v) for k, v in everything):
            master = masters[name]
            if what == "master":
                master.copy_(value)
            else:
                self.inner.state[master][what] = _beside(value, master)
        self.schedule.load_state_dict(facts["schedule"])
        if self.learning_rate != facts["learning_rate"]:
            why = f"{self.learning_rate}, where the run stopped with {facts['learning_rate']}"
            raise ConfigError(
                Problem("the learning rate is not what it was", "train.learning_rate", why)
            )


def _as(value: Any, before: Any) -> Any:
    """JSON knows no tuples: betas."""
    return tuple(value) if isinstance(before, tuple) else value


def _beside(value: Any, master: Tensor) -> Any:
    """Counters of one element stay on the CPU, where torch's optimizers keep them."""
    lone = not isinstance(value, Tensor) or value.dim() == 0
    return value if lone else value.to(master.device)


def _optimizer(parameters: Iterable[Tensor], config: TrainConfig) -> torch.optim.Optimizer:
    arguments: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    arguments |= config.optimizer_kwargs
    build = (
        torch.optim.AdamW if config.optimizer == "adamw" else _user(config.optimizer, "optimizer")
    )
    try:
        return build(list(parameters), **arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            Problem(
                f"train.optimizer = {config.optimizer!r} does not take these arguments",
                "train.optimizer_kwargs",
                f"{error}; it is called as {config.optimizer}(parameters, **{arguments})",
            )
        ) from None


def _schedule(optimizer: torch.optim.Optimizer, config: TrainConfig, updates: int) -> Any:
    try:
        return _build_schedule(optimizer, config, updates)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            Problem(
                f"train.lr_scheduler = {config.lr_scheduler!r} cannot be made",
                "train.lr_scheduler",
                f"{error}; train.lr_scheduler_kwargs = {config.lr_scheduler_kwargs}",
                f"one of {', '.join(s.value for s in SchedulerType)}, or file.py:name",
            )
        ) from None


def _build_schedule(optimizer: torch.optim.Optimizer, config: TrainConfig, updates: int) -> Any:
    if ":" in config.lr_scheduler:
        build = _user(config.lr_scheduler, "lr_scheduler")
        given = {"num_warmup_steps": config.warmup_steps, "num_training_steps": updates}
        wanted = inspect.signature(build).parameters
        given = {k: v for k, v in given.items() if k in wanted}
        return build(optimizer, **given, **config.lr_scheduler_kwargs)
    return get_scheduler(
        config.lr_scheduler,
        optimizer,
        num_warmup_steps=config.warmup_steps,
        num_training_steps=updates,
        scheduler_specific_kwargs=config.lr_scheduler_kwargs or None,
    )


def _user(spec: str, key: str) -> Any:
    if ":" not in spec:
        raise ConfigError(
            Problem(
                f"train.{key} = {spec!r} is not known", f"train.{key}", "adamw, or file.py:name"
            )
        )
    return registry.load_code(spec)
