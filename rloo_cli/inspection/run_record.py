"""Reads a run's files: config, state, metrics and evaluations.

`read_run_record` requires complete files, since a comparison needs both sides intact.
`inspect_run_folder` reads what it can, also of a damaged folder, and reports the rest.
"""

import hashlib
import json
import socket
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from rloo_cli.checkpoint import resume
from rloo_cli.config.judge import AGAINST_REFERENCE
from rloo_cli.reporting import eval_lines
from rloo_cli.reporting.metrics_lines import MetricsMapping, MetricsReader, read_metrics_lines
from rloo_cli.utils.child_process import is_process_alive
from rloo_cli.utils.errors import RunError, refuse
from rloo_cli.utils.files import JsonObject, read_json

FIRST_SET = "held out"  # the name that judge.json has for the set of data.eval_split
ENDED_STATES = ("finished", "stopped", "failed", "unknown")
# Errors of files that are missing, truncated or of the wrong kind.
READ_ERRORS = (
    RunError, OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError,
    RecursionError, yaml.YAMLError,
)  # fmt: skip
SECTIONS = ("plan", "progress", "ended", "memory", "seconds", "trackers")  # objects of run.json


# Keys of a judge that affect access to it, not verdicts.
JUDGE_ACCESS_KEYS = (
    "against", "base_url", "api_key_env", "concurrency", "request_timeout_s", "timeout_s",
    "retries", "max_pairs",
)  # fmt: skip


@dataclass(frozen=True)
class JudgeTally:
    """A judge's verdicts on one model of a run, over the pairs of the first set."""

    folder: Path  # of the evaluation
    opponent: str
    of_final_model: bool
    set_name: str
    judge: JsonObject  # its keys, without those of access, and the hash of its question
    counts: JsonObject  # wins, ties and losses, the rate and its limits

    @cached_property
    def judgement(self) -> JsonObject:
        """What the verdicts depend on: the judge, the set and its pairs, read here."""
        return self.judge | {"set": self.set_name, "pairs": self._pairs_digest()}

    @property
    def judgement_key(self) -> str:
        """The judgement as text: equal if two win rates are comparable."""
        return json.dumps(self.judgement, sort_keys=True)

    def _pairs_digest(self) -> str:
        """A hash of the prompts and reference texts; without their file, only the number of pairs.

        Answers of another model are not hashed: they can differ by a token on another machine.
        """
        counts = (self.counts.get(kind) for kind in ("wins", "ties", "losses", "invalid"))
        number = f"{sum(n for n in counts if isinstance(n, int))} pairs"
        hashed = hashlib.sha256()
        try:
            for line in (self.folder / "pairs.jsonl").read_text(encoding="utf-8").splitlines():
                pair = json.loads(line)
                if (pair["set"] or FIRST_SET) == self.set_name:
                    text = pair["theirs"] if self.opponent == AGAINST_REFERENCE else None
                    hashed.update(json.dumps([pair["row"], pair["prompt"], text]).encode())
        except READ_ERRORS:
            return number
        return f"{number} {hashed.hexdigest()[:8]}"


