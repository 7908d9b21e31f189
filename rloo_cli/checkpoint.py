"""Saving. The trained model goes to `final/`, loadable by `from_pretrained` as it is.

(Checkpoints to resume from will stand here too.)
"""

import os
import shutil
from pathlib import Path
from typing import Any

from rloo_cli.errors import Problem, RunError, StorageError


def save_final(model: Any, tokenizer: Any, folder: Path) -> Path:
    """Write weights, tokenizer, chat template and generation config to `folder`/final.

    The folder gets its name only when it is complete. Raises StorageError (exit 8).
    """
    final, temporary = folder / "final", folder / f".tmp-final-{os.getpid()}"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        _savable(model.generation_config)
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        for path in temporary.rglob("*"):
            _sync(path)
        _sync(temporary)
        temporary.rename(final)
        _sync(folder)
    except RunError:  # a signal, not the disk
        raise
    except Exception as error:  # the writers in Rust raise no OSError when the disk is full
        why = f"{error}; free: {shutil.disk_usage(folder).free / 1e9:.1f} GB"
        raise StorageError(Problem(f"the final save failed: {final}", str(folder), why)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def _savable(config: Any) -> None:
    """Some published models' sampling flags load without `do_sample`, but do not save without."""
    try:
        config.validate(strict=True)
    except ValueError:
        config.do_sample = True


def _sync(path: Path) -> None:
    """fsync a file or a folder: after it, a crash of the machine leaves it as it is now."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
