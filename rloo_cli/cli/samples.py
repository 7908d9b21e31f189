"""`rloo samples RUN`: completions as a run wrote them, the worst or the best of a step first.

    rloo samples RUN                     the last step that has samples: one of each prompt first
    rloo samples RUN --step 40 --worst   by score, ascending; --best: descending
    rloo samples RUN --worst --reward length   by what that reward said
    rloo samples RUN --eval              held-out samples; --set NAME: of that held-out set
    -n 20                                how many; --json: whole, and everything that is known

A completion without a score stands last and has a dash. What the model or the data wrote is shown
with its control characters as visible signs. Imports no torch.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from rloo_cli.cli.run_folders import Words, find
from rloo_cli.config.old_names import nearest
from rloo_cli.reporting.panel import clean, number, wrapped
from rloo_cli.utils.errors import ConfigError, DataError, Problem

Row = dict[str, Any]
USAGE = "rloo samples RUN [--step N] [--worst | --best] [-n 5] [--eval] [--set NAME]" \
    " [--reward NAME] [--json]"  # fmt: skip
FILE = re.compile(r"(?P<kind>step|eval)(?:_(?P<set>.+))?_(?P<step>\d+)\.jsonl")
SHOWN = 5
LINES = {"prompt": 8, "completion": 24}  # of a text; --json has all of it
HEAD = 11  # cells before a text
FACTS = ("kl", "reward", "advantage")
TOLD = {"draw", "k", "prompt", "completion", "rewards", "score", "shaped", *FACTS, "terminated"}
TOLD |= {"finish_reason", "greedy", "prompt_length", "completion_length", "seed", "weight_version"}


def run(words: list[str]) -> int:
    """The verb. Raises ConfigError for what is not there or not understood."""
    given = _read(words)
    folder = find(given.run, "samples")
    path = _file(folder, given)
    rows = _load(path)
    chosen = ranked(rows, given)[: given.n]
    if given.json:
        print(json.dumps(chosen, indent=2))
        return 0
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that knows fewer signs than a model
    # Both sizes are given, for TERM=dumb overrules a width alone.
    wide, high = (None, None) if sys.stdout.isatty() else (100, 40)
    console = Console(highlight=False, width=wide, height=high)
    width = min(console.width, 160)
    for line in [_title(path, rows, given), *[x for row in chosen for x in shown(row, width)]]:
        console.print(line, soft_wrap=True)
    return 0


def _read(words: list[str]) -> argparse.Namespace:
    parser = Words("samples", USAGE)
    parser.add_argument("--step", type=int)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--worst", action="store_true")
    which.add_argument("--best", action="store_true")
    parser.add_argument("-n", type=int, default=SHOWN)
    parser.add_argument("--eval", action="store_true")
    parser.add_argument("--set")
    parser.add_argument("--reward")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(words)
    if given.n < 1:
        raise ConfigError(Problem(f"-n {given.n}: at least one sample", "command line", fix="-n 5"))
    if given.reward is not None and not (given.worst or given.best):
        fix = f"--worst --reward {given.reward}"
        why = "it says by what the samples are sorted"
        raise ConfigError(Problem("--reward needs --worst or --best", "command line", why, fix))
    return given


def _file(folder: Path, given: argparse.Namespace) -> Path:
    """The file of samples that was asked for."""
    kind = "eval" if given.eval or given.set is not None else "step"
    found: dict[str, dict[int, Path]] = {}  # held-out set, "" where there is but one -> by step
    for path in sorted(folder.glob("samples/*.jsonl")):
        name = FILE.fullmatch(path.name)
        if name and name["kind"] == kind:
            found.setdefault(name["set"] or "", {})[int(name["step"])] = path
    what = "held-out samples" if kind == "eval" else "samples"
    if not found:
        why = f"nothing like it in {folder / 'samples'}"
        raise ConfigError(Problem(f"{folder} has no {what}", "command line", why))
    wanted = given.set or ("" if "" in found else next(iter(found)))
    if wanted not in found or (given.set is None and wanted and len(found) > 1):
        named = [name for name in found if name]
        why = f"held-out sets: {', '.join(named)}" if named else "there is but one, without a name"
        close = nearest(given.set or "", named) or named
        what = f"there is no held-out set {given.set!r}" if given.set else "which held-out set?"
        fix = f"--set {close[0]}" if close else "--eval"
        raise ConfigError(Problem(what, "command line", why, fix))
    steps = found[wanted]
    if given.step is None:
        return steps[max(steps)]
    if given.step not in steps:
        near = sorted(sorted(steps, key=lambda step: abs(step - given.step))[:2])
        why = f"the nearest that have: {' and '.join(map(str, near))}"
        raise ConfigError(
            Problem(f"step {given.step} has no {what}", "command line", why, f"--step {near[0]}")
        )
    return steps[given.step]


def _load(path: Path) -> list[Row]:
    """Every sample of a file; numbers that are not finite are None."""
    rows = []
    for place, line in enumerate(path.read_text(encoding="utf-8").split("\n")[:-1], 1):
        try:
            rows.append(dict(json.loads(line, parse_constant=lambda _: None)))
        except (ValueError, TypeError) as error:
            where, why = f"{path}:{place}", str(error)
            raise DataError(Problem("a line is no sample", where, why)) from None
    return rows


def ranked(rows: list[Row], given: argparse.Namespace) -> list[Row]:
    """All samples in the order that was asked for; those without a value last."""
    if not (given.worst or given.best):
        return sorted(rows, key=lambda row: row.get("k", 0))
    names = list(dict.fromkeys(name for row in rows for name in row.get("rewards") or {}))
    if given.reward is not None and given.reward not in names:
        close = nearest(given.reward, names) or names
        why, fix = f"rewards: {', '.join(names)}", f"--reward {close[0]}" if close else ""
        raise ConfigError(Problem(f"no reward {given.reward!r} here", "command line", why, fix))
    sign = -1.0 if given.best else 1.0

    def place(row: Row) -> float:
        value = _value(row, given.reward)
        return math.inf if value is None else sign * value

    return sorted(rows, key=place)


def _value(row: Row, reward: str | None) -> float | None:
    """What a sample is sorted by: its score, or what one reward said."""
    value = row.get("score") if reward is None else (row.get("rewards") or {}).get(reward)
    return float(value) if isinstance(value, int | float) else None


def _title(path: Path, rows: Sequence[Row], given: argparse.Namespace) -> Text:
    by = f"by {given.reward}" if given.reward else "by score"
    how = f", the worst first, {by}" if given.worst else f", the best first, {by}"
    how = how if given.worst or given.best else ""
    without = sum(_value(row, given.reward) is None for row in rows)
    unscored = f", {without} without a score" if without else ""
    return Text(f"{path}: {min(given.n, len(rows))} of {len(rows)} samples{unscored}{how}", "bold")


def shown(row: Row, width: int) -> list[Text]:
    """A sample in lines of at most `width` cells: how it scored, how it ended, what was said."""
    parts = [("score", row.get("score")), *(row.get("rewards") or {}).items()]
    parts += [(name, row[name]) for name in FACTS if name in row]
    told = " · ".join(f"{clean(name)} {_number(value)}" for name, value in parts)
    names = ("set", "draw", "k")
    which = " · ".join(f"{name} {clean(row[name])}" for name in names if row.get(name) is not None)
    length, reason = row.get("completion_length", "?"), row.get("finish_reason", "?")
    end = f"{row.get('prompt_length', '?')} + {length} tokens, {reason}"
    if row.get("terminated") is False:
        end += ", cut off"
    if "greedy" in row:
        end += ", greedy" if row["greedy"] else ", sampled"
    lines = [Text(), *_paragraph("score", told.removeprefix("score "), width, 3, "yellow")]
    lines += _paragraph("sample", clean(f"{which} · {end}"), width, 2, "bright_black")
    lines += _paragraph("prompt", _prompt(row.get("prompt", "")), width, LINES["prompt"])
    completion = str(row.get("completion", ""))
    lines += _paragraph("completion", completion, width, LINES["completion"], "bold")
    columns = row.get("row") or {}  # of the data set, in held-out samples
    told_already = {*TOLD, *names, "row"}
    rest = [*columns.items(), *((k, v) for k, v in row.items() if k not in told_already)]
    also = " · ".join(f"{clean(k)} {clean(v)}" for k, v in rest if v is not None)
    return lines + (_paragraph("also", also, width, 2, "bright_black") if also else [])


def _paragraph(head: str, text: str, width: int, most: int, style: str = "") -> list[Text]:
    """A text with its own line ends, at most so many lines of it; of a prompt the last ones."""
    tail = head == "prompt"
    parts = text.replace("\r\n", "\n").split("\n")
    lines = [line for part in parts for line in wrapped(part, width - HEAD, most, end=tail)]
    if len(lines) > most:
        lines = ["…", *lines[-most:]] if tail else [*lines[:most], "…"]
    heads = zip_longest([head], lines, fillvalue="")
    return [Text.assemble((f"{a:<{HEAD}}", "bright_black"), (b, style)) for a, b in heads]


def _prompt(prompt: Any) -> str:
    """Plain text, or a conversation with a role before each message."""
    if not isinstance(prompt, list):
        return str(prompt)
    messages = [m if isinstance(m, dict) else {"content": m} for m in prompt]
    return "\n".join(f"{m.get('role', '?')}: {m.get('content', '')}" for m in messages)


def _number(value: Any) -> str:
    return number(value) if isinstance(value, int | float) else "–"
