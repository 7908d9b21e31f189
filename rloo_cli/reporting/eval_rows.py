"""The lines of metrics.jsonl that evaluations write: which they are, and what is shown of them."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

Row = dict[str, Any]
HEADLINE = re.compile(r"eval_(?:(?P<name>\w+)_)?(?P<what>reward|win_rate|avg@\d+|pass@\d+)")


def prefix(name: str) -> str:
    """What the metrics of the set `name` begin with; "" names the one of data.eval_split."""
    return f"eval_{name}_" if name else "eval_"


def file_name(name: str, step: int) -> str:
    """Where a set's samples of a step go: `eval_000010`, `eval_<name>_000010`."""
    return f"{prefix(name)}{step:06d}"


def is_evaluation(row: Mapping[str, Any]) -> bool:
    """Whether a line of metrics.jsonl is an evaluation's, and not a step's."""
    return "step_time" not in row and any(name.startswith("eval_") for name in row)


def by_set(row: Mapping[str, Any], names: Sequence[str]) -> dict[str, Row]:
    """One line of metrics -> the metrics of each set, without what they begin with."""
    columns: dict[str, Row] = {name: {} for name in names}
    for key, value in row.items():
        # eval_a_b_reward is a metric of the set a_b, not of a.
        mine = [name for name in names if key.startswith(prefix(name))]
        if mine:
            name = max(mine, key=len)
            columns[name][key.removeprefix(prefix(name))] = value
    return columns


def headline(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What is shown of an evaluation while a run goes on: (label, metric), set after set.

    The mean score, greedy and of K, and the pass@k of the largest k.
    """
    shown: dict[tuple[str, str], str] = {}
    for key in row:
        if found := HEADLINE.fullmatch(key):
            # Of pass@k the last stays, which has the largest k.
            shown[found["name"] or "", found["what"].partition("@")[0]] = key
    labels = {"reward": "held-out {}", "avg": "avg@{}", "pass": "pass@{}", "win_rate": "wins {}"}
    return [
        (labels[what].format(key.rpartition("@")[2] if "@" in key else name).strip(), key)
        for (name, what), key in shown.items()
    ]
