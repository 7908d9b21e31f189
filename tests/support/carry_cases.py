"""A sampler with a clock of its own for overlap=carry, and runs in which completions are cut."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from loop_cases import ENDS, alone

from rloo_cli.data.batch import Batch, Group
from rloo_cli.generation.common import carry
from rloo_cli.generation.common.carry import CarrySampler
from rloo_cli.generation.common.open_groups import OpenGroup
from rloo_cli.generation.hf.generator import TransformersGenerator
from rloo_cli.run import Run

CARRY = (
    "generation.overlap=carry", "train.learning_rate=0.01", ENDS,
    "generation.max_completion_length=48",
)  # fmt: skip
TOKENS_BESIDE = 5  # that are sampled beside an update, before it interrupts the sampler


class LockstepSampler:
    """Gives every unfinished completion a token a tick; `length(offset, k)` is known beforehand.

    A tick passes while `train` waits for it, or while the trainer waits for a batch. Each token's
    id and log-probability tell the version of the weights.
    """

    tolerance = 0.02

    def __init__(self, stop_rule: Any, length: Callable[[int, int], int]):
        self.stop_rule, self.length = stop_rule, length
        self.version = self.now = self.left = 0  # ticks so far; of the update that is made
        self.sampler: Any = None
        self.choose: Any = None  # its own methods
        self.take_groups: Any = None
        self.waits = False  # the trainer, for a batch
        self.metrics: dict[str, float] = {}

    def make_ready(self, groups: list[Group]) -> None: ...

    def handle_engine_loss(self, error: Exception) -> None:
        raise error

    def extend(
        self, groups: list[OpenGroup], ended: Callable[[OpenGroup], None], stop: threading.Event
    ) -> None:
        while (open_ones := [g for g in groups if g.unfinished]) and not stop.is_set():
            if not self._tick(stop):
                continue
            for group in open_ones:
                for k, completion in enumerate(group.completions):
                    if completion.finish_reason is None:
                        done = len(completion.ids) + 1
                        whole = done >= self.length(group.group.prompt_offset, k)
                        ids, logp = [20 + self.version], [-1.0 - self.version]
                        completion.add_tokens(ids, logp, self.version, "stop" if whole else None)
                if not group.unfinished:
                    ended(group)

    def _tick(self, stop: threading.Event) -> bool:
        """Wait for a tick; whether one has passed."""
        with self.sampler._changed:
            passes = self.waits and self.choose(self.sampler.per_step) is None
            if self.left:
                self.left, passes = self.left - 1, True
            self.now += passes
        if not passes:
            time.sleep(0.0005)
        return passes

    def take(self, count: int) -> Any:
        """`_take_groups`: time passes until the groups are there."""
        self.waits = True
        return self.take_groups(count)

    def choose_waiting(self, count: int) -> Any:
        """`_choose`, as the trainer calls it: it waits no longer, if there are enough."""
        found = self.choose(count)
        self.waits = self.waits and found is None
        return found

    def train(self, ticks: int) -> None:
        """An update that takes so long."""
        with self.sampler._changed:
            self.left = ticks
        while self.left:
            with self.sampler._changed:
                if not any(g.unfinished for g in self.sampler.groups):  # nobody to make it pass
                    self.now, self.left = self.now + self.left, 0
            time.sleep(0.0005)

    def drive(self, run: Run, updates: Callable[[int], int]) -> Iterator[Batch]:
        """The loop's order of calls, with updates of so many ticks. -> each step's batch"""
        seen, start = run.state.seen_by_rewards(run), 0
        try:
            with mock.patch.object(carry, "POLL_S", 0.001):
                for step in range(self.sampler.num_steps):
                    batch = self.sampler.next_batch(step, start, seen)
                    yield batch
                    self.train(updates(step))
                    self.sampler.wait()
                    self.version, start = self.version + 1, start + batch.draws
        finally:
            self.sampler.give_up()  # a test that fails leaves no thread behind


def lockstep(
    run: Run, num_steps: int, length: Callable[[int, int], int]
) -> tuple[LockstepSampler, CarrySampler]:
    """Both sides of a run whose completions have these lengths."""
    fake = LockstepSampler(run.generator.inner.stop_rule, length)  # type: ignore[attr-defined]
    fake.sampler = sampler = CarrySampler(run.rollouts, fake, num_steps)
    fake.choose, fake.take_groups = sampler._choose, sampler._take_groups
    sampler._choose, sampler._take_groups = fake.choose_waiting, fake.take  # type: ignore[method-assign]
    return fake, sampler


def carrying(folder: Path, *words: str, **options: Any) -> Run:
    """A run with overlap=carry that samples with a copy of the weights."""
    return alone(folder, *CARRY, *words, **options)


@contextmanager
def cutting(tokens: int = TOKENS_BESIDE) -> Iterator[None]:
    """Let the sampler draw `tokens` tokens beside an update, and then wait to be interrupted.

    While the trainer waits for a batch it goes on. So completions are cut, on a machine however
    fast.
    """
    waiting, take, record = [False], CarrySampler._take_groups, TransformersGenerator._record
    beside = [0]

    def taking(self: CarrySampler, count: int) -> Any:
        waiting[0] = True
        try:
            return take(self, count)
        finally:
            waiting[0], beside[0] = False, 0

    def recording(self: TransformersGenerator, *arguments: Any) -> None:
        record(self, *arguments)
        carried = threading.current_thread().name == "carry"
        while carried and not waiting[0] and beside[0] >= tokens and not _is_stopping():
            threading.Event().wait(0.001)
        beside[0] += 1

    def _is_stopping() -> bool:
        return samplers[-1]._stopping or samplers[-1]._interrupted.is_set()

    samplers: list[CarrySampler] = []
    begin = CarrySampler._begin

    def beginning(self: CarrySampler, *arguments: Any) -> None:
        samplers[:] = [self]
        begin(self, *arguments)

    with (
        mock.patch.object(CarrySampler, "_take_groups", taking),
        mock.patch.object(CarrySampler, "_begin", beginning),
        mock.patch.object(TransformersGenerator, "_record", recording),
    ):
        yield
