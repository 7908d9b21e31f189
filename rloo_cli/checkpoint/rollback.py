"""A run's folder, brought back to a checkpoint; and what a save needs to know of the disk.

Nothing is lost by it: what is cut off a journal, samples of later steps and later checkpoints are
kept under another name. Only what is provably a temporary file of our own is removed.
"""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rloo_cli.checkpoint import manifest
from rloo_cli.checkpoint.resume import ResumePlan
from rloo_cli.config.schema import CheckpointConfig
from rloo_cli.utils.errors import MachineError, Problem
from rloo_cli.utils.files import fsync_path, write_text

JOURNALS = ("metrics.jsonl", "ledger.jsonl")  # appended to, and cut back to a checkpoint's length
TEMPORARY_NAME = re.compile(
    r"\.(tmp|trash)-(final|try|checkpoint-[\d-]+)-a(?P<attempt>\d+)"
    r"|\.(run|env|server(_\d+)?|summary|state|MANIFEST|rollouts|rng-\d+)\.json\.\d+\.tmp"
    r"|\.(config\.yaml|overrides\.txt|latest)\.\d+\.tmp"
    r"|\.(step|eval|pairs)_[\w.-]+\.jsonl\.\d+\.tmp|\.\w+\.attempt\d+\.tail\.jsonl\.\d+\.tmp"
)


def journal_lengths(folder: Path) -> dict[str, int]:
    """Bytes of each journal, which are on the disk from here on."""
    found = [folder / name for name in JOURNALS if (folder / name).exists()]
    for path in found:
        fsync_path(path)
    return {path.name: path.stat().st_size for path in found}


def roll_back_folder(resume_plan: ResumePlan) -> list[str]:
    """Bring a run's folder back to its checkpoint; what is cut off is kept. Returns what to say."""
    folder = resume_plan.folder
    saved = manifest.read_trainer_state(resume_plan.checkpoint) if resume_plan.checkpoint else {}
    same = (
        resume_plan.checkpoint is not None
        and resume_plan.checkpoint.resolve().parent == folder.resolve()
    )
    journals = saved.get("journals", {}) if same else {}
    state = saved.get("state", {}) if same else {}
    place = (
        manifest.checkpoint_position(resume_plan.checkpoint)
        if same and resume_plan.checkpoint
        else None
    ) or (-1, -1)
    said = []
    for path in [p for p in folder.rglob(".*") if _is_own_temporary(p, resume_plan.attempt)]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        said.append(f"removed {path.relative_to(folder)}, left by a save that was cut short")
    later = [
        p
        for p in manifest.list_checkpoints(folder)
        if (manifest.checkpoint_position(p) or place) > place
    ]
    if later:
        moved = [p.rename(superseded_path(p, resume_plan.attempt - 1)).name for p in later]
        said.append(f"later checkpoints are now {', '.join(sorted(moved))}")
    for name in JOURNALS:
        _truncate_journal(folder / name, journals.get(name, 0), resume_plan.attempt - 1)
    _move_later_samples(folder, state, resume_plan.attempt - 1)
    if same and resume_plan.checkpoint:
        write_text(folder / "latest", resume_plan.checkpoint.name + "\n")
    else:
        (folder / "latest").unlink(missing_ok=True)
    return said


def _is_own_temporary(path: Path, attempt: int) -> bool:
    found = TEMPORARY_NAME.fullmatch(path.name)
    return found is not None and int(found["attempt"] or 0) <= attempt


def superseded_path(path: Path, attempt: int) -> Path:
    """A free name for a checkpoint that an attempt left and that is no longer the run's."""
    names = (path.with_name(f"{path.name}.attempt{k}") for k in range(max(1, attempt), 10**6))
    return next(p for p in names if not p.exists())


def _truncate_journal(journal: Path, length: int, attempt: int) -> None:
    if not journal.exists() or journal.stat().st_size <= length:
        return
    with journal.open("r+b") as file:
        file.seek(length)
        tail = file.read().decode(errors="replace")
        # The tail is on the disk before the journal loses it.
        write_text(journal.with_name(f"{journal.stem}.attempt{attempt}.tail.jsonl"), tail)
        file.truncate(length)
        file.flush()
        os.fsync(file.fileno())


def _move_later_samples(folder: Path, state: dict[str, Any], attempt: int) -> None:
    """Samples of steps after the checkpoint go to samples.attempt<k>.tail/."""
    samples, tail = folder / "samples", folder / f"samples.attempt{attempt}.tail"
    limits = {"step": state.get("step", 0), "eval": state.get("evaluated", -1)}
    limits["pairs"] = limits["eval"]
    for path in sorted(samples.glob("*_*.jsonl")):
        kind, step = path.name.partition("_")[0], path.stem.rpartition("_")[2]
        if kind in limits and step.isdigit() and int(step) > limits[kind]:
            tail.mkdir(exist_ok=True)
            path.rename(tail / path.name)


def can_rename_folders(folder: Path, attempt: int) -> bool:
    """Whether folders can be renamed whole here; if not, the manifest alone marks a checkpoint."""
    first, second = (folder / f".tmp-{n}-a{attempt}" for n in ("try", "final"))
    try:
        first.mkdir()
        (first / "file").write_text("")
        first.rename(second)
        return (second / "file").is_file() and not first.exists()
    except OSError:
        return False
    finally:
        shutil.rmtree(first, ignore_errors=True)
        shutil.rmtree(second, ignore_errors=True)


def check_disk_space(
    folder: Path, needed_bytes: int, settings: CheckpointConfig, warn: Callable[[str], None]
) -> None:
    """Raises MachineError (exit 3) when `need` bytes are more than are free, or warns."""
    free = shutil.disk_usage(folder).free
    if free >= needed_bytes:
        return
    what = f"the checkpoints of this run need about {needed_bytes / 1e9:.3g} GB"
    why = f"{free / 1e9:.3g} GB are free on {folder}"
    if settings.on_low_disk == "warn":
        warn(f"warning: {what}, {why}")
        return
    fix = "root=..., or checkpoint.on_low_disk=warn"
    raise MachineError(Problem(what, "checkpoint.keep_last", why, fix))
