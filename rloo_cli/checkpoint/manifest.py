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

from rloo_cli.utils.fault_injection import fault
from rloo_cli.utils.files import read_json, sync, write_text

FILE = "MANIFEST.json"
FORMAT = 1  # a newer one is refused
# checkpoint-<step>, and -<updates> behind it where it was taken inside the next step.
NAME = re.compile(r"checkpoint-(\d+)(?:-(\d+))?")
Place = tuple[int, int]  # steps done, updates done in the next one (-1: between two steps)


def name(place: Place) -> str:
    """The folder's name for a place."""
    step, updates = place
    return f"checkpoint-{step}" + (f"-{updates}" if updates >= 0 else "")


def place(folder: Path) -> Place | None:
    """The place that a folder's name says; None for a name that is no checkpoint's."""
    found = NAME.fullmatch(folder.name)
    return (int(found[1]), -1 if found[2] is None else int(found[2])) if found else None


def write(folder: Path, facts: Mapping[str, Any]) -> None:
    """Account for every file of `folder`, each on the disk already, and add `facts`."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    with ThreadPoolExecutor(4) as pool:
        hashes = list(pool.map(_hash, paths))
    files = {
        str(path.relative_to(folder)): {"size": path.stat().st_size, "blake2b": digest}
        for path, digest in zip(paths, hashes, strict=True)
    }
    values = {"format": FORMAT, **facts, "files": files}
    fault("ckpt.manifest")
    write_text(folder / FILE, json.dumps(values | {"digest": _digest(values)}, indent=2) + "\n")
    for path in (*[p for p in folder.rglob("*") if p.is_dir()], folder):
        fault("ckpt.fsync")
        sync(path)


def problem(folder: Path) -> str | None:
    """Why this folder is not a complete checkpoint of a format we know; None when it is."""
    if not folder.is_dir():
        return "it is not a folder"
    if not (folder / FILE).is_file():
        return f"it has no {FILE}: its save did not come to its end"
    try:
        values = json.loads((folder / FILE).read_text())
        digest = values.pop("digest")
        files = dict(values["files"])
        version = int(values["format"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"its {FILE} cannot be read"
    if version > FORMAT:
        return f"its format is {version}, newer than {FORMAT}, which this version of rloo reads"
    if digest != _digest(values):
        return f"its {FILE} was changed"
    try:
        return _files_problem(folder, files)
    except (OSError, KeyError, TypeError, ValueError) as error:
        return f"its files cannot be read: {error}"


def _files_problem(folder: Path, files: dict[str, Any]) -> str | None:
    found = {
        str(p.relative_to(folder))
        for p in folder.rglob("*")
        if p.is_file() and not p.name.startswith(".")
    } - {FILE}
    missing, more = sorted(set(files) - found), sorted(found - set(files))
    if missing or more:
        which = f"{missing[0]} is missing" if missing else f"{more[0]} is not of it"
        return f"it does not hold what its {FILE} says: {which}"
    for path, facts in files.items():
        size = (folder / path).stat().st_size
        if size != facts["size"]:
            return f"{path} has {size} bytes, not {facts['size']}"
    with ThreadPoolExecutor(4) as pool:
        hashes = pool.map(lambda path: _hash(folder / path), files)
        for (path, facts), digest in zip(files.items(), hashes, strict=True):
            if digest != facts["blake2b"]:
                return f"{path} is not what was saved (its hash differs)"
    return _state_problem(folder)


def _state_problem(folder: Path) -> str | None:
    """The shape of trainer/state.json, of which much is used before the worker looks at it."""
    try:
        values = state(folder)
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


def checkpoints(run: Path) -> list[Path]:
    """Folders of a run that have a checkpoint's name, newest first."""
    found = [p for p in run.iterdir() if place(p)] if run.is_dir() else []
    return sorted(found, key=lambda p: place(p) or (0, 0), reverse=True)


def newest(run: Path) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint, and why newer ones were passed over."""
    passed: list[str] = []
    for folder in checkpoints(run):
        why = problem(folder)
        if why is None:
            return folder, passed
        passed.append(f"{folder} is passed over: {why}")
    return None, passed


def facts(checkpoint: Path) -> dict[str, Any]:
    """What the manifest says beside its files."""
    return read_json(checkpoint / FILE)


def state(checkpoint: Path) -> dict[str, Any]:
    """trainer/state.json: where the run stood, its config, and how far its journals went."""
    return read_json(checkpoint / "trainer" / "state.json")


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def _digest(values: Mapping[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()
