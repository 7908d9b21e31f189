"""What would another reward have taught? Rescores completions, compares advantages.

The completions, the KL and the masks are the recorded ones; scores, shaping and advantages are
computed by the run's own code (`generation/common/rollouts.py`, `train/advantages.py`). No model is
needed. The result cannot show which completions a policy trained with this reward would have
sampled. Imports torch, for its tensors.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from rloo_cli.algorithms.common.base import load_algorithm
from rloo_cli.config import registry
from rloo_cli.config.schema import RewardConfig, RunConfig
from rloo_cli.data import rollout_files
from rloo_cli.data.batch import Batch, Group, Prompt
from rloo_cli.data.prompts import Prompts
from rloo_cli.data.rollout_record import RecordedStep, read_rollout_record
from rloo_cli.distributed.world import cpu_world
from rloo_cli.generation.common.rollouts import Rollouts
from rloo_cli.inspection.replay_builder import NoSampler
from rloo_cli.inspection.step_replay import check_recorded_steps, read_attempt_config
from rloo_cli.reporting.metrics_lines import read_training_lines
from rloo_cli.rewards.engine.build import Reward, build_reward
from rloo_cli.run import Run, RunState
from rloo_cli.train.advantages import finish_advantages
from rloo_cli.utils.files import JsonObject
from rloo_cli.utils.timers import StepTimer

REWARD_NAME = "what_if"
EXAMPLES = 5  # flipped completions kept per step
FloatArray = npt.NDArray[np.float64]


@dataclass
class StepVerdict:
    """One step, or all of them, under another reward. Counts are of completions."""

    step: int | None  # None = all steps together
    completions: int
    compared: int  # with a score under both
    correlation: float | None  # Spearman's, over all of them; None = one side is constant
    correlation_in_groups: float | None  # its mean over the groups in which neither is constant
    groups_compared: int
    advantages: int  # different from 0 under both
    flipped: int  # with a changed sign
    silenced: int  # 0 only under the new reward
    woken: int  # 0 only under the old one
    largest_change: float  # of an advantage
    seconds: float = 0.0  # taken by the new reward

    @property
    def flipped_share(self) -> float | None:
        """The share of advantages with a changed sign, of those that differ from 0 under both."""
        return self.flipped / self.advantages if self.advantages else None

    def to_json(self) -> JsonObject:
        """Its fields as plain values."""
        return dict(vars(self)) | {"flipped_share": self.flipped_share}


@dataclass
class RewardVerdict:
    """What another reward would have taught, over recorded steps."""

    reward: str
    steps: list[StepVerdict] = field(default_factory=list)
    whole: StepVerdict | None = None
    examples: list[JsonObject] = field(default_factory=list)  # the largest flips first
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> JsonObject:
        """Its fields as plain values."""
        return {
            "reward": self.reward,
            "steps": [step.to_json() for step in self.steps],
            "all": self.whole.to_json() if self.whole is not None else None,
            "examples": self.examples,
            "notes": self.notes,
        }


@dataclass
class _Tables:
    """Scores and advantages of one step's completions, old and new. (P, K) each."""

    old_score: FloatArray  # NaN if missing
    new_score: FloatArray
    old_advantage: FloatArray
    new_advantage: FloatArray


