"""Makes a folder once, and keeps it in the cache."""

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rloo_cli.utils import paths
from rloo_cli.utils.errors import MachineError

ProgressCallback = Callable[[str], None]
_listeners: list[ProgressCallback] = []


@contextmanager
def listen_to_progress(callback: ProgressCallback) -> Iterator[None]:
    """Let `callback` receive the progress texts of everything that is made inside."""
    _listeners.append(callback)
    try:
        yield
    finally:
        _listeners.remove(callback)


def report_progress(text: str) -> None:
    """Pass a progress text to all listeners."""
    for callback in _listeners:
        callback(text)


def cached_folder(name: str, recipe: str, build: Callable[[Path], None]) -> Path:
    """The cache folder `name`-<hash of `recipe`>; `build` fills it the first time.

    It is renamed to that when it is complete, so a run that is killed leaves no half-filled one.
    Raises MachineError if the cache cannot be written.
    """
    folder = paths.cache_folder() / f"{name}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    try:
        if not folder.is_dir():
            with _cache_lock(folder):
                _make(folder, build)
    except OSError as error:
        raise MachineError(paths.unusable_cache_problem(str(error))) from error
    return folder


@contextmanager
def _cache_lock(folder: Path) -> Iterator[None]:
    """Let in one process at a time: a trainer and its server may want the same model."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder.parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _make(folder: Path, build: Callable[[Path], None]) -> None:
    if not folder.is_dir():
        temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            build(temporary)
        except BaseException:  # what a failed download leaves is of no use to anyone
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        try:
            temporary.rename(folder)
        except OSError:  # another process was quicker, and its folder is the same
            shutil.rmtree(temporary)
            if not folder.is_dir():
                raise
