"""Builds a folder once, and caches it, for all processes of a machine."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from rloo_cli.utils import paths
from rloo_cli.utils.errors import MachineError
from rloo_cli.utils.scratch_folder import ScratchFolder

ABANDONED_AFTER_S = 24 * 3600.0  # without a change in an unfinished folder
T = TypeVar("T")
ProgressCallback = Callable[[str], None]
_listeners: list[ProgressCallback] = []


@contextmanager
def listen_to_progress(callback: ProgressCallback) -> Iterator[None]:
    """Let `callback` receive the progress texts of all work inside."""
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

    It gets this name when it is complete, so a killed run leaves no half-filled folder.
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
    """Admit one process at a time: a trainer and its server may need the same model."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder.parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _remove_abandoned(folder: Path) -> None:
    """Remove unfinished folders of killed runs, a day later."""
    for half in folder.parent.glob(f".{folder.name}.*"):
        with contextlib.suppress(OSError):  # another process was quicker
            if time.time() - half.stat().st_mtime > ABANDONED_AFTER_S:
                shutil.rmtree(half)


def _make(folder: Path, build: Callable[[Path], None]) -> None:
    _remove_abandoned(folder)
    if not folder.is_dir():
        temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            build(temporary)
        except BaseException:  # nothing of a failed download is useful
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        try:
            temporary.rename(folder)
        except OSError:  # another process was quicker, and its folder is the same
            shutil.rmtree(temporary)
            if not folder.is_dir():
                raise


class Ranks(Protocol):
    """The processes of a run (distributed.world)."""

    def run_on_rank0(self, work: Callable[[], T]) -> T:
        """Rank 0 does `work`, and sends its result to the others."""

    def rank0_first(self, work: Callable[[], T]) -> T:
        """Rank 0 does `work`, and then the others do."""

    def gather(self, value: T) -> list[T]:
        """Every rank's value."""


class OneProcess:
    """The ranks of a run with a single process."""

    def run_on_rank0(self, work: Callable[[], T]) -> T:
        """Do it."""
        return work()

    rank0_first = run_on_rank0

    def gather(self, value: T) -> list[T]:
        """Its own."""
        return [value]


ONE_PROCESS = OneProcess()


@contextmanager
def shared_folder(ranks: Ranks) -> Iterator[Path | None]:
    """A folder that rank 0 writes and the others read while inside. None: it cannot be created.

    Memory-mapped data stays usable after the folder is gone.
    """
    made: list[ScratchFolder] = []

    def make() -> Path | None:
        try:
            folder = paths.cache_folder()
            folder.mkdir(parents=True, exist_ok=True)
            made.append(ScratchFolder("shared-", str(folder)))
        except OSError:
            return None
        return made[0].path

    try:
        yield ranks.run_on_rank0(make)
    finally:
        ranks.gather(None)  # until the others have opened its files
        for folder in made:
            folder.remove()
