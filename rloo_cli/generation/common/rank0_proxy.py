"""A sampler that only rank 0 talks to: one server, many trainers.

Rank 0 decides everything: when weights are sent, how often a lost server is retried, which
completions are sampled again. The others follow: they gather weights when rank 0 asks, compute
log-probabilities when rank 0 compares them, and receive the completions, or the error.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import TYPE_CHECKING, cast

from torch import Tensor

from rloo_cli.data.batch import Group, Rollout
from rloo_cli.data.packing import GroupSlice, MicroBatch
from rloo_cli.distributed.world import World
from rloo_cli.generation import Generator, GeneratorBase, ignore_arrival

if TYPE_CHECKING:
    from rloo_cli.policy.model import LogProbs, Policy

WeightIterator = Iterator[dict[str, Tensor]]  # all weights, whole, unit by unit


class Rank0Proxy(GeneratorBase):
    """The sampler of every rank: `build_generator` makes the real one, on rank 0 only."""

    samples_on_rank0 = True

    def __init__(
        self,
        world: World,
        policy: "Policy",  # all ranks use it together
        gather_weights: Callable[[], WeightIterator],  # all ranks call it together
        build_generator: Callable[[], Generator],
    ):
        self.world, self.policy, self.gather_weights = world, policy, gather_weights
        self.inner: Generator | None = None
        self.metrics: dict[str, float] = {}
        self.sending_iterator: _LockedIterator | None = None  # weights that are being sent

        def make() -> float:
            self.inner = build_generator()
            return self.inner.tolerance

        self.tolerance = world.run_on_rank0(make)

    def load(self, policy: "Policy", version: int) -> None:
        """Rank 0 sends the weights of optimizer update `version`; all ranks gather them."""
        self._run_on_rank0(lambda inner: inner.load(cast("Policy", _Rank0Policy(self)), version))

    def generate(
        self,
        groups: list[Group],
        seeds: list[list[int]],
        greedy: bool = False,
        temperature: float | None = None,
        arrived: Callable[[int], None] = ignore_arrival,
    ) -> None:
        """Fill every group's rollouts, on every rank. All ranks pass the same groups."""

        def send_group(index: int) -> None:
            """Rank 0: send a complete group, so that all ranks can score it during sampling."""
            self.world.broadcast_from_rank0(("group", (index, groups[index].rollouts)))
            arrived(index)

        def receive_group(index: int, rollouts: list[Rollout]) -> None:
            groups[index].take_rollouts(rollouts)
            arrived(index)

        arguments = (groups, seeds, greedy, temperature, send_group)
        self._run_on_rank0(lambda inner: inner.generate(*arguments), receive_group)

    def close(self) -> None:
        """Close the sampler."""
        if self.inner is not None:
            self.inner.close()

    def stay_awake(self) -> AbstractContextManager[None]:
        return nullcontext() if self.inner is None else self.inner.stay_awake()

    def without_recovery(self) -> AbstractContextManager[None]:
        return nullcontext() if self.inner is None else self.inner.without_recovery()

    def _run_on_rank0(
        self, work: Callable[[Generator], None], on_group: Callable[..., None] | None = None
    ) -> None:
        """Rank 0 works; the others serve it until it is done, and call `on_group` with the index
        and the completions of a group."""

        def lead() -> tuple[dict[str, float], float]:
            try:
                assert self.inner is not None
                work(self.inner)
                return dict(self.inner.metrics), self.inner.tolerance
            finally:
                self._exhaust_sending()
                self.world.broadcast_from_rank0(("done", None))

        if not self.world.is_main:
            self._follow_rank0(on_group)
        self.metrics, self.tolerance = self.world.run_on_rank0(lead)

    def _follow_rank0(self, on_group: Callable[..., None] | None) -> None:
        """Serve rank 0 until it is done: gather weights, compute log-probabilities of
        groups, receive the completions of a group."""
        name, arguments = self.world.broadcast_from_rank0(None)
        while name != "done":
            if name == "weights":
                for _ in self.gather_weights():
                    pass
            elif name == "group":
                assert on_group is not None
                on_group(*arguments)
            else:
                self.policy.frozen_logp(self.policy.pack(*arguments))
            name, arguments = self.world.broadcast_from_rank0(None)

    def gathered_weights(self) -> WeightIterator:
        """Rank 0: all weights, gathered by all ranks, unit by unit."""
        self._exhaust_sending()
        self.world.broadcast_from_rank0(("weights", None))
        self.sending_iterator = _LockedIterator(self.gather_weights())
        return self.sending_iterator

    def _exhaust_sending(self) -> None:
        """Gather the rest of a send that failed: the other ranks gather it in any case."""
        if self.sending_iterator is not None:
            self.sending_iterator.exhaust()
            self.sending_iterator = None

    def frozen_logp(self, groups: list[Group], group_slices: list[GroupSlice]) -> "LogProbs":
        """Rank 0: log-probabilities that all ranks compute together."""
        # The last layer that was sent may still be gathered here; the others would wait for it.
        self._exhaust_sending()
        self.world.broadcast_from_rank0(("logp", (groups, group_slices)))
        return self.policy.frozen_logp(self.policy.pack(groups, group_slices))


class _LockedIterator:
    """An iterator that one thread can read to its end while another one hangs in its loop."""

    def __init__(self, iterator: WeightIterator):
        self.iterator, self.lock = iter(iterator), Lock()

    def __iter__(self) -> "_LockedIterator":
        return self

    def __next__(self) -> dict[str, Tensor]:
        with self.lock:
            return next(self.iterator)

    def exhaust(self) -> None:
        """Read the rest."""
        with self.lock:
            for _ in self.iterator:
                pass


class _Rank0Policy:
    """The policy of rank 0's sampler, whose calls all ranks follow."""

    def __init__(self, proxy: Rank0Proxy):
        self.proxy, self.model, self.dtype = proxy, proxy.policy.model, proxy.policy.dtype

    def pack(self, groups: list[Group], group_slices: list[GroupSlice]) -> MicroBatch:
        """`Policy.pack`; it keeps its arguments for `frozen_logp`."""
        self.last_packed = groups, group_slices
        return self.proxy.policy.pack(groups, group_slices)

    def frozen_logp(self, micro_batch: MicroBatch) -> "LogProbs":
        """`Policy.frozen_logp` of the micro-batch that was packed last."""
        return self.proxy.frozen_logp(*self.last_packed)

    def gather_weights(self) -> WeightIterator:
        """All weights, whole, unit by unit."""
        return self.proxy.gathered_weights()
