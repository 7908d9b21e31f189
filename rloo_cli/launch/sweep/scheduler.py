"""The loop of a sweep: it starts members, gives them turns, hears them and other terminals, ends.

One thread. A member has the device from its turn until it says that it has left it, so that no two
are there at once unless `--jobs` says so.
"""

import contextlib
import selectors
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rloo_cli.launch.sweep import commands, turns
from rloo_cli.launch.sweep.member import Live, Phase
from rloo_cli.launch.sweep.running import Sweep
from rloo_cli.launch.sweep.state import OPEN, Book
from rloo_cli.launch.sweep.table import Show
from rloo_cli.train.sweep_turns import Line
from rloo_cli.utils.signals import SIGNALS

TICK_S = 0.05
STOPPED, AT_ONCE = 75, 130


class Control(Sweep):
    """The loop of a sweep that runs."""

    def __init__(
        self, book: Book, show: Show, gpus: list[str] | None = None, fit: int | None = None
    ):
        super().__init__(book, show, gpus, fit)
        self.selector = selectors.DefaultSelector()

    def run(self) -> int:
        """Until every member has ended; the sweep's exit code."""
        self.book.state = "training"
        self.book.save()
        commands.forget(self.book.folder)
        with _listening() as (listening, self.socket), self._signals(), self.show:
            self.selector.register(listening, selectors.EVENT_READ)
            try:
                while self._going():
                    self._once()
            finally:
                self._end_all()
                self.selector.close()
        return self._code()

    def _going(self) -> bool:
        return any(live.open and (live.process or not self.heard) for live in self.lives)

    def _once(self) -> None:
        for key, _ in self.selector.select(TICK_S):
            self._hear(key)
        for live in self.lives:
            if live.open and (code := live.ended()) is not None:
                self._ended(live, code)
        commands.serve(self.book.folder, lambda request: commands.answer(self, request))
        if self.heard:
            self._pass_on()
        else:
            for live in self.lives:
                commands.at_boundary(live, self.show)
            turns.climb(self)
            turns.give(self)
        self.save(False)
        self.show.refresh(self.lives)

    def _pass_on(self) -> None:
        """A signal that came while a member was being started reaches it too."""
        if self.book.state == "training":
            self.book.state = "stopping"
            self.show.note("asked to end: every member saves where it stands")
        for live in self.lives:
            if not live.told:
                live.signal(self.heard[0])

    # What members say

    def _hear(self, key: selectors.SelectorKey) -> None:
        if key.data is None:
            assert isinstance(key.fileobj, socket.socket)
            end, _ = key.fileobj.accept()
            self.selector.register(end, selectors.EVENT_READ, Line(end))
            return
        line: Line = key.data
        said = line.receive()
        if said is None:
            self.selector.unregister(key.fileobj)
            line.end.close()
            return
        for message in said:
            live = next(x for x in self.lives if x.member.number == message["member"])
            live.line = line
            self._take(live, message)

    def _take(self, live: Live, said: dict[str, Any]) -> None:
        if not live.open:
            return
        if "step" in said:
            live.member.step, live.phase = said["step"], Phase.BOUNDARY
            live.member.state = "waiting"
            self.show.boundary(live)
        elif "parked" in said:
            live.phase, live.holds = Phase.PARKED, False
        elif "saved" in said:
            live.phase = live.before
            commands.made(self, live, said["saved"])

    def _ended(self, live: Live, code: int) -> None:
        live.phase, live.holds = Phase.DONE, False
        _judge(live, code, bool(self.heard))
        self.show.ended(live)
        commands.too_late(live, self.show)
        self.save()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def forward(number: int, frame: Any) -> None:
            self.heard.append(number)
            for live in self.lives:
                live.signal(number)

        before = {n: signal.signal(n, forward) for n in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _end_all(self) -> None:
        """Where the loop itself went wrong: members save and end all the same."""
        for live in self.lives:
            live.signal(signal.SIGTERM)
        for live in self.lives:
            if live.process is not None:
                with contextlib.suppress(Exception):
                    live.process.wait(60)
                live.process.kill()

    def _code(self) -> int:
        states = [member.state for member in self.book.members]
        codes = [m.code for m in self.book.members if m.state == "failed" and m.code]
        if self.heard and any(state in OPEN for state in states):
            killed = any(live.member.code == AT_ONCE for live in self.lives)
            code = AT_ONCE if killed else STOPPED
            self.book.state = "stopped"
        else:
            code = next((c if c > 0 else 1 for c in codes), 0)
            self.book.state = "failed" if "failed" in states else "finished"
        self.book.save()
        return code


def _judge(live: Live, code: int, heard: bool) -> None:
    """What became of a member that ended with this code. `heard`: the sweep was asked to end."""
    member = live.member
    member.code = code
    if code == 0:
        member.state, member.step = "finished", live.steps or member.step
    elif code == STOPPED and live.ending:
        member.state, member.why = "stopped", live.ending
    elif heard and code in (STOPPED, AT_ONCE, *(-n for n in SIGNALS)):
        member.state, member.why = "waiting", "the sweep was stopped"
    elif code == STOPPED:
        member.state, member.why = "stopped", "a signal to it alone"
    else:
        member.state, member.why = "failed", f"ended with {code}: {live.book.log(member)}"


@contextmanager
def _listening() -> Iterator[tuple[socket.socket, Path]]:
    """A socket that members come to, and its path. Not in the sweep's folder: such a path is short,
    and its file system a local one."""
    with tempfile.TemporaryDirectory(prefix="rloo-") as place:
        path = Path(place, "turns")
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
            listening.listen()
            yield listening, path
