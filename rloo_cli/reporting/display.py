"""Shows a running run: a live panel on a terminal, else one plain line per logged step."""

import os
import sys
import time
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from rloo_cli.reporting.eval_lines import headline_metrics, interval_text
from rloo_cli.reporting.panel import (
    LINE_METRICS,
    MERGED_PHASES,
    PHASE_COLOURS,
    clean_line,
    format_duration,
    format_number,
    metric_history,
    render_panel,
    render_sample,
    reward_mean_names,
    time_left,
)
from rloo_cli.utils.files import JsonObject

SLOW_PHASE_S = 5.0  # a phase before the first step that takes longer is shown with its progress
MAX_LINES_KEPT = 1000  # lines that are drawn: more than a terminal has columns


class Display:
    """Shows a running run; `close` it in a `finally` (twice is harmless).

    With mode="auto" it is a panel if `file` (stdout) is a terminal, else a line for each logged
    step, with `num_samples` samples.
    """

    def __init__(
        self,
        plan: JsonObject,
        mode: str = "auto",
        num_samples: int = 0,
        file: TextIO | None = None,
    ):
        self.plan, self.num_samples, self.file = dict(plan), num_samples, file or sys.stdout
        self.metrics_lines: list[JsonObject] = []
        self.samples: Sequence[JsonObject] = []
        self.phase_name, self.phase_detail = "", ""  # the detail says how far the phase has come
        self.started_at = self.phase_started_at = self.last_progress_at = time.monotonic()
        self.live_panel: Live | None = None
        drawable = self.file.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        utf = (getattr(self.file, "encoding", None) or "utf-8").lower().startswith("utf")
        if mode == "panel" or (mode == "auto" and drawable and utf):
            self.console = Console(file=self.file)
            # Drawn by the clock only, so that a run of fast steps does not pay for every step.
            panel = Live(console=self.console, get_renderable=self._panel, refresh_per_second=2)
            self.live_panel = panel
            panel.start()

    def _panel(self) -> RenderableType:
        elapsed = time.monotonic() - self.started_at
        # Two cells stay free for the ^C that a terminal writes after the frame: on its own line it
        # would move everything, and leave a part of this frame above the next output.
        width = min(self.console.width - 2, 160)
        below, spent = self.phase_name, time.monotonic() - self.phase_started_at
        if self._is_startup_phase(below) and spent >= SLOW_PHASE_S:
            below += f" · {format_duration(spent)}"
        below += f" · {self.phase_detail}" if self.phase_detail else ""
        lines = list(self.metrics_lines)
        return render_panel(lines, self.samples, self.plan, width, below, elapsed)

    def _print(self, text: str) -> None:
        encoding = getattr(self.file, "encoding", None) or "utf-8"
        text = text.encode(encoding, "replace").decode(encoding)
        if self.live_panel:
            self.console.print(Text(text), soft_wrap=True)
        else:
            try:
                print(text, file=self.file, flush=True)
            except BrokenPipeError:  # `rloo train | head`: the reader is gone, the run continues
                sys.stdout = self.file = open(os.devnull, "w")  # noqa: SIM115

    def _is_startup_phase(self, name: str) -> bool:
        """Whether a phase is one of those before the first step, which may take long."""
        of_a_step = {*PHASE_COLOURS, *MERGED_PHASES.values(), "sync", "data"}
        return bool(name) and not self.metrics_lines and name not in of_a_step

    def phase(self, name: str) -> None:
        """Show a new phase. Before the first step it gets a line, and a slow one a second line."""
        if name == self.phase_name:
            return
        now = time.monotonic()
        spent = now - self.phase_started_at
        if self._is_startup_phase(self.phase_name) and spent >= SLOW_PHASE_S:
            self._print(f"{clean_line(self.phase_name)}: {format_duration(spent)}")
        self.phase_name, self.phase_detail = name, ""
        self.phase_started_at = self.last_progress_at = now
        if self._is_startup_phase(name) and not self.live_panel:
            self._print(f"{clean_line(name)} ...")

    def progress(self, text: str) -> None:
        """Show the progress of a phase: at once in the panel, else in a line now and then."""
        self.phase_detail, now = clean_line(text), time.monotonic()
        if not self.live_panel and now - self.last_progress_at >= SLOW_PHASE_S:
            self.last_progress_at = now
            self._print(f"  {format_duration(now - self.phase_started_at)}: {self.phase_detail}")

    def step(self, metrics: JsonObject, samples: Sequence[JsonObject] = ()) -> None:
        """Show a logged line of metrics, and samples of that step."""
        self.metrics_lines.append(metrics)
        # Drawing the panel must not take longer as the run grows.
        if len(self.metrics_lines) >= 2 * MAX_LINES_KEPT:
            self.metrics_lines = self.metrics_lines[-MAX_LINES_KEPT:]
        self.samples = samples or self.samples
        if self.live_panel:
            return
        parts = [f"step {metrics.get('step', '?')}/{self.plan.get('max_steps') or '?'}"]
        for label, name in [*LINE_METRICS.items(), *headline_metrics(metrics)]:
            values = metric_history([metrics], name)
            interval = interval_text(metrics, name)
            parts += [f"{label.rstrip(' %')} {format_number(v, label)}{interval}" for v in values]
            if name == "reward" and parts[1:]:
                parts[-1] += self._reward_means_text(metrics)
        parts += [f"{seconds:.3g} s/step" for seconds in metric_history([metrics], "step_time")]
        left = time_left(self.metrics_lines, self.plan)
        self._print("  ".join(parts + ([f"eta {format_duration(left)}"] if left else [])))
        for sample in samples[: self.num_samples]:
            for line in render_sample(sample, 100):
                self._print(f"  {line.plain.rstrip()}")

    def _reward_means_text(self, metrics: JsonObject) -> str:
        """The mean of each of several rewards, after the score: ` (right 0.5, short -0.2)`."""
        means = []
        for name, key in reward_mean_names([metrics]).items():
            means += [
                f"{clean_line(name)} {format_number(v)}" for v in metric_history([metrics], key)
            ]
        return f" ({', '.join(means)})" if means else ""

    def note(self, text: str) -> None:
        """Print permanent lines above the panel."""
        self._print("\n".join(clean_line(line) for line in text.splitlines()))

    def close(self) -> None:
        """Draw the panel a last time and release the terminal."""
        live, self.live_panel, self.phase_name = self.live_panel, None, ""
        if live:
            live.stop()
