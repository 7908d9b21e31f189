"""Checks the folder that a run wants: is it free, a run of ours, our rollout server, or foreign?

Imports no torch. A foreign folder is never touched. A folder is ours by the content of its files
and never by their names: a run has a run.json, which is the first file that its launcher writes; a
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
# A launcher that was killed in its very first write leaves this one.
HALF_WRITTEN = re.compile(r"\.(run\.json|server(_\d+)?\.json)\.\d+\.tmp")
WRITTEN_IN_PLACE = ("metrics.jsonl", "ledger.jsonl", "samples", "rollouts", "logs", "debug")
TRAINED_PATTERNS = ("final", "summary.json", "checkpoint-*", ".tmp-*", ".trash-*")


def check_folder_free(folder: Path) -> None:
    """Raises ConfigError unless a run may use this folder. Changes nothing.

    It may if there is no such folder, it is empty, or a run or rollout server of ours is in it.
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
    """Why no folder can be at this path; None if there is one, or one can be made."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:  # ValueError: a character that no path has
        return _why_no_path(path, error)
    return None if stat.S_ISDIR(mode) else f"it is {_path_kind(mode)}"


def _why_no_path(path: Path, error: Exception) -> str | None:
    for above in (path, *path.parents):
        try:
            if above.is_symlink() and not above.exists():
                return f"{above} is a link to {os.readlink(above)}, which leads to no file"
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
    """Why an existing folder is not free for a run of ours; None where it is."""
    if (folder / RUN_FILE).exists() or (folder / RUN_FILE).is_symlink():
        why = f"it is not a run: its {RUN_FILE} is not one of ours"
        return linked_entry_reason(folder) if read_run_metadata(folder) else why
    found = sorted(p.name for p in folder.iterdir() if not _is_server_entry(p))
    if not found:
        return None
    shown = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
    return f"it is not a run: it holds {shown}, and no {RUN_FILE}"


def linked_entry_reason(folder: Path) -> str | None:
    """Why a run of ours may not go on in its folder: what it writes in place leads out of it.

    A run that somebody else has made may hold links: its journals would be cut and appended to, its
    samples moved and its oldest records removed, all of them files of somebody else. A checkpoint
    may be a link (`checkpoint.keep_last` passes it over), and so may the folder itself.
    """
    home = folder.resolve()
    for name in WRITTEN_IN_PLACE:
        path = folder / name
        if path.is_symlink() and not path.resolve().is_relative_to(home):
            return (
                f"its {name} is a link to {os.readlink(path)}: the run would change what is there"
            )
    return None


def read_run_metadata(folder: Path) -> JsonObject:
    """The content of a run's run.json; {} if there is none, or it is not one of ours."""
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
    """Whether a file is the config of a run, as our rollout server keeps it."""
    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return False
    return isinstance(values, dict) and set(values) >= CONFIG_SECTIONS


def is_untrained(folder: Path, run_metadata: JsonObject) -> bool:
    """Whether the run in this folder provably ended before its first update.

    Its worker wrote so, or it never began; and no file in the folder says otherwise.
    """
    # A run that came from a checkpoint holds what was trained there.
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
    """The lines of a journal; one that cannot be read counts as a step's."""
    if not path.is_file():
        return
    with path.open(errors="replace") as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                yield {"step_time": line}


def folder_removed_error(folder: Path) -> StorageError:
    """The error of a run whose folder was taken away while it ran."""
    why = "it was there when the run began; somebody has removed or moved it since"
    fix = "the same command begins anew; where it was moved, move it back and add resume=auto"
    return StorageError(Problem(f"the run's folder is gone: {folder}", "root, name", why, fix))
