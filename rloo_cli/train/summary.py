"""The result of a run: held-out scores before and after, three examples, paths.

It is computed from the run's log and files, never from memory: a run may have been resumed since
its first evaluation.
"""

import json
import sys
from pathlib import Path

from rich.console import Console

from rloo_cli.reporting import eval_lines
from rloo_cli.reporting.panel import before_after_tables, evaluation_table, last_message
from rloo_cli.reporting.target import target_result, target_text
from rloo_cli.run import Run
from rloo_cli.utils import paths
from rloo_cli.utils.files import JsonObject

LISTED_FILES = ("final", "curves.png", "metrics.jsonl", "samples")
ANSWER_COLUMNS = ("answer", "ground_truth", "solution")  # columns that may hold the right answer


def summarize_run(run: Run) -> JsonObject:
    """The mean greedy score of the first held-out set, `before` and `after`; None = unknown.

    Its standard error and 95 % interval are `after/se`, `after/low`, `after/high`.
    """
    names = [eval_lines.eval_prefix(name) + "reward" for name in run.eval_sets] or ["eval_reward"]
    summary: JsonObject = {}
    for when, line in zip(("before", "after"), _first_and_last_evaluation(run), strict=True):
        summary[when] = line.get(names[0])
        for part in eval_lines.INTERVAL_PARTS:
            if names[0] + part in line:
                summary[when + part] = line[names[0] + part]
    return summary


def print_report(run: Run) -> None:
    """Print the run's result: its first and its last evaluation, and the paths of its files."""
    console = Console(soft_wrap=not sys.stdout.isatty())
    first, last = _first_and_last_evaluation(run)
    if first:
        steps = (int(first["step"]), int(last["step"]))
        sets = list(run.eval_sets)[:1]
        examples = [e for name in sets for e in _example_answers(run.folder, name, steps)]
        counts = ("samples", "unscored", "/prompts")
        same = [n for n in first if n.endswith(counts) and first[n] == last.get(n)]
        shown = {n: v for n, v in first.items() if n not in ("step", *same)}
        since = f"step {steps[0]}" if steps[0] else ""
        console.print(before_after_tables(shown, last, examples, since))
    elif last:
        console.print(evaluation_table(last, list(run.eval_sets)))
    if target := target_result(run.config.target, run.log):
        console.print(f"{'target':<14} {target_text(target)}", highlight=False)
    for name in LISTED_FILES:
        if (run.folder / name).exists():
            console.print(f"{name:<14} {paths.path_as_typed(run.folder / name)}", highlight=False)


def _first_and_last_evaluation(run: Run) -> tuple[JsonObject, JsonObject]:
    """The first and the last evaluation; ({}, it) if there was only one, ({}, {}) without any."""
    lines = [line for line in run.log.metrics_lines if eval_lines.is_evaluation(line)]
    if not lines:
        return {}, {}
    return (lines[0] if lines[0]["step"] < lines[-1]["step"] else {}), lines[-1]


def _example_answers(folder: Path, name: str, steps: tuple[int, int]) -> list[JsonObject]:
    """Three prompts of a set with both answers; those with a changed score first."""
    before, after = (_greedy_samples(folder, name, step) for step in steps)
    both = [i for i in before if i in after]
    chosen = sorted(both, key=lambda i: before[i]["score"] == after[i]["score"])[:3]
    return [
        {
            "prompt": last_message(before[i]["prompt"]),
            "answer": _gold_answer(before[i]["row"]),
            "before": before[i]["completion"],
            "after": after[i]["completion"],
        }
        for i in chosen
    ]


def _gold_answer(example: JsonObject) -> str:
    return str(next((example[c] for c in ANSWER_COLUMNS if c in example), ""))


def _greedy_samples(folder: Path, name: str, step: int) -> dict[int, JsonObject]:
    """The greedy samples of an evaluation, by the index of the prompt; {} without any."""
    path = folder / "samples" / f"{eval_lines.eval_samples_name(name, step)}.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return {sample["draw"]: sample for sample in map(json.loads, lines) if sample["greedy"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # missing or overwritten
        return {}
