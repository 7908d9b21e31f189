"""Draws a run's curves from its metrics.jsonl: six small plots, PNG or SVG.

A metric that the run does not have (`kl` with beta=0) leaves its plot grey with "no data". The
figure is built without pyplot, so a user's own matplotlib state is never touched.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rloo_cli.reporting.metrics_lines import MetricsMapping, read_metrics_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMOOTH_FROM = 30  # points; fewer are drawn without smoothing
GREY, GRID = "#8a8f98", "#e6e8eb"
BLUE, ORANGE, GREEN, RED = "#2563eb", "#ea580c", "#15803d", "#dc2626"
PURPLE, TEAL, BROWN = "#7c3aed", "#0d9488", "#92400e"

DRAWING_TIME_SHARE = 0.02  # of a run's time that its drawings may take
FIRST_DRAWING_S = 1.0  # assumed seconds of the first drawing
MIN_CURVE_LINES = 2  # lines of metrics; before the second one there is no curve

CurvePoints = tuple[list[float], list[float]]


class CurveDrawer:
    """Draws the curves of a running run into its own folder.

    With `rate_limited`, drawing takes only a small share of the time. The first failure is a
    warning.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.last_drawn_at, self.last_drawing_s = time.monotonic(), FIRST_DRAWING_S
        self.drawn_lines, self.failed = 0, False  # drawn_lines: metrics lines in the last picture

    def draw_curves(
        self, num_lines: int, note: Callable[[str], None], rate_limited: bool = False
    ) -> None:
        """Draw curves.png for a run with `num_lines` lines of metrics. Never raises."""
        began, folder = time.monotonic(), self.folder
        early = DRAWING_TIME_SHARE * (began - self.last_drawn_at) < self.last_drawing_s
        if num_lines < MIN_CURVE_LINES or num_lines == self.drawn_lines or (rate_limited and early):
            return
        self.drawn_lines = num_lines
        try:
            draw_run_curves(folder / "metrics.jsonl", folder / "curves.png", folder.name)
        except ImportError as error:
            if not self.failed:
                note(f"curves.png is not drawn ({error}): pip install 'rloo-cli[view]'")
            self.failed = True
        except Exception as error:  # a drawing must not end a run, whatever matplotlib raises
            if not self.failed:
                note(f"warning: curves.png cannot be drawn: {type(error).__name__}: {error}")
            self.failed = True
        self.last_drawn_at = time.monotonic()
        self.last_drawing_s = self.last_drawn_at - began


def draw_run_curves(metrics_path: str | Path, out_png: str | Path, title: str) -> Path:
    """Write the curves of the file `metrics_path` to `out_png` (an SVG if its name ends in .svg).

    Raises ConfigError if there are no metrics.
    """
    from matplotlib.figure import Figure  # takes 0.3 s, so only when drawing
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    metrics_lines = read_metrics_lines(Path(metrics_path))
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
    figure = Figure(figsize=(12, 6.4), dpi=140, layout=layout, facecolor="white")
    figure.suptitle(title, fontsize=13, fontweight="bold", parse_math=False)
    axes = figure.subplots(2, 3, sharex=True)
    for axis, panel in zip(axes.flat, CURVE_PANELS, strict=True):
        style_axis(axis, *panel[:2])
        if not panel[2](axis, metrics_lines):
            mark_no_data(axis)
    for axis in axes[-1]:
        axis.set_xlabel("step", fontsize=9, color="#444444")
    out = Path(out_png)
    out.parent.mkdir(parents=True, exist_ok=True)
    whole = out.with_name(f".{out.name}.{os.getpid()}.tmp")  # a reader never sees half of it
    try:
        figure.savefig(whole, format="svg" if out.suffix.lower() == ".svg" else "png")
        whole.replace(out)
    finally:
        whole.unlink(missing_ok=True)
    return out


def metric_points(metrics_lines: Sequence[MetricsMapping], name: str) -> CurvePoints:
    """(steps, values) of one metric, where it is a finite number."""
    steps, values = [], []
    for metrics in metrics_lines:
        value = metrics.get(name)
        if isinstance(value, int | float) and math.isfinite(value):
            steps.append(float(metrics["step"]))
            values.append(float(value))
    return steps, values


