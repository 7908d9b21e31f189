"""Keeps sampling while training continues, and carries unfinished completions over to the next
weights (overlap: carry).

A thread keeps as many groups unfinished as `pacing` allows. It is interrupted before an optimizer
step and restarted when the next batch is requested, with the tokens that each completion has:
prompt and tokens are read again with the new weights, so that the log-probability of every token
is of one version, given everything before it, and can be checked and recomputed. Nothing runs
between steps: evaluation, checkpoints and a stop find all groups at rest.

Groups are scored when a step takes them, all groups of a step together: rewards of scope `batch`,
their failure limits and what they see of the training belong to the step that trains on them, as
in `rloo replay`.
"""

import time
from threading import Condition, Event, Thread

import torch

from rloo_cli.data.batch import Batch, Group
from rloo_cli.data.packing import whole_group_slices
from rloo_cli.generation import CarryingGenerator
from rloo_cli.generation.common import open_groups, pacing
from rloo_cli.generation.common.batch_source import AsyncSampler, SourceState, overlap_metrics
from rloo_cli.generation.common.open_groups import OpenCompletion, OpenGroup
from rloo_cli.generation.common.rollouts import Rollouts
from rloo_cli.generation.common.weights_check import TokenLogprobs, check_same_weights
from rloo_cli.generation.vllm.engine import EngineLost
from rloo_cli.policy.model import Policy
from rloo_cli.rewards.engine.arguments import TrainerState
from rloo_cli.utils import signals
from rloo_cli.utils.errors import refuse
from rloo_cli.utils.rng import RandomStates

POLL_S = 0.05  # between two looks at the signals
WAITED_S = 0.1  # seconds: a shorter wait for a step's groups does not count
CHECKED_TOKENS = 16  # of the current weights; enough for a comparison
CARRY_NOTE = (
    "generation.overlap=carry: which weights sample a token depends on timing; another run of"
    " this config draws other completions; rloo replay reproduces each recorded step"
)


