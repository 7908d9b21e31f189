"""A sampler that only rank 0 talks to: one server, many trainers.

Rank 0 decides everything: when weights are sent, how often a lost server is tried again, what is
drawn anew. The others follow: they gather weights when it asks for them, answer when it compares
log-probabilities, and are given what was drawn, or the error.
"""

from collections.abc import Callable, Iterator
from threading import Lock
from typing import Any

from rloo_cli.data.batch import Group
from rloo_cli.data.packing import Micro
from rloo_cli.distributed.world import World
from rloo_cli.generation import Generator, unheard


class Led:
    """`build` makes the real sampler, on rank 0 alone.

    `pieces`: all weights, whole, unit by unit; `policy` answers for all ranks together.
    """

    led = True

    def __init__(
        self, world: World, policy: Any, pieces: Callable[[], Any], build: Callable[[], Generator]
    ):
        self.world, self.policy, self.pieces = world, policy, pieces
        self.inner: Any = None
        self.facts: dict[str, float] = {}
        self.units: Any = None  # weights that are being sent

        def make() -> float:
            self.inner = build()
            return self.inner.tolerance

        self.tolerance = world.first(make)

    def load(self, policy: Any, version: int) -> None:
        """Rank 0 sends the weights of optimizer update `version`; all gather them."""
        self._together(lambda inner: inner.load(_Asked(self), version))

    def generate(
        self,
        groups: list[Group],
        seeds: list[list[int]],
        greedy: bool = False,
        temperature: float | None = None,
        arrived: Callable[[int], None] = unheard,
    ) -> None:
        """Fill every group's rollouts, on every rank. All ranks give the same groups."""

        def heard(place: int) -> None:
            """Rank 0: a group is whole. The others have it now, so that all can score it while the
            rest is being drawn."""
            self.world.say(("group", (place, groups[place].rollouts)))
            arrived(place)

        def given(place: int, rollouts: Any) -> None:
            groups[place].rollouts = rollouts
            arrived(place)

        self._together(
            lambda inner: inner.generate(groups, seeds, greedy, temperature, heard), given
        )

    def close(self) -> None:
        """Let go of the sampler."""
        if self.inner is not None:
            self.inner.close()

    def _together(
        self, work: Callable[[Generator], Any], given: Callable[[int, Any], None] | None = None
    ) -> Any:
        """Rank 0 works; the others do what it asks until it is done. `given`: what they do with
        the completions of a group."""

        def lead() -> Any:
            try:
                return work(self.inner), dict(self.inner.facts), self.inner.tolerance
            finally:
                self._drain()
                self.world.say(("done", None))

        if not self.world.is_main:
            self._follow(given)
        found, self.facts, self.tolerance = self.world.first(lead)
        return found

    def _follow(self, given: Callable[[int, Any], None] | None) -> None:
        """What rank 0 says, until it is done: gather weights, compute log-probabilities of these
        groups, take the completions of this group."""
        name, said = self.world.say(None)
        while name != "done":
            if name == "weights":
                for _ in self.pieces():
                    pass
            elif name == "group":
                assert given is not None
                given(*said)
            else:
                groups, parts = said
                self.policy.frozen_logp(self.policy.pack(groups, parts))
            name, said = self.world.say(None)

    def weights(self) -> Iterator[dict[str, Any]]:
        """Rank 0: all weights, gathered by all ranks, unit by unit."""
        self._drain()
        self.world.say(("weights", None))
        self.units = _Units(self.pieces())
        return self.units

    def _drain(self) -> None:
        """Of a send that failed the other ranks gather the rest all the same."""
        if self.units is not None:
            self.units.drain()
            self.units = None

    def frozen_logp(self, groups: list[Group], parts: Any) -> Any:
        """Rank 0: log-probabilities by all ranks. A layer that is still gathered here, the last one
        that was sent, would be gathered by the others alone."""
        self._drain()
        self.world.say(("logp", (groups, parts)))
        return self.policy.frozen_logp(self.policy.pack(groups, parts))


class _Units:
    """An iterator that a thread may be stuck beside while another one reads it to its end."""

    def __init__(self, units: Iterator[dict[str, Any]]):
        self.units, self.lock = iter(units), Lock()

    def __iter__(self) -> "_Units":
        return self

    def __next__(self) -> dict[str, Any]:
        with self.lock:
            return next(self.units)

    def drain(self) -> None:
        """Read what is left."""
        with self.lock:
            for _ in self.units:
                pass


class _Asked:
    """The policy as rank 0's sampler sees it: what it asks, all ranks do."""

    def __init__(self, led: Led):
        self.led, self.model, self.dtype = led, led.policy.model, led.policy.dtype

    def pack(self, groups: list[Group], parts: Any) -> Micro:
        """Laid out; remembers of what."""
        micro: Micro = self.led.policy.pack(groups, parts)
        self.asked = groups, parts
        return micro

    def frozen_logp(self, micro: Micro) -> Any:
        """Of what was packed last."""
        return self.led.frozen_logp(*self.asked)

    def pieces(self) -> Iterator[dict[str, Any]]:
        """All weights, whole, unit by unit."""
        return self.led.weights()
