"""The base of every `Generator` of episodes: it wraps the run's own, and samples step by step."""

from collections.abc import Callable
from typing import Protocol

from rloo_cli.data.batch import Group
from rloo_cli.generation import GeneratorWrapper, ignore_arrival
from rloo_cli.utils.files import JsonObject


class EpisodeStep(Protocol):
    """The episodes of one call of `generate`."""

    def run(self) -> None:
        """Sample wave after wave until every episode has ended."""

    def abandon(self) -> None:
        """End what is still running; after an error there may be some."""


class EpisodeSampler(GeneratorWrapper):
    """Samples episodes with `inner`, the generator of single turns. An episode's own metrics are
    on its rollout."""

    def begin_step(
        self,
        groups: list[Group],
        seeds: list[list[int]],
        options: JsonObject,
        arrived: Callable[[int], None],
    ) -> EpisodeStep:
        """The episodes of these groups. `options` go to each call of `inner.generate`."""
        raise NotImplementedError

    def generate(
        self,
        groups: list[Group],
        seeds: list[list[int]],
        greedy: bool = False,
        temperature: float | None = None,
        arrived: Callable[[int], None] = ignore_arrival,
    ) -> None:
        """Fill `groups[i].rollouts` with episodes, one per seed and in order.

        Raises GenerationError, also for a turn whose prompt differs from the sampled ids.
        """
        assert len(groups) == len(seeds), f"{len(groups)} groups, but seeds for {len(seeds)}"
        options: JsonObject = {"greedy": greedy, "temperature": temperature}
        step = self.begin_step(groups, seeds, options, arrived)
        with self.inner.stay_awake():
            try:
                step.run()
            finally:
                step.abandon()
