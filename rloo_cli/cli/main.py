"""`rloo VERB [flags] [key=value ...]`: take the verb off, compose the config once, run the verb.

Imports no torch, and Hydra only where a verb composes a config: `rloo --help` answers in under
half a second. Every refusal ends here, in one place, as an error block and an exit code.
"""

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rloo_cli.cli import verb_help
from rloo_cli.config import hf_cache
from rloo_cli.utils import console, paths, redact
from rloo_cli.utils.errors import (
    ConfigError,
    Problem,
    RunError,
    StorageError,
    print_bug,
    print_error,
)

TAKES_VALUE = ("--config-dir", "-cd", "--cfg", "-c", "--package", "-p")
STOPPED = (75, 130)  # exit codes of a run that was asked to end
PRINTS = (  # verbs that write no file
    "plan", "recipes", "config", "samples", "ledger", "compare", "migrate", "completion",
)  # fmt: skip
HYDRA_FLAGS = (*TAKES_VALUE, "--multirun", "-m", "--resolve")


def main() -> None:
    """The console script. Exits with the code of the first cause (docs/reference.md)."""
    console.open_descriptors()
    console.prepare_environment()
    with redact.everywhere():
        code = _main()
        code = code or _unwritten()
    if code == STOPPED[0]:  # asked again while Python ends, we would end with 143 instead
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(code)


def _unwritten() -> int:
    """The code of a verb whose whole work is what it prints, where that could not be printed."""
    sys.stdout.flush()
    lost: Exception | None = getattr(sys.stdout, "lost", None)
    if lost is None or isinstance(lost, BrokenPipeError) or not {*PRINTS} & {*sys.argv[1:2]}:
        return 0
    why = "what this verb prints is all that it does"
    return print_error(StorageError(Problem(f"stdout takes nothing more: {lost}", "stdout", why)))


def _main() -> int:
    given = iter(sys.argv[1:])
    words = [f"{w}={next(given, '')}" if w == "--errors" else w for w in given]
    flags = {w for w in words if w in ("--debug", "--errors=json")}
    if "--debug" in flags:
        os.environ["RLOO_DEBUG"] = "1"
    if "--errors=json" in flags:
        os.environ["RLOO_ERRORS"] = "json"
    try:
        code = dispatch([w for w in words if w not in flags])
    except RunError as error:
        code = print_error(error)
    except KeyboardInterrupt:
        code = 130
    except Exception:
        code = print_bug("please report it with the lines above")
    return code


def dispatch(words: list[str]) -> int:
    """Run one verb; its exit code."""
    verb, *rest = words or ["--help"]
    if verb in ("--help", "-h", "help"):
        print(verb_help.of_verb(rest[0]) if rest and rest[0] in VERBS else verb_help.overview())
        return 0
    if verb == "--version":
        from rloo_cli import __version__  # lazy: the version is asked for alone

        print(__version__)
        return 0
    if verb in VERBS and verb != "migrate" and {"--help", "-h"} & {*rest}:
        print(verb_help.of_verb(verb))
        return 0
    if verb not in VERBS:
        from rloo_cli.config.old_names import nearest  # lazy: only for a slip

        close = nearest(verb, VERBS)
        fix = f"rloo {close[0]}" if close else "rloo --help"
        why = f"verbs: {', '.join(VERBS)}"
        raise ConfigError(Problem(f"rloo has no verb {verb!r}", "command line", why, fix))
    return VERBS[verb](rest)


def train(words: list[str]) -> int:
    """`rloo train`: compose, check, then run or plan, once per job of a sweep."""
    from rloo_cli.cli import multirun as cli_multirun  # lazy: Hydra takes a third of a second
    from rloo_cli.cli.plan import dry_run  # lazy: as slow
    from rloo_cli.config import check  # lazy: as slow
    from rloo_cli.launch import launcher  # lazy: as slow

    dry = "--dry-run" in words
    codes: list[int] = []

    def job(composed: Any, multirun: bool) -> tuple[int, float | None]:
        if codes and codes[-1] in STOPPED:  # a sweep that was asked to stop
            return 0, None
        value = None
        try:
            with hf_cache.remembered(composed.words):
                code = (dry_run if dry else launcher.train)(composed, multirun=multirun)
            if multirun and code == 0 and not dry:
                value = cli_multirun.objective(check.check(launcher.apart(composed)))
        except RunError as error:  # not raised: a failed job does not stop a sweep
            code = print_error(error)
        codes.append(code)
        return code, value

    try:
        codes += _hydra([w for w in words if w != "--dry-run"], job)
    except ConfigError as error:
        if not codes:
            raise
        what, why = f"Hydra's sweeper gave up after {len(codes)} jobs", error.problems[0].what
        codes.append(print_error(ConfigError(Problem(what, "hydra/sweeper", why))))
    if len(codes) > 1:  # jobs, and what a sweeper of Hydra's said
        failed = sum(code != 0 for code in codes)
        print(f"{len(codes)} jobs, {failed} failed")
    return next((code for code in codes if code), 0)


