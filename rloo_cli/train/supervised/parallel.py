"""Spreads a supervised training over ranks, by the engines that a run has.

An engine asks of a policy no more than its model, the module that is called, and where its weights
come from: `TrainedModule` has these, with the objective's loss inside the module that is called, so
that sharded weights are gathered for whatever it asks of the model.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rloo_cli.config.schema import ModelConfig, RunConfig, TrainConfig
from rloo_cli.distributed.engine import ParallelEngine
from rloo_cli.distributed.optimizer import TrainingOptimizer
from rloo_cli.distributed.world import World
from rloo_cli.distributed.zero import build_engine

if TYPE_CHECKING:
    from rloo_cli.policy.model import Policy


In = TypeVar("In", contravariant=True)


class Objective(Protocol[In]):
    """Defines what is learned from an example."""

    def length(self, example: In) -> int:
        """Tokens of the longest sequence in an example."""

    def loss_count(self, example: In) -> int:
        """What the loss is averaged over: an example's completion tokens, or 1 for a pair."""

    def loss(
        self, model: PreTrainedModel, examples: Sequence[In]
    ) -> tuple[Tensor, dict[str, float]]:
        """The loss summed over these examples, (), and sums of the other metrics."""


class LossModule(nn.Module):
    """A model whose call is its loss on some examples."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(
        self, objective: Objective[Any], examples: Sequence[Any]
    ) -> tuple[Tensor, dict[str, float]]:
        """The loss summed over these examples, (), and sums of the other metrics."""
        return objective.loss(self.model, examples)


class TrainedModule:
    """What an engine asks of a policy, for a model that is trained by a loss of its own."""

    def __init__(self, model: PreTrainedModel, device: torch.device, meta_weights: Any = None):
        self.model, self.device, self.meta_weights = model, device, meta_weights
        self.logprob_module = LossModule(model)
        self.call: nn.Module = self.logprob_module  # or an engine around it
        self.dtype: torch.dtype = next(model.parameters()).dtype


def build_supervised_engine(
    run: RunConfig, model_config: ModelConfig, train: TrainConfig, world: World
) -> ParallelEngine:
    """Build the engine of a supervised training, with the optimizer's keys of `train`.

    One process has no engine: it does what `single` does.
    """
    name = run.distributed.engine if world.size > 1 else "single"
    keys = {"engine": name, "master_weights": "float32"}
    distributed = run.distributed.model_copy(update=keys)
    changes = {"train": train, "model": model_config, "distributed": distributed}
    return build_engine(world, run.model_copy(update=changes))


def distribute_module(
    engine: ParallelEngine, module: TrainedModule, num_updates: int
) -> TrainingOptimizer:
    """Distribute a module over the ranks. -> its optimizer"""
    return engine.distribute_policy(cast("Policy", module), num_updates)
