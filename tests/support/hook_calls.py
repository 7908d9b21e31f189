"""An algorithm's hooks, called with loose tensors as test vectors have them."""

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from torch import Tensor

from rloo_cli.algorithms import ppo as ppo_module
from rloo_cli.algorithms import rloo as rloo_module
from rloo_cli.algorithms.common import config, family, forward_plan, score
from rloo_cli.algorithms.common.hooks import AdvantageInputs, Advantages, LossInputs
from rloo_cli.config import registry


class HookCalls:
    """The algorithm of a module, a new one with each call's config."""

    token_advantages = staticmethod(family.charge_tokens)
    truncation = staticmethod(score.mask_truncated)
    denominator = staticmethod(family.update_denominator)
    needs_whole_step = staticmethod(forward_plan.needs_whole_step)

    by_family = False  # compute plain RLOO by common/family.py too, and not by rloo.py

    def __init__(self, module: ModuleType):
        self.Config = module.Config
        self.algorithm = registry.algorithm_class(module.__name__.rpartition(".")[2])

    def of(self, c: Any) -> Any:
        algorithm = self.algorithm(c)
        algorithm.is_plain = algorithm.is_plain and not self.by_family
        return algorithm

    def sequence_kl(self, old: Tensor, ref: Tensor, micro: Any, c: Any) -> Tensor:
        found: Tensor = self.of(c).sequence_kl(old, ref, micro)
        return found

    def advantages(
        self, scores: Tensor, pull: Tensor | None, scorable: Tensor, c: Any, **known: Any
    ) -> Advantages:
        found: Advantages = self.of(c).advantages(AdvantageInputs(scores, pull, scorable, **known))
        return found

    def loss(
        self, logp: Tensor, old: Tensor, ref: Tensor | None, micro: Any, a: Tensor, c: Any,
        denominator: float, *more: Any, **named: Any,
    ) -> Any:  # fmt: skip
        return self.of(c).loss(LossInputs(logp, old, ref, micro, a, denominator, *more, **named))

    def value_loss(self, values: Tensor, micro: Any, c: Any, tokens: float) -> Any:
        return self.of(c).value_loss(values, micro, tokens)

    def token_table(self, step: Any, c: Any) -> Any:
        return self.of(c).token_advantages(step)

    def combine(self, raw: Tensor, weights: Sequence[float], c: Any) -> tuple[Tensor, Tensor]:
        pair: tuple[Tensor, Tensor] = self.of(c).combine_rewards(raw, weights)
        return pair

    def shape(
        self, scores: Tensor, scorable: Tensor, lengths: Tensor, ended: Tensor, c: Any
    ) -> Tensor:
        shaped: Tensor = self.of(c).shape_scores(scores, scorable, lengths, ended)
        return shaped

    def problems(self, run: Any) -> Iterator[Any]:
        yield from self.of(run.algorithm).rules(run)

    def warnings(self, run: Any) -> Iterator[str]:
        yield from self.of(run.algorithm).warnings(run)

    def why_separate(self, run: Any) -> str | None:
        why: str | None = self.of(run.algorithm).forward_plan(run).separate
        return why

    def resolved(self, c: Any, backend: str) -> Any:
        """The config to train with."""
        values = c.model_dump()
        return type(c)(**(values | config.resolved_values(values, backend)))


def of_name(name: str) -> HookCalls:
    """Those of an algorithm of ours."""
    return HookCalls(registry.registered_module("algorithms", name))


rloo, ppo = HookCalls(rloo_module), HookCalls(ppo_module)