@dataclass(frozen=True)
class RunRecord:
    """The files of one run."""

    folder: Path
    run_metadata: JsonObject  # run.json
    config: JsonObject  # config.yaml, plain
    step_metrics: list[MetricsMapping] = field(default_factory=list)  # one for each training step
    eval_metrics: list[MetricsMapping] = field(default_factory=list)  # one for each evaluation
    judge_tallies: list[JudgeTally] = field(default_factory=list)  # the newest last
    problems: list[str] = field(default_factory=list)  # unreadable files, and why

    @property
    def metrics_lines(self) -> list[MetricsMapping]:
        """Steps and evaluations in the order of metrics.jsonl: an evaluation is of its step."""
        return sorted([*self.step_metrics, *self.eval_metrics], key=lambda line: line["step"])

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
        """Whether it finished."""
        return self.run_metadata.get("state") == "finished"

    @property
    def state(self) -> str:
        """Its state by run.json; `killed` if its process ended without recording it."""
        return run_state(self.run_metadata)

    @property
    def last_step(self) -> int:
        """The last logged step; 0 before the first."""
        return int(self.step_metrics[-1]["step"]) if self.step_metrics else 0

    @property
    def completions_per_step(self) -> int:
        """How many completions one step samples."""
        prompts = self.config["train"]["prompts_per_step"]
        return int(prompts * self.config["algorithm"]["num_generations"])

    @property
    def status_text(self) -> str:
        """How it ended, or its progress, as text."""
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
        steps, counts = self._counted_steps
        index = bisect_right(steps, step)
        return float(counts[index - 1] if index else step * self.completions_per_step)

    @cached_property
    def _counted_steps(self) -> tuple[list[int], list[float]]:
        """The steps with a count of completions sampled before their end, and the counts."""
        counted = [m for m in self.step_metrics if "sampled_completions" in m]
        return [m["step"] for m in counted], [m["sampled_completions"] for m in counted]


def run_state(run_metadata: JsonObject) -> str:
    """The state in run.json; `killed` if the process of a run on this machine is gone."""
    state = str(run_metadata.get("state", "unknown"))
    here = run_metadata.get("host") == socket.gethostname()
    known = isinstance(run_metadata.get("pid"), int)
    if state in ENDED_STATES or not here or not known or is_process_alive(run_metadata):
        return state
    return "killed"


def read_run_record(folder: Path) -> RunRecord:
    """Read everything of one run. Raises ConfigError for a folder that cannot be read as a run."""
    try:
        return _read_whole_record(folder)
    except RunError:
        raise
    except READ_ERRORS as error:
        why, fix = f"{type(error).__name__}: {error}", f"rloo doctor {folder}"
        refuse("command line", f"{folder} is damaged", fix, why)


def _read_whole_record(folder: Path) -> RunRecord:
    """As `read_run_record`. Raises any of READ_ERRORS for an invalid file."""
    values = resume.read_run_config(folder)
    sections = ("algorithm", "train")
    if values is None or not all(isinstance(values.get(name), dict) for name in sections):
        where, why = str(folder / "config.yaml"), "expected the sections algorithm and train"
        refuse(where, f"{folder} is not a training run", "name a run that `rloo runs` lists", why)
    path = folder / "metrics.jsonl"
    metrics = read_metrics_lines(path) if path.is_file() else []
    return RunRecord(
        folder,
        _whole_metadata(folder),
        values,
        [line for line in metrics if "step_time" in line],
        [line for line in metrics if eval_lines.is_evaluation(line)],
        _read_judge_tallies(folder),
    )


def _whole_metadata(folder: Path) -> JsonObject:
    """The content of run.json. Raises ConfigError if a part of it is invalid."""
    problems: list[str] = []
    path = folder / "run.json"
    metadata = _usable_metadata(_read_object(path) if path.is_file() else {}, folder, problems)
    if problems:
        why = f"expected objects: {', '.join(SECTIONS)}; and plan.max_steps a number or null"
        refuse(str(folder / "run.json"), problems[0], f"rloo doctor {folder}", why)
    return metadata


def _usable_metadata(metadata: JsonObject, folder: Path, problems: list[str]) -> JsonObject:
    """The content without sections that are not objects, and problems for these."""
    wrong = [name for name in SECTIONS if not isinstance(metadata.get(name, {}), dict)]
    problems += [f"{folder / 'run.json'}: its {name} is not an object" for name in wrong]
    usable = {name: value for name, value in metadata.items() if name not in wrong}
    steps = usable.get("plan", {}).get("max_steps")
    if steps is not None and type(steps) is not int:
        problems.append(f"{folder / 'run.json'}: its plan.max_steps is not a number")
        usable["plan"] = usable["plan"] | {"max_steps": None}
    return usable


