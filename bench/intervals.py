"""What the intervals and verdicts of the product cover, simulated.

docs/results/compare.md cites the rows.

    python bench/intervals.py               all parts, into bench/intervals.jsonl; then the page
    python bench/intervals.py verdicts      one part
    python bench/intervals.py --page        the table of docs/results/compare.md, from what is there

    win_rates  the win rate's interval over mixes of wins, ties and losses. Exact: every outcome
               with its probability. Also that no end rises when a win becomes a tie
    scores     the held-out score's interval, with K completions a prompt. Prompts differ in how
               often their completions pass: not at all (0), up to all or none (near 1)
    verdicts   `rloo compare`: two equal configurations on binomial scores, with and without an
               effect of the seed; and two that differ by .15
    means      the interval of a mean over seeds, likewise

Every figure is of the functions that the product calls (rloo_cli/reporting/statistics.py). It is
not called bench/statistics.py because the other programs here could not import Python's module of
that name then.
"""

import argparse
import itertools
import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import results
from results import Row

from rloo_cli.reporting.statistics import (
    Z_95,
    describe_difference,
    half_width_error,
    mean_with_interval,
    paired_difference,
    share_limits,
)

HERE = Path(__file__).resolve().parents[1]
RAW, PAGE = HERE / "bench" / "intervals.jsonl", HERE / "docs" / "results/compare.md"
BEGIN, END = "<!-- intervals -->", "<!-- end of intervals -->"
SECTION = """\
## What an interval and a verdict are worth

An interval over seeds is Student's, and never narrower than the scores' own error allows: the
standard error of each run's score, clustered by prompt, which `metrics.jsonl` has beside the score.
Seeds that agree to the last digit, and have no known error of their own, get no verdict. The
interval of a score between 0 and 1, and of a win rate, is the normal one after 1.5 values of 0 and
1.5 of 1 were added (Agresti and Coull's, with the variance of the values, which counts ties). Win
rates are compared where one judge was asked in the same way about the same pairs of the models that
the runs ended with; a line names every other one."""
SIMULATIONS = 4000  # a figure of 95 % is then known to .7 points
SHARES = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 1.0)
MEANS = (0.02, 0.05, 0.1, 0.5, 0.9, 0.95, 0.98)
LIKENESS = (0.0, 0.1, 0.3, 0.6, 0.95)  # correlation of a prompt's completions
SEED_SPREADS = (0.0, 0.02, 0.1)  # standard deviation of the seeds' true scores


def wilson_width(n: float, mean: float) -> float:
    """The width of Wilson's interval of a share."""
    half = math.sqrt(mean * (1 - mean) / n + Z_95**2 / (4 * n * n))
    return 2 * Z_95 * half / (1 + Z_95**2 / n)


# Win rates.


def win_rates() -> Iterable[Row]:
    """A row for each number of pairs."""
    mixes = [((1 - t) * w, t) for t, w in itertools.product(SHARES, repeat=2)]
    for n in (20, 50, 200):
        counts = [(w, t) for w in range(n + 1) for t in range(n + 1 - w)]
        limits = {pair: win_rate_limits(*pair, n) for pair in counts}
        low, high = np.array([limits[pair] for pair in counts]).T
        wilson = np.array([wilson_width(n, (w + t / 2) / n) for w, t in counts])
        covered, ratios = [], []
        for wins, ties in mixes:
            chances = multinomial(np.array(counts), n, wins, ties)
            rate = wins + ties / 2
            inside = (low <= rate + 1e-12) & (rate - 1e-12 <= high)
            covered.append(float(chances[inside].sum()))
            ratios.append(float(chances @ (high - low) / (chances @ wilson)))
        yield {
            "n": n, "mixes": len(mixes), **summary(covered), "width": float(np.mean(ratios)),
            "widest": max(ratios), "rises": sum(rises(limits, *pair) for pair in counts),
        }  # fmt: skip


def win_rate_limits(wins: int, ties: int, n: int) -> tuple[float, float]:
    """The interval that `rloo eval` prints for so many wins and ties."""
    mean = (wins + ties / 2) / n
    return share_limits(n, mean, (wins + ties / 4) / n - mean * mean)


def multinomial(counts: np.ndarray, n: int, wins: float, ties: float) -> np.ndarray:
    """The probability of each pair of wins and ties."""
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 1)))])
    parts = np.column_stack([counts, n - counts.sum(1)])
    shares = np.array([wins, ties, max(0.0, 1 - wins - ties)])
    with np.errstate(divide="ignore", invalid="ignore"):
        powers = np.where(parts == 0, 0.0, parts * np.log(shares))
    return np.exp(logs[n] - logs[parts].sum(1) + powers.sum(1))


