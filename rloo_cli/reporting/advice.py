"""Health rules for a run: what looks wrong, why it may be so, and which key to change.

Each rule speaks at most once per run. A rule sees the metrics of the steps so far; one whose metric
is absent (no data) is silent. The config's `guards` says what follows: a line of advice, nothing,
or the end of the run (`train/guards.py` stops it).
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from itertools import pairwise
from operator import mul
from statistics import fmean, linear_regression

from rloo_cli.reporting.eval_lines import is_evaluation
from rloo_cli.reporting.metrics_lines import MetricsMapping
from rloo_cli.utils.errors import Problem

RECENT_LINES = 5  # logged steps averaged for a share: with few prompts one may be 1.0 by luck
FLAT_STEPS = 50  # shorter, and a slow but healthy rise still hides in the noise
FLAT_NOISE = 1.0  # standard errors between the window's halves: a real rise soon leaves 1 behind
FALL_NOISE = 4.0  # standard errors of a fall that is more than noise: rare in a thousand steps
MIN_CROSSINGS, MIN_SWING_POINTS = 4, 20  # crossings of the mean, among at least so many points
QUARTER_NOISE = 4.5  # standard errors between quarters of the window: more, and it is not level
MIN_PATTERN_AUTOCORRELATION = 0.6  # autocorrelation of some lag: 50 points of noise stay below 0.45
CLIP_SHARE = 0.2  # above it a fifth of the completions give no gradient: the policy moved too far
KL_STEPS, KL_FACTOR = 20, 3.0  # beta holds a drift this fast only after the damage
KL_FLOOR = 0.1  # nats per token; below it, tripling is only the way up from 0
ENTROPY_SHARE = 0.1  # of the start's: by then siblings are mostly equal, and the baseline cancels
ZERO_STD_SHARE = 0.8  # above it four fifths of the sampling is paid for without a gradient
TRUNCATED_SHARE = 0.5  # above it most scores judge texts that were cut off
ESS_SHARE = 0.5  # below it the correction's weights waste half of the batch
LOGP_FACTOR = 3.0  # growth of logp_diff_rms: sampler and trainer compute different models
LOGP_FLOOR = 0.04  # nats; bfloat16 alone gives .03 to .04, float32 .002
CLIPPED_UPDATES = 20  # fewer may be the start, where gradients are largest
NO_SIGNAL_STEPS = 20  # no group with two different scores for so long: nothing is learnt
HELD_OUT_NOISE = 2.0  # standard errors, twice in a row: a set has the same prompts each time
MOST_COMMON_SHARE = 0.95  # of a step's completions: whatever is asked, the answer is the same
NOISE_SHARE = 0.25  # of the scores' variance: a step's mean is then that of four completions
HELD_OUT_METRICS = ("eval_reward", "eval_reward/se", "eval_samples")


def _finite_number(metrics: MetricsMapping, name: str) -> float | None:
    value = metrics.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _metrics_of_sets(metrics: MetricsMapping, names: tuple[str, ...]) -> list[str]:
    """`names`; of `eval_NAME` also the metric `eval_<set>_NAME` of every set that `metrics` has."""
    ends = tuple(name.removeprefix("eval") for name in names if name.startswith("eval_"))
    of_sets = [key for key in metrics if ends and key.startswith("eval_") and key.endswith(ends)]
    return of_sets or [*names]


class MetricHistory:
    """The first value of every metric, and (step, value) of each over the last steps.

    Of held-out metrics it has every value.
    """

    def __init__(self) -> None:
        self.step = 0
        self.first_values: dict[str, float] = {}
        self.points: dict[str, list[tuple[int, float]]] = {}

    def add(self, metrics: MetricsMapping, names: tuple[str, ...]) -> None:
        step = _finite_number(metrics, "step")
        self.step = self.step + 1 if step is None else int(step)
        oldest = self.step - 2 * FLAT_STEPS
        for name in _metrics_of_sets(metrics, names):
            value = _finite_number(metrics, name)
            if value is None:
                continue
            self.first_values.setdefault(name, value)
            points = self.points.setdefault(name, [])
            points.append((self.step, value))
            while points[0][0] < oldest and not name.startswith("eval_"):
                del points[0]

    def current_value(self, name: str) -> float | None:
        """The value of the current step; None where it has none."""
        points = self.points.get(name)
        return points[-1][1] if points and points[-1][0] == self.step else None

    def recent_mean(self, name: str) -> float | None:
        """The mean of the last RECENT_LINES values; None until there are so many."""
        points = self.points.get(name, [])
        return fmean(v for _, v in points[-RECENT_LINES:]) if len(points) >= RECENT_LINES else None

    def recent_values(self, name: str, steps: int) -> list[float] | None:
        """The values of the last `steps` steps; None while the run is younger than that.

        A logged line stands for the steps since the line before it, so that logging.every=10
        needs no more steps than logging.every=1.
        """
        points = self.points.get(name, [])
        if len(points) < 2:
            return None
        every = points[-1][0] - points[-2][0]
        if points[0][0] - every > self.step - steps:
            return None
        first = bisect_right(points, self.step - steps, key=lambda point: point[0])
        return [value for _, value in points[first:]]


def held_out_fall(history: MetricHistory) -> str | None:
    """How a set's score fell below its best, by more than noise at the last two evaluations."""
    for name, points in history.points.items():
        if not name.endswith("_reward") or len(points) < 3 or points[-1][0] != history.step:
            continue
        best_step, best = max(points[:-2], key=lambda point: point[1])
        noise = _held_out_noise(history, name, best_step, best)
        fallen = [
            best - score > HELD_OUT_NOISE * math.hypot(noise, now)
            for step, score in points[-2:]
            if (now := _held_out_noise(history, name, step, score)) < math.inf
        ]
        if fallen == [True, True]:
            last = " and ".join(f"{score:.3g}" for _, score in points[-2:])
            return f"{name} was {best:.3g} at step {best_step} and is {last} now"
    return None


