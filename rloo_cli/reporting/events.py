"""Callbacks: user code that is notified when a run starts, logs, evaluates, saves and ends.

`logging.events=[file.py:Class]` names subclasses of `Events`. They get numbers and paths, never
the run: they can only end the training (`wants_end`), and an error in one is a warning.
Only the first process of a run calls them, and waits until they return.
"""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path

from rloo_cli.config.user_code import exception_text, load_user_code
from rloo_cli.utils.errors import refuse
from rloo_cli.utils.files import JsonObject

KEY = "logging.events"


class Events:
    """The events of a run; each method does nothing unless a subclass overrides it."""

    def on_start(self, folder: Path, config: JsonObject) -> None:
        """The run in `folder` starts or resumes: its models are loaded."""

    def on_step(self, step: int, metrics: JsonObject) -> None:
        """A line of metrics.jsonl was written, for the steps up to this one."""

    def on_evaluation(self, step: int, metrics: JsonObject) -> None:
        """The weights after this many steps were evaluated."""

    def on_save(self, step: int, folder: Path) -> None:
        """A checkpoint is complete, in `folder`."""

    def on_end(self, summary: JsonObject) -> None:
        """The run has ended, with the content of summary.json."""

    def on_error(self, error: str, code: int) -> None:
        """The run ends before its last step: the error as printed, and the exit code."""

    def wants_end(self) -> bool:
        """Whether the training ends with the step that was just made, as if it were the last.

        It is called after each step; the run is then evaluated, saved and finished as usual.
        """
        return False


class EventSender:
    """Calls all listeners, one after the other. `warn` shows a line to the user."""

    def __init__(self, listeners: Sequence[Events] = (), warn: Callable[[str], None] = print):
        self.listeners, self.warn = listeners, warn
        self.failed: set[tuple[int, str]] = set()  # listener and method: warned once

    def send(self, note: str, *values: object) -> None:
        """Call the method `note` of each listener with copies of these values."""
        for number, listener in enumerate(self.listeners):
            try:
                getattr(listener, note)(*copy.deepcopy(values))
            except BaseException as error:  # also SystemExit raised by user code
                self._warn_once(number, note, error)

    def end_asked(self) -> bool:
        """Whether a listener ends the training here."""
        asked = False
        for number, listener in enumerate(self.listeners):
            try:
                if listener.wants_end():
                    self.warn(f"{type(listener).__name__} ends the training with this step")
                    asked = True
            except BaseException as error:  # as in send
                self._warn_once(number, "wants_end", error)
        return asked

    def _warn_once(self, number: int, note: str, error: BaseException) -> None:
        if (number, note) not in self.failed:
            self.failed.add((number, note))
            name, why = type(self.listeners[number]).__name__, f"{type(error).__name__}: {error}"
            self.warn(f"warning: {KEY}: {name}.{note} failed, the run continues: {why}")


def load_listeners(specs: Sequence[str]) -> list[Events]:
    """The listeners of `logging.events`, constructed without arguments. Raises ConfigError."""
    found = []
    for spec in specs:
        kind = load_user_code(spec, KEY)
        if not (isinstance(kind, type) and issubclass(kind, Events)):
            fix = "class Mine(Events), as docs/inspect.md shows"
            why = f"found {kind!r:.80}, expected a subclass of Events"
            refuse(KEY, f"{spec} is not a subclass of Events", fix, why)
        try:
            found.append(kind())
        except BaseException as error:  # user code
            fix = f"fix {spec}: it is called without arguments"
            refuse(KEY, f"{spec} cannot be constructed", fix, exception_text(error))
    return found
