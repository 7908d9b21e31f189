"""Compares a recomputed step with its record, in the order of causes.

Scores come first, reward by reward, then the values derived from them, the log-probabilities token
by token, KL, rewards, advantages, and the loss and gradient norm of each update.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rloo_cli.data.batch import Batch
from rloo_cli.data.rollout_record import RecordedStep
from rloo_cli.reporting.update_metrics import UpdateMetrics
from rloo_cli.run import Run

# Attributes of a batch and of its groups -> their names, in the order in which they are
# computed. Tables are (P, K); columns have a number for each token.
SCORE_TABLES = {
    "score": "score", "shaped": "score after shaping", "scorable": "whether it has a score",
    "masked": "whether it is masked", "greedy": "score of the greedy completion",
}  # fmt: skip
TOKEN_LOGPS = {
    "old_logp": "log-probability", "kl_logp": "log-probability at the KL's temperature",
    "ref_logp": "log-probability of the reference", "value": "value",
    "entropy": "entropy of a token",
}  # fmt: skip
ADVANTAGE_TABLES = {
    "kl": "KL", "reward": "reward minus KL", "usable": "whether it has an advantage",
    "advantage": "advantage",
}  # fmt: skip
TOKEN_ADVANTAGES = {"advantage": "advantage of a token", "returns": "return of a token"}
UPDATE_NUMBERS = {"loss": "loss", "grad_norm": "gradient norm", "learning_rate": "learning rate"}


@dataclass(frozen=True)
class StepDifference:
    """One differing number of a step."""

    what: str
    recorded: float | None  # None = missing
    computed: float | None
    draw: int | None = None  # the prompt's position in the order of the data
    row: int | None = None  # in the data
    completion: int | None = None  # of the prompt's K, from 0
    token: int | None = None  # among those sampled by the policy, from 0
    text: str = ""  # the token's
    update: int | None = None  # of the step's optimizer updates, from 1

    @property
    def location(self) -> str:
        """Human-readable location."""
        parts = []
        if self.update is not None:
            parts.append(f"update {self.update}")
        if self.draw is not None:
            row = "" if self.row is None else f" (row {self.row} of the data)"
            parts.append(f"draw {self.draw}{row}")
        if self.completion is not None:
            parts.append(f"completion {self.completion}")
        if self.token is not None:
            parts.append(f"token {self.token} {self.text!r}")
        return ", ".join(parts)


@dataclass
class StepComparison:
    """Everything that was compared, by name."""

    compared: dict[str, int] = field(default_factory=dict)  # numbers
    differing: dict[str, int] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)  # absolute differences
    first: StepDifference | None = None
    updates: dict[str, list[list[float]]] = field(default_factory=dict)  # [recorded, computed]


Locate = Callable[[int], StepDifference]  # a flat index -> where that is


def compare_steps(
    record: RecordedStep, batch: Batch, updates: UpdateMetrics, run: Run, tolerance: float
) -> StepComparison:
    """Compare a step's batch and updates with its record. `tolerance`: relative and absolute."""
    result = StepComparison()
    for what, recorded, computed, locate in _pairs(record, batch, updates, run):
        _compare(result, what, recorded, computed, locate, tolerance)
    for name, called in UPDATE_NUMBERS.items():
        pair = record.head["updates"].get(name, []), updates.scalars.get(name, [])
        result.updates[called] = [list(values) for values in zip(*pair, strict=False)]
    return result