def rises(limits: dict[tuple[int, int], tuple[float, float]], wins: int, ties: int) -> bool:
    """Whether an end rises when one of these wins becomes a tie."""
    if not wins:
        return False
    before, after = limits[wins, ties], limits[wins - 1, ties + 1]
    return any(b > a + 1e-12 for a, b in zip(before, after, strict=True))


# Scores over prompts.


def scores() -> Iterable[Row]:
    """A row for each number of prompts and of completions a prompt."""
    generator = np.random.default_rng(48)
    for n, k in itertools.product((60, 500), (1, 8)):
        covered, ratios, equivalent = [], [], []
        for mean, likeness in itertools.product(MEANS, LIKENESS if k > 1 else (0.0,)):
            passed = draw_scores(generator, n, k, mean, likeness)
            middles, variances = passed.mean(1), passed.var(1)
            pairs = zip(middles.tolist(), variances.tolist(), strict=True)
            limits = [share_limits(n, m, v, k) for m, v in pairs]
            low, high = np.array(limits).T
            covered.append(float(np.mean((low <= mean) & (mean <= high))))
            independent = n / (likeness + (1 - likeness) / k)
            width = float(np.mean(high - low))
            ratios.append(width / np.mean([wilson_width(n, m) for m in middles]))
            equivalent.append(width / np.mean([wilson_width(independent, m) for m in middles]))
        yield {
            "n": n, "k": k, **summary(covered), "width": float(np.mean(ratios)),
            "widest": float(max(ratios)), "width_independent": float(np.mean(equivalent)),
            "widest_independent": float(max(equivalent)),
        }  # fmt: skip


def draw_scores(
    generator: np.random.Generator, n: int, k: int, mean: float, likeness: float
) -> np.ndarray:
    """SIMULATIONS x n mean scores of k completions that pass or do not."""
    size, chances = (SIMULATIONS, n), np.full((SIMULATIONS, n), mean)
    if likeness:
        weight = 1 / likeness - 1
        chances = generator.beta(mean * weight, (1 - mean) * weight, size)
    return generator.binomial(k, chances) / k


# Verdicts and means over seeds.


def verdicts() -> Iterable[Row]:
    """A row for each number of seeds: false verdicts; then how often a true difference is called.

    `without` counts false verdicts without the scores' own error, as in older runs without one.
    """
    generator = np.random.default_rng(480)
    for seeds in (2, 3, 5):
        called, without = [], []
        for n, mean, spread in itertools.product((20, 64, 200, 500), MEANS, SEED_SPREADS):
            sides = [draw_seeds(generator, seeds, n, mean, spread) for _ in range(2)]
            called.append(share_called(*sides, n))
            without.append(share_called(*sides, None))
        yield {
            "seeds": seeds, "cases": len(called), "false": float(np.mean(called)),
            "false_most": max(called), "without": float(np.mean(without)),
            "without_most": max(without),
        }  # fmt: skip
    for seeds, n in itertools.product((3, 5), (200, 500)):
        powers = []
        for mean in (0.1, 0.425, 0.75):
            sides = [draw_seeds(generator, seeds, n, m, 0.0) for m in (mean + 0.15, mean)]
            powers.append(share_called(*sides, n))
        yield {"seeds": seeds, "n": n, "difference": 0.15, "called_least": min(powers)}


def means() -> Iterable[Row]:
    """A row for each number of seeds: how often the mean's interval has the true mean."""
    generator = np.random.default_rng(4800)
    for seeds in (2, 3, 5):
        covered = []
        for n, mean, spread in itertools.product((20, 64, 200, 500), MEANS, SEED_SPREADS):
            found = 0
            drawn = draw_seeds(generator, seeds, n, mean, spread)
            errors = score_errors(n, drawn)
            for values in drawn.tolist():
                e = mean_with_interval(values, [errors[v] for v in values])
                assert e is not None
                found += e.low <= mean <= e.high
            covered.append(found / len(drawn))
        yield {"seeds": seeds, "cases": len(covered), **summary(covered)}


def draw_seeds(
    generator: np.random.Generator, seeds: int, n: int, mean: float, spread: float
) -> np.ndarray:
    """SIMULATIONS x seeds shares of n prompts, of seeds whose true scores vary around the mean."""
    chances = np.full((SIMULATIONS, seeds), mean)
    if spread:
        spread = min(spread, mean / 2, (1 - mean) / 2)  # more would be seeds that fail altogether
        weight = mean * (1 - mean) / spread**2 - 1
        chances = generator.beta(mean * weight, (1 - mean) * weight, chances.shape)
    return generator.binomial(n, chances) / n