def _read_judge_tallies(folder: Path) -> list[JudgeTally]:
    """The judges' verdicts on the run's models, in order."""
    paths = sorted(folder.glob("eval/*/judge.json"), key=lambda path: path.stat().st_mtime)
    tallies = []
    for path in paths:
        judged: JsonObject = read_json(path)
        sets: JsonObject = judged.get("sets", {})
        if not sets or next(iter(sets.values())).get("rate") is None:
            continue
        name, counts = next(iter(sets.items()))
        keys: JsonObject = judged.get("keys", {})
        judge = {k: v for k, v in keys.items() if k not in JUDGE_ACCESS_KEYS}
        judge |= {"question": judged.get("question_sha256")}
        opponent = str(keys.get("against", AGAINST_REFERENCE))
        final = _is_of_final_model(folder, path.parent)
        tallies.append(JudgeTally(path.parent, opponent, final, name, judge, counts))
    return tallies


def _is_of_final_model(run: Path, evaluation: Path) -> bool:
    """Whether results are about the run's final model.

    Their folder is named after the model. An extended run has a new final model; the step of the
    older results is in their about.json.
    """
    if evaluation.name != "final" and not evaluation.name.startswith("final-"):
        return False
    judged = read_json(evaluation / "about.json").get("state", {}).get("step")
    ended = read_json(run / "summary.json").get("steps")
    return judged is None or ended is None or bool(judged == ended)


def inspect_run_folder(folder: Path, reader: MetricsReader | None = None) -> RunRecord:
    """Read what can be read of a run, whole or damaged. Never raises for its files' content.

    The config is as the run wrote it, with its version's names. With `reader`, lines of metrics
    that it has already read are not read again.
    """
    problems: list[str] = []

    def attempt(name: str, read: Callable[[], Any], instead: Any) -> Any:
        try:
            value = read()
        except READ_ERRORS as error:
            why = error.problems[0] if isinstance(error, RunError) else None
            said = f"{why.where}: {why.what}" if why else f"{folder / name}: {error}"
            problems.append(said.splitlines()[0])
            return instead
        if not isinstance(value, type(instead)):
            problems.append(f"{folder / name}: expected an object, found a {type(value).__name__}")
            return instead
        return value

    config = attempt("config.yaml", lambda: _read_written_config(folder), {})
    metadata = attempt("run.json", lambda: _read_object(folder / "run.json"), {})
    reader = reader or MetricsReader(folder / "metrics.jsonl")
    lines = attempt("metrics.jsonl", reader.read, [])
    problems += reader.problems
    return RunRecord(
        folder,
        _usable_metadata(metadata, folder, problems),
        config,
        [line for line in lines if "step_time" in line],
        [line for line in lines if eval_lines.is_evaluation(line)],
        attempt("eval", lambda: _read_judge_tallies(folder), []),
        problems,
    )


def _read_object(path: Path) -> JsonObject:
    if not path.is_file():
        raise FileNotFoundError("file not found")
    values: object = read_json(path)
    if not isinstance(values, dict):
        raise ValueError(f"expected an object, found a {type(values).__name__}")
    return values


def _read_written_config(folder: Path) -> JsonObject:
    path = folder / "config.yaml"
    if not path.is_file():
        raise FileNotFoundError("file not found")
    values: JsonObject = yaml.safe_load(path.read_text(encoding="utf-8"))
    return values


def held_out_metrics(runs: Sequence[RunRecord]) -> list[str]:
    """The metrics of evaluations that every one of these runs has, headlines first."""
    names = [{name for line in run.eval_metrics for name in line} for run in runs]
    common = set.intersection(*names) - {"step"} if names else set()
    matches = [m for name in common if (m := eval_lines.HEADLINE_METRIC.fullmatch(name))]
    headlines = [m.string for m in matches if m["what"] == "reward"]
    return [*sorted(headlines, key=lambda n: (len(n), n)), *sorted(common - {*headlines})]
