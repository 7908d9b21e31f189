"""Sends a run's metrics to trackers: tensorboard, wandb, trackio, mlflow, swanlab.

The trackers' clients run in one process of their own (`child`), fed through a bounded queue: they
may be missing, refuse, hang or be slow, and the run neither waits for them nor changes. What they
miss is in metrics.jsonl, and `rloo sync RUN NAME` fills it in.

    child    The process that runs the clients, a thread for each tracker
    writers  One class for each tracker
"""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from rloo_cli.utils import redact
from rloo_cli.utils.errors import Problem, TrackerError
from rloo_cli.utils.files import JsonObject, read_json, update_json

QUEUE_LINES = 1000  # lines of metrics that wait for the process; more are left out and counted
START_LIMIT_S = 30.0  # until a required tracker has to be ready
CLOSE_LIMIT_S = 20.0  # until the last lines have to be sent
OWN_ID_TRACKERS = ("wandb",)  # those that take an id of ours
CHILD = "rloo_cli.reporting.trackers.child"


def tracker_about(
    folder: Path, names: Sequence[str], project: str | None, run_name: str, config: JsonObject
) -> JsonObject:
    """What the process is told first. Runs that a tracker knows already go on under their id.

    wandb takes an id of ours: run.json has it before the tracker answers, so that a run which is
    killed meanwhile goes on under it too.
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
    """Tracker -> id and address of this run there, by run.json; {} where that cannot be read."""
    try:
        about: object = read_json(folder / "run.json")
    except (OSError, ValueError):
        return {}
    known = about.get("trackers") if isinstance(about, dict) else None
    return known if isinstance(known, dict) else {}


class TrackerClient:
    """Sends lines of metrics to the process of the trackers; never waits for it but at the end.

    `note` shows a warning to the user, each once. `seconds` is the time that `send` has taken.
    """

    def __init__(self, about: JsonObject, note: Callable[[str], None]):
        self.about, self.note = about, note
        self.folder = Path(about["folder"])
        self.names: list[str] = list(about["trackers"])
        self.lines: queue.Queue[JsonObject | None] = queue.Queue(QUEUE_LINES)
        self.news: queue.SimpleQueue[JsonObject] = queue.SimpleQueue()
        self.ready: set[str] = set()
        self.failed: dict[str, str] = {}
        self.late: set[str] = set()  # those that had not sent all when the process ended
        self.left_out, self.sent, self.seconds = 0, 0, 0.0
        self.process: subprocess.Popen[str] | None = None
        self.writer = threading.Thread(target=self._write_lines, daemon=True)
        self.reader = threading.Thread(target=self._read_news, daemon=True)

    def start(self, required: bool = False) -> None:
        """Start the process. Raises TrackerError where all are required and one is not ready."""
        log = self.folder / "logs" / "trackers.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", CHILD],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                encoding="utf-8",
                start_new_session=True,  # a signal to the run is not one to its trackers
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
        self.lines.put_nowait(self.about)
        self.writer.start()
        self.reader.start()
        if required:
            self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while {*self.names} - self.ready - {*self.failed} and time.monotonic() < deadline:
            self._hear_news(timeout_s=0.1)
            if self.process is None or self.process.poll() is not None:
                break
        missing = [name for name in self.names if name not in self.ready]
        if missing:
            self.close(limit_s=0.0)
            why = self.failed.get(missing[0], f"it was not ready within {START_LIMIT_S:g} s")
            fix = "logging.trackers_required=false goes on without it"
            what = f"the tracker {missing[0]} is required and does not take the run"
            raise TrackerError(Problem(what, "logging.trackers_required", why, fix))

    def send(self, metrics: JsonObject) -> None:
        """Hand over a line of metrics. Takes microseconds, whatever the trackers do."""
        began = time.perf_counter()
        try:
            self.lines.put_nowait(metrics)
            self.sent += 1
        except queue.Full:
            self.left_out += 1
        self._hear_news()
        self.seconds += time.perf_counter() - began

    def close(self, limit_s: float | None = None) -> None:
        """Give the process so many seconds (CLOSE_LIMIT_S) to send what it has, then end it."""
        limit_s = CLOSE_LIMIT_S if limit_s is None else limit_s
        process, self.process = self.process, None
        if process is None:
            return
        deadline = time.monotonic() + limit_s
        with contextlib.suppress(queue.Full):
            self.lines.put(None, timeout=max(0.0, limit_s / 2))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        late = process.poll() is None
        if late:
            process.kill()
            process.wait()
        self.reader.join(timeout=1.0)
        self._hear_news()
        if limit_s and (late or self.late or self.left_out):
            behind = self.late or {*self.names} - {*self.failed}
            names = " and ".join(name for name in self.names if name in behind)
            why = f"not all of it was taken within {limit_s:g} s" if late or self.late else ""
            why = why or f"{self.left_out} lines were left out"
            self.note(
                f"warning: {names}: {why}; `rloo sync {self.folder.name} NAME` sends all of it"
            )

    def _write_lines(self) -> None:
        process = self.process
        assert process is not None and process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # the process has ended: the reader says so
            while (line := self.lines.get()) is not None:
                process.stdin.write(json.dumps(line, default=str) + "\n")
                process.stdin.flush()
            process.stdin.close()

    def _read_news(self) -> None:
        process = self.process
        assert process is not None and process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            for text in process.stdout:
                with contextlib.suppress(ValueError):
                    self.news.put(json.loads(text))
        self.news.put({"ended": True})

    def _hear_news(self, timeout_s: float = 0.0) -> None:
        """Act on what the process has said; runs in the thread of the loop."""
        while True:
            try:
                said = self.news.get(timeout=timeout_s) if timeout_s else self.news.get_nowait()
            except queue.Empty:
                return
            timeout_s = 0.0
            name = str(said.get("tracker", ""))
            if said.get("ready"):
                self.ready.add(name)
                remember_tracker_run(self.folder, name, said.get("id"), said.get("url"))
                if said.get("url"):
                    self.note(f"{name}: {said['url']}")
            elif said.get("late"):
                self.late.add(name)
            elif "error" in said and name not in self.failed:
                self.failed[name] = str(said["error"])
                self.note(f"warning: {name}: {redact.redact_text(said['error'])}")
            elif said.get("ended") and self.process is not None:
                self.process = None
                self.note("warning: the process of the trackers has ended; metrics.jsonl goes on")


def remember_tracker_run(folder: Path, name: str, run_id: str | None, url: str | None) -> None:
    """Keep a tracker's id of this run in run.json: a resumed run goes on under it."""
    known, entry = known_tracker_runs(folder), {"id": run_id, "url": url}
    with contextlib.suppress(OSError, ValueError, TypeError):  # a run.json that is damaged is left
        update_json(folder / "run.json", trackers=known | {name: entry})
