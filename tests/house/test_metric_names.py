"""Every metric that a run logs is declared by the module that computes it, and docs/metrics.md,
the merging of steps and the names that rewards may not take follow from that.
"""

import ast
import json
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import loop_cases
import pytest
from words import package_trees

from rloo_cli.reporting import log
from rloo_cli.reporting.eval_lines import INTERVAL_PARTS
from rloo_cli.train.loop import run_training_loop
from rloo_cli.utils import metrics

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "rloo_cli"
PAGE = ROOT / "docs" / "metrics.md"
TREES = package_trees()
DECLARED = metrics.declared_metrics()
MODULES = sorted({m.module for m in DECLARED})
RULES = r"|last|min|max|mean|(mean|rms|share):[a-z_]+(/?<\w+>|\d)?"
# A module whose tables have names of metrics for keys, which others compute.
READERS = {"inspection/report/charts.py"}
# By the trainer, where the sampler has no log-probabilities: declared beside the sampler's.
TWICE = {"objective/entropy", "sampling/missing_frac"}


def binds_table(tree: ast.AST) -> bool:
    """Whether the name METRICS is bound somewhere in it, in whatever way."""
    names = (n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == "METRICS")
    return any(isinstance(n.ctx, ast.Store) for n in names)


def written_names(tree: ast.AST) -> Iterator[str]:
    """Strings with a slash that are a dictionary's key or are assigned to, `{}` for what is filled
    in."""
    for node in ast.walk(tree):
        keys: list[ast.expr | None] = []
        if isinstance(node, ast.Dict):
            keys = [*node.keys]
        elif isinstance(node, ast.DictComp):
            keys = [node.key]
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            keys = [node.slice]
        for key in keys:
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield key.value
            elif isinstance(key, ast.JoinedStr):
                parts = [v.value if isinstance(v, ast.Constant) else "{}" for v in key.values]
                yield "".join(map(str, parts))


def test_the_page_of_metrics_is_what_the_tables_say() -> None:
    text = PAGE.read_text()
    assert metrics.fill_page(text) == text
    assert {*metrics.NAME_PREFIXES} <= {m.section for m in DECLARED}
    with pytest.raises(ValueError, match="lacks the sections A judge"):
        metrics.fill_page(text.replace("## A judge", "## Judges"))


def test_the_page_gives_a_reason_for_what_is_not_recomputed() -> None:
    rows = PAGE.read_text().partition("## Not recomputed")[2].split("|---|---|\n")[1]
    assert len(rows.splitlines()) == 9
    assert all(re.fullmatch(r"\| `[^`]+` \| \w[^|]+ \|", row) for row in rows.splitlines())


def test_every_table_of_a_module_is_read() -> None:
    tables = {name for name, tree in TREES.items() if binds_table(tree)}
    assert tables == {*MODULES}


def test_a_metric_is_declared_once_with_a_rule_that_there_is() -> None:
    assert max(Counter((m.section, m.name) for m in DECLARED).values()) == 1
    assert not [m for m in DECLARED if not re.fullmatch(RULES, m.merge) or not m.meaning]
    of_steps = [
        m for m in DECLARED if m.section not in ("Evaluations", "A judge", "TRL's spelling")
    ]
    assert not [m for m in of_steps if not m.merge]


def test_what_a_module_writes_it_declares() -> None:
    folders = {m.name.partition("/")[0] for m in DECLARED if "/" in m.name}
    written, silent = set(), []
    for module in {*TREES} - READERS:
        ours = [m.name for m in DECLARED if m.module == module]
        for name in {*written_names(TREES[module])} - TWICE:
            if name.partition("/")[0] in folders and re.fullmatch(
                r"[a-z_@{}/\d]+/[a-z_@{}/\d]+", name
            ):
                written.add(name)
                wanted = re.escape(name).replace(re.escape("{}"), r"[\w<>/]+")
                if not any(re.fullmatch(wanted, declared) for declared in ours):
                    silent.append(f"{module}: {name}")
    assert len(written) > 60 and not silent


