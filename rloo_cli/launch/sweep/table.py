"""Shows a sweep: one table of all trials with their curves, or plain lines."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TextIO

from rich import box
from rich.console import Console, JustifyMethod
from rich.live import Live as Screen
from rich.table import Table
from rich.text import Text

from rloo_cli.launch.sweep.state import SweepState, Trial
from rloo_cli.launch.sweep.trial import TrialProcess
from rloo_cli.reporting.metrics_lines import MetricsMapping, MetricsReader
from rloo_cli.reporting.panel import clean_line, draw_sparkline, format_number, metric_history

CURVE_WIDTH = 16  # cells
COLOURS = {"training": "green", "failed": "red", "finished": "bold", "stopped": "bright_black"}
FILE_WIDTH = 160  # columns of a table in a file


def sweep_table(
    sweep_state: SweepState,
    metrics_lines: Mapping[int, Sequence[MetricsMapping]],
    steps: Mapping[int, int | None],
) -> Table:
    """A table of all trials. `metrics_lines`, `steps`: each trial's metrics and number of steps."""
    table = Table(box=box.SIMPLE_HEAD, title=f"rloo sweep · {clean_line(sweep_state.folder.name)}")
    for name in ("", "trial", "keys", "state", "step", "reward", "KL", "s/step", "reward so far"):
        justify: JustifyMethod = "right" if name in ("", "reward", "KL", "s/step") else "left"
        fold = name in ("trial", "keys")
        table.add_column(name, justify=justify, overflow="fold" if fold else "ellipsis")
    for trial in sweep_state.trials:
        metrics = metrics_lines[trial.number]
        max_steps = steps.get(trial.number)
        state = trial.state + (f" x{trial.share}" if trial.share > 1 else "")
        if trial.state == "failed":
            state += f" {trial.code}"
        name = trial.name if trial.parent is None else f"{trial.name} (at {trial.cloned_at})"
        table.add_row(
            str(trial.number),
            Text(clean_line(name)),
            Text(clean_line(" ".join(sweep_state.distinct_overrides(trial)))),
            Text(state, COLOURS.get(trial.state, "")),
            f"{trial.step}/{max_steps}" if max_steps else str(trial.step),
            *[newest_value(metrics, name) for name in ("reward", "kl", "step_time")],
            Text(draw_sparkline(metric_history(metrics, "reward"), CURVE_WIDTH), "green"),
        )
    return table


def newest_value(metrics: Sequence[MetricsMapping], name: str) -> str:
    """The newest value of a metric, shortened; a dash if there is none."""
    values = metric_history(metrics, name)
    return format_number(values[-1]) if values else "–"


class SweepDisplay:
    """Context manager that shows a sweep while it runs: a table on a terminal, else lines."""

    def __init__(self, sweep_state: SweepState, file: TextIO | None = None):
        self.sweep_state, self.file = sweep_state, file or sys.stdout
        self.readers: dict[int, MetricsReader] = {}
        self.steps: dict[int, int | None] = {}
        encoding = (getattr(self.file, "encoding", None) or "utf-8").lower()
        drawable = self.file.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
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

    def training_metrics(self, trial: Trial) -> list[MetricsMapping]:
        """The training lines that a trial has logged."""
        path = self.sweep_state.trial_folder(trial) / "metrics.jsonl"
        reader = self.readers.setdefault(trial.number, MetricsReader(path))
        try:
            lines = reader.read()
        except OSError:  # the file was removed
            lines = reader.lines
        return [line for line in lines if "step_time" in line]

    def current_table(self) -> Table:
        """The current table."""
        metrics_lines = {}
        for trial in self.sweep_state.trials:
            metrics_lines[trial.number] = self.training_metrics(trial)
            steps = self.steps.get(trial.number) or self.sweep_state.trial_steps(trial)
            self.steps[trial.number] = steps
        return sweep_table(self.sweep_state, metrics_lines, self.steps)

    def refresh(self, trial_processes: list[TrialProcess]) -> None:
        """Draw the table again, at most twice a second."""
        if self.screen is None or time.monotonic() - self.refreshed_at < 0.5:
            return
        for process in trial_processes:
            if process.is_open and (metrics := self.training_metrics(process.trial)):
                process.trial.step = max(process.trial.step, int(metrics[-1]["step"]))
        self.screen.update(self.current_table(), refresh=True)
        self.refreshed_at = time.monotonic()

    def print_note(self, text: str) -> None:
        """Print a line above the table."""
        if self.screen is not None:
            self.console.print(Text(clean_line(text)), soft_wrap=True)
            return
        encoding = getattr(self.file, "encoding", None) or "utf-8"
        line = clean_line(text).encode(encoding, "replace").decode(encoding)
        try:
            print(line, file=self.file, flush=True)
        except BrokenPipeError:  # stdout is closed; the trials go on
            sys.stdout = self.file = open(os.devnull, "w")  # noqa: SIM115

    def report_boundary(self, trial_process: TrialProcess) -> None:
        """Print a line for a trial that has ended its time slice, if no table is shown."""
        trial = trial_process.trial
        self.steps[trial.number] = trial_process.max_steps
        if self.screen is not None:
            return
        metrics = self.training_metrics(trial)
        names = {"reward": "reward", "kl": "kl", "s/step": "step_time"}
        shown = [
            f"{k} {newest_value(metrics, n)}"
            for k, n in names.items()
            if metric_history(metrics, n)
        ]
        steps = f"{trial.step}/{self.steps[trial.number] or '?'}"
        keys = " ".join(self.sweep_state.distinct_overrides(trial))
        head = f"{trial.number}  {trial.name}  {keys}"
        self.print_note("  ".join([head, f"step {steps}", *shown]))

    def report_end(self, trial_process: TrialProcess) -> None:
        """Print how a trial ended; if it failed, also its last error or the end of its log."""
        trial = trial_process.trial
        why = f" ({trial.why})" if trial.why else ""
        self.print_note(f"{trial.number}  {trial.name}  {trial.state} at step {trial.step}{why}")
        log = self.sweep_state.trial_log(trial)
        if trial.state == "failed" and log.is_file():
            lines = log.read_text(errors="replace").splitlines()
            errors = [i for i, line in enumerate(lines) if line.startswith("error: ")]
            for line in lines[errors[-1] : errors[-1] + 5] if errors else lines[-5:]:
                self.print_note(f"   {line}")
