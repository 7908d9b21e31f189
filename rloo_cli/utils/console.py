"""Writing to stdout and stderr so that no character, full disk or closed terminal makes it fail.

A run's output is also in its folder. So once the console fails (a closed pipe, /dev/full, a reward
that closed file descriptor 1), nothing more is written to it, and the run goes on.
"""

import contextlib
import errno
import fcntl
import locale
import os
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TextIO

from rloo_cli.utils import heartbeat

SIGNS = {i: 0x2400 + i for i in range(32)} | str.maketrans("\t\xa0\u3000", "   ")
# Colours, moves within the drawn lines, a hidden cursor: all that rich, progress bars and coloured
# logs need. Any other sequence can set a title, fill the clipboard or make the terminal type
# something.
DRAWING_SEQUENCE = r"\x1b\[[0-9;]*[mABCDGK]|\x1b\[\?25[lh]"
COMMAND = re.compile(rf"({DRAWING_SEQUENCE})|[\x00-\x07\x0b\x0c\x0e-\x1f\x7f-\x9f]")
MIN_SPARE_DESCRIPTOR = 64  # copies of descriptors 1 and 2 get at least this number
_spare_descriptors: dict[int, int] = {}  # 1 and 2 -> their copies from `open_descriptors`
_saved_streams: dict[str, object] = {}  # "stdout" and "stderr" -> those found by `keep_streams`


def show_control_characters(text: str) -> str:
    """The same lines, with a visible sign for each control and invisible character.

    Text from a model, a server or a data set could otherwise control the terminal.
    """
    return "\n".join(_visible_line(line) for line in text.replace("\r\n", "\n").split("\n"))


def _visible_line(line: str) -> str:
    shown = line.translate(SIGNS)
    return shown if shown.isprintable() else "".join(c if c.isprintable() else "�" for c in shown)


def disarm_commands(text: str) -> str:
    """The same text, with a visible sign for terminal sequences beyond drawing."""
    return COMMAND.sub(lambda found: found[1] or _visible_line(found[0]), text)


class SafeStream:
    """A text stream whose writes never raise. `write_error`: the error that stopped all writing."""

    def __init__(self, inner: TextIO):
        self.inner = inner
        self.write_error: Exception | None = None
        with contextlib.suppress(Exception):  # the caller's stream may lack this method
            inner.reconfigure(errors="backslashreplace")  # type: ignore[attr-defined]

    def write(self, text: str) -> int:
        """Write a text, with an escape for each character that the console cannot show."""
        try:
            self.inner.write(text)
        except UnicodeEncodeError:
            encoding = getattr(self.inner, "encoding", None) or "ascii"
            shown = text.encode(encoding, "backslashreplace").decode(encoding)
            self._retry_write(lambda: self.inner.write(shown))
        except (OSError, ValueError) as error:
            self._recover(error)
            self._retry_write(lambda: self.inner.write(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each of these texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Send what is buffered."""
        try:
            self.inner.flush()
        except (OSError, ValueError) as error:
            self._recover(error)
            self._retry_write(self.inner.flush)

    def close(self) -> None:
        """Only flush: a reward that closes sys.stdout must not close the run's stdout."""
        self.flush()

    def _retry_write(self, action: Callable[[], object]) -> None:
        try:
            action()
        except (OSError, ValueError) as error:
            self._give_up(error)

    def _recover(self, error: Exception) -> None:
        """Reopen the console if user code closed it; else give up."""
        if isinstance(error, OSError) and error.errno != errno.EBADF:
            self._give_up(error)
            return
        restore_descriptors()
        if getattr(self.inner, "closed", False):
            number = 2 if self.inner is sys.__stderr__ else 1
            with contextlib.suppress(OSError):
                self.inner = open(number, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115

    def _give_up(self, error: Exception) -> None:
        """Send everything to /dev/null: buffered text must not fail again at exit."""
        self.write_error = self.write_error or error
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.inner.fileno())
            os.close(null)
            self.inner.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def guard_stream(stream: TextIO | None) -> SafeStream:
    """A stream around this one that never fails. For None (sys.stdout closed when Python started)
    it discards everything."""
    if isinstance(stream, SafeStream):
        return stream
    return SafeStream(open(os.devnull, "w", encoding="utf-8") if stream is None else stream)


def open_descriptors() -> None:
    """Open descriptors 0 to 2 if they are closed, and keep copies of 1 and 2.

    Otherwise the next opened file would become descriptor 1, and receive the output of libraries.
    """
    while (null := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(null, True)
    os.close(null)
    for number in (1, 2):
        if number not in _spare_descriptors:
            try:
                copy = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, MIN_SPARE_DESCRIPTOR)
            except OSError:  # too few open files allowed: `check_process_limits` reports it
                copy = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3)
            _spare_descriptors[number] = copy


def restore_descriptors() -> None:
    """Reopen descriptors 1 and 2 if a reward has closed them."""
    for number, copy in _spare_descriptors.items():
        try:
            os.fstat(number)
        except OSError:
            with contextlib.suppress(OSError):  # the copy is closed as well
                os.dup2(copy, number)


def keep_streams() -> None:
    """Remember sys.stdout and sys.stderr for `restore_streams`."""
    _saved_streams.update(stdout=sys.stdout, stderr=sys.stderr)


def restore_streams() -> None:
    """Undo what user code did to the console: streams that it replaced, descriptors it closed."""
    restore_descriptors()
    for name, stream in _saved_streams.items():
        setattr(sys, name, stream)


def forget_streams() -> None:
    """Undo `keep_streams`: the console belongs to the caller again."""
    _saved_streams.clear()


def end_process(code: int) -> NoReturn:
    """Flush the console, mark the exit as our own, and exit at once.

    A reward's hanging thread must not delay the exit.
    """
    restore_streams()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    heartbeat.mark_end()
    os._exit(code)


def prepare_environment() -> None:
    """Set what child processes inherit: UTF-8 files, a console for all characters, asserts.

    A process whose locale is not UTF-8 re-executes itself in Python's UTF-8 mode: libraries open
    files in the locale's encoding.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    os.environ["PYTHONIOENCODING"] = f"{encoding}:backslashreplace"
    os.environ.pop("PYTHONOPTIMIZE", None)  # transformers cannot be imported without docstrings
    has_restarted = os.environ.get("PYTHONUTF8") == "1"
    os.environ["PYTHONUTF8"] = "1"
    encodings = (sys.getfilesystemencoding(), locale.getpreferredencoding(False))
    if not has_restarted and any(e.lower().replace("-", "") != "utf8" for e in encodings):
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