@pytest.mark.parametrize("module", MODULES)
def test_what_a_module_declares_it_computes(module: str) -> None:
    """As far as its code shows it: the last part of a name that is written out stands there."""
    tree = TREES[module]
    kept = [node for node in tree.body if not binds_table(node)]
    code = "\n".join(map(ast.unparse, kept))
    for metric in (m for m in DECLARED if m.module == module):
        name = metric.name
        for part in INTERVAL_PARTS if module == "evaluation/metrics.py" else ():
            name = name.removesuffix(part)
        last = re.sub(r"<\w+>", "", name).rpartition("/")[2].rstrip("@0123456789")
        last = re.sub(r"^(mean|min|max)_(?=(terminated_)?length)", "", last)
        assert re.search(rf"(\b|_){re.escape(last)}", code), metric.name


def test_every_phase_that_is_timed_is_in_the_page() -> None:
    code = [path.read_text() for path in PACKAGE.rglob("*.py")]
    phases = {name for text in code for name in re.findall(r'clock\.phase\("(\w+)"\)', text)}
    found = metrics.find_metric("time/update")
    assert found is not None and {"save", "exposed", "sync"} <= phases
    assert not [name for name in phases if not re.search(rf"\b{name}\b", found.meaning)]


RUNS = {
    "plain": ("logging.trl_aliases=true", "eval.every=2", "eval.num_generations=2"),
    "ppo": ("algorithm=ppo", "algorithm.num_iterations=2", "train.prompts_per_step=8"),
    "resample": ("algorithm=cispo", "algorithm.zero_std_groups=resample", "algorithm.beta=0"),
    "ahead": ("generation.overlap=ahead", "algorithm.correction={level: token, mode: truncate}"),
    "masks": ("generation.top_p=0.5", "generation.return_sampling_mask=true"),
}


@pytest.mark.parametrize("case", RUNS)
def test_what_a_run_logs_is_declared_and_a_mean_has_its_count(case: str, tmp_path: Path) -> None:
    merged: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = []

    def merge(steps: Any, counts: Any) -> dict[str, float]:
        merged.append((steps, counts))
        return metrics.merge_steps(steps, counts)

    words = (loop_cases.ENDS, "max_steps=2", "checkpoint.every=0", *RUNS[case])
    with mock.patch.object(log, "merge_steps", merge):
        run = loop_cases.make(tmp_path, *words)
        run_training_loop(run)
    lines = [json.loads(text) for text in (run.folder / "metrics.jsonl").read_text().splitlines()]
    names = {name for line in lines for name in line}
    assert len(names) > 60
    assert not [name for name in names if metrics.find_metric(name) is None]
    assert not [name for name in names if not metrics.is_reserved(name)]
    for steps, counts in merged:
        for step, counted in zip(steps, counts, strict=True):
            means = {n: metrics.merge_rule(n)[1] for n, v in step.items() if math.isfinite(v)}
            assert not {n: count for n, count in means.items() if count and not counted.get(count)}
    assert len(merged) == 2


def test_a_reward_may_take_no_name_of_the_run_s_nor_of_its_folders() -> None:
    ours = [m for m in DECLARED if m.section != "Evaluations"]
    filled = [re.sub(r"<\w+>", "7", m.name) for m in ours]
    taken = [*filled, "eval_anything", "perf/mine", "agent/mine", "reward/a/time", "rewards/a/std"]
    assert not [name for name in taken if not metrics.is_reserved(name)]
    free = [
        "mine",
        "accuracy/timeout_frac",
        "reward/mine",
        "rewards/a/mine",
        "samples",
        "performance",
    ]
    assert not [name for name in free if metrics.is_reserved(name)]


@pytest.mark.process
def test_the_names_of_metrics_are_known_without_torch() -> None:
    code = "import sys\nfrom rloo_cli.utils.metrics import declared_metrics\n"
    code += "print(len(declared_metrics()), 'torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == [str(len(DECLARED)), "False"]
