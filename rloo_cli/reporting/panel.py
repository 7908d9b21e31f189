"""The panel of a run, drawn from its metrics and samples; also as an SVG, and the final table.

Text from a model or a data set goes through `clean_line` and `Text`: it can neither set markup nor
send control characters.
"""

import argparse
import io
import json
import math
import re
import sys
from collections.abc import Sequence
from itertools import pairwise, zip_longest
from pathlib import Path
from statistics import median

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from rloo_cli.config.schema import RunConfig
from rloo_cli.config.template import content_text
from rloo_cli.reporting.conversation import conversation_parts, episode_end
from rloo_cli.reporting.eval_lines import (
    headline_metrics,
    interval_text,
    is_evaluation,
    is_interval_part,
    split_by_set,
)
from rloo_cli.reporting.metrics_lines import MetricsMapping
from rloo_cli.utils import paths
from rloo_cli.utils.console import show_control_characters
from rloo_cli.utils.errors import RunError, refuse
from rloo_cli.utils.files import JsonObject, read_json

RECENT_STEPS = 20  # window of the time left and the split: steady but current
INTERVAL_CAPTION = "in brackets: the 95 % interval, over prompts"
MAX_SETS_SHOWN = 4  # held-out sets in the panel
MAX_REWARDS_SHOWN = 6  # rewards in the panel, where there are several
SPARKLINE_BARS = "▁▂▃▄▅▆▇█"
PHASE_COLOURS = {"generation": "cyan", "reward": "yellow"}
PHASE_COLOURS |= {"reference": "magenta", "update": "green"}
MERGED_PHASES = {"reference": "old_logp", "update": "optimizer"}  # phases counted with another one
MERGED_PHASES |= {"generation": "exposed"}  # the part that training waits for
PANEL_METRICS = {  # label: metric; a % marks a share
    "KL": "kl",
    "entropy": "entropy",
    "length": "completions/mean_length",
    "truncated %": "completions/clipped_ratio",
    "clipped %": "clip_ratio/region_mean",
    "no spread %": "frac_reward_zero_std",
    "grad norm": "grad_norm",
    "tokens/s": "perf/tokens_per_s",
}
EPISODE_FIGURES = {  # for runs with an agent
    "turns": "agent/turns",
    "calls": "agent/calls",
    "bad calls": "agent/bad_calls",
    "no score %": "agent/failures",
    "seconds a call": "agent/tool_s",
}
OVERLAP_FIGURES = {  # for runs that sample while they train
    "hidden s": "overlap/hidden_s",
    "exposed s": "overlap/exposed_s",
    "idle s": "overlap/idle_s",
}
EPISODE_LIMITS = ("turns", "tokens", "context")  # the most frequent one is shown
LINE_LABELS = ("KL", "entropy", "length", "truncated %")
LINE_METRICS = {"reward": "reward"} | {label.lower(): PANEL_METRICS[label] for label in LINE_LABELS}
LINE_METRICS |= {"turns": "agent/turns", "no score %": "agent/failures"}
MAX_PARTS_SHOWN = 4  # of an episode, in the panel
PART_STYLES = {"told": "green", "said": "bold", "called": "cyan"}


def panel_header(config: RunConfig, beta: float, folder: Path) -> JsonObject:
    """The lines at the top of the panel."""
    a, prompts = config.algorithm, config.train.prompts_per_step
    return {
        "name": config.name,
        "model": config.model.path,
        "algorithm": f"{a.name} K={a.num_generations} · P={prompts} · beta {beta}",
        "max_steps": config.max_steps,
        "folder": str(paths.path_as_typed(folder)),
        "recipe": read_json(folder / "run.json").get("recipe"),
    }


def clean_line(text: object) -> str:
    """One line, with visible signs for newlines, control and invisible characters."""
    return show_control_characters(str(text)).replace("\n", "⏎ ")


def metric_history(metrics_lines: Sequence[MetricsMapping], name: str) -> list[float]:
    """The finite values of one metric, in order."""
    values = [metrics.get(name) for metrics in metrics_lines]
    return [v for v in values if isinstance(v, int | float) and math.isfinite(v)]


