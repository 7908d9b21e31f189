"""The runs that are compared: finding their folders, and what each of them has written.

Read as they lie there, whatever version wrote them: nothing is checked.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rloo_cli.checkpoint import resume
from rloo_cli.cli import run_folders
from rloo_cli.config import check
from rloo_cli.reporting import curves, eval_rows
from rloo_cli.utils.errors import ConfigError, Problem
from rloo_cli.utils.files import read_json

Row = dict[str, Any]


@dataclass(frozen=True)
class Told:
    """What one run has written."""

    folder: Path
    facts: Row  # run.json
    config: Row  # config.yaml, plain
    steps: list[Row] = field(default_factory=list)  # lines of metrics of training steps
    evaluations: list[Row] = field(default_factory=list)  # and of evaluations
    verdicts: dict[str, Row] = field(default_factory=dict)  # whom against -> a judge's tally

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
        return self.facts.get("state") == "finished"

    @property
    def per_step(self) -> int:
        """Completions of one step."""
        return int(
            self.config["train"]["prompts_per_step"] * self.config["algorithm"]["num_generations"]
        )

    @property
    def ended(self) -> str:
        """How it ended, or how far it is, in words."""
        step = self.facts.get("progress", {}).get("step", 0)
        of = self.config.get("max_steps")
        at = f"at step {step} of {of}" if of else f"at step {step}"
        code = self.facts.get("code")
        state = self.facts.get("state", "not begun") + (f" (exit {code})" if code else "")
        why = self.facts.get("ended", {}).get("why", "")
        why = f": {why}" if why and why not in state and not self.finished else ""
        return f"{state} {at}{why}"

    def episode(self, step: int) -> float:
        """Completions that were sampled before the end of a step."""
        told = [r["episode"] for r in self.steps if r["step"] <= step and "episode" in r]
        return float(told[-1]) if told else float(step * self.per_step)


def find(words: Sequence[str]) -> list[Path]:
    """The folders of the runs that words name, each once, in this order.

    A word is a run's folder, its name under runs/, a folder with runs in it (one or two below), or
    a pattern (`runs/compare-*`). Raises ConfigError for one that names no run.
    """
    found: dict[Path, Path] = {}
    for word in words:
        for folder in _of(word):
            found.setdefault(folder.resolve(), folder)
    return [*found.values()]


def _of(word: str) -> Iterator[Path]:
    if any(sign in word for sign in "*?["):
        here = sorted({*_matching(Path(), word), *_matching(run_folders.ROOT, word)})
        runs = [run for path in here for run in _runs_in(path)]
    else:
        places = [Path(word), run_folders.ROOT / word]
        runs = next(filter(None, (list(_runs_in(place)) for place in places)), [])
    if not runs:
        run_folders.find(word, "compare")  # says which names are near
    yield from runs


def _matching(root: Path, pattern: str) -> list[Path]:
    anchor = Path(pattern).anchor
    return sorted((Path(anchor) if anchor else root).glob(pattern[len(anchor) :]))


def _runs_in(place: Path) -> Iterator[Path]:
    """The place itself if it is a run, else the runs of training that lie in it."""
    if _is_run(place):
        yield place
    elif place.is_dir():
        yield from sorted(
            p.parent for deep in ("*", "*/*") for p in place.glob(f"{deep}/run.json")
            if _is_run(p.parent)
        )  # fmt: skip


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() and (folder / "run.json").is_file()


def read(folder: Path) -> Told:
    """Everything of one run. Raises ConfigError for a folder that cannot be read as one."""
    values = resume.written(folder)
    if values is None or not {"seed", "algorithm", "train"} <= set(values):
        raise ConfigError(Problem(f"{folder} is no run of training", str(folder / "config.yaml")))
    path = folder / "metrics.jsonl"
    rows = curves.read_rows(path) if path.is_file() else []
    return Told(
        folder,
        read_json(folder / "run.json"),
        _comparable(values),
        [row for row in rows if "step_time" in row],
        [row for row in rows if eval_rows.is_evaluation(row)],
        _verdicts(folder),
    )


def _comparable(values: Row) -> Row:
    """A config in the words of the first version, so that runs of two versions compare; as it lies
    there where today's schema does not know what it chose (an algorithm's file that is gone).
    """
    try:
        return check.as_first_written(values)
    except ConfigError:
        return values


def _verdicts(folder: Path) -> dict[str, Row]:
    """Whom against -> the tally of the first set, of the evaluation that was judged last."""
    found: dict[str, Row] = {}
    files = sorted(folder.glob("eval/*/judge.json"), key=lambda p: p.stat().st_mtime)
    for path in files:
        told = json.loads(path.read_text())
        tally = next(iter(told.get("sets", {}).values()), None)
        if tally is not None and tally.get("rate") is not None:
            found[str(told.get("keys", {}).get("against", "reference"))] = tally
    return found


def held_out_metrics(runs: Sequence[Told]) -> list[str]:
    """The metrics of evaluations that every one of these runs has, headlines first."""
    each = [{name for row in run.evaluations for name in row} for run in runs]
    common = set.intersection(*each) - {"step"} if each else set()
    headlines = [
        n for n in common if (m := eval_rows.HEADLINE.fullmatch(n)) and m["what"] == "reward"
    ]
    return [*sorted(headlines, key=lambda n: (len(n), n)), *sorted(common - {*headlines})]
