"""Errors that are shown to the user, in four parts (what, where, why, fix), and their exit codes.

Every refusal of ours is a `RunError` that holds one or more `Problem`s. Anything else that
reaches `main` is a bug in rloo and exits with 1.
"""

import errno
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, astuple, dataclass
from typing import NoReturn

from rloo_cli.utils import redact
from rloo_cli.utils.console import show_control_characters

FOUND_CODE = 20  # of verbs that look for something, where they found it
MAX_PROBLEMS_SHOWN = 20  # problems printed at once; only the number of the others is


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, and what would be right."""

    what: str
    where: str = ""  # key + file:line, recipe name, or "command line"
    why: str = ""  # value found, value expected, the arithmetic
    fix: str = ""  # a line that can be pasted
    more: str = ""

    def render(self) -> str:
        """The block that is printed, without control characters, whoever wrote what is quoted."""
        lines = [f"error: {self.what}"]
        for part in ("where", "why", "fix", "more"):
            text = getattr(self, part)
            if text:
                lines.append(f"  {part:<8} " + text.replace("\n", "\n" + " " * 11))
        return show_control_characters("\n".join(lines))


class RunError(Exception):
    """A refusal with an exit code (docs/reference.md). `code` is the process's exit status."""

    code = 1

    def __init__(self, *problems: Problem | str):
        whole = [Problem(p) if isinstance(p, str) else p for p in problems]
        self.problems = [Problem(*map(redact.redact_text, astuple(p))) for p in whole]
        super().__init__("\n".join(p.render() for p in self.problems))

    def render(self, as_json: bool = False) -> str:
        if as_json:
            import json  # lazy: one flag's

            return json.dumps([asdict(p) | {"code": self.code} for p in self.problems], indent=2)
        blocks = [p.render() for p in self.problems[:MAX_PROBLEMS_SHOWN]]
        if len(self.problems) > MAX_PROBLEMS_SHOWN:
            blocks.append(f"... and {len(self.problems) - MAX_PROBLEMS_SHOWN} more")
        return "\n\n".join(blocks)


class ConfigError(RunError):
    """What the user wrote is wrong, including a named file that is missing."""

    code = 2


class MachineError(RunError):
    """The machine lacks something: a package, a device, disk space, network, a cached download."""

    code = 3


def refuse(
    key: str,
    what: str,
    fix: str,
    why: str | BaseException = "",
    *,
    at: str = "",
    more: str = "",
    error: type[RunError] = ConfigError,
) -> NoReturn:
    """Refuse what a user wrote: raise `error` with its four parts, without the error before it.

    key: the dotted key, file or variable. Where the config is checked, `messages.locate_problem`
    puts the file and line of a key, or the command line, in its place. at: a row, line or
    checkpoint, where the key alone does not say it. what, why, fix, more: as in `Problem`; an
    exception as `why` stands for its text.
    """
    where = f"{key}, {at}" if at else key
    reason = why if isinstance(why, str) else _first_lines(why)
    raise error(Problem(what, where, reason, fix, more)) from None


def value_problem(key: str, value: object, what: str, instead: object, why: str) -> Problem:
    """The problem of a key's value, for a rule: `KEY = VALUE` and what is wrong with it, and
    `KEY=INSTEAD`, where `instead` may go on with other ways out."""
    return Problem(f"{key} = {value} {what}", key, why, f"{key}={instead}")


def clash_problems(
    setting: str, clashes: Iterable[tuple[bool, str, str, str, str]]
) -> Iterator[Problem]:
    """The problems of what does not go with a setting, such as `generation.overlap=carry`.

    clashes: of each whether the config has it, the key to name, what does not go with the setting,
    why, and what to write instead.
    """
    for is_there, key, other, why, fix in clashes:
        if is_there:
            yield Problem(f"{other} does not go with {setting}", key, why, fix)