def _pairs(
    record: RecordedStep, batch: Batch, updates: UpdateMetrics, run: Run
) -> Iterator[tuple[str, Tensor | None, Tensor | None, Locate]]:
    """(what, recorded, computed, where) in the order of the causes; flat tensors."""
    before, k = record.batch, record.batch.score.shape[1]

    def at(index: int) -> StepDifference:
        draw = before.groups[index // k].prompt_offset
        row = int(run.prompts.example_numbers[run.prompts.index_at(draw)])
        return StepDifference("", None, None, draw, row, index % k)

    def at_group(index: int) -> StepDifference:
        return at(index * k)

    for f, name in enumerate(before.names):
        computed = batch.raw[batch.names.index(name)] if name in batch.names else None
        yield f"reward {name}", before.raw[f], computed, at
    for name, called in SCORE_TABLES.items():
        locate = at_group if name == "greedy" else at
        yield called, getattr(before, name), getattr(batch, name), locate
    yield "groups that are trained on", _active(before), _active(batch), at_group
    for name, called in TOKEN_LOGPS.items():
        yield _token_pair(name, called, record, batch, run, at)
    for name, called in ADVANTAGE_TABLES.items():
        yield called, getattr(before, name), getattr(batch, name), at
    for name, called in TOKEN_ADVANTAGES.items():
        yield _token_pair(name, called, record, batch, run, at)
    for name, called in UPDATE_NUMBERS.items():
        numbers = [record.head["updates"].get(name, []), updates.scalars.get(name, [])]
        recorded, computed = (torch.tensor(v, dtype=torch.float64) for v in numbers)
        yield called, recorded, computed, lambda i: StepDifference("", None, None, update=i + 1)


def _active(batch: Batch) -> Tensor:
    return torch.tensor([i in batch.active for i in range(len(batch.groups))])


def _token_pair(
    name: str, called: str, record: RecordedStep, batch: Batch, run: Run, at: Locate
) -> tuple[str, Tensor | None, Tensor | None, Locate]:
    """A column of all groups' tokens; NaN for groups that lack it."""
    lengths = [r.length for g in record.batch.groups for r in g.rollouts]
    ends = torch.tensor(lengths).cumsum(0)

    def flat(groups: Batch) -> Tensor | None:
        columns = [getattr(group, name) for group in groups.groups]
        if not any(columns):
            return None
        return torch.cat([
            part.double()
            for group, column in zip(groups.groups, columns, strict=True)
            for part in column
            or [torch.full((r.length,), math.nan) for r in group.rollouts]
        ])  # fmt: skip

    def locate(index: int) -> StepDifference:
        row = int(torch.searchsorted(ends, index, right=True))
        token, found = index - int(ends[row]) + lengths[row], at(row)
        k = len(record.batch.groups[0].rollouts)
        ids = record.batch.groups[row // k].rollouts[row % k].sampled_ids
        text = str(run.tokenizer.decode([ids[token]]))
        return StepDifference("", None, None, found.draw, found.row, found.completion, token, text)

    return called, flat(record.batch), flat(batch), locate


def _compare(
    result: StepComparison,
    what: str,
    recorded: Tensor | None,
    computed: Tensor | None,
    locate: Locate,
    tolerance: float,
) -> None:
    """Compare two flat tensors of the same numbers; NaN is equal to NaN."""
    if recorded is None and computed is None:
        return
    one, other = (None if t is None else t.detach().cpu().double().reshape(-1)
                  for t in (recorded, computed))  # fmt: skip
    sizes = [0 if t is None else len(t) for t in (one, other)]
    result.compared[what] = max(sizes)
    if one is None or other is None or sizes[0] != sizes[1]:
        result.differing[what] = abs(sizes[0] - sizes[1])
        at = StepDifference(f"numbers of {what}", float(sizes[0]), float(sizes[1]))
        result.first = result.first or at
        return
    equal = (one == other) | (one.isnan() & other.isnan())
    if tolerance:
        equal |= torch.isclose(one, other, rtol=tolerance, atol=tolerance)
    gap = (one - other).abs().nan_to_num(0.0)
    result.largest[what] = float(gap.max()) if len(gap) else 0.0
    if bool(equal.all()):
        return
    index = int((~equal).nonzero()[0])
    result.differing[what] = int((~equal).sum())
    if result.first is None:
        numbers = [None if math.isnan(float(t[index])) else float(t[index]) for t in (one, other)]
        found = locate(index)
        result.first = StepDifference(
            what, numbers[0], numbers[1], found.draw, found.row, found.completion, found.token,
            found.text, found.update,
        )  # fmt: skip
