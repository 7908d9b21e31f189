"""How a run's folder is left: with the reason of the end in it, or as it was before a refusal."""

import contextlib
import os
import re
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

from rloo_cli.checkpoint import resume, run_folder
from rloo_cli.generation.vllm import server_file
from rloo_cli.utils.files import read_json, update_json, write_text
from rloo_cli.checkpoint.resume import Start

# What an attempt writes before its worker comes to train; anything else in a folder is not ours.
FILES = ("run.json", "config.yaml", "overrides.txt", "env.json")
HALF_WRITTEN = re.compile(r"\.[\w.]+\.\d+\.tmp")


@dataclass(frozen=True)
class Before:
    """What was there before an attempt wrote anything."""

    made: list[Path] = field(default_factory=list)  # folders that were not there, deepest first
    entries: frozenset[Path] = frozenset()  # of the run's folder, and of its logs
    texts: dict[Path, str] = field(default_factory=dict)  # of files that every attempt writes anew
    latest: str | None = None  # where logs/latest pointed


def remember(start: Start) -> Before:
    """Look at the folder of an attempt before anything of it is written."""
    folder, logs = start.folder, start.folder / "logs"
    made = [p for p in (folder, *folder.parents) if not p.exists()]
    if made[:1] == [folder]:
        return Before(made)
    entries = [*folder.iterdir(), *(logs.iterdir() if logs.is_dir() else [])]
    texts = {p: p.read_text() for p in (folder / name for name in FILES) if p.is_file()}
    link = logs / "latest"
    latest = os.readlink(link) if link.is_symlink() else None
    return Before(made, frozenset(entries), texts, latest)


def take_back(start: Start, before: Before) -> None:
    """Leave things as they were before a run that was refused: what this attempt made is taken
    away, and nothing that was there before, or that somebody else has put there since.
    """
    folder, logs = start.folder, start.folder / "logs"
    ours = [p for p in _written(start) if p not in before.entries]
    strange = [p for p in folder.iterdir() if p not in (*ours, *before.entries, logs)]
    if strange and not before.texts:  # with a run.json it stays a run's folder
        update_json(folder / "run.json", state="failed")
        return
    for path in ours:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for path, text in before.texts.items():
        write_text(path, text)
    if before.latest is not None:
        with contextlib.suppress(OSError):
            (logs / "latest").unlink(missing_ok=True)
            (logs / "latest").symlink_to(before.latest)
    emptied = [] if logs in before.entries else [logs]
    for empty in (*emptied, *before.made):
        with contextlib.suppress(OSError):  # somebody has put something into it
            empty.rmdir()


def _written(start: Start) -> list[Path]:
    """What an attempt may have written before it came to train."""
    folder, logs = start.folder, start.folder / "logs"
    found = [folder / name for name in (*FILES, "debug", "adapter")]
    found += [p for p in folder.iterdir() if HALF_WRITTEN.fullmatch(p.name)]
    found += [resume.config_file(folder, start.attempt).parent, logs / "latest"]
    if server_file.live(folder) is None:  # else one waits there for the run
        found += [*server_file.places(folder), folder / run_folder.SERVER_LOGS]
    return [p for p in found if p.exists() or p.is_symlink()]


def say_end(start: Start, code: int, command: str, died: list[str]) -> None:
    """Why the run ended, the last checkpoint, how to go on, and where things are."""
    folder = start.folder
    facts, log = read_json(folder / "run.json"), resume.config_file(folder, start.attempt).parent
    if not facts:
        print(f"{folder}: it was taken away while the run was going on", file=sys.stderr)
        return
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
