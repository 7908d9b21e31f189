"""Draws the next step's batch in a thread while the current one is trained on (overlap: ahead).

Both sides finish before the optimizer step: the thread never sees weights change, a failure or a
stop finds complete state, and which weights sampled a token does not depend on timing. The batch
is the one that `Rollouts` would have drawn at the same point (docs/generation.md).
"""

import time
from dataclasses import replace
from threading import Thread

import torch

from rloo_cli.data.batch import Batch
from rloo_cli.data.packing import whole_group_slices
from rloo_cli.generation.common.batch_source import AsyncSampler, SourceState, overlap_metrics
from rloo_cli.generation.common.rollouts import Rollouts
from rloo_cli.generation.common.weights_check import TokenLogprobs, check_same_weights
from rloo_cli.generation.vllm.engine import EngineLost
from rloo_cli.policy.model import Policy
from rloo_cli.rewards.engine.arguments import TrainerState
from rloo_cli.utils.rng import RandomStates, capture_random_states
from rloo_cli.utils.timers import StepTimer

ABANDON_S = 30.0  # how long to wait for an abandoned thread


class AheadSampler(AsyncSampler):
    """One batch ahead of the training. `rollouts`: the run's own."""

    has_one_lag = True

    def __init__(self, rollouts: Rollouts):
        super().__init__(rollouts.clock, max_lag=1)
        self.rollouts = rollouts
        self.in_thread = replace(rollouts, clock=StepTimer())
        self.batch: Batch | None = None  # drawn, and not trained on yet
        self.hidden_s = 0.0  # seconds overlapped with training since `step_metrics`
        self._arguments: tuple[int, int, TrainerState] | None = None  # of the batch that is drawn
        self._rng: RandomStates | None = None
        self._started = self._ended = 0.0

    def next_batch(self, step: int, prompt_offset: int, state: TrainerState) -> Batch:
        """`Rollouts.next_batch`: the batch that was drawn ahead, or a new one."""
        batch, self.batch = self.batch, None
        return batch or self.rollouts.next_batch(step, prompt_offset, state)

    def begin_next(self, step: int, prompt_offset: int, state: TrainerState) -> None:
        """Begin to draw the batch of step `step`, as `Rollouts.next_batch` does."""
        assert self._thread is None, "a batch is being drawn"
        if self.batch is not None:  # a run stopped after the update already had it
            return
        self._arguments, self._error = (step, prompt_offset, state), None
        self._rng = capture_random_states()  # rewards may draw from the global generators
        self._started = time.perf_counter()
        self._thread = Thread(target=self._draw, name="ahead", daemon=True)
        self._thread.start()

    def _draw(self) -> None:
        assert self._arguments is not None
        try:
            with self.rollouts.generator.without_recovery():
                self.batch = self.in_thread.next_batch(*self._arguments)
        except BaseException as error:
            self._error = error
        finally:
            self._ended = time.perf_counter()
            self.in_thread.clock.lap()

    def wait(self) -> None:
        """Wait until the batch that was begun is complete; does nothing if none was.

        Raises what its drawing raised. A lost engine gets its weights from this thread; the batch
        is drawn again: the same tokens, since weights and seeds are the same.
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

    @torch.no_grad()
    def check_weights(self, policy: Policy) -> None:
        """Check that the batch was sampled with the current weights; one group is forwarded for it.

        It is the one with the fewest tokens. Raises GenerationError (exit 6).
        """
        groups = [] if self.batch is None else self.batch.groups
        lengths = {i: sum(r.length for r in g.rollouts) for i, g in enumerate(groups)}
        if self.batch is None or not any(lengths.values()):
            return
        shortest = min((i for i in lengths if lengths[i]), key=lambda i: lengths[i])
        group = groups[shortest]
        micro_batch = policy.pack(groups, whole_group_slices(groups, [shortest]))
        own = policy.frozen_logp(micro_batch).logp.split([r.length for r in group.rollouts])
        compared = [
            TokenLogprobs(group.prompt_offset, k, logp, rollout)
            for k, (logp, rollout) in enumerate(zip(own, group.rollouts, strict=True))
        ]
        generation, tolerance = self.rollouts.config.generation, self.rollouts.generator.tolerance
        check_same_weights(self.batch.step, compared, generation, tolerance)

    def give_up(self) -> RandomStates | None:
        """Discard the batch drawn for an update that will not happen. -> the earlier random states

        A resumed run draws it again, with the same weights.
        """
        if self._thread is not None:
            self._thread.join(ABANDON_S)
        self._thread, self._error, self.batch = None, None, None
        return self._rng

    def state(self) -> SourceState:
        return SourceState(self.batch)

    def restore(self, state: SourceState, step: int) -> None:
        super().restore(state, step)
        self.batch = state.batch

    def step_metrics(self, step_time: float, exposed_s: float) -> dict[str, float]:
        """`overlap/*` of a step that took `step_time` and waited `exposed_s`, in seconds."""
        hidden, self.hidden_s = self.hidden_s, 0.0
        return overlap_metrics(step_time, exposed_s, hidden)
