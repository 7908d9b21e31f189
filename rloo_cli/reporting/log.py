"""The output of a run: metrics.jsonl, samples, the terminal, and advice. One rank writes.

metrics.jsonl is always written: strict JSON, one line per logged step. Over the steps since the
last line, means are weighted by counts, extremes are true, and counters have their last value.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rloo_cli.data.batch import Batch, Group
from rloo_cli.data.images import decode_png, encode_thumbnail
from rloo_cli.reporting.curves import CurveDrawer
from rloo_cli.reporting.display import MAX_LINES_KEPT, Display
from rloo_cli.reporting.events import EventSender
from rloo_cli.reporting.health.advisor import Advisor, advice_text
from rloo_cli.reporting.token_strip import DecodeToken, add_token_strips
from rloo_cli.reporting.trackers import TrackerClient
from rloo_cli.utils.fault_injection import trigger_fault
from rloo_cli.utils.files import JsonObject, check_folder_present, write_text
from rloo_cli.utils.metrics import merge_steps

if TYPE_CHECKING:
    from torch import Tensor

METRICS = {"TRL's spelling": [  # read by utils.metrics
    ("sampling/sampling_logp_difference/mean", "nats", "", "sampling/logp_diff_mean"),
    ("sampling/sampling_logp_difference/max", "nats", "", "sampling/logp_diff_max"),
    ("rewards/<reward>/mean", "score", "", "reward/<reward>/mean, and so on for reward/..."),
]}  # fmt: skip
# Our name -> TRL's.
TRL_ALIASES = {ours: name for name, _, _, ours in METRICS["TRL's spelling"] if "<" not in name}


class RunLog:
    """Writes a run's output into its folder, and shows it."""

    def __init__(
        self,
        folder: Path,
        every: int,
        samples_every: int,
        aliases: bool,
        guards: Mapping[str, object] | None = None,  # the config's setting of each health rule
    ):
        self.folder, self.every = folder, every
        self.samples_every, self.aliases = samples_every, aliases
        self.metrics_lines: list[JsonObject] = []  # as written
        self.training_lines: list[JsonObject] = []  # lines of steps, which rewards can read
        self.pending_steps: list[JsonObject] = []  # metrics of the steps since the last line
        self.pending_counts: list[JsonObject] = []  # the counts behind their means
        self.display: Display | None = None
        self.trackers: TrackerClient | None = None
        self.events = EventSender()
        self.writes_files = True  # false in all ranks but the first
        self.token_samples = 0  # samples per file that are written token by token
        self.decode_token: DecodeToken = str
        # Returns rank 0's line on every rank.
        self.share_from_rank0: Callable[[JsonObject], JsonObject] = dict
        self.current_phase = "the start"
        self.advisor = Advisor(guards)
        self.failed_guards: dict[str, str] = {}  # guards set to fail that fired -> their messages
        self.drawer = CurveDrawer(folder)
        self.noted_kinds: set[str] = set()

    def is_due(self, step: int, num_steps: int) -> bool:
        """Whether step `step` of `num_steps`, counted from 1, is written; the last always is."""
        return step % self.every == 0 or step == num_steps

    def note(self, text: str) -> None:
        """Show a permanent line."""
        if self.display is not None:
            self.display.note(text)

    def phase(self, name: str) -> None:
        """Show, and store, the run's current phase."""
        self.current_phase = name
        if self.display is not None:
            self.display.phase(name)

    def progress(self, text: str) -> None:
        """Show the progress of the current phase."""
        if self.display is not None:
            self.display.progress(text)

    def step(self, metrics: JsonObject, counts: JsonObject, batch: Batch, num_steps: int) -> None:
        """Add one finished step of `num_steps`; write a line when it is due, and its samples.

        `metrics` has the key `step`; `counts` are the counts behind the means.
        """
        for note in batch.notes:
            kind = re.sub(r"\d+", "", note)[:40]
            if kind not in self.noted_kinds:  # once per run, not once per step
                self.noted_kinds.add(kind)
                self.note(note)
        self.pending_steps.append(metrics)
        self.pending_counts.append(counts)
        samples = batch_samples(batch) if self.writes_files else []
        if metrics["step"] % self.samples_every == 0:
            if samples and self.token_samples:
                before = int(metrics.get("updates", 0) - counts.get("updates", 0))
                add_token_strips(samples, batch, self.token_samples, before, self.decode_token)
            self.save_samples(f"step_{metrics['step']:06d}", samples)
        if self.is_due(metrics["step"], num_steps):
            metrics = self.flush(self.share_from_rank0)
            if self.display is not None:
                self.display.step(metrics, samples[:: max(1, batch.score.shape[1])])
            self._advise(metrics)

    def _advise(self, metrics: JsonObject) -> None:
        """Show the health rules' advice for a line, or keep it for the error that ends the run."""
        for name, figures in self.advisor.advise(metrics).items():
            if self.advisor.levels[name] == "fail":
                self.failed_guards[name] = figures
            else:
                self.note(f"advice: {advice_text(name, figures)}")

    def flush(self, share_from_rank0: Callable[[JsonObject], JsonObject] = dict) -> JsonObject:
        """Write the steps since the last line as one; `share_from_rank0` makes all ranks agree."""
        merged = merge_steps(self.pending_steps, self.pending_counts)
        line = self.append_line(share_from_rank0(merged))
        self.pending_steps, self.pending_counts = [], []
        return line

    def dump(self) -> JsonObject:
        """The steps that are not written yet, for a checkpoint."""
        finite = [{k: v for k, v in m.items() if math.isfinite(v)} for m in self.pending_steps]
        return {"pending": finite, "counts": self.pending_counts}

    def restore(self, saved: JsonObject) -> None:
        """Continue with the state of `dump`, and with the lines that metrics.jsonl has now."""
        self.pending_steps, self.pending_counts = saved["pending"], saved["counts"]
        path = self.folder / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.metrics_lines, self.training_lines = [], []
        for metrics in map(json.loads, lines):
            self.store_line(metrics)
            self.advisor.advise(metrics)  # earlier advice is not repeated
        if self.display is not None:
            self.display.metrics_lines = list(self.metrics_lines[-MAX_LINES_KEPT:])

    def write_evaluation(self, metrics: JsonObject) -> JsonObject:
        """Write and show the scores of an evaluation; returns the line as written."""
        metrics = self.append_line(metrics)
        if self.display is not None:
            self.display.step(metrics)
        self._advise(metrics)
        return metrics

    def append_line(self, metrics: JsonObject) -> JsonObject:
        """Append one line to metrics.jsonl; values that are not finite are left out."""
        metrics = {k: v for k, v in metrics.items() if not isinstance(v, float) or math.isfinite(v)}
        if self.aliases:
            metrics |= {trl: metrics[name] for name, trl in TRL_ALIASES.items() if name in metrics}
            metrics |= {"rewards" + k[6:]: v for k, v in metrics.items() if k.startswith("reward/")}
        if self.writes_files:
            trigger_fault("metrics")
            check_folder_present(self.folder)
            with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(metrics, allow_nan=False) + "\n")
        if self.trackers is not None:
            self.trackers.send(metrics)
        self.store_line(metrics)
        note = "on_step" if "step_time" in metrics else "on_evaluation"
        self.events.send(note, metrics.get("step"), metrics)
        return metrics

    def store_line(self, metrics: JsonObject) -> None:
        """Keep a line in memory."""
        self.metrics_lines.append(metrics)
        if "step_time" in metrics:
            self.training_lines.append(metrics)

    def save_samples(self, name: str, samples: list[JsonObject]) -> None:
        """Write every sample of a step to samples/<name>.jsonl."""
        if self.writes_files:
            write_text(self.folder / "samples" / f"{name}.jsonl", samples_to_jsonl(samples))

    def draw_curves(self, rate_limited: bool = False) -> None:
        """Draw curves.png from the lines so far; a failure is a warning."""
        if self.writes_files:
            self.drawer.draw_curves(len(self.metrics_lines), self.note, rate_limited)

    def close(self) -> None:
        """Write the steps that are not written yet; close the trackers and the display."""
        try:
            if self.pending_steps:
                self.flush()
        finally:
            if self.trackers is not None:
                self.trackers.close()
            if self.display is not None:
                self.display.close()


