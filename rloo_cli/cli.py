"""`rloo VERB [flags] [key=value ...]`: take the verb off, compose the config once, run the verb.

Imports no torch, and Hydra only where a verb composes a config: `rloo --help` answers in under
half a second. Every refusal ends here, in one place, as an error block and an exit code.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

from rloo_cli import hub, paths, redact
from rloo_cli.errors import ConfigError, Problem, RunError

USAGE = """usage: rloo VERB [+recipe=NAME] [key=value ...]

verbs:
  train        train a policy
  sweep        train several configurations side by side, in turns: +recipe=NAME key=a,b
  sft          fine-tune a model on completions, before RLOO
  reward-model train a reward model on preferences
  vllm-serve   serve completions for a run from GPUs or a node of their own
  eval         score what is held out: RUN, RUN/checkpoint-N, or +recipe=NAME model.path=...
  fetch        download what a run loads: +recipe=NAME, for machines without network
  plan         tell memory, disk and time of a run beforehand: +recipe=NAME --gpu 80GiB
  recipes      list recipes; recipes show NAME; recipes copy NAME my.yaml
  config       list every key; config explain KEY; config --json
  samples      show what a run wrote: --step N --worst; --eval
  ledger       what became of every prompt of a run, and whether it adds up
  compare      runs side by side: curves, tables, who is ahead and how sure that is
  slurm        a recipe as a batch job: render or submit [KIND] +recipe=NAME
  migrate      turn a TRL or ms-swift command line or config into a recipe
  completion   print the shell's completion script: bash, zsh or fish

recipes:
{recipes}

flags of train:
  --dry-run             check everything, print the plan, train nothing
  --multirun, -m        one run per combination of key=a,b
  --cfg job             print the composed config
  --config-dir DIR      your own groups and recipes
  --debug               tracebacks; --errors=json for tools

