"""The worker process of a tracker: it runs the tracker's client, which may do anything."""

import json
import sys
from pathlib import Path

from rloo_cli.reporting.trackers.kinds import TRACKERS, RunAbout, TrackerRun
from rloo_cli.utils.files import JsonObject

MAX_ERROR_CHARACTERS = 300


class TrackerWorkerCode:
    """Answers `start`, `log` and `finish` of one tracker; an exception becomes an `error`."""

    def __init__(self, about: JsonObject):
        self.about = about
        self.run: TrackerRun | None = None

    def prepare(self) -> None:
        """Import nothing: accelerate imports torch, whose threads a fork would lose."""

    def start(self) -> None:
        """Do nothing: a fork is ready."""

    def answer(self, message: JsonObject) -> bytes:
        """The JSON of an object: `id`, `url` and `known` for `start`; `error` for an exception."""
        try:
            if message["do"] == "start":
                answer = self._open(message["tracker"], {*message["metrics"]})
            else:
                assert self.run is not None
                answer = {}
                if message["do"] == "log":
                    self.run.log(message["line"])
                else:
                    self.run.finish()
        except BaseException as error:  # a client may raise anything, SystemExit too
            answer = {"error": error_line(error)}
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        return json.dumps(answer).encode()

    def _open(self, name: str, metrics: set[str]) -> JsonObject:
        """Open the run, and find the steps of which the tracker has these metrics."""
        try:
            self.run = TrackerRun(name, run_about(self.about, name))
            known = sorted(self.run.known_metrics(metrics))
        except ImportError as error:
            fix = f"pip install {TRACKERS[name].package}"
            return {"error": f"its package is missing ({error}): {fix}"}
        except BaseException as error:
            return {"error": f"it did not start: {error_line(error)}"}
        return {"id": self.run.run_id, "url": self.run.url, "known": known}


def run_about(about: JsonObject, name: str) -> RunAbout:
    """The data that this tracker gets about the run."""
    return RunAbout(
        Path(about["folder"]), about["project"], about["name"], about["config"],
        about["ids"].get(name),
    )  # fmt: skip


def error_line(error: BaseException) -> str:
    """An exception in one line."""
    text = str(error).strip().splitlines()
    name = type(error).__name__
    return f"{name}: {text[0][:MAX_ERROR_CHARACTERS]}" if text else name
