"""Writes files so that a reader never sees half of one, and a crash leaves the old one."""

import contextlib
import errno
import json
import os
import selectors
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from rloo_cli.utils.errors import DamagedFile, refuse

JsonObject = dict[str, Any]  # plain values by name, as in JSON and YAML


class HasFileno(Protocol):
    """A pipe, a socket or a connection of multiprocessing."""

    def fileno(self) -> int: ...


def write_text(path: Path, text: str) -> None:
    """Write a whole file, or nothing: temporary name, fsync, rename. Its folder is created.

    Raises FileNotFoundError below a folder of `hold_folder` that was removed: it is not recreated.
    """
    write_whole_file(path, text.encode("utf-8"))


def write_whole_file(path: Path, data: bytes) -> None:
    """`write_text`, for bytes."""
    check_folder_present(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, values: Mapping[str, object]) -> None:
    """Write strict JSON (no NaN, no Infinity), atomically."""
    write_text(path, json.dumps(values, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> JsonObject:
    """The content of a JSON file; {} if the file is missing.

    Raises DamagedFile, a ValueError too, if it does not hold an object.
    """
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError(f"expected an object, found a {type(values).__name__}")
    except (ValueError, RecursionError) as error:
        what, fix = f"{path.name} cannot be read", "restore the original file"
        refuse(str(path), what, fix, error, error=DamagedFile)
    return values


def update_json(path: Path, **values: object) -> None:
    """Add keys to a JSON file. Raises FileNotFoundError if its folder is missing."""
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    write_json(path, read_json(path) | values)


def fsync_path(path: Path) -> None:
    """fsync a file or a folder: a crash of the machine then keeps its current state."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_held_folders: dict[Path, int] = {}  # a folder -> its inode


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """While inside, a removed folder is not recreated."""
    handle = os.open(folder, os.O_RDONLY)  # open, so that no other folder gets its inode
    _held_folders[folder] = os.fstat(handle).st_ino
    try:
        yield
    finally:
        _held_folders.pop(folder, None)
        with contextlib.suppress(OSError):  # a reward may close descriptors that it does not own
            os.close(handle)


def check_folder_present(path: Path) -> None:
    """Raises FileNotFoundError for a path below a folder of `hold_folder` that is gone."""
    for folder in _held_folders:
        if path.is_relative_to(folder) and is_folder_gone(folder):
            raise FileNotFoundError(errno.ENOENT, "the folder was removed", str(folder))


def is_folder_gone(folder: Path) -> bool:
    """Whether a folder of `hold_folder` was removed, moved, or replaced by a new one."""
    try:
        return folder in _held_folders and folder.stat().st_ino != _held_folders[folder]
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:  # a network file system that does not answer briefly
        return False


def wait_until_readable(end: int | HasFileno, seconds: float) -> bool:
    """Whether a pipe or socket can be read, or has ended, within this many seconds.

    `select.select` does not support descriptors above 1023, which a run can exceed.
    """
    with selectors.DefaultSelector() as waiting:
        waiting.register(end, selectors.EVENT_READ)
        return bool(waiting.select(max(0.0, seconds)))