def format_number(value: float, label: str = "") -> str:
    """A value in short form; as a share if the label ends in %."""
    if label.endswith("%"):
        return f"{100 * value:.{1 if 0 < value < 0.0995 else 0}f}%"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def format_duration(seconds: float) -> str:
    """`1h05m`, `2m03s` or `9s`."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}h{m:02}m" if hours else f"{m}m{s:02}s" if m else f"{s}s"


def draw_sparkline(values: Sequence[float], width: int) -> str:
    """At most `width` bars from the least value to the greatest; more values are averaged."""
    if len(values) > width:
        edges = [i * len(values) // width for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(values, default=0.0), max(values, default=0.0)
    scale = 7.99 / (high - low) if high > low else 0.0
    return "".join(SPARKLINE_BARS[int((v - low) * scale) if scale else 3] for v in values)


def last_message(prompt: object) -> str:
    """A plain prompt unchanged; of a conversation the last user message."""
    if not isinstance(prompt, list) or not all(isinstance(m, dict) for m in prompt) or not prompt:
        return str(prompt)
    asked = [m for m in prompt if m.get("role") == "user"] or prompt
    return content_text(asked[-1].get("content"))


def wrap_text(text: object, width: int, max_lines: int, from_end: bool = False) -> list[str]:
    """The first (with `from_end` the last) lines of a text, with … where it was cut."""
    whole, limit = clean_line(text).strip(), (max_lines + 1) * width
    part = whole[-limit:] if from_end else whole[:limit]
    wrapped = [line.plain for line in Text(part).wrap(Console(width=width), width)] or [""]
    lines = wrapped[-max_lines:] if from_end else wrapped[:max_lines]
    if len(lines) < len(wrapped) and from_end:
        lines[0] = "…" + lines[0][1:]
    elif len(lines) < len(wrapped):
        lines[-1] = set_cell_size(lines[-1], min(cell_len(lines[-1]), width - 1)) + "…"
    return lines


def reward_mean_names(metrics_lines: Sequence[MetricsMapping]) -> dict[str, str]:
    """Name of each reward -> the metric of its mean; {} if there is only one reward."""
    matches = (re.fullmatch(r"reward/(.+)/mean", key) for key in (metrics_lines or [{}])[-1])
    means = {match[1]: match[0] for match in matches if match}
    return means if len(means) > 1 else {}


def time_left(metrics_lines: Sequence[MetricsMapping], plan: JsonObject) -> float | None:
    """Seconds until the run's end, from the median of recent steps; None while unknown."""
    times, total = metric_history(metrics_lines, "step_time")[-RECENT_STEPS:], plan.get("max_steps")
    step = max(metric_history(metrics_lines, "step"), default=0.0)
    return max(0.0, total - step) * median(times) if times and total else None