def samples_to_jsonl(samples: list[JsonObject]) -> str:
    """Samples as the text of their file: one line of JSON each.

    Half a surrogate pair, which UTF-8 cannot encode, is written as a JSON escape.
    """
    lines = [json.dumps(s, ensure_ascii=False, default=str) + "\n" for s in samples]
    return "".join(lines).encode("utf-8", "backslashreplace").decode("utf-8")


def batch_samples(batch: Batch) -> list[JsonObject]:
    """Every completion of a batch, in the form written to samples/."""
    k = batch.score.shape[1]
    before = {"score": batch.score, "shaped": batch.shaped}
    after = {"kl": batch.kl, "reward": batch.reward, "advantage": batch.advantage}
    samples = []
    for p, group in enumerate(batch.groups):
        for j in range(k):
            sample = sample_record(group, j) | dict.fromkeys([*before, *after])
            if batch.scorable[p, j]:
                columns = before | (after if p in batch.active else {})  # other groups have no KL
                sample |= {n: float(v[p, j]) for n, v in columns.items() if v is not None}
            scores = {n: float(batch.raw[f, p, j]) for f, n in enumerate(batch.names)}
            sample["rewards"] = {n: None if math.isnan(v) else v for n, v in scores.items()}
            sample |= {name: values[p * k + j] for name, values in batch.extras.items()}
            samples.append(sample)
    return samples


