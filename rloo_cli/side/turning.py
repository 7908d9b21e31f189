"""Giving turns: who goes on, who leaves the device for it, and who is stopped at a rung."""

from typing import TYPE_CHECKING

from rloo_cli.side import fair, rungs
from rloo_cli.side.book import Rung
from rloo_cli.side.live import Live, Phase

if TYPE_CHECKING:
    from rloo_cli.side.control import Control

READY = (Phase.BOUNDARY, Phase.PARKED)


def climb(control: "Control") -> None:
    """Decide the rung that all have reached: the best go on, the others stop."""
    book, rung = control.book, rungs.pending(control.book.rungs)
    going = [live for live in control.lives if live.open and not live.ending]
    if rung is None or not going:
        return
    if any(live.phase not in READY or live.member.step < rung.at for live in going):
        return
    rows = {live.member.number: control.show.rows(live.member) for live in going}
    worths = {number: rungs.worth(found, rung, book.chunk) for number, found in rows.items()}
    out = rungs.sorted_out(worths, rung)
    for live in going:
        if live.member.number in out:
            place = rung.keep + out.index(live.member.number) + 1
            live.ending = f"--keep {rung.keep} --at {rung.at}: place {place} by {rung.by}"
    rung.done = True
    control.show.note(f"step {rung.at}: the best {rung.keep} by {rung.by} go on")
    control.save()


def give(control: "Control") -> None:
    """Let the next ones go on, and make those leave the device that are not among them."""
    rung = rungs.pending(control.book.rungs)
    free = [live for live in control.lives if live.waits and not _blocked(live, rung)]
    room = list(control.room)
    for live in control.lives:  # one at a boundary stays only if it is the next again
        room[live.fair.device] -= live.holds and not (live in free and live.phase == Phase.BOUNDARY)
    chosen = fair.next_ones([live.fair for live in free], room)
    for live in control.lives:
        if live.phase == Phase.BOUNDARY and live.fair not in chosen and not live.ending:
            live.park()
    for live in free:
        if live.fair in chosen and (live.holds or _room(control, live.fair.device)):
            _let(control, live, rung)


def _blocked(live: Live, rung: Rung | None) -> bool:
    """It has come to the rung, and waits there for the others."""
    return rung is not None and live.member.step >= rung.at and live.phase != Phase.NEW


def _room(control: "Control", device: int) -> bool:
    held = sum(live.holds for live in control.lives if live.fair.device == device)
    return held < control.room[device]


def _let(control: "Control", live: Live, rung: Rung | None) -> None:
    live.fair.take()
    live.member.state = "training"
    if live.phase != Phase.NEW:
        live.go(rungs.until(live.member.step, control.book.chunk, rung))
        return
    live.fair.due = True  # where it stands it says itself: that is when its chunk begins
    names = control.gpus[: len(control.room)]
    there = [x for x in control.lives if x.open and x.fair.device == live.fair.device]
    gpu = names[live.fair.device] if len(names) > 1 else None
    live.start(control.socket, gpu, len(there) - 1)