def judge_reward(
    folder: Path,
    spec: str,
    steps: Sequence[int] | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> RewardVerdict:
    """Score recorded steps (None = all) of the run in `folder` with the reward `file.py:name`.

    Raises ConfigError for an unrecorded step or a reward that cannot be loaded,
    RewardError if it fails, DataError for a damaged record.
    """
    chosen = _chosen_steps(folder, steps)
    verdict, tables = RewardVerdict(spec), []
    reward: Reward | None = None
    notes: dict[str, None] = {}
    for step in chosen:
        on_progress(f"scoring step {step}")
        record = read_rollout_record(folder, step)
        settings = read_attempt_config(folder, record)
        reward = reward or build_reward(
            REWARD_NAME, _reward_config(next(iter(settings.rewards.values())), spec)
        )
        batch = _scored_batch(folder, record, settings, reward)
        table = _step_tables(record, batch)
        tables.append(table)
        seconds = float(batch.facts.get(f"reward/{REWARD_NAME}/time", 0.0))
        verdict.steps.append(_step_verdict(step, [table], seconds))
        verdict.examples += _flipped_examples(record, table)
        notes |= dict.fromkeys(_step_notes(record, batch, settings.algorithm.needs_greedy))
    total = sum(step.seconds for step in verdict.steps)
    verdict.whole = _step_verdict(None, tables, total)
    verdict.examples.sort(key=lambda e: -abs(e["old_advantage"] - e["new_advantage"]))
    verdict.notes = list(notes)
    return verdict


def _chosen_steps(folder: Path, steps: Sequence[int] | None) -> list[int]:
    recorded = rollout_files.list_rollout_files(folder)
    check_recorded_steps(folder, steps or [], recorded)
    return list(steps or recorded)


def _reward_config(first: RewardConfig, spec: str) -> RewardConfig:
    """The reward as the run's only one, with the common keys of its first reward."""
    common = {name: getattr(first, name) for name in RewardConfig.model_fields}
    common |= {"type": "function", "weight": 1.0, "only": {}, "workers": 0, "cache": False}
    common |= {"scope": "batch", "on_error": "raise"}
    config_class = registry.config_class("rewards", "function")
    built: RewardConfig = config_class(**common, path=spec, kwargs={})
    return built


def _scored_batch(folder: Path, record: RecordedStep, settings: RunConfig, reward: Reward) -> Batch:
    """The step's batch with the reward's scores, and its advantages under the recorded KL."""
    algorithm, world = load_algorithm(settings.algorithm), cpu_world()
    # Scoring needs only this from prompts: no data set is opened.
    prompts = cast(Prompts, SimpleNamespace(conversational=bool(record.head["conversational"])))
    clock = StepTimer()
    rollouts = Rollouts(settings, algorithm, prompts, NoSampler(), [reward], clock, world)
    state = RunState(**record.head["state"])
    history = read_training_lines(folder / "metrics.jsonl", state.step)
    before = record.batch
    groups = [Group(g.prompt_offset, g.example, g.prompt, g.prompt_ids) for g in before.groups]
    for group, recorded in zip(groups, before.groups, strict=True):
        group.take_rollouts(recorded.rollouts)
    head = record.head
    seen = state.trainer_state(head["num_steps"], head["num_prompts"], settings, history)
    batch = rollouts.recorded_batch(before, groups, seen)
    batch.kl = before.kl
    for group, recorded in zip(batch.groups, before.groups, strict=True):
        for name in ("old_logp", "kl_logp", "ref_logp", "value"):
            setattr(group, name, getattr(recorded, name))
    # The loop's own function; it needs only these three parts of a run.
    parts = SimpleNamespace(algorithm=algorithm, world=world, state=state)
    finish_advantages(cast(Run, parts), batch, [])
    return batch


def _step_tables(record: RecordedStep, batch: Batch) -> _Tables:
    def scores(found: Batch) -> FloatArray:
        shown = found.score if found.plain is None else found.plain
        return np.asarray(shown.masked_fill(~found.scorable, math.nan).numpy(), dtype=np.float64)

    def advantages(found: Batch) -> FloatArray:
        if found.advantage is None:
            return np.zeros(tuple(found.score.shape))
        return np.asarray(found.advantage.numpy(), dtype=np.float64)

    before = record.batch
    return _Tables(scores(before), scores(batch), advantages(before), advantages(batch))


def _step_verdict(step: int | None, tables: Sequence[_Tables], seconds: float) -> StepVerdict:
    old, new = (
        np.concatenate([getattr(t, name).reshape(-1) for t in tables])
        for name in ("old_score", "new_score")
    )
    a, b = (
        np.concatenate([getattr(t, name).reshape(-1) for t in tables])
        for name in ("old_advantage", "new_advantage")
    )
    both = ~(np.isnan(old) | np.isnan(new))
    in_groups = [
        value
        for table in tables
        for x, y in zip(table.old_score, table.new_score, strict=True)
        if (value := rank_correlation(x, y)) is not None
    ]
    return StepVerdict(
        step=step,
        completions=len(old),
        compared=int(both.sum()),
        correlation=rank_correlation(old, new),
        correlation_in_groups=float(np.mean(in_groups)) if in_groups else None,
        groups_compared=len(in_groups),
        advantages=int(((a != 0) & (b != 0)).sum()),
        flipped=int((a * b < 0).sum()),
        silenced=int(((a != 0) & (b == 0)).sum()),
        woken=int(((a == 0) & (b != 0)).sum()),
        largest_change=float(np.abs(a - b).max(initial=0.0)),
        seconds=seconds,
    )


def rank_correlation(first: FloatArray, second: FloatArray) -> float | None:
    """Spearman's correlation of two rows of numbers, equal ones with their mean rank. (n,), (n,) ->

    Pairs with a NaN are left out. None where one side is constant, or fewer than two pairs remain.
    """
    both = ~(np.isnan(first) | np.isnan(second))
    ranks = [_mean_ranks(values[both]) for values in (first, second)]
    if len(ranks[0]) < 2 or any(np.ptp(r) == 0 for r in ranks):
        return None
    centred = [r - r.mean() for r in ranks]
    norm = math.sqrt(float(centred[0] @ centred[0]) * float(centred[1] @ centred[1]))
    return float(np.clip(float(centred[0] @ centred[1]) / norm, -1.0, 1.0))


def _mean_ranks(values: FloatArray) -> FloatArray:
    """Ranks from 0; equal values share their mean rank. (n,) -> (n,)"""
    _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: FloatArray = (ends - (counts + 1) / 2)[index.reshape(-1)]
    return ranks


def _flipped_examples(record: RecordedStep, tables: _Tables) -> list[JsonObject]:
    """The completions of a step with the largest advantage flips."""
    product = tables.old_advantage * tables.new_advantage
    change = np.where(product < 0, np.abs(tables.old_advantage - tables.new_advantage), 0.0)
    order = np.argsort(-change, axis=None, kind="stable")[:EXAMPLES]
    examples = []
    for p, k in (divmod(int(index), change.shape[1]) for index in order):
        if not change[p, k]:
            break
        group = record.batch.groups[p]
        examples.append({
            "step": record.step,
            "draw": group.prompt_offset,
            "k": k,
            "prompt": prompt_text(group.prompt),
            "completion": group.rollouts[k].text,
            "old_score": float(tables.old_score[p, k]),
            "new_score": float(tables.new_score[p, k]),
            "old_advantage": float(tables.old_advantage[p, k]),
            "new_advantage": float(tables.new_advantage[p, k]),
        })  # fmt: skip
    return examples


def prompt_text(prompt: Prompt) -> str:
    """A prompt as one text; of a conversation its messages, one after the other."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{m['role']}: {m['content']}" for m in cast(list[Any], prompt))


def _step_notes(record: RecordedStep, batch: Batch, needs_greedy: bool) -> list[str]:
    """The limits of the verdict, with the same text for every step."""
    notes = []
    if record.lost_columns:
        names = ", ".join(record.lost_columns)
        notes.append(f"columns that the record only holds as text: {names}")
    now_active = {*batch.active} - {*record.batch.active}
    if now_active and record.batch.kl is not None:
        notes.append("some groups were not trained on: their KL is unknown and counts as 0")
    if needs_greedy:
        notes.append("greedy completions were not recorded: their scores are the old reward's")
    return notes
