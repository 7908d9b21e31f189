"""Rules over the course of the reward and of held-out scores: each returns a text, or None.

They judge a running run, at every logged line, over a window of its last steps; without data a
rule is silent. A whole run is judged only by `reward_without_rise` and `held_out_falling`.
"""

import math
from itertools import pairwise
from operator import mul
from statistics import fmean, linear_regression

from rloo_cli.reporting.health.evidence import Evidence

FLAT_STEPS = 50  # in less, a slow but healthy rise hides in the noise
FLAT_NOISE = 1.0  # standard errors between the window's halves: a real rise soon exceeds 1
FALL_NOISE = 4.0  # standard errors of a fall that is more than noise: rare in a thousand steps
MIN_CROSSINGS, MIN_SWING_POINTS = 4, 20  # crossings of the mean, among at least so many points
QUARTER_NOISE = 4.5  # standard errors between quarters of the window: level below that
MIN_PATTERN_AUTOCORRELATION = 0.6  # autocorrelation of some lag: 50 points of noise stay below 0.45
HELD_OUT_NOISE = 2.0  # standard errors, twice in a row: a set has the same prompts each time
RISE_NOISE = 2.0  # standard errors between a whole run's halves: above it the reward has risen
NOISE_SHARE = 0.25  # of the scores' variance: as noisy as a mean of four completions
HELD_OUT_METRICS = ("eval_reward", "eval_reward/se", "eval_samples")


def held_out_falling(run: Evidence) -> str | None:
    """A set's score is below its best, by more than noise at the last two evaluations."""
    for name in run.metric_names():
        points = run.metric_points(name)
        if not name.startswith("eval_") or not name.endswith("_reward") or len(points) < 3:
            continue
        best_step, best = max(points[:-2], key=lambda point: point[1])
        noise = _held_out_noise(run, name, best_step, best)
        fallen = [
            best - score > HELD_OUT_NOISE * math.hypot(noise, now)
            for step, score in points[-2:]
            if (now := _held_out_noise(run, name, step, score)) < math.inf
        ]
        if fallen == [True, True]:
            last = " and ".join(f"{score:.3g}" for _, score in points[-2:])
            reward = run.start_and_end("reward")
            course = f", and reward went from {reward[0]:.3g} to {reward[1]:.3g}" if reward else ""
            return (
                f"{name} was {best:.3g} at step {best_step} and is {last} now, further below its"
                f" best than its noise{course}: the gains no longer transfer to other"
                " prompts"
            )
    return None


def _held_out_noise(run: Evidence, name: str, step: int, score: float) -> float:
    """The standard error of a held-out score: as recorded, else at most that of a share."""
    recorded = dict(run.metric_points(f"{name}/se")).get(step)
    if recorded is not None:
        return recorded
    samples = dict(run.metric_points(name.removesuffix("reward") + "samples")).get(step, 0.0)
    return math.sqrt(score * (1 - score) / samples) if samples and 0 <= score <= 1 else math.inf


def _noise_share_of(rewards: list[float], spreads: list[float]) -> float:
    """The mean of one step's share of the scores' variance.

    `rewards`: the mean score of each step; `spreads`: the standard deviation of a step's scores.
    """
    noise = fmean((after - before) ** 2 for before, after in pairwise(rewards)) / 2
    total = noise + fmean(spread**2 for spread in spreads)
    return noise / total if total else 0.0


def _variance(values: list[float]) -> float:
    """As statistics.variance, but 100 times as fast: a report judges every step of a run."""
    middle = fmean(values)
    return sum((value - middle) ** 2 for value in values) / (len(values) - 1)


