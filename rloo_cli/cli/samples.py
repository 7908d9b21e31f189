"""`rloo samples RUN`: show a run's completions, worst or best of a step first.

Completions without a score come last, with a dash. Control characters in texts of the model and the
data are made visible. Imports no torch.
"""

import argparse
import json
import math
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.color import Color
from rich.style import Style
from rich.text import Text

from rloo_cli.cli.answers import answer_console
from rloo_cli.cli.verb_parser import parse_verb
from rloo_cli.config.pasted import refuse_unknown_name
from rloo_cli.config.template import content_text
from rloo_cli.data.images import BadImage, read_thumbnail
from rloo_cli.inspection.run_folders import find_run_folder
from rloo_cli.inspection.sample_files import SampleRecord, find_samples_file, read_sample_records
from rloo_cli.reporting.conversation import conversation_parts, episode_end
from rloo_cli.reporting.panel import clean_line, format_number, wrap_text

MAX_LINES = {"prompt": 8, "completion": 24}  # lines of a text; --json has all of it
# Parts of an episode: style, and number of lines shown.
PART_STYLES = {"told": ("green", 8), "said": ("bold", 24), "called": ("cyan", 8)}
HEAD_WIDTH = 11  # cells before a text
IMAGE_CELLS = 20  # of an image's longer side
OPTIONAL_FIELDS = ("kl", "reward", "advantage")
SHOWN_FIELDS = {  # fields shown on a separate line, or not at all
    "set", "draw", "k", "prompt", "completion", "rewards", "score", "shaped", *OPTIONAL_FIELDS,
    "terminated", "finish_reason", "greedy", "prompt_length", "completion_length", "seed",
    "weight_version", "row", "token_strip", "turns", "episode", "failed", "images",
}  # fmt: skip


def run(args: list[str]) -> int:
    """Run the verb. Raises ConfigError for missing samples and invalid flags."""
    options = parse_verb("samples", args)
    folder = find_run_folder(options.run, "samples")
    path = find_samples_file(folder, options.step, options.eval, options.set)
    samples = read_sample_records(path)
    chosen = rank_samples(samples, options)[: options.n]
    if options.json:
        print(json.dumps(chosen, indent=2))
        return 0
    console = answer_console(100)
    lines = [x for sample in chosen for x in sample_lines(sample, min(console.width, 160))]
    for line in [_title(path, samples, options), *lines]:
        console.print(line, soft_wrap=True)
    return 0


def rank_samples(samples: list[SampleRecord], options: argparse.Namespace) -> list[SampleRecord]:
    """All samples in the requested order; those without a value last."""
    if not (options.worst or options.best):
        return sorted(samples, key=lambda sample: sample.get("k", 0))
    names = list(dict.fromkeys(n for sample in samples for n in sample.get("rewards") or {}))
    if options.reward is not None and options.reward not in names:
        fix = "--reward NAME" if names else "omit --reward"
        refuse_unknown_name("reward", options.reward, names, fix)
    sign = -1.0 if options.best else 1.0

    def position(sample: SampleRecord) -> float:
        value = _sort_value(sample, options.reward)
        return math.inf if value is None else sign * value

    return sorted(samples, key=position)


def _sort_value(sample: SampleRecord, reward: str | None) -> float | None:
    """The value a sample is sorted by: its score, or one reward's value."""
    value = sample.get("score") if reward is None else (sample.get("rewards") or {}).get(reward)
    return float(value) if isinstance(value, int | float) else None


def _title(path: Path, samples: Sequence[SampleRecord], options: argparse.Namespace) -> Text:
    first = "the worst first" if options.worst else "the best first"
    order = f", {first}, by {options.reward or 'score'}" if options.worst or options.best else ""
    without = sum(_sort_value(sample, options.reward) is None for sample in samples)
    unscored = f", {without} without a score" if without else ""
    count = f"{min(options.n, len(samples))} of {len(samples)} samples"
    return Text(clean_line(f"{path}: {count}{unscored}{order}"), "bold")


