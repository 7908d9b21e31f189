"""Scores the held-out completions of a record again, with the rewards of its config.

Rewards get the recorded prompts, texts and columns, in the batches of the evaluation. Of the tokens
samples hold only the number, which is all that the shipped rewards read. A reward that loads a
model, or a user's that reads tokens, cannot be checked. Imports torch.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from rloo_cli.algorithms.common.base import load_algorithm
from rloo_cli.algorithms.common.config import Switches
from rloo_cli.config import check, registry
from rloo_cli.config.schema import TargetConfig
from rloo_cli.config.user_code import user_code_notes
from rloo_cli.data.batch import Group, Rollout
from rloo_cli.data.bin_packing import split_chunks
from rloo_cli.evaluation.evaluate import scored_fields
from rloo_cli.evaluation.metrics import eval_set_metrics
from rloo_cli.inspection.run_seal import RECORD_FILE, score_of_line
from rloo_cli.inspection.sample_files import read_sample_records
from rloo_cli.reporting import eval_lines
from rloo_cli.reporting.metrics_lines import read_metrics_lines, read_training_lines
from rloo_cli.rewards.engine.arguments import RewardContext, TrainerState
from rloo_cli.rewards.engine.build import Reward
from rloo_cli.rewards.engine.ready import build_rewards
from rloo_cli.rewards.engine.scoring import score_groups
from rloo_cli.run import RunState
from rloo_cli.utils.errors import DataError, RunError, refuse
from rloo_cli.utils.files import JsonObject, read_json

NOT_RECORDED = (
    "completion_ids", "completions_ids", "prompt_ids", "sampled_ids", "behaviour_logps",
    "environments", "environment_rewards",
)  # fmt: skip
SAME_SCORE = 1e-9  # relative; a smaller difference is rounding
INVALID_CONTENT = (
    OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError,
)  # fmt: skip


@dataclass
class RecordedScore:
    """The score of a record, computed again."""

    score: JsonObject
    completions: int = 0
    problems: list[str] = field(default_factory=list)  # each begins with the file at fault


def recompute_score(
    folder: Path, facts: JsonObject, say: Callable[[str], None] = print
) -> RecordedScore:
    """Compute the score of the record in `folder` from its samples, and compare all it says.

    Raises DataError for content that no run writes, ConfigError for a reward that cannot be
    checked, RewardError for one that fails.
    """
    try:
        return _recompute(folder, facts, say)
    except RunError:
        raise
    except INVALID_CONTENT as error:
        fix = "make the record again: rloo record RUN --out FOLDER"
        why = f"{type(error).__name__}: {error}"
        refuse(str(folder), "the record cannot be read", fix, why, error=DataError)


def _recompute(folder: Path, facts: JsonObject, say: Callable[[str], None]) -> RecordedScore:
    settings = check.read_config(folder / "config.yaml")
    for note in [n for n in user_code_notes(settings) if n.startswith("reward.")]:
        say(note)
    rewards = build_rewards(settings.rewards, {})
    _check_rewards(rewards)
    step, metric = facts["score"]["step"], facts["score"]["metric"]
    config = load_algorithm(settings.algorithm).config
    known = {f.name for f in fields(RunState)}
    progress = RunState(**{n: v for n, v in facts["progress"].items() if n in known})
    history = read_training_lines(folder / "metrics.jsonl", progress.step)
    state = progress.trainer_state(facts["max_steps"], facts["prompts"], settings, history)
    metrics: JsonObject = {}
    recomputed = RecordedScore({})
    for name in settings.held_out:
        path = folder / "samples" / f"{eval_lines.eval_samples_name(name, step)}.jsonl"
        samples = read_sample_records(path)
        again, rates = _score_samples(samples, rewards, settings.eval.batch_size, config, state)
        recomputed.problems += _differing_samples(str(path.relative_to(folder)), samples, again)
        recomputed.completions += len(again)
        metrics |= eval_set_metrics(name, again, settings.eval, rates)
    recomputed.score = {**score_of_line(metrics, metric), "step": step}
    lines = [dict(m) for m in read_metrics_lines(folder / "metrics.jsonl") if m["step"] == step]
    line = next((m for m in lines if eval_lines.is_evaluation(m)), {})
    recomputed.problems += [
        f"metrics.jsonl: {name} of step {step} is {line.get(name)}, recomputed {value}"
        for name, value in metrics.items()
        if not _is_same(line.get(name), value)
    ]
    said = {name: facts["score"].get(name) for name in recomputed.score}
    recomputed.problems += [
        f"{RECORD_FILE}: {name} of the score is {value}, recomputed {recomputed.score[name]}"
        for name, value in said.items()
        if not _is_same(value, recomputed.score[name])
    ]
    if facts["seed"] != settings.seed:
        wrong = f"the seed is {facts['seed']}, and {settings.seed} in config.yaml"
        recomputed.problems.append(f"{RECORD_FILE}: {wrong}")
    summary = read_json(folder / "summary.json")
    if facts["target"] != summary.get("target"):
        recomputed.problems.append(f"{RECORD_FILE}: the target is not that of summary.json")
    elif facts["target"] is not None:
        recomputed.problems += _target_problems(facts["target"], settings.target, metrics)
    return recomputed


def _target_problems(said: JsonObject, target: TargetConfig, metrics: JsonObject) -> list[str]:
    """What a record says wrongly about its target."""
    least, low = target.at_least, metrics.get(f"{target.metric}/low")
    right = {
        "metric": target.metric,
        "at_least": least,
        "reached": least is not None and low is not None and low >= least,
    }
    wrong = [name for name, value in right.items() if said[name] != value]
    return [f"{RECORD_FILE}: the target's {n} is {said[n]}, expected {right[n]}" for n in wrong]


def _check_rewards(rewards: Sequence[Reward]) -> None:
    """Raises ConfigError for a reward that needs more than the texts that samples hold."""
    for reward in rewards:
        loads = hasattr(registry.registered_module("rewards", reward.config.type), "ready")
        if loads or (reward.config.type == "function" and reward.reads_any(NOT_RECORDED)):
            needs = "loads a model" if loads else "reads tokens"
            why = f"it {needs}, and samples hold only texts"
            fix = "a record of a run whose rewards read texts and columns"
            refuse(f"reward.{reward.name}", "this score cannot be recomputed", fix, why)


def _score_samples(
    samples: Sequence[JsonObject], rewards: list[Reward], batch_size: int, config: Switches,
    state: TrainerState,
) -> tuple[list[JsonObject], dict[str, float]]:  # fmt: skip
    """The samples with recomputed scores, in their order; each reward's share of failures."""
    context = RewardContext(isinstance(samples[0]["prompt"], list), state)
    again: list[JsonObject] = []
    failed: dict[str, float] = defaultdict(float)
    for greedy in (True, False):
        by_prompt: dict[int, list[JsonObject]] = defaultdict(list)
        for sample in samples:
            if sample["greedy"] is greedy:
                by_prompt[sample["draw"]].append(sample)
        k = max(map(len, by_prompt.values()), default=1)
        for chunk in split_chunks([*by_prompt.values()], max(1, batch_size // k)):
            scores = score_groups(rewards, [_recorded_group(s) for s in chunk], context)
            fields_of = scored_fields(config, scores)
            of_chunk = [sample for siblings in chunk for sample in siblings]
            again += [s | new for s, new in zip(of_chunk, fields_of, strict=True)]
            for name, rate in scores.error_rate.items():
                failed[name] += rate * len(of_chunk)
    return again, {name: count / len(again) for name, count in failed.items()}


def _recorded_group(siblings: Sequence[JsonObject]) -> Group:
    """Recorded completions of a prompt; every token id is 0, only their number counts."""
    first = siblings[0]
    rollouts = [
        Rollout(
            [0] * s["completion_length"], s["completion"], s["finish_reason"], s["terminated"],
            s["seed"], s["weight_version"],
        )
        for s in siblings
    ]  # fmt: skip
    return Group(first["draw"], first["row"], first["prompt"], [0], rollouts)


def _differing_samples(
    name: str, samples: Sequence[JsonObject], again: Sequence[JsonObject]
) -> list[str]:
    """A line for the first sample of a file whose recorded score is not the recomputed one."""
    different = [
        (number, old["score"], new["score"])
        for number, (old, new) in enumerate(zip(samples, again, strict=True), 1)
        if not _is_same(old["score"], new["score"])
        or any(not _is_same(old["rewards"].get(n), v) for n, v in new["rewards"].items())
    ]
    if not different:
        return []
    number, old, new = different[0]
    others = f"; {len(different) - 1} more differ" if different[1:] else ""
    return [f"{name}:{number}: its score is {old}, recomputed {new}{others}"]


def _is_same(recorded: object, value: object) -> bool:
    numbers = isinstance(recorded, int | float) and isinstance(value, int | float)
    if numbers:
        return math.isclose(recorded, value, rel_tol=SAME_SCORE, abs_tol=SAME_SCORE)  # type: ignore[arg-type]
    return recorded == value
