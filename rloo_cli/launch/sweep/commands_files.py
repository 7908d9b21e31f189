"""How another terminal speaks to a sweep that runs: a file with the question, one with the answer.

<sweep>/requests/<id>.json is looked for at every turn of the loop, several times a second.
"""

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rloo_cli.utils.errors import ConfigError, GenerationError, Problem
from rloo_cli.utils.files import read_json, write_json
from rloo_cli.launch.sweep.state import running

LIMIT_S = 60.0  # for an answer: the loop may be linking a large checkpoint
_count = itertools.count()


def ask(folder: Path, **request: Any) -> str:
    """Ask the sweep that runs there; what it says.

    Raises ConfigError where it refuses, GenerationError where it does not answer.
    """
    name = f"{time.time_ns()}-{os.getpid()}-{next(_count)}"
    question = folder / "requests" / f"{name}.json"
    answer = question.with_suffix(".answer")
    write_json(question, request)
    end = time.monotonic() + LIMIT_S
    try:
        while time.monotonic() < end and (running(folder) or answer.is_file()):
            if answer.is_file():
                said = read_json(answer)
                if "problem" in said:
                    raise ConfigError(Problem(**said["problem"]))
                return str(said["said"])
            time.sleep(0.05)
    finally:
        question.unlink(missing_ok=True)
        answer.unlink(missing_ok=True)
    why = "it ended meanwhile" if not running(folder) else f"no answer in {LIMIT_S:.0f} s"
    fix = f"rloo sweep show {folder}"
    raise GenerationError(Problem(f"{folder} did not take it", "command line", why, fix))


def serve(folder: Path, answer: Callable[[dict[str, Any]], str]) -> None:
    """Answer what was asked. `answer` raises ConfigError for what it refuses."""
    for question in sorted((folder / "requests").glob("[0-9]*.json")):
        request = read_json(question)
        if not request:  # who asked has gone
            continue
        said: dict[str, Any]
        try:
            said = {"said": answer(request)}
        except ConfigError as error:
            problem = error.problems[0]
            said = {"problem": {k: getattr(problem, k) for k in ("what", "where", "why", "fix")}}
        write_json(question.with_suffix(".answer"), said)
        question.unlink(missing_ok=True)


def forget(folder: Path) -> None:
    """Questions to an earlier process, which nobody waits for."""
    for path in (folder / "requests").glob("*"):
        path.unlink(missing_ok=True)
