"""Make a folder once, and keep it in the cache."""

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

Say = Callable[[str], None]
_listeners: list[Say] = []


@contextmanager
def heard(say: Say) -> Iterator[None]:
    """While inside, what is being made tells `say` how far it has come."""
    _listeners.append(say)
    try:
        yield
    finally:
        _listeners.remove(say)


def tell(text: str) -> None:
    """How far the making has come, for whoever waits for it."""
    for say in _listeners:
        say(text)


def kept(name: str, recipe: str, make: Callable[[Path], None]) -> Path:
    """The cache folder `name`-<hash of `recipe`>; `make` fills it the first time.

    It gets its name only when it is whole, so a run that is killed meanwhile leaves no half.
    Raises MachineError where the cache cannot be written.
    """
    folder = paths.cache() / f"{name}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    try:
        if not folder.is_dir():
            with _alone(folder):
                _make(folder, make)
    except OSError as error:
        raise MachineError(paths.unusable_cache(str(error))) from error
    return folder


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time: a trainer and its server may want the same model."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder.parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _make(folder: Path, make: Callable[[Path], None]) -> None:
    if not folder.is_dir():
        temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        make(temporary)
        try:
            temporary.rename(folder)
        except OSError:  # another process was quicker; its folder is as good
            shutil.rmtree(temporary)
            if not folder.is_dir():
                raise
