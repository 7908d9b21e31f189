"""What Hydra's sweeps need of rloo: names of swept keys, a job's objective, jobs elsewhere.

Jobs elsewhere run in processes of one of Hydra's launchers (submitit, joblib). Such a job's
function is pickled with everything it holds, and what it changes there is lost. So each job writes
its exit code to the sweep's folder, which the process that started the sweep reads.
"""

import contextlib
import importlib.util
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from rloo_cli.config import user_files
from rloo_cli.config.pasted import guess_name
from rloo_cli.config.schema import RunConfig
from rloo_cli.reporting import eval_lines
from rloo_cli.utils import redact
from rloo_cli.utils.errors import ConfigError, GenerationError, MachineError, Problem, RunError
from rloo_cli.utils.files import write_text

STOPPED = 75
SUBMITIT_OVERRIDE = "hydra/launcher=submitit"
SUBMITIT_FOLDER = ".submitit"  # in the root of runs: submitit's scripts, logs and pickles
OPTUNA_OVERRIDE = "hydra/sweeper=optuna"
OPTUNA_MODULE = "hydra_plugins.hydra_optuna_sweeper"
OPTUNA_RESULTS = "optimization_results.yaml"  # its plugin writes it into the sweep's folder
REQUEUE_WAIT_S = 120.0  # a requeued job is ended from outside


@contextmanager
def sweep_output_dir(overrides: Sequence[str], is_sweep: bool) -> Iterator[tuple[Path, list[str]]]:
    """A temporary folder for a sweep with these overrides, and Hydra's keys that name it.

    One job alone gets a path where there is nothing: it would leave a folder where it is killed. If
    other machines run its jobs it lies in the root of the runs, which they share.
    """
    if not is_sweep:
        nothing = Path(tempfile.gettempdir(), f"rloo-no-sweep-{os.getpid()}")
        yield nothing, [f"hydra.sweep.dir={_quoted(str(nothing))}"]
        return
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
    """The keys among these overrides that have several values; () where they do not parse."""
    try:
        parsed = OverridesParser.create().parse_overrides([*overrides])
    except (HydraException, ValueError, RecursionError):  # Hydra says so when it composes
        return ()
    return tuple(o.key_or_group for o in parsed if o.is_sweep_override())


def objective_value(run: RunConfig) -> float | None:
    """The value of a finished run for a sweeper that optimizes: the last value of a metric.

    It is that of logging.objective, else the mean held-out score of the first set, else the
    training reward; None if these were never known. The sweeper must know whether more is better.
    Raises ConfigError if no line has logging.objective.
    """
    path = Path(run.root, str(run.name), "metrics.jsonl")
    lines = path.read_text().splitlines() if path.is_file() else []
    rows = [json.loads(line) for line in lines]
    scores = [eval_lines.eval_prefix(name) + "reward" for name in run.held_out]
    wanted = [run.logging.objective] if run.logging.objective else [*scores[:1], "reward"]
    for name in wanted:
        values = [row[name] for row in rows if isinstance(row.get(name), int | float)]
        if values:
            return float(values[-1])
    if not run.logging.objective:
        return None
    known = list(dict.fromkeys(name for row in rows for name in row))
    why = f"metrics are: {', '.join(known)}" if known else "it has no lines"
    fix = f"logging.objective={guess_name(wanted[0], known)}"
    what = f"no line of {path} has {wanted[0]!r}"
    raise ConfigError(Problem(what, "logging.objective", why, fix))


def check_sweeper(overrides: Sequence[str]) -> None:
    """Raises MachineError for Optuna's sweeper where it is not installed."""
    for word in overrides:
        if word.lstrip("+") == OPTUNA_OVERRIDE and not _is_installed(OPTUNA_MODULE):
            what = "Optuna's sweeper is not installed"
            fix = "pip install 'rloo-cli[optuna]'"
            raise MachineError(Problem(what, word, f"there is no module {OPTUNA_MODULE}", fix))


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def best_job(folder: Path) -> str:
    """What a sweeper that optimizes wrote of its best jobs, in one line; "" if it wrote nothing.

    `folder`: the sweep's, which is removed after it.
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
    """The jobs of one sweep that other processes run. It is pickled with each job."""

    def __init__(self, folder: Path):
        self.folder, self.pid, self.files = folder, os.getpid(), dict(user_files.USER_RECIPE_FILES)

    @contextmanager
    def record_exit_code(self, hydra: Any) -> Iterator[Callable[[int], None]]:
        """A context around one job; yields the function to call with its exit code.

        A job of Slurm that was told to stop is requeued, and goes on later.
        """
        if os.getpid() == self.pid:
            yield lambda code: None
            return
        user_files.USER_RECIPE_FILES.update(self.files)  # recipes that are files of the user's
        codes: list[int] = []
        with redact.redacted_console():
            yield codes.append
        if codes[-1:] == [STOPPED] and "submitit" in str(hydra.launcher._target_):
            requeue_slurm_job()
        write_text(self.folder / "codes" / str(hydra.job.num), str(codes[-1] if codes else 1))

    def exit_codes(self) -> list[int]:
        """The exit codes of these jobs, in their order."""
        found = (self.folder / "codes").glob("[0-9]*")
        return [int(p.read_text()) for p in sorted(found, key=lambda p: int(p.name))]


def requeue_slurm_job() -> None:
    """Requeue our own Slurm job, and wait for the end; nothing outside of one or if cancelled."""
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
    """The error of submitit itself as one of ours; None for any other error."""
    kind = type(error).__name__
    said = "\n".join([line for line in str(error).splitlines() if line.strip()][:8])
    if kind == "FailedSubmissionError":
        fix = "correct the hydra.launcher key that Slurm names, as hydra.launcher.partition=NAME"
        what = "the jobs of the sweep are not taken"
        return MachineError(Problem(what, "hydra/launcher", said, fix))
    if kind in ("UncompletedJobError", "FailedJobError"):
        what = "a job of the sweep ended without a word: killed, or at its time limit"
        fix = "resume=auto goes on with it; hydra.launcher.timeout_min=N for a longer limit"
        return GenerationError(Problem(what, "hydra/launcher", said, fix))
    if kind == "RuntimeError" and "srun" in said:  # submitit looks for it before anything else
        fix = "on a login node of the cluster, or leave hydra/launcher out"
        return MachineError(Problem("there is no Slurm here", "hydra/launcher", said, fix))
    return None
