"""The input of the health rules: a run's metrics, and for a finished run also its other files.

For a running run they see the metrics so far, and "now" is its last line, or the last five. For
a whole run (`RunEvidence` in inspection/diagnosis) they also see the config and the samples, and
"now" is its last quarter.
"""

import json
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from rloo_cli.reporting.metrics_lines import MetricsMapping
from rloo_cli.reporting.panel import last_message
from rloo_cli.utils.files import JsonObject

RECENT_LINES = 5  # logged steps per average: one alone may be 1.0 by chance
KEPT_STEPS = 100  # kept of a running run: the longest window of a rule
QUARTER = 4  # the start and the end of a run are its first and last quarter
LEARNT_SHARE = 0.15  # of the span of all scores: a rise by this is learning
MASTERED_SHARE = 0.5  # of the way to the best score: then certainty is fine

MetricPoints = list[tuple[int, float]]  # (step, value), in order


class Evidence:
    """The metrics of a running run: the first value of each, and those of the last steps.

    It has every value of held-out metrics. Everything else that a rule may read is empty or None.
    """

    def __init__(self) -> None:
        self.step = self.steps = 0  # the last one; how many were logged
        self._points: dict[str, MetricPoints] = {}
        self._first_values: dict[str, float] = {}
        self.samples: dict[int, list[JsonObject]] = {}  # step -> completions
        self.held_out: list[JsonObject] = []  # of the last evaluation
        # For draws that have samples: draw -> row of the data, draw -> its epoch.
        self.draw_examples: dict[int, int] = {}
        self.draw_epochs: dict[int, int] = {}

    def add_line(self, metrics: MetricsMapping, names: tuple[str, ...]) -> None:
        """Add these metrics of a line."""
        step = finite_field(metrics, "step")
        self.step, self.steps = self.step + 1 if step is None else int(step), self.steps + 1
        for name in _metrics_of_sets(metrics, names):
            value = finite_field(metrics, name)
            if value is None:
                continue
            self._first_values.setdefault(name, value)
            points = self._points.setdefault(name, [])
            points.append((self.step, value))
            while points[0][0] < self.step - KEPT_STEPS and not name.startswith("eval_"):
                del points[0]

    def metric_points(self, name: str) -> MetricPoints:
        """The finite values of a metric with their steps, in order."""
        return self._points.get(name, [])

    def metric_names(self) -> Collection[str]:
        """The metrics that have a value."""
        return self._points.keys()

    def metric_values(self, name: str) -> list[float]:
        """The finite values of a metric, in order."""
        return [value for _, value in self.metric_points(name)]

    def first_value(self, name: str) -> float | None:
        """The first value of a metric; None if it has none."""
        return self._first_values.get(name)

    def current_value(self, name: str) -> float | None:
        """The value of the current step; None if it has none."""
        points = self.metric_points(name)
        return points[-1][1] if points and points[-1][0] == self.step else None

    def recent_mean(self, name: str) -> float | None:
        """The mean of the last RECENT_LINES values; None with fewer."""
        values = self.metric_values(name)[-RECENT_LINES:]
        return fmean(values) if len(values) == RECENT_LINES else None

    def recent_values(self, name: str, steps: int) -> list[float] | None:
        """The values of the last `steps` steps; None while the run is younger than that.

        A logged line covers the steps since the line before it, so logging.every=10 needs no
        more steps than logging.every=1.
        """
        points = self.metric_points(name)
        if len(points) < 2:
            return None
        every = points[-1][0] - points[-2][0]
        if points[0][0] - every > self.step - steps:
            return None
        first = bisect_right(points, self.step - steps, key=lambda point: point[0])
        return [value for _, value in points[first:]]

    def start_and_end(self, name: str) -> tuple[float, float] | None:
        """The mean of a metric over the first and over the last quarter of the run."""
        values = self.metric_values(name)
        count = len(values) // QUARTER
        return (fmean(values[:count]), fmean(values[-count:])) if count else None

    def end_mean(self, name: str) -> float | None:
        """The mean of a metric over the last quarter."""
        both = self.start_and_end(name)
        return None if both is None else both[1]

    def config_value(self, key: str) -> Any:
        """The value of a dotted key of the run's config; None if it is not set."""
        return None

    def weights_dtype(self) -> str | None:
        """The dtype that the trainer computes in, such as bfloat16; None if unknown."""
        return None

    def groups(self, last: bool = False) -> Iterator[list[JsonObject]]:
        """The completions of each prompt; `last`: only the second half of the samples."""
        steps = sorted(self.samples)
        for step in steps[len(steps) // 2 :] if last else steps:
            groups: dict[object, list[JsonObject]] = defaultdict(list)
            for sample in self.samples[step]:
                groups[sample.get("draw")].append(sample)
            yield from groups.values()

    def scores(self) -> list[float]:
        """The scores of all samples that have one."""
        found = (finite_field(sample, "score") for group in self.groups() for sample in group)
        return [score for score in found if score is not None]

    def is_learning(self) -> bool:
        """Whether the reward rose by a good part of the scores' span, so certainty is learnt."""
        scores, reward = self.scores(), self.start_and_end("reward")
        if not scores or reward is None:
            return False
        return reward[1] - reward[0] > LEARNT_SHARE * (max(scores) - min(scores)) > 0

    def has_mastered(self) -> bool:
        """Whether the reward rose by half of the distance from its start to the best score."""
        scores, reward = self.scores(), self.start_and_end("reward")
        if not scores or reward is None:
            return False
        return reward[1] - reward[0] > MASTERED_SHARE * (max(scores) - reward[0]) > 0


def _metrics_of_sets(metrics: MetricsMapping, names: tuple[str, ...]) -> list[str]:
    """`names`; of `eval_NAME` also the metric `eval_<set>_NAME` of every set that `metrics` has."""
    ends = tuple(name.removeprefix("eval") for name in names if name.startswith("eval_"))
    of_sets = [key for key in metrics if ends and key.startswith("eval_") and key.endswith(ends)]
    return of_sets or [*names]


def prompt_text(sample: JsonObject) -> str:
    """The prompt's own text: of a conversation, the last user message."""
    return last_message(sample.get("prompt", ""))


def shown_prompt(sample: JsonObject) -> str:
    """The prompt's text and images: two prompts are equal if both are."""
    return "".join([prompt_text(sample), *(str(image) for image in sample.get("images") or [])])


def episode_turns(sample: JsonObject) -> list[JsonObject]:
    """The turns of an episode; [] for one answer to a prompt."""
    turns = sample.get("turns")
    return [t for t in turns if isinstance(t, dict)] if isinstance(turns, list) else []


def whole_text(sample: JsonObject) -> str:
    """The contents of a completion: two completions are equal if these are."""
    turns = episode_turns(sample)
    parts = [[turn.get("told"), turn.get("said")] for turn in turns]
    return json.dumps(parts) if turns else str(sample.get("completion"))


def finite_field(sample: Mapping[str, Any], name: str) -> float | None:
    """A number of a sample or of a line of metrics; None if missing."""
    value = sample.get(name)
    usable = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if usable and value is not None else None


def group_pairs(
    groups: Iterable[list[JsonObject]], first: str, second: str
) -> list[tuple[float, float]]:
    """Two fields of every completion, each minus its mean over the completion's group."""
    pairs = []
    for group in groups:
        found = [(finite_field(s, first), finite_field(s, second)) for s in group]
        both = [(a, b) for a, b in found if a is not None and b is not None]
        if len(both) > 1:
            means = [fmean(column) for column in zip(*both, strict=True)]
            pairs += [(a - means[0], b - means[1]) for a, b in both]
    return pairs


def pair_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """The correlation of two centred columns; None if one of them does not vary."""
    sums = [
        sum(a * b for a, b in pairs),
        sum(a * a for a, _ in pairs),
        sum(b * b for _, b in pairs),
    ]
    return sums[0] / math.sqrt(sums[1] * sums[2]) if sums[1] > 0 and sums[2] > 0 else None
