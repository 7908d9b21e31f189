"""The lines of metrics.jsonl that evaluations write: how to recognize, split and show them."""

import re
from collections.abc import Container, Iterable, Mapping, Sequence

from rloo_cli.utils.files import JsonObject

INTERVAL_PARTS = ("/se", "/low", "/high")  # of a score: its standard error, its 95 % interval
HEADLINE_METRIC = re.compile(r"eval_(?:(?P<name>\w+)_)?(?P<what>reward|win_rate|avg@\d+|pass@\d+)")


def eval_prefix(name: str) -> str:
    """The prefix of the metrics of the set `name`; "" is the set of data.eval_split."""
    return f"eval_{name}_" if name else "eval_"


def eval_samples_name(name: str, step: int) -> str:
    """The file name of a set's samples of a step: `eval_000010`, `eval_<name>_000010`."""
    return f"{eval_prefix(name)}{step:06d}"


def is_evaluation(metrics: Iterable[str]) -> bool:
    """Whether a line of metrics.jsonl belongs to an evaluation rather than a step."""
    return "step_time" not in metrics and any(name.startswith("eval_") for name in metrics)


def split_by_set(metrics: Mapping[str, object], names: Sequence[str]) -> dict[str, JsonObject]:
    """One line of metrics -> the metrics of each set, without the set's prefix."""
    columns: dict[str, JsonObject] = {name: {} for name in names}
    for key, value in metrics.items():
        # eval_a_b_reward is a metric of the set a_b, not of a.
        matching = [name for name in names if key.startswith(eval_prefix(name))]
        if matching:
            name = max(matching, key=len)
            columns[name][key.removeprefix(eval_prefix(name))] = value
    return columns


def headline_metrics(metrics: Iterable[str]) -> list[tuple[str, str]]:
    """The metrics of an evaluation that are shown during a run: (label, metric), set by set.

    They are the mean score, greedy and of K, the win rate, and the pass@k of the largest k.
    """
    shown: dict[tuple[str, str], str] = {}
    for key in metrics:
        if match := HEADLINE_METRIC.fullmatch(key):
            # Of pass@k the last one stays, which has the largest k.
            shown[match["name"] or "", match["what"].partition("@")[0]] = key
    labels = {"reward": "held-out {}", "avg": "avg@{}", "pass": "pass@{}", "win_rate": "wins {}"}
    return [
        (labels[what].format(key.rpartition("@")[2] if "@" in key else name).strip(), key)
        for (name, what), key in shown.items()
    ]


def is_interval_part(name: str, metrics: Container[str]) -> bool:
    """Whether a metric is the error or a limit of another one, which is shown with it."""
    score, slash, part = name.rpartition("/")
    return f"{slash}{part}" in INTERVAL_PARTS and score in metrics


def interval_text(metrics: Mapping[str, object], name: str) -> str:
    """The 95 % interval of a score, ` (0.77 to 0.85)`; "" if it has none."""
    low, high = metrics.get(f"{name}/low"), metrics.get(f"{name}/high")
    if not isinstance(low, int | float) or not isinstance(high, int | float):
        return ""
    return f" ({low:.3g} to {high:.3g})"
