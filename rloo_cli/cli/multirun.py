"""The jobs of `--multirun`: by Hydra's compose API, or by `hydra.main` for Hydra plugins.

A plugin is a sweeper that chooses jobs by the results of earlier ones, or a launcher that runs them
elsewhere, in other processes (submitit, joblib). A launcher pickles the job function with its data,
and changes to it there are lost. So each job writes its exit code to the sweep's folder, and the
process that started the sweep reads it.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import hydra
import yaml
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig

from rloo_cli.config import compose, user_files
from rloo_cli.config.compose import ComposedConfig
from rloo_cli.config.pasted import guess_name
from rloo_cli.reporting import eval_lines
from rloo_cli.utils import paths, redact
from rloo_cli.utils.errors import (
    ConfigError,
    GenerationError,
    MachineError,
    Problem,
    RunError,
    print_error,
    refuse,
    require_package,
)
from rloo_cli.utils.files import write_text

STOPPED = 75
PLUGIN_GROUPS = ("hydra/launcher=", "hydra/sweeper=")
SUBMITIT_OVERRIDE = "hydra/launcher=submitit"
SUBMITIT_FOLDER = ".submitit"  # in the root of runs: submitit's scripts, logs and pickles
OPTUNA_OVERRIDE = "hydra/sweeper=optuna"
OPTUNA_MODULE = "hydra_plugins.hydra_optuna_sweeper"
OPTUNA_RESULTS = "optimization_results.yaml"  # written by its plugin into the sweep's folder
REQUEUE_WAIT_S = 120.0  # Slurm ends a requeued job


@dataclass
class Job:
    """One job of a sweep, or the only one, and its exit code."""

    read_config: Callable[[], ComposedConfig]
    multirun: bool
    code: int = 0

    @cached_property
    def composed(self) -> ComposedConfig:
        """The composed config. Raises ConfigError for unresolvable values."""
        return self.read_config()


def single_job(arguments: Sequence[str]) -> Job:
    """The job of these overrides, --config-dir among them. Raises ConfigError."""
    overrides, dirs = compose.read_arguments(arguments)
    check_sweeper(overrides)
    cfg = compose.compose_by_hydra(overrides, dirs)
    return Job(partial(compose.read_hydra_config, cfg, cfg.hydra, dirs), multirun=False)


def sweep_jobs(arguments: Sequence[str]) -> list[Job]:
    """A job for each combination of values in these overrides and the recipe's sweep.

    The same as Hydra's basic sweeper, in the same order. Raises ConfigError.
    """
    overrides, dirs = compose.read_arguments(arguments)
    parser = OverridesParser.create()
    try:
        parsed = parser.parse_overrides(overrides)
        fixed = [w for w, o in zip(overrides, parsed, strict=True) if not o.is_sweep_override()]
        params = compose.compose_by_hydra(fixed, dirs).hydra.sweeper.get("params") or {}
        params_first = [f"{key}={value}" for key, value in params.items()]
        parsed = parser.parse_overrides([*params_first, *overrides])
        [combinations] = BasicSweeper.split_arguments(parsed, None)
    except compose.COMPOSE_ERRORS as error:
        raise ConfigError(compose.hydra_problem(error, overrides)) from None
    swept = swept_keys(overrides)

    def read_config(job: list[str]) -> ComposedConfig:
        cfg = compose.compose_by_hydra(job, dirs)
        return _with_swept_keys(compose.read_hydra_config(cfg, cfg.hydra, dirs), swept)

    return [Job(partial(read_config, job), multirun=True) for job in combinations]


def has_plugins(arguments: Sequence[str]) -> bool:
    """Whether these overrides choose another sweeper or launcher of Hydra."""
    return any(word.lstrip("+").startswith(PLUGIN_GROUPS) for word in arguments)


def _with_swept_keys(composed: ComposedConfig, swept: Sequence[str]) -> ComposedConfig:
    return replace(composed, swept_keys=(*composed.swept_keys, *swept))


class PluginSweep:
    """A sweep with another sweeper or launcher, run by `hydra.main`.

    At the end `exit_codes` has those of the jobs, and `best_job` the result of an optimizing
    sweeper.
    """

    def __init__(self, arguments: Sequence[str]):
        self.overrides, self.dirs = compose.read_arguments(arguments)
        check_sweeper(self.overrides)
        self.swept_keys = swept_keys(self.overrides)
        self.errors: list[Exception] = []
        self.exit_codes: list[int] = []
        self.best_job = ""

    def run(self, task: Callable[[Job], float | None]) -> None:
        """Call `task` once per job; an optimizing sweeper gets its return value. Raises what a job
        raised, and ConfigError for Hydra's own errors."""

        def of_hydra(cfg: DictConfig) -> float | None:
            with self._job(cfg) as job:
                return task(job)
            return None  # its error is raised later by `_running`

        with self._running():
            hydra.main(str(paths.CONF), "config", version_base="1.3")(of_hydra)()

    @contextmanager
    def _running(self) -> Iterator[None]:
        """A context around the call of Hydra. Raises what a job raised, and ConfigError for Hydra's
        own errors, after Hydra has ended: else Hydra would first print its own line."""
        before = os.environ.get("HYDRA_FULL_ERROR")
        os.environ["HYDRA_FULL_ERROR"] = "1"  # let exceptions reach our own report
        with _sweep_output_dir(self.overrides) as (sweep, keys):
            self.launcher_jobs = LauncherJobs(sweep)
            added = [*compose.search_path_override(self.dirs), *keys]
            sys.argv = ["rloo train", "--multirun", *added, *self.overrides]
            try:
                yield
            except compose.COMPOSE_ERRORS as error:
                raise ConfigError(compose.hydra_problem(error, self.overrides)) from None
            except RuntimeError as error:
                raise submitit_error(error) or error from None
            finally:
                os.environ.pop("HYDRA_FULL_ERROR")
                if before is not None:
                    os.environ["HYDRA_FULL_ERROR"] = before
            self.best_job = best_job(sweep)
            self.exit_codes = self.launcher_jobs.exit_codes()
        if self.errors:
            raise self.errors[0]

    @contextmanager
    def _job(self, cfg: DictConfig) -> Iterator[Job]:
        """A context around one job. It keeps the job's exception until the end of the sweep."""
        config = cast(DictConfig, HydraConfig.get())
        with self.launcher_jobs.record_exit_code(config) as note:
            try:
                job = Job(partial(self._read_config, cfg.copy(), config), multirun=True)
                yield job  # the config is read inside, so that its errors are kept too
                note(job.code)
            except Exception as error:
                self.errors.append(error)
                note(print_error(error) if isinstance(error, RunError) else 1)

    def _read_config(self, cfg: DictConfig, config: DictConfig) -> ComposedConfig:
        composed = compose.read_hydra_config(cfg, config, self.dirs)
        return _with_swept_keys(composed, self.swept_keys)


