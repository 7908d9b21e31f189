"""Draws the comparison as one picture: curves over completions, reward against KL, and bars.

Each configuration has one colour, marker and line style in all panels: Okabe and Ito's colours,
which people with any colour vision can distinguish, and markers for those who see no colour.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rloo_cli.cli.compare.results import KL, WIN_RATE_PREFIX, Comparison, ConfigurationResult
from rloo_cli.reporting import curves
from rloo_cli.reporting.panel import clean_line
from rloo_cli.reporting.statistics import Estimate
from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:  # lazy: only in the extra `view`
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

CONFIGURATION_COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8A7F00"
)  # fmt: skip
MARKS, LINES = "osD^vP*X", ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (8, 2, 2, 2)))
TEXT_COLOUR = "#333333"
FOOTNOTE = "means over n seeds; bands and whiskers: their 95 % interval"


def draw_comparison(comparison: Comparison, out: Path, title: str) -> Path:
    """Write the picture to `out` (an SVG if the name ends so)."""
    import matplotlib
    from matplotlib.figure import Figure

    many = len(comparison.results)
    size = (13, 7.6 + 0.16 * max(0, many - 5))
    figure = Figure(figsize=size, dpi=140, layout="constrained", facecolor="white")
    figure.suptitle(clean_line(title), fontsize=13, fontweight="bold", parse_math=False)
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=[1.25, 1])[:, 0]
    for axis, panel in zip(above.subplots(1, 3), (_training, _held_out, _against_kl), strict=True):
        panel(axis, comparison)
    bars = _bar_panels(comparison)
    axes = below.subplots(1, len(bars) + 1, squeeze=False)[0]
    _differences(axes[0], comparison)
    for axis, (name, heading, unit) in zip(axes[1:], bars, strict=True):
        _bar(axis, comparison, name, heading, unit)
    below.supxlabel(FOOTNOTE, fontsize=8.5, color="#666666")
    handles = [_legend_handle(comparison.results, i) for i in range(many)]
    labels = [f"{clean_line(r.label)} (n = {len(r.seeds)})" for r in comparison.results]
    figure.legend(handles, labels, loc="outside lower center", ncols=min(5, many), fontsize=9.5,
                  frameon=False, labelcolor=TEXT_COLOUR)  # fmt: skip
    kind = "svg" if out.suffix.lower() == ".svg" else "png"
    out.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "rloo"}):  # equal pictures give equal files
        figure.savefig(out, format=kind, metadata={"Date": None} if kind == "svg" else {})
    return out


def _style(i: int) -> JsonObject:
    round_, colour = divmod(i, len(CONFIGURATION_COLOURS))
    return {"color": CONFIGURATION_COLOURS[colour], "linestyle": LINES[round_ % 4]}


def _legend_handle(results: Sequence[ConfigurationResult], i: int) -> "Line2D":
    from matplotlib.lines import Line2D

    return Line2D([], [], marker=MARKS[i % len(MARKS)], ms=6, linewidth=2.2, **_style(i))


def _curve(axis: "Axes", comparison: Comparison, name: str, marks: bool) -> bool:
    """Draw the mean of each configuration over completions, and its interval as a band.

    Returns whether any configuration has this curve.
    """
    from matplotlib.ticker import EngFormatter

    drawn = False
    for i, result in enumerate(comparison.results):
        curve = result.curves[name]
        if not curve:
            continue
        x, means = [at for at, _ in curve], [e.mean for _, e in curve]
        if len(result.seeds) > 1:
            low, high = [e.low for _, e in curve], [e.high for _, e in curve]
            axis.fill_between(x, low, high, color=_style(i)["color"], alpha=0.13, linewidth=0)
        mark = MARKS[i % len(MARKS)] if marks or len(x) < 3 else ""
        axis.plot(x, means, linewidth=1.9, marker=mark, ms=4.5, **_style(i))
        drawn = True
    axis.set_xlabel("completions sampled", fontsize=9, color="#444444")
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))  # 20k
    if drawn:
        _limit_y_axis(axis, comparison, name)
    return drawn


def _limit_y_axis(axis: "Axes", comparison: Comparison, name: str) -> None:
    """Limit the scale to 1.5 times the means: the band of two seeds may be huge."""
    means = [e.mean for result in comparison.results for _, e in result.curves[name]]
    low, high = axis.get_ylim()
    margin = 0.5 * (max(means) - min(means)) or abs(max(means)) * 0.1 or 1.0
    axis.set_ylim(max(low, min(means) - margin), min(high, max(means) + margin))


def _training(axis: "Axes", comparison: Comparison) -> None:
    curves.style_axis(axis, "Training reward", _reward_unit(comparison))
    if not _curve(axis, comparison, "reward", marks=False):
        curves.mark_no_data(axis)


def _reward_unit(comparison: Comparison) -> str:
    """The label of an axis of rewards: results.py smooths long curves only."""
    most = max((len(o.curves["reward"]) for o in comparison.results), default=0)
    return "mean score" + (", smoothed" if most > curves.SMOOTH_FROM else "")


def _held_out(axis: "Axes", comparison: Comparison) -> None:
    score = clean_line(comparison.score) if comparison.held_out else ""
    curves.style_axis(axis, "Held-out score", score)
    if not _curve(axis, comparison, "held_out", marks=True):
        curves.mark_no_data(axis)
    elif comparison.threshold is not None:
        y, transform = comparison.threshold, axis.get_yaxis_transform()
        axis.axhline(y, color=curves.GREY, linewidth=1, linestyle=":")
        axis.text(0.99, y, "threshold", transform=transform, ha="right", va="top", fontsize=8,
                  color=curves.GREY)  # fmt: skip


def _against_kl(axis: "Axes", comparison: Comparison) -> None:
    """Draw the mean reward at each step's mean KL, with a mark at the end of the training."""
    curves.style_axis(axis, "Reward against KL", _reward_unit(comparison))
    axis.set_xlabel(f"KL to the reference ({KL}), nats per completion", fontsize=9, color="#444444")
    drawn = False
    for i, result in enumerate(comparison.results):
        kl, reward = (dict(result.curves[name]) for name in ("kl", "reward"))
        at = sorted(set(kl) & set(reward))
        if at:
            x, y = [kl[a].mean for a in at], [reward[a].mean for a in at]
            axis.plot(x, y, linewidth=1.5, alpha=0.9, **_style(i))
            axis.plot(x[-1:], y[-1:], marker=MARKS[i % len(MARKS)], ms=8, **_style(i))
            drawn = True
    axis.locator_params(axis="x", integer=False)
    if not drawn:
        curves.mark_no_data(axis)


