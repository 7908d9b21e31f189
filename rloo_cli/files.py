"""Writing files so that a reader never sees half of one, and a crash leaves it as it was."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Write a whole file, or none: temporary name, fsync, rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write strict JSON (no NaN, no Infinity), atomically."""
    write_text(path, json.dumps(values, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The content of a JSON file; {} where there is none."""
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return values


def update_json(path: Path, **values: Any) -> None:
    """Add keys to a JSON file."""
    write_json(path, read_json(path) | values)


def sync(path: Path) -> None:
    """fsync a file or a folder: after it, a crash of the machine leaves it as it is now."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def free_name(path: Path) -> Path:
    """`path`, or the first of `path`-2, `path`-3, ... that is not taken."""
    names = (path if i == 1 else path.with_name(f"{path.name}-{i}") for i in range(1, 10**6))
    return next(p for p in names if not p.exists())
