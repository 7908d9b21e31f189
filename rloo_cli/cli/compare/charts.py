"""The comparison as one picture: curves over completions, reward against KL, figures as bars.

One colour, mark and kind of line for each configuration in all panels: Okabe and Ito's colours,
which people with any kind of colour vision tell apart, and marks for those who see none.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rloo_cli.cli.compare.results import KL, WIN_RATE_PREFIX, Comparison, ConfigurationResult
from rloo_cli.cli.compare.statistics import Estimate
from rloo_cli.reporting import curves
from rloo_cli.reporting.panel import clean_line
from rloo_cli.utils.files import JsonObject

CONFIGURATION_COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#8A7F00",
)
MARKS, LINES = "osD^vP*X", ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (8, 2, 2, 2)))
TEXT_COLOUR = "#333333"
FOOTNOTE = "means over n seeds; bands and whiskers: their 95 % interval (Student's t)"


def draw_comparison(comparison: Comparison, out: Path, title: str) -> Path:
    """Write the picture to `out` (an SVG if the name ends so)."""
    import matplotlib
    from matplotlib.figure import Figure

    many = len(comparison.results)
    size = (13, 7.6 + 0.16 * max(0, many - 5))
    figure = Figure(figsize=size, dpi=140, layout="constrained", facecolor="white")
    figure.suptitle(clean_line(title), fontsize=13, fontweight="bold", parse_math=False)
    halves: Any = figure.subfigures(2, 1, height_ratios=[1.25, 1])
    above, below = halves
    for axis, panel in zip(above.subplots(1, 3), (_training, _held_out, _against_kl), strict=True):
        panel(axis, comparison)
    bars = _bar_panels(comparison)
    axes = below.subplots(1, len(bars) + 1, squeeze=False)[0]
    _differences(axes[0], comparison)
    for axis, (name, heading, unit) in zip(axes[1:], bars, strict=True):
        _bar(axis, comparison, name, heading, unit)
    below.supxlabel(FOOTNOTE, fontsize=8.5, color="#666666")
    handles = [_legend_handle(comparison.results, i) for i in range(many)]
    labels = [f"{clean_line(o.label)} (n = {len(o.seeds)})" for o in comparison.results]
    figure.legend(handles, labels, loc="outside lower center", ncols=min(5, many), fontsize=9.5,
                  frameon=False, labelcolor=TEXT_COLOUR)  # fmt: skip
    kind = "svg" if out.suffix.lower() == ".svg" else "png"
    out.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "rloo"}):  # the same picture, the same file
        figure.savefig(out, format=kind, metadata={"Date": None} if kind == "svg" else {})
    return out


def _style(i: int) -> JsonObject:
    return {
        "color": CONFIGURATION_COLOURS[i % len(CONFIGURATION_COLOURS)],
        "linestyle": LINES[(i // len(CONFIGURATION_COLOURS)) % 4],
    }


def _legend_handle(results: Sequence[ConfigurationResult], i: int) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], marker=MARKS[i % len(MARKS)], ms=6, linewidth=2.2, **_style(i))


def _curve(axis: Any, comparison: Comparison, name: str, marks: bool) -> bool:
    """The mean of each configuration over completions, and its interval as a band."""
    from matplotlib.ticker import EngFormatter

    drawn = False
    for i, outcome in enumerate(comparison.results):
        curve = outcome.curves[name]
        if not curve:
            continue
        x, means = [at for at, _ in curve], [e.mean for _, e in curve]
        if len(outcome.seeds) > 1:
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


def _limit_y_axis(axis: Any, comparison: Comparison, name: str) -> None:
    """The scale is that of the means and half as much again: a band of two seeds may be huge."""
    means = [e.mean for o in comparison.results for _, e in o.curves[name]]
    low, high = axis.get_ylim()
    room = 0.5 * (max(means) - min(means)) or abs(max(means)) * 0.1 or 1.0
    axis.set_ylim(max(low, min(means) - room), min(high, max(means) + room))


def _training(axis: Any, comparison: Comparison) -> None:
    curves.style_axis(axis, "Training reward", _reward_unit(comparison))
    if not _curve(axis, comparison, "reward", marks=False):
        curves.mark_no_data(axis)


def _reward_unit(comparison: Comparison) -> str:
    """As results.py smooths it: not where every point can be read."""
    most = max((len(o.curves["reward"]) for o in comparison.results), default=0)
    return "mean score" + (", smoothed" if most > curves.SMOOTH_FROM else "")


def _held_out(axis: Any, comparison: Comparison) -> None:
    curves.style_axis(
        axis, "Held-out score", clean_line(comparison.score) if comparison.held_out else ""
    )
    if not _curve(axis, comparison, "held_out", marks=True):
        curves.mark_no_data(axis)
    elif comparison.threshold is not None:
        axis.axhline(comparison.threshold, color=curves.GREY, linewidth=1, linestyle=":")
        place, style = axis.get_yaxis_transform(), {"fontsize": 8, "color": curves.GREY}
        axis.text(
            0.99, comparison.threshold, "threshold", transform=place, ha="right", va="top", **style
        )


def _against_kl(axis: Any, comparison: Comparison) -> None:
    """Where training leads: the mean reward at each step's mean KL; the mark is its end."""
    curves.style_axis(axis, "Reward against KL", _reward_unit(comparison))
    axis.set_xlabel(f"KL to the reference ({KL}), nats per completion", fontsize=9, color="#444444")
    drawn = False
    for i, outcome in enumerate(comparison.results):
        kl, reward = (dict(outcome.curves[name]) for name in ("kl", "reward"))
        at = sorted(set(kl) & set(reward))
        if at:
            x, y = [kl[a].mean for a in at], [reward[a].mean for a in at]
            axis.plot(x, y, linewidth=1.5, alpha=0.9, **_style(i))
            axis.plot(x[-1:], y[-1:], marker=MARKS[i % len(MARKS)], ms=8, **_style(i))
            drawn = True
    axis.xaxis.get_major_locator().set_params(integer=False)
    if not drawn:
        curves.mark_no_data(axis)


