"""Runs a verb under Hydra: with its grammar, groups, sweeps and flags, but our errors.

def task(job):
    job.code = launcher.launch_run(job.composed, job.multirun)

HydraApp(args).run(task)

One run is composed by Hydra's compose API; `hydra.main` is for sweeps and for --cfg.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from rloo_cli.cli import multirun
from rloo_cli.config import compose, user_files
from rloo_cli.config.compose import ComposedConfig
from rloo_cli.utils import paths
from rloo_cli.utils.errors import ConfigError, Problem, RunError, print_error

TAKES_VALUE = ("--config-dir", "-cd", "--cfg", "-c", "--package", "-p")
HYDRA_MAIN_FLAGS = ("--cfg", "-c", "--package", "-p", "--multirun", "-m", "--resolve")
HYDRA_FLAGS = (*TAKES_VALUE, *HYDRA_MAIN_FLAGS)
OTHER_PLUGINS = ("hydra/launcher=", "hydra/sweeper=")


@dataclass
class HydraJob:
    """One job of Hydra, and the exit code of its task."""

    read_config: Callable[[], ComposedConfig]
    multirun: bool
    code: int = 0

    @cached_property
    def composed(self) -> ComposedConfig:
        """The composed config. Raises ConfigError for what cannot be resolved."""
        return self.read_config()


class HydraApp:
    """One call of Hydra.

    At the end `exit_codes` has those of jobs that its launcher ran, and `best_job` what a sweeper
    that optimizes found.
    """

    def __init__(self, args: list[str]):
        flags, overrides = split_flags(args)
        self.flags, self.dirs = compose.split_config_dirs(flags)
        user_files.register_config_dirs(self.dirs)
        self.overrides = compose.rewrite_overrides(overrides, self.dirs)
        multirun.check_sweeper(self.overrides)
        self.swept_keys = multirun.swept_keys(self.overrides)
        self.errors: list[Exception] = []
        self.exit_codes: list[int] = []
        self.best_job = ""

    def run(self, task: Callable[["HydraJob"], float | None]) -> None:
        """Call `task` once per job; a sweeper that optimizes gets what it returns. Raises what a
        job raised, and ConfigError for Hydra's own errors."""
        if not {*self.flags} & {*HYDRA_MAIN_FLAGS}:
            cfg = compose.compose_by_hydra(self.overrides, self.dirs)
            if cfg.hydra.mode != RunMode.MULTIRUN:
                task(HydraJob(partial(self._read_config, cfg, cfg.hydra), multirun=False))
                return

        def of_hydra(cfg: DictConfig) -> float | None:
            with self._job(cfg) as job:
                return task(job)
            return None  # it raised what `running` raises later

        with self._running():
            hydra.main(str(paths.CONF), "config", version_base="1.3")(of_hydra)()

    @contextmanager
    def _running(self) -> Iterator[None]:
        """A context around the call of Hydra. Raises what a job raised, and ConfigError for Hydra's
        own errors, after Hydra has ended: else it would print a line of its own first."""
        before = os.environ.get("HYDRA_FULL_ERROR")
        os.environ["HYDRA_FULL_ERROR"] = "1"  # let exceptions through to our own report
        is_sweep = bool({"-m", "--multirun"} & {*self.flags})
        with multirun.sweep_output_dir(self.overrides, is_sweep) as (sweep, keys):
            self.launcher_jobs = multirun.LauncherJobs(sweep)
            added = [*compose.search_path_override(self.dirs), *keys]
            sys.argv = ["rloo train", *self.flags, *added, *self.overrides]
            try:
                yield
            except compose.COMPOSE_ERRORS as error:
                raise ConfigError(compose.hydra_problem(error, self.overrides)) from None
            except RuntimeError as error:
                raise multirun.submitit_error(error) or error from None
            finally:
                os.environ.pop("HYDRA_FULL_ERROR")
                if before is not None:
                    os.environ["HYDRA_FULL_ERROR"] = before
            self.best_job = multirun.best_job(sweep)
            self.exit_codes = self.launcher_jobs.exit_codes()
        if self.errors:
            raise self.errors[0]

    def check_jobs(self, check: Callable[[ComposedConfig], object]) -> None:
        """Check every job of a sweep before the first one runs. Raises ConfigError with everything
        that is wrong with any of them.

        Where another sweeper chooses jobs by the results of earlier ones, or another launcher runs
        them, each job is checked when it is its turn.
        """
        elsewhere = [w for w in self.overrides if w.lstrip("+").startswith(OTHER_PLUGINS)]
        if not {"-m", "--multirun"} & {*self.flags} or elsewhere:
            return
        problems: list[Problem] = []

        def task(job: HydraJob) -> None:
            try:
                check(job.composed)
            except ConfigError as error:
                problems.extend(error.problems)

        self.run(task)
        if problems:
            raise ConfigError(*dict.fromkeys(problems))

    @contextmanager
    def _job(self, cfg: DictConfig) -> Iterator[HydraJob]:
        """A context around one job. It keeps what the job raises for the end of the sweep."""
        config = cast(DictConfig, HydraConfig.get())
        with self.launcher_jobs.record_exit_code(config) as note:
            try:
                composed = partial(self._read_config, cfg.copy(), config)
                job = HydraJob(composed, config.mode == RunMode.MULTIRUN)
                yield job  # the config is read inside, so that its errors are kept, too
                note(job.code)
            except Exception as error:
                self.errors.append(error)
                note(print_error(error) if isinstance(error, RunError) else 1)

    def _read_config(self, cfg: DictConfig, config: DictConfig) -> ComposedConfig:
        composed = compose.read_hydra_config(cfg, config, self.dirs)
        return replace(composed, swept_keys=(*composed.swept_keys, *self.swept_keys))


def split_flags(args: list[str]) -> tuple[list[str], list[str]]:
    """Hydra's flags, each with its value, and the overrides: Hydra wants the flags first."""
    flags: list[str] = []
    overrides: list[str] = []
    rest = iter(args)
    for arg in rest:
        name, equals, value = arg.partition("=")
        if name not in HYDRA_FLAGS:
            overrides.append(arg)
            continue
        flags.append(name)
        if name in TAKES_VALUE:
            flags.append(value if equals else next(rest, ""))
            _check_flag(*flags[-2:])
    return flags, overrides


def _check_flag(name: str, value: str) -> None:
    allowed = ("job", "hydra", "all") if name in ("--cfg", "-c") else (value,)
    if not value or value not in allowed:
        fix = f"{name} {allowed[0] or 'VALUE'}"
        why = f"one of {', '.join(allowed)} was expected" if allowed[0] else "no value follows it"
        raise ConfigError(Problem(f"{name} {value}: not understood", "command line", why, fix))
