"""Giving turns: who goes on, who leaves the device for it, and who is stopped at a rung."""

from rloo_cli.launch.sweep import member_turns, turns_rungs
from rloo_cli.launch.sweep.state import Rung
from rloo_cli.launch.sweep.member import Live, Phase
from rloo_cli.launch.sweep.running import Sweep

READY = (Phase.BOUNDARY, Phase.PARKED)


def climb(sweep: Sweep) -> None:
    """Decide the rung that all have reached: the best go on, the others stop."""
    book, rung = sweep.book, turns_rungs.pending(sweep.book.rungs)
    going = [live for live in sweep.lives if live.open and not live.ending]
    if rung is None or not going:
        return
    if any(live.phase not in READY or live.member.step < rung.at for live in going):
        return
    rows = {live.member.number: sweep.show.rows(live.member) for live in going}
    worths = {number: turns_rungs.worth(found, rung, book.chunk) for number, found in rows.items()}
    out = turns_rungs.sorted_out(worths, rung)
    for live in going:
        if live.member.number in out:
            place = rung.keep + out.index(live.member.number) + 1
            live.ending = f"--keep {rung.keep} --at {rung.at}: place {place} by {rung.by}"
    rung.done = True
    sweep.show.note(f"step {rung.at}: the best {rung.keep} by {rung.by} go on")
    sweep.save()


def give(sweep: Sweep) -> None:
    """Let the next ones go on, and make those leave the device that are not among them."""
    rung = turns_rungs.pending(sweep.book.rungs)
    free = [live for live in sweep.lives if live.waits and not _blocked(live, rung)]
    room = list(sweep.room)
    for live in sweep.lives:  # one at a boundary stays only if it is the next again
        room[live.fair.device] -= live.holds and not (live in free and live.phase == Phase.BOUNDARY)
    chosen = member_turns.next_ones([live.fair for live in free], room)
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
        live.go(turns_rungs.until(live.member.step, sweep.book.chunk, rung))
        return
    live.fair.due = True  # where it stands it says itself: that is when its chunk begins
    names = sweep.gpus[: len(sweep.room)]
    live.start(sweep.socket, names[live.fair.device] if len(names) > 1 else None)