def smooth_values(values: Sequence[float]) -> list[float]:
    """Each point on a straight line fitted to a fifteenth of the points around it.

    Unlike a mean, it neither lags where the window is cut at an end nor jumps there. Each window's
    sums are differences of running ones, so that a million points take a second.
    """
    count = len(values)
    half, x = max(3, count // 30), np.arange(count, dtype=np.float64)
    low, high = np.maximum(0, x - half), np.minimum(count, x + half + 1)
    size, middle = high - low, (low + high - 1) / 2
    y = np.asarray(values, np.float64)
    level = y.mean() if count else 0.0  # subtracted: small sums keep more digits
    sums = [np.concatenate(([0.0], np.cumsum(terms))) for terms in (y - level, x * (y - level))]
    of_y, of_xy = (total[high.astype(int)] - total[low.astype(int)] for total in sums)
    width = size * (size**2 - 1) / 12  # the sum of (x - middle)² over a window
    slope = (of_xy - middle * of_y) / np.where(width > 0, width, 1.0)
    smooth: list[float] = (level + of_y / size + slope * (x - middle)).tolist()
    return smooth


def style_axis(axis: Axes, name: str, unit: str) -> None:
    """Set the title, the unit, unobtrusive axes and whole numbers of steps."""
    axis.set_title(name, loc="left", fontsize=10.5, fontweight="bold", color="#222222")
    axis.set_ylabel(unit, fontsize=9, color="#444444")
    axis.grid(True, color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=8.5, colors="#444444", length=0)
    axis.locator_params(axis="x", integer=True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color("#c5c8cc")


def mark_no_data(axis: Axes) -> None:
    """Make a plot grey, with the text "no data"."""
    axis.text(0.5, 0.5, "no data", transform=axis.transAxes, ha="center", va="center", color=GREY)
    axis.set_facecolor("#f6f7f8")
    axis.set_yticks([])
    axis.grid(False)


def plot_line(axis: Axes, points: CurvePoints, colour: str, label: str = "") -> bool:
    """Plot values, many of them pale under a smoothed line; returns whether there are any."""
    steps, values = points
    if len(steps) > SMOOTH_FROM:
        axis.plot(steps, values, color=colour, linewidth=0.7, alpha=0.35)
        axis.plot(steps, smooth_values(values), color=colour, linewidth=2, label=label)
    elif steps:
        marker = "o" if len(steps) < 12 else ""
        axis.plot(steps, values, color=colour, linewidth=1.6, marker=marker, ms=3.5, label=label)
    return bool(steps)


def add_legend(axis: Axes) -> None:
    axis.legend(fontsize=8, frameon=False, labelcolor="#333333", loc="best")


def _points_of_both(metrics_lines: Sequence[MetricsMapping], *names: str) -> list[CurvePoints]:
    """The points of several metrics at the steps where all of them are finite numbers."""
    both = [m for m in metrics_lines if all(metric_points([m], name)[0] for name in names)]
    return [metric_points(both, name) for name in names]


def plot_reward(axis: Axes, metrics_lines: Sequence[MetricsMapping]) -> bool:
    """Plot the mean score, a group's std around it, and the held-out score if there is one."""
    (steps, middle), (_, spread) = _points_of_both(metrics_lines, "reward", "reward_std")
    if len(steps) > SMOOTH_FROM:
        middle, spread = smooth_values(middle), smooth_values(spread)
    low = [m - s for m, s in zip(middle, spread, strict=True)]
    high = [m + s for m, s in zip(middle, spread, strict=True)]
    if steps:
        band = "± std in a group"
        axis.fill_between(steps, low, high, color=BLUE, alpha=0.12, linewidth=0, label=band)
    drawn = plot_line(axis, metric_points(metrics_lines, "reward"), BLUE, "training")
    held_out = metric_points(metrics_lines, "eval_reward")
    if held_out[0]:
        axis.plot(
            *held_out, color=ORANGE, linestyle=":", linewidth=1.2, marker="D", ms=6, zorder=5,
            clip_on=False, label="held out",
        )  # fmt: skip
    drawn |= bool(held_out[0])
    if drawn:
        add_legend(axis)
    return drawn


def plot_length(axis: Axes, metrics_lines: Sequence[MetricsMapping]) -> bool:
    names = ("completions/min_length", "completions/max_length")
    (steps, low), (_, high) = _points_of_both(metrics_lines, *names)
    if steps:
        band = "shortest to longest"
        axis.fill_between(steps, low, high, color=GREEN, alpha=0.12, linewidth=0, label=band)
    drawn = plot_line(axis, metric_points(metrics_lines, "completions/mean_length"), GREEN, "mean")
    if drawn and steps:
        add_legend(axis)
    return drawn or bool(steps)


def plot_clipping(axis: Axes, metrics_lines: Sequence[MetricsMapping]) -> bool:
    """Plot the clipped shares in per cent, so that 0.002 reads as 0.2."""
    parts = (("region_mean", RED, "either side"), ("high_mean", ORANGE, "ratio too high"))
    drawn = False
    for name, colour, label in parts:
        steps, values = metric_points(metrics_lines, f"clip_ratio/{name}")
        drawn |= plot_line(axis, (steps, [100 * value for value in values]), colour, label)
    if drawn:
        axis.set_ylim(bottom=0, top=None if axis.get_ylim()[1] > 1 else 1)
        add_legend(axis)
    return drawn


def plot_kl(axis: Axes, metrics_lines: Sequence[MetricsMapping]) -> bool:
    return plot_line(axis, metric_points(metrics_lines, "kl"), PURPLE)


def plot_entropy(axis: Axes, metrics_lines: Sequence[MetricsMapping]) -> bool:
    return plot_line(axis, metric_points(metrics_lines, "entropy"), TEAL)


def plot_grad_norm(axis: Axes, metrics_lines: Sequence[MetricsMapping]) -> bool:
    return plot_line(axis, metric_points(metrics_lines, "grad_norm"), BROWN)


CURVE_PANELS = (
    ("Reward", "mean score", plot_reward),
    ("KL to the reference", "nats per token", plot_kl),
    ("Completion length", "tokens", plot_length),
    ("Entropy", "nats per token", plot_entropy),
    ("Policy clipping", "% clipped", plot_clipping),
    ("Gradient norm", "before clipping", plot_grad_norm),
)
