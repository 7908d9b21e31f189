"""docs/metrics.md is whole: every metric that the code writes is in the table it is made from."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rloo_cli.reporting import log, metric_names

ROOT = Path(__file__).parents[2]
# Modules that name metrics, each with the functions (or "" for all of it) where names stand.
WRITERS = {
    "reporting/step_metrics": "",
    "reporting/episode_metrics": "",
    "reporting/update_metrics": "",
    "evaluation/metrics": "eval_set_metrics _sampled_metrics",
    "utils/timers": "lap",
    "generation/common/rollouts": "_build_batch _finalize_batch",
    "generation/vllm/weight_sync": "",
    "evaluation/judges/judge": "judge_metrics",
    "train/between_steps": "log_step",
    "reporting/staleness_metrics": "",
    "generation/common/carry": "step_metrics",
}


def written_names(module: str, functions: str) -> Iterator[str]:
    """Strings with a slash that are a key of a dictionary, an index or in an f-string."""
    tree = ast.parse((ROOT / "rloo_cli" / f"{module}.py").read_text())
    names = functions.split()
    for outer in ast.walk(tree):
        if names and not (isinstance(outer, ast.FunctionDef) and outer.name in names):
            continue
        for node in ast.walk(outer):
            keys: list[ast.expr | None] = []
            if isinstance(node, ast.Dict):
                keys = [*node.keys]
            elif isinstance(node, ast.DictComp):
                keys = [node.key]
            elif isinstance(node, ast.Subscript):
                keys = [node.slice]
            elif isinstance(node, ast.Call):
                keys = [*node.args]
            for key in keys:
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield key.value
                elif isinstance(key, ast.JoinedStr):
                    parts = [v.value if isinstance(v, ast.Constant) else "{}" for v in key.values]
                    yield "".join(map(str, parts))


def known(name: str) -> bool:
    """Whether the name is in the table, whatever stands for what is filled in."""
    for value in ("x", "1", "mean", "min", "mean_length", "sampling/importance_sampling_ratio"):
        for start in ("", "eval_"):
            if metric_names.metric_meaning(start + name.replace("{}", value)):
                return True
    return False


def test_the_page_of_metrics_is_what_the_table_says() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == metric_names.metrics_page()


def test_every_metric_that_the_code_writes_is_in_the_table() -> None:
    found = {
        name
        for module, functions in WRITERS.items()
        for name in written_names(module, functions)
        if re.fullmatch(r"[a-z_@{}]+(/[a-z_@{}]+)*/[a-z_@]+", name)  # its last part is written out
    }
    assert len(found) > 60
    assert not sorted(name for name in found if not known(name))


def test_every_metric_that_is_averaged_or_counted_is_in_the_table() -> None:
    names = {*log.TRL_ALIASES, *log.TRL_ALIASES.values()}
    assert not [name for name in names if not known(name)]


def test_every_phase_that_is_timed_is_in_the_page() -> None:
    code = [path.read_text() for path in (ROOT / "rloo_cli").rglob("*.py")]
    phases = {name for text in code for name in re.findall(r'clock\.phase\("(\w+)"\)', text)}
    meaning = metric_names.metric_meaning("time/update")
    assert meaning is not None and {"save", "exposed", "sync"} <= phases
    assert not [name for name in phases if not re.search(rf"\b{name}\b", meaning[3])]


@pytest.mark.parametrize("folder", sorted((ROOT / "tests" / "config" / "0.1").glob("*/")))
def test_every_metric_of_a_run_is_in_the_table(folder: Path) -> None:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    names = {name for line in lines for name in json.loads(line)}
    assert not [name for name in names if metric_names.metric_meaning(name) is None]


def test_every_metric_of_the_table_stands_in_the_code() -> None:
    code = "\n".join(
        path.read_text()
        for path in (ROOT / "rloo_cli").rglob("*.py")
        if path.name != "metric_names.py"
    )
    for name, *_ in [m for _, meanings in metric_names.METRIC_SECTIONS.values() for m in meanings]:
        last = re.sub(r"<\w+>", "", name).rpartition("/")[2].removesuffix("@")
        last = re.sub(r"^(mean|min|max)_(?=(terminated_)?length)", "", last)
        assert re.search(rf"\b{re.escape(last)}", code), name
