"""Seconds of a step under each `generation.overlap`, simulated from the seconds of its parts.

The sampler decodes in lock step: each iteration adds one token to every active completion, and
takes `iteration_s` of their number. Trainer and sampler have separate hardware. Nothing is random:
equal inputs give equal times (docs/generation.md, When it pays).
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rloo_cli.generation.common.pacing import group_capacity

CARRY_STEPS, CARRY_WARMUP_STEPS = 16, 6  # of `carry`, whose first steps differ
STEP_OF_PERMUTATION = 7919  # a prime, to distribute the quantiles of lengths over groups
WORTH_IT = 1.1  # a smaller speedup is not worth being more off-policy
MODES = ("none", "ahead", "carry")


@dataclass(frozen=True)
class StepParts:
    """The parts of a step. All seconds are for a whole step, alone on its hardware."""

    lengths: Sequence[Sequence[int]]  # P of K, sampled tokens of each completion
    iteration_s: Callable[[int], float]  # of one decoding iteration with this many completions
    max_active: int  # completions decoded at once
    prefill_s: float = 0.0
    train_s: float = 0.0  # forward passes, backward passes and the optimizer
    reward_s: float = 0.0  # scoring on the trainer's hardware
    sync_s: float = 0.0  # sending weights; the sampler waits too


@dataclass
class LockStepSampler:
    """A sampler that decodes in lock step. Groups start in order, each as soon as there is room."""

    parts: StepParts
    now: float = 0.0  # seconds
    decoded: float = 0.0  # tokens of a completion that started at 0
    ends: list[tuple[float, int]] = field(default_factory=list)  # heap: `decoded` at the end, group
    unfinished: dict[int, int] = field(default_factory=dict)  # group -> completions left
    waiting: list[int] = field(default_factory=list)
    finished_at: dict[int, float] = field(default_factory=dict)  # group -> seconds

    def submit_groups(self, groups: range) -> None:
        """Queue these groups at the sampler."""
        self.waiting += groups

    def _begin_waiting(self) -> None:
        while self.waiting:
            lengths = self.parts.lengths[self.waiting[0] % len(self.parts.lengths)]
            if self.ends and len(self.ends) + len(lengths) > self.parts.max_active:
                return
            group = self.waiting.pop(0)
            self.now += self.parts.prefill_s / len(self.parts.lengths)
            self.unfinished[group] = len(lengths)
            for length in lengths:
                heapq.heappush(self.ends, (self.decoded + length, group))

    def decode(self, until: float = math.inf) -> bool:
        """Decode until the next completion ends, or `until`. -> whether anything was decoded"""
        self._begin_waiting()
        if not self.ends or self.now >= until:
            return False
        seconds = self.parts.iteration_s(len(self.ends))
        end, group = self.ends[0]
        if self.now + (end - self.decoded) * seconds > until:
            self.decoded += (until - self.now) / seconds
            self.now = until
            return True
        self.now += (end - self.decoded) * seconds
        self.decoded = end
        heapq.heappop(self.ends)
        self.unfinished[group] -= 1
        if not self.unfinished[group]:
            del self.unfinished[group]
            self.finished_at[group] = self.now
        return True


def simulate_overlap(parts: StepParts, max_lag: int = 2) -> dict[str, float]:
    """Seconds of a step under each mode, in a steady state."""
    sampler = LockStepSampler(parts)
    sampler.submit_groups(range(len(parts.lengths)))
    while sampler.decode():
        pass
    sampling_s, training_s = sampler.now, parts.train_s + parts.reward_s
    return {
        "none": sampling_s + training_s + parts.sync_s,
        "ahead": max(sampling_s, training_s) + parts.sync_s,
        "carry": _carry_seconds(parts, max_lag),
    }


def _carry_seconds(parts: StepParts, max_lag: int) -> float:
    """The mean of later steps, when the sampler has up to `max_lag` batches and never idles."""
    per_step, sampler, begun = len(parts.lengths), LockStepSampler(parts), 0
    ends: list[float] = []
    for step in range(CARRY_STEPS):
        most = group_capacity(step, max_lag, per_step, CARRY_STEPS + max_lag)
        sampler.submit_groups(range(begun, most))
        begun = most
        oldest = range(step * per_step, (step + 1) * per_step)
        while not sampler.finished_at.keys() >= {*oldest}:
            sampler.decode()
        trained = sampler.now + parts.train_s + parts.reward_s
        while sampler.decode(trained):
            pass
        sampler.now = max(sampler.now, trained) + parts.sync_s
        ends.append(sampler.now)
    counted = CARRY_STEPS - CARRY_WARMUP_STEPS
    return (ends[-1] - ends[CARRY_WARMUP_STEPS - 1]) / counted


def advised_mode(seconds: dict[str, float]) -> str:
    """The recommended mode: the most exact one within a tenth of the fastest.

    `seconds`: by mode, in the order of MODES, from most to least on-policy; with `turns`, trainer
    and sampler taking turns on the same hardware, if known.
    """
    least = WORTH_IT * min(seconds.values())
    exact_first = sorted(seconds, key=lambda mode: ("turns", *MODES).index(mode))
    return next(mode for mode in exact_first if seconds[mode] <= least)


def spread_lengths(prompts: int, completions: int, mean: float, limit: int) -> list[list[int]]:
    """Lengths of a step's completions with this mean: exponential, cut at `limit`. -> P of K

    They are the quantiles of that distribution, spread over the groups. Runs of reasoning models
    have such tails; a mean near the limit leaves none.
    """
    scale, total = _exponential_scale(mean, limit), prompts * completions
    shares = [(i + 0.5) / total for i in range(total)]
    lengths = [max(1, min(limit, round(-scale * math.log1p(-share)))) for share in shares]
    step = next(s for s in range(STEP_OF_PERMUTATION, 10**6) if math.gcd(s, total) == 1)
    dealt = [lengths[i * step % total] for i in range(total)]
    return [dealt[i * completions : (i + 1) * completions] for i in range(prompts)]


def _exponential_scale(mean: float, limit: int) -> float:
    """The scale m of an exponential with this mean after the cut: m (1 - exp(-limit / m))."""
    low, high = mean, 1e4 * limit
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (
            (low, middle) if -middle * math.expm1(-limit / middle) > mean else (middle, high)
        )
    return low
