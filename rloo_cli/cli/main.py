"""`rloo VERB [flags] [key=value ...]`: find the verb, run it, and turn errors into exit codes.

Imports no torch, and Hydra only if a verb composes a config: `rloo --help` answers in under half a
second. Every error ends here, in one place, as an error block and an exit code.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module

from rloo_cli.cli import verb_parser
from rloo_cli.cli.verbs import VERBS
from rloo_cli.utils import console, environment, paths, redact
from rloo_cli.utils.errors import Problem, StorageError, print_error, print_exit

STOPPED = 75  # exit code of a run that saved after a request to stop
STDOUT_ONLY_VERBS = (  # verbs that write no file
    "plan", "recipes", "config", "runs", "top", "doctor", "replay", "reward", "samples", "ledger",
    "compare", "migrate", "docs", "completion",
)  # fmt: skip


class ExitStatus:
    """The exit code of the verb."""

    code = 0


def main() -> None:
    """The console script. Exits with the exit code of the first cause (docs/reference.md)."""
    console.open_descriptors()
    console.prepare_environment()
    if warning := paths.stand_in_for_home():
        print(f"warning: {warning}", file=sys.stderr)
    with redact.redacted_console():
        with _errors_to_exit_code() as status:
            environment.check_process_limits()
            verb = find_verb(_strip_error_flags(sys.argv[1:]))
            status.code = verb()
        code = status.code or _lost_output_code()
    if sys.flags.inspect:  # sys.exit would print a traceback and wait for input
        console.end_process(code)
    if code == STOPPED:  # a second signal during Python's shutdown would make the code 143
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(code)


@contextmanager
def _errors_to_exit_code() -> Iterator[ExitStatus]:
    """Turn every error into an error block and an exit code."""
    status = ExitStatus()
    try:
        yield status
    except (Exception, KeyboardInterrupt) as error:
        status.code = print_exit(error)


def _strip_error_flags(args: list[str]) -> list[str]:
    """The arguments without --debug and --errors=json, which say how errors are shown."""
    rest = iter(args)
    args = [f"{w}={next(rest, '')}" if w == "--errors" else w for w in rest]
    if "--debug" in args:
        os.environ["RLOO_DEBUG"] = "1"
    if "--errors=json" in args:
        os.environ["RLOO_ERRORS"] = "json"
    return [w for w in args if w not in ("--debug", "--errors=json")]


def _lost_output_code() -> int:
    """The exit code of a verb that only prints, if its output was lost."""
    sys.stdout.flush()
    lost: Exception | None = getattr(sys.stdout, "write_error", None)
    writes_no_file = bool({*STDOUT_ONLY_VERBS} & {*sys.argv[1:2]})
    if lost is None or isinstance(lost, BrokenPipeError) or not writes_no_file:
        return 0
    why = "this verb only prints"
    what, fix = f"cannot write to stdout: {lost}", "send it to a disk with space: > FILE"
    return print_error(StorageError(Problem(what, "stdout", why, fix)))


def find_verb(args: list[str]) -> Callable[[], int]:
    """The verb in these arguments, as a function that runs it and returns the exit code.

    Raises ConfigError for an unknown verb.
    """
    verb, *rest = args or ["--help"]
    if verb in ("--help", "-h", "help"):
        return partial(_print_help, *[name for name in rest[:1] if name in VERBS])
    if verb == "--version":
        return _print_version
    if verb not in VERBS:
        from rloo_cli.config.pasted import refuse_unknown_name  # lazy: only for a typo

        refuse_unknown_name("verb", verb, VERBS, "rloo NAME", "rloo --help")
    own_words = rest[:1] if verb == "migrate" else rest  # the others are an old command's
    if {"--help", "-h"} & {*own_words}:
        return partial(_print_help, verb)
    return partial(_run_verb, verb, rest)


def _print_help(verb: str = "") -> int:
    print(verb_parser.verb_help(verb) if verb else verb_parser.help_overview())
    return 0


def _print_version() -> int:
    from rloo_cli import __version__  # lazy: one flag's

    print(__version__)
    return 0


def _run_verb(verb: str, args: list[str]) -> int:
    """Run `rloo VERB`, importing its module only now: Hydra takes a third of a second."""
    name = verb.replace("-", "_")
    if verb in ("sft", "reward-model"):  # a section of the config each
        code: int = import_module("rloo_cli.cli.supervised").run(name, args)
    else:
        code = import_module(f"rloo_cli.cli.{name}").run(args)
    return code
