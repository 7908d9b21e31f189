"""A sampler that only rank 0 talks to: one server, many trainers.

Rank 0 decides everything: when weights are sent, how often a lost server is tried again, what is
drawn anew. The others follow: they gather weights when it asks for them, answer when it compares
log-probabilities, and are given what was drawn, or the error.
"""

from collections.abc import Callable, Iterator
from threading import Lock
from typing import Any

from rloo_cli.data.batch import Group
from rloo_cli.data.packing import MicroBatch
from rloo_cli.distributed.world import World
from rloo_cli.generation import Generator, ignore_arrival
from rloo_cli.utils.files import JsonObject


class Rank0Proxy:
    """`build` makes the real sampler, on rank 0 alone.

    `pieces`: all weights, whole, unit by unit; `policy` answers for all ranks together.
    """

    samples_on_rank0 = True

    def __init__(
        self,
        world: World,
        policy: Any,
        gather_weights: Callable[[], Any],
        build_generator: Callable[[], Generator],
    ):
        self.world, self.policy, self.gather_weights = world, policy, gather_weights
        self.inner: Any = None
        self.metrics: dict[str, float] = {}
        self.sending_iterator: Any = None  # weights that are being sent

        def make() -> float:
            self.inner = build_generator()
            return self.inner.tolerance

        self.tolerance = world.run_on_rank0(make)

    def load(self, policy: Any, version: int) -> None:
        """Rank 0 sends the weights of optimizer update `version`; all gather them."""
        self._run_on_rank0(lambda inner: inner.load(_Rank0Policy(self), version))

    def generate(
        self,
        groups: list[Group],
        seeds: list[list[int]],
        greedy: bool = False,
        temperature: float | None = None,
        arrived: Callable[[int], None] = ignore_arrival,
    ) -> None:
        """Fill every group's rollouts, on every rank. All ranks give the same groups."""

        def heard(place: int) -> None:
            """Rank 0: a group is whole. The others have it now, so that all can score it while the
            rest is being drawn."""
            self.world.broadcast_from_rank0(("group", (place, groups[place].rollouts)))
            arrived(place)

        def given(place: int, rollouts: Any) -> None:
            groups[place].rollouts = rollouts
            arrived(place)

        self._run_on_rank0(
            lambda inner: inner.generate(groups, seeds, greedy, temperature, heard), given
        )

    def close(self) -> None:
        """Let go of the sampler."""
        if self.inner is not None:
            self.inner.close()

    def _run_on_rank0(
        self, work: Callable[[Generator], Any], on_group: Callable[[int, Any], None] | None = None
    ) -> Any:
        """Rank 0 works; the others do what it asks until it is done. `given`: what they do with
        the completions of a group."""

        def lead() -> Any:
            try:
                return work(self.inner), dict(self.inner.metrics), self.inner.tolerance
            finally:
                self._exhaust_sending()
                self.world.broadcast_from_rank0(("done", None))

        if not self.world.is_main:
            self._follow_rank0(on_group)
        found, self.metrics, self.tolerance = self.world.run_on_rank0(lead)
        return found

    def _follow_rank0(self, on_group: Callable[[int, Any], None] | None) -> None:
        """What rank 0 says, until it is done: gather weights, compute log-probabilities of these
        groups, take the completions of this group."""
        name, said = self.world.broadcast_from_rank0(None)
        while name != "done":
            if name == "weights":
                for _ in self.gather_weights():
                    pass
            elif name == "group":
                assert on_group is not None
                on_group(*said)
            else:
                groups, parts = said
                self.policy.frozen_logp(self.policy.pack(groups, parts))
            name, said = self.world.broadcast_from_rank0(None)

    def gathered_weights(self) -> Iterator[JsonObject]:
        """Rank 0: all weights, gathered by all ranks, unit by unit."""
        self._exhaust_sending()
        self.world.broadcast_from_rank0(("weights", None))
        self.sending_iterator = _LockedIterator(self.gather_weights())
        return self.sending_iterator

    def _exhaust_sending(self) -> None:
        """Of a send that failed the other ranks gather the rest all the same."""
        if self.sending_iterator is not None:
            self.sending_iterator.exhaust()
            self.sending_iterator = None

    def frozen_logp(self, groups: list[Group], group_slices: Any) -> Any:
        """Rank 0: log-probabilities by all ranks. A layer that is still gathered here, the last one
        that was sent, would be gathered by the others alone."""
        self._exhaust_sending()
        self.world.broadcast_from_rank0(("logp", (groups, group_slices)))
        return self.policy.frozen_logp(self.policy.pack(groups, group_slices))


class _LockedIterator:
    """An iterator that a thread may be stuck beside while another one reads it to its end."""

    def __init__(self, iterator: Iterator[JsonObject]):
        self.iterator, self.lock = iter(iterator), Lock()

    def __iter__(self) -> "_LockedIterator":
        return self

    def __next__(self) -> JsonObject:
        with self.lock:
            return next(self.iterator)

    def exhaust(self) -> None:
        """Read what is left."""
        with self.lock:
            for _ in self.iterator:
                pass


class _Rank0Policy:
    """The policy as rank 0's sampler sees it: what it asks, all ranks do."""

    def __init__(self, proxy: Rank0Proxy):
        self.proxy, self.model, self.dtype = proxy, proxy.policy.model, proxy.policy.dtype

    def pack(self, groups: list[Group], group_slices: Any) -> MicroBatch:
        """Laid out; remembers of what."""
        micro: MicroBatch = self.proxy.policy.pack(groups, group_slices)
        self.last_packed = groups, group_slices
        return micro

    def frozen_logp(self, micro_batch: MicroBatch) -> Any:
        """Of what was packed last."""
        return self.proxy.frozen_logp(*self.last_packed)

    def gather_weights(self) -> Iterator[JsonObject]:
        """All weights, whole, unit by unit."""
        return self.proxy.gathered_weights()