def _bar_panels(comparison: Comparison) -> list[tuple[str, str, str]]:
    """Figure, heading and unit of each panel with bars: only the first win rate."""
    panels = [("step_s", "Time", "seconds per step (median)"), ("peak_gib", "Memory", "peak, GiB")]
    figures = dict.fromkeys(name for result in comparison.results for name in result.figures)
    for name in [name for name in figures if name.startswith(WIN_RATE_PREFIX)][:1]:
        opponent = clean_line(name.removeprefix(WIN_RATE_PREFIX))
        panels.insert(0, (name, "Win rate", f"against {opponent}"))
    return panels


def _bar(axis: "Axes", comparison: Comparison, name: str, heading: str, unit: str) -> None:
    """Draw a bar per configuration, with its interval over seeds."""
    curves.style_axis(axis, heading, "")
    axis.set_xlabel(unit, fontsize=9, color="#444444")
    means = [result.mean_over_seeds(name) for result in comparison.results]
    if not any(means):
        curves.mark_no_data(axis)
        return
    for i, e in enumerate(means):
        if e is not None:
            axis.barh(i, e.mean, color=_style(i)["color"], height=0.62, alpha=0.85)
            _whisker(axis, i, e)
    _configuration_axis(axis, comparison, [bool(e) for e in means])
    axis.set_xlim(left=0)
    if name.startswith(WIN_RATE_PREFIX):
        axis.axvline(0.5, color=curves.GREY, linewidth=1, linestyle=":")


def _differences(axis: "Axes", comparison: Comparison) -> None:
    """Draw paired differences of the final score, with their intervals and a line at zero."""
    score = "held-out score" if comparison.held_out else "training reward"
    curves.style_axis(axis, f"Final {score}", "")
    unit = f"minus that of {clean_line(comparison.against)}, same seeds"
    axis.set_xlabel(unit, fontsize=9, color="#444444")
    labels = [result.label for result in comparison.results]
    differences = [comparison.differences.get(label) for label in labels]
    if not any(differences):
        curves.mark_no_data(axis)
        return
    for i, e in enumerate(differences):
        if e is not None:
            axis.plot([e.mean], [i], marker=MARKS[i % len(MARKS)], ms=7, **_style(i))
            _whisker(axis, i, e, _style(i)["color"])
    axis.axvline(0, color=curves.GREY, linewidth=1.2)
    has_data = [bool(comparison.differences.get(n)) or n == comparison.against for n in labels]
    _configuration_axis(axis, comparison, has_data, show_labels=True)


def _whisker(axis: "Axes", i: int, e: Estimate, colour: str = TEXT_COLOUR) -> None:
    if e.half_width is not None:
        axis.errorbar(e.mean, i, xerr=e.half_width, color=colour, linewidth=1.6, capsize=4)


def _configuration_axis(
    axis: "Axes", comparison: Comparison, has_data: Sequence[bool], show_labels: bool = False
) -> None:
    """Give each configuration a row, the first on top; `show_labels`: with its name."""
    axis.locator_params(axis="x", integer=False, nbins=5)
    names = [_shorten_label(clean_line(result.label)) for result in comparison.results]
    axis.set_yticks(range(len(names)), names if show_labels else [""] * len(names), fontsize=9.5)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.grid(False, axis="y")
    for i in [i for i, has in enumerate(has_data) if not has]:
        axis.text(0.02, i, "no data", transform=axis.get_yaxis_transform(), va="center",
                  fontsize=9, color=curves.GREY)  # fmt: skip


def _shorten_label(label: str) -> str:
    return label if len(label) <= 30 else f"{label[:29]}…"
