"""Output of verbs: a console on stdout, or with `--json` one value at the end.

With `--json`, a verb's other output goes to stderr. The file descriptor itself is redirected, which
also covers processes that the verb starts.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from rloo_cli.utils.files import JsonObject, read_json


@contextlib.contextmanager
def json_answer(wanted: bool) -> Iterator[JsonObject]:
    """Redirect the block's output to stderr, then print the values that it filled in to stdout.

    Without `wanted`, nothing is redirected or printed. If the block raises, stdout stays empty.
    """
    values: JsonObject = {}
    if not wanted:
        yield values
        return
    with _stdout_to_stderr():
        yield values
    print(json.dumps(values, indent=2, default=str))


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    sys.stdout.flush()
    kept: int | None = None
    with contextlib.suppress(OSError):  # already closed: nothing to redirect
        kept = os.dup(1)
    try:
        if kept is not None:
            os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stderr.flush()
        if kept is not None:
            os.dup2(kept, 1)
            os.close(kept)


def run_values(folder: Path) -> JsonObject:
    """The result of an ended run for programs: state, step, exit code and scores."""
    try:
        about, summary = read_json(folder / "run.json"), read_json(folder / "summary.json")
    except (OSError, ValueError):
        about, summary = {}, {}
    progress = about.get("progress") or {}
    return {
        "run": str(folder),
        "state": about.get("state"),
        "code": about.get("code"),
        "step": progress.get("step"),
        "attempt": about.get("attempt"),
        "checkpoint": about.get("checkpoint"),
        "why": (about.get("ended") or {}).get("why"),
        "summary": summary,
    }


def answer_console(width_without_terminal: int) -> Console:
    """A console on stdout; `width` cells wide if stdout is a file or a pipe.

    Characters outside the terminal's encoding are replaced. Brackets in a text are not markup: the
    text may come from a model or another user's run.
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    # Set both sizes: TERM=dumb overrides a width alone.
    width, height = (None, None) if sys.stdout.isatty() else (width_without_terminal, 40)
    return Console(highlight=False, markup=False, emoji=False, width=width, height=height)
