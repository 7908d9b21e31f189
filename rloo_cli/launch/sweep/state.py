"""A sweep's folder, and its file sweep.json: the trials, where each came from, and its state.

<root>/<sweep>/ has sweep.json, logs/ with what the trials print, and from/ with the checkpoints
that clones begin from. A trial's own folder lies beside it and is an ordinary run.
"""

import os
import platform
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rloo_cli.config.pasted import guess_name
from rloo_cli.utils import child_process
from rloo_cli.utils.errors import refuse
from rloo_cli.utils.files import JsonObject, read_json, write_json

SWEEP_FILE = "sweep.json"
ROOT = Path("runs")  # default root of sweeps
OPEN_STATES = ("waiting", "training")  # states of trials with steps left


@dataclass
class Trial:
    """One run of the sweep."""

    number: int
    name: str
    words: list[str]  # overrides that compose its config, without name and resume
    start: str | None = None  # the checkpoint it starts from
    parent: str | None = None  # the name of the trial that it is a clone of
    cloned_at: int | None = None  # the parent's step then
    share: int = 1  # time slices it gets per slice of a trial with share 1
    state: str = "waiting"  # or training, stopped, finished, failed
    step: int = 0
    code: int | None = None
    why: str = ""


@dataclass
class Rung:
    """Early stopping: at step `at` the best `keep` trials by `by` continue."""

    keep: int
    at: int
    by: str = "reward"
    done: bool = False


@dataclass
class SweepState:
    """A sweep as sweep.json keeps it."""

    folder: Path
    words: list[str]  # overrides, as they were typed
    cwd: str  # the folder that paths in the overrides start from
    chunk: int = 10  # steps of a time slice
    jobs: int = 1  # trials that train at the same time
    rungs: list[Rung] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    state: str = "waiting"  # or training, stopped, finished, failed

    @property
    def root(self) -> Path:
        """The folder in which the trials' folders are."""
        return self.folder.parent

    def trial_folder(self, trial: Trial) -> Path:
        """A trial's run folder."""
        return self.root / trial.name

    def trial_log(self, trial: Trial) -> Path:
        """The file that a trial's output goes to."""
        return self.folder / "logs" / f"{trial.name}.log"

    def trial_steps(self, trial: Trial) -> int | None:
        """The step at which a trial is finished; None while unknown."""
        plan: JsonObject = read_json(self.trial_folder(trial) / "run.json").get("plan", {})
        return plan.get("max_steps")

    def as_values(self) -> JsonObject:
        """Plain values, as in sweep.json and --json, where `members` are the trials."""
        return {"members" if k == "trials" else k: v for k, v in asdict(self).items()}

    def save(self) -> None:
        """Write sweep.json."""
        values = self.as_values() | {"host": platform.node(), "pid": os.getpid()}
        values["pid_started"] = child_process.process_start_time(os.getpid())
        write_json(self.folder / SWEEP_FILE, {k: v for k, v in values.items() if k != "folder"})

    def distinct_overrides(self, trial: Trial) -> list[str]:
        """The overrides of a trial that not all trials have."""
        common = set.intersection(*(set(m.words) for m in self.trials))
        return [override for override in trial.words if override not in common]

    def find_trial(self, name: str) -> Trial:
        """A trial by its number, its name, or a unique part of its name.

        Raises ConfigError if it names none, or more than one.
        """
        exact = [m for m in self.trials if name in (m.name, str(m.number))]
        is_number = name.isdigit() and len(name) < 4
        matches = exact or [m for m in self.trials if name in m.name and not is_number]
        if len(matches) == 1:
            return matches[0]
        names = "\n".join(f"{m.number} {m.name}" for m in (matches or self.trials))
        found = "names more than one trial" if matches else "names no trial"
        what = f"{name!r} {found} of {self.folder}"
        refuse("command line", what, "its number, or its name", names)


def read_sweep(folder: Path) -> SweepState:
    """Read a folder's sweep.json."""
    values = read_json(folder / SWEEP_FILE)
    values["rungs"] = [Rung(**rung) for rung in values["rungs"]]
    values["trials"] = [Trial(**trial) for trial in values.pop("members")]
    for name in ("host", "pid", "pid_started"):
        values.pop(name, None)
    return SweepState(folder, **values)


def running_process(folder: Path) -> JsonObject | None:
    """The content of sweep.json if a process runs the sweep (`host`, `pid`); else None."""
    values = read_json(folder / SWEEP_FILE)
    if values.get("state") not in ("training", "stopping"):
        return None
    elsewhere = values.get("host") != platform.node()
    return values if elsewhere or child_process.is_process_alive(values) else None


def find_sweep(name: str, verb: str) -> Path:
    """The folder of a sweep, named by its path or its name under runs/. Raises ConfigError."""
    for folder in (Path(name), ROOT / name):
        if (folder / SWEEP_FILE).is_file():
            return folder
    names = sorted(p.parent.name for p in ROOT.glob(f"*/{SWEEP_FILE}"))
    why = f"known sweeps: {', '.join(names)}" if names else f"no sweeps in {ROOT}/"
    fix = f"rloo sweep {verb} {guess_name(Path(name).name, names, 'FOLDER')}"
    refuse("command line", f"sweep {name!r} not found", fix, why)


def override_key(override: str) -> str:
    """The key of an override `key=value`."""
    return override.lstrip("+~").partition("=")[0]


def quote_override(value: str) -> str:
    """A value in quotes of Hydra's grammar, or unchanged if nothing in it is special."""
    if re.fullmatch(r"[A-Za-z_/.][\w./-]*", value, re.ASCII):
        return value
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
