"""The base class of algorithms: six hooks, with defaults for those that a class does not define.

    advantages        rewards and advantages of completions, from scores and KL
    token_advantages  an advantage for every token of the step, where `Config.by_token` says so
    loss              a micro-batch's share of an update's loss
    value_loss        likewise, of a value model
    next_state        numbers for later steps, such as a moving average; checkpoints keep them
    rules             conflicts between keys, before a run starts

Two more may be overridden: how several rewards become one score (`combine_rewards`), and what
happens to a score before the KL is subtracted (`shape_scores`). Which forward passes an update
needs is derived from the config (`forward_plan`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from rloo_cli.algorithms.common import advantage, forward_plan, rules, score, turn_credit
from rloo_cli.algorithms.common import loss as common_loss
from rloo_cli.algorithms.common.advantage import AdvantageInputs, Advantages
from rloo_cli.algorithms.common.config import Switches, resolve_loss_type, resolved_values
from rloo_cli.algorithms.common.forward_plan import ForwardPlan
from rloo_cli.algorithms.common.loss import LossInputs
from rloo_cli.config import registry
from rloo_cli.config.schema import AlgorithmConfig, RunConfig
from rloo_cli.utils.errors import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from rloo_cli.algorithms.common.policy_loss import Loss
    from rloo_cli.algorithms.common.token_advantage import StepTokens, TokenAdvantages
    from rloo_cli.data.packing import MicroBatch

C = TypeVar("C", bound=Switches, covariant=True)


@dataclass(frozen=True)
class ValueLoss:
    """A micro-batch's share of an update's value loss, and the values its metrics need."""

    total: Tensor  # () with gradient, vf_coef included
    value: Tensor  # () detached, without vf_coef
    clipped: Tensor  # (N,) bool, more than epsilon_value from the value of the step's start
    counted: Tensor  # (N,) bool, trained tokens that have a return


class Algorithm(ABC, Generic[C]):
    """An algorithm with its config."""

    is_algorithm = True  # the registry finds a file's class by this attribute
    resolved_values = staticmethod(resolved_values)

    def __init__(self, config: C):
        self._config = resolve_loss_type(config)

    @property
    def config(self) -> C:
        """The algorithm's section of the config, with the switches that `loss_type` sets."""
        return self._config

    @abstractmethod
    def advantages(self, inputs: AdvantageInputs) -> Advantages:
        """Rewards and advantages of whole groups. (P, K) each -> (P, K) each

        It is called for the whole step where advantages depend on other groups.
        """

    def token_advantages(self, step: StepTokens) -> TokenAdvantages:
        """Advantages of every token of the step, where `Config.by_token` says so. (N,) -> (N,)"""
        if self.config.turn_rewards == "credit":
            return turn_credit.credit_turns(step, self.config)
        raise NotImplementedError(f"{type(self).__name__} does not define token_advantages")

    def loss(self, inputs: LossInputs) -> Loss:
        """A micro-batch's share of the update's loss: totals and their gradients add up to it."""
        return common_loss.micro_batch_loss(inputs, self.config)

    def value_loss(self, values: Tensor, micro: MicroBatch, num_tokens: float) -> ValueLoss:
        """A micro-batch's share of the value loss, for an algorithm with a value model. (N,)"""
        raise NotImplementedError(f"{type(self).__name__} does not define value_loss")

    def next_state(
        self, reward: Tensor, usable: Tensor, state: Mapping[str, float]
    ) -> dict[str, float]:
        """The state for later steps, from this step's rewards. (P, K), (P, K) ->"""
        return advantage.next_state(reward, usable, self.config, state)

    def rules(self, run: RunConfig) -> Iterator[Problem]:
        """Conflicts between keys that stop a run before it starts."""
        return rules.algorithm_problems(run)

    def warnings(self, run: RunConfig) -> Iterator[str]:
        """Combinations that are allowed but seldom meant, in one sentence each."""
        return rules.algorithm_warnings(run)

    def forward_plan(self, run: RunConfig) -> ForwardPlan:
        """Which forward passes an update needs."""
        return forward_plan.forward_plan(run, self.config)

    def combine_rewards(self, raw: Tensor, weights: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Several rewards as one score, and which completions have one.

        `raw` is float64, NaN where a reward has no score. (F, P, K), F -> (P, K), (P, K) bool
        """
        return score.combine_scores(raw, weights, self.config)

    def shape_scores(
        self, scores: Tensor, scorable: Tensor, lengths: Tensor, terminated: Tensor
    ) -> Tensor:
        """Length penalty, missing EOS, normalising, clip, for the whole step. (P, K) each -> (P, K)

        `lengths` count trained tokens; `terminated` completions ended by themselves.
        """
        return score.shape_step_scores(scores, scorable, lengths, terminated, self.config)


def load_algorithm(config: AlgorithmConfig) -> Algorithm[Switches]:
    """The algorithm that a config names, built in or from the user's file. Raises ConfigError."""
    algorithm: Algorithm[Switches] = registry.algorithm_class(config.name)(config)
    return algorithm
