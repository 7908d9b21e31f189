"""Calls a reward on rows and completions, through the run's own engine, and judges the scores.

A row's completions are one call (or as many as the reward's `scope` makes of a group). A call that
raises is repeated for each completion alone, to find the text at fault; a call that times out or
returns something invalid is not, and two timeouts end the probe.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import correlation, fmean, median, pstdev

from rloo_cli.cli.reward.completions import ProbeCompletion
from rloo_cli.cli.reward.subject import ProbeRow, ProbeSubject, lenient_reward
from rloo_cli.rewards.engine.build import Reward
from rloo_cli.rewards.engine.failures import RewardResult
from rloo_cli.rewards.engine.results import CallFailure
from rloo_cli.rewards.engine.step_calls import StepCalls
from rloo_cli.utils.files import JsonObject

MAX_TIMEOUTS = 2  # timeouts after which a reward is not called again
SAME_SCORE = 1e-9  # relative; closer scores are equal
Values = list[float | None]  # of a row's completions; None = no score


@dataclass
class ProbeErrors:
    """Failures of one kind with one message."""

    kind: str  # exception, timeout, invalid
    message: str
    frames: str  # of the reward's own code
    count: int = 0  # completions without a score
    completions: Counter[str] = field(default_factory=Counter)  # kinds of completions


@dataclass(frozen=True)
class Exploit:
    """A completion that wrongly scores at least as much as the right answer."""

    kind: str
    row: int
    text: str
    score: float
    right_kind: str
    right_text: str
    right_score: float


@dataclass
class RewardProbe:
    """A reward's results on all rows."""

    name: str
    location: str
    values: list[Values] = field(default_factory=list)
    errors: dict[tuple[str, str], ProbeErrors] = field(default_factory=dict)
    call_seconds: list[float] = field(default_factory=list)
    calls: int = 0
    gave_up: bool = False  # too many timeouts; later rows were not tested
    exploits: list[Exploit] = field(default_factory=list)
    undecided_rows: list[int] = field(default_factory=list)  # no format of the right answer wins

    @property
    def scores(self) -> list[float]:
        """All scores."""
        return [value for row in self.values for value in row if value is not None]

    @property
    def num_errors(self) -> int:
        """Completions that have no score because of a failure."""
        return sum(error.count for error in self.errors.values())

    @property
    def has_findings(self) -> bool:
        """Whether the reward's author should look at the result."""
        return bool(self.errors or self.exploits or self.undecided_rows or self.gave_up)

    def to_json(self) -> JsonObject:
        """Everything as plain values; seconds, counts and scores."""
        count = sum(map(len, self.values))
        return {
            "reward": self.name,
            "code": self.location,
            "rows": len(self.values),
            "completions": count,
            "calls": self.calls,
            "call_seconds": {
                "median": median(self.call_seconds) if self.call_seconds else None,
                "max": max(self.call_seconds, default=None),
            },
            "distinct_scores": len({*self.scores}),
            "std_within_rows": spread_within_rows(self.values),
            "none": count - len(self.scores) - self.num_errors,
            "errors": [
                {
                    "kind": error.kind,
                    "message": error.message,
                    "frames": error.frames,
                    "count": error.count,
                    "completions": dict(error.completions),
                }
                for error in self.errors.values()
            ],
            "gave_up": self.gave_up,
            "undecided_rows": self.undecided_rows,
            "exploits": [vars(exploit) for exploit in self.exploits],
        }


def probe_reward(reward: Reward, subject: ProbeSubject) -> RewardProbe:
    """Call a reward on every completion of every row, and look for exploits."""
    probe = RewardProbe(reward.name, reward.location)
    reward = lenient_reward(reward)
    late = 0
    for number, row in enumerate(subject.rows):
        result = _score_row(reward, subject, row, number, row.completions)
        probe.calls += len(result.call_results)
        probe.call_seconds.append(result.seconds / max(1, len(result.call_results)))
        failures = result.failures
        values = dict(result.values)
        if len(row.completions) > 1 and _whole_call_raised(failures, len(row.completions)):
            failures, values = _score_alone(reward, subject, row, number)
        _note_failures(probe, row.completions, failures)
        probe.values.append([values.get(i) for i in range(len(row.completions))])
        late += any(failure.kind == "timeout" for failure in failures.values())
        if late >= MAX_TIMEOUTS:
            probe.gave_up = number + 1 < len(subject.rows)
            break
    find_exploits(probe, subject.rows)
    return probe


def weighted_sum(probes: Sequence[RewardProbe], subject: ProbeSubject) -> RewardProbe | None:
    """The score of a run: the weighted sum of all rewards; None for a single one."""
    weights = {reward.name: reward.config.weight for reward in subject.rewards}
    used = [probe for probe in probes if weights[probe.name]]
    if len(used) < 2:
        return None
    summed = RewardProbe("weighted sum", "the training score")
    for rows in zip(*(probe.values for probe in used), strict=False):
        parts = [
            [
                weights[probe.name] * value
                for probe, value in zip(used, column, strict=True)
                if value is not None
            ]
            for column in zip(*rows, strict=True)
        ]
        summed.values.append([sum(part) if part else None for part in parts])
    find_exploits(summed, subject.rows)
    return summed


