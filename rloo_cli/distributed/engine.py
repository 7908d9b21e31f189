"""The interface of a parallel engine, and the two simplest: one process, and DDP.

An engine distributes a policy's weights, builds the optimizer that goes with them, and runs each
backward pass. A loss is divided by a count over the whole update and all ranks, so the ranks'
gradients add up: if a library averages them, its engine multiplies by the number of ranks.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rloo_cli.config.schema import DistributedConfig, LoraConfig, TrainConfig
from rloo_cli.distributed.optimizer import Optimizer, TrainingOptimizer
from rloo_cli.distributed.overlap import GradientReducer
from rloo_cli.distributed.world import World
from rloo_cli.policy.model import Policy
from rloo_cli.policy.value import ValueModel


class ParallelEngine:
    """One process, which has everything."""

    lockstep = False  # ranks synchronize in every forward and backward
    sharded = False  # no rank holds all weights
    value_model: ValueModel | None = None  # a second trained model

    def __init__(
        self,
        world: World,
        train: TrainConfig,
        distributed: DistributedConfig,
        lora: LoraConfig | None = None,
    ):
        self.world, self.train_config = world, train
        self.distributed_config, self.lora_config = distributed, lora

    @property
    def offloads(self) -> bool:
        """Whether weights or optimizer lie in CPU memory for a model that computes on a GPU."""
        return self.distributed_config.offload != "none" and self.world.device.type == "cuda"

    def distribute_policy(self, policy: Policy, num_updates: int) -> TrainingOptimizer:
        """Distribute the policy over the ranks. -> its optimizer

        `num_updates`: those of the whole run.
        """
        train, distributed = self.train_config, self.distributed_config
        value = None if self.value_model is None else self.value_model.model
        return Optimizer(policy.model, train, num_updates, distributed, value)

    def distribute_frozen(self, policy: Policy) -> None:
        """Distribute a policy that is never trained."""

    def backward(self, loss: Tensor, is_last: bool) -> None:
        """Run one micro-batch's backward pass. `is_last`: it is the update's last."""
        loss.backward()

    def backward_value(self, loss: Tensor, is_last: bool) -> None:
        """Run one micro-batch's backward pass of the value model, which comes before the policy's.

        `is_last`: it is the update's last of this model.
        """
        loss.backward()

    def skip_micro_batch(self, is_last: bool) -> None:
        """Record that this rank has no micro-batch when others have one, and no dummy pass."""

    @contextmanager
    def gathered_parameters(
        self, parameters: Sequence[nn.Parameter], dtype: torch.dtype | None = None
    ) -> Iterator[list[Tensor]]:
        """These weights, whole. All ranks enter and leave the context together.

        `dtype`: they may be cast to it before they are sent; None = unchanged.
        """
        yield [p.detach() for p in parameters]


class DDPEngine(ParallelEngine):
    """`ddp`: a copy of the model in each process.

    Gradients are summed once per update, of float32 masters if weights are half precision, and not
    by torch's DistributedDataParallel: an update has many micro-batches here, of which ranks may
    have unequal numbers, and sums in bfloat16 would lose the masters' precision. In the backward
    pass of the last micro-batch they are sent as they become complete (`overlap`).
    """

    gradient_reducer: GradientReducer | None = None  # with several ranks

    def distribute_policy(self, policy: Policy, num_updates: int) -> TrainingOptimizer:
        """Send rank 0's weights to all ranks. -> an optimizer that sums gradients"""
        with torch.no_grad():
            value = [] if self.value_model is None else [self.value_model.model]
            for model in (policy.model, *value):
                for tensor in (*model.parameters(), *model.buffers()):
                    if self.world.size > 1:
                        dist.broadcast(tensor, 0)
        optimizer = super().distribute_policy(policy, num_updates)
        if self.world.size > 1 and isinstance(optimizer, Optimizer):
            learned = [p for model in value for p in model.parameters()]
            reducer = GradientReducer(self.world, optimizer.weights, optimizer.masters, learned)
            optimizer.reduce_gradients = reducer.finalize_reduce
            optimizer.abort_reduce = reducer.abort_reduce
            self.gradient_reducer = reducer
        return optimizer

    def backward(self, loss: Tensor, is_last: bool) -> None:
        """Run a backward pass; in the update's last one gradients begin to be sent."""
        if self.gradient_reducer is None:
            loss.backward()
        else:
            self.gradient_reducer.backward(loss, is_last)

    def backward_value(self, loss: Tensor, is_last: bool) -> None:
        """Run a backward pass of the value model; its gradients are sent with the policy's."""
        self.backward(loss, False)

    def skip_micro_batch(self, is_last: bool) -> None:
        """After the update's last micro-batch this rank's gradients may be sent."""
        if self.gradient_reducer is not None:
            self.gradient_reducer.skip_micro_batch(is_last)
