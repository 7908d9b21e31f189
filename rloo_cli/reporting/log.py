"""What a run says: metrics.jsonl, samples, the terminal, and advice. One rank writes.

metrics.jsonl is the truth and is always written: strict JSON, one line per logged step, means
weighted by counts over the steps since the last line, extremes true, counters their last value.
"""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rloo_cli.data.batch import Batch, Group
from rloo_cli.reporting.advice import Advisor
from rloo_cli.reporting.curves import Drawer
from rloo_cli.reporting.display import KEPT, Display
from rloo_cli.utils.fault_injection import fault
from rloo_cli.utils.files import check_present, write_text

Row = dict[str, Any]
COUNTERS = ("step", "updates", "episode", "epoch", "num_tokens", "eps", "learning_rate", "lr")
OVER = {  # a count of `step_metrics.counts` -> the means that were taken over it
    "ended": "completions/mean_terminated_length",
    "scored": "reward reward_std_batch",
    "groups": "reward_std frac_reward_zero_std",
    "usable": "advantages/mean advantages/std advantages/zero_frac",
    "trained": "objective/scores objective/kl objective/non_score_reward objective/rlhf_reward",
    "updates": "loss policy_loss loss/policy_avg loss/value_avg kl_loss grad_norm"
    " grad_clip_fraction",
    "units": "clip_ratio/low_mean clip_ratio/high_mean clip_ratio/region_mean delta_ratio"
    " policy/approxkl_avg policy/clipfrac_avg val/ratio val/ratio_var",
    "tokens": "kl sampling/missing_frac",
    "value_tokens": "val/clipfrac_avg value/explained_variance",
    "entropy_tokens": "entropy policy/entropy_avg",
    "sequences": "objective/entropy sampling/kl",
    "gap_tokens": "sampling/logp_diff_mean sampling/logp_diff_rms",
    "weights": "sampling/ess sampling/capped_frac sampling/masked_frac"
    " sampling/importance_sampling_ratio/mean",
    "step_time": "perf/completions_per_s perf/tokens_per_s perf/tokens_per_s_per_gpu"
    " perf/rollout_wait_frac perf/mfu",
}
WEIGHED_BY = {mean: count for count, means in OVER.items() for mean in means.split()}
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
        self.history: list[Row] = []  # those of training, which rewards may look back at
        self.pending: list[Row] = []  # steps since the last line
        self.counts: list[Row] = []  # and what their means were taken over
        self.display: Display | None = None
        self.writes = True  # false in all ranks but the first
        self.same: Callable[[Row], Row] = dict  # rank 0's line, on every rank
        self.now = "the start"  # the phase
        self.advisor = Advisor()
        self.drawer = Drawer(folder)
        self.said: set[str] = set()

    def due(self, step: int, steps: int) -> bool:
        """Whether the `step`-th of `steps` steps, counted from 1, is written: the last always."""
        return step % self.every == 0 or step == steps

    def note(self, text: str) -> None:
        """A line that stays."""
        if self.display is not None:
            self.display.note(text)

    def phase(self, name: str) -> None:
        """What is going on now."""
        self.now = name
        if self.display is not None:
            self.display.phase(name)

    def progress(self, text: str) -> None:
        """How far that has come, where it takes long."""
        if self.display is not None:
            self.display.progress(text)

    def step(self, row: Row, counts: Row, batch: Batch, steps: int) -> None:
        """Take in one finished step of `steps`; write a line when it is due, and its samples.

        row: its metrics, `step` among them. counts: what its means were taken over.
        """
        for note in batch.notes:
            kind = re.sub(r"\d+", "", note)[:40]
            if kind not in self.said:  # once per run, not once per step
                self.said.add(kind)
                self.note(note)
        self.pending.append(row)
        self.counts.append(counts)
        samples = samples_of(batch) if self.writes else []
        if row["step"] % self.samples_every == 0:
            self.save_samples(f"step_{row['step']:06d}", samples)
        if self.due(row["step"], steps):
            row = self.flush(self.same)
            if self.display is not None:
                self.display.step(row, samples[:: max(1, batch.score.shape[1])])
            for advice in self.advisor.look(row):
                self.note(f"advice: {advice}")

    def flush(self, same: Callable[[Row], Row] = dict) -> Row:
        """Write the steps since the last line as one. `same`: what all ranks take it to be."""
        row = self.write(same(merge(self.pending, self.counts)))
        self.pending, self.counts = [], []
        return row

    def dump(self) -> Row:
        """Steps that are not written yet, for a checkpoint."""
        rows = [{k: v for k, v in row.items() if math.isfinite(v)} for row in self.pending]
        return {"pending": rows, "counts": self.counts}

    def restore(self, saved: Row) -> None:
        """What `dump` gave; and metrics.jsonl as it is now, for whoever looks back."""
        self.pending, self.counts = saved["pending"], saved["counts"]
        path = self.folder / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.rows, self.history = [], []
        for row in map(json.loads, lines):
            self.keep(row)
            self.advisor.look(row)  # what it said then is not said again
        if self.display is not None:
            self.display.rows = list(self.rows[-KEPT:])

    def held_out(self, row: Row) -> Row:
        """Write and show the scores of an evaluation; the line as written."""
        row = self.write(row)
        if self.display is not None:
            self.display.step(row)
        return row

    def write(self, row: Row) -> Row:
        """Append one line to metrics.jsonl; values that are not finite are left out."""
        row = {k: v for k, v in row.items() if not isinstance(v, float) or math.isfinite(v)}
        if self.aliases:
            row |= {theirs: row[ours] for ours, theirs in ALIASES.items() if ours in row}
            row |= {"rewards" + k[6:]: v for k, v in row.items() if k.startswith("reward/")}
        if not self.writes:
            self.keep(row)
            return row
        fault("metrics")
        check_present(self.folder)
        with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
        self.keep(row)
        return row

    def keep(self, row: Row) -> None:
        """Remember a line."""
        self.rows.append(row)
        if "step_time" in row:
            self.history.append(row)

    def save_samples(self, name: str, samples: list[Row]) -> None:
        """Write every sample of a step to samples/<name>.jsonl."""
        if not self.writes:
            return
        write_text(self.folder / "samples" / f"{name}.jsonl", lines_of(samples))

    def draw_curves(self, now_and_then: bool = False) -> None:
        """Draw curves.png from the lines so far; a failure is a warning."""
        if self.writes:
            self.drawer.draw(len(self.rows), self.note, now_and_then)

    def close(self) -> None:
        """Write what is not written yet, and give the terminal back."""
        try:
            if self.pending:
                self.flush()
        finally:
            if self.display is not None:
                self.display.close()


