"""MANIFEST.json makes a checkpoint complete: it is written last and lists every file.

Imports no torch, so that the launcher can find the checkpoint to resume from, and say why it
skipped another, before anything is loaded.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rloo_cli.utils.fault_injection import trigger_fault
from rloo_cli.utils.files import JsonObject, fsync_path, read_json, write_text

MANIFEST_FILE = "MANIFEST.json"
MANIFEST_FORMAT = 1  # a newer one is refused
# checkpoint-<step>, and -<updates> behind it where it was taken inside the next step.
CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)(?:-(\d+))?")
# Steps done, and updates done in the next one (-1: between two steps).
CheckpointPosition = tuple[int, int]


def checkpoint_name(position: CheckpointPosition) -> str:
    """The name of the folder of a checkpoint at this step position."""
    step, updates = position
    return f"checkpoint-{step}" + (f"-{updates}" if updates >= 0 else "")


def checkpoint_position(folder: Path) -> CheckpointPosition | None:
    """The step position in a folder's name; None if it is not a checkpoint's name."""
    match = CHECKPOINT_NAME.fullmatch(folder.name)
    return (int(match[1]), -1 if match[2] is None else int(match[2])) if match else None


def write_manifest(folder: Path, metadata: Mapping[str, object]) -> None:
    """Write the manifest: sizes and hashes of the files in `folder`, and `metadata`.

    The files must have been fsynced.
    """
    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    with ThreadPoolExecutor(4) as pool:
        hashes = list(pool.map(_hash_file, paths))
    files = {
        str(path.relative_to(folder)): {"size": path.stat().st_size, "blake2b": digest}
        for path, digest in zip(paths, hashes, strict=True)
    }
    values = {"format": MANIFEST_FORMAT, **metadata, "files": files}
    trigger_fault("ckpt.manifest")
    text = json.dumps(values | {"digest": _digest_values(values)}, indent=2)
    write_text(folder / MANIFEST_FILE, text + "\n")
    for path in (*[p for p in folder.rglob("*") if p.is_dir()], folder):
        trigger_fault("ckpt.fsync")
        fsync_path(path)


def checkpoint_problem(folder: Path) -> str | None:
    """Why this folder is not a complete checkpoint of a known format; None when it is."""
    return sealed_folder_problem(folder) or _state_problem(folder)


def sealed_folder_problem(folder: Path) -> str | None:
    """Why a folder is not as its manifest sealed it; None when it is."""
    if not folder.is_dir():
        return "it is not a folder"
    if not (folder / MANIFEST_FILE).is_file():
        return f"it has no {MANIFEST_FILE}: its save was interrupted"
    try:
        values = json.loads((folder / MANIFEST_FILE).read_text())
        digest = values.pop("digest")
        files = dict(values["files"])
        version = int(values["format"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"its {MANIFEST_FILE} cannot be read"
    if version > MANIFEST_FORMAT:
        return f"its format {version} is newer than {MANIFEST_FORMAT}, the newest for this rloo"
    if digest != _digest_values(values):
        return f"its {MANIFEST_FILE} was changed"
    try:
        return _files_problem(folder, files)
    except (OSError, KeyError, TypeError, ValueError) as error:
        return f"its files cannot be read: {error}"


def _files_problem(folder: Path, files: JsonObject) -> str | None:
    visible = [p for p in folder.rglob("*") if p.is_file() and not p.name.startswith(".")]
    found = {str(p.relative_to(folder)) for p in visible} - {MANIFEST_FILE}
    missing, more = sorted(set(files) - found), sorted(found - set(files))
    if missing or more:
        which = f"{missing[0]} is missing" if missing else f"{more[0]} is not listed"
        return f"its files do not match its {MANIFEST_FILE}: {which}"
    for path, facts in files.items():
        size = (folder / path).stat().st_size
        if size != facts["size"]:
            return f"{path} has {size} bytes instead of {facts['size']}"
    with ThreadPoolExecutor(4) as pool:
        hashes = pool.map(lambda path: _hash_file(folder / path), files)
        for (path, facts), digest in zip(files.items(), hashes, strict=True):
            if digest != facts["blake2b"]:
                return f"{path} has changed since it was saved (its hash differs)"
    return None


def _state_problem(folder: Path) -> str | None:
    """Check the types in trainer/state.json: much of it is used before the worker reads it."""
    try:
        values = read_trainer_state(folder)
        known = dict(values["state"])
        sections = [values[n] for n in ("config", "optimizer", "rng", "log")]
        sections += [known.pop("memory"), known.pop("entropy_control", {})]  # an algorithm's
        counts = {*known.values(), *values["journals"].values(), values["steps"]}
        texts = [values["fingerprint"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "its trainer/state.json is not valid"
    kinds = [(counts, int), (sections, dict), (texts, str)]
    if not all(isinstance(v, kind) for values_of_kind, kind in kinds for v in values_of_kind):
        return "its trainer/state.json is not valid"
    return None


def list_checkpoints(run_path: Path) -> list[Path]:
    """Folders of a run that have a checkpoint's name, newest first."""
    folders = run_path.iterdir() if run_path.is_dir() else ()
    positions = {p: position for p in folders if (position := checkpoint_position(p))}
    return sorted(positions, key=lambda p: positions[p], reverse=True)


def newest_checkpoint(run_path: Path) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint, and why newer ones were skipped."""
    skipped: list[str] = []
    for folder in list_checkpoints(run_path):
        why = checkpoint_problem(folder)
        if why is None:
            return folder, skipped
        skipped.append(f"{folder} is skipped: {why}")
    return None, skipped


def read_trainer_state(checkpoint: Path) -> JsonObject:
    """trainer/state.json: the run's position, its config, and the length of its journals."""
    return read_json(checkpoint / "trainer" / "state.json")


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def _digest_values(values: Mapping[str, object]) -> str:
    text = json.dumps(values, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()