@contextmanager
def _sweep_output_dir(overrides: Sequence[str]) -> Iterator[tuple[Path, list[str]]]:
    """A temporary folder for a sweep with these overrides, and Hydra's keys that name it.

    If other machines run its jobs, it lies in the shared root of the runs.
    """
    keys: list[str] = []
    shared = None
    if any(word.startswith(SUBMITIT_OVERRIDE) for word in overrides):
        roots = [w.partition("=")[2] for w in overrides if w.lstrip("+").startswith("root=")]
        shared = Path(roots[-1] if roots else "runs", SUBMITIT_FOLDER).absolute()
        shared.mkdir(parents=True, exist_ok=True)
        keys.append(f"hydra.launcher.submitit_folder={_quoted(f'{shared}/%j')}")
    with tempfile.TemporaryDirectory(prefix="rloo-sweep-", dir=shared) as sweep:
        yield Path(sweep), [*keys, f"hydra.sweep.dir={_quoted(sweep)}"]


def swept_keys(overrides: Sequence[str]) -> tuple[str, ...]:
    """The keys among these overrides that have several values; () if they do not parse."""
    try:
        parsed = OverridesParser.create().parse_overrides([*overrides])
    except (HydraException, ValueError, RecursionError):  # Hydra reports it when it composes
        return ()
    return tuple(o.key_or_group for o in parsed if o.is_sweep_override())


def objective_value(folder: Path, held_out: Iterable[str], objective: str | None) -> float | None:
    """The value of a finished run for an optimizing sweeper: the last value of a metric.

    The metric is `objective` (logging.objective), else the mean held-out score of the first set,
    else the training reward; None if none of these is known. The sweeper must know whether higher
    is better. Raises ConfigError if no line has `objective`.
    """
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    rows = [json.loads(line) for line in lines]
    scores = [eval_lines.eval_prefix(name) + "reward" for name in held_out]
    wanted = [objective] if objective else [*scores[:1], "reward"]
    for name in wanted:
        values = [row[name] for row in rows if isinstance(row.get(name), int | float)]
        if values:
            return float(values[-1])
    if not objective:
        return None
    known = list(dict.fromkeys(name for row in rows for name in row))
    why = f"metrics are: {', '.join(known)}" if known else "it has no lines"
    what = f"no line of {path} has {wanted[0]!r}"
    refuse("logging.objective", what, f"logging.objective={guess_name(wanted[0], known)}", why)


