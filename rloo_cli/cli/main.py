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
from pathlib import Path
from typing import TYPE_CHECKING

from rloo_cli.cli import json_answer, verb_help
from rloo_cli.config import hf_cache
from rloo_cli.utils import console, environment, paths, redact
from rloo_cli.utils.errors import (
    ConfigError,
    Problem,
    RunError,
    StorageError,
    print_error,
    print_exit,
)
from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:  # lazy: Hydra takes a third of a second
    from rloo_cli.cli.hydra_app import HydraJob
    from rloo_cli.config.compose import ComposedConfig
    from rloo_cli.config.schema import RunConfig

STOPPED_CODES = (75, 130)  # exit codes of a run that was asked to end
STDOUT_ONLY_VERBS = (  # verbs that write no file
    "plan", "recipes", "config", "runs", "top", "doctor", "replay", "reward", "samples", "ledger",
    "compare", "migrate", "completion",
)  # fmt: skip


class ExitStatus:
    """The exit code of the verb."""

    code = 0


def main() -> None:
    """The console script. Exits with the code of the first cause (docs/reference.md)."""
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
    if code == STOPPED_CODES[0]:  # a second signal while Python ends would make the code 143
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
    """The code of a verb whose only work is its output, if that could not be printed."""
    sys.stdout.flush()
    lost: Exception | None = getattr(sys.stdout, "write_error", None)
    writes_no_file = bool({*STDOUT_ONLY_VERBS} & {*sys.argv[1:2]})
    if lost is None or isinstance(lost, BrokenPipeError) or not writes_no_file:
        return 0
    why = "what this verb prints is all that it does"
    what, fix = f"stdout takes nothing more: {lost}", "send it to a disk with space: > FILE"
    return print_error(StorageError(Problem(what, "stdout", why, fix)))


