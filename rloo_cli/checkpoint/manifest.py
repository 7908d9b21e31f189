"""What makes a checkpoint a checkpoint: MANIFEST.json, written last, accounts for every file.

Imports no torch, so that the launcher finds the one to resume from, and says why it passed over
another, before anything is loaded.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rloo_cli.utils.fault_injection import trigger_fault
from rloo_cli.utils.files import fsync_path, read_json, write_text

MANIFEST_FILE = "MANIFEST.json"
MANIFEST_FORMAT = 1  # a newer one is refused
# checkpoint-<step>, and -<updates> behind it where it was taken inside the next step.
CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)(?:-(\d+))?")
CheckpointPosition = tuple[
    int, int
]  # steps done, updates done in the next one (-1: between two steps)


def checkpoint_name(position: CheckpointPosition) -> str:
    """The folder's name for a place."""
    step, updates = position
    return f"checkpoint-{step}" + (f"-{updates}" if updates >= 0 else "")


def checkpoint_position(folder: Path) -> CheckpointPosition | None:
    """The place that a folder's name says; None for a name that is no checkpoint's."""
    found = CHECKPOINT_NAME.fullmatch(folder.name)
    return (int(found[1]), -1 if found[2] is None else int(found[2])) if found else None


def write_manifest(folder: Path, metadata: Mapping[str, Any]) -> None:
    """Account for every file of `folder`, each on the disk already, and add `facts`."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    with ThreadPoolExecutor(4) as pool:
        hashes = list(pool.map(_hash_file, paths))
    files = {
        str(path.relative_to(folder)): {"size": path.stat().st_size, "blake2b": digest}
        for path, digest in zip(paths, hashes, strict=True)
    }
    values = {"format": MANIFEST_FORMAT, **metadata, "files": files}
    trigger_fault("ckpt.manifest")
    write_text(
        folder / MANIFEST_FILE,
        json.dumps(values | {"digest": _digest_values(values)}, indent=2) + "\n",
    )
    for path in (*[p for p in folder.rglob("*") if p.is_dir()], folder):
        trigger_fault("ckpt.fsync")
        fsync_path(path)


def checkpoint_problem(folder: Path) -> str | None:
    """Why this folder is not a complete checkpoint of a format we know; None when it is."""
    if not folder.is_dir():
        return "it is not a folder"
    if not (folder / MANIFEST_FILE).is_file():
        return f"it has no {MANIFEST_FILE}: its save did not come to its end"
    try:
        values = json.loads((folder / MANIFEST_FILE).read_text())
        digest = values.pop("digest")
        files = dict(values["files"])
        version = int(values["format"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"its {MANIFEST_FILE} cannot be read"
    if version > MANIFEST_FORMAT:
        return (
            f"its format is {version}, newer than {MANIFEST_FORMAT}, which this version of "
            "rloo reads"
        )
    if digest != _digest_values(values):
        return f"its {MANIFEST_FILE} was changed"
    try:
        return _files_problem(folder, files)
    except (OSError, KeyError, TypeError, ValueError) as error:
        return f"its files cannot be read: {error}"


def _files_problem(folder: Path, files: dict[str, Any]) -> str | None:
    found = {
        str(p.relative_to(folder))
        for p in folder.rglob("*")
        if p.is_file() and not p.name.startswith(".")
    } - {MANIFEST_FILE}
    missing, more = sorted(set(files) - found), sorted(found - set(files))
    if missing or more:
        which = f"{missing[0]} is missing" if missing else f"{more[0]} is not of it"
        return f"it does not hold what its {MANIFEST_FILE} says: {which}"
    for path, facts in files.items():
        size = (folder / path).stat().st_size
        if size != facts["size"]:
            return f"{path} has {size} bytes, not {facts['size']}"
    with ThreadPoolExecutor(4) as pool:
        hashes = pool.map(lambda path: _hash_file(folder / path), files)
        for (path, facts), digest in zip(files.items(), hashes, strict=True):
            if digest != facts["blake2b"]:
                return f"{path} is not what was saved (its hash differs)"
    return _state_problem(folder)


def _state_problem(folder: Path) -> str | None:
    """The shape of trainer/state.json, of which much is used before the worker looks at it."""
    try:
        values = read_trainer_state(folder)
        known = dict(values["state"])
        sections = [values[n] for n in ("config", "optimizer", "rng", "log")]
        sections.append(known.pop("memory", {}))  # an algorithm's; older ones have none
        counts = {*known.values(), *values["journals"].values(), values["steps"]}
        texts = [values["fingerprint"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "its trainer/state.json is not one of a run"
    kinds = [(counts, int), (sections, dict), (texts, str)]
    if not all(isinstance(v, kind) for found, kind in kinds for v in found):
        return "its trainer/state.json is not one of a run"
    return None


def list_checkpoints(run_path: Path) -> list[Path]:
    """Folders of a run that have a checkpoint's name, newest first."""
    found = [p for p in run_path.iterdir() if checkpoint_position(p)] if run_path.is_dir() else []
    return sorted(found, key=lambda p: checkpoint_position(p) or (0, 0), reverse=True)


def newest_checkpoint(run_path: Path) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint, and why newer ones were passed over."""
    passed: list[str] = []
    for folder in list_checkpoints(run_path):
        why = checkpoint_problem(folder)
        if why is None:
            return folder, passed
        passed.append(f"{folder} is passed over: {why}")
    return None, passed


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """What the manifest says beside its files."""
    return read_json(checkpoint / MANIFEST_FILE)


def read_trainer_state(checkpoint: Path) -> dict[str, Any]:
    """trainer/state.json: where the run stood, its config, and how far its journals went."""
    return read_json(checkpoint / "trainer" / "state.json")


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def _digest_values(values: Mapping[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()
