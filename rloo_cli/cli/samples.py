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

from rloo_cli.cli.run_folders import RunArgumentParser, find_run_folder
from rloo_cli.config.old_names import nearest_names
from rloo_cli.reporting.panel import clean_line, format_number, wrap_text
from rloo_cli.utils.errors import ConfigError, DataError, Problem
from rloo_cli.utils.files import JsonObject

SampleRecord = JsonObject
USAGE = "rloo samples RUN [--step N] [--worst | --best] [-n 5] [--eval] [--set NAME]" \
    " [--reward NAME] [--json]"  # fmt: skip
SAMPLES_FILE = re.compile(r"(?P<kind>step|eval)(?:_(?P<set>.+))?_(?P<step>\d+)\.jsonl")
DEFAULT_COUNT = 5
MAX_LINES = {"prompt": 8, "completion": 24}  # of a text; --json has all of it
HEAD_WIDTH = 11  # cells before a text
OPTIONAL_FIELDS = ("kl", "reward", "advantage")
SHOWN_FIELDS = {
    "draw",
    "k",
    "prompt",
    "completion",
    "rewards",
    "score",
    "shaped",
    *OPTIONAL_FIELDS,
    "terminated",
}
SHOWN_FIELDS |= {
    "finish_reason",
    "greedy",
    "prompt_length",
    "completion_length",
    "seed",
    "weight_version",
}


def run(args: list[str]) -> int:
    """The verb. Raises ConfigError for what is not there or not understood."""
    given = _parse_args(args)
    folder = find_run_folder(given.run, "samples")
    path = _samples_file(folder, given)
    rows = _load_samples(path)
    chosen = rank_samples(rows, given)[: given.n]
    if given.json:
        print(json.dumps(chosen, indent=2))
        return 0
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that knows fewer signs than a model
    # Both sizes are given, for TERM=dumb overrules a width alone.
    wide, high = (None, None) if sys.stdout.isatty() else (100, 40)
    console = Console(highlight=False, width=wide, height=high)
    width = min(console.width, 160)
    for line in [
        _title(path, rows, given),
        *[x for row in chosen for x in sample_lines(row, width)],
    ]:
        console.print(line, soft_wrap=True)
    return 0


def _parse_args(args: list[str]) -> argparse.Namespace:
    parser = RunArgumentParser("samples", USAGE)
    parser.add_argument("--step", type=int)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--worst", action="store_true")
    which.add_argument("--best", action="store_true")
    parser.add_argument("-n", type=int, default=DEFAULT_COUNT)
    parser.add_argument("--eval", action="store_true")
    parser.add_argument("--set")
    parser.add_argument("--reward")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(args)
    if given.n < 1:
        raise ConfigError(Problem(f"-n {given.n}: at least one sample", "command line", fix="-n 5"))
    if given.reward is not None and not (given.worst or given.best):
        fix = f"--worst --reward {given.reward}"
        why = "it says by what the samples are sorted"
        raise ConfigError(Problem("--reward needs --worst or --best", "command line", why, fix))
    return given


def _samples_file(folder: Path, options: argparse.Namespace) -> Path:
    """The file of samples that was asked for."""
    kind = "eval" if options.eval or options.set is not None else "step"
    found: dict[str, dict[int, Path]] = {}  # held-out set, "" where there is but one -> by step
    for path in sorted(folder.glob("samples/*.jsonl")):
        name = SAMPLES_FILE.fullmatch(path.name)
        if name and name["kind"] == kind:
            found.setdefault(name["set"] or "", {})[int(name["step"])] = path
    what = "held-out samples" if kind == "eval" else "samples"
    if not found:
        why = f"nothing like it in {folder / 'samples'}"
        raise ConfigError(Problem(f"{folder} has no {what}", "command line", why))
    wanted = options.set or ("" if "" in found else next(iter(found)))
    if wanted not in found or (options.set is None and wanted and len(found) > 1):
        named = [name for name in found if name]
        why = f"held-out sets: {', '.join(named)}" if named else "there is but one, without a name"
        close = nearest_names(options.set or "", named) or named
        what = f"there is no held-out set {options.set!r}" if options.set else "which held-out set?"
        fix = f"--set {close[0]}" if close else "--eval"
        raise ConfigError(Problem(what, "command line", why, fix))
    steps = found[wanted]
    if options.step is None:
        return steps[max(steps)]
    if options.step not in steps:
        near = sorted(sorted(steps, key=lambda step: abs(step - options.step))[:2])
        why = f"the nearest that have: {' and '.join(map(str, near))}"
        raise ConfigError(
            Problem(f"step {options.step} has no {what}", "command line", why, f"--step {near[0]}")
        )
    return steps[options.step]


def _load_samples(path: Path) -> list[SampleRecord]:
    """Every sample of a file; numbers that are not finite are None."""
    rows = []
    for place, line in enumerate(path.read_text(encoding="utf-8").split("\n")[:-1], 1):
        try:
            rows.append(dict(json.loads(line, parse_constant=lambda _: None)))
        except (ValueError, TypeError) as error:
            where, why = f"{path}:{place}", str(error)
            raise DataError(Problem("a line is no sample", where, why)) from None
    return rows


