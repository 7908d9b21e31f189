"""Checks the folder of a run: is it free, our own run or rollout server, or something else?

Imports no torch. Other folders are never touched. A folder is ours by the content of its files,
never by their names: a run has a run.json, which is the first file that its launcher writes; a
rollout server that waits for its run has a server.json, or the config that it was started with.
"""

import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import yaml

from rloo_cli.generation.vllm import server_file
from rloo_cli.utils.errors import Problem, StorageError, refuse
from rloo_cli.utils.files import JsonObject, read_json

RUN_FILE = "run.json"
RUN_STATES = ("starting", "training", "stopped", "failed", "finished")
CONFIG_SECTIONS = {"root", "name", "model", "generation", "algorithm", "train"}  # every run's
SERVER_LOGS = Path("logs", "server")  # a rollout server's log and its config
SERVER_FILE_NAME = re.compile(r"(node_\d+_)?(config\.yaml|server_\d+\.log)|\.[\w.]+\.\d+\.tmp")
# Left by a launcher that was killed during its very first write.
HALF_WRITTEN = re.compile(r"\.(run\.json|server(_\d+)?\.json)\.\d+\.tmp")
WRITTEN_IN_PLACE = ("metrics.jsonl", "ledger.jsonl", "samples", "rollouts", "logs", "debug")
TRAINED_PATTERNS = ("final", "summary.json", "checkpoint-*", ".tmp-*", ".trash-*")


def check_folder_free(folder: Path) -> None:
    """Raises ConfigError unless a run may use this folder. Changes nothing.

    It may if the folder does not exist, is empty, or has a run or rollout server of ours.
    """
    fix = f"name=OTHER, or root=OTHER, or move it away: mv {folder} {folder}.old"
    try:
        if (why := path_problem(folder)) is not None:
            what, other = f"{folder} cannot be a run's folder", "name=OTHER, or root=OTHER"
            refuse("root, name", what, other, why)
        why = foreign_folder_reason(folder) if folder.exists() else None
    except PermissionError as error:
        refuse("root, name", f"{folder} cannot be read", fix, error)
    if why is not None:
        refuse("name", f"{folder} exists", fix, why)


def path_problem(path: Path) -> str | None:
    """Why no folder can be at this path; None if there is one, or one can be created."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:  # ValueError: a character that is invalid in paths
        return _why_no_path(path, error)
    return None if stat.S_ISDIR(mode) else f"it is {_path_kind(mode)}"


def _why_no_path(path: Path, error: Exception) -> str | None:
    for above in (path, *path.parents):
        try:
            if above.is_symlink() and not above.exists():
                return f"{above} is a link to {os.readlink(above)}, a missing target"
            if not above.exists():
                continue
        except (OSError, ValueError):
            continue
        if not above.is_dir():
            return f"{above} is {_path_kind(above.stat().st_mode)}"
        break
    if isinstance(error, FileNotFoundError | PermissionError):  # the latter is reported elsewhere
        return None
    return getattr(error, "strerror", None) or str(error)


def _path_kind(mode: int) -> str:
    return "a file" if stat.S_ISREG(mode) else "neither a file nor a folder"


def foreign_folder_reason(folder: Path) -> str | None:
    """Why an existing folder is not available for our run; None if it is."""
    if (folder / RUN_FILE).exists() or (folder / RUN_FILE).is_symlink():
        why = f"it is not a run: its {RUN_FILE} was not written by rloo"
        return linked_entry_reason(folder) if read_run_metadata(folder) else why
    found = sorted(p.name for p in folder.iterdir() if not _is_server_entry(p))
    if not found:
        return None
    shown = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
    return f"it is not a run: it has {shown}, but no {RUN_FILE}"


def linked_entry_reason(folder: Path) -> str | None:
    """Why our run may not resume in its folder: files that it changes are links to elsewhere.

    A run from another person may contain links: its journals would be truncated and extended, its
    samples moved and its oldest records removed, although all of these are that person's files. A
    checkpoint may be a link (`checkpoint.keep_last` skips it), and so may the folder itself.
    """
    home = folder.resolve()
    for name in WRITTEN_IN_PLACE:
        path = folder / name
        if path.is_symlink() and not path.resolve().is_relative_to(home):
            return f"its {name} is a link to {os.readlink(path)}: the run would change the target"
    return None


def read_run_metadata(folder: Path) -> JsonObject:
    """The content of a run's run.json; {} if it is missing, or not ours."""
    try:
        values = read_json(folder / RUN_FILE)
    except (OSError, ValueError, RecursionError):
        return {}
    has_state = isinstance(values, dict) and values.get("state") in RUN_STATES
    has_attempt = has_state and isinstance(values.get("attempt"), int)
    return values if has_attempt and isinstance(values.get("hash"), str) else {}


def _is_server_entry(path: Path) -> bool:
    """Whether our rollout server wrote this entry, or a launcher left it in its first write."""
    if path.is_symlink():
        return False
    if path in server_file.server_file_paths(path.parent):
        match = re.search(r"\d+", path.name)
        number = int(match[0]) if match else 1
        return server_file.read_server_file(path.parent, number) is not None
    if path.name != SERVER_LOGS.parent.name or not path.is_dir():
        return HALF_WRITTEN.fullmatch(path.name) is not None
    logs = path / SERVER_LOGS.name
    if [p for p in path.iterdir() if p != logs] or logs.is_symlink():
        return False
    inside = [*logs.iterdir()] if logs.is_dir() else []
    if not all(SERVER_FILE_NAME.fullmatch(p.name) and p.is_file() for p in inside):
        return False
    configs = [p for p in inside if p.name.endswith("config.yaml")]
    return all(_is_config(p) for p in configs) and bool(configs or not _log_files(inside))


def _log_files(paths: list[Path]) -> list[Path]:
    return [p for p in paths if p.suffix == ".log"]


def _is_config(path: Path) -> bool:
    """Whether a file is the config of a run, as our rollout server stores it."""
    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return False
    return isinstance(values, dict) and set(values) >= CONFIG_SECTIONS


def is_untrained(folder: Path, run_metadata: JsonObject) -> bool:
    """Whether the run in this folder provably ended before its first update.

    Its worker recorded that, or it never started; and no file in the folder contradicts it.
    """
    # A run that came from a checkpoint has trained weights.
    if run_metadata.get("came_from") or run_metadata.get("state") == "finished":
        return False
    began = run_metadata.get("began")
    if began is not None and run_metadata.get("untrained") != began:
        return False
    if run_metadata.get("fingerprint") is not None and began is None:
        return False
    if any(True for pattern in TRAINED_PATTERNS for _ in folder.glob(pattern)):
        return False
    return not any("step_time" in line for line in _journal_lines(folder / "metrics.jsonl"))


def _journal_lines(path: Path) -> Iterator[JsonObject]:
    """The lines of a journal; an unreadable one counts as a step's."""
    if not path.is_file():
        return
    with path.open(errors="replace") as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                yield {"step_time": line}


def folder_removed_error(folder: Path) -> StorageError:
    """The error of a run whose folder disappeared while it ran."""
    why = "it existed when the run started, and was removed or moved since"
    fix = "run the same command to start over; if it was moved, move it back and add resume=auto"
    return StorageError(Problem(f"the run's folder is gone: {folder}", "root, name", why, fix))
