"""`rloo record RUN` seals a run into a folder; `rloo record verify FOLDER` checks such a folder.

A record that would not verify is not written. Both exit with 20 if something does not hold.
"""

import argparse
import math
from pathlib import Path

import yaml

from rloo_cli.checkpoint import manifest
from rloo_cli.cli import answers
from rloo_cli.cli.eval import temporary_output_dir
from rloo_cli.cli.verb_parser import parse_verb
from rloo_cli.config.compose import ComposedConfig
from rloo_cli.config.provenance import ConfigSources
from rloo_cli.inspection import run_seal
from rloo_cli.inspection.run_folders import RUNS_ROOT, find_run_folder
from rloo_cli.inspection.run_record import read_run_record
from rloo_cli.launch import launcher
from rloo_cli.reporting.panel import clean_line
from rloo_cli.reporting.statistics import Z_95, half_width_error
from rloo_cli.utils.errors import FOUND_CODE, refuse
from rloo_cli.utils.files import JsonObject, read_json


def run(args: list[str]) -> int:
    """Run the verb. Raises RunError."""
    options = parse_verb("record", args)
    if options.again and options.action != "verify":
        why = "--again trains the config of a record that exists"
        refuse("command line", "--again goes with verify", "rloo record verify FOLDER --again", why)
    with answers.json_answer(options.json) as answer:
        if options.action == "verify":
            code = _verify(Path(options.folder), options, answer)
        else:
            code = _record(find_run_folder(options.run, "record"), options.out, answer)
        answer["code"] = code
    return code


def _record(folder: Path, out: str | None, answer: JsonObject) -> int:
    """Seal a run. -> 0, or 20 without writing if its score cannot be repeated"""
    target = Path(out) if out else folder / "record"
    if target.exists():
        fix = f"--out OTHER, or move it away: mv {target} {target}.old"
        refuse("command line", f"{target} exists", fix, "a record is never overwritten")
    with temporary_output_dir(target) as temporary:
        facts = run_seal.seal_run(folder, temporary)
        problems = _check_score(temporary, facts, answer)
        if not problems:
            temporary.rename(target)
            _print_line("record", str(target))
    answer |= {"record": None if problems else str(target)}
    return FOUND_CODE if problems else 0


def _verify(folder: Path, options: argparse.Namespace, answer: JsonObject) -> int:
    facts = run_seal.read_sealed_facts(folder)
    broken = manifest.sealed_folder_problem(folder)
    answer |= {"record": str(folder), "problems": [broken] if broken else []}
    _print_line("seal", f"broken: {broken}" if broken else "every file is as it was sealed")
    if broken:
        return FOUND_CODE
    if _check_score(folder, facts, answer):
        return FOUND_CODE
    return _run_again(folder, facts, options.seed, answer) if options.again else 0


def _check_score(folder: Path, facts: JsonObject, answer: JsonObject) -> list[str]:
    """Recompute the score, and print it. -> what does not hold"""
    from rloo_cli.inspection.record_score import recompute_score  # lazy: it imports torch

    recomputed = recompute_score(folder, facts)
    answer |= {"score": recomputed.score, "problems": recomputed.problems}
    for problem in recomputed.problems:
        _print_line("wrong", problem)
    if not recomputed.problems:
        count = f"recomputed from {recomputed.completions} completions"
        _print_line("score", f"{_score_text(recomputed.score)}, {count}")
        if target := facts["target"]:
            verb = "reached" if target["reached"] else "not reached"
            _print_line("target", f"{target['at_least']} {verb} after {target['seconds']} s")
    return recomputed.problems


def _run_again(folder: Path, facts: JsonObject, seed: int | None, answer: JsonObject) -> int:
    """Train the record's config with another seed, and compare the scores."""
    seed = facts["seed"] + 1 if seed is None else seed
    name = f"{facts['run']}-seed-{seed}"
    changes = {"seed": seed, "name": name, "root": str(RUNS_ROOT), "resume": "auto"}
    config = folder / "config.yaml"
    words = (f"+recipe={config}", *(f"{key}={value}" for key, value in changes.items()))
    values = yaml.safe_load(config.read_text(encoding="utf-8")) | changes
    sources = ConfigSources([], [(config, "")])
    composed = ComposedConfig(values, sources, facts["recipe"], words)
    if code := launcher.launch_run(composed):
        return code
    second = read_run_record(RUNS_ROOT / name)
    again = run_seal.score_of_line(dict(second.eval_metrics[-1]), facts["score"]["metric"])
    target = read_json(second.folder / "summary.json").get("target")
    reached = target["reached"] if target else _is_not_below(again, facts["score"])
    answer["again"] = {"run": str(second.folder), "seed": seed, "score": again, "target": target,
                       "reached": reached}  # fmt: skip
    goal = "the target" if target else "the record's score, within both intervals"
    verb = "reaches" if reached else "does not reach"
    _print_line("again", f"seed {seed}: {_score_text(again)}, {verb} {goal}")
    return 0 if reached else FOUND_CODE


def _is_not_below(again: JsonObject, recorded: JsonObject) -> bool:
    """Whether a score is not below another one by more than the error of their difference."""
    known = [score for score in (again, recorded) if "low" in score]
    error = math.hypot(*(half_width_error(score["low"], score["high"]) for score in known))
    return bool(again["value"] + Z_95 * error >= recorded["value"])


def _print_line(label: str, text: str) -> None:
    print(f"{label:<14} {clean_line(text)}")


def _score_text(score: JsonObject) -> str:
    low, high = score.get("low"), score.get("high")
    interval = "" if low is None else f" ({low:.3g} to {high:.3g})"
    return f"{score['metric']} {score['value']:.4g}{interval}"