def _hydra(words: list[str], job: Callable[[Any, bool], tuple[int, float | None]]) -> list[int]:
    """Run `job` under Hydra: its grammar, groups, sweeps and flags, but our errors.

    `job` returns its exit code, and what it is worth to Hydra's sweeper. Returns the codes of jobs
    that ran in processes of Hydra's launcher.
    """
    import hydra

    from rloo_cli.cli import multirun as cli_multirun  # lazy: Hydra takes a third of a second
    from rloo_cli.config import compose, user_files  # lazy: as slow

    flags, overrides = split_flags(words)
    flags, dirs = compose.split_dirs(flags)
    user_files.register(dirs)
    overrides = compose.rewrite(overrides, dirs)

    refused: list[Exception] = []
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let exceptions through to our own report
    with cli_multirun.place(overrides) as (sweep, keys):
        elsewhere = cli_multirun.Elsewhere(sweep)
        task = _task(job, elsewhere, dirs, cli_multirun.swept_keys(overrides), refused)
        sys.argv = ["rloo train", *flags, *compose.search_path(dirs), *keys, *overrides]
        try:
            hydra.main(version_base="1.3", config_path=str(paths.CONF), config_name="config")(
                task
            )()
        except compose.BROKEN as error:
            raise ConfigError(compose.from_hydra(error, overrides)) from None
        except RuntimeError as error:
            raise cli_multirun.refusal(error) or error from None
        finally:
            os.environ.pop("HYDRA_FULL_ERROR")
            if before is not None:
                os.environ["HYDRA_FULL_ERROR"] = before
        found = elsewhere.codes()
    if refused:
        raise refused[0]
    return found


def _task(
    job: Callable[[Any, bool], tuple[int, float | None]],
    elsewhere: Any,
    dirs: list[Any],
    swept: tuple[str, ...],
    refused: list[Exception],
) -> Callable[[Any], float | None]:
    """What Hydra calls with each composed config. Its errors go to `refused`: they are raised when
    Hydra, which puts a line of its own first, has ended."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from rloo_cli.config import compose  # lazy: as slow

    def task(cfg: Any) -> float | None:
        config: Any = HydraConfig.get()
        value = None
        with elsewhere.job(config) as note:
            try:
                composed = replace(compose.gather(cfg.copy(), config, dirs), swept_here=swept)
                code, value = job(composed, config.mode == RunMode.MULTIRUN)
                note(code)
            except Exception as error:
                refused.append(error)
                note(print_error(error) if isinstance(error, RunError) else 1)
        return value

    return task


def split_flags(words: list[str]) -> tuple[list[str], list[str]]:
    """Hydra's flags, each with its value, and the overrides: Hydra wants the flags first."""
    flags: list[str] = []
    overrides: list[str] = []
    rest = iter(words)
    for word in rest:
        if word.partition("=")[0] in HYDRA_FLAGS:
            name, equals, value = word.partition("=")
            flags.append(name)
            if name in TAKES_VALUE:
                flags.append(value if equals else next(rest, ""))
                _check_flag(*flags[-2:])
        else:
            overrides.append(word)
    return flags, overrides


def _check_flag(name: str, value: str) -> None:
    known = ("job", "hydra", "all") if name in ("--cfg", "-c") else (value,)
    if not value or value not in known:
        fix = f"{name} {known[0] or 'VALUE'}"
        raise ConfigError(Problem(f"{name} {value}: not understood", "command line", fix=fix))


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

    def jobs(given: list[str]) -> list[Any]:
        found: list[Any] = []

        def job(composed: Any, multirun: bool) -> tuple[int, None]:
            found.append(composed)
            return 0, None

        _hydra(["--multirun", *given], job)
        return found

    return sweep.run(words, jobs)


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
