"""What a sweep's folder says: its members, where each came from, and how it stands.

<root>/<sweep>/sweep.json is the whole of it; logs/ has what members print, from/ the checkpoints
that clones begin from. A member's own folder lies beside it and is a run as any other.
"""

import os
import platform
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rloo_cli.config.old_names import nearest_names
from rloo_cli.utils import child_process
from rloo_cli.utils.errors import ConfigError, Problem
from rloo_cli.utils.files import JsonObject, read_json, write_json

SWEEP_FILE = "sweep.json"
ROOT = Path("runs")  # where a sweep is if its config does not say otherwise
OPEN_STATES = ("waiting", "training")  # states of members that are to go on


@dataclass
class Trial:
    """One run of the sweep."""

    number: int
    name: str
    words: list[str]  # that compose its config; its name and where it resumes are not among them
    start: str | None = None  # the checkpoint it begins from
    parent: str | None = None  # whose clone it is
    cloned_at: int | None = None  # the parent's step then
    share: int = 1  # chunks it gets for one of a member with share 1
    state: str = "waiting"  # or training, stopped, finished, failed
    step: int = 0
    code: int | None = None
    why: str = ""


@dataclass
class Rung:
    """Early stopping: at step `at` the best `keep` by `by` go on."""

    keep: int
    at: int
    by: str = "reward"
    done: bool = False


@dataclass
class SweepState:
    """A sweep."""

    folder: Path
    words: list[str]  # as they were typed
    cwd: str  # that paths among the words start from
    chunk: int = 10
    jobs: int = 1
    rungs: list[Rung] = field(default_factory=list)
    members: list[Trial] = field(default_factory=list)
    state: str = "waiting"  # or training, stopped, finished, failed

    @property
    def root(self) -> Path:
        """Where the members' folders are."""
        return self.folder.parent

    def trial_folder(self, trial: Trial) -> Path:
        """The member's own folder."""
        return self.root / trial.name

    def trial_log(self, trial: Trial) -> Path:
        """What the member prints."""
        return self.folder / "logs" / f"{trial.name}.log"

    def trial_steps(self, trial: Trial) -> int | None:
        """The step at which it is finished; None while that is not known."""
        known: int | None = (
            read_json(self.trial_folder(trial) / "run.json").get("plan", {}).get("max_steps")
        )
        return known

    def save(self) -> None:
        """Write sweep.json."""
        values = asdict(self) | {"folder": None, "host": platform.node(), "pid": os.getpid()}
        values["pid_started"] = child_process.process_start_time(os.getpid())
        write_json(self.folder / SWEEP_FILE, {k: v for k, v in values.items() if k != "folder"})

    def distinct_overrides(self, trial: Trial) -> list[str]:
        """The words that not all members have."""
        common = set.intersection(*(set(m.words) for m in self.members))
        return [word for word in trial.words if word not in common]

    def find_trial(self, name: str) -> Trial:
        """A member by its number, its name, or a piece of it that no other has.

        Raises ConfigError.
        """
        exact = [m for m in self.members if name in (m.name, str(m.number))]
        number = name.isdigit() and len(name) < 4
        found = exact or [m for m in self.members if name in m.name and not number]
        if len(found) == 1:
            return found[0]
        names = [f"{m.number} {m.name}" for m in (found or self.members)]
        what = (
            f"{name!r} is {'no member' if not found else 'more than one member'} of {self.folder}"
        )
        raise ConfigError(
            Problem(what, "command line", "\n".join(names), "its number, or its name")
        )


def read_sweep(folder: Path) -> SweepState:
    """The sweep of a folder."""
    values = read_json(folder / SWEEP_FILE)
    values["rungs"] = [Rung(**rung) for rung in values["rungs"]]
    values["members"] = [Trial(**member) for member in values["members"]]
    for name in ("host", "pid", "pid_started"):
        values.pop(name, None)
    return SweepState(folder, **values)


def running_process(folder: Path) -> JsonObject | None:
    """What sweep.json says of the process that runs it; None where none does."""
    facts = read_json(folder / SWEEP_FILE)
    elsewhere = facts.get("host") != platform.node()
    if facts.get("state") not in ("training", "stopping") or not (
        elsewhere or child_process.is_process_alive(facts)
    ):
        return None
    return facts


def find_sweep(name: str, verb: str) -> Path:
    """The folder of a sweep, named by its path or its name under runs/. Raises ConfigError."""
    for folder in (Path(name), ROOT / name):
        if (folder / SWEEP_FILE).is_file():
            return folder
    known = sorted(p.parent.name for p in ROOT.glob(f"*/{SWEEP_FILE}"))
    close = nearest_names(Path(name).name, known) or known[:1]
    why = f"sweeps here: {', '.join(known)}" if known else f"there is none in {ROOT}/"
    fix = f"rloo sweep {verb} {close[0] if close else 'FOLDER'}"
    raise ConfigError(Problem(f"there is no sweep {name!r}", "command line", why, fix))


def override_key(override: str) -> str:
    """The key of a word."""
    return override.lstrip("+~").partition("=")[0]


def quote_override(value: str) -> str:
    """A value as Hydra's grammar takes any text; as it is where nothing in it is special."""
    if re.fullmatch(r"[A-Za-z_/.][\w./-]*", value, re.ASCII):
        return value
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