def rank_samples(samples: list[SampleRecord], options: argparse.Namespace) -> list[SampleRecord]:
    """All samples in the order that was asked for; those without a value last."""
    if not (options.worst or options.best):
        return sorted(samples, key=lambda row: row.get("k", 0))
    names = list(dict.fromkeys(name for row in samples for name in row.get("rewards") or {}))
    if options.reward is not None and options.reward not in names:
        close = nearest_names(options.reward, names) or names
        why, fix = f"rewards: {', '.join(names)}", f"--reward {close[0]}" if close else ""
        raise ConfigError(Problem(f"no reward {options.reward!r} here", "command line", why, fix))
    sign = -1.0 if options.best else 1.0

    def place(row: SampleRecord) -> float:
        value = _sort_value(row, options.reward)
        return math.inf if value is None else sign * value

    return sorted(samples, key=place)


def _sort_value(sample: SampleRecord, reward: str | None) -> float | None:
    """What a sample is sorted by: its score, or what one reward said."""
    value = sample.get("score") if reward is None else (sample.get("rewards") or {}).get(reward)
    return float(value) if isinstance(value, int | float) else None


def _title(path: Path, samples: Sequence[SampleRecord], options: argparse.Namespace) -> Text:
    by = f"by {options.reward}" if options.reward else "by score"
    how = f", the worst first, {by}" if options.worst else f", the best first, {by}"
    how = how if options.worst or options.best else ""
    without = sum(_sort_value(row, options.reward) is None for row in samples)
    unscored = f", {without} without a score" if without else ""
    return Text(
        f"{path}: {min(options.n, len(samples))} of {len(samples)} samples{unscored}{how}", "bold"
    )


def sample_lines(sample: SampleRecord, width: int) -> list[Text]:
    """A sample in lines of at most `width` cells: how it scored, how it ended, what was said."""
    parts = [("score", sample.get("score")), *(sample.get("rewards") or {}).items()]
    parts += [(name, sample[name]) for name in OPTIONAL_FIELDS if name in sample]
    told = " · ".join(f"{clean_line(name)} {_format_number(value)}" for name, value in parts)
    names = ("set", "draw", "k")
    which = " · ".join(
        f"{name} {clean_line(sample[name])}" for name in names if sample.get(name) is not None
    )
    length, reason = sample.get("completion_length", "?"), sample.get("finish_reason", "?")
    end = f"{sample.get('prompt_length', '?')} + {length} tokens, {reason}"
    if sample.get("terminated") is False:
        end += ", cut off"
    if "greedy" in sample:
        end += ", greedy" if sample["greedy"] else ", sampled"
    lines = [Text(), *_paragraph("score", told.removeprefix("score "), width, 3, "yellow")]
    lines += _paragraph("sample", clean_line(f"{which} · {end}"), width, 2, "bright_black")
    lines += _paragraph(
        "prompt", _prompt_text(sample.get("prompt", "")), width, MAX_LINES["prompt"]
    )
    completion = str(sample.get("completion", ""))
    lines += _paragraph("completion", completion, width, MAX_LINES["completion"], "bold")
    columns = sample.get("row") or {}  # of the data set, in held-out samples
    told_already = {*SHOWN_FIELDS, *names, "row"}
    rest = [*columns.items(), *((k, v) for k, v in sample.items() if k not in told_already)]
    also = " · ".join(f"{clean_line(k)} {clean_line(v)}" for k, v in rest if v is not None)
    return lines + (_paragraph("also", also, width, 2, "bright_black") if also else [])


def _paragraph(head: str, text: str, width: int, max_lines: int, style: str = "") -> list[Text]:
    """A text with its own line ends, at most so many lines of it; of a prompt the last ones."""
    tail = head == "prompt"
    parts = text.replace("\r\n", "\n").split("\n")
    lines = [
        line
        for part in parts
        for line in wrap_text(part, width - HEAD_WIDTH, max_lines, from_end=tail)
    ]
    if len(lines) > max_lines:
        lines = ["…", *lines[-max_lines:]] if tail else [*lines[:max_lines], "…"]
    heads = zip_longest([head], lines, fillvalue="")
    return [Text.assemble((f"{a:<{HEAD_WIDTH}}", "bright_black"), (b, style)) for a, b in heads]


def _prompt_text(prompt: Any) -> str:
    """Plain text, or a conversation with a role before each message."""
    if not isinstance(prompt, list):
        return str(prompt)
    messages = [m if isinstance(m, dict) else {"content": m} for m in prompt]
    return "\n".join(f"{m.get('role', '?')}: {m.get('content', '')}" for m in messages)


def _format_number(value: Any) -> str:
    return format_number(value) if isinstance(value, int | float) else "–"