def sample_lines(sample: SampleRecord, width: int) -> list[Text]:
    """A sample in lines of at most `width` cells: its score, how it ended, its text."""
    parts = [("score", sample.get("score")), *(sample.get("rewards") or {}).items()]
    parts += [(name, sample[name]) for name in OPTIONAL_FIELDS if name in sample]
    scores = " · ".join(f"{clean_line(name)} {_format_number(value)}" for name, value in parts)
    names = [name for name in ("set", "draw", "k") if sample.get(name) is not None]
    which = " · ".join(f"{name} {clean_line(sample[name])}" for name in names)
    length, reason = sample.get("completion_length", "?"), sample.get("finish_reason", "?")
    end = f"{sample.get('prompt_length', '?')} + {length} tokens, {reason}"
    if sample.get("terminated") is False:
        end += ", cut off"
    if "greedy" in sample:
        end += ", greedy" if sample["greedy"] else ", sampled"
    lines = [Text(), *_paragraph("score", scores.removeprefix("score "), width, 3, "yellow")]
    lines += _paragraph("sample", clean_line(f"{which} · {end}"), width, 2, "bright_black")
    prompt = _prompt_text(sample.get("prompt", ""))
    lines += _paragraph("prompt", prompt, width, MAX_LINES["prompt"])
    lines += _image_lines(sample)
    if sample.get("turns"):
        lines += _turn_lines(sample, width)
    else:
        completion = str(sample.get("completion", ""))
        lines += _paragraph("completion", completion, width, MAX_LINES["completion"], "bold")
    columns = sample.get("row") or {}  # columns of the data set, in held-out samples
    rest = [*columns.items(), *((k, v) for k, v in sample.items() if k not in SHOWN_FIELDS)]
    also = " · ".join(f"{clean_line(k)} {clean_line(v)}" for k, v in rest if v is not None)
    return lines + (_paragraph("also", also, width, 2, "bright_black") if also else [])


def _image_lines(sample: SampleRecord) -> list[Text]:
    """The prompt's images, two pixel rows per line; without Pillow, their number."""
    urls = [str(url) for url in sample.get("images") or []]
    try:
        images = [read_thumbnail(url) for url in urls]
    except (ImportError, BadImage) as error:
        return [Text(f"{'images':<{HEAD_WIDTH}}{len(urls)}, not shown: {error}")]
    lines: list[Text] = []
    for image in images:
        scale = IMAGE_CELLS / max(image.width, image.height)
        width = max(1, round(image.width * scale))
        height = max(2, 2 * round(image.height * scale / 2))
        small = image.resize((width, height))
        for y in range(0, height, 2):
            line = Text(f"{'' if lines else 'images':<{HEAD_WIDTH}}", "bright_black")
            for x in range(width):
                upper, lower = (_pixel_colour(small, x, y + i) for i in (0, 1))
                line.append("▀", Style(color=upper, bgcolor=lower))
            lines.append(line)
    return lines


def _pixel_colour(image: Any, x: int, y: int) -> Color:
    red, green, blue = image.getpixel((x, y))
    return Color.from_rgb(red, green, blue)


def _turn_lines(sample: SampleRecord, width: int) -> list[Text]:
    """An episode as a conversation: what the model wrote and called, and what it received."""
    lines: list[Text] = []
    for part in conversation_parts(sample):
        style, limit = PART_STYLES[part.kind]
        head = wrap_text(part.head, HEAD_WIDTH - 1, 1)[0]
        lines += _paragraph(head, part.text, width, limit, style)
    end = clean_line(episode_end(sample))
    return lines + _paragraph("episode", end, width, 2, "bright_black")


def _paragraph(head: str, text: str, width: int, max_lines: int, style: str = "") -> list[Text]:
    """The first lines of a text after its heading; for a prompt the last lines."""
    tail, lines = head == "prompt", []
    for part in text.replace("\r\n", "\n").split("\n"):
        lines += wrap_text(part, width - HEAD_WIDTH, max_lines, from_end=tail)
    if len(lines) > max_lines:
        lines = ["…", *lines[-max_lines:]] if tail else [*lines[:max_lines], "…"]
    heads = zip_longest([head], lines, fillvalue="")
    return [Text.assemble((f"{a:<{HEAD_WIDTH}}", "bright_black"), (b, style)) for a, b in heads]


def _prompt_text(prompt: object) -> str:
    """Plain text, or a conversation with a role before each message."""
    if not isinstance(prompt, list):
        return str(prompt)
    messages = [m if isinstance(m, dict) else {"content": m} for m in prompt]
    return "\n".join(f"{m.get('role', '?')}: {content_text(m.get('content'))}" for m in messages)


def _format_number(value: object) -> str:
    return format_number(value) if isinstance(value, int | float) else "–"