def _held_out_noise(history: MetricHistory, name: str, step: int, score: float) -> float:
    """The standard error of a held-out score: as recorded, else at most that of a share."""
    recorded = dict(history.points.get(f"{name}/se", ())).get(step)
    if recorded is not None:
        return recorded
    samples = dict(history.points.get(name.removesuffix("reward") + "samples", ())).get(step, 0.0)
    return math.sqrt(score * (1 - score) / samples) if samples and 0 <= score <= 1 else math.inf


def reward_noise_share(rewards: list[float], spreads: list[float]) -> float:
    """The part of the scores' variance that the mean of one step has.

    `rewards`: the mean score of each step; `spreads`: the standard deviation of a step's scores.
    """
    noise = fmean((after - before) ** 2 for before, after in pairwise(rewards)) / 2
    total = noise + fmean(spread**2 for spread in spreads)
    return noise / total if total else 0.0


def _variance(values: list[float]) -> float:
    """As statistics.variance, a hundred times as fast: a report advises on every step of a run."""
    middle = fmean(values)
    return sum((value - middle) ** 2 for value in values) / (len(values) - 1)


def half_means(values: list[float]) -> tuple[float, float, float]:
    """The means of the first and the second half, and the standard error of their difference."""
    early, late = values[: len(values) // 2], values[len(values) // 2 :]
    noise = math.sqrt(_variance(early) / len(early) + _variance(late) / len(late))
    return fmean(early), fmean(late), noise


def _has_pattern(values: list[float]) -> bool:
    """Whether values follow each other as those of a wave, a hump or a slope do, not as noise."""
    middle, count = fmean(values), len(values)
    gaps = [value - middle for value in values]
    whole = sum(gap * gap for gap in gaps)
    if count < MIN_SWING_POINTS or whole <= 0:
        return False
    covariances = (sum(map(mul, gaps, gaps[lag:])) for lag in range(1, count // 2))
    return any(abs(value) > MIN_PATTERN_AUTOCORRELATION * whole for value in covariances)


def _has_level_quarters(values: list[float]) -> bool:
    """Whether the quarters of a window have one mean, as far as noise lets one see."""
    count = len(values) // 4
    if count < MIN_SWING_POINTS // 4:
        return True
    quarters = [values[i * count : (i + 1) * count] for i in range(4)]
    means = [fmean(quarter) for quarter in quarters]
    noise = math.sqrt(fmean(_variance(quarter) for quarter in quarters) / count)
    return max(means) - min(means) <= QUARTER_NOISE * noise


def _is_swinging(values: list[float]) -> bool:
    """Whether values go up and down again and again, and not as noise does, nor around a slope."""
    steps = range(len(values))
    slope, start = linear_regression(steps, values)
    around = [value - slope * step - start for step, value in zip(steps, values, strict=True)]
    crossings = sum((a < 0) != (b < 0) for a, b in pairwise(around))
    return crossings >= MIN_CROSSINGS and _has_pattern(around)


def _reward_fall(history: MetricHistory) -> tuple[float, float] | None:
    """Mean reward before and after a fall within the last FLAT_STEPS steps or twice as many."""
    for steps in (FLAT_STEPS, 2 * FLAT_STEPS):
        values = history.recent_values("reward", steps)
        if values is None or len(values) < 4:
            return None
        early, late, noise = half_means(values)
        if early - late > FALL_NOISE * noise:
            return early, late
    return None


def reward_falling(history: MetricHistory) -> str | None:
    fall = _reward_fall(history)
    if fall is None:
        return None
    return (
        f"reward fell from {fall[0]:.3g} to {fall[1]:.3g}: the updates make the policy worse, "
        "unless the prompts have become harder. Lower train.learning_rate, or raise "
        "algorithm.beta, which holds the policy where it began; look at the samples, and compare "
        "with what is held out."
    )


def reward_swinging(history: MetricHistory) -> str | None:
    values = history.recent_values("reward", FLAT_STEPS)
    if values is None or len(values) < 4 or not _is_swinging(values):
        return None
    early, late, noise = half_means(values)
    if late - early > FLAT_NOISE * noise:  # it rises all the same
        return None
    return (
        f"reward swings between {min(values):.3g} and {max(values):.3g} over {FLAT_STEPS} steps "
        "and gets no better: the updates overshoot. Lower train.learning_rate, or raise "
        "train.prompts_per_step or algorithm.beta."
    )


def _flat_reward(history: MetricHistory) -> tuple[list[float], float] | None:
    """The rewards of the last FLAT_STEPS steps, if they are level, and their share of noise."""
    values = history.recent_values("reward", FLAT_STEPS)
    if values is None or len(values) < 4:
        return None
    if _reward_fall(history) or _has_pattern(values) or not _has_level_quarters(values):
        return None  # where it falls or swings, larger updates would do harm
    early, late, noise = half_means(values)
    if abs(late - early) > FLAT_NOISE * noise:
        return None
    spreads = history.recent_values("reward_std_batch", FLAT_STEPS)
    return values, reward_noise_share(values, spreads) if spreads else 0.0


def high_variance(history: MetricHistory) -> str | None:
    flat = _flat_reward(history)
    if flat is None or flat[1] <= NOISE_SHARE:
        return None
    return (
        f"reward is level over {FLAT_STEPS} steps and mostly noise: the mean of one step has"
        f" {flat[1]:.0%} of the scores' variance, as that of {1 / flat[1]:.2g} completions has. "
        "Raise train.prompts_per_step or algorithm.num_generations."
    )


def reward_flat(history: MetricHistory) -> str | None:
    flat = _flat_reward(history)
    if flat is None or flat[1] > NOISE_SHARE:
        return None
    values = flat[0]
    return (
        f"reward is flat at {fmean(values):.3g} over {FLAT_STEPS} steps: updates too small, or "
        "the reward already at its best. Look at the samples; if they can improve, raise "
        "train.learning_rate or algorithm.num_generations."
    )


def held_out_falling(history: MetricHistory) -> str | None:
    figures = held_out_fall(history)
    if figures is None:
        return None
    return (
        f"{figures}, further below its best than its noise: what the reward gains no longer holds "
        "for other prompts. Take an earlier checkpoint (checkpoint.keep_last), lower "
        "train.learning_rate, raise algorithm.beta, or train on more prompts (data.path)."
    )


def one_completion(history: MetricHistory) -> str | None:
    share = history.recent_mean("completions/most_common_frac")
    if share is None or share <= MOST_COMMON_SHARE:
        return None
    return (
        f"completions/most_common_frac is {share:.2f}, over {MOST_COMMON_SHARE}: different prompts "
        "get one and the same completion. If the reward pays for it whatever was asked, mend the "
        "reward; else lower train.learning_rate or raise algorithm.beta."
    )


def policy_clipping(history: MetricHistory) -> str | None:
    share = history.recent_mean("clip_ratio/region_mean")
    if share is None or share <= CLIP_SHARE:
        return None
    return (
        f"clip_ratio/region_mean is {share:.2f}, over {CLIP_SHARE}: the policy moves so far in "
        "one step that its own completions are clipped away. Lower train.learning_rate or "
        "algorithm.num_iterations."
    )


def kl_rising(history: MetricHistory) -> str | None:
    values, now = history.recent_values("kl", KL_STEPS + 1), history.current_value("kl")
    if not values or now is None or now <= KL_FACTOR * max(values[0], KL_FLOOR):
        return None
    return (
        f"kl went from {values[0]:.3g} to {now:.3g} in {KL_STEPS} steps: the policy runs away "
        "from the reference, often towards a weakness of the reward. Raise algorithm.beta or "
        "lower train.learning_rate, and read the samples."
    )


def entropy_metric(names: Container[str]) -> str:
    """The entropy of all completions where the sampler tells it, else of the forwarded ones.

    The latter's mean moves with the share of groups that need no forward: these are the sure ones.
    """
    return "sampling/entropy" if "sampling/entropy" in names else "entropy"


def entropy_collapse(history: MetricHistory) -> str | None:
    name = entropy_metric(history.points)
    now, start = history.current_value(name), history.first_values.get(name, 0.0)
    if now is None or start <= 0 or now >= ENTROPY_SHARE * start:
        return None
    return (
        f"{name} fell from {start:.3g} to {now:.3g}: the completions of a prompt become equal, "
        "and then the leave-one-out baseline leaves no gradient. Lower train.learning_rate, or "
        "raise algorithm.beta or generation.temperature."
    )


def zero_spread(history: MetricHistory) -> str | None:
    # What resampling leaves has a spread; what it threw away was paid for.
    sampled = "sampled_frac_reward_zero_std" in history.points
    name = "sampled_frac_reward_zero_std" if sampled else "frac_reward_zero_std"
    share = history.recent_mean(name)
    if share is None or share <= ZERO_STD_SHARE:
        return None
    return (
        f"{name} is {share:.2f}: in most groups all completions score the same "
        "(all right or all wrong) and teach nothing. Raise algorithm.num_generations or "
        "generation.temperature, or take prompts (data.path) of fitting difficulty."
    )


def no_signal(history: MetricHistory) -> str | None:
    values = history.recent_values("frac_reward_zero_std", NO_SIGNAL_STEPS)
    if not values or min(values) < 1.0:
        return None
    return (
        f"no learning signal for {NO_SIGNAL_STEPS} steps: in every group all scores were equal, "
        "so every advantage was 0. Check reward on the samples, then raise "
        "generation.temperature or algorithm.num_generations."
    )


def many_truncated(history: MetricHistory) -> str | None:
    share = history.recent_mean("completions/clipped_ratio")
    if share is None or share <= TRUNCATED_SHARE:
        return None
    return (
        f"completions/clipped_ratio is {share:.2f}: most completions hit the length limit, so the "
        "reward judges cut texts. Raise generation.max_completion_length, or teach ending with "
        "algorithm.missing_eos_penalty."
    )


def low_ess(history: MetricHistory) -> str | None:
    share = history.recent_mean("sampling/ess")
    if share is None or share >= ESS_SHARE:
        return None
    return (
        f"sampling/ess is {share:.2f}, under {ESS_SHARE}: sampler and trainer disagree about the "
        "policy, and a few completions carry the update. Use one dtype for both (model.dtype), "
        "or lower algorithm.correction.cap."
    )


def logp_drift(history: MetricHistory) -> str | None:
    name = "sampling/logp_diff_rms"
    now, start = history.recent_mean(name), history.first_values.get(name, 0.0)
    if history.recent_mean("staleness/mean"):  # of older weights, as generation.overlap says
        return None
    if now is None or now <= LOGP_FACTOR * start or now <= LOGP_FLOOR:
        return None
    return (
        f"{name} went from {start:.3g} to {now:.3g}: the sampler's numbers leave the trainer's, "
        "by stale weights or a lower precision. Check generation.backend and its weight "
        "transfer, and use one model.dtype for both."
    )


def every_update_clipped(history: MetricHistory) -> str | None:
    values = history.recent_values("grad_clip_fraction", CLIPPED_UPDATES)
    if not values or min(values) < 1.0:
        return None
    return (
        f"for information: every update clipped for {CLIPPED_UPDATES} steps, which is the rule "
        "with summed log-probabilities and only fixes each update's length. Nothing need change; "
        "train.max_grad_norm sets the limit, and train.learning_rate the size of the steps."
    )


@dataclass(frozen=True)
class AdviceRule:
    """One health rule: what it reads, and the keys to turn where it speaks."""

    check: Callable[[MetricHistory], str | None]
    metrics: tuple[str, ...]
    keys: tuple[str, ...]
    silences: str | None = None  # the rule that says the opposite, which then stays silent


# The names are those of the config's `guards`.
ADVICE_RULES = {
    "reward_falling": AdviceRule(
        reward_falling, ("reward",), ("train.learning_rate", "algorithm.beta"), "reward_flat"
    ),
    "reward_swinging": AdviceRule(
        reward_swinging,
        ("reward",),
        ("train.learning_rate", "train.prompts_per_step", "algorithm.beta"),
        "reward_flat",
    ),
    "reward_flat": AdviceRule(
        reward_flat,
        ("reward", "reward_std_batch"),
        ("train.learning_rate", "algorithm.num_generations"),
    ),
    "high_variance": AdviceRule(
        high_variance,
        ("reward", "reward_std_batch"),
        ("train.prompts_per_step", "algorithm.num_generations"),
        "reward_flat",
    ),
    "held_out_falling": AdviceRule(
        held_out_falling,
        HELD_OUT_METRICS,
        ("train.learning_rate", "algorithm.beta", "data.path"),
    ),
    "policy_clipping": AdviceRule(
        policy_clipping,
        ("clip_ratio/region_mean",),
        ("train.learning_rate", "algorithm.num_iterations"),
    ),
    "kl_rising": AdviceRule(kl_rising, ("kl",), ("algorithm.beta", "train.learning_rate")),
    "entropy_collapse": AdviceRule(
        entropy_collapse,
        ("sampling/entropy", "entropy"),
        ("train.learning_rate", "algorithm.beta", "generation.temperature"),
    ),
    "one_completion": AdviceRule(
        one_completion,
        ("completions/most_common_frac",),
        ("train.learning_rate", "algorithm.beta"),
    ),
    "zero_spread": AdviceRule(
        zero_spread,
        ("sampled_frac_reward_zero_std", "frac_reward_zero_std"),
        ("algorithm.num_generations", "generation.temperature", "data.path"),
    ),
    "no_signal": AdviceRule(
        no_signal,
        ("frac_reward_zero_std",),
        ("generation.temperature", "algorithm.num_generations"),
    ),
    "many_truncated": AdviceRule(
        many_truncated,
        ("completions/clipped_ratio",),
        ("generation.max_completion_length", "algorithm.missing_eos_penalty"),
    ),
    "low_ess": AdviceRule(low_ess, ("sampling/ess",), ("model.dtype", "algorithm.correction.cap")),
    "logp_drift": AdviceRule(
        logp_drift,
        ("sampling/logp_diff_rms", "staleness/mean"),
        ("generation.backend", "model.dtype"),
    ),
    "every_update_clipped": AdviceRule(
        every_update_clipped,
        ("grad_clip_fraction",),
        ("train.max_grad_norm", "train.learning_rate"),
    ),
}


class Advisor:
    """Reads each logged step and returns the advice that is new.

    `guards`: what the config says of each rule: warn (speak once; where it says nothing), off, or
    fail. The last one stops the run. Once the run was resumed, that rule judges what came since:
    its history begins anew where it fired, here and where old lines are read again.
    """

    def __init__(self, guards: Mapping[str, object] | None = None) -> None:
        given = guards or {}
        self.levels = {name: given.get(name, "warn") for name in ADVICE_RULES}
        self.open_rules = [name for name, level in self.levels.items() if level != "off"]
        self.histories = {name: MetricHistory() for name in self.open_rules}

    def advise(self, metrics: MetricsMapping) -> dict[str, str]:
        """The advice of every rule that fires on a line of metrics: its name -> what it says.

        Lines of evaluations are for the rules that rest on them, lines of steps for all others.
        """
        advice: dict[str, str] = {}
        held_out = is_evaluation(metrics)
        for name in self.open_rules:
            if held_out != (ADVICE_RULES[name].metrics == HELD_OUT_METRICS):
                continue
            self.histories[name].add(metrics, ADVICE_RULES[name].metrics)
            if text := ADVICE_RULES[name].check(self.histories[name]):
                advice[name] = text
        spoken: set[str] = set()
        for name in advice:
            if self.levels[name] == "fail":
                self.histories[name] = MetricHistory()
            else:
                spoken.add(name)
            opposite = ADVICE_RULES[name].silences
            if opposite is not None and self.levels[opposite] == "warn":
                spoken.add(opposite)
        self.open_rules = [name for name in self.open_rules if name not in spoken]
        return advice


def guard_problem(name: str, step: int, figures: str) -> Problem:
    """What a run says that the guard `name` (`guards.NAME=fail`) stops after `step`."""
    rule = ADVICE_RULES[name]
    what = f"the guard {name} stopped the run after step {step}"
    where = f"guards.{name}=fail, metric {', '.join(rule.metrics)}"
    keys = " or ".join(rule.keys)
    fix = f"change {keys}, or guards.{name}=warn; resume=auto goes on from this step"
    return Problem(what, where, figures, fix, "docs/doctor.md#guards")
