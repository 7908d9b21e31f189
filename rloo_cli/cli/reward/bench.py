"""`rloo reward bench`: how many completions a reward scores in a second, by the size of a call.

The completions are right answers of real rows, called through the run's own engine. The first call
of each size is not counted: it loads, compiles, connects.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rloo_cli.cli.reward.subject import ProbeSubject, lenient_reward
from rloo_cli.config.schema import RunConfig
from rloo_cli.rewards.engine.build import Reward
from rloo_cli.rewards.engine.step_calls import StepCalls

BATCH_SIZES = (1, 8, 64)  # completions; the run's own step is measured too
MIN_CALLS = 3  # of each size, however long they take
MAX_STEPS_READ = 20  # of a run whose seconds of sampling are known: the last ones


@dataclass(frozen=True)
class BatchTiming:
    """The calls with one number of completions. Seconds."""

    completions: int
    calls: int
    per_second: float
    p50_s: float
    p90_s: float
    p99_s: float
    failed: int  # completions that got no score because of a failure


@dataclass(frozen=True)
class SamplingTime:
    """What a step of sampling took in an earlier run of this config."""

    run: str
    seconds: float  # median
    steps: int


def bench_sizes(config: RunConfig, batch: int | None) -> list[int]:
    """The numbers of completions to measure: `batch`, or a few and that of the run's step."""
    return [batch] if batch is not None else sorted({*BATCH_SIZES, config.episodes_per_step})


def time_reward(reward: Reward, subject: ProbeSubject, size: int, seconds: float) -> BatchTiming:
    """Score `size` completions again and again for so many seconds."""
    reward = lenient_reward(reward)
    per_group = subject.config.algorithm.num_generations
    k = per_group if size % per_group == 0 else 1
    groups = []
    for number in range(size // k):
        row = subject.rows[number % len(subject.rows)]
        right = [completion for completion in row.completions if completion.role == "right"]
        chosen = [right[(number + i) % len(right)] for i in range(k)]
        groups.append(subject.make_group(row, number, chosen))
    latencies: list[float] = []
    failed, began = 0, 0.0
    while len(latencies) < MIN_CALLS + 1 or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        calls = StepCalls([reward], groups, subject.context, k)
        for index in range(len(groups)):
            calls.submit_group(index)
        (result,) = calls.wait_for_results()
        latencies.append(time.perf_counter() - start)
        failed += len(result.failures)
        if any(failure.kind == "timeout" for failure in result.failures.values()):
            break
        began = began or time.perf_counter()
    counted = sorted(latencies[1:] or latencies)
    return BatchTiming(
        size, len(counted), size * len(counted) / sum(counted), _quantile(counted, 0.5),
        _quantile(counted, 0.9), _quantile(counted, 0.99), failed,
    )  # fmt: skip


def known_sampling_time(config: RunConfig) -> SamplingTime | None:
    """The seconds that sampling took in the run of this config's name; None if there is none."""
    folder = Path(config.root, str(config.name))
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        values = [json.loads(line).get("time/generation") for line in lines]
    except (OSError, ValueError, AttributeError):
        return None
    times = [value for value in values if isinstance(value, int | float)][-MAX_STEPS_READ:]
    return SamplingTime(str(folder), median(times), len(times)) if times else None


def timing_lines(timings: Sequence[BatchTiming]) -> list[str]:
    """The table of a reward's timings."""
    head = "completions  calls  completions/s  p50 ms  p90 ms  p99 ms  failed"
    rows = [
        f"{t.completions:>11}  {t.calls:>5}  {t.per_second:>13,.0f}  {1e3 * t.p50_s:>6.4g}"
        f"  {1e3 * t.p90_s:>6.4g}  {1e3 * t.p99_s:>6.4g}  {t.failed:>6}"
        for t in timings
    ]
    return [head, *rows]


def sampling_line(config: RunConfig, timings: Sequence[BatchTiming], known: SamplingTime) -> str:
    """What scoring a step costs beside sampling it, where both are known."""
    step = next((t for t in timings if t.completions == config.episodes_per_step), None)
    text = (
        f"sampling a step took {known.seconds:.3g} s ({known.run}, median of {known.steps} steps)"
    )
    if step is None:
        return text
    share = step.p50_s / known.seconds if known.seconds else float("inf")
    return (
        f"{text}; scoring its {step.completions} completions takes {step.p50_s:.3g} s, {share:.1%}"
    )


def timings_json(timings: Sequence[BatchTiming]) -> list[dict[str, object]]:
    """The timings as plain values."""
    return [asdict(timing) for timing in timings]


def _quantile(ordered: Sequence[float], share: float) -> float:
    """The least value that at least this share does not exceed."""
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]
