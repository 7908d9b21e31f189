"""What another terminal may ask of a sweep that runs, and what is done of it at a boundary.

Nothing is done in the middle of a chunk: what is asked for waits until the member has ended it.
"""

import contextlib
import itertools
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rloo_cli.checkpoint import manifest
from rloo_cli.launch.sweep import rules
from rloo_cli.launch.sweep.member import Live, Phase
from rloo_cli.launch.sweep.running import Sweep
from rloo_cli.launch.sweep.state import Book, Member, running, setting
from rloo_cli.launch.sweep.table import Show
from rloo_cli.utils.errors import ConfigError, GenerationError, Problem
from rloo_cli.utils.files import read_json, write_json

AT = (Phase.BOUNDARY, Phase.PARKED)


def answer(sweep: Sweep, request: dict[str, Any]) -> str:
    """Take one request; what is said to who asked. Raises ConfigError."""
    member = sweep.book.find(str(request["member"]))
    if sweep.heard:
        raise ConfigError(Problem("the sweep is ending", "command line", "it was asked to"))
    live = next((x for x in sweep.lives if x.member is member and x.open), None)
    match request["do"]:
        case "stop":
            return _stop(sweep, member, live)
        case "promote":
            return _promote(sweep, member, live)
        case _:
            return _clone(sweep, member, live, request)


def _stop(sweep: Sweep, member: Member, live: Live | None) -> str:
    if live is None or live.ending:
        raise ConfigError(_ended(member, live))
    live.ending = "rloo sweep stop"
    if live.phase == Phase.NEW:
        live.phase, member.state, member.why = Phase.DONE, "stopped", live.ending
        sweep.show.ended(live)
        sweep.save()
        return f"{member.name} is stopped before it began"
    return f"{member.name} saves and stops {_when(live)}"


def _promote(sweep: Sweep, member: Member, live: Live | None) -> str:
    if live is None or live.ending:
        raise ConfigError(_ended(member, live))
    member.share += 1
    live.fair.share = member.share
    sweep.save()
    sweep.show.note(f"{member.name} gets {member.share} chunks for each of the others' from here")
    return f"{member.name} gets {member.share} chunks for each of the others', {_when(live)}"


def _clone(sweep: Sweep, member: Member, live: Live | None, request: dict[str, Any]) -> str:
    coming = sum(len(other.clones) for other in sweep.lives)
    open_now = sum(other.open for other in sweep.lives)
    if problems := [*rules.too_many(open_now + coming + 1, sweep.fit)]:
        raise ConfigError(*problems)
    taken = {m.name for m in sweep.book.members}
    taken |= {clone["name"] for other in sweep.lives for clone in other.clones}
    names = (f"{request['name']}{f'-{i}' if i > 1 else ''}" for i in range(1, 10**6))
    root = sweep.book.root
    name = next(n for n in names if n not in taken and not (root / n).exists())
    clone = {"name": name, "words": request["words"]}
    if live is not None:
        if live.phase not in AT and live.steps is not None and live.until >= live.steps:
            why = f"it is in its last chunk, and ends at step {live.steps}"
            what = f"{member.name} has no boundary any more"
            raise ConfigError(Problem(what, "command line", why, "the same, once it has ended"))
        live.clones.append(clone)
        return f"{name} begins where {member.name} stands {_when(live)}"
    newest, _ = manifest.newest(sweep.book.place(member))
    if newest is None:
        why = "it has no checkpoint"
        raise ConfigError(Problem(f"{member.name} cannot be cloned", "command line", why))
    _begin(sweep, member, clone, newest)
    return f"{name} begins from {newest}"


def _when(live: Live) -> str:
    if live.phase in AT:
        return f"now, at step {live.member.step}"
    if live.phase == Phase.NEW or live.line is None:
        return "at its next boundary, once it has begun"
    last = live.steps is not None and live.until >= live.steps
    return f"at the end, step {live.steps}" if last else f"at its next boundary, step {live.until}"


def _ended(member: Member, live: Live | None) -> Problem:
    state = "ending" if live is not None else member.state
    why = f"it is {state}" + (
        f" ({live.ending if live else member.why})" if state != "finished" else ""
    )
    return Problem(f"{member.name} does not train any more", "command line", why, "rloo sweep show")


