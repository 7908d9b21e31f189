"""Rolls a run folder back to a checkpoint, and checks the disk space that saves need.

Nothing is lost: the cut-off part of a journal, samples of later steps and later checkpoints are
kept under another name. Only files that are provably our own temporary ones are removed.
"""

import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from rloo_cli.checkpoint import manifest
from rloo_cli.checkpoint.resume import ResumePlan
from rloo_cli.config.schema import CheckpointConfig
from rloo_cli.data import rollout_files
from rloo_cli.utils.errors import MachineError, refuse
from rloo_cli.utils.files import JsonObject, fsync_path, write_text

JOURNALS = ("metrics.jsonl", "ledger.jsonl")  # appended to, and cut back to a checkpoint's length
TEMPORARY_NAME = re.compile(
    r"\.(tmp|trash)-(final|try|checkpoint-[\d-]+)-a(?P<attempt>\d+)"
    r"|\.(?:(run|env|server(_\d+)?|summary|state|MANIFEST|rollouts|rng-\d+)\.json"
    r"|config\.yaml|overrides\.txt|latest"
    r"|(step|eval|pairs)_[\w.-]+\.(jsonl|safetensors)"
    r"|\w+\.attempt\d+\.tail\.jsonl)\.(?P<pid>\d+)\.tmp"
)

LIVE_WRITE_S = 60.0  # seconds that a live process may take to write a small file


def journal_lengths(folder: Path) -> dict[str, int]:
    """Fsync the journals of a run; returns name -> bytes."""
    journals = [folder / name for name in JOURNALS if (folder / name).exists()]
    for path in journals:
        fsync_path(path)
    return {path.name: path.stat().st_size for path in journals}


def roll_back_folder(resume_plan: ResumePlan) -> list[str]:
    """Roll a run folder back to the plan's checkpoint; everything cut off is kept.

    Returns notes for the user. A checkpoint of another run rolls it back to its beginning.
    """
    folder, checkpoint = resume_plan.folder, resume_plan.checkpoint
    if checkpoint is not None and checkpoint.resolve().parent != folder.resolve():
        checkpoint = None
    saved = manifest.read_trainer_state(checkpoint) if checkpoint else {}
    journals, state = saved.get("journals", {}), saved.get("state", {})
    position = (manifest.checkpoint_position(checkpoint) if checkpoint else None) or (-1, -1)
    notes = []
    for path in [p for p in folder.rglob(".*") if _is_own_temporary(p, resume_plan.attempt)]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        notes.append(f"removed {path.relative_to(folder)}, left by an interrupted save")
    checkpoints = manifest.list_checkpoints(folder)
    later = [p for p in checkpoints if (manifest.checkpoint_position(p) or position) > position]
    if later:
        moved = [p.rename(superseded_path(p, resume_plan.attempt - 1)).name for p in later]
        notes.append(f"later checkpoints are now {', '.join(sorted(moved))}")
    for name in JOURNALS:
        _truncate_journal(folder / name, journals.get(name, 0), resume_plan.attempt - 1)
    _move_later_samples(folder, state, resume_plan.attempt - 1)
    _move_later_rollouts(folder, state.get("step", 0), resume_plan.attempt - 1)
    if checkpoint:
        write_text(folder / "latest", checkpoint.name + "\n")
    else:
        (folder / "latest").unlink(missing_ok=True)
    return notes


def _is_own_temporary(path: Path, attempt: int) -> bool:
    """Whether an interrupted save left it: our launcher may be writing one at this moment."""
    found = TEMPORARY_NAME.fullmatch(path.name)
    if found is None or int(found["attempt"] or 0) > attempt:
        return False
    try:
        age_s = time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return False
    is_alive = found["pid"] is not None and Path(f"/proc/{found['pid']}").exists()
    return not (is_alive and age_s < LIVE_WRITE_S)


def superseded_path(path: Path, attempt: int) -> Path:
    """A free path for a checkpoint of that attempt that the run does not resume from."""
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


def _move_later_samples(folder: Path, state: JsonObject, attempt: int) -> None:
    """Move samples of steps after the checkpoint to samples.attempt<k>.tail/."""
    samples, tail = folder / "samples", folder / f"samples.attempt{attempt}.tail"
    limits = {"step": state.get("step", 0), "eval": state.get("evaluated", -1)}
    limits["pairs"] = limits["eval"]
    for path in sorted(samples.glob("*_*.jsonl")):
        kind, step = path.name.partition("_")[0], path.stem.rpartition("_")[2]
        if kind in limits and step.isdigit() and int(step) > limits[kind]:
            tail.mkdir(exist_ok=True)
            path.rename(tail / path.name)


def _move_later_rollouts(folder: Path, done: int, attempt: int) -> None:
    """Move records of steps after the checkpoint to rollouts.attempt<k>.tail/."""
    name = f"{rollout_files.RECORD_FOLDER}.attempt{attempt}.tail"
    rollout_files.move_rollout_files(folder, folder / name, lambda step: step > done)


def can_rename_folders(folder: Path, attempt: int) -> bool:
    """Whether folders can be renamed here; if not, only the manifest marks a checkpoint."""
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
    """Raises MachineError (exit 3) when fewer than `needed_bytes` are free, or calls `warn`."""
    free = shutil.disk_usage(folder).free
    if free >= needed_bytes:
        return
    what = f"this run's checkpoints need about {needed_bytes / 1e9:.3g} GB"
    why = f"{free / 1e9:.3g} GB are free on {folder}"
    if settings.on_low_disk == "warn":
        warn(f"warning: {what}, {why}")
        return
    fix = "root=..., or checkpoint.on_low_disk=warn"
    refuse("checkpoint.keep_last", what, fix, why, error=MachineError)
