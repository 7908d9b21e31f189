"""`--json` of verbs that say much while they work: one JSON value on stdout, at the end.

What is for people goes to stderr. The descriptor itself is turned, so that processes that the
verb starts are heard there too.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from rloo_cli.utils.files import JsonObject, read_json

JSON_FLAG = "--json"


def take_json_flag(args: list[str]) -> tuple[list[str], bool]:
    """The arguments without --json, and whether it was there."""
    return [word for word in args if word != JSON_FLAG], JSON_FLAG in args


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
