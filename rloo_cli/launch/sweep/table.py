"""What a sweep shows: one table of all members with their curves, or plain lines."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.live import Live as Screen
from rich.table import Table
from rich.text import Text

from rloo_cli.launch.sweep.member import Live
from rloo_cli.launch.sweep.state import Book, Member
from rloo_cli.reporting.panel import clean, history, number, sparkline

CURVE = 16  # cells
COLOURS = {"training": "green", "failed": "red", "finished": "bold", "stopped": "bright_black"}
WIDE = 160  # of a table that goes to a file

Row = dict[str, Any]


class Curve:
    """The lines of training in a metrics.jsonl, read on as it grows."""

    def __init__(self, path: Path):
        self.path, self.offset, self.rows = path, 0, list[Row]()

    def read(self) -> list[Row]:
        """All there are."""
        try:
            size = self.path.stat().st_size
            if size < self.offset:  # cut back, as it was resumed
                self.offset, self.rows = 0, []
            if size > self.offset:
                self._on()
        except OSError:  # not yet there
            return self.rows
        except ValueError:  # cut back and grown again since: from its beginning, the next time
            self.offset, self.rows = 0, []
        return self.rows

    def _on(self) -> None:
        with self.path.open("rb") as file:
            file.seek(self.offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        found = [row for row in map(json.loads, whole.splitlines()) if "step_time" in row]
        steps = [row["step"] for row in (*self.rows[-1:], *found)]
        if steps != sorted(set(steps)):
            raise ValueError("its steps do not follow each other")
        self.offset += len(whole) + len(newline)
        self.rows += found


def table(book: Book, curves: dict[int, Curve], steps: dict[int, int | None]) -> Table:
    """All members side by side."""
    made = Table(box=box.SIMPLE_HEAD, title=f"rloo sweep · {clean(book.folder.name)}")
    for name in ("", "member", "keys", "state", "step", "reward", "KL", "s/step", "reward so far"):
        made.add_column(name, justify="right" if name in ("", "reward", "KL", "s/step") else "left",
                        overflow="fold" if name in ("member", "keys") else "ellipsis")  # fmt: skip
    for member in book.members:
        rows = curves[member.number].read()
        cells = [last(rows, name) for name in ("reward", "kl", "step_time")]
        whole = steps.get(member.number)
        state = member.state + (f" x{member.share}" if member.share > 1 else "")
        if member.state == "failed":
            state += f" {member.code}"
        name = member.name if member.parent is None else f"{member.name} (at {member.cloned_at})"
        made.add_row(
            str(member.number),
            Text(clean(name)),
            Text(clean(" ".join(book.keys(member)))),
            Text(state, COLOURS.get(member.state, "")),
            f"{member.step}/{whole}" if whole else str(member.step),
            *cells,
            Text(sparkline(history(rows, "reward"), CURVE), "green"),
        )
    return made


def last(rows: list[Row], name: str) -> str:
    """The newest value of a metric, in short."""
    values = history(rows, name)
    return number(values[-1]) if values else "–"


class Show:
    """Shows a sweep while it runs; a context. A table on a terminal, else lines."""

    def __init__(self, book: Book, file: TextIO | None = None):
        self.book, self.file = book, file or sys.stdout
        self.curves: dict[int, Curve] = {}
        self.steps: dict[int, int | None] = {}
        drawable = self.file.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        encoding = (getattr(self.file, "encoding", None) or "utf-8").lower()
        drawable = drawable and encoding.startswith("utf")
        self.console = Console(file=self.file, width=None if self.file.isatty() else WIDE)
        self.screen = Screen(console=self.console, auto_refresh=False) if drawable else None
        self.drawn = 0.0

    def __enter__(self) -> "Show":
        if self.screen is not None:
            self.screen.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.screen is not None:
            self.screen.update(self.whole(), refresh=True)
            self.screen.stop()

    def rows(self, member: Member) -> list[Row]:
        """What a member has logged of its training."""
        place = self.book.place(member) / "metrics.jsonl"
        return self.curves.setdefault(member.number, Curve(place)).read()

    def whole(self) -> Table:
        """The table as it is now."""
        for member in self.book.members:
            self.rows(member)
            self.steps[member.number] = self.steps.get(member.number) or self.book.steps(member)
        return table(self.book, self.curves, self.steps)

    def refresh(self, lives: list[Live]) -> None:
        """Draw the table again, twice a second."""
        if self.screen is None or time.monotonic() - self.drawn < 0.5:
            return
        for live in lives:
            if live.open and (rows := self.rows(live.member)):
                live.member.step = max(live.member.step, int(rows[-1]["step"]))
        self.screen.update(self.whole(), refresh=True)
        self.drawn = time.monotonic()

    def note(self, text: str) -> None:
        """A line that stays."""
        if self.screen is not None:
            self.console.print(Text(clean(text)), soft_wrap=True)
            return
        encoding = getattr(self.file, "encoding", None) or "utf-8"
        try:
            print(
                clean(text).encode(encoding, "replace").decode(encoding), file=self.file, flush=True
            )
        except BrokenPipeError:  # nobody listens, the members go on
            sys.stdout = self.file = open(os.devnull, "w")  # noqa: SIM115

    def boundary(self, live: Live) -> None:
        """A member has ended its chunk."""
        member = live.member
        self.steps[member.number] = live.steps
        if self.screen is not None:
            return
        rows = self.rows(member)
        shown = {"reward": "reward", "kl": "kl", "s/step": "step_time"}
        said = [f"{label} {last(rows, n)}" for label, n in shown.items() if history(rows, n)]
        steps = f"{member.step}/{self.steps[member.number] or '?'}"
        keys = " ".join(self.book.keys(member))
        self.note("  ".join([f"{member.number}  {member.name}  {keys}", f"step {steps}", *said]))

    def ended(self, live: Live) -> None:
        """A member has ended: how, and where its words are if it failed."""
        member = live.member
        why = f" ({member.why})" if member.why else ""
        self.note(f"{member.number}  {member.name}  {member.state} at step {member.step}{why}")
        log = self.book.log(member)
        if member.state == "failed" and log.is_file():
            lines = log.read_text(errors="replace").splitlines()
            first = [i for i, line in enumerate(lines) if line.startswith("error: ")]
            for line in lines[first[-1] : first[-1] + 5] if first else lines[-5:]:
                self.note(f"   {line}")
