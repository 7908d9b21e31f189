"""`rloo top [RUN]`: a live screen of a run, or the last state of one that has ended.

Only reads files; imports no torch.
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rloo_cli.cli.answers import answer_console
from rloo_cli.cli.verb_parser import parse_verb
from rloo_cli.inspection.run_folders import RUNS_ROOT, find_run_folder
from rloo_cli.inspection.run_list import list_runs
from rloo_cli.inspection.run_screen import RunScreen
from rloo_cli.utils.errors import require_packages

if TYPE_CHECKING:  # lazy: textual takes a third of a second
    from textual.app import App


def run(args: list[str]) -> int:
    """Run the verb. Raises ConfigError for an unknown run."""
    options = parse_verb("top", args)
    screen = RunScreen(_chosen_folder(options.run))
    if options.json:
        print(json.dumps(screen.screen_values(), indent=2))
    elif options.once or not sys.stdout.isatty():
        console = answer_console(120)
        console.print(screen.render_frame(min(console.width, 160)))
    else:
        require_packages("view", "the live screen of rloo top", "textual")
        run_screen_app(screen, options.every).run()
    return 0


def _chosen_folder(name: str | None) -> Path:
    """The named run, or the one written last."""
    if name is None and (runs := list_runs(RUNS_ROOT)):
        return Path(runs[0].run)
    return find_run_folder(name, "top")


def run_screen_app(screen: RunScreen, every_s: float) -> "App[None]":
    """The textual application: one frame, redrawn every `every_s` seconds."""
    from textual.app import App, ComposeResult  # lazy: only with a terminal
    from textual.containers import VerticalScroll
    from textual.widgets import Footer, Static

    class TopApp(App[None]):
        BINDINGS = [("q", "quit", "leave"), ("escape", "quit", "leave")]  # noqa: RUF012
        TITLE = "rloo top"

        def compose(self) -> ComposeResult:
            yield VerticalScroll(Static(id="frame", markup=False))
            yield Footer()

        def on_mount(self) -> None:
            self.draw_frame()
            self.set_interval(every_s, self.look_again)

        def on_resize(self) -> None:
            self.draw_frame()

        def look_again(self) -> None:
            screen.refresh_run()
            self.draw_frame()

        def draw_frame(self) -> None:
            width = max(40, min(self.size.width - 3, 160))
            self.query_one("#frame", Static).update(screen.render_frame(width))

    return TopApp()