def score_errors(n: int, *drawn: np.ndarray) -> dict[float, float]:
    """The standard error that each of these shares of n prompts has by itself."""
    values = np.unique(np.concatenate([each.ravel() for each in drawn])).tolist()
    return {v: half_width_error(*share_limits(n, v, v * (1 - v))) for v in values}


def share_called(ours: np.ndarray, theirs: np.ndarray, n: int | None) -> float:
    """How often `rloo compare` calls the two sides different; n: None = the error is not known."""
    known = {} if n is None else score_errors(n, ours, theirs)
    found = 0
    for pair in zip(ours.tolist(), theirs.tolist(), strict=True):
        sides = [dict(enumerate(values)) for values in pair]
        errors = [{s: known[v] for s, v in side.items() if v in known} for side in sides]
        found += describe_difference(paired_difference(*sides, *errors)) in ("higher", "lower")
    return found / len(ours)


def summary(covered: Sequence[float]) -> Row:
    return {"coverage": float(np.mean(covered)), "coverage_least": min(covered)}


# The page.


def page() -> None:
    """Write what stands between the marks of docs/results/compare.md, from the newest rows."""
    text = PAGE.read_text(encoding="utf-8")
    head, tail = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    PAGE.write_text(f"{head}\n\n" + "\n".join(page_lines()) + f"\n\n{tail}", encoding="utf-8")


def section_lines() -> list[str]:
    """The section of docs/results/compare.md, with its marks."""
    return [*SECTION.splitlines(), "", BEGIN, "", *page_lines(), "", END]


def latest(part: str) -> list[Row]:
    """The rows of the last simulation of a part."""
    rows = [row for row in results.read(RAW) if row["part"] == part]
    return [row for row in rows if row["began"] == rows[-1]["began"]]


def page_lines() -> list[str]:
    """The tables."""
    lines = [
        "| 95 % interval of | cases | coverage, mean | least | width over Wilson's, mean | most |",
        "|---|---|---|---|---|---|",
    ]
    for row in latest("win_rates"):
        lines.append(
            f"| a win rate, {row['n']} pairs | {row['mixes']} mixes of wins, ties and losses |"
            f" {row['coverage']:.1%} | {row['coverage_least']:.1%} | {row['width']:.2f} |"
            f" {row['widest']:.2f} |"
        )
    for row in latest("scores"):
        lines.append(
            f"| a held-out score, {row['n']} prompts, K = {row['k']} | scores from"
            f" {MEANS[0]:g} to {MEANS[-1]:g} | {row['coverage']:.1%} |"
            f" {row['coverage_least']:.1%} | {row['width']:.2f} | {row['widest']:.2f} |"
        )
    for row in latest("means"):
        lines.append(
            f"| a mean over {row['seeds']} seeds | {row['cases']} scores, sizes and spreads of"
            f" seeds | {row['coverage']:.1%} | {row['coverage_least']:.1%} | | |"
        )
    rows = latest("verdicts")
    rising = sum(row["rises"] for row in latest("win_rates"))
    wider = " and ".join(
        f"{row['width_independent']:.2f} times as wide with {row['n']} prompts (at most"
        f" {row['widest_independent']:.2f})"
        for row in latest("scores")
        if row["k"] > 1
    )
    lines += [
        "",
        "Wilson's interval here is that of as many independent values as there are pairs or",
        "prompts. Against as many as eight completions a prompt are worth, K = 8 is",
        f"{wider}.",
        f"Outcomes of win rates where an end rises when a win becomes a tie: {rising}.",
        "",
        "| verdicts of `rloo compare` | equal models called different, mean | most |"
        " without the scores' own error |",
        "|---|---|---|---|",
    ]
    for row in rows:
        if "false" in row:
            lines.append(
                f"| {row['seeds']} seeds, {row['cases']} cases | {row['false']:.1%} |"
                f" {row['false_most']:.1%} | {row['without']:.1%}, at most"
                f" {row['without_most']:.1%} |"
            )
    lines += ["", "| a true difference of .15 | called in at least |", "|---|---|"]
    for row in rows:
        if "difference" in row:
            lines.append(
                f"| {row['seeds']} seeds of {row['n']} prompts |"
                f" {math.floor(1000 * row['called_least']) / 10:.1f}% |"
            )
    return [*lines, "", "```", "python bench/intervals.py", "```"]


PARTS = {"win_rates": win_rates, "scores": scores, "verdicts": verdicts, "means": means}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[])
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args()
    began = time.strftime("%Y-%m-%dT%H:%M:%S")
    for name in () if given.page else given.parts or PARTS:
        rows = [{"part": name, "began": began, **row} for row in PARTS[name]()]
        results.append(rows, RAW)
        for row in rows:
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
    if BEGIN in PAGE.read_text(encoding="utf-8"):
        page()


if __name__ == "__main__":
    main()
