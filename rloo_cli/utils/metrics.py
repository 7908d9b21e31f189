"""Every metric of a run: declared by the module that computes it, found by its name, merged.

A module that computes metrics declares them in a table METRICS, by their sections of
docs/metrics.md:

    METRICS = {"The update": [
        ("loss", "", "mean:updates", "loss of an update, mean over the step's updates"),
    ]}

with the name in metrics.jsonl, the unit, how several steps merge into one line, and the meaning.
That page (`python -m rloo_cli.utils.metrics` fills it), the merging and the names forbidden for
rewards come from these tables. The tables are parsed from the source, not imported, since importing
would load torch: so a table is a literal, and every process knows all of them.

A name may hold `<reward>` (the name of a reward entry), `<k>` (a number), `<phase>` and `<name>`; a
metric of an evaluation begins with `eval_`, or with `eval_<set>_` for a set of eval.sets. A metric
that a reward logs by `log_metric` has the name chosen by the reward.

How several steps merge into one line (`merge_steps`; a metric of an evaluation has no rule, ""):

last              the last step's value
min, max          the smallest, the largest of the steps' values
mean              every step has equal weight: seconds and counts of a step
mean:COUNT        weighted by a count of each step (`step_metrics.mean_counts`)
rms:COUNT         a root mean square: the root of the mean of squares, weighted so
share:COUNT       as mean:COUNT, with 0 for a step without a value
"""

import ast
import math
import re
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from rloo_cli.utils.paths import PACKAGE

MetricValues = dict[str, float]
PAGE = PACKAGE.parent / "docs" / "metrics.md"
# Prefixes of a section's names; those of episodes are a step's or a held-out set's.
NAME_PREFIXES = {"Evaluations": r"eval_(?:\w+_)?", "Episodes": r"(?:eval_(?:\w+_)?)?"}
PLACEHOLDERS = {"reward": r"[^/]+", "k": r"\d+", "phase": r"[\w ]+", "name": r".+"}


class Metric(NamedTuple):
    """A row of a module's METRICS."""

    module: str  # its path in the package
    section: str
    name: str
    unit: str
    merge: str  # how steps merge
    meaning: str


@cache
def declared_metrics() -> tuple[Metric, ...]:
    """Every metric of the package; modules in the reverse order of their paths, top rooms first."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py"), reverse=True):
        text = path.read_text(encoding="utf-8")
        for table in re.findall(r"^METRICS = (\{.*?^\]\})", text, re.MULTILINE | re.DOTALL):
            module = path.relative_to(PACKAGE).as_posix()
            for section, rows in ast.literal_eval(table).items():
                found += [Metric(module, section, *row) for row in rows]
    return tuple(found)


@cache
def _metric_patterns() -> list[tuple[re.Pattern[str], Metric]]:
    patterns = []
    for metric in declared_metrics():
        text = re.escape(metric.name)
        for name, value in PLACEHOLDERS.items():
            text = text.replace(f"<{name}>", f"(?P<{name}>{value})")
        if metric.name.startswith("rewards/"):
            text = "rewards/.+"  # an alias of each metric of reward/
        patterns.append((re.compile(NAME_PREFIXES.get(metric.section, "") + text), metric))
    return patterns


@cache
def find_metric(name: str) -> Metric | None:
    """The declaration of a metric of metrics.jsonl; None for others.

    Placeholders of `merge` are filled in as in the name.
    """
    for pattern, metric in _metric_patterns():
        if match := pattern.fullmatch(name):
            merge = metric.merge
            for placeholder, value in match.groupdict().items():
                merge = merge.replace(f"<{placeholder}>", value)
            return metric._replace(merge=merge)
    return None


@cache
def is_reserved(name: str) -> bool:
    """Whether this name is reserved for the run, so that a reward cannot log it.

    Names of evaluations are reserved too, and everything in a folder of the run's metrics
    (`perf/...`). Rewards can log in `reward/` and TRL's `rewards/`, except the run's own names.
    """
    folder, slash, rest = name.partition("/")
    if slash and folder in ("reward", "rewards"):
        return find_metric(f"reward/{rest}") is not None
    ours = [m.name for m in declared_metrics() if m.section != "Evaluations"]
    in_folder = bool(slash) and any(one.startswith(f"{folder}/") for one in ours)
    return in_folder or name.startswith("eval_") or find_metric(name) is not None


def merge_rule(name: str) -> tuple[str, str]:
    """How steps merge for a metric: the rule's first word, and the name of its count or "".

    An undeclared metric was logged by a reward; its count has the same name.
    """
    metric = find_metric(name)
    kind, _, count = (f"mean:{name}" if metric is None else metric.merge).partition(":")
    return kind, count


def merge_steps(steps: Sequence[MetricValues], counts: Sequence[MetricValues]) -> MetricValues:
    """The metrics of several steps as one line; `counts`: of each step.

    A step without a finite value for a metric is excluded from that metric.
    """
    merged: MetricValues = {}
    for name in dict.fromkeys(name for metrics in steps for name in metrics):
        kind, count = merge_rule(name)
        absent = 0.0 if kind == "share" else math.nan
        found = [(m.get(name, absent), c) for m, c in zip(steps, counts, strict=True)]
        finite = [(value, c.get(count, 1)) for value, c in found if math.isfinite(value)]
        if finite:
            merged[name] = _merge_values(kind, *zip(*finite, strict=True))
    return merged


def _merge_values(kind: str, values: Sequence[float], weights: Sequence[float]) -> float:
    if kind in ("min", "max"):
        return min(values) if kind == "min" else max(values)
    if kind == "last" or not sum(weights):
        return values[-1]
    power = 2 if kind == "rms" else 1
    total = sum(w * v**power for v, w in zip(values, weights, strict=True))
    return float((total / sum(weights)) ** (1 / power))


def without_tags(text: str) -> str:
    """A text for a page of docs/, where `<name>` outside of code would be taken for HTML."""
    return re.sub(r"<(?=[A-Za-z/])", "&lt;", text)


def fill_page(text: str) -> str:
    """docs/metrics.md with regenerated tables; the rest is kept.

    Raises ValueError if it lacks a section with declared metrics.
    """
    rows: dict[str, list[str]] = {}
    for m in declared_metrics():
        table = rows.setdefault(m.section, ["| metric | unit | what it is |\n", "|---|---|---|\n"])
        table.append(f"| `{m.name}` | {m.unit or '-'} | {without_tags(m.meaning)} |\n")
    parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    for i, part in enumerate(parts):
        if made := rows.pop(part.partition("\n")[0].removeprefix("## "), None):
            parts[i] = "".join([part.partition("|")[0], *made, "\n"])
    if rows:
        raise ValueError(f"docs/metrics.md lacks the sections {', '.join(rows)}")
    return "".join(parts).rstrip("\n") + "\n"


if __name__ == "__main__":
    PAGE.write_text(fill_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
