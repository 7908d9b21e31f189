"""How ranks talk. One rank for now: the loop already calls what several will need."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class World:
    """Who we are among the ranks, and the device we compute on."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Sum of a small tensor over all ranks; the same tensor with one rank."""
        return values


def join(config: Any) -> World:
    """Set this process up as `distributed` says, and take its device."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return World(rank=0, size=1, device=device)
