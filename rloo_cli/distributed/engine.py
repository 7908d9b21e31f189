"""What the loop asks of an engine, and the plainest two: one process, and a copy in each.

An engine spreads a policy's weights, gives the optimizer that goes with it, and is asked for each
backward pass. Losses are divided by what the whole update counts, over all ranks, so gradients of
ranks add up: where a library averages them, its engine multiplies by their number.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rloo_cli.distributed.world import World
from rloo_cli.optim import Optimizer
from rloo_cli.policy.model import Policy
from rloo_cli.schema import RunConfig

BUCKET = 64 * 2**20  # bytes of gradients that are summed at once


class Engine:
    """One process: everything is its own."""

    lockstep = False  # ranks meet in every forward and backward: they make equally many
    sharded = False  # no rank holds all weights

    beside: Any = None  # a second model that learns with the policy; whole on every rank

    def __init__(self, world: World, config: RunConfig):
        self.world, self.config = world, config

    @property
    def offloads(self) -> bool:
        """Whether the optimizer works in the CPU's memory for a model that computes on a GPU."""
        return self.config.distributed.offload != "none" and self.world.device.type == "cuda"

    def spread(self, policy: Policy, updates: int) -> Any:
        """Spread the policy over the ranks; its optimizer. `updates`: those of the whole run."""
        given = self.config.train, updates, self.config.distributed
        return Optimizer(policy.model, *given, self.beside)

    def freeze(self, frozen: Policy) -> None:
        """Spread a policy that is never trained."""

    def backward(self, loss: Tensor, last: bool) -> None:
        """One micro-batch's backward pass; `last`: of its update."""
        loss.backward()

    @contextmanager
    def whole(
        self, parameters: Sequence[nn.Parameter], dtype: torch.dtype | None = None
    ) -> Iterator[list[Tensor]]:
        """These weights as if they were not spread. All ranks enter and leave it together.

        `dtype`: what they may be cast to before they travel; None = as they are.
        """
        yield [p.detach() for p in parameters]


class Copies(Engine):
    """`ddp`: a copy of the model in each process.

    Gradients are summed once per update, of float32 masters where weights are half precision, and
    not during backward as torch's DistributedDataParallel does: an update has many micro-batches
    here, which ranks need not have equally many of, and sums in bfloat16 would lose what `optim`
    keeps.
    """

    def spread(self, policy: Policy, updates: int) -> Any:
        """The same weights everywhere, rank 0's, and an optimizer that sums gradients."""
        with torch.no_grad():
            for model in (policy.model, *([] if self.beside is None else [self.beside])):
                for tensor in (*model.parameters(), *model.buffers()):
                    if self.world.size > 1:
                        dist.broadcast(tensor, 0)
        optimizer: Optimizer = super().spread(policy, updates)
        if self.world.size > 1:
            optimizer.reduce = self._reduce
        return optimizer

    @torch.no_grad()
    def _reduce(self, masters: Sequence[Tensor]) -> None:
        """Sum the gradients of all ranks; one that only some have counts as 0 on the others."""
        have = torch.tensor([float(m.grad is not None) for m in masters])
        wanted = [m for m, n in zip(masters, self.world.sum(have).tolist(), strict=True) if n]
        for master in wanted:
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        for bucket in _buckets([m.grad for m in wanted if m.grad is not None]):
            flat = torch.cat([g.reshape(-1) for g in bucket])
            dist.all_reduce(flat)
            for grad, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                grad.copy_(part.view_as(grad))


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of one dtype that fill a bucket; a larger one is alone."""
    run: list[Tensor] = []
    for grad in gradients:
        size = sum(g.nbytes for g in run)
        if run and (size + grad.nbytes > BUCKET or grad.dtype != run[0].dtype):
            yield run
            run = []
        run.append(grad)
    if run:
        yield run
