"""The files of recorded rollouts: their paths, their headers, and which are kept.

`rollouts/step_000010.safetensors` holds all inputs and results of training step 10
(`rollout_record` has the content). A file's header identifies its run in a few kilobytes.
Imports no torch.
"""

import hashlib
import json
import re
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

from rloo_cli.utils.errors import DataError, Problem, refuse
from rloo_cli.utils.files import JsonObject

RECORD_FOLDER = "rollouts"
# Single answers; episodes; sampling masks (of either).
ROW_FORMAT, EPISODE_FORMAT, MASK_FORMAT = 1, 2, 3
RECORD_FORMAT = MASK_FORMAT  # a newer one is refused
RECORD_FILE = re.compile(r"step_(\d+)\.safetensors")
HEAD_KEY = "record"  # of the file's metadata: the head, as JSON
CHECK_KEY = "check"  # of a head: its own digest
LONGEST_HEAD = 1 << 26  # bytes; a longer one is invalid


def rollout_path(folder: Path, step: int) -> Path:
    """The file of a step, counted from 1, of the run in `folder`."""
    return folder / RECORD_FOLDER / f"step_{step:06d}.safetensors"


def list_rollout_files(folder: Path) -> dict[int, Path]:
    """Step -> file of every recorded step of the run in `folder`, in order."""
    found = {}
    for path in (folder / RECORD_FOLDER).glob("step_*.safetensors"):
        if (match := RECORD_FILE.fullmatch(path.name)) is not None:
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def prune_rollout_files(folder: Path, keep_last: int | None) -> None:
    """Remove the oldest recorded steps, so that `keep_last` remain; None keeps all."""
    files = list(list_rollout_files(folder).values())
    for path in files[: max(0, len(files) - keep_last)] if keep_last is not None else ():
        path.unlink()


def step_ranges(steps: Iterable[int]) -> str:
    """Steps in a compact form: 1-3, 5, 8-9."""
    parts: list[list[int]] = []
    for step in sorted({*steps}):
        if parts and parts[-1][1] == step - 1:
            parts[-1][1] = step
        else:
            parts.append([step, step])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts) or "none"


def read_rollout_head(path: Path) -> JsonObject:
    """The head of a file, which names its run, step and sizes.

    Raises DataError for a file that is missing, cut off, of another kind or of a newer format.
    """
    try:
        with path.open("rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            if length > LONGEST_HEAD:
                raise ValueError("invalid header")
            header = json.loads(file.read(length))
        ends = [v["data_offsets"][1] for n, v in header.items() if n != "__metadata__"]
        head: JsonObject = json.loads(header["__metadata__"][HEAD_KEY])
        size, wanted = path.stat().st_size, 8 + length + max(ends)
        version, check = int(head["format"]), head.pop(CHECK_KEY)
    except FileNotFoundError:
        fix = f"rloo replay {path.parent.parent} lists the recorded steps"
        why = "file not found: the step was not recorded, or was removed later"
        refuse(str(path), "a recorded step is missing", fix, why, error=DataError)
    except (OSError, ValueError, KeyError, TypeError, IndexError, struct.error) as error:
        raise damaged_record(path, f"{type(error).__name__}: {error}") from None
    if version > RECORD_FORMAT:
        why = f"its format {version} is newer than {RECORD_FORMAT}, the newest this rloo reads"
        fix = "pip install --upgrade rloo-cli"
        refuse(str(path), "cannot read a record of rollouts", fix, why, error=DataError)
    if check != head_check(head):
        raise damaged_record(path, "its head was changed")
    if size != wanted:
        raise damaged_record(path, f"it has {size} bytes, but {wanted} were written")
    return head


def damaged_record(path: Path, why: str) -> DataError:
    """The error of a file that is not as a run wrote it."""
    fix = f"remove it (rm {path}); the other steps are not affected"
    return DataError(Problem("a record of rollouts is damaged", str(path), why, fix))


def head_check(head: JsonObject) -> str:
    """The digest of a head, which its own `CHECK_KEY` holds."""
    return hashlib.blake2b(json.dumps(head).encode(), digest_size=8).hexdigest()


def content_digest(parts: Iterable[tuple[str, bytes]]) -> str:
    """The digest of a file's tensors, given as (name, bytes) in the order of their names."""
    digest = hashlib.blake2b(digest_size=16)
    for name, data in parts:
        digest.update(name.encode())
        digest.update(data)
    return digest.hexdigest()


def move_rollout_files(folder: Path, tail: Path, moves: Callable[[int], bool]) -> list[Path]:
    """Move the files of the steps for which `moves` is true to the folder `tail`. -> their paths

    `tail` is made only if there is something to move.
    """
    moved = []
    for step, path in list_rollout_files(folder).items():
        if moves(step):
            tail.mkdir(exist_ok=True)
            moved.append(path.rename(tail / path.name))
    return moved
