"""What each `Generator` of episodes has: it is around the run's own, and samples step by step."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

from rloo_cli.data.batch import Group
from rloo_cli.generation import Generator, ignore_arrival
from rloo_cli.utils.errors import GenerationError
from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:
    from rloo_cli.policy.model import Policy


class EpisodeStep(Protocol):
    """The episodes of one call of `generate`."""

    def run(self) -> None:
        """Sample wave after wave until every episode has ended."""

    def abandon(self) -> None:
        """End what still runs; after an error there may be some."""


class EpisodeSampler:
    """Samples episodes with `inner`, the generator of single answers."""

    def __init__(self, inner: Generator):
        self.inner = inner

    def begin_step(
        self,
        groups: list[Group],
        seeds: list[list[int]],
        options: JsonObject,
        arrived: Callable[[int], None],
    ) -> EpisodeStep:
        """The episodes of these groups. `options`: of each call of `inner.generate`."""
        raise NotImplementedError

    @property
    def metrics(self) -> dict[str, float]:
        """Those of the inner generator; an episode's own are on its rollout."""
        return self.inner.metrics

    @property
    def tolerance(self) -> float:
        """That of the inner generator."""
        return self.inner.tolerance

    def load(self, policy: "Policy", version: int) -> None:
        """Take the policy's weights."""
        self.inner.load(policy, version)

    def close(self) -> None:
        """Release the sampler."""
        self.inner.close()

    def generate(
        self,
        groups: list[Group],
        seeds: list[list[int]],
        greedy: bool = False,
        temperature: float | None = None,
        arrived: Callable[[int], None] = ignore_arrival,
    ) -> None:
        """Fill `groups[i].rollouts` with episodes, one per seed and in order.

        Raises GenerationError, also for a turn whose prompt is not the ids that were sampled.
        """
        if len(groups) != len(seeds):
            raise GenerationError(f"{len(groups)} groups, but seeds for {len(seeds)}")
        stay_awake: Callable[[], AbstractContextManager[None]]
        stay_awake = getattr(self.inner, "stay_awake", nullcontext)
        options: JsonObject = {"greedy": greedy, "temperature": temperature}
        step = self.begin_step(groups, seeds, options, arrived)
        with stay_awake():
            try:
                step.run()
            finally:
                step.abandon()