def sample_record(group: Group, k: int) -> JsonObject:
    """Completion k of a group, as a line of samples/ without scores."""
    rollout = group.rollouts[k]
    record: JsonObject = {
        "draw": group.prompt_offset,
        "k": k,
        "prompt": group.prompt,
        "completion": rollout.text,
        "finish_reason": rollout.finish_reason,
        "terminated": rollout.terminated,
        "prompt_length": len(group.prompt_ids),
        "completion_length": rollout.length,
        "seed": rollout.seed,
        "weight_version": rollout.weight_version,
    }
    shown = [] if group.media is None else group.media.thumbnails
    turn_images = [text for turn in rollout.turns or [] for text in turn.images]
    if shown or turn_images:
        record["images"] = [*shown, *(encode_thumbnail(decode_png(text)) for text in turn_images)]
    if rollout.version_spans is not None:
        record["version_spans"] = [list(span) for span in rollout.version_spans]
    if rollout.has_forced_answer:
        record["answer_forced"] = True
    if rollout.turns is not None:
        record["turns"] = [
            {"told": t.observation, "said": t.text, "calls": t.calls} for t in rollout.turns
        ]
        record |= {"episode": rollout.episode_facts, "failed": rollout.failed}
    return record


def write_debug_batch(folder: Path, batch: Batch, writes: bool) -> Path:
    """Write the tokens and numbers of an update, for people to read."""
    out = folder / "debug" / f"nonfinite_step_{batch.step + 1}"
    if not writes:  # every rank has the same batch
        return out
    out.mkdir(parents=True, exist_ok=True)
    with (out / "rows.jsonl").open("w") as file:
        for p, group in enumerate(batch.groups):
            for k, rollout in enumerate(group.rollouts):
                values = {
                    "prompt_ids": group.prompt_ids,
                    "completion_ids": rollout.completion_ids,
                    "text": rollout.text,
                    "score": repr(float(batch.shaped[p, k])),
                    "old_logp": [repr(x) for x in _column_values(group.old_logp, k)],
                    "ref_logp": [repr(x) for x in _column_values(group.ref_logp, k)],
                }
                file.write(json.dumps(values) + "\n")
    return out


def _column_values(columns: "list[Tensor] | None", k: int) -> list[float]:
    return [] if columns is None else columns[k].tolist()
