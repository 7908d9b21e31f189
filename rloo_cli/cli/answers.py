"""How verbs answer: on a console of stdout, or by `--json` with one value at the end.

With `--json` a verb that says much while it works says it on stderr. The descriptor itself is
turned, so that processes that the verb starts are heard there too.
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
    """What the block prints goes to stderr, then the values that it has filled in to stdout.

    Without `wanted` nothing is turned and nothing printed. Where the block raises, stdout has
    nothing.
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
    with contextlib.suppress(OSError):  # closed before we began: there is nothing to turn
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
    """What a program wants to know of a run that has ended: its state, step, code and scores."""
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
    """A console on stdout; that wide (cells) where stdout is a file or a pipe.

    Characters that the terminal's encoding does not have are replaced. Brackets in a text are no
    markup: it may be a model's, or come from another user's run.
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    # Both sizes are set, for TERM=dumb overrules a width alone.
    width, height = (None, None) if sys.stdout.isatty() else (width_without_terminal, 40)
    return Console(highlight=False, markup=False, emoji=False, width=width, height=height)
