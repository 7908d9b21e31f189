"""A row of `gpu_proof.py` in a process of its own: what happens in it costs no other row anything.

The child writes one JSON file a row; whoever started it waits with a limit and then ends all that
the child has started, also what left its session: every process that has the mark in its
environment. Imports no torch until a row's function does.
"""

import contextlib
import importlib
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from proof_rows import ProofRow

HERE = Path(__file__).resolve().parent
MARK, TAIL = "RLOO_PROOF_MARK", 4000  # TAIL: characters kept of what a failed row said
Result = dict[str, Any]


class CannotRun(Exception):
    """A row cannot be shown here; the text says why. That is no failure."""


def run_row(row: ProofRow, rehearse: bool, changed: dict[str, Any]) -> Result:
    """Call the row's function; its result, also where it raises. `changed`: other sizes."""
    sizes = (row.tiny if rehearse else row.sizes) | changed
    module, _, function = row.work.partition(":")
    device, dtype = ("cpu", "float32") if rehearse else ("cuda", row.dtype)
    if rehearse and not (row.vllm or row.slow):
        dtype = row.dtype
    began = time.monotonic()
    try:
        work = getattr(importlib.import_module(module), function)
        facts = work(device, dtype, sizes)
        found: Result = {"status": "done", "verdict": facts.pop("verdict"), "facts": facts}
    except CannotRun as why:
        found = {"status": "cannot", "why": str(why)}
    except MemoryError as error:
        found = {"status": "out of memory", "why": first_line(error)}
    except (Exception, SystemExit) as error:
        full = is_out_of_memory(error)
        found = {"status": "out of memory" if full else "failed", "why": first_line(error)}
        found["tail"] = traceback.format_exc()[-TAIL:]
    return found | {"seconds": round(time.monotonic() - began, 2)}


def first_line(error: BaseException) -> str:
    """The error's kind and the first line of what it says."""
    said = str(error).strip().partition("\n")[0][:400]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether a GPU's memory was full, whatever the error was wrapped in."""
    while error is not None:
        if type(error).__name__ in ("OutOfMemoryError", "OutOfMemory"):
            return True
        if "CUDA out of memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def serve(
    listing: str,
    names: Sequence[str],
    rehearse: bool,
    folder: Path,
    changed: dict[str, Any],
    short: bool,
) -> None:
    """The child: its rows one after the other, `NUMBER.json` of each as it is done."""
    threading.Thread(target=end_with_starter, daemon=True).start()
    rows = {row.name: row for row in importlib.import_module(listing).ROWS}
    for number, name in enumerate(names):
        row = rows[name]
        changes = row.changes(changed, short and not rehearse)
        found = json.dumps(run_row(row, rehearse, changes), default=str)
        part = folder / f"{number}.part"
        part.write_text(found, encoding="utf-8")
        part.replace(folder / f"{number}.json")


def end_with_starter() -> None:
    """End this process and all of its session once whoever started it is gone."""
    with contextlib.suppress(OSError):
        while os.read(0, 1):
            pass
    os.killpg(os.getpid(), signal.SIGKILL)


class Child:
    """A process that does rows, and its end."""

    def __init__(self, listing: str, names: Sequence[str], place: Any, folder: Path):
        self.folder, self.names = folder, names
        folder.mkdir(parents=True)
        self.mark = secrets.token_hex(8)
        words = [sys.executable, str(HERE / "gpu_proof.py"), "--child", str(folder)]
        words += [
            "--listing",
            listing,
            *(["--rehearse"] if place.rehearse else []),
            "--rows",
            *names,
        ]
        words += ["--short"] * place.short
        words += ["--set", *(f"{n}={json.dumps(v)}" for n, v in place.changed.items())] * bool(
            place.changed
        )
        self.out = folder / "said.txt"
        with self.out.open("w") as out:
            self.process = subprocess.Popen(
                words, cwd=folder, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.PIPE,
                env=surroundings(place.rehearse) | {MARK: self.mark}, start_new_session=True,
            )  # fmt: skip

    def result(self, number: int, limit: float) -> Result | None:
        """What came of a row; None = it had not ended after `limit` seconds."""
        path, began = self.folder / f"{number}.json", time.monotonic()
        while not path.exists():
            if self.process.poll() is not None and not path.exists():
                return self.crashed(time.monotonic() - began)
            if time.monotonic() - began > limit:
                return None
            time.sleep(0.05)
        return json.loads(path.read_text(encoding="utf-8"))

    def crashed(self, seconds: float) -> Result:
        """The result of a row whose process ended without one."""
        code = self.process.returncode
        why = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            why += ": the machine was out of memory, or somebody ended it"
        status = "out of memory" if code == -signal.SIGKILL else "crashed"
        return {"status": status, "why": why, "tail": self.tail(), "seconds": round(seconds, 2)}

    def tail(self) -> str:
        """The end of what it has printed."""
        return self.out.read_text(encoding="utf-8", errors="replace")[-TAIL:]

    def end(self) -> None:
        """End it with all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        for pid in marked(self.mark):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def marked(mark: str) -> list[int]:
    """Processes that have the mark in their environment, which they have from the child alone."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def surroundings(rehearse: bool) -> dict[str, str]:
    """The environment of a child: no network, no GPU where it rehearses."""
    kept = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CI": "1"}
    # TRL sets it to ERROR where nobody has: an engine that failed would leave an empty log.
    kept["VLLM_LOGGING_LEVEL"] = os.environ.get("VLLM_LOGGING_LEVEL", "INFO")
    path = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    kept["PYTHONPATH"] = os.pathsep.join(part for part in path if part)
    if rehearse:
        kept |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return os.environ | kept
