"""Sends a run's metrics to trackers: those of accelerate.tracking, such as wandb and tensorboard.

Each tracker's client runs in its own worker process, fed by a thread from a bounded queue. A
client may be missing, refuse, hang, be slow or exit: the run neither waits for it nor
changes. Everything it misses is in metrics.jsonl: a resumed run sends it, or `rloo sync RUN NAME`.

    kinds   how each tracker opens a run, and the id of the run there
    worker  the worker process of a tracker
"""

import contextlib
import json
import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from rloo_cli.reporting.metrics_lines import MetricsMapping
from rloo_cli.reporting.trackers.kinds import first_metric
from rloo_cli.reporting.trackers.worker import TrackerWorkerCode
from rloo_cli.utils import redact
from rloo_cli.utils.errors import TrackerError, refuse
from rloo_cli.utils.files import JsonObject, read_json, update_json
from rloo_cli.utils.worker_pool import Worker, WorkerGone, WorkerPool

QUEUE_LINES = 10_000  # queued lines per tracker; more are dropped and counted
START_LIMIT_S = 30.0  # until a required tracker has to be ready
CALL_LIMIT_S = 60.0  # per call of a client; one that takes longer is given up
CLOSE_LIMIT_S = 20.0  # until the last lines have to be sent
STALL_LIMIT_S = 15.0  # at the end, a client stuck in a call this long is abandoned
MAX_FAILURES = 5  # refused lines in a row before a tracker is given up
POLL_S = 0.05
OWN_ID_TRACKERS = ("wandb",)  # those that accept our id


def tracker_about(
    folder: Path, names: Sequence[str], project: str | None, run_name: str, config: JsonObject
) -> JsonObject:
    """The data that trackers get about a run. Known runs continue under their id.

    wandb accepts our id: run.json has it before the tracker answers, so that a run that is
    killed meanwhile continues under it too.
    """
    for name in {*names} & {*OWN_ID_TRACKERS} - {*known_tracker_runs(folder)}:
        remember_tracker_run(folder, name, uuid.uuid4().hex[:8], None)
    known = known_tracker_runs(folder)
    return {
        "folder": str(folder.resolve()),
        "trackers": [*names],
        "project": project or "rloo",
        "name": run_name,
        "config": json.loads(redact.redact_text(json.dumps(config, default=str))),
        "ids": {n: known[n].get("id") for n in names if isinstance(known.get(n), dict)},
    }


def known_tracker_runs(folder: Path) -> JsonObject:
    """Tracker -> id and URL of this run there, by run.json; {} if that cannot be read."""
    try:
        about: object = read_json(folder / "run.json")
    except (OSError, ValueError):
        return {}
    known = about.get("trackers") if isinstance(about, dict) else None
    return known if isinstance(known, dict) else {}


def remember_tracker_run(folder: Path, name: str, run_id: str | None, url: str | None) -> None:
    """Store a tracker's id of this run in run.json: a resumed run continues under it."""
    known, entry = known_tracker_runs(folder), {"id": run_id, "url": url}
    with contextlib.suppress(OSError, ValueError, TypeError):  # leave a damaged run.json alone
        update_json(folder / "run.json", trackers=known | {name: entry})


class TrackerFailed(Exception):
    """The tracker accepts no more lines; the text says why."""


class TrackerThread:
    """Feeds one tracker's worker, with the run's earlier lines and then from a queue.

    It calls `tell(name, ready, warning)`.
    """

    def __init__(
        self, name: str, pool: WorkerPool, tell: Callable[[str, JsonObject | None, str], None]
    ):
        self.name, self.pool, self.tell = name, pool, tell
        self.earlier: deque[MetricsMapping] = deque()
        self.lines: queue.SimpleQueue[JsonObject | None] = queue.SimpleQueue()  # None ends it
        self.busy_since: float | None = time.monotonic()  # None while it waits for a line
        self.num_sent = self.left_out = 0
        self.has_failed = False
        self.thread = threading.Thread(target=self._run, daemon=True, name=f"tracker {name}")

    @property
    def hangs(self) -> bool:
        """Whether the client has been stuck in one call for too long to wait."""
        since = self.busy_since
        return since is not None and time.monotonic() - since > STALL_LIMIT_S

    def put(self, line: JsonObject) -> None:
        """Queue a line, or drop it if the queue is full."""
        if self.has_failed:
            return
        if self.lines.qsize() < QUEUE_LINES:
            self.lines.put(line)
        else:
            self.left_out += 1

    def end(self) -> None:
        """Let it finish the queue, even a full one."""
        self.lines.put(None)

    def _run(self) -> None:
        worker: Worker | None = None
        try:
            worker = self.pool.take_new()
            self._open_run(worker)
            refused = self._send_lines(worker)
            self._ask(worker, {"do": "finish"})
            if refused:
                self.tell(self.name, None, refused)
        except Exception as failure:  # whatever it is, the remaining lines are not sent
            self.has_failed = True
            self.tell(self.name, None, str(failure))
        finally:
            self.busy_since = None
            if worker is not None:
                worker.kill()

    def _open_run(self, worker: Worker) -> None:
        names = {first_metric(line)[1] for line in self.earlier}
        message = {"do": "start", "tracker": self.name, "metrics": sorted(names)}
        opened = self._ask(worker, message)
        known = {(step, name) for step, name in opened["known"]}
        self.earlier = deque(line for line in self.earlier if first_metric(line) not in known)
        self.tell(self.name, opened, "")

    def _send_lines(self, worker: Worker) -> str:
        """Send the queue's lines. -> which were refused, as text; "" for none"""
        failures = refused = 0
        why = ""
        while (line := self._next_line()) is not None:
            answer = self._request(worker, {"do": "log", "line": dict(line)})
            why = answer.get("error", why)
            failures = failures + 1 if "error" in answer else 0
            refused += "error" in answer
            self.num_sent += "error" not in answer
            if failures == MAX_FAILURES:
                raise TrackerFailed(f"it accepts no more lines: {why}")
        return f"it refused {refused} lines ({why})" if refused else ""

    def _next_line(self) -> MetricsMapping | None:
        self.busy_since = None
        if self.earlier:
            self.busy_since = time.monotonic()
            return self.earlier.popleft()
        line = self.lines.get()
        self.busy_since = time.monotonic()
        return line

    def _ask(self, worker: Worker, message: JsonObject) -> JsonObject:
        answer = self._request(worker, message)
        if "error" in answer:
            raise TrackerFailed(answer["error"])
        return answer

    def _request(self, worker: Worker, message: JsonObject) -> JsonObject:
        try:
            answer: JsonObject = json.loads(worker.request(message, CALL_LIMIT_S))
        except TimeoutError:
            raise TrackerFailed(f"no answer within {CALL_LIMIT_S:g} s") from None
        except WorkerGone as gone:
            raise TrackerFailed(f"its process exited with {gone}") from None
        return answer