class CarrySampler(AsyncSampler):
    """Unfinished groups that span several steps. `rollouts`: the run's own."""

    def __init__(self, rollouts: Rollouts, generator: CarryingGenerator, num_steps: int):
        super().__init__(rollouts.clock, rollouts.config.generation.max_lag)
        self.rollouts, self.generator, self.num_steps = rollouts, generator, num_steps
        self.groups: list[OpenGroup] = []  # started and not taken, by prompt offset
        self.next_offset: int | None = None  # of the next prompt to start; None = unknown yet
        self.step = 0  # the number of optimizer steps that the sampler's weights have
        self.claimed = 0  # groups taken by steps, without replaced ones
        self.depth = 2  # steps' worth of groups in flight; one more each time a step waits
        self.paced_s = self.busy_s = 0.0  # seconds since `step_metrics`
        self.lost_engines = 0
        self._changed = Condition()  # guards all of this
        self._interrupted = Event()
        self._stopping = False

    @property
    def per_step(self) -> int:
        """Groups per step."""
        return self.rollouts.config.train.prompts_per_step

    def next_batch(self, step: int, prompt_offset: int, state: TrainerState) -> Batch:
        """The batch of step `step`: the oldest groups, as soon as they have finished.

        `prompt_offset`: prompts that steps have taken so far. Raises as `Rollouts.next_batch`, and
        then keeps the groups.
        """
        self._begin(step, step * self.per_step, prompt_offset)
        taken: list[OpenGroup] = []

        def take_groups(count: int) -> list[Group]:
            found = self._take_groups(count)
            taken.extend(found)
            return [self._filled_group(group) for group in found]

        try:
            batch = self.rollouts.carried_batch(step, take_groups, state)
        except BaseException:
            self._pause()
            self.groups = sorted(self.groups + taken, key=lambda g: g.group.prompt_offset)
            self.claimed = step * self.per_step
            raise
        kept = {group.prompt_offset for group in batch.groups}
        offsets = sorted(group.group.prompt_offset for group in taken)
        batch.left_out = [offset for offset in offsets if offset not in kept]
        with self._changed:
            batch.pending = [group.group.prompt_offset for group in self.groups]
            decided = prompt_offset + batch.draws
            assert self.next_offset == decided + len(batch.pending), "a prompt was lost"
        return batch

    def begin_next(self, step: int, prompt_offset: int, state: TrainerState) -> None:
        """Sampling already continues during the update; only a resumed step has to start it."""
        if self._thread is None:
            self._begin(step - 1, step * self.per_step, prompt_offset)

    def wait(self) -> None:
        """Interrupt the sampler. Raises what its thread raised."""
        self._pause()
        error, self._error = self._error, None
        if isinstance(error, EngineLost):
            self._give_up_engine(error)
        elif error is not None:
            raise error

    def give_up(self) -> RandomStates | None:
        """Interrupt the sampler before a checkpoint; its groups are kept."""
        self._pause()
        self._error = None
        return None

    def close(self) -> None:
        """Interrupt the sampler, which would otherwise run until the process ends."""
        self.give_up()

    def state(self) -> SourceState:
        """The unfinished groups; nothing may be running."""
        if self.next_offset is None:  # none was started
            return SourceState()
        tensors, plain = open_groups.dump_groups(self.groups)
        return SourceState(None, tensors, plain | {"next_offset": self.next_offset})

    def restore(self, state: SourceState, step: int) -> None:
        """Continue with the groups of `state`; `step` takes the next of them.

        Raises ConfigError if another number of prompts per step cannot keep their deadlines.
        """
        if state.groups is None:
            return
        prompts = self.rollouts.prompts
        self.groups = open_groups.load_groups(state.group_tensors, state.groups, prompts)
        self.next_offset = state.groups["next_offset"]
        if not pacing.keeps_deadlines([g.deadline for g in self.groups], step, self.per_step):
            what = "the unfinished groups cannot all be trained on in time"
            why = f"{len(self.groups)} were started with another train.prompts_per_step;"
            why += f" {self.per_step} a step would exceed generation.max_lag"
            fix = "the earlier train.prompts_per_step"
            refuse("train.prompts_per_step", what, fix, why)

    def _begin(self, step: int, claimed: int, prompt_offset: int) -> None:
        """Let the thread sample with the weights of `step`."""
        assert self._thread is None, "it samples already"
        self.step, self.claimed, self._stopping = step, claimed, False
        if self.next_offset is None:
            self.next_offset = prompt_offset
        self.fill_up()
        self._start_thread()

    def _start_thread(self) -> None:
        """Start sampling, with an engine that has the weights."""
        unfinished = [group.group for group in self.groups if group.unfinished]
        while unfinished:
            try:
                self.generator.make_ready(unfinished)
                break
            except EngineLost as lost:
                self._give_up_engine(lost)
        self._interrupted.clear()
        self._error, self._stopping = None, False
        self._thread = Thread(target=self._sample, name="carry", daemon=True)
        self._thread.start()

    def _give_up_engine(self, error: EngineLost) -> None:
        self.lost_engines += 1
        self.generator.handle_engine_loss(error)

    def fill_up(self) -> None:
        """Start as many groups as may be in flight.

        That is two steps' worth, plus one step's each time a step had to wait, up to what `max_lag`
        allows: more would only grow old.
        """
        assert self.next_offset is not None, "the offset of the next prompt is unknown"
        most = pacing.group_capacity(self.step, self.max_lag, self.per_step, self.num_steps)
        room = min(most - self.claimed, self.depth * self.per_step)
        count = max(0, room - len(self.groups))
        for group in self.rollouts.prompts.groups_at(self.next_offset, count):
            seeds = self.rollouts.offset_seeds(group.prompt_offset)
            completions = [OpenCompletion(seed) for seed in seeds]
            self.groups.append(OpenGroup(group, completions, self.step + self.max_lag))
        self.next_offset += count

    def _sample(self) -> None:
        """The thread's work: continue unfinished completions until it is stopped."""
        try:
            while (groups := self._wait_for_work()) is not None:
                began = time.perf_counter()
                try:
                    self.generator.extend(groups, self._report_group, self._interrupted)
                finally:
                    self.busy_s += time.perf_counter() - began
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._changed.notify_all()

    def _wait_for_work(self) -> list[OpenGroup] | None:
        """Groups with unfinished completions, oldest first, once there are some; None = stop."""
        with self._changed:
            while not self._stopping:
                self._interrupted.clear()
                if groups := [group for group in self.groups if group.unfinished]:
                    return groups
                self._changed.wait()
            return None

    def _report_group(self, group: OpenGroup) -> None:
        with self._changed:
            self._changed.notify_all()

    def _pause(self) -> None:
        """Interrupt the thread and wait for its end; what was sampled is in the groups."""
        with self._changed:
            self._stopping = True
            self._interrupted.set()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _take_groups(self, count: int) -> list[OpenGroup]:
        """Wait until the `count` oldest groups have finished, and take them."""
        began, paced_since = time.perf_counter(), 0.0
        with self.rollouts.clock.phase("exposed"), self._changed:
            self.claimed = (self.step + 1) * self.per_step - count
            self._replace_dropped()
            while (found := self._choose(count)) is None:
                signals.raise_if_stopped()
                if self._error is not None:
                    self._recover()
                if not paced_since and sum(not g.unfinished for g in self.groups) >= count:
                    paced_since = time.perf_counter()
                self._changed.wait(POLL_S)
            self.claimed += count
            del self.groups[:count]
        if self.step > 0:  # the first step has to wait
            self.depth += time.perf_counter() - began > WAITED_S
        self.paced_s += time.perf_counter() - paced_since if paced_since else 0.0
        return found

    def _choose(self, count: int) -> list[OpenGroup] | None:
        oldest = self.groups[:count]
        ready = len(oldest) == count and not any(group.unfinished for group in oldest)
        return oldest if ready else None

    def _replace_dropped(self) -> None:
        """Start groups in place of those that resampling left out; the thread samples them."""
        before = self.next_offset
        self.fill_up()
        if self.next_offset != before:
            self._interrupted.set()
            self._changed.notify_all()

    def _recover(self) -> None:
        """Continue after a lost engine, with the weights of the trainer; runs on its thread."""
        error, self._error = self._error, None
        assert error is not None and self._thread is not None, "the thread has failed"
        if not isinstance(error, EngineLost):
            raise error
        self._changed.release()  # the thread needs it to end
        try:
            self._thread.join()
        finally:
            self._changed.acquire()
        self._give_up_engine(error)
        self._start_thread()

    def _filled_group(self, group: OpenGroup) -> Group:
        rule = self.generator.stop_rule
        group.group.rollouts = [c.to_rollout(rule) for c in group.completions]
        return group.group

    @torch.no_grad()
    def check_weights(self, policy: Policy) -> None:
        """Check that the newest samples come from the current weights; one group is forwarded.

        Only tokens of the current weights are compared. Raises GenerationError (exit 6).
        """
        version, rollouts = self.generator.version, self.rollouts
        counts = [sum(c.count_tokens(version) for c in g.completions) for g in self.groups]
        if not any(counts):
            return
        lengths = [sum(len(c.ids) for c in g.completions) for g in self.groups]
        chosen = max(
            range(len(counts)), key=lambda i: (min(counts[i], CHECKED_TOKENS), -lengths[i])
        )
        open_group = self.groups[chosen]
        compared = [c for c in open_group.completions if c.count_tokens(version)]
        rule, group = self.generator.stop_rule, open_group.group
        sampled = [c.to_rollout(rule) for c in compared]
        alone = [Group(group.prompt_offset, group.example, group.prompt, group.prompt_ids, sampled)]
        micro_batch = policy.pack(alone, whole_group_slices(alone, [0]))
        own = policy.frozen_logp(micro_batch).logp.split([len(c.ids) for c in compared])
        pairs = [
            TokenLogprobs(
                group.prompt_offset, open_group.completions.index(c),
                logp[len(logp) - c.count_tokens(version) :], rollout,
            )
            for c, logp, rollout in zip(compared, own, sampled, strict=True)
        ]  # fmt: skip
        check_same_weights(self.step, pairs, rollouts.config.generation, self.generator.tolerance)

    def step_metrics(self, step_time: float, exposed_s: float) -> dict[str, float]:
        """`overlap/*` of a step that took `step_time` and waited `exposed_s`, in seconds."""
        busy, paced, self.busy_s, self.paced_s = self.busy_s, self.paced_s, 0.0, 0.0
        return overlap_metrics(step_time, exposed_s, max(0.0, busy - exposed_s), paced_s=paced)
