"""The runs that are compared: finding their folders, and what each of them has written.

Read as they lie there, whatever version wrote them: nothing is checked.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rloo_cli.checkpoint import resume
from rloo_cli.cli import run_folders
from rloo_cli.config import check
from rloo_cli.reporting import curves, eval_lines
from rloo_cli.utils.errors import ConfigError, Problem
from rloo_cli.utils.files import JsonObject, read_json


@dataclass(frozen=True)
class RunRecord:
    """What one run has written."""

    folder: Path
    run_metadata: JsonObject  # run.json
    config: JsonObject  # config.yaml, plain
    step_metrics: list[JsonObject] = field(
        default_factory=list
    )  # lines of metrics of training steps
    eval_metrics: list[JsonObject] = field(default_factory=list)  # and of evaluations
    judge_tallies: dict[str, JsonObject] = field(
        default_factory=dict
    )  # whom against -> a judge's tally

    @property
    def name(self) -> str:
        """Its folder's name."""
        return self.folder.name

    @property
    def seed(self) -> int:
        """The seed it began with."""
        return int(self.config["seed"])

    @property
    def algorithm(self) -> str:
        """The algorithm's name."""
        return str(self.config["algorithm"]["name"])

    @property
    def finished(self) -> bool:
        """Whether it came to its end."""
        return self.run_metadata.get("state") == "finished"

    @property
    def completions_per_step(self) -> int:
        """Completions of one step."""
        return int(
            self.config["train"]["prompts_per_step"] * self.config["algorithm"]["num_generations"]
        )

    @property
    def status_text(self) -> str:
        """How it ended, or how far it is, in words."""
        step = self.run_metadata.get("progress", {}).get("step", 0)
        of = self.config.get("max_steps")
        at = f"at step {step} of {of}" if of else f"at step {step}"
        code = self.run_metadata.get("code")
        state = self.run_metadata.get("state", "not begun") + (f" (exit {code})" if code else "")
        why = self.run_metadata.get("ended", {}).get("why", "")
        why = f": {why}" if why and why not in state and not self.finished else ""
        return f"{state} {at}{why}"

    def completions_sampled(self, step: int) -> float:
        """Completions that were sampled before the end of a step."""
        told = [r["episode"] for r in self.step_metrics if r["step"] <= step and "episode" in r]
        return float(told[-1]) if told else float(step * self.completions_per_step)


def find_compared_runs(patterns: Sequence[str]) -> list[Path]:
    """The folders of the runs that words name, each once, in this order.

    A word is a run's folder, its name under runs/, a folder with runs in it (one or two below), or
    a pattern (`runs/compare-*`). Raises ConfigError for one that names no run.
    """
    found: dict[Path, Path] = {}
    for word in patterns:
        for folder in _runs_matching(word):
            found.setdefault(folder.resolve(), folder)
    return [*found.values()]


def _runs_matching(pattern: str) -> Iterator[Path]:
    if any(sign in pattern for sign in "*?["):
        here = sorted(
            {*_matching_paths(Path(), pattern), *_matching_paths(run_folders.RUNS_ROOT, pattern)}
        )
        runs = [run for path in here for run in _runs_in(path)]
    else:
        places = [Path(pattern), run_folders.RUNS_ROOT / pattern]
        runs = next(filter(None, (list(_runs_in(place)) for place in places)), [])
    if not runs:
        run_folders.find_run_folder(pattern, "compare")  # says which names are near
    yield from runs


def _matching_paths(root: Path, pattern: str) -> list[Path]:
    anchor = Path(pattern).anchor
    return sorted((Path(anchor) if anchor else root).glob(pattern[len(anchor) :]))


def _runs_in(path: Path) -> Iterator[Path]:
    """The place itself if it is a run, else the runs of training that lie in it."""
    if _is_run(path):
        yield path
    elif path.is_dir():
        yield from sorted(
            p.parent for deep in ("*", "*/*") for p in path.glob(f"{deep}/run.json")
            if _is_run(p.parent)
        )  # fmt: skip


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() and (folder / "run.json").is_file()


def read_run_record(folder: Path) -> RunRecord:
    """Everything of one run. Raises ConfigError for a folder that cannot be read as one."""
    values = resume.read_run_config(folder)
    if values is None or not {"seed", "algorithm", "train"} <= set(values):
        raise ConfigError(Problem(f"{folder} is no run of training", str(folder / "config.yaml")))
    path = folder / "metrics.jsonl"
    rows = curves.read_metrics_lines(path) if path.is_file() else []
    return RunRecord(
        folder,
        read_json(folder / "run.json"),
        _comparable_config(values),
        [row for row in rows if "step_time" in row],
        [row for row in rows if eval_lines.is_evaluation(row)],
        _read_judge_tallies(folder),
    )


def _comparable_config(values: JsonObject) -> JsonObject:
    """A config in the words of the first version, so that runs of two versions compare; as it lies
    there where today's schema does not know what it chose (an algorithm's file that is gone).
    """
    try:
        return check.first_version_values(values)
    except ConfigError:
        return values


def _read_judge_tallies(folder: Path) -> dict[str, JsonObject]:
    """Whom against -> the tally of the first set, of the evaluation that was judged last."""
    found: dict[str, JsonObject] = {}
    files = sorted(folder.glob("eval/*/judge.json"), key=lambda p: p.stat().st_mtime)
    for path in files:
        told = json.loads(path.read_text())
        tally = next(iter(told.get("sets", {}).values()), None)
        if tally is not None and tally.get("rate") is not None:
            found[str(told.get("keys", {}).get("against", "reference"))] = tally
    return found


def held_out_metrics(runs: Sequence[RunRecord]) -> list[str]:
    """The metrics of evaluations that every one of these runs has, headlines first."""
    each = [{name for row in run.eval_metrics for name in row} for run in runs]
    common = set.intersection(*each) - {"step"} if each else set()
    headlines = [
        n
        for n in common
        if (m := eval_lines.HEADLINE_METRIC.fullmatch(n)) and m["what"] == "reward"
    ]
    return [*sorted(headlines, key=lambda n: (len(n), n)), *sorted(common - {*headlines})]
