"""How a run's folder is left: with the reason of the end in it, or as it was before a refusal."""

import contextlib
import shutil
import sys
from pathlib import Path
from typing import Any

from rloo_cli import resume, server_file, serving
from rloo_cli.files import read_json, update_json, write_json
from rloo_cli.resume import Start


def take_back(start: Start, before: dict[str, Any], new_root: bool) -> None:
    """Leave things as they were before a run that was refused."""
    folder = start.folder
    if not before:
        _clear(folder)
        if new_root:
            with contextlib.suppress(OSError):  # another run came to it meanwhile
                folder.parent.rmdir()
        return
    shutil.rmtree(resume.config_file(folder, start.attempt).parent)
    write_json(folder / "run.json", before)


def _clear(folder: Path) -> None:
    """Remove a run's folder, but for what a server has in it that waits there for the run."""
    if server_file.live(folder) is None:
        shutil.rmtree(folder)
        return
    kept = {*server_file.places(folder), folder / serving.LOGS, folder / serving.LOGS.parent}
    for entry in [*folder.iterdir(), *(folder / serving.LOGS.parent).iterdir()]:
        if entry in kept:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def say_end(start: Start, code: int, command: str, died: list[str]) -> None:
    """Why the run ended, the last checkpoint, how to go on, and where things are."""
    folder = start.folder
    facts, log = read_json(folder / "run.json"), resume.config_file(folder, start.attempt).parent
    known = {0: "finished", 75: "stopped, as it was asked to", 130: "ended by a second Ctrl-C"}
    why = known.get(code, f"ended with {code}")
    if died:
        why = died[0]
    elif facts.get("code") is None and code not in (75, 130):
        why = "its process ended without a word: killed, out of memory, or by code of a reward"
    step = facts.get("progress", {}).get("step", 0)
    last = facts.get("checkpoint") or "none yet: it begins anew"
    lines = [
        f"{folder}: {why}, after step {step}",
        f"  checkpoint  {last}",
        f"  go on       {command}",
        f"  log         {log}",
    ]
    if code:
        print("\n".join(lines), file=sys.stderr)
    state = {0: "finished", 75: "stopped", 130: "stopped"}.get(code, "failed")
    ended = {"why": why, "checkpoint": facts.get("checkpoint"), "resume": command}
    update_json(folder / "run.json", state=state, code=code, ended=ended)
    with contextlib.suppress(OSError), (log / "rank_0.log").open("a") as file:
        file.write("\n".join(lines) + "\n")
