"""What a run says: metrics.jsonl, samples, the terminal, and advice. One rank writes.

metrics.jsonl is the truth and is always written: strict JSON, one line per logged step, means
weighted by counts over the steps since the last line, extremes true, counters their last value.
"""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_cli import measures
from rloo_cli.advice import Advisor
from rloo_cli.display import Display
from rloo_cli.files import write_text
from rloo_cli.rollout import Batch, Group

if TYPE_CHECKING:
    from rloo_cli.parts import Run

Row = dict[str, Any]
COUNTERS = ("step", "updates", "episode", "epoch", "num_tokens", "eps", "learning_rate", "lr")
ALIASES = {  # ours -> how TRL spells it
    "sampling/logp_diff_mean": "sampling/sampling_logp_difference/mean",
    "sampling/logp_diff_max": "sampling/sampling_logp_difference/max",
}


class Log:
    """Writes what a run did into its folder, and shows it."""

    def __init__(self, folder: Path, every: int, samples_every: int, aliases: bool):
        self.folder, self.every = folder, every
        self.samples_every, self.aliases = samples_every, aliases
        self.rows: list[Row] = []  # as written
        self.pending: list[Row] = []  # steps since the last line
        self.display: Display | None = None
        self.advisor = Advisor()
        self.said: set[str] = set()

    def due(self, step: int) -> bool:
        """Whether the `step`-th step, counted from 1, is written."""
        return step % self.every == 0

    def note(self, text: str) -> None:
        """A line that stays."""
        if self.display is not None:
            self.display.note(text)

    def phase(self, name: str) -> None:
        """What is going on now."""
        if self.display is not None:
            self.display.phase(name)

    def step(self, run: "Run", batch: Batch, updates: measures.Updates) -> None:
        """Take in one finished step; write a line when it is due, and its samples."""
        for note in batch.notes:
            if note[:40] not in self.said:  # once per run, not once per step
                self.said.add(note[:40])
                self.note(note)
        state, settings = run.state, run.config.algorithm
        row: Row = measures.of_rollouts(batch)
        row |= measures.of_advantages(batch, getattr(settings, "beta", 0.0)) | updates.row()
        row |= run.clock.lap()
        row |= _speed(batch, row["step_time"])
        row |= {
            "num_tokens": state.tokens,
            "episode": state.episodes,
            "eps": state.episodes / run.clock.elapsed(),
            "epoch": state.place / len(run.prompts),
            "updates": state.updates,
            "data/dropped_long": run.prompts.dropped,
            "data/truncated": run.prompts.truncated,
        }
        self.pending.append({"step": state.step} | row)
        samples = samples_of(run, batch)
        if state.step % self.samples_every == 0:
            self.save_samples(f"step_{state.step:06d}", samples)
        if self.due(state.step) or state.step == run.steps:
            row = self.write(merge(self.pending))
            self.pending = []
            if self.display is not None:
                self.display.step(row, samples[:: max(1, settings.num_generations)])
            for advice in self.advisor.look(row):
                self.note(f"advice: {advice}")

    def held_out(self, row: Row) -> None:
        """Write and show the scores of an evaluation."""
        row = self.write(row)
        if self.display is not None:
            self.display.step(row)

    def write(self, row: Row) -> Row:
        """Append one line to metrics.jsonl; values that are not finite are left out."""
        row = {k: v for k, v in row.items() if not isinstance(v, float) or math.isfinite(v)}
        if self.aliases:
            row |= {theirs: row[ours] for ours, theirs in ALIASES.items() if ours in row}
            row |= {"rewards" + k[6:]: v for k, v in row.items() if k.startswith("reward/")}
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
        self.rows.append(row)
        return row

    def save_samples(self, name: str, samples: list[Row]) -> None:
        """Write every sample of a step to samples/<name>.jsonl."""
        lines = "".join(json.dumps(s, ensure_ascii=False, default=str) + "\n" for s in samples)
        write_text(self.folder / "samples" / f"{name}.jsonl", lines)

    def close(self) -> None:
        """Give the terminal back."""
        if self.display is not None:
            self.display.close()


def merge(rows: list[Row]) -> Row:
    """Several steps -> one line: means over steps that have a value, extremes, last counters."""
    merged: Row = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if name in row]
        last = name.rpartition("/")[2]
        if name in COUNTERS or name.startswith("data/"):
            merged[name] = values[-1]
        elif last == "min" or last.startswith("min_") or last.endswith("_min"):
            merged[name] = min(values)
        elif last in ("max", "abs_max") or last.startswith("max_") or last.endswith("_max"):
            merged[name] = max(values)
        else:
            merged[name] = sum(values) / len(values)
    return merged


def samples_of(run: "Run", batch: Batch) -> list[Row]:
    """Every row of a batch, as kept in samples/."""
    k = batch.score.shape[1]
    columns = {"score": batch.score, "shaped": batch.shaped, "kl": batch.kl}
    columns |= {"reward": batch.reward, "advantage": batch.advantage}
    rows = []
    for p, group in enumerate(batch.groups):
        for j in range(k):
            row = sample(run, group, j) | {
                name: float(values[p, j]) if batch.scorable[p, j] else None
                for name, values in columns.items()
                if values is not None
            }
            said = {n: float(batch.raw[f, p, j]) for f, n in enumerate(batch.names)}
            row["rewards"] = {n: None if math.isnan(v) else v for n, v in said.items()}
            row |= {name: values[p * k + j] for name, values in batch.extras.items()}
            rows.append(row)
    return rows


def sample(run: "Run", group: Group, k: int) -> Row:
    """What was sampled, and how."""
    rollout = group.rollouts[k]
    return {
        "draw": group.draw,
        "k": k,
        "prompt": group.prompt,
        "completion": rollout.text,
        "finish_reason": rollout.finish_reason,
        "terminated": rollout.terminated,
        "prompt_length": len(group.prompt_ids),
        "completion_length": len(rollout.completion_ids),
        "seed": rollout.seed,
        "weight_version": rollout.weight_version,
    }


def _speed(batch: Batch, seconds: float) -> Row:
    rollouts = [(g, r) for g in batch.groups for r in g.rollouts]
    tokens = sum(len(g.prompt_ids) + r.length for g, r in rollouts)
    widest = max(len(g.prompt_ids) + len(r.completion_ids) for g, r in rollouts)
    return {
        "perf/completions_per_s": len(rollouts) / seconds,
        "perf/tokens_per_s": tokens / seconds,
        "perf/padding_frac": 1 - tokens / (widest * len(rollouts)),
    }