def progress_bar(
    metrics_lines: Sequence[MetricsMapping], plan: JsonObject, width: int, elapsed: float | None
) -> Text:
    step, total = int(max(metric_history(metrics_lines, "step"), default=0)), plan.get("max_steps")
    times, left = metric_history(metrics_lines, "step_time"), time_left(metrics_lines, plan)
    if elapsed is None:  # each line is the mean of its logged steps
        elapsed = step * sum(times) / len(times) if times else 0.0
    start = f"step {step}/{total or '?'} "
    ending = f" {format_duration(elapsed)}" + (f", {format_duration(left)} left" if left else "")
    bar_width = max(4, width - len(start) - len(ending))
    done = min(bar_width, bar_width * step // (total or sys.maxsize))
    todo = ("╌" * (bar_width - done), "bright_black")
    return Text.assemble((start, "bold"), ("━" * done, "green"), todo, ending, no_wrap=True)


def phase_split(metrics_lines: Sequence[MetricsMapping], width: int) -> list[Text]:
    """A bar of where the seconds of recent steps went, and its legend in the same order."""
    recent = [m for m in metrics_lines if metric_history([m], "step_time")][-RECENT_STEPS:]
    parts: dict[str, float] = {}
    for name in PHASE_COLOURS:
        metrics = (f"time/{name}", f"time/{MERGED_PHASES.get(name)}")
        parts[name] = sum(sum(metric_history(recent, metric)) for metric in metrics)
    whole = sum(metric_history(recent, "step_time"))
    parts["other"] = max(0.0, whole - sum(parts.values()))
    if not (total := sum(parts.values())):
        return []
    bar = Text().append(f"{whole / max(1, len(recent)):.3g} s/step ", "bold")
    legend, spent, start = Text(), 0.0, len(bar)
    for name, seconds in parts.items():
        spent += seconds
        size = start + round((width - start) * spent / total) - len(bar)
        colour = PHASE_COLOURS.get(name, "bright_black")
        bar.append("━" * (size - 1) + " " * (size > 0), colour)  # gaps: there may be no colour
        legend.append("■\xa0", colour).append(f"{name}\xa0{seconds / total:.0%}  ")
    return [bar, legend]


def metric_figures(metrics_lines: Sequence[MetricsMapping], width: int) -> list[Text]:
    """Each score on a line with its change since the start; the other metrics in two columns."""
    lines, cells, half = [], [], (width - 2) // 2
    headlines = (headline_metrics(m) for m in metrics_lines if is_evaluation(m))
    sets = dict.fromkeys(name for line in headlines for _, name in line if "@" not in name)
    names = {n: clean_line(n[5:-7] or "held out")[-14:] for n in list(sets)[:MAX_SETS_SHOWN]}
    for name, label in {"reward": "reward", **names}.items():
        if values := metric_history(metrics_lines, name):
            change, value = values[-1] - values[0], format_number(values[-1])
            since = f"{change:+.3g} since start" if len(values) > 1 else ""
            line = Text.assemble((f"{label:<{19 - len(value)}}{value} ", "bold"))
            line.append(f"{since[:21]:<22}", "green" if change > 0 else "red" if change < 0 else "")
            last = next(line for line in reversed(metrics_lines) if name in line)
            line.append(f"{interval_text(last, name).strip()} ".lstrip(), "bright_black")
            lines.append(line.append(draw_sparkline(values, width - len(line)), "green"))
    trained = [metrics for metrics in metrics_lines if "reward" in metrics]
    rewards = [*reward_mean_names(trained).items()][:MAX_REWARDS_SHOWN]
    parts = {f"· {clean_line(reward)[:13]}": name for reward, name in rewards}
    shown = PANEL_METRICS | episode_figures(metrics_lines) | overlap_figures(metrics_lines) | parts
    for label, name in shown.items():
        values = metric_history(metrics_lines, name)
        value = format_number(values[-1], label) if values else "–"
        head = (f"{label.removesuffix(' %'):<{19 - len(value)}}", "bright_black")
        bars = f"{draw_sparkline(values, half - 20):<{half - 20}}"
        cells.append(Text.assemble(head, (value, "bold"), " ", (bars, "cyan")))
    return lines + [Text("  ").join(cells[i : i + 2]) for i in range(0, len(cells), 2)]


def episode_figures(metrics_lines: Sequence[MetricsMapping]) -> dict[str, str]:
    """Label -> metric for an agent's episodes; {} without one."""
    steps = [m for m in metrics_lines if metric_history([m], "agent/turns")]
    if not steps:
        return {}
    limits = {f"cut: {n} %": f"agent/truncated_by/{n}" for n in EPISODE_LIMITS}
    shares = {label: sum(metric_history(steps[-1:], limits[label])) for label in limits}
    most = max(shares, key=lambda label: shares[label])
    return EPISODE_FIGURES | {most: limits[most]}


def overlap_figures(metrics_lines: Sequence[MetricsMapping]) -> dict[str, str]:
    """Label -> metric for the time split of a run with `generation.overlap`; {} without it."""
    overlaps = any(metric_history([m], "overlap/idle_s") for m in metrics_lines)
    return OVERLAP_FIGURES if overlaps else {}


def render_conversation(sample: JsonObject, width: int) -> list[Text]:
    """The last parts of an episode, a line each."""
    parts = conversation_parts(sample)
    lines = []
    for part in parts[-MAX_PARTS_SHOWN:]:
        head = clean_line(part.head)[:10]
        text = wrap_text(part.text, width - 11, 1)[0]
        named = (set_cell_size(head, 11), "bright_black")
        lines.append(Text.assemble(named, (text, PART_STYLES[part.kind])))
    return lines


def render_sample(sample: JsonObject, width: int) -> list[Text]:
    """The end of the prompt, the completion or episode, and its score by reward."""
    lines: list[Text] = []
    for name, count in (("prompt", 2), ("completion", 4)):
        if name == "completion" and (turns := render_conversation(sample, width)):
            lines += turns
            continue
        shown = last_message(sample.get(name, "")) if name == "prompt" else sample.get(name, "")
        texts = wrap_text(shown, width - 11, count, from_end=name == "prompt")
        for head, text in zip_longest([name], texts, fillvalue=""):
            style = "bold" if name == "completion" else ""
            lines.append(Text.assemble((f"{head:<11}", "bright_black"), (text, style)))
    scores = {"score": sample.get("score")} | dict(sample.get("rewards") or {})
    parts = []
    for name, score in scores.items():
        parts.append(f"{name} {format_number(score) if isinstance(score, int | float) else '–'}")
    end = episode_end(sample) or str(sample.get("finish_reason") or "")
    parts += [end] if end else []
    return [*lines, Text(wrap_text(" · ".join(parts), width, 1)[0], "yellow")]


def render_panel(
    metrics_lines: Sequence[MetricsMapping],
    samples: Sequence[JsonObject],
    plan: JsonObject,
    width: int,
    phase: str = "",
    elapsed: float | None = None,
) -> RenderableType:
    """The panel, `width` cells wide; `elapsed` in seconds, None = the sum of the steps."""
    inner = max(48, width) - 4  # two metrics side by side need that many cells
    head = " · ".join(clean_line(plan[k]) for k in ("model", "algorithm", "folder") if plan.get(k))
    lines = [Text(wrap_text(head, inner, 1)[0], "bright_black")]
    lines += [progress_bar(metrics_lines, plan, inner, elapsed), *phase_split(metrics_lines, inner)]
    lines += metric_figures(metrics_lines, inner)
    if samples:
        lines.append(Text("─ sample " + "─" * (inner - 9), "bright_black"))
        lines += render_sample(samples[(len(metrics_lines) - 1) % len(samples)], inner)
    title = Text(f"rloo · {clean_line(plan.get('name', 'run'))}", "bold")
    below = Text(clean_line(phase), "cyan")
    return Panel(Group(*lines), title=title, subtitle=below, width=inner + 4, border_style="blue")


def before_after_tables(
    before: JsonObject, after: JsonObject, problems: Sequence[JsonObject], since: str = ""
) -> RenderableType:
    """Held-out metrics before and after, and problems: {prompt, answer, before, after}.

    `since` is the title of the first column if it is not "before".
    """
    names = Column("held out", no_wrap=True)  # a narrow terminal wraps the figures, not these
    table = Table(names, since or "before", "after", "change", box=box.SIMPLE_HEAD)
    table.caption = _interval_caption(before)
    for name in [name for name in before if not is_interval_part(name, before)]:
        if metric_history([before], name) and metric_history([after], name):
            values = [_score_text(before, name), _score_text(after, name)]
            change = f"{after[name] - before[name]:+.3g}"
            table.add_row(Text(clean_line(name).removeprefix("eval_")), *values, change)
    shown = Table("prompt", "answer", "before", "after", box=box.SIMPLE_HEAD)
    for problem in problems:
        cells = (wrap_text(problem.get(str(c.header), ""), 200, 1) for c in shown.columns)
        shown.add_row(*[Text(cell[0]) for cell in cells])
    return Group(table, shown) if problems else table


def write_panel_svg(run: Path, out: Path, step: int | None = None) -> None:
    """Write the panel of the run folder `run`, as it was at `step`, to the SVG `out`."""
    if not (run / "metrics.jsonl").is_file():
        fix = "name a run that `rloo runs` lists"
        refuse(str(run), "no run here", fix, "it has no metrics.jsonl")
    last = math.inf if step is None else step
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]  # may be cut off
    metrics_lines = [m for m in map(json.loads, lines) if m.get("step", 0) <= last]
    files = [f for f in sorted(run.glob("samples/step_*.jsonl")) if int(f.stem[5:]) <= last]
    lines = files[-1].read_text(encoding="utf-8").split("\n")[:-1] if files else []
    plan = {"name": run.name} | read_json(run / "run.json").get("plan", {})
    # Both sizes are set, since TERM=dumb overrides a width alone.
    console = Console(record=True, width=100, height=40, file=io.StringIO())
    console.print(render_panel(metrics_lines, [json.loads(line) for line in lines], plan, 100))
    title = f"rloo train +recipe={plan.get('recipe') or plan['name']}"
    out.write_text(console.export_svg(title=title), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m rloo_cli.reporting.panel", description=write_panel_svg.__doc__
    )
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    parser.add_argument("out", type=Path, metavar="OUT.svg")
    parser.add_argument("--step", type=int)
    try:
        write_panel_svg(**vars(parser.parse_args(arguments)))
    except RunError as error:
        parser.exit(error.code, error.render() + "\n")


def evaluation_table(metrics: JsonObject, names: Sequence[str]) -> Table:
    """The metrics of one evaluation, with a column for each set."""
    sets = [Text(clean_line(name)) for name in names]
    first = Column("held out", no_wrap=True)
    shown = Table(first, *map(Column, sets), box=box.SIMPLE_HEAD)
    shown.caption = _interval_caption(metrics)
    columns = split_by_set(metrics, names)
    for key in dict.fromkeys(key for column in columns.values() for key in column):
        if not any(is_interval_part(key, column) for column in columns.values()):
            cells = [_score_text(c, key) if key in c else "–" for c in columns.values()]
            shown.add_row(Text(clean_line(key)), *cells)
    return shown


def _interval_caption(metrics: JsonObject) -> str | None:
    """The caption of a table with intervals, if it has any."""
    return INTERVAL_CAPTION if any(interval_text(metrics, name) for name in metrics) else None


def _score_text(metrics: JsonObject, name: str) -> str:
    """A metric, with its interval if it is a score that has one."""
    return format_number(metrics[name]) + interval_text(metrics, name)


if __name__ == "__main__":
    main()
