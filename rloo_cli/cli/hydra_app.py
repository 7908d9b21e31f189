"""A verb under Hydra: its grammar, groups, sweeps and flags, but our errors.

app = HydraApp(words)
def task(cfg):
    with app.job(cfg) as job:
        job.code = launcher.train(job.composed, job.multirun)
with app.running():
    app.decorate(task)()
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from rloo_cli.cli import multirun
from rloo_cli.config import compose, user_files
from rloo_cli.config.compose import Composed
from rloo_cli.utils import paths
from rloo_cli.utils.errors import ConfigError, Problem, RunError, print_error

TAKES_VALUE = ("--config-dir", "-cd", "--cfg", "-c", "--package", "-p")
HYDRA_FLAGS = (*TAKES_VALUE, "--multirun", "-m", "--resolve")
Task = Callable[[Any], float | None]


@dataclass
class Job:
    """One composed config, and the exit code of what was done with it."""

    composed: Composed
    multirun: bool
    code: int = 0


class HydraApp:
    """One call of Hydra. `codes`: of jobs that ran in processes of Hydra's launcher, at the end."""

    def __init__(self, words: list[str]):
        flags, overrides = split_flags(words)
        self.flags, self.dirs = compose.split_dirs(flags)
        user_files.register(self.dirs)
        self.overrides = compose.rewrite(overrides, self.dirs)
        self.swept = multirun.swept_keys(self.overrides)
        self.refused: list[Exception] = []
        self.codes: list[int] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around the call of Hydra. Raises what a job raised, and ConfigError for Hydra's own
        errors: they are raised when Hydra, which puts a line of its own first, has ended."""
        before = os.environ.get("HYDRA_FULL_ERROR")
        os.environ["HYDRA_FULL_ERROR"] = "1"  # let exceptions through to our own report
        with multirun.place(self.overrides) as (sweep, keys):
            self.elsewhere = multirun.Elsewhere(sweep)
            added = [*compose.search_path(self.dirs), *keys]
            sys.argv = ["rloo train", *self.flags, *added, *self.overrides]
            try:
                yield
            except compose.BROKEN as error:
                raise ConfigError(compose.from_hydra(error, self.overrides)) from None
            except RuntimeError as error:
                raise multirun.refusal(error) or error from None
            finally:
                os.environ.pop("HYDRA_FULL_ERROR")
                if before is not None:
                    os.environ["HYDRA_FULL_ERROR"] = before
            self.codes = self.elsewhere.codes()
        if self.refused:
            raise self.refused[0]

    def decorate(self, task: Task) -> Callable[[], None]:
        """The function that Hydra calls `task` from, once per job."""
        decorated: Callable[[], None] = hydra.main(
            version_base="1.3", config_path=str(paths.CONF), config_name="config"
        )(task)
        return decorated

    @contextmanager
    def job(self, cfg: Any) -> Iterator[Job]:
        """Around one job. What it raises is kept for the end, so that a sweep goes on."""
        config: Any = HydraConfig.get()
        with self.elsewhere.job(config) as note:
            try:
                composed = compose.gather(cfg.copy(), config, self.dirs)
                composed = replace(composed, swept_here=self.swept)
                job = Job(composed, config.mode == RunMode.MULTIRUN)
                yield job
                note(job.code)
            except Exception as error:
                self.refused.append(error)
                note(print_error(error) if isinstance(error, RunError) else 1)


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