def at_boundary(live: Live, show: Show) -> None:
    """What is due at a boundary: checkpoints for clones first, then its end."""
    if live.phase not in AT:
        return
    fresh = live.member.step == 0 and live.member.start is None  # nothing to save yet
    if live.clones and not fresh:
        live.save()
    elif live.ending:
        if live.clones:
            too_late(live, show)
        live.end()


def made(sweep: Sweep, live: Live, path: str | None) -> None:
    """The checkpoint for the clones is there: they are members from here on."""
    for clone in live.clones:
        if path is None:
            sweep.show.note(f"{clone['name']} is not made: its parent's checkpoint was not saved")
        else:
            _begin(sweep, live.member, clone, Path(path))
    live.clones.clear()


def too_late(live: Live, show: Show) -> None:
    """Say of clones that cannot be made any more that they are not."""
    for clone in live.clones:
        show.note(f"{clone['name']} is not made: {live.member.name} ended before its next boundary")
    live.clones.clear()


def _begin(sweep: Sweep, parent: Member, clone: dict[str, Any], checkpoint: Path) -> None:
    book, name = sweep.book, str(clone["name"])
    place = manifest.place(checkpoint) or (parent.step, -1)
    kept = keep(book, name, checkpoint)
    number = max(m.number for m in book.members) + 1
    member = Member(number, name, clone["words"], str(kept), parent.name, place[0], step=place[0])
    book.members.append(member)
    sweep.add(member)
    sweep.show.note(f"{name} is number {number}, from step {place[0]} of {parent.name}")
    sweep.save()


def keep(book: Book, name: str, checkpoint: Path) -> Path:
    """The checkpoint where its own run cannot remove it. Links where the disk has them: it costs
    room only once its run has removed its own."""
    place = book.folder / "from" / name / checkpoint.name
    shutil.rmtree(place, ignore_errors=True)
    try:
        shutil.copytree(checkpoint, place, copy_function=os.link)
    except (OSError, shutil.Error):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(place)
        shutil.copytree(checkpoint, place)
    return place.absolute()


def with_changes(words: list[str], changes: list[str]) -> list[str]:
    """The words of a clone: its parent's, those of the same keys replaced."""
    changed = {setting(word) for word in changes}
    return [*[word for word in words if setting(word) not in changed], *changes]


LIMIT_S = 60.0  # for an answer: the loop may be linking a large checkpoint
_count = itertools.count()


def ask(folder: Path, **request: Any) -> str:
    """Ask the sweep that runs there; what it says.

    Raises ConfigError where it refuses, GenerationError where it does not answer.
    """
    name = f"{time.time_ns()}-{os.getpid()}-{next(_count)}"
    question = folder / "requests" / f"{name}.json"
    answer = question.with_suffix(".answer")
    write_json(question, request)
    end = time.monotonic() + LIMIT_S
    try:
        while time.monotonic() < end and (running(folder) or answer.is_file()):
            if answer.is_file():
                said = read_json(answer)
                if "problem" in said:
                    raise ConfigError(Problem(**said["problem"]))
                return str(said["said"])
            time.sleep(0.05)
    finally:
        question.unlink(missing_ok=True)
        answer.unlink(missing_ok=True)
    why = "it ended meanwhile" if not running(folder) else f"no answer in {LIMIT_S:.0f} s"
    fix = f"rloo sweep show {folder}"
    raise GenerationError(Problem(f"{folder} did not take it", "command line", why, fix))


def serve(folder: Path, answer: Callable[[dict[str, Any]], str]) -> None:
    """Answer what was asked. `answer` raises ConfigError for what it refuses."""
    for question in sorted((folder / "requests").glob("[0-9]*.json")):
        request = read_json(question)
        if not request:  # who asked has gone
            continue
        said: dict[str, Any]
        try:
            said = {"said": answer(request)}
        except ConfigError as error:
            problem = error.problems[0]
            said = {"problem": {k: getattr(problem, k) for k in ("what", "where", "why", "fix")}}
        write_json(question.with_suffix(".answer"), said)
        question.unlink(missing_ok=True)


def forget(folder: Path) -> None:
    """Questions to an earlier process, which nobody waits for."""
    for path in (folder / "requests").glob("*"):
        path.unlink(missing_ok=True)
