"""`python -m rloo_cli.reporting.trackers.child`: runs the trackers' clients for one run.

Reads JSON lines on stdin: first what the run is, then its metrics. A thread for each tracker has a
queue of its own, so that one that hangs holds up no other. Says on stdout which are ready, under
which id, and what failed. Ends when stdin does: with the run, however that ended.
"""

import json
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TextIO

from rloo_cli.reporting.trackers.writers import TRACKERS, TrackerWriter, line_scalars
from rloo_cli.utils.files import JsonObject

QUEUE_LINES = 10_000
FLUSH_LIMIT_S = 15.0  # for what is left at the end
STALL_LIMIT_S = 15.0  # in one call of a client, begun before the end or after it: then it hangs
POLL_S = 0.05
MAX_FAILURES = 5  # lines in a row that a tracker may refuse before it is given up


class TrackerThread:
    """One tracker's client, at work on its own queue."""

    def __init__(self, name: str, about: JsonObject, say: "Say"):
        self.name, self.about, self.say = name, about, say
        self.lines: queue.Queue[JsonObject | None] = queue.Queue(QUEUE_LINES)
        self.busy_since: float | None = time.monotonic()  # None while it waits for a line
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    @property
    def hangs(self) -> bool:
        """Whether the client has been in one call for so long that it is not waited for."""
        since = self.busy_since
        return since is not None and time.monotonic() - since > STALL_LIMIT_S

    def put(self, line: JsonObject | None) -> None:
        """Queue a line; one too many is left out."""
        try:
            self.lines.put_nowait(line)
        except queue.Full:
            self.say(tracker=self.name, error="it is too slow: lines are left out")

    def _run(self) -> None:
        try:
            writer = TRACKERS[self.name](self.about)
            writer.start()
        except ImportError as error:
            fix = f"pip install {TRACKERS[self.name].package}"
            self.say(tracker=self.name, error=f"its package is missing ({error}): {fix}")
            return
        except BaseException as error:  # a client may raise anything, SystemExit too
            self.say(tracker=self.name, error=f"it did not start: {_error_text(error)}")
            return
        self.say(tracker=self.name, ready=True, id=writer.run_id, url=writer.url)
        self._write(writer)

    def _write(self, writer: TrackerWriter) -> None:
        failures = refused = 0
        why = ""
        while (line := self._next_line()) is not None:
            try:
                writer.log(int(line["step"]), line_scalars(line))
                failures = 0
            except BaseException as error:
                failures, refused, why = failures + 1, refused + 1, _error_text(error)
                if failures == MAX_FAILURES:
                    self.say(tracker=self.name, error=f"it takes no more: {why}")
                    return
        if refused:
            again = f"`rloo sync {Path(self.about['folder']).name} {self.name}` sends all of it"
            self.say(tracker=self.name, error=f"it refused {refused} lines ({why}); {again}")
        try:
            writer.finish()
        except BaseException as error:
            self.say(tracker=self.name, error=f"it did not finish: {_error_text(error)}")

    def _next_line(self) -> JsonObject | None:
        self.busy_since = None
        line = self.lines.get()
        self.busy_since = time.monotonic()
        return line


def _error_text(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__


class Say:
    """Writes JSON lines to the run, from any thread."""

    def __init__(self, stream: TextIO):
        self.stream, self.lock = stream, threading.Lock()

    def __call__(self, **values: object) -> None:
        with self.lock:
            try:
                self.stream.write(json.dumps(values) + "\n")
                self.stream.flush()
            except OSError:
                pass  # the run has ended


def main() -> None:
    """Feed every tracker until stdin ends, then let them finish."""
    for sign in (signal.SIGINT, signal.SIGTERM):  # the run says when it is over
        signal.signal(sign, signal.SIG_IGN)
    say = Say(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)  # what clients print goes to the log
    first = sys.stdin.readline()
    if not first.strip():
        return
    about: JsonObject = json.loads(first)
    threads = [TrackerThread(name, about, say) for name in about["trackers"]]
    for text in sys.stdin:
        try:
            line = json.loads(text)
        except ValueError:
            break  # the run was killed while it wrote
        for thread in threads:
            thread.put(line)
    deadline = time.monotonic() + FLUSH_LIMIT_S
    for thread in threads:
        thread.put(None)
    while any(thread.thread.is_alive() and not thread.hangs for thread in threads):
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    for thread in threads:
        if thread.thread.is_alive():
            say(tracker=thread.name, late=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a client that hangs holds nothing up


if __name__ == "__main__":
    main()
