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
    print_bug,
    print_error,
)

STOPPED = (75, 130)  # exit codes of a run that was asked to end
PRINTS = (  # verbs that write no file
    "plan", "recipes", "config", "samples", "ledger", "compare", "migrate", "completion",
)  # fmt: skip


class Outcome:
    """The exit code of what was done."""

    code = 0


def main() -> None:
    """The console script. Exits with the code of the first cause (docs/reference.md)."""
    console.open_descriptors()
    console.prepare_environment()
    with redact.everywhere():
        with _exit_code() as outcome:
            verb = find_verb(_without_own_flags(sys.argv[1:]))
            outcome.code = verb()
        code = outcome.code or _unwritten()
    if code == STOPPED[0]:  # asked again while Python ends, we would end with 143 instead
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(code)


@contextmanager
def _exit_code() -> Iterator[Outcome]:
    """Every refusal ends here: as an error block, and as an exit code."""
    outcome = Outcome()
    try:
        yield outcome
    except RunError as error:
        outcome.code = print_error(error)
    except KeyboardInterrupt:
        outcome.code = 130
    except Exception:
        outcome.code = print_bug("please report it with the lines above")


def _without_own_flags(given: list[str]) -> list[str]:
    """The words but for --debug and --errors=json, which say how errors are shown."""
    rest = iter(given)
    words = [f"{w}={next(rest, '')}" if w == "--errors" else w for w in rest]
    flags = {w for w in words if w in ("--debug", "--errors=json")}
    if "--debug" in flags:
        os.environ["RLOO_DEBUG"] = "1"
    if "--errors=json" in flags:
        os.environ["RLOO_ERRORS"] = "json"
    return [w for w in words if w not in flags]


def _unwritten() -> int:
    """The code of a verb whose whole work is what it prints, where that could not be printed."""
    sys.stdout.flush()
    lost: Exception | None = getattr(sys.stdout, "lost", None)
    if lost is None or isinstance(lost, BrokenPipeError) or not {*PRINTS} & {*sys.argv[1:2]}:
        return 0
    why = "what this verb prints is all that it does"
    return print_error(StorageError(Problem(f"stdout takes nothing more: {lost}", "stdout", why)))


def find_verb(words: list[str]) -> Callable[[], int]:
    """What these words ask for; calling it does that, and gives the exit code.

    Raises ConfigError for a verb that there is not.
    """
    verb, *rest = words or ["--help"]
    if verb in ("--help", "-h", "help"):
        if rest and rest[0] in VERBS:
            return partial(_print, verb_help.of_verb, rest[0])
        return partial(_print, verb_help.overview)
    if verb == "--version":
        return partial(_print, _version)
    if verb in VERBS and verb != "migrate" and {"--help", "-h"} & {*rest}:
        return partial(_print, verb_help.of_verb, verb)
    if verb not in VERBS:
        from rloo_cli.config.old_names import nearest  # lazy: only for a slip

        close = nearest(verb, VERBS)
        fix = f"rloo {close[0]}" if close else "rloo --help"
        why = f"verbs: {', '.join(VERBS)}"
        raise ConfigError(Problem(f"rloo has no verb {verb!r}", "command line", why, fix))
    return partial(VERBS[verb], rest)


def _print(text: Callable[..., str], *words: str) -> int:
    print(text(*words))
    return 0


def _version() -> str:
    from rloo_cli import __version__  # lazy: the version is asked for alone

    return __version__


def train(words: list[str]) -> int:
    """`rloo train`: compose, check, then run or plan, once per job of a sweep."""
    from rloo_cli.cli import multirun  # lazy: Hydra takes a third of a second
    from rloo_cli.cli.hydra_app import HydraApp  # lazy: as slow
    from rloo_cli.cli.plan import dry_run  # lazy: as slow
    from rloo_cli.config import check  # lazy: as slow
    from rloo_cli.launch import launcher  # lazy: as slow

    dry = "--dry-run" in words
    app = HydraApp([w for w in words if w != "--dry-run"])
    codes: list[int] = []

    def task(cfg: Any) -> float | None:
        value = None
        with app.job(cfg) as job:
            if codes and codes[-1] in STOPPED:  # a sweep that was asked to stop
                return None
            try:
                with hf_cache.remembered(job.composed.words):
                    start = dry_run if dry else launcher.train
                    job.code = start(job.composed, multirun=job.multirun)
                if job.multirun and job.code == 0 and not dry:
                    value = multirun.objective(check.check(launcher.apart(job.composed)))
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
    codes += app.codes
    if len(codes) > 1:  # jobs, and what a sweeper of Hydra's said
        failed = sum(code != 0 for code in codes)
        print(f"{len(codes)} jobs, {failed} failed")
    return next((code for code in codes if code), 0)


def _tool(name: str) -> Callable[[list[str]], int]:
    """A verb of rloo_cli/cli, imported when it is called."""

    def verb(words: list[str]) -> int:
        from importlib import import_module

        code: int = import_module(f"rloo_cli.cli.{name}").run(words)
        return code

    return verb


def _training(section: str) -> Callable[[list[str]], int]:
    """`rloo sft`, `rloo reward-model`: a training that comes before RLOO."""

    def verb(words: list[str]) -> int:
        from rloo_cli.cli import supervised  # lazy: one verb's

        return supervised.run(section, words)

    return verb


def sweep(words: list[str]) -> int:
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

    return sweep.run(words, compose_jobs)


def serve(words: list[str]) -> int:
    """`rloo vllm-serve`: a rollout server, until it is asked to end."""
    from rloo_cli.cli import vllm_serve  # lazy: one verb's

    return vllm_serve.run(words)


VERBS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "sweep": sweep,
    "sft": _training("sft"),
    "reward-model": _training("reward_model"),
    "vllm-serve": serve,
    "eval": _tool("eval"),
    "fetch": _tool("fetch"),
    "plan": _tool("plan"),
    "recipes": _tool("recipes"),
    "config": _tool("config"),
    "samples": _tool("samples"),
    "ledger": _tool("ledger"),
    "curves": _tool("curves"),
    "compare": _tool("compare"),
    "slurm": _tool("slurm"),
    "migrate": _tool("migrate"),
    "completion": _tool("completion"),
}
