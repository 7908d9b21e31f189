"""Samples a step's completions in a thread while its first groups are trained on (overlap=stream).

The thread draws the batch as `Rollouts.next_batch` does, with the weights that the training
forwards: they change after the step's last group. The trainer's thread takes groups in virtual time
(data/virtual_time.py), each as soon as its place in that order is final and its scores are known.
Which groups share a micro-batch is then a function of the batch alone, and so are all bits; when
the batch is whole, every row that was trained on is compared with it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from threading import Condition, Thread
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from rloo_cli.data.batch import Batch, Group
from rloo_cli.data.virtual_time import longest_completion, released_groups
from rloo_cli.generation.common.rollouts import Rollouts
from rloo_cli.generation.vllm.engine import EngineLost
from rloo_cli.rewards.engine.arguments import TrainerState
from rloo_cli.rewards.engine.scoring import ScoringStep
from rloo_cli.utils.errors import NumbersError, Problem
from rloo_cli.utils.rng import capture_random_states, restore_random_states
from rloo_cli.utils.timers import StepTimer

T = TypeVar("T")
ABANDON_S = 30.0  # a thread that is not wanted any more is waited for this long
LOOK_S = 0.02  # a wait looks at lengths and signals this often
# Tensors of a batch whose rows are used before it is whole.
USED_COLUMNS = ("raw", "score", "shaped", "scorable", "masked", "plain")


class StreamCut(Exception):
    """The update so far is void: it begins anew on the batch, which is whole now."""


class StreamSampler:
    """The step's batch while it is sampled. `rollouts`: the run's own; `clock`: the trainer's.

    `make_plan`: makes the plan of an update on a batch that is not whole (train/streaming.py).
    """

    def __init__(self, rollouts: Rollouts, clock: StepTimer, make_plan: Callable[..., Any]):
        self.rollouts, self.clock, self.make_plan = rollouts, clock, make_plan
        self.in_thread = replace(rollouts, clock=StepTimer(), watcher=self)
        self.is_open = False  # a batch was begun, and is not known to be whole
        self.sampled_s, self.num_cuts = 0.0, 0  # since `step_metrics`
        self.used: dict[int, dict[str, Tensor]] = {}  # of groups that were taken: their rows
        self._changed = Condition()
        self._groups: list[Group] = []
        self._scoring: ScoringStep | None = None
        self._at_least: list[int] = []  # tokens of each completion, group after group
        self._arguments: tuple[int, int, TrainerState] | None = None
        self._batch: Batch | None = None  # what the thread returned
        self._error: BaseException | None = None
        self._rng_before = self.rng_after = capture_random_states()  # rng_after: all is scored
        self._thread: Thread | None = None

    def next_batch(self, step: int, prompt_offset: int, state: TrainerState) -> Batch:
        """Begin to draw the batch of step `step`. -> the batch with what is known of it: its groups

        It becomes what `Rollouts.next_batch` returns while an update takes `iter_groups`. Raises
        what the drawing raises before it has prompts.
        """
        assert self._thread is None, "a batch is being drawn already"
        self._arguments, self._batch, self._error = (step, prompt_offset, state), None, None
        self._groups, self._scoring, self.used = [], None, {}
        self.is_open = True
        self._rng_before = capture_random_states()  # rewards may draw from the global generators
        self._thread = Thread(target=self._draw, name="stream", daemon=True)
        self._thread.start()
        with self.clock.phase("exposed"), self._changed:
            self._changed.wait_for(lambda: self._scoring is not None or self._error is not None)
        if self._scoring is None and self._error is not None:
            self._join()
            raise self._error
        batch = self.rollouts.provisional_batch(step, self._groups, self._blank_scores())
        batch.active = []
        return batch

    def _blank_scores(self) -> Tensor:
        """Scores of nothing. -> (F, P, K) NaN"""
        k = self.rollouts.config.algorithm.num_generations
        shape = len(self.rollouts.rewards), len(self._groups), k
        return torch.full(shape, float("nan"), dtype=torch.float64)

    # In the thread, and in those that score

    def _draw(self) -> None:
        assert self._arguments is not None
        began, batch, error = time.perf_counter(), None, None
        generator = self.rollouts.generator
        sampler: Any = getattr(generator, "inner", generator)
        try:
            with ExitStack() as stack:
                if hasattr(sampler, "without_recovery"):
                    stack.enter_context(sampler.without_recovery())
                if hasattr(sampler, "watch_lengths"):
                    stack.enter_context(sampler.watch_lengths(self._note_length))
                batch = self.in_thread.next_batch(*self._arguments)
        except BaseException as raised:
            error = raised
        self.in_thread.clock.lap()
        self.rng_after = capture_random_states()
        self.sampled_s += time.perf_counter() - began
        with self._changed:
            self._batch, self._error = batch, error
            self._changed.notify_all()

    def watch_round(self, groups: list[Group], scoring: ScoringStep) -> None:
        """Take the step's groups before they are sampled (`SamplingWatcher`)."""
        scoring.watch_progress(self._notify)
        with self._changed:
            self._groups = groups
            self._at_least = [1] * (len(groups) * self.rollouts.config.algorithm.num_generations)
            self._scoring = scoring
            self._changed.notify_all()

    def _note_length(self, number: int, at_least: int) -> None:
        self._at_least[number] = max(self._at_least[number], at_least)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # In the trainer's thread

    def iter_groups(self, batch: Batch, check_stop: Callable[[], object]) -> Iterator[int]:
        """The step's groups in virtual time, each once its rows of `batch` are known.

        `batch`: what `next_batch` returned. `check_stop` is called while there is nothing to do,
        and may raise. Raises what the drawing raised; StreamCut where the sampler was lost, and
        this thread has drawn the batch anew.
        """
        raw = self._blank_scores()
        for place in range(len(self._groups)):
            group_index = self._wait(check_stop, lambda n=place: self._scored_group(n, raw))  # type: ignore[misc]
            if group_index is None:
                self._recover(batch)
            step = batch.step
            vars(batch).update(vars(self.rollouts.provisional_batch(step, self._groups, raw)))
            self.used[group_index] = _batch_row(batch, group_index)
            yield group_index

    def complete(self, batch: Batch, check_stop: Callable[[], object]) -> None:
        """Wait for the whole batch, and make `batch` that. Raises as `iter_groups`.

        Raises NumbersError if a row that was trained on is another one now.
        """
        whole = self._wait(check_stop, lambda: self._batch)
        if whole is None:
            self._recover(batch)
        self._join()
        for group_index, row in self.used.items():
            now = _batch_row(whole, group_index)
            others = [name for name in row if not _has_same_bits(row[name], now[name])]
            if others:
                raise NumbersError(_moved_row_problem(whole, group_index, others))
        vars(batch).update(vars(whole))
        self.is_open = False

    def cut(self, batch: Batch, check_stop: Callable[[], object]) -> NoReturn:
        """Give up what was trained on so far: wait for the whole batch, and raise StreamCut."""
        self.num_cuts += 1
        self.complete(batch, check_stop)
        raise StreamCut

    def abandon(self, progress: Any) -> Any:
        """The step's `StepProgress` to save where a run stops; None where its batch is not whole.

        What was trained on is dropped. A resumed run trains on the batch that was kept, or samples
        the step again: with the same weights and seeds, and so with the same bits.
        """
        if not self.is_open:
            return progress
        self._join()
        whole, self.is_open = self._batch, False
        if whole is None or progress is None:
            return None
        vars(progress.batch).update(vars(whole))
        progress.updates.clear()
        progress.rng = self.rng_after
        return progress

    def step_metrics(self, step_time: float, exposed_s: float) -> dict[str, float]:
        """`overlap/*` of a step that took `step_time` and waited `exposed_s`, in seconds.

        What was exposed, hidden and idle is the step's time.
        """
        hidden = min(max(0.0, self.sampled_s - exposed_s), max(0.0, step_time - exposed_s))
        cuts, self.sampled_s, self.num_cuts = self.num_cuts, 0.0, 0
        return {
            "overlap/exposed_s": exposed_s,
            "overlap/hidden_s": hidden,
            "overlap/idle_s": max(0.0, step_time - exposed_s - hidden),
            "overlap/begun_anew": cuts,
        }

    def _wait(self, check_stop: Callable[[], object], look: Callable[[], T | None]) -> T | None:
        """Wait until `look` finds something; None if the drawing failed before."""
        with self.clock.phase("exposed"):
            while True:
                with self._changed:
                    if (found := look()) is not None or self._error is not None:
                        return found
                    self._changed.wait(LOOK_S)
                check_stop()

    def _scored_group(self, place: int, raw: Tensor) -> int | None:
        """The group at this place of virtual time, once it is scored; its scores go into `raw`.

        None as long as its place or its scores are not final.
        """
        scoring, k = self._scoring, raw.shape[2]
        assert scoring is not None
        finished = {*scoring.submitted}
        longest = [
            longest_completion(group) if i in finished else max(self._at_least[i * k : i * k + k])
            for i, group in enumerate(self._groups)
        ]
        released = released_groups(longest, [i in finished for i in range(len(longest))])
        if place >= len(released):
            return None
        group_index = released[place]
        rows = scoring.known_scores(group_index)
        if rows is None:
            return None
        scores = [[float("nan") if s is None else s for s in row] for row in rows]
        raw[:, group_index] = torch.tensor(scores, dtype=torch.float64)
        return group_index

    def _recover(self, batch: Batch) -> NoReturn:
        """Raise what the drawing raised; where the engine was lost, draw anew and raise StreamCut.

        The engine gets its weights from this thread: they are the same, and so are the tokens.
        """
        error = self._error
        assert error is not None and self._arguments is not None
        self._join()
        if not isinstance(error.__cause__, EngineLost):
            raise error
        self.num_cuts += 1
        restore_random_states(self._rng_before)
        vars(batch).update(vars(self.rollouts.next_batch(*self._arguments)))
        self.is_open = False
        raise StreamCut

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join(ABANDON_S)
        self._thread = None


def _batch_row(batch: Batch, group_index: int) -> dict[str, Tensor]:
    """What an update reads of one group, beside its rollouts."""
    columns = {n: getattr(batch, n) for n in USED_COLUMNS}
    row = {n: c.select(-2, group_index).clone() for n, c in columns.items() if c is not None}
    return row | {"active": torch.tensor(group_index in batch.active)}


def _has_same_bits(one: Tensor, other: Tensor) -> bool:
    return one.numpy().tobytes() == other.numpy().tobytes()


def _moved_row_problem(batch: Batch, group_index: int, names: list[str]) -> Problem:
    what = f"step {batch.step + 1}: group {group_index} has another {', '.join(names)} now than"
    what += " when it was trained on"
    why = "its scores depend on other groups of the step, which were still being sampled then"
    fix = "generation.overlap=none; and please report it, with the run's config.yaml"
    return Problem(what, "generation.overlap=stream", why, fix)
