"""Giving turns: who goes on, who leaves the device for it, and who is stopped at a rung."""

from collections.abc import Mapping, Sequence
from math import isfinite, nan
from typing import Any

from rloo_cli.launch.sweep import member
from rloo_cli.launch.sweep.member import Live, Phase
from rloo_cli.launch.sweep.running import Sweep
from rloo_cli.launch.sweep.state import Rung

LEAST = ":min"  # behind a metric of which less is better


def pending(rungs: Sequence[Rung]) -> Rung | None:
    """The next one that is not decided."""
    return next((rung for rung in rungs if not rung.done), None)


def until(step: int, chunk: int, rung: Rung | None) -> int:
    """Where the chunk after `step` ends: at multiples of the chunk, and at the rung."""
    end = (step // chunk + 1) * chunk
    return min(end, rung.at) if rung is not None and step < rung.at else end


def worth(rows: Sequence[Mapping[str, Any]], rung: Rung, chunk: int) -> float:
    """What a member is worth at a rung, more is better; NaN where it has no such metric."""
    name = rung.by.removesuffix(LEAST)
    known = [row for row in rows if row["step"] <= rung.at and isfinite(row.get(name, nan))]
    recent = [row[name] for row in known if row["step"] > rung.at - chunk]
    values = recent or [row[name] for row in known[-1:]]
    if not values:
        return nan
    mean: float = sum(values) / len(values)
    return -mean if rung.by.endswith(LEAST) else mean


def sorted_out(worths: Mapping[int, float], rung: Rung) -> list[int]:
    """Numbers of the members that stop, the best of them first; an unknown worth is the worst."""

    def order(number: int) -> tuple[bool, float, int]:
        value = worths[number]
        return not isfinite(value), -value if isfinite(value) else 0.0, number

    return sorted(worths, key=order)[rung.keep :]


READY = (Phase.BOUNDARY, Phase.PARKED)


def climb(sweep: Sweep) -> None:
    """Decide the rung that all have reached: the best go on, the others stop."""
    book, rung = sweep.book, pending(sweep.book.rungs)
    going = [live for live in sweep.lives if live.open and not live.ending]
    if rung is None or not going:
        return
    if any(live.phase not in READY or live.member.step < rung.at for live in going):
        return
    rows = {live.member.number: sweep.show.rows(live.member) for live in going}
    worths = {number: worth(found, rung, book.chunk) for number, found in rows.items()}
    out = sorted_out(worths, rung)
    for live in going:
        if live.member.number in out:
            place = rung.keep + out.index(live.member.number) + 1
            live.ending = f"--keep {rung.keep} --at {rung.at}: place {place} by {rung.by}"
    rung.done = True
    sweep.show.note(f"step {rung.at}: the best {rung.keep} by {rung.by} go on")
    sweep.save()


def give(sweep: Sweep) -> None:
    """Let the next ones go on, and make those leave the device that are not among them."""
    rung = pending(sweep.book.rungs)
    free = [live for live in sweep.lives if live.waits and not _blocked(live, rung)]
    room = list(sweep.room)
    for live in sweep.lives:  # one at a boundary stays only if it is the next again
        room[live.fair.device] -= live.holds and not (live in free and live.phase == Phase.BOUNDARY)
    chosen = member.next_ones([live.fair for live in free], room)
    for live in sweep.lives:
        if live.phase == Phase.BOUNDARY and live.fair not in chosen and not live.ending:
            live.park()
    for live in free:
        if live.fair in chosen and (live.holds or _room(sweep, live.fair.device)):
            _let(sweep, live, rung)


def _blocked(live: Live, rung: Rung | None) -> bool:
    """It has come to the rung, and waits there for the others."""
    return rung is not None and live.member.step >= rung.at and live.phase != Phase.NEW


def _room(sweep: Sweep, device: int) -> bool:
    held = sum(live.holds for live in sweep.lives if live.fair.device == device)
    return held < sweep.room[device]


def _let(sweep: Sweep, live: Live, rung: Rung | None) -> None:
    live.fair.take()
    live.member.state = "training"
    if live.phase != Phase.NEW:
        live.go(until(live.member.step, sweep.book.chunk, rung))
        return
    live.fair.due = True  # where it stands it says itself: that is when its chunk begins
    names = sweep.gpus[: len(sweep.room)]
    there = [x for x in sweep.lives if x.open and x.fair.device == live.fair.device]
    gpu = names[live.fair.device] if len(names) > 1 else None
    live.start(sweep.socket, gpu, len(there) - 1)
