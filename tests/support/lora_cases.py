"""Adapters on tiny models in memory, moved away from nothing so that they are seen."""

from typing import Any

import policy_cases
import torch
from torch import Tensor

from rloo_cli.config.schema import LoraConfig
from rloo_cli.policy import lora

PLAIN: dict[str, Any] = {
    "peft_type": "LORA", "kwargs": {}, "r": 4, "alpha": 8.0, "dropout": 0.0,
    "target_modules": "all-linear", "exclude_modules": [],
    "modules_to_save": [], "bias": "none", "use_rslora": False, "use_dora": False, "path": None,
}  # fmt: skip
CPU = torch.device("cpu")


def keys(**changes: Any) -> LoraConfig:
    """model.lora with these changes."""
    return LoraConfig(**(PLAIN | changes))


def adapted(family: str = "qwen3", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A tiny random model with an adapter that changes it."""
    model = policy_cases.fresh(family).to(dtype)
    lora.attach_adapter(model, keys(**changes), seed=1)
    move(model)
    return model


@torch.no_grad()
def move(model: Any, by: float = 0.1) -> None:
    """Add noise to what is trained."""
    draw = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter += by * torch.randn(parameter.shape, generator=draw)


def frozen(model: Any) -> dict[str, Tensor]:
    """Copies of everything that is not trained."""
    found = model.named_parameters()
    return {n: p.detach().clone() for n, p in found if not p.requires_grad}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether two sets of tensors are the same, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