def _bar_panels(comparison: Comparison) -> list[tuple[str, str, str]]:
    found = [("step_s", "Time", "seconds per step (median)"), ("peak_gib", "Memory", "peak, GiB")]
    judged = dict.fromkeys(name for o in comparison.results for name in o.figures)
    wins = [name for name in judged if name.startswith(WIN_RATE_PREFIX)][:1]
    against = [
        (n, "Win rate", f"against {clean_line(n.removeprefix(WIN_RATE_PREFIX))}") for n in wins
    ]
    return [*against, *found]


def _bar(axis: Any, comparison: Comparison, name: str, heading: str, unit: str) -> None:
    """A bar for each configuration, with the interval over seeds where there is one."""
    curves.style_axis(axis, heading, "")
    axis.set_xlabel(unit, fontsize=9, color="#444444")
    each = [o.mean_over_seeds(name) for o in comparison.results]
    if not any(each):
        curves.mark_no_data(axis)
        return
    for i, e in enumerate(each):
        if e is not None:
            axis.barh(i, e.mean, color=_style(i)["color"], height=0.62, alpha=0.85)
            _whisker(axis, i, e)
    _configuration_axis(axis, comparison, [bool(e) for e in each])
    axis.set_xlim(left=0)
    if name.startswith(WIN_RATE_PREFIX):
        axis.axvline(0.5, color=curves.GREY, linewidth=1, linestyle=":")


def _differences(axis: Any, comparison: Comparison) -> None:
    """Paired differences of the final score, with their intervals and a line at nothing."""
    score = "held-out score" if comparison.held_out else "training reward"
    curves.style_axis(axis, f"Final {score}", "")
    axis.set_xlabel(
        f"minus that of {clean_line(comparison.against)}, same seeds", fontsize=9, color="#444444"
    )
    each = [comparison.differences.get(o.label) for o in comparison.results]
    if not any(each):
        curves.mark_no_data(axis)
        return
    for i, e in enumerate(each):
        if e is not None:
            axis.plot([e.mean], [i], marker=MARKS[i % len(MARKS)], ms=7, **_style(i))
            _whisker(axis, i, e, _style(i)["color"])
    axis.axvline(0, color=curves.GREY, linewidth=1.2)
    same = [o.label == comparison.against for o in comparison.results]
    _configuration_axis(
        axis,
        comparison,
        [bool(e) or own for e, own in zip(each, same, strict=True)],
        show_labels=True,
    )


def _whisker(axis: Any, i: int, e: Estimate, colour: str = TEXT_COLOUR) -> None:
    if e.half_width is not None:
        axis.errorbar(e.mean, i, xerr=e.half_width, color=colour, linewidth=1.6, capsize=4)


def _configuration_axis(
    axis: Any, comparison: Comparison, has_data: Sequence[bool], show_labels: bool = False
) -> None:
    """A row for each configuration, the first on top; `named`: with their names at the left."""
    axis.xaxis.get_major_locator().set_params(integer=False, nbins=5)
    names = [_shorten_label(clean_line(o.label)) for o in comparison.results]
    axis.set_yticks(range(len(names)), names if show_labels else [""] * len(names), fontsize=9.5)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.grid(False, axis="y")
    for i in [i for i, known in enumerate(has_data) if not known]:
        place = axis.get_yaxis_transform()
        axis.text(0.02, i, "no data", transform=place, va="center", fontsize=9, color=curves.GREY)


def _shorten_label(label: str) -> str:
    return label if len(label) <= 30 else f"{label[:29]}…"
