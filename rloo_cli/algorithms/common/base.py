"""The base class of algorithms: seven hooks, with defaults for those that a class does not define.

    sequence_kl       the KL of completions to the reference
    advantages        rewards and advantages of completions, from scores and KL
    token_advantages  an advantage for every token of the step, if `Config.by_token` is set
    loss              a micro-batch's share of an update's loss
    value_loss        likewise, of a value model
    next_state        numbers for later steps, such as a moving average; checkpoints keep them
    rules             conflicts between keys, before a run starts

Two more may be overridden: how several rewards become one score (`combine_rewards`), and changes
to a score before the KL is subtracted (`shape_scores`). Which forward passes an update
needs is derived from the config (`forward_plan`). The defaults have every switch of the family.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from rloo_cli.algorithms.common import family, forward_plan, rules, score, token_advantage
from rloo_cli.algorithms.common.config import Switches, resolve_loss_type, resolved_values
from rloo_cli.algorithms.common.forward_plan import ForwardPlan
from rloo_cli.algorithms.common.hooks import (
    AdvantageInputs,
    Advantages,
    Loss,
    LossInputs,
    StepTokens,
    TokenAdvantages,
    ValueLoss,
)
from rloo_cli.config import registry
from rloo_cli.config.schema import AlgorithmConfig, RunConfig
from rloo_cli.data.segments import segment_sum
from rloo_cli.utils.errors import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from rloo_cli.data.packing import MicroBatch

C = TypeVar("C", bound=Switches, covariant=True)
EMA = 0.9  # decay of the moving average per step


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

    def sequence_kl(self, old_logp: Tensor, ref_logp: Tensor, micro_batch: MicroBatch) -> Tensor:
        """KL_i, summed (not averaged) over each completion's unmasked tokens, in nats and float64.

        With kl_temperature=one, both log-probabilities are those at temperature 1.
        (N,), (N,) -> (S,)
        """
        k = family.estimate_kl(old_logp.double() - ref_logp.double(), self.config)
        index, count = micro_batch.sequence_ids, micro_batch.num_sequences
        return segment_sum(micro_batch.mask * k, index, count)

    @abstractmethod
    def advantages(self, inputs: AdvantageInputs) -> Advantages:
        """Rewards and advantages of whole groups. (P, K) each -> (P, K) each

        It is called for the whole step where advantages depend on other groups.
        """

    def token_advantages(self, step: StepTokens) -> TokenAdvantages:
        """Advantages of every token of the step, if `Config.by_token` is set. (N,) -> (N,)"""
        if self.config.turn_rewards == "credit":
            return token_advantage.credit_turns(step, self.config)
        raise NotImplementedError(f"{type(self).__name__} does not define token_advantages")

    def loss(self, inputs: LossInputs) -> Loss:
        """A micro-batch's share of the update's loss: totals and their gradients add up to it."""
        return family.family_loss(inputs, self.config)

    def value_loss(self, values: Tensor, micro: MicroBatch, num_tokens: float) -> ValueLoss:
        """A micro-batch's share of the value loss, for an algorithm with a value model. (N,)"""
        raise NotImplementedError(f"{type(self).__name__} does not define value_loss")

    def next_state(
        self, reward: Tensor, usable: Tensor, state: Mapping[str, float]
    ) -> dict[str, float]:
        """The state for later steps, from this step's rewards. (P, K), (P, K) ->

        With baseline=ema, its average and the weight in it: b <- .9 b + .1 mean reward, from 0;
        w <- .9 w + .1 is the share of b that does not come from the initial 0.
        """
        if self.config.baseline != "ema" or not bool(usable.any()):
            return dict(state)
        mean = float(reward[usable].mean())
        b, w = state.get("ema", 0.0), state.get("ema_weight", 0.0)
        return {"ema": EMA * b + (1 - EMA) * mean, "ema_weight": EMA * w + (1 - EMA)}

    def rules(self, run: RunConfig) -> Iterator[Problem]:
        """Conflicts between keys that stop a run before it starts."""
        return rules.algorithm_problems(run)

    def warnings(self, run: RunConfig) -> Iterator[str]:
        """Combinations that are allowed but rarely intended, in one sentence each."""
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
        """Length penalty, missing EOS, normalizing, clip, for the whole step. (P, K) each -> (P, K)

        `lengths` count trained tokens; `terminated` completions ended on their own.
        """
        return score.shape_step_scores(scores, scorable, lengths, terminated, self.config)


def load_algorithm(config: AlgorithmConfig) -> Algorithm[Switches]:
    """The algorithm that a config names, built-in or from the user's file. Raises ConfigError."""
    algorithm: Algorithm[Switches] = registry.algorithm_class(config.name)(config)
    return algorithm
