"""The optimizers of two DeepSpeed engines as one: a policy's and its value model's.

Each engine shards and steps its own model. Together they have one norm, by which both are clipped,
and one state file, like an engine that has both models in one optimizer.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from rloo_cli.distributed.zero_optimizer import ZeroOptimizer
from rloo_cli.utils.files import JsonObject

CLIP_EPSILON = 1e-6  # as in torch's and DeepSpeed's clipping


class PairedOptimizer:
    """`optimizer.TrainingOptimizer` over two of them, which do not clip themselves."""

    def __init__(self, policy: ZeroOptimizer, value: ZeroOptimizer, max_grad_norm: float | None):
        self.parts: Sequence[ZeroOptimizer] = (policy, value)
        self.names: list[str] = [*policy.names, *value.names]
        self.weights: list[nn.Parameter] = [*policy.weights, *value.weights]
        self.max_grad_norm = max_grad_norm
        self.weight_changes: dict[str, Tensor] = {}  # DeepSpeed does not show them
        self.inner: torch.optim.Optimizer = policy.inner
        self.schedule: LRScheduler = policy.schedule

    @property
    def learning_rate(self) -> float:
        """The rate of the next step, for both."""
        return self.parts[0].learning_rate

    @property
    def num_trained_parameters(self) -> int:
        """Trained parameters of both, over all ranks."""
        return sum(part.num_trained_parameters for part in self.parts)

    @property
    def masters_bytes(self) -> int:
        """Bytes of float32 masters in a checkpoint, over all ranks."""
        return sum(part.masters_bytes for part in self.parts)

    def grad_norm(self, factor: float = 1.0) -> Tensor:
        """Global L2 norm of all gradients times `factor`, unclipped. ()"""
        return torch.stack([part.grad_norm(factor) for part in self.parts]).norm()

    def step(self, norm: Tensor) -> None:
        """Clip both by their common norm, update, advance the schedules.

        Raises NumbersError if DeepSpeed finds an overflow that the norm did not show.
        """
        share = 1.0
        if self.max_grad_norm is not None:
            share = min(1.0, self.max_grad_norm / (float(norm) + CLIP_EPSILON))
        for part in self.parts:
            part.gradient_factor *= share
            part.step(norm)

    def zero_grad(self) -> None:
        """Drop the gradients, so that they are never applied."""
        for part in self.parts:
            part.zero_grad()

    def dump(self, rank: int, world_size: int) -> tuple[dict[str, Tensor], JsonObject]:
        """Dump the share of rank `rank` of both; all ranks call it together."""
        tensors: dict[str, Tensor] = {}
        groups: list[JsonObject] = []
        metadata: JsonObject = {}
        for part in reversed(self.parts):  # the policy's schedule is kept
            own, metadata = part.dump(rank, world_size)
            tensors |= own
            groups = [*metadata["groups"], *groups]
        return tensors, metadata | {"groups": groups}

    def restore(self, tensors: Mapping[str, Tensor], metadata: JsonObject) -> None:
        """Restore what `dump` returned, of any engine and number of ranks. Raises ConfigError."""
        for part, others in zip(self.parts, reversed(self.parts), strict=True):
            named = [g | {"names": [n for n in g["names"] if n not in others.names]}
                     for g in metadata["groups"]]  # fmt: skip
            state = {k: v for k, v in metadata["state"].items() if _name_of(k) not in others.names}
            own = metadata | {"groups": [g for g in named if g["names"]], "state": state}
            part.restore(_OtherNamesLeftOut(tensors, set(others.names)), own)


class _OtherNamesLeftOut(Mapping[str, Tensor]):
    """State of an optimizer without that of these parameters; each tensor is read on access."""

    def __init__(self, tensors: Mapping[str, Tensor], left_out: set[str]):
        self.tensors = tensors
        self.keys_kept = [key for key in tensors if _name_of(key) not in left_out]

    def __getitem__(self, key: str) -> Tensor:
        return self.tensors[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys_kept)

    def __len__(self) -> int:
        return len(self.keys_kept)


def _name_of(key: str) -> str:
    """The parameter of a key `<what>/<parameter>`."""
    return key.partition("/")[2]
