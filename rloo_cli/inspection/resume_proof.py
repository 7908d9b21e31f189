"""Checks on this machine that a killed and resumed run equals an uninterrupted one.

The same run trains twice, in separate processes: once straight through, and once with SIGKILL in
the middle of an update (or of a save), continued by `resume=auto`. Then the folders are compared:
metrics, samples, the ledger, and the final weights bit by bit.
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rloo_cli.inspection.first_difference import FirstDifference, find_first_difference
from rloo_cli.reporting.prompt_ledger import LEDGER_FILE
from rloo_cli.utils.errors import Problem, RunError, refuse
from rloo_cli.utils.files import JsonObject

STRAIGHT, KILLED = "straight", "killed"
MIN_STEPS = 3  # a checkpoint, the killed step, and one after it
CHUNK = 1 << 20


@dataclass
class ResumeProof:
    """The result of the two runs."""

    steps: int
    killed_in_step: int
    resumed_from: str  # the checkpoint's name
    difference: FirstDifference
    weights_equal: bool
    ledgers_equal: bool
    notes: list[str] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Whether nothing differs."""
        return self.weights_equal and self.ledgers_equal and not self.difference.found

    def to_json(self) -> JsonObject:
        """Its fields as plain values."""
        return asdict(self) | {"exact": self.exact, "difference": self.difference.to_json()}


def proof_words(words: Sequence[str], steps: int, root: Path) -> list[str]:
    """The arguments of a short run that records everything."""
    return [
        *words, "total_episodes=null", "train.epochs=null", f"max_steps={steps}", f"root={root}",
        "checkpoint.every=2", "logging.every=1", "logging.samples_every=1", "logging.console=plain",
        "eval.at_start=false", "eval.every=0",
    ]  # fmt: skip


def prove_resume(
    words: Sequence[str],
    updates_per_step: int,
    root: Path,
    steps: int,
    kill_in_step: int,
    inside_save: bool = False,
    tolerance: float = 0.0,
    say: Callable[[str], None] = print,
) -> ResumeProof:
    """Train straight through, then kill and resume, and compare. `words`: of `rloo train`.

    Raises RunError if a run does not end as expected.
    """
    train = proof_words(words, steps, root)
    say(f"training {steps} steps straight through ...")
    _run_training([*train, f"name={STRAIGHT}", "resume=never"], {}, (0,))
    point = "ckpt.rename@1" if inside_save else f"step@{(kill_in_step - 1) * updates_per_step + 1}"
    where = "inside its first save" if inside_save else f"in the update of step {kill_in_step}"
    say(f"training again, killed by SIGKILL {where} ...")
    faults = {"RLOO_ALLOW_FAULTS": "1", "RLOO_FAULTS": f"{point}=kill9"}
    _run_training([*train, f"name={KILLED}", "resume=never"], faults, None)
    latest = root / KILLED / "latest"
    resumed_from = latest.read_text().strip() if latest.is_file() else "the start"
    say(f"resuming with resume=auto, from {resumed_from} ...")
    _run_training([*train, f"name={KILLED}", "resume=auto"], {}, (0,))
    first, second = root / STRAIGHT, root / KILLED
    return ResumeProof(
        steps,
        kill_in_step,
        resumed_from,
        find_first_difference(first, second, tolerance),
        hash_weights(first / "final") == hash_weights(second / "final"),
        _read_bytes(first / LEDGER_FILE) == _read_bytes(second / LEDGER_FILE),
    )


def _run_training(
    words: Sequence[str], environment: dict[str, str], codes: tuple[int, ...] | None
) -> None:
    """Run `rloo train`. `codes`: allowed exit codes; None = it must be killed."""
    command = [sys.executable, "-m", "rloo_cli", "train", *words]
    done = subprocess.run(
        command, env=os.environ | environment, text=True, capture_output=True, errors="replace"
    )
    if codes is None and done.returncode == 0:
        what = "the run was not killed: it ended before the kill point"
        why = "found exit code 0, expected SIGKILL"
        refuse("rloo verify-resume", what, "a smaller --kill-in-step", why, error=RunError)
    if codes is not None and done.returncode not in codes:
        said = "\n".join((done.stderr or done.stdout).splitlines()[-12:])
        what = f"a training exited with code {done.returncode}"
        fix = "fix the error above, then try again"
        error = RunError(Problem(what, " ".join(words), said, fix))
        error.code = done.returncode
        raise error


def hash_weights(folder: Path) -> dict[str, str]:
    """File -> hash of every file of weights in a model's folder."""
    hashes = {}
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while part := file.read(CHUNK):
                digest.update(part)
        hashes[path.name] = digest.hexdigest()
    return hashes


def _read_bytes(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""