class TrackerClient:
    """Sends lines of metrics to the trackers; only waits for them at the end.

    `note` shows a warning to the user, each once, from the caller's thread. `seconds` is the total
    time of `send`.
    """

    def __init__(self, about: JsonObject, note: Callable[[str], None]):
        self.folder, self.note = Path(about["folder"]), note
        log = self.folder / "logs" / "trackers.log"
        self.pool = WorkerPool(TrackerWorkerCode(about), "trackers", keep=0, log=log)
        self.news: queue.SimpleQueue[tuple[str, JsonObject | None, str]] = queue.SimpleQueue()
        self.ready: dict[str, JsonObject] = {}  # by tracker: id and URL of this run
        self.failed: dict[str, str] = {}
        self.sent, self.seconds = 0, 0.0
        self.trackers = [
            TrackerThread(name, self.pool, lambda *report: self.news.put(report))
            for name in about["trackers"]
        ]

    def start(self, earlier: Sequence[MetricsMapping] = (), required: bool = False) -> None:
        """Start the clients. `earlier`: lines of a resumed run, of which they may lack some.

        Raises TrackerError if all trackers are required and one is not ready.
        """
        for tracker in self.trackers:
            tracker.earlier.extend(earlier)
            tracker.thread.start()
        deadline = time.monotonic() + START_LIMIT_S
        while required and self._num_heard() < len(self.trackers) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        missing = [t.name for t in self.trackers if t.name not in self.ready]
        if required and missing:
            self.pool.close()
            why = self.failed.get(missing[0], f"it was not ready within {START_LIMIT_S:g} s")
            fix = "logging.trackers_required=false continues without it"
            what = f"the required tracker {missing[0]} failed to start"
            refuse("logging.trackers_required", what, fix, why, error=TrackerError)

    def send(self, metrics: JsonObject) -> None:
        """Hand over a line of metrics. Takes microseconds, whatever the trackers do."""
        began = time.perf_counter()
        for tracker in self.trackers:
            tracker.put(metrics)
        self.sent += 1
        self.hear_news()
        self.seconds += time.perf_counter() - began

    def close(self, limit_s: float | None = None) -> None:
        """Give the clients this time (CLOSE_LIMIT_S) to send what they have; then end them."""
        limit_s = CLOSE_LIMIT_S if limit_s is None else limit_s
        deadline = time.monotonic() + limit_s
        for tracker in self.trackers:
            tracker.end()
        waiting = [t for t in self.trackers if t.thread.ident is not None]
        while waiting and time.monotonic() < deadline:
            time.sleep(POLL_S)
            waiting = [t for t in waiting if t.thread.is_alive() and not t.hangs]
        late = {t.name for t in self.trackers if t.thread.is_alive()}
        self.hear_news()
        for tracker in self.trackers:
            if tracker.name in late:
                self._add_failure(tracker.name, f"it did not accept all lines within {limit_s:g} s")
            elif tracker.left_out:
                self._add_failure(tracker.name, f"{tracker.left_out} lines were dropped")
        self.pool.close()

    def hear_news(self) -> None:
        """Handle the trackers' reports, in the thread of the loop, whose notes are shown."""
        with contextlib.suppress(queue.Empty):
            while True:
                name, ready, warning = self.news.get_nowait()
                if ready is not None:
                    self.ready[name] = ready
                    remember_tracker_run(self.folder, name, ready["id"], ready["url"])
                    if ready["url"]:
                        self.note(f"{name}: {ready['url']}")
                else:
                    self._add_failure(name, warning)

    def _num_heard(self) -> int:
        self.hear_news()
        return len({*self.ready, *self.failed})

    def _add_failure(self, name: str, why: str) -> None:
        self.failed[name] = why
        again = f"`rloo sync {self.folder.name} {name}` sends all lines"
        self.note(f"warning: {name}: {redact.redact_text(why)}; {again}")
