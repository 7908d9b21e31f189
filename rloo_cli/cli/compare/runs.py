"""Finds the runs that are compared, and reads what each of them has written.

Files are read as they are, whatever version wrote them: nothing is checked.
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
    step_metrics: list[JsonObject] = field(default_factory=list)  # one for each training step
    eval_metrics: list[JsonObject] = field(default_factory=list)  # one for each evaluation
    judge_tallies: dict[str, JsonObject] = field(default_factory=dict)  # opponent -> a tally

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.folder.name

    @property
    def seed(self) -> int:
        """The seed in its config."""
        return int(self.config["seed"])

    @property
    def algorithm(self) -> str:
        """The algorithm's name."""
        return str(self.config["algorithm"]["name"])

    @property
    def finished(self) -> bool:
        """Whether it reached its end."""
        return self.run_metadata.get("state") == "finished"

    @property
    def completions_per_step(self) -> int:
        """How many completions one step samples."""
        prompts = self.config["train"]["prompts_per_step"]
        return int(prompts * self.config["algorithm"]["num_generations"])

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
        counts = [m["episode"] for m in self.step_metrics if m["step"] <= step and "episode" in m]
        return float(counts[-1] if counts else step * self.completions_per_step)


def find_compared_runs(patterns: Sequence[str]) -> list[Path]:
    """The folders of the runs that the arguments name, each once, in this order.

    An argument is a run's folder, its name under runs/, a folder with runs in it (one or two
    below), or a pattern (`runs/compare-*`). Raises ConfigError for one that names no run.
    """
    folders: dict[Path, Path] = {}
    for pattern in patterns:
        for folder in _runs_matching(pattern):
            folders.setdefault(folder.resolve(), folder)
    return [*folders.values()]


def _runs_matching(pattern: str) -> Iterator[Path]:
    root = run_folders.RUNS_ROOT
    if any(sign in pattern for sign in "*?["):
        paths = {*_matching_paths(Path(), pattern), *_matching_paths(root, pattern)}
        runs = [run for path in sorted(paths) for run in _runs_in(path)]
    else:
        runs = list(_runs_in(Path(pattern))) or list(_runs_in(root / pattern))
    if not runs:
        run_folders.find_run_folder(pattern, "compare")  # says which names are near
    yield from runs


def _matching_paths(root: Path, pattern: str) -> list[Path]:
    anchor = Path(pattern).anchor
    return sorted((Path(anchor) if anchor else root).glob(pattern[len(anchor) :]))


def _runs_in(path: Path) -> Iterator[Path]:
    """The folder itself if it is a run, else the training runs in it."""
    if _is_run(path):
        yield path
    elif path.is_dir():
        folders = [p.parent for deep in ("*", "*/*") for p in path.glob(f"{deep}/run.json")]
        yield from sorted(folder for folder in folders if _is_run(folder))


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() and (folder / "run.json").is_file()


def read_run_record(folder: Path) -> RunRecord:
    """Read everything of one run. Raises ConfigError for a folder that cannot be read as a run."""
    values = resume.read_run_config(folder)
    if values is None or not {"seed", "algorithm", "train"} <= set(values):
        raise ConfigError(Problem(f"{folder} is not a training run", str(folder / "config.yaml")))
    path = folder / "metrics.jsonl"
    metrics = curves.read_metrics_lines(path) if path.is_file() else []
    return RunRecord(
        folder,
        read_json(folder / "run.json"),
        _comparable_config(values),
        [line for line in metrics if "step_time" in line],
        [line for line in metrics if eval_lines.is_evaluation(line)],
        _read_judge_tallies(folder),
    )


def _comparable_config(values: JsonObject) -> JsonObject:
    """A config in the names of the first version, so that runs of two versions compare.

    It is returned as it is if the schema does not know a choice (an algorithm's file is gone).
    """
    try:
        return check.first_version_values(values)
    except ConfigError:
        return values


def _read_judge_tallies(folder: Path) -> dict[str, JsonObject]:
    """Opponent -> the tally of the first set, of the last judged evaluation."""
    tallies: dict[str, JsonObject] = {}
    for path in sorted(folder.glob("eval/*/judge.json"), key=lambda p: p.stat().st_mtime):
        judged = json.loads(path.read_text())
        tally = next(iter(judged.get("sets", {}).values()), None)
        if tally is not None and tally.get("rate") is not None:
            tallies[str(judged.get("keys", {}).get("against", "reference"))] = tally
    return tallies


def held_out_metrics(runs: Sequence[RunRecord]) -> list[str]:
    """The metrics of evaluations that every one of these runs has, headlines first."""
    names = [{name for line in run.eval_metrics for name in line} for run in runs]
    common = set.intersection(*names) - {"step"} if names else set()
    matches = [m for name in common if (m := eval_lines.HEADLINE_METRIC.fullmatch(name))]
    headlines = [m.string for m in matches if m["what"] == "reward"]
    return [*sorted(headlines, key=lambda n: (len(n), n)), *sorted(common - {*headlines})]