def check_sweeper(overrides: Sequence[str]) -> None:
    """Raises MachineError for Optuna's sweeper if it is not installed."""
    for word in overrides:
        if word.lstrip("+") == OPTUNA_OVERRIDE:
            why = "it contains Optuna's sweeper"
            require_package(word, "hydra-optuna-sweeper", "optuna", why, module=OPTUNA_MODULE)


def best_job(folder: Path) -> str:
    """An optimizing sweeper's result about its best jobs, in one line; "" without a result.

    `folder`: of the sweep, removed afterwards.
    """
    path = folder / OPTUNA_RESULTS
    if not path.is_file():
        return ""
    found = yaml.safe_load(path.read_text())
    best = found.get("solutions") or [
        {"params": found.get("best_params", {}), "values": [found.get("best_value")]}
    ]
    texts = []
    for one in best:
        keys = " ".join(f"{key}={value}" for key, value in one["params"].items())
        texts.append(f"{', '.join(f'{value:.6g}' for value in one['values'])} with {keys}")
    return f"best by {found.get('name', 'its sweeper')}: " + "; ".join(texts)


def _quoted(path: str) -> str:
    return "'" + path.replace("\\", "\\\\").replace("'", "\\'") + "'"


class LauncherJobs:
    """The jobs of one sweep in other processes. It is pickled with each job."""

    def __init__(self, folder: Path):
        self.folder, self.pid, self.files = folder, os.getpid(), dict(user_files.USER_RECIPE_FILES)

    @contextmanager
    def record_exit_code(self, config: Any) -> Iterator[Callable[[int], None]]:
        """A context around one job; yields the function to call with its exit code.

        A Slurm job that was asked to stop is requeued and resumes later.
        """
        if os.getpid() == self.pid:
            yield lambda code: None
            return
        user_files.USER_RECIPE_FILES.update(self.files)  # recipes in the user's files
        codes: list[int] = []
        with redact.redacted_console():
            yield codes.append
        if codes[-1:] == [STOPPED] and "submitit" in str(config.launcher._target_):
            requeue_slurm_job()
        write_text(self.folder / "codes" / str(config.job.num), str(codes[-1] if codes else 1))

    def exit_codes(self) -> list[int]:
        """The exit codes of these jobs, in their order."""
        found = (self.folder / "codes").glob("[0-9]*")
        return [int(p.read_text()) for p in sorted(found, key=lambda p: int(p.name))]


def requeue_slurm_job() -> None:
    """Requeue our own Slurm job and wait for its end; no-op outside Slurm or if cancelled."""
    number = os.environ.get("SLURM_JOB_ID")
    if number is None:
        return
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        asked = ["scontrol", "show", "job", "-o", number]
        said = subprocess.run(asked, capture_output=True, text=True, timeout=30).stdout
        if " JobState=RUNNING " in said:
            subprocess.run(["scontrol", "requeue", number], check=False, timeout=30)
            time.sleep(REQUEUE_WAIT_S)


def submitit_error(error: Exception) -> RunError | None:
    """submitit's own error as a RunError; None for any other error."""
    kind = type(error).__name__
    said = "\n".join([line for line in str(error).splitlines() if line.strip()][:8])
    if kind == "FailedSubmissionError":
        fix = "correct the hydra.launcher key that Slurm names, e.g. hydra.launcher.partition=NAME"
        what = "Slurm refuses the jobs of the sweep"
        error_type: type[RunError] = MachineError
    elif kind in ("UncompletedJobError", "FailedJobError"):
        what = "a job of the sweep exited without an error: killed, or at its time limit"
        fix = "resume=auto resumes it; hydra.launcher.timeout_min=N sets a longer limit"
        error_type = GenerationError
    elif kind == "RuntimeError" and "srun" in said:  # submitit checks for it first
        fix = "on a login node of the cluster, or omit hydra/launcher"
        error_type, what = MachineError, "Slurm not found"
    else:
        return None
    return error_type(Problem(what, "hydra/launcher", said, fix))