try: rloo train +recipe=quickstart
"""
TAKES_VALUE = ("--config-dir", "-cd", "--cfg", "-c", "--package", "-p")
STOPPED = (75, 130)  # exit codes of a run that was asked to end
HYDRA_FLAGS = (*TAKES_VALUE, "--multirun", "-m", "--resolve")


def main() -> None:
    """The console script. Exits with the code of the first cause (PROMISES 2)."""
    with redact.everywhere():
        code = _main()
    if code == STOPPED[0]:  # asked again while Python ends, we would end with 143 instead
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(code)


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
        code = report(error)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # `rloo config | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except Exception:
        traceback.print_exc()
        print(
            "error: this is a bug in rloo; please report it with the lines above", file=sys.stderr
        )
        code = 1
    return code


def report(error: RunError) -> int:
    """Print a refusal; its exit code."""
    if os.environ.get("RLOO_DEBUG"):
        traceback.print_exception(error)
    print(error.render(as_json=os.environ.get("RLOO_ERRORS") == "json"), file=sys.stderr)
    return error.code


def dispatch(words: list[str]) -> int:
    """Run one verb; its exit code."""
    verb, *rest = words or ["--help"]
    if verb in ("--help", "-h", "help"):
        print(usage())
        return 0
    if verb == "--version":
        from rloo_cli import __version__

        print(__version__)
        return 0
    if verb in VERBS and verb != "migrate" and {"--help", "-h"} & {*rest}:
        print(usage())
        return 0
    if verb not in VERBS:
        from rloo_cli.names import nearest

        close = nearest(verb, VERBS)
        fix = f"rloo {close[0]}" if close else "rloo --help"
        why = f"verbs: {', '.join(VERBS)}"
        raise ConfigError(Problem(f"rloo has no verb {verb!r}", "command line", why, fix))
    return VERBS[verb](rest)


def usage() -> str:
    """The text of `rloo --help`."""
    lines = []
    for name, path in paths.recipe_files().items():
        first = path.read_text().partition("\n")[0].lstrip("# ")
        lines.append(f"  {name:<12} {first}")
    return USAGE.format(recipes="\n".join(lines)).rstrip()


def train(words: list[str]) -> int:
    """`rloo train`: compose, check, then run or plan, once per job of a sweep."""
    from rloo_cli import launch

    dry = "--dry-run" in words
    codes: list[int] = []

    def job(composed: Any, multirun: bool) -> int:
        if codes and codes[-1] in STOPPED:  # a sweep that was asked to stop
            return 0
        try:
            with hub.remembered(composed.words):
                codes.append(launch.train(composed, multirun=multirun, dry_run=dry))
        except RunError as error:  # not raised: a failed job does not stop a sweep
            codes.append(report(error))
        return codes[-1]

    codes += _hydra([w for w in words if w != "--dry-run"], job)
    if len(codes) > 1:
        failed = sum(code != 0 for code in codes)
        print(f"{len(codes)} jobs, {failed} failed")
    return next((code for code in codes if code), 0)


def _hydra(words: list[str], job: Callable[[Any, bool], int]) -> list[int]:
    """Run `job` under Hydra: its grammar, groups, sweeps and flags, but our errors.

    Returns the codes of jobs that ran in processes of Hydra's launcher.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from rloo_cli import compose, own, sweeps

    flags, overrides = split_flags(words)
    flags, dirs = compose.split_dirs(flags)
    own.register(dirs)
    overrides = compose.rewrite(overrides, dirs)

    refused: list[Exception] = []
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let exceptions through to our own report
    with sweeps.place(overrides) as (sweep, keys):
        elsewhere = sweeps.Elsewhere(sweep)

        def task(cfg: Any) -> None:
            config: Any = HydraConfig.get()
            with elsewhere.job(config) as note:
                try:
                    composed = compose.gather(cfg.copy(), config, dirs)
                    note(job(composed, config.mode == RunMode.MULTIRUN))
                except Exception as error:  # raised when Hydra, which puts its own line first, ends
                    refused.append(error)
                    note(report(error) if isinstance(error, RunError) else 1)

        sys.argv = ["rloo train", *flags, *compose.search_path(dirs), *keys, *overrides]
        try:
            hydra.main(version_base="1.3", config_path=str(paths.CONF), config_name="config")(
                task
            )()
        except compose.BROKEN as error:
            raise ConfigError(compose.from_hydra(error, overrides)) from None
        except RuntimeError as error:
            raise sweeps.refusal(error) or error from None
        finally:
            os.environ.pop("HYDRA_FULL_ERROR")
            if before is not None:
                os.environ["HYDRA_FULL_ERROR"] = before
        found = elsewhere.codes()
    if refused:
        raise refused[0]
    return found


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
    """A verb of rloo_cli/tools, imported when it is called."""

    def verb(words: list[str]) -> int:
        from importlib import import_module

        code: int = import_module(f"rloo_cli.tools.{name}").run(words)
        return code

    return verb


def _training(section: str) -> Callable[[list[str]], int]:
    """`rloo sft`, `rloo reward-model`: a training that comes before RLOO."""

    def verb(words: list[str]) -> int:
        from rloo_cli.tools import training

        return training.run(section, words)

    return verb


def sweep(words: list[str]) -> int:
    """`rloo sweep`: several configurations side by side; its commands for other terminals."""
    from rloo_cli.tools import sweep

    def jobs(given: list[str]) -> list[Any]:
        found: list[Any] = []

        def job(composed: Any, multirun: bool) -> int:
            found.append(composed)
            return 0

        _hydra(["--multirun", *given], job)
        return found

    return sweep.run(words, jobs)


def serve(words: list[str]) -> int:
    """`rloo vllm-serve`: a rollout server, until it is asked to end."""
    from rloo_cli import serve

    return serve.run(words)


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
    "compare": _tool("compare"),
    "slurm": _tool("slurm"),
    "migrate": _tool("migrate"),
    "completion": _tool("completion"),
}