def _half_means(values: list[float]) -> tuple[float, float, float]:
    """The means of the first and the second half, and the standard error of their difference."""
    early, late = values[: len(values) // 2], values[len(values) // 2 :]
    noise = math.sqrt(_variance(early) / len(early) + _variance(late) / len(late))
    return fmean(early), fmean(late), noise


def _has_pattern(values: list[float]) -> bool:
    """Whether values follow each other like a wave, a hump or a slope, not like noise."""
    middle, count = fmean(values), len(values)
    gaps = [value - middle for value in values]
    whole = sum(gap * gap for gap in gaps)
    if count < MIN_SWING_POINTS or whole <= 0:
        return False
    covariances = (sum(map(mul, gaps, gaps[lag:])) for lag in range(1, count // 2))
    return any(abs(value) > MIN_PATTERN_AUTOCORRELATION * whole for value in covariances)


def _has_level_quarters(values: list[float]) -> bool:
    """Whether the quarters of a window have the same mean, within noise."""
    count = len(values) // 4
    if count < MIN_SWING_POINTS // 4:
        return True
    quarters = [values[i * count : (i + 1) * count] for i in range(4)]
    means = [fmean(quarter) for quarter in quarters]
    noise = math.sqrt(fmean(_variance(quarter) for quarter in quarters) / count)
    return max(means) - min(means) <= QUARTER_NOISE * noise


def _is_swinging(values: list[float]) -> bool:
    """Whether values go up and down repeatedly, other than noise and not around a slope."""
    steps = range(len(values))
    slope, start = linear_regression(steps, values)
    around = [value - slope * step - start for step, value in zip(steps, values, strict=True)]
    crossings = sum((a < 0) != (b < 0) for a, b in pairwise(around))
    return crossings >= MIN_CROSSINGS and _has_pattern(around)


def _reward_fall(run: Evidence) -> tuple[float, float] | None:
    """Mean reward before and after a fall within the last FLAT_STEPS steps or twice as many."""
    for steps in (FLAT_STEPS, 2 * FLAT_STEPS):
        values = run.recent_values("reward", steps)
        if values is None or len(values) < 4:
            return None
        early, late, noise = _half_means(values)
        if early - late > FALL_NOISE * noise:
            return early, late
    return None


def reward_falling(run: Evidence) -> str | None:
    """The mean falls, suddenly or slowly."""
    fall = _reward_fall(run)
    if fall is None:
        return None
    return (
        f"reward fell from {fall[0]:.3g} to {fall[1]:.3g}: the updates make the policy worse,"
        " unless the prompts have become harder"
    )


def reward_swinging(run: Evidence) -> str | None:
    """The mean goes up and down without getting better."""
    values = run.recent_values("reward", FLAT_STEPS)
    if values is None or len(values) < 4 or not _is_swinging(values):
        return None
    early, late, noise = _half_means(values)
    if late - early > FLAT_NOISE * noise:  # it still rises
        return None
    return (
        f"reward swings between {min(values):.3g} and {max(values):.3g} over {FLAT_STEPS} steps"
        " without getting better: the updates overshoot"
    )


def _flat_reward(run: Evidence) -> tuple[list[float], float] | None:
    """The rewards of the last FLAT_STEPS steps, if level, and their share of noise."""
    values = run.recent_values("reward", FLAT_STEPS)
    if values is None or len(values) < 4:
        return None
    if _reward_fall(run) or _has_pattern(values) or not _has_level_quarters(values):
        return None  # if it falls or swings, larger updates would do harm
    early, late, noise = _half_means(values)
    if abs(late - early) > FLAT_NOISE * noise:
        return None
    spreads = run.recent_values("reward_std_batch", FLAT_STEPS)
    return values, _noise_share_of(values, spreads) if spreads else 0.0


def high_variance(run: Evidence) -> str | None:
    """The mean is level and mostly noise: larger updates would do harm."""
    flat = _flat_reward(run)
    if flat is None or flat[1] <= NOISE_SHARE:
        return None
    return f"reward is level over {FLAT_STEPS} steps and mostly noise: {_noise_text(flat[1])}"


def reward_without_rise(run: Evidence) -> str | None:
    """High variance in a whole run: it has not risen by more than its noise."""
    rewards, spreads = run.metric_values("reward"), run.metric_values("reward_std_batch")
    if len(rewards) < 4 or not spreads:
        return None
    early, late, noise = _half_means(rewards)
    share = _noise_share_of(rewards, spreads)
    if share <= NOISE_SHARE or late - early > RISE_NOISE * noise:
        return None
    return f"{_noise_text(share)}, and in {run.steps} steps it has not risen by more"


def _noise_text(share: float) -> str:
    return (
        f"one step's mean has {share:.0%} of the scores' variance, like a mean over"
        f" {1 / share:.2g} completions"
    )


def reward_flat(run: Evidence) -> str | None:
    """The mean neither rises, falls nor swings."""
    flat = _flat_reward(run)
    if flat is None or flat[1] > NOISE_SHARE:
        return None
    return (
        f"reward is flat at {fmean(flat[0]):.3g} over {FLAT_STEPS} steps: updates too small,"
        " or the reward already at its best"
    )