def find_verb(args: list[str]) -> Callable[[], int]:
    """The verb that these arguments name; calling it runs it and returns the exit code.

    Raises ConfigError for an unknown verb.
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
        from rloo_cli.config.old_names import nearest_names  # lazy: only for a typing error

        close = nearest_names(verb, VERBS)
        fix = f"rloo {close[0]}" if close else "rloo --help"
        why = f"verbs: {', '.join(VERBS)}"
        raise ConfigError(Problem(f"rloo has no verb {verb!r}", "command line", why, fix))
    return partial(VERBS[verb], rest)


def _print(text: Callable[..., str], *args: str) -> int:
    print(text(*args))
    return 0


def _version() -> str:
    from rloo_cli import __version__  # lazy: one flag's

    return __version__


def run_train(args: list[str]) -> int:
    """`rloo train`: compose, check, then run or plan, once per job of a sweep."""
    from rloo_cli.cli import multirun  # lazy: Hydra takes a third of a second
    from rloo_cli.cli.hydra_app import HydraApp  # lazy: as slow
    from rloo_cli.cli.plan import dry_run, dry_run_values  # lazy: as slow
    from rloo_cli.config import check  # lazy: as slow
    from rloo_cli.launch import launcher  # lazy: as slow

    args, as_json = json_answer.take_json_flag(args)
    dry = "--dry-run" in args
    app = HydraApp([w for w in args if w != "--dry-run"])
    codes: list[int] = []
    told: list[JsonObject] = []  # one for each job

    def task(job: "HydraJob") -> float | None:
        if codes and codes[-1] in STOPPED_CODES:  # a sweep that was asked to stop
            return None
        value = None
        try:
            with hf_cache.recorded_command(job.composed.user_overrides):
                start = dry_run if dry else launcher.launch_run
                job.code = start(job.composed, multirun=job.multirun)
            if as_json or (job.multirun and job.code == 0 and not dry):
                named = launcher.name_sweep_job(job.composed) if job.multirun else job.composed
                settings = check.check_config(named)
                told.append(dry_run_values(settings) if dry else _values_of_run(settings))
                if job.multirun and job.code == 0 and not dry:
                    value = multirun.objective_value(settings)
        except RunError as error:  # not raised: a failed job does not stop a sweep
            job.code = print_error(error)
        codes.append(job.code)
        return value

    with json_answer.json_answer(as_json) as answer:
        if not dry:
            app.check_jobs(lambda job: check.check_config(launcher.name_sweep_job(job)))
        try:
            app.run(task)
        except ConfigError as error:
            if not codes:
                raise
            codes.append(print_error(_sweeper_error(len(codes), error.problems[0])))
        codes += app.exit_codes
        _tell_of_jobs(codes, app.best_job, answer)
        code = next((code for code in codes if code), 0)
        answer |= {"code": code, "runs": told}
    return code


def _sweeper_error(num_jobs: int, found: Problem) -> ConfigError:
    what = f"Hydra's sweeper gave up after {num_jobs} jobs"
    fix = found.fix or "correct what the failed jobs above say, then run it again"
    return ConfigError(Problem(what, "hydra/sweeper", found.what, fix))


def _tell_of_jobs(codes: list[int], best: str, answer: JsonObject) -> None:
    """Print how the jobs of a sweep ended, an error of its sweeper among them, and the best."""
    if len(codes) > 1:
        failed = sum(code != 0 for code in codes)
        print(f"{len(codes)} jobs, {failed} failed")
    if best:
        print(best)
        answer["best"] = best


def _values_of_run(settings: "RunConfig") -> JsonObject:
    return json_answer.run_values(Path(settings.root, str(settings.name)))


def _lazy_verb(name: str) -> Callable[[list[str]], int]:
    """A verb of rloo_cli/cli, imported when it is called."""

    def verb(args: list[str]) -> int:
        from importlib import import_module

        code: int = import_module(f"rloo_cli.cli.{name}").run(args)
        return code

    return verb


def _supervised_verb(section: str) -> Callable[[list[str]], int]:
    """`rloo sft`, `rloo reward-model`: a training that comes before RLOO."""

    def verb(args: list[str]) -> int:
        from rloo_cli.cli import supervised  # lazy: one verb's

        return supervised.run(section, args)

    return verb


def run_sweep(args: list[str]) -> int:
    """`rloo sweep`: several configurations side by side; its commands for other terminals."""
    from rloo_cli.cli import sweep  # lazy: one verb's
    from rloo_cli.cli.hydra_app import HydraApp  # lazy: Hydra takes a third of a second

    def compose_jobs(overrides: list[str]) -> "list[ComposedConfig]":
        app, jobs = HydraApp(["--multirun", *overrides]), []

        app.run(lambda job: jobs.append(job.composed))
        return jobs

    return sweep.run(args, compose_jobs)


VERBS: dict[str, Callable[[list[str]], int]] = {
    "train": run_train,
    "sweep": run_sweep,
    "sft": _supervised_verb("sft"),
    "reward-model": _supervised_verb("reward_model"),
    "vllm-serve": _lazy_verb("vllm_serve"),
    "eval": _lazy_verb("eval"),
    "fetch": _lazy_verb("fetch"),
    "plan": _lazy_verb("plan"),
    "recipes": _lazy_verb("recipes"),
    "config": _lazy_verb("config"),
    "runs": _lazy_verb("runs"),
    "top": _lazy_verb("top"),
    "doctor": _lazy_verb("doctor"),
    "report": _lazy_verb("report"),
    "replay": _lazy_verb("replay"),
    "sync": _lazy_verb("sync"),
    "push": _lazy_verb("push"),
    "samples": _lazy_verb("samples"),
    "ledger": _lazy_verb("ledger"),
    "compare": _lazy_verb("compare"),
    "verify-resume": _lazy_verb("verify_resume"),
    "slurm": _lazy_verb("slurm"),
    "migrate": _lazy_verb("migrate"),
    "reward": _lazy_verb("reward"),
    "completion": _lazy_verb("completion"),
}