def find_exploits(probe: RewardProbe, rows: Sequence[ProbeRow]) -> None:
    """Record every trick that scores no less than the best format of the row's right answer.

    If that format scores no more than the worst trick, the reward cannot tell a right answer of any
    format from nothing: the row is undecided, and only higher scores count as exploits.
    """
    for number, (row, values) in enumerate(zip(rows, probe.values, strict=False)):
        scored = [(c, v) for c, v in zip(row.completions, values, strict=True) if v is not None]
        right = [(v, c) for c, v in scored if c.role == "right"]
        tricks = [v for c, v in scored if c.role == "trick"]
        if not right or not tricks:
            continue
        best, form = max(right, key=lambda pair: pair[0])
        undecided = not _is_more(best, min(tricks))
        if undecided:
            probe.undecided_rows.append(number)
        for completion, value in scored:
            strict = undecided or completion.role == "padded"
            beats = _is_more(value, best) or (not strict and not _is_more(best, value))
            if completion.role != "right" and beats:
                probe.exploits.append(
                    Exploit(
                        completion.kind, number, completion.text, value, form.kind, form.text, best
                    )
                )


def spread_within_rows(values: Sequence[Values]) -> float | None:
    """The mean over rows of the standard deviation of a row's scores; None without scores."""
    rows = [[v for v in row if v is not None] for row in values]
    spreads = [pstdev(row) for row in rows if len(row) > 1]
    return fmean(spreads) if spreads else None


def compare_orders(first: Sequence[Values], second: Sequence[Values]) -> JsonObject:
    """How far two rewards rank the completions of a row alike.

    The rank correlation is Spearman's, averaged over rows in which both distinguish completions;
    pairs are alike if both order them so, among the pairs that both distinguish.
    """
    correlations: list[float] = []
    alike = opposed = tied = 0
    for row, other in zip(first, second, strict=False):
        both = [(a, b) for a, b in zip(row, other, strict=True) if a is not None and b is not None]
        if len({a for a, _ in both}) > 1 and len({b for _, b in both}) > 1:
            ranks = [rank_values(column) for column in zip(*both, strict=True)]
            correlations.append(correlation(*ranks))
        for (a, b), (c, d) in combinations(both, 2):
            sign = (a - c) * (b - d)
            alike, opposed = alike + (sign > 0), opposed + (sign < 0)
            tied += (a == c) != (b == d)
    decided = alike + opposed
    return {
        "rank_correlation": fmean(correlations) if correlations else None,
        "rows": len(correlations),
        "pairs_alike": alike / decided if decided else None,
        "pairs": decided,
        "pairs_that_one_ties": tied,
    }


def rank_values(values: Iterable[float]) -> list[float]:
    """The rank of each value from the least, 0; equal values share the mean of their ranks."""
    listed = [*values]
    ordered = sorted(listed)
    ranks: Mapping[float, list[int]] = {value: [] for value in ordered}
    for rank, value in enumerate(ordered):
        ranks[value].append(rank)
    return [fmean(ranks[value]) for value in listed]


def _is_more(value: float, other: float) -> bool:
    return value > other and not math.isclose(value, other, rel_tol=SAME_SCORE, abs_tol=1e-12)


def _score_row(
    reward: Reward, subject: ProbeSubject, row: ProbeRow, number: int,
    chosen: Sequence[ProbeCompletion],
) -> RewardResult:  # fmt: skip
    group = subject.make_group(row, number, chosen)
    calls = StepCalls([reward], [group], subject.context, len(chosen))
    calls.submit_group(0)
    (result,) = calls.wait_for_results()
    return result


def _score_alone(
    reward: Reward, subject: ProbeSubject, row: ProbeRow, number: int
) -> tuple[dict[int, CallFailure], dict[int, float | None]]:
    """Score each completion of a row in a separate call. -> failures and values by position"""
    failures: dict[int, CallFailure] = {}
    values: dict[int, float | None] = {}
    for i, completion in enumerate(row.completions):
        result = _score_row(reward, subject, row, number, [completion])
        if result.failures:
            failures[i] = result.failures[0]
        else:
            values[i] = result.values.get(0)
    return failures, values


def _whole_call_raised(failures: Mapping[int, CallFailure], count: int) -> bool:
    kinds = {failure.kind for failure in failures.values()}
    return len(failures) == count and kinds == {"exception"}


def _note_failures(
    probe: RewardProbe, tried: Sequence[ProbeCompletion], failures: Mapping[int, CallFailure]
) -> None:
    for i, failure in failures.items():
        last = (failure.message.splitlines() or [""])[-1]
        error = ProbeErrors(failure.kind, last, failure.frames)
        error = probe.errors.setdefault((failure.kind, last), error)
        error.count += 1
        error.completions[tried[i].kind] += 1
