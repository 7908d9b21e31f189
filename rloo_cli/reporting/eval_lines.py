"""The lines of metrics.jsonl that evaluations write: which they are, and what is shown of them."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rloo_cli.utils.files import JsonObject

HEADLINE_METRIC = re.compile(r"eval_(?:(?P<name>\w+)_)?(?P<what>reward|win_rate|avg@\d+|pass@\d+)")


def eval_prefix(name: str) -> str:
    """What the metrics of the set `name` begin with; "" names the one of data.eval_split."""
    return f"eval_{name}_" if name else "eval_"


def eval_samples_name(name: str, step: int) -> str:
    """Where a set's samples of a step go: `eval_000010`, `eval_<name>_000010`."""
    return f"{eval_prefix(name)}{step:06d}"


def is_evaluation(metrics: Mapping[str, Any]) -> bool:
    """Whether a line of metrics.jsonl is an evaluation's, and not a step's."""
    return "step_time" not in metrics and any(name.startswith("eval_") for name in metrics)


def split_by_set(metrics: Mapping[str, Any], names: Sequence[str]) -> dict[str, JsonObject]:
    """One line of metrics -> the metrics of each set, without what they begin with."""
    columns: dict[str, JsonObject] = {name: {} for name in names}
    for key, value in metrics.items():
        # eval_a_b_reward is a metric of the set a_b, not of a.
        mine = [name for name in names if key.startswith(eval_prefix(name))]
        if mine:
            name = max(mine, key=len)
            columns[name][key.removeprefix(eval_prefix(name))] = value
    return columns


def headline_metrics(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What is shown of an evaluation while a run goes on: (label, metric), set after set.

    The mean score, greedy and of K, and the pass@k of the largest k.
    """
    shown: dict[tuple[str, str], str] = {}
    for key in metrics:
        if found := HEADLINE_METRIC.fullmatch(key):
            # Of pass@k the last stays, which has the largest k.
            shown[found["name"] or "", found["what"].partition("@")[0]] = key
    labels = {"reward": "held-out {}", "avg": "avg@{}", "pass": "pass@{}", "win_rate": "wins {}"}
    return [
        (labels[what].format(key.rpartition("@")[2] if "@" in key else name).strip(), key)
        for (name, what), key in shown.items()
    ]
