"""Draws the next step's batch in a thread while the current one is trained on (overlap: ahead).

Both sides are complete before the optimizer step: the thread never sees weights change, a failure
or a stop finds the state whole, and which weights a token is of does not depend on any clock. What
is drawn is what `Rollouts` would have drawn at the same point (docs/overlap.md).
"""

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from threading import Thread
from typing import Any

from rloo_cli.data.batch import Batch
from rloo_cli.generation.common.rollouts import Rollouts
from rloo_cli.generation.vllm.engine import EngineLost
from rloo_cli.rewards.engine.arguments import TrainerState
from rloo_cli.utils.rng import RandomStates, capture_random_states
from rloo_cli.utils.timers import StepTimer

ABANDON_S = 30.0  # a thread that is not wanted any more is waited for this long


class AheadSampler:
    """One batch ahead of the training. `rollouts`: the run's own."""

    def __init__(self, rollouts: Rollouts):
        self.rollouts = replace(rollouts, clock=StepTimer())
        self.batch: Batch | None = None  # drawn, and not trained on yet
        self.hidden_s = 0.0  # seconds beside the training since `take_hidden_s`
        self._thread: Thread | None = None
        self._arguments: tuple[int, int, TrainerState] | None = None  # of the batch that is drawn
        self._error: BaseException | None = None
        self._rng: RandomStates | None = None
        self._started = self._ended = 0.0

    def take_batch(self) -> Batch | None:
        """The batch that was drawn ahead, which is then the caller's; None where there is none."""
        batch, self.batch = self.batch, None
        return batch

    def start(self, step: int, prompt_offset: int, state: TrainerState) -> None:
        """Begin to draw the batch of step `step`, as `Rollouts.next_batch` does."""
        assert self._thread is None and self.batch is None, "a batch is drawn already"
        self._arguments, self._error = (step, prompt_offset, state), None
        self._rng = capture_random_states()  # rewards may draw from the global generators
        self._started = time.perf_counter()
        self._thread = Thread(target=self._draw, name="ahead", daemon=True)
        self._thread.start()

    def _draw(self) -> None:
        assert self._arguments is not None
        sampler: Any = getattr(self.rollouts.generator, "inner", self.rollouts.generator)
        in_thread: AbstractContextManager[None] = getattr(
            sampler, "without_recovery", nullcontext
        )()
        try:
            with in_thread:
                self.batch = self.rollouts.next_batch(*self._arguments)
        except BaseException as error:
            self._error = error
        finally:
            self._ended = time.perf_counter()
            self.rollouts.clock.lap()

    def wait(self) -> None:
        """Wait until the batch that was begun is whole; nothing where none was.

        Raises what its drawing raised. A lost engine gets its weights from this thread, and the
        batch is drawn anew: the same tokens, since weights and seeds are the same.
        """
        if self._thread is None:
            return
        began = time.perf_counter()
        self._thread.join()
        self._thread = None
        self.hidden_s += max(0.0, min(self._ended, began) - self._started)
        error, self._error = self._error, None
        if error is not None and isinstance(error.__cause__, EngineLost):
            assert self._arguments is not None
            self.batch, error = self.rollouts.next_batch(*self._arguments), None
        if error is not None:
            raise error

    def abandon(self) -> RandomStates | None:
        """Give up what was drawn beside an update that is not made. -> the random states before it

        A resumed run draws it again, with the same weights.
        """
        if self._thread is not None:
            self._thread.join(ABANDON_S)
        self._thread, self._error, self.batch = None, None, None
        return self._rng

    def take_hidden_s(self) -> float:
        """Seconds of sampling and scoring beside the training since the last call."""
        hidden, self.hidden_s = self.hidden_s, 0.0
        return hidden
