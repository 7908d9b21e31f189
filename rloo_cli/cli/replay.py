"""`rloo replay RUN`: recompute recorded steps of a run, or score them with another reward.

A run records its rollouts with logging.rollouts_every=1. Nothing in the run's folder is changed.
Exits with 20 if a step differs.
"""

import json
import sys
from pathlib import Path

from rich.table import Table
from rich.text import Text

from rloo_cli.cli.answers import answer_console
from rloo_cli.cli.verb_parser import parse_verb
from rloo_cli.config import rules_code
from rloo_cli.data import rollout_files
from rloo_cli.inspection.run_folders import find_run_folder
from rloo_cli.reporting.panel import clean_line
from rloo_cli.utils.errors import FOUND_CODE, ConfigError
from rloo_cli.utils.files import JsonObject

EXAMPLE_CHARACTERS = 300  # shown of a prompt and of a completion


def run(args: list[str]) -> int:
    """Run the verb. Raises RunError. -> exit code"""
    options = parse_verb("replay", args)
    folder = find_run_folder(options.run, "replay")
    if options.reward is not None:
        if problems := [*rules_code.code_problems("--reward", options.reward)]:
            raise ConfigError(*problems)
        return _show_reward(folder, options.reward, options.step, options.n, options.json)
    if options.step is None:
        return _show_steps(folder, options.json)
    return _show_step(folder, options.step, options.tolerance, options.json)


def _print_progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"{text} ...", file=sys.stderr)


def _show_steps(folder: Path, as_json: bool) -> int:
    """List the recorded steps, and where each can be computed from."""
    from rloo_cli.inspection import step_replay  # lazy: it imports torch

    bases = step_replay.replay_bases(folder)
    files = rollout_files.list_rollout_files(folder)
    size = sum(path.stat().st_size for path in files.values())
    if as_json:
        steps = [{"step": s, "from": bases[s].name if s in bases else None} for s in files]
        print(json.dumps({"run": str(folder), "bytes": size, "steps": steps}, indent=2))
        return 0
    ranges = rollout_files.step_ranges
    print(f"recorded steps        {ranges(files)} ({size / 1e6:.3g} MB)")
    print(f"can be recomputed     {ranges(bases)}")
    for name in dict.fromkeys(base.name for base in bases.values()):
        print(f"  from {name}: {ranges(s for s, b in bases.items() if b.name == name)}")
    if not files:
        print("a run records its rollouts with logging.rollouts_every=1")
    return 0


def _show_step(folder: Path, step: int, tolerance: float | None, as_json: bool) -> int:
    """Recompute a step and print where it differs."""
    from rloo_cli.inspection.step_replay import replay_step  # lazy: it imports torch

    found = replay_step(folder, step, tolerance, _print_progress)
    code = FOUND_CODE if found.found else 0
    if as_json:
        print(json.dumps({"run": str(folder)} | found.to_json(), indent=2))
        return code
    comparison, console = found.comparison, answer_console(100)
    before = ""
    if found.updated_before:
        before = f", with the updates of steps {rollout_files.step_ranges(found.updated_before)}"
    console.print(f"step {step} of {folder}, recomputed from {found.base}{before}", markup=False)
    table = Table("", "numbers", "differ", "largest difference", box=None, pad_edge=False)
    for what, count in comparison.compared.items():
        differ, gap = comparison.differing.get(what, 0), comparison.largest.get(what)
        table.add_row(Text(what), f"{count:,}", f"{differ:,}", "" if gap is None else f"{gap:.3g}")
    console.print(table)
    for note in found.notes:
        console.print(clean_line(f"note: {note}"), markup=False)
    exact = "bit for bit" if not found.tolerance else f"to within {found.tolerance:g}"
    first = comparison.first
    if first is None:
        console.print(f"no difference, {exact}", markup=False)
        return code
    console.print(f"first difference: {first.what} ({first.location})", markup=False)
    console.print(f"  recorded  {first.recorded!r}\n  computed  {first.computed!r}", markup=False)
    return code


def _show_reward(
    folder: Path, spec: str, step: int | None, num_examples: int, as_json: bool
) -> int:
    """Print what another reward would have taught."""
    from rloo_cli.inspection.reward_what_if import judge_reward  # lazy: it imports torch

    verdict = judge_reward(folder, spec, None if step is None else [step], _print_progress)
    if as_json:
        print(json.dumps({"run": str(folder)} | verdict.to_json(), indent=2))
        return 0
    console = answer_console(100)
    console.print(f"{folder} under the reward {spec}", markup=False)
    columns = ("step", "scored", "rank correlation", "in groups", "advantages", "flipped")
    table = Table(*columns, "silenced", "woken", box=None, pad_edge=False)
    whole = [verdict.whole] if verdict.whole is not None and len(verdict.steps) > 1 else []
    for row in (*verdict.steps, *whole):
        share = "" if row.flipped_share is None else f" ({row.flipped_share:.0%})"
        table.add_row(
            "all" if row.step is None else str(row.step), f"{row.compared:,}",
            _number(row.correlation), _number(row.correlation_in_groups), f"{row.advantages:,}",
            f"{row.flipped:,}{share}", f"{row.silenced:,}", f"{row.woken:,}",
        )  # fmt: skip
    console.print(table)
    for note in verdict.notes:
        console.print(clean_line(f"note: {note}"), markup=False)
    for example in verdict.examples[: max(0, num_examples)]:
        console.print(_example_text(example), markup=False)
    return 0


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:+.3f}"


def _example_text(example: JsonObject) -> str:
    """A completion whose advantage flips."""
    lines = [f"\nstep {example['step']}, draw {example['draw']}, completion {example['k']}"]
    for name in ("score", "advantage"):
        old, new = example[f"old_{name}"], example[f"new_{name}"]
        lines.append(f"  {name:<10} {old:.4g} → {new:.4g}")
    for name in ("prompt", "completion"):
        lines.append(f"  {name:<10} {example[name][:EXAMPLE_CHARACTERS]!r}")
    return "\n".join(lines)
