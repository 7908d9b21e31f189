"""What `rloo top` shows of a run, read from its files: the values, and one frame of the screen.

It never contacts the run's processes, so it also works over ssh, on a copy of the folder, and after
the run has ended. A value that the run lacks is None.
"""

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rich.console import Group, RenderableType
from rich.text import Text

from rloo_cli.inspection.run_record import RunRecord, inspect_run_folder
from rloo_cli.inspection.sample_files import SampleRecord, list_sample_files, read_sample_records
from rloo_cli.reporting.health.advisor import Advisor, advice_text
from rloo_cli.reporting.metrics_lines import MetricsReader
from rloo_cli.reporting.panel import (
    RECENT_STEPS,
    clean_line,
    format_duration,
    format_number,
    metric_history,
    render_panel,
    time_left,
)
from rloo_cli.utils.errors import RunError
from rloo_cli.utils.files import JsonObject

LATE_FACTOR = 3.0  # a step longer than this multiple of the median is late
MIN_LATE_S = 60.0  # and no step is late before this many seconds
MAX_ADVICE_SHOWN = 5


class RunScreen:
    """Reads a run's folder repeatedly; advice covers all steps, once per rule."""

    def __init__(self, folder: Path):
        self.folder, self.reader = folder, MetricsReader(folder / "metrics.jsonl")
        self.record = inspect_run_folder(folder, self.reader)
        self.samples: list[SampleRecord] = []
        guards = self.record.config.get("guards")
        self.advisor = Advisor(guards if isinstance(guards, dict) else {})
        self.advised_lines = 0
        self.advice: list[tuple[int, str]] = []  # step, text
        self.refresh_run()

    def refresh_run(self) -> None:
        """Reread the files, only new lines of metrics. Never raises for their content."""
        self.record = inspect_run_folder(self.folder, self.reader)
        lines = self.record.metrics_lines
        for metrics in lines[self.advised_lines :]:
            found = self.advisor.advise(metrics).items()
            self.advice += [(int(metrics["step"]), advice_text(*pair)) for pair in found]
        self.advised_lines = len(lines)
        self.samples = _last_samples(self.folder)

    def screen_values(self, now: float | None = None) -> JsonObject:
        """Everything on the screen as plain values; seconds, bytes and shares."""
        now = time.time() if now is None else now
        record, steps = self.record, self.record.step_metrics
        recent = steps[-RECENT_STEPS:]
        last = steps[-1] if steps else {}
        idle_s = _idle_seconds(self.folder, now)
        return {
            "run": str(self.folder),
            "state": record.state,
            "step": record.last_step,
            "of_steps": record.run_metadata.get("plan", {}).get("max_steps"),
            "step_s": median(metric_history(recent, "step_time")) if recent else None,
            "left_s": time_left(steps, record.run_metadata.get("plan", {})),
            "since_last_line_s": idle_s,
            "late": self._is_late(idle_s),
            "tokens_per_s": last.get("perf/tokens_per_s"),
            "phase_s": {
                name.removeprefix("time/"): median(metric_history(recent, name) or [0.0])
                for name in last
                if name.startswith("time/")
            },
            "sampling_wait_share": last.get("perf/rollout_wait_frac"),
            "lag": _lag_histogram(self.samples),
            "memory": _memory_values(record),
            "held_out": [
                {"step": line["step"], "score": line[name]}
                for line in record.eval_metrics
                for name in ("eval_reward",)
                if name in line
            ],
            "sample": self.samples[0] if self.samples else None,
            "advice": [{"step": step, "text": text} for step, text in self.advice],
            "problems": record.problems,
        }

    def _is_late(self, idle_s: float | None) -> bool:
        """Whether the current step takes much longer than earlier ones."""
        times = metric_history(self.record.step_metrics[-RECENT_STEPS:], "step_time")
        if idle_s is None or not times or self.record.state != "training":
            return False
        return idle_s > max(MIN_LATE_S, LATE_FACTOR * median(times))

    def render_frame(self, width: int) -> RenderableType:
        """One frame, `width` cells wide."""
        record, values = self.record, self.screen_values()
        plan = {"name": self.folder.name} | record.run_metadata.get("plan", {})
        panel = render_panel(
            record.metrics_lines, self.samples[:1], plan, width, _state_line(values)
        )
        below = [Text(clean_line(text), "red") for text in record.problems]
        below += [Text(text) for text in _figures(values)]
        for step, text in self.advice[-MAX_ADVICE_SHOWN:]:
            below.append(Text(f"step {step}: {clean_line(text)}", "yellow"))
        return Group(panel, *below)


def _last_samples(folder: Path) -> list[SampleRecord]:
    files = list_sample_files(folder).get("", {})
    for step in sorted(files, reverse=True)[:2]:  # the last one may still be written
        try:
            if samples := read_sample_records(files[step]):
                return samples
        except (RunError, OSError):
            continue
    return []


def _idle_seconds(folder: Path, now: float) -> float | None:
    written = [
        p.stat().st_mtime for n in ("metrics.jsonl", "run.json") if (p := folder / n).is_file()
    ]
    return max(0.0, now - max(written)) if written else None


def _lag_histogram(samples: Sequence[SampleRecord]) -> dict[str, int]:
    """Updates between the newest weights among these samples and each sample's -> completions."""
    versions = [s["weight_version"] for s in samples if isinstance(s.get("weight_version"), int)]
    newest = max(versions, default=0)
    return {str(lag): count for lag, count in sorted(Counter(newest - v for v in versions).items())}


def _memory_values(record: RunRecord) -> JsonObject:
    memory = record.run_metadata.get("memory") or {}
    names = ("measured_bytes", "predicted_bytes")
    return {name: memory[name] for name in names if isinstance(memory.get(name), int | float)}


def _state_line(values: JsonObject) -> str:
    if values["state"] != "training" or values["since_last_line_s"] is None:
        return str(values["state"])
    late = ", longer than earlier steps" if values["late"] else ""
    return f"training · {format_duration(values['since_last_line_s'])} since the last line{late}"


def _figures(values: JsonObject) -> list[str]:
    """The lines below the panel: waiting, lag, memory."""
    lines = []
    if values["sampling_wait_share"] is not None:
        share = values["sampling_wait_share"]
        lines.append(f"waiting for samples: {format_number(share, '%')} of a step")
    if values["lag"]:
        parts = [f"{lag}: {count}" for lag, count in values["lag"].items()]
        lines.append(f"updates behind the newest weights → completions   {', '.join(parts)}")
    if "measured_bytes" in values["memory"]:
        gib = {name: size / 2**30 for name, size in values["memory"].items()}
        planned = f", {gib['predicted_bytes']:.2f} planned" if "predicted_bytes" in gib else ""
        lines.append(f"memory {gib['measured_bytes']:.2f} GiB at most{planned}")
    return lines
