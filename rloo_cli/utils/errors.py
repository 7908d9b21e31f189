"""Errors shown to the user, in four parts (what, where, why, fix), and their exit codes.

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

FOUND_CODE = 20  # exit code of verbs that found what they look for
MAX_PROBLEMS_SHOWN = 20  # problems printed at once; the others are only counted


@dataclass(frozen=True)
class Problem:
    """One problem, and its fix."""

    what: str
    where: str = ""  # key + file:line, recipe name, or "command line"
    why: str = ""  # value found, value expected, the arithmetic
    fix: str = ""  # a line that can be pasted
    more: str = ""

    def render(self) -> str:
        """The printed block; control characters in quoted text are removed."""
        lines = [f"error: {self.what}"]
        for part in ("where", "why", "fix", "more"):
            text = getattr(self, part)
            if text:
                lines.append(f"  {part:<8} " + text.replace("\n", "\n" + " " * 11))
        return show_control_characters("\n".join(lines))


def distinct_problems(problems: Iterable[Problem]) -> list[Problem]:
    """The problems of several jobs, each once, with the place where the first job has it."""
    first: dict[tuple[str, ...], Problem] = {}
    for problem in problems:
        first.setdefault((problem.what, problem.why, problem.fix), problem)
    return [*first.values()]


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
    """The user's input is wrong; this includes missing files."""

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
    """Refuse user input: raise `error` with its four parts, without the previous error.

    key: the dotted key, file or variable. When a config is checked, `messages.locate_problem`
    replaces it by the key's file and line, or the command line. at: a row, line or checkpoint, if
    the key alone does not identify it. what, why, fix, more: as in `Problem`; an
    exception as `why` stands for its text.
    """
    where = f"{key}, {at}" if at else key
    reason = why if isinstance(why, str) else _first_lines(why)
    raise error(Problem(what, where, reason, fix, more)) from None


def value_problem(key: str, value: object, what: str, instead: object, why: str) -> Problem:
    """The problem of a key's value, for a rule: `KEY = VALUE` and the error, and
    `KEY=INSTEAD`, where `instead` can add alternatives."""
    return Problem(f"{key} = {value} {what}", key, why, f"{key}={instead}")


def clash_problems(
    setting: str, clashes: Iterable[tuple[bool, str, str, str, str]]
) -> Iterator[Problem]:
    """Conflicts with a setting, such as `generation.overlap=carry`.

    clashes: for each, whether the config has it, the key to name, what conflicts,
    why, and what to write instead.
    """
    for is_there, key, other, why, fix in clashes:
        if is_there:
            yield Problem(f"{other} does not go with {setting}", key, why, fix)


def _first_lines(error: BaseException) -> str:
    """An exception's message, with its type unless that is `ValueError` or `OSError`."""
    text = "\n".join(line[:300] for line in str(error).strip().splitlines()[:4])
    if text and isinstance(error, ValueError | OSError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def check_missing_library(error: Exception, key: str) -> None:
    """Raise MachineError if a library's error means that another library is missing or too old.

    Call it before turning such an error into another refusal, whose fix would mislead.
    """
    text = str(error).strip()
    if not isinstance(error, ImportError) and "version of PEFT" not in text:
        return
    why = "\n".join(line[:300] for line in text.splitlines()[:4])
    name = "peft" if "PEFT" in text else getattr(error, "name", None) or "NAME"
    fix = f"pip install --upgrade {name.partition('.')[0]}, in the version named above"
    what = "a library that this run needs is missing, or too old for the others"
    raise MachineError(Problem(what, key, why, fix)) from None


class DataError(RunError):
    """The data set does not match the config."""

    code = 4


class DamagedFile(DataError, ValueError):
    """An unreadable JSON file of a run. Its text is only the reason."""

    def __str__(self) -> str:
        return self.problems[0].why


class RewardError(RunError):
    """A reward failed, or returned an invalid score."""

    code = 5


class GenerationError(RunError):
    """The generation engine, the weight transfer, or a rank failed."""

    code = 6


class NumbersError(RunError):
    """Non-finite numbers, or no data left to learn from."""

    code = 7


class GuardError(NumbersError):
    """A guard set to `fail` fired; the run's state is complete."""


class StorageError(RunError):
    """A required save failed."""

    code = 8


DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG)


def disk_write_error(error: OSError) -> RunError:
    """A failed disk write as a StorageError. Re-raises any other error."""
    if error.errno not in DISK_ERRNOS:
        raise error
    what = "cannot write: the disk is full or read-only"
    where = str(error.filename or "this machine")
    fix = "free some space, or make it writable, then resume with resume=auto"
    return StorageError(Problem(what, where, str(error), fix))


class OutOfMemory(RunError):
    """A device ran out of memory."""

    code = 9


class TrackerError(RunError):
    """A required tracker or hub did not accept the run."""

    code = 10


class Stopped(RunError):
    """Stopped early on request. `at_once`: the signal's handler raised it, wherever it was."""

    code, at_once = 75, False


def require_package(key: str, package: str, extra: str, why: str, module: str = "") -> None:
    """Raises MachineError, with the line that installs it, if a package is missing.

    extra: of rloo-cli, that installs it. why: what needs it. module: its Python name, if that
    differs.
    """
    if _is_missing(module or package.replace("-", "_")):
        fix = f"pip install 'rloo-cli[{extra}]'"
        refuse(key, f"{package} is not installed", fix, why, error=MachineError)


def _is_missing(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:  # of its parent package
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
    """Print the error that ended a command or one of its processes. -> its exit code

    A RunError is printed as a refusal, an interrupt not at all, anything else as a bug, with its
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