def _first_lines(error: BaseException) -> str:
    """What an exception says, with its type where that says more than `ValueError` or `OSError`."""
    text = "\n".join(line[:300] for line in str(error).strip().splitlines()[:4])
    if text and isinstance(error, ValueError | OSError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def check_missing_library(error: Exception, key: str) -> None:
    """Raise MachineError where a library's error says that another library is missing or too old.

    To be called first where such an error becomes a rule of ours: its fix would mislead.
    """
    text = str(error).strip()
    if not isinstance(error, ImportError) and "version of PEFT" not in text:
        return
    why = "\n".join(line[:300] for line in text.splitlines()[:4])
    name = "peft" if "PEFT" in text else getattr(error, "name", None) or "NAME"
    fix = (
        f"pip install --upgrade {name.partition('.')[0]}, in the version that the line above names"
    )
    what = "a library that this run needs is missing, or too old for the others"
    raise MachineError(Problem(what, key, why, fix)) from None


class DataError(RunError):
    """The data set is not what the config says it is."""

    code = 4


class DamagedFile(DataError, ValueError):
    """A JSON file of a run that cannot be read. As a text it is the bare reason."""

    def __str__(self) -> str:
        return self.problems[0].why


class RewardError(RunError):
    """A reward failed, or returned something that is not a score."""

    code = 5


class GenerationError(RunError):
    """The generation engine, the weight transfer, or a rank failed."""

    code = 6


class NumbersError(RunError):
    """Non-finite numbers, or nothing left to learn from."""

    code = 7


class GuardError(NumbersError):
    """A guard that the config sets to `fail` saw what it looks for; the run's state is whole."""


class StorageError(RunError):
    """A save that had to succeed did not."""

    code = 8


DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG)


def disk_write_error(error: OSError) -> RunError:
    """A write that failed because of the disk, as a StorageError. Raises any other error again."""
    if error.errno not in DISK_ERRNOS:
        raise error
    what, where = "the disk does not take what is written", str(error.filename or "this machine")
    fix = "free some space, or make it writable, then go on with resume=auto"
    return StorageError(Problem(what, where, str(error), fix))


class OutOfMemory(RunError):
    """A device ran out of memory."""

    code = 9


class TrackerError(RunError):
    """A tracker or a hub that was required did not take the run."""

    code = 10


class Stopped(RunError):
    """Stopped early on request. `at_once`: the signal's handler raised it, wherever that was."""

    code, at_once = 75, False


def require_package(key: str, package: str, extra: str, why: str, module: str = "") -> None:
    """Raises MachineError, with the line that installs it, if a package is missing.

    extra: of rloo-cli, that brings it. why: what needs it. module: its name in Python, where that
    is another.
    """
    if _is_missing(module or package.replace("-", "_")):
        fix = f"pip install 'rloo-cli[{extra}]'"
        refuse(key, f"{package} is not installed", fix, why, error=MachineError)


def _is_missing(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:  # of the package that it is in
        return True


def require_packages(extra: str, what: str, *modules: str) -> None:
    """`require_package` for several modules. what: what needs them, such as `rloo report`."""
    for module in modules:
        package = module.replace("_", "-")
        require_package("this machine", package, extra, f"{what} needs it", module)


def print_error(error: RunError) -> int:
    """Print a refusal (RLOO_ERRORS=json: as JSON; RLOO_DEBUG: with a traceback). -> exit code"""
    if os.environ.get("RLOO_DEBUG"):
        _print_traceback(error)
    print(error.render(as_json=os.environ.get("RLOO_ERRORS") == "json"), file=sys.stderr)
    return error.code


def print_exit(error: BaseException, advice: str = "please report it with the lines above") -> int:
    """Print what ended a command or one of its processes. -> the exit code that goes with it

    A refusal of ours is printed as it is, an interrupt not at all, anything else as a bug, with its
    traceback and `advice`.
    """
    if isinstance(error, RunError):
        return print_error(error)
    if isinstance(error, KeyboardInterrupt):
        return 130
    _print_traceback(error)
    print(f"error: this is a bug in rloo; {advice}", file=sys.stderr)
    return 1


def _print_traceback(error: BaseException) -> None:
    import traceback  # lazy: for bugs, and for --debug

    trace = "".join(traceback.format_exception(error))
    print(show_control_characters(trace), end="", file=sys.stderr)
