"""What a sweep shows: one table of all members with their curves, or plain lines."""

import json
import os
import sys
import time
from pathlib import Path
from typing import TextIO

from rich import box
from rich.console import Console
from rich.live import Live as Screen
from rich.table import Table
from rich.text import Text

from rloo_cli.launch.sweep.state import SweepState, Trial
from rloo_cli.launch.sweep.trial import TrialProcess
from rloo_cli.reporting.panel import clean_line, draw_sparkline, format_number, metric_history
from rloo_cli.utils.files import JsonObject

CURVE_WIDTH = 16  # cells
COLOURS = {"training": "green", "failed": "red", "finished": "bold", "stopped": "bright_black"}
FILE_WIDTH = 160  # of a table that goes to a file

MetricsLine = JsonObject


class MetricsReader:
    """The lines of training in a metrics.jsonl, read on as it grows."""

    def __init__(self, path: Path):
        self.path, self.offset, self.metrics = path, 0, list[MetricsLine]()

    def read(self) -> list[MetricsLine]:
        """All there are."""
        try:
            size = self.path.stat().st_size
            if size < self.offset:  # cut back, as it was resumed
                self.offset, self.metrics = 0, []
            if size > self.offset:
                self._read_new_lines()
        except OSError:  # not yet there
            return self.metrics
        except ValueError:  # cut back and grown again since: from its beginning, the next time
            self.offset, self.metrics = 0, []
        return self.metrics

    def _read_new_lines(self) -> None:
        with self.path.open("rb") as file:
            file.seek(self.offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        found = [row for row in map(json.loads, whole.splitlines()) if "step_time" in row]
        steps = [row["step"] for row in (*self.metrics[-1:], *found)]
        if steps != sorted(set(steps)):
            raise ValueError("its steps do not follow each other")
        self.offset += len(whole) + len(newline)
        self.metrics += found


def sweep_table(
    sweep_state: SweepState, readers: dict[int, MetricsReader], steps: dict[int, int | None]
) -> Table:
    """All members side by side."""
    made = Table(box=box.SIMPLE_HEAD, title=f"rloo sweep · {clean_line(sweep_state.folder.name)}")
    for name in ("", "member", "keys", "state", "step", "reward", "KL", "s/step", "reward so far"):
        made.add_column(name, justify="right" if name in ("", "reward", "KL", "s/step") else "left",
                        overflow="fold" if name in ("member", "keys") else "ellipsis")  # fmt: skip
    for member in sweep_state.members:
        rows = readers[member.number].read()
        cells = [newest_value(rows, name) for name in ("reward", "kl", "step_time")]
        whole = steps.get(member.number)
        state = member.state + (f" x{member.share}" if member.share > 1 else "")
        if member.state == "failed":
            state += f" {member.code}"
        name = member.name if member.parent is None else f"{member.name} (at {member.cloned_at})"
        made.add_row(
            str(member.number),
            Text(clean_line(name)),
            Text(clean_line(" ".join(sweep_state.distinct_overrides(member)))),
            Text(state, COLOURS.get(member.state, "")),
            f"{member.step}/{whole}" if whole else str(member.step),
            *cells,
            Text(draw_sparkline(metric_history(rows, "reward"), CURVE_WIDTH), "green"),
        )
    return made


def newest_value(metrics: list[MetricsLine], name: str) -> str:
    """The newest value of a metric, in short."""
    values = metric_history(metrics, name)
    return format_number(values[-1]) if values else "–"


class SweepDisplay:
    """Shows a sweep while it runs; a context. A table on a terminal, else lines."""

    def __init__(self, sweep_state: SweepState, file: TextIO | None = None):
        self.sweep_state, self.file = sweep_state, file or sys.stdout
        self.readers: dict[int, MetricsReader] = {}
        self.steps: dict[int, int | None] = {}
        drawable = self.file.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        encoding = (getattr(self.file, "encoding", None) or "utf-8").lower()
        drawable = drawable and encoding.startswith("utf")
        self.console = Console(file=self.file, width=None if self.file.isatty() else FILE_WIDTH)
        self.screen = Screen(console=self.console, auto_refresh=False) if drawable else None
        self.refreshed_at = 0.0

    def __enter__(self) -> "SweepDisplay":
        if self.screen is not None:
            self.screen.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.screen is not None:
            self.screen.update(self.current_table(), refresh=True)
            self.screen.stop()

    def training_metrics(self, trial: Trial) -> list[MetricsLine]:
        """What a member has logged of its training."""
        place = self.sweep_state.trial_folder(trial) / "metrics.jsonl"
        return self.readers.setdefault(trial.number, MetricsReader(place)).read()

    def current_table(self) -> Table:
        """The table as it is now."""
        for member in self.sweep_state.members:
            self.training_metrics(member)
            self.steps[member.number] = self.steps.get(
                member.number
            ) or self.sweep_state.trial_steps(member)
        return sweep_table(self.sweep_state, self.readers, self.steps)

    def refresh(self, trial_processes: list[TrialProcess]) -> None:
        """Draw the table again, twice a second."""
        if self.screen is None or time.monotonic() - self.refreshed_at < 0.5:
            return
        for live in trial_processes:
            if live.is_open and (rows := self.training_metrics(live.trial)):
                live.trial.step = max(live.trial.step, int(rows[-1]["step"]))
        self.screen.update(self.current_table(), refresh=True)
        self.refreshed_at = time.monotonic()

    def print_note(self, text: str) -> None:
        """A line that stays."""
        if self.screen is not None:
            self.console.print(Text(clean_line(text)), soft_wrap=True)
            return
        encoding = getattr(self.file, "encoding", None) or "utf-8"
        try:
            print(
                clean_line(text).encode(encoding, "replace").decode(encoding),
                file=self.file,
                flush=True,
            )
        except BrokenPipeError:  # nobody listens, the members go on
            sys.stdout = self.file = open(os.devnull, "w")  # noqa: SIM115

    def report_boundary(self, trial_process: TrialProcess) -> None:
        """A member has ended its chunk."""
        member = trial_process.trial
        self.steps[member.number] = trial_process.max_steps
        if self.screen is not None:
            return
        rows = self.training_metrics(member)
        shown = {"reward": "reward", "kl": "kl", "s/step": "step_time"}
        said = [
            f"{label} {newest_value(rows, n)}"
            for label, n in shown.items()
            if metric_history(rows, n)
        ]
        steps = f"{member.step}/{self.steps[member.number] or '?'}"
        keys = " ".join(self.sweep_state.distinct_overrides(member))
        self.print_note(
            "  ".join([f"{member.number}  {member.name}  {keys}", f"step {steps}", *said])
        )

    def report_end(self, trial_process: TrialProcess) -> None:
        """A member has ended: how, and where its words are if it failed."""
        member = trial_process.trial
        why = f" ({member.why})" if member.why else ""
        self.print_note(
            f"{member.number}  {member.name}  {member.state} at step {member.step}{why}"
        )
        log = self.sweep_state.trial_log(member)
        if member.state == "failed" and log.is_file():
            lines = log.read_text(errors="replace").splitlines()
            first = [i for i, line in enumerate(lines) if line.startswith("error: ")]
            for line in lines[first[-1] : first[-1] + 5] if first else lines[-5:]:
                self.print_note(f"   {line}")