def lines_of(samples: list[Row]) -> str:
    """Samples as the text of their file: one line of JSON each.

    Half a surrogate pair, which UTF-8 does not have, is written as JSON's own escape.
    """
    lines = [json.dumps(s, ensure_ascii=False, default=str) + "\n" for s in samples]
    return "".join(lines).encode("utf-8", "backslashreplace").decode("utf-8")


def merge(rows: list[Row], counts: list[Row]) -> Row:
    """Several steps -> one line: means weighed by `counts`, extremes, last counters.

    A step that has no value, or one that is not finite, takes no part.
    """
    merged: Row = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        told = [i for i, row in enumerate(rows) if name in row and math.isfinite(row[name])]
        if not told:
            continue
        values = [rows[i][name] for i in told]
        last = name.rpartition("/")[2]
        if name in COUNTERS or name.startswith("data/"):
            merged[name] = values[-1]
        elif last == "min" or last.startswith("min_") or last.endswith("_min"):
            merged[name] = min(values)
        elif last == "max" or last.startswith("max_") or last.endswith(("_max", "_gb")):
            merged[name] = max(values)
        else:
            over = WEIGHED_BY.get(name, name.rpartition("/")[0] if last in ("mean", "std") else "")
            weights = [counts[i].get(over, 1) for i in told]
            total = sum(v * w for v, w in zip(values, weights, strict=True))
            merged[name] = total / sum(weights) if sum(weights) else values[-1]
    return merged


def samples_of(batch: Batch) -> list[Row]:
    """Every row of a batch, as kept in samples/."""
    k = batch.score.shape[1]
    before = {"score": batch.score, "shaped": batch.shaped}
    after = {"kl": batch.kl, "reward": batch.reward, "advantage": batch.advantage}
    rows = []
    for p, group in enumerate(batch.groups):
        for j in range(k):
            row = sample(group, j) | dict.fromkeys([*before, *after])
            if batch.scorable[p, j]:
                found = before | (after if p in batch.active else {})  # no KL of the others
                row |= {n: float(v[p, j]) for n, v in found.items() if v is not None}
            said = {n: float(batch.raw[f, p, j]) for f, n in enumerate(batch.names)}
            row["rewards"] = {n: None if math.isnan(v) else v for n, v in said.items()}
            row |= {name: values[p * k + j] for name, values in batch.extras.items()}
            rows.append(row)
    return rows


def sample(group: Group, k: int) -> Row:
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
