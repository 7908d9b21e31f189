"""Shows a run while it goes on: a live panel on a terminal, else one plain line per logged step."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from rloo_cli.reporting.eval_rows import headline
from rloo_cli.reporting.panel import (
    ALSO,
    PHASES,
    PLAIN,
    clean,
    duration,
    example,
    history,
    number,
    render,
    reward_means,
    time_left,
)

Row = Mapping[str, Any]
Rows = Sequence[Row]


SLOW_S = 5.0  # a phase of the start that takes longer says so, and how far it has come
KEPT = 1000  # lines that are drawn: more than a terminal has columns


class Display:
    """Shows a run while it goes on; `close` it in a `finally` (twice is harmless).

    mode auto: a panel if `file` (stdout) is a terminal, else lines, each with `samples` samples.
    """

    def __init__(self, plan: Row, mode: str = "auto", samples: int = 0, file: TextIO | None = None):
        self.plan, self.count, self.file = dict(plan), samples, file or sys.stdout
        self.rows: list[Row] = []
        self.samples: Rows = []
        self.phase_name, self.start = "", time.monotonic()
        self.since = self.spoke = self.start  # when the phase began, and was last spoken of
        self.detail = ""  # how far it has come
        self.live: Live | None = None
        drawable = self.file.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        utf = (getattr(self.file, "encoding", None) or "utf-8").lower().startswith("utf")
        if mode == "panel" or (mode == "auto" and drawable and utf):
            self.console = Console(file=self.file)
            # Drawn by the clock alone, so that a run of fast steps does not pay for every one.
            self.live = Live(console=self.console, get_renderable=self._panel, refresh_per_second=2)
            self.live.start()

    def _panel(self) -> RenderableType:
        elapsed = time.monotonic() - self.start
        # Room for the ^C that a terminal writes behind the frame: on a line of its own it would
        # move everything, and leave a part of this frame above what comes next.
        width = min(self.console.width - 2, 160)
        below, spent = self.phase_name, time.monotonic() - self.since
        if self._is_start(below) and spent >= SLOW_S:
            below += f" · {duration(spent)}"
        below += f" · {self.detail}" if self.detail else ""
        return render(list(self.rows), self.samples, self.plan, width, below, elapsed)

    def _print(self, text: str) -> None:
        encoding = getattr(self.file, "encoding", None) or "utf-8"
        text = text.encode(encoding, "replace").decode(encoding)
        if self.live:
            self.console.print(Text(text), soft_wrap=True)
        else:
            try:
                print(text, file=self.file, flush=True)
            except BrokenPipeError:  # `rloo train | head`: nobody listens, the run goes on
                sys.stdout = self.file = open(os.devnull, "w")  # noqa: SIM115

    def _is_start(self, name: str) -> bool:
        """Whether a phase is one of those before the first step, which may take long."""
        of_a_step = {*PHASES, *ALSO.values(), "sync", "data"}
        return bool(name) and not self.rows and name not in of_a_step

    def phase(self, name: str) -> None:
        """What is going on now; before the first step it is said, and what took long too."""
        if name == self.phase_name:
            return
        now = time.monotonic()
        if self._is_start(self.phase_name) and now - self.since >= SLOW_S:
            self._print(f"{clean(self.phase_name)}: {duration(now - self.since)}")
        self.phase_name, self.detail = name, ""
        self.since = self.spoke = now
        if self._is_start(name) and not self.live:
            self._print(f"{clean(name)} ...")

    def progress(self, text: str) -> None:
        """How far the phase has come: in the panel at once, plain every few seconds."""
        self.detail, now = clean(text), time.monotonic()
        if not self.live and now - self.spoke >= SLOW_S:
            self.spoke = now
            self._print(f"  {duration(now - self.since)}: {self.detail}")

    def step(self, row: Row, samples: Rows = ()) -> None:
        """A logged row, and samples of that step."""
        self.rows.append(row)
        if len(self.rows) >= 2 * KEPT:  # a drawing must not take longer as the run goes on
            self.rows = self.rows[-KEPT:]
        self.samples = samples or self.samples
        if self.live:
            return
        parts = [f"step {row.get('step', '?')}/{self.plan.get('max_steps') or '?'}"]
        for label, name in [*PLAIN.items(), *headline(row)]:
            parts += [f"{label.rstrip(' %')} {number(v, label)}" for v in history([row], name)]
            if name == "reward" and parts[1:]:
                parts[-1] += self._by_reward(row)
        parts += [f"{seconds:.3g} s/step" for seconds in history([row], "step_time")]
        left = time_left(self.rows, self.plan)
        self._print("  ".join(parts + ([f"eta {duration(left)}"] if left else [])))
        for line in [line for sample in samples[: self.count] for line in example(sample, 100)]:
            self._print(f"  {line.plain.rstrip()}")

    def _by_reward(self, row: Row) -> str:
        """The mean of each of several rewards, behind the score: ` (right 0.5, short -0.2)`."""
        means = {clean(n): history([row], key) for n, key in reward_means([row]).items()}
        found = ", ".join(f"{n} {number(v[0])}" for n, v in means.items() if v)
        return f" ({found})" if found else ""

    def note(self, text: str) -> None:
        """Lines that stay, above the panel."""
        self._print("\n".join(clean(line) for line in text.splitlines()))

    def close(self) -> None:
        """Draw the panel a last time and give the terminal back."""
        live, self.live, self.phase_name = self.live, None, ""
        if live:
            live.stop()
