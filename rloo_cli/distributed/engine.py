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

from rloo_cli.config.schema import RunConfig
from rloo_cli.distributed.optimizer import Optimizer
from rloo_cli.distributed.overlap import GradientReducer
from rloo_cli.distributed.world import World
from rloo_cli.policy.model import Policy


class ParallelEngine:
    """One process: everything is its own."""

    lockstep = False  # ranks meet in every forward and backward: they make equally many
    sharded = False  # no rank holds all weights

    value_module: Any = None  # a second model that learns with the policy; whole on every rank

    def __init__(self, world: World, config: RunConfig):
        self.world, self.config = world, config

    @property
    def offloads(self) -> bool:
        """Whether the optimizer works in the CPU's memory for a model that computes on a GPU."""
        return self.config.distributed.offload != "none" and self.world.device.type == "cuda"

    def distribute_policy(self, policy: Policy, num_updates: int) -> Any:
        """Spread the policy over the ranks; its optimizer. `updates`: those of the whole run."""
        given = self.config.train, num_updates, self.config.distributed
        return Optimizer(policy.model, *given, self.value_module)

    def distribute_frozen(self, policy: Policy) -> None:
        """Spread a policy that is never trained."""

    def backward(self, loss: Tensor, is_last: bool) -> None:
        """One micro-batch's backward pass; `last`: of its update."""
        loss.backward()

    def skip_micro_batch(self, is_last: bool) -> None:
        """This rank has no micro-batch where others have one, and none stands in; `last`: of the
        update."""

    @contextmanager
    def gathered_parameters(
        self, parameters: Sequence[nn.Parameter], dtype: torch.dtype | None = None
    ) -> Iterator[list[Tensor]]:
        """These weights as if they were not spread. All ranks enter and leave it together.

        `dtype`: what they may be cast to before they travel; None = as they are.
        """
        yield [p.detach() for p in parameters]


class DDPEngine(ParallelEngine):
    """`ddp`: a copy of the model in each process.

    Gradients are summed once per update, of float32 masters where weights are half precision, and
    not by torch's DistributedDataParallel: an update has many micro-batches here, which ranks need
    not have equally many of, and sums in bfloat16 would lose what `optim` keeps. In the backward
    pass of the last micro-batch they are sent as they become whole (`overlap`).
    """

    gradient_reducer: GradientReducer | None = None  # with several ranks

    def distribute_policy(self, policy: Policy, num_updates: int) -> Any:
        """The same weights everywhere, rank 0's, and an optimizer that sums gradients."""
        with torch.no_grad():
            for model in (policy.model, *filter(None, [self.value_module])):
                for tensor in (*model.parameters(), *model.buffers()):
                    if self.world.size > 1:
                        dist.broadcast(tensor, 0)
        optimizer: Optimizer = super().distribute_policy(policy, num_updates)
        if self.world.size > 1:
            apart = [] if self.value_module is None else [*self.value_module.parameters()]
            found = GradientReducer(self.world, optimizer.weights, optimizer.masters, apart)
            optimizer.reduce_gradients = found.finalize_reduce
            optimizer.abort_reduce = found.abort_reduce
            self.gradient_reducer = found
        return optimizer

    def backward(self, loss: Tensor, is_last: bool) -> None:
        """In the last one of an update gradients begin to travel."""
        if self.gradient_reducer is None:
            loss.backward()
        else:
            self.gradient_reducer.backward(loss, is_last)

    def skip_micro_batch(self, is_last: bool) -> None:
        """What this rank has of the update's gradients may travel after the last one."""
        if self.gradient_reducer is not None:
            self.gradient_reducer.skip_micro_batch(is_last)
