"""`rloo VERB [flags] [key=value ...]`: take the verb off, compose the config once, run the verb.

Imports no torch, and Hydra only where a verb composes a config: `rloo --help` answers in under
half a second. Every refusal ends here, in one place, as an error block and an exit code.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from rloo_cli.cli import verb_help
from rloo_cli.config import hf_cache
from rloo_cli.utils import console, redact
from rloo_cli.utils.errors import (
    ConfigError,
    Problem,
    RunError,
    StorageError,
    print_error,
    print_exit,
)

STOPPED_CODES = (75, 130)  # exit codes of a run that was asked to end
STDOUT_ONLY_VERBS = (  # verbs that write no file
    "plan", "recipes", "config", "samples", "ledger", "compare", "migrate", "completion",
)  # fmt: skip


class ExitStatus:
    """The exit code of what was done."""

    code = 0


def main() -> None:
    """The console script. Exits with the code of the first cause (docs/reference.md)."""
    console.open_descriptors()
    console.prepare_environment()
    with redact.redacted_console():
        with _errors_to_exit_code() as outcome:
            verb = find_verb(_strip_error_flags(sys.argv[1:]))
            outcome.code = verb()
        code = outcome.code or _lost_output_code()
    if code == STOPPED_CODES[0]:  # asked again while Python ends, we would end with 143 instead
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(code)


@contextmanager
def _errors_to_exit_code() -> Iterator[ExitStatus]:
    """Every refusal ends here: as an error block, and as an exit code."""
    outcome = ExitStatus()
    try:
        yield outcome
    except (Exception, KeyboardInterrupt) as error:
        outcome.code = print_exit(error)


def _strip_error_flags(args: list[str]) -> list[str]:
    """The words but for --debug and --errors=json, which say how errors are shown."""
    rest = iter(args)
    words = [f"{w}={next(rest, '')}" if w == "--errors" else w for w in rest]
    flags = {w for w in words if w in ("--debug", "--errors=json")}
    if "--debug" in flags:
        os.environ["RLOO_DEBUG"] = "1"
    if "--errors=json" in flags:
        os.environ["RLOO_ERRORS"] = "json"
    return [w for w in words if w not in flags]


def _lost_output_code() -> int:
    """The code of a verb whose whole work is what it prints, where that could not be printed."""
    sys.stdout.flush()
    lost: Exception | None = getattr(sys.stdout, "write_error", None)
    if (
        lost is None
        or isinstance(lost, BrokenPipeError)
        or not {*STDOUT_ONLY_VERBS} & {*sys.argv[1:2]}
    ):
        return 0
    why = "what this verb prints is all that it does"
    return print_error(StorageError(Problem(f"stdout takes nothing more: {lost}", "stdout", why)))


def find_verb(args: list[str]) -> Callable[[], int]:
    """What these words ask for; calling it does that, and gives the exit code.

    Raises ConfigError for a verb that there is not.
    """
    verb, *rest = args or ["--help"]
    if verb in ("--help", "-h", "help"):
        if rest and rest[0] in VERBS:
            return partial(_print, verb_help.verb_help_text, rest[0])
        return partial(_print, verb_help.help_overview)
    if verb == "--version":
        return partial(_print, _version)
    if verb in VERBS and verb != "migrate" and {"--help", "-h"} & {*rest}:
        return partial(_print, verb_help.verb_help_text, verb)
    if verb not in VERBS:
        from rloo_cli.config.old_names import nearest_names  # lazy: only for a slip

        close = nearest_names(verb, VERBS)
        fix = f"rloo {close[0]}" if close else "rloo --help"
        why = f"verbs: {', '.join(VERBS)}"
        raise ConfigError(Problem(f"rloo has no verb {verb!r}", "command line", why, fix))
    return partial(VERBS[verb], rest)


def _print(text: Callable[..., str], *args: str) -> int:
    print(text(*args))
    return 0


def _version() -> str:
    from rloo_cli import __version__  # lazy: the version is asked for alone

    return __version__


def run_train(args: list[str]) -> int:
    """`rloo train`: compose, check, then run or plan, once per job of a sweep."""
    from rloo_cli.cli import multirun  # lazy: Hydra takes a third of a second
    from rloo_cli.cli.hydra_app import HydraApp  # lazy: as slow
    from rloo_cli.cli.plan import dry_run  # lazy: as slow
    from rloo_cli.config import check  # lazy: as slow
    from rloo_cli.launch import launcher  # lazy: as slow

    dry = "--dry-run" in args
    app = HydraApp([w for w in args if w != "--dry-run"])
    codes: list[int] = []

    def task(cfg: Any) -> float | None:
        value = None
        with app.job(cfg) as job:
            if codes and codes[-1] in STOPPED_CODES:  # a sweep that was asked to stop
                return None
            try:
                with hf_cache.recorded_command(job.composed.user_overrides):
                    start = dry_run if dry else launcher.launch_run
                    job.code = start(job.composed, multirun=job.multirun)
                if job.multirun and job.code == 0 and not dry:
                    value = multirun.objective_value(
                        check.check_config(launcher.name_sweep_job(job.composed))
                    )
            except RunError as error:  # not raised: a failed job does not stop a sweep
                job.code = print_error(error)
            codes.append(job.code)
        return value

    try:
        with app.running():
            app.decorate(task)()
    except ConfigError as error:
        if not codes:
            raise
        what, why = f"Hydra's sweeper gave up after {len(codes)} jobs", error.problems[0].what
        codes.append(print_error(ConfigError(Problem(what, "hydra/sweeper", why))))
    codes += app.exit_codes
    if len(codes) > 1:  # jobs, and what a sweeper of Hydra's said
        failed = sum(code != 0 for code in codes)
        print(f"{len(codes)} jobs, {failed} failed")
    return next((code for code in codes if code), 0)


def _lazy_verb(name: str) -> Callable[[list[str]], int]:
    """A verb of rloo_cli/cli, imported when it is called."""

    def verb(words: list[str]) -> int:
        from importlib import import_module

        code: int = import_module(f"rloo_cli.cli.{name}").run(words)
        return code

    return verb


def _supervised_verb(section: str) -> Callable[[list[str]], int]:
    """`rloo sft`, `rloo reward-model`: a training that comes before RLOO."""

    def verb(words: list[str]) -> int:
        from rloo_cli.cli import supervised  # lazy: one verb's

        return supervised.run(section, words)

    return verb


def run_sweep(args: list[str]) -> int:
    """`rloo sweep`: several configurations side by side; its commands for other terminals."""
    from rloo_cli.cli import sweep  # lazy: one verb's
    from rloo_cli.cli.hydra_app import HydraApp  # lazy: Hydra takes a third of a second

    def compose_jobs(given: list[str]) -> list[Any]:
        app, found = HydraApp(["--multirun", *given]), []

        def task(cfg: Any) -> None:
            with app.job(cfg) as job:
                found.append(job.composed)

        with app.running():
            app.decorate(task)()
        return found

    return sweep.run(args, compose_jobs)


def run_vllm_serve(args: list[str]) -> int:
    """`rloo vllm-serve`: a rollout server, until it is asked to end."""
    from rloo_cli.cli import vllm_serve  # lazy: one verb's

    return vllm_serve.run(args)


VERBS: dict[str, Callable[[list[str]], int]] = {
    "train": run_train,
    "sweep": run_sweep,
    "sft": _supervised_verb("sft"),
    "reward-model": _supervised_verb("reward_model"),
    "vllm-serve": run_vllm_serve,
    "eval": _lazy_verb("eval"),
    "fetch": _lazy_verb("fetch"),
    "plan": _lazy_verb("plan"),
    "recipes": _lazy_verb("recipes"),
    "config": _lazy_verb("config"),
    "samples": _lazy_verb("samples"),
    "ledger": _lazy_verb("ledger"),
    "curves": _lazy_verb("curves"),
    "compare": _lazy_verb("compare"),
    "slurm": _lazy_verb("slurm"),
    "migrate": _lazy_verb("migrate"),
    "completion": _lazy_verb("completion"),
}
