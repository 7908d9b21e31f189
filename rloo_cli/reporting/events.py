"""What a run tells code of the user's: that it began, made a step, was evaluated, saved, ended.

`logging.events=[file.py:Class]` names subclasses of `Events`. They are told numbers and paths, and
never the run: all that they can change is its end (`wants_end`), and an error in one is a warning.
The first process of a run tells them, and waits while they are told.
"""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path

from rloo_cli.config.user_code import exception_text, load_user_code
from rloo_cli.utils.errors import refuse
from rloo_cli.utils.files import JsonObject

KEY = "logging.events"


class Events:
    """The notes of a run; each does nothing until a subclass says what it does."""

    def on_start(self, folder: Path, config: JsonObject) -> None:
        """The run in `folder` begins, or goes on: its models are loaded."""

    def on_step(self, step: int, metrics: JsonObject) -> None:
        """A line of metrics.jsonl was written, of the steps up to this one."""

    def on_evaluation(self, step: int, metrics: JsonObject) -> None:
        """The weights after this many steps were evaluated."""

    def on_save(self, step: int, folder: Path) -> None:
        """A checkpoint is whole, in `folder`."""

    def on_end(self, summary: JsonObject) -> None:
        """The run has ended, with the content of summary.json."""

    def on_error(self, error: str, code: int) -> None:
        """The run ends without its last step: the error as printed, and the exit code."""

    def wants_end(self) -> bool:
        """Whether the training ends with the step that was just made, as if it were the last.

        It is asked after each step; the run is then evaluated, saved and finished as always.
        """
        return False


class EventSender:
    """Tells all listeners, one after the other. `warn` shows a line to the user."""

    def __init__(self, listeners: Sequence[Events] = (), warn: Callable[[str], None] = print):
        self.listeners, self.warn = listeners, warn
        self.failed: set[tuple[int, str]] = set()  # listener and note: said once

    def send(self, note: str, *values: object) -> None:
        """Call the method `note` of each listener with copies of these values."""
        for number, listener in enumerate(self.listeners):
            try:
                getattr(listener, note)(*copy.deepcopy(values))
            except BaseException as error:  # also SystemExit, KeyboardInterrupt: no signal of ours
                self._warn_once(number, note, error)

    def end_asked(self) -> bool:
        """Whether a listener wants the training to end here."""
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
            self.warn(f"warning: {KEY}: {name}.{note} failed, and the run goes on: {why}")


def load_listeners(specs: Sequence[str]) -> list[Events]:
    """The listeners that `logging.events` names, made without arguments. Raises ConfigError."""
    found = []
    for spec in specs:
        kind = load_user_code(spec, KEY)
        if not (isinstance(kind, type) and issubclass(kind, Events)):
            fix = "class Mine(Events), as docs/inspect.md shows"
            why = f"found {kind!r:.80}, expected a class that is based on Events"
            refuse(KEY, f"{spec} is not a class of Events", fix, why)
        try:
            found.append(kind())
        except BaseException as error:  # it is the user's code
            fix = f"correct {spec}: it is called without arguments"
            refuse(KEY, f"{spec} cannot be made", fix, exception_text(error))
    return found
