"""`rloo train`: compose, check, then run or plan, once per job of a sweep."""

from rloo_cli.cli import answers, multirun
from rloo_cli.cli.multirun import Job
from rloo_cli.cli.plan import dry_run, dry_run_values
from rloo_cli.cli.verb_parser import parse_verb
from rloo_cli.config import check, compose, hf_cache
from rloo_cli.launch import launcher
from rloo_cli.utils.errors import ConfigError, Problem, RunError, distinct_problems, print_error
from rloo_cli.utils.files import JsonObject

STOPPED_CODES = (75, 130)  # exit codes of a run that was asked to stop


def run(args: list[str]) -> int:
    """Run the verb. Raises ConfigError for a config or a sweep that cannot be composed."""
    options = parse_verb("train", args)
    if options.cfg is not None:
        print(compose.config_text(options.overrides, options.cfg, options.package, options.resolve))
        return 0
    jobs = JobResults(options.dry_run, options.json)
    with answers.json_answer(options.json) as answer:
        best = ""
        if not options.multirun:
            jobs.run(multirun.single_job(options.overrides))
        elif multirun.has_plugins(options.overrides):
            best = _run_plugin_sweep(options.overrides, jobs)
        else:
            found = multirun.sweep_jobs(options.overrides)
            if not options.dry_run:
                _check_jobs(found)
            for job in found:
                jobs.run(job)
        if len(jobs.codes) > 1:
            print(f"{len(jobs.codes)} jobs, {sum(code != 0 for code in jobs.codes)} failed")
        if best:
            print(best)
            answer["best"] = best
        code = next((code for code in jobs.codes if code), 0)
        answer |= {"code": code, "runs": jobs.values}
    return code


class JobResults:
    """Runs or plans jobs, and keeps their exit codes and --json results."""

    def __init__(self, dry: bool, as_json: bool):
        self.dry, self.as_json = dry, as_json
        self.codes: list[int] = []
        self.values: list[JsonObject] = []
        self.shown: set[str] = set()  # what was wrong with earlier jobs

    def run(self, job: Job) -> float | None:
        """Run one job. -> the value for an optimizing sweeper"""
        if self.codes and self.codes[-1] in STOPPED_CODES:  # the sweep was asked to stop
            return None
        value = None
        try:
            with hf_cache.recorded_command(job.composed.user_overrides):
                start = dry_run if self.dry else launcher.launch_run
                job.code = start(job.composed, multirun=job.multirun)
            trained = job.multirun and job.code == 0 and not self.dry
            if self.as_json or trained:
                named = launcher.name_sweep_job(job.composed) if job.multirun else job.composed
                settings = check.check_config(named)
                self.values.append(
                    dry_run_values(settings) if self.dry else answers.run_values(settings.folder)
                )
                if trained:
                    objective = settings.logging.objective
                    value = multirun.objective_value(settings.folder, settings.held_out, objective)
        except RunError as error:  # not raised: a failed job does not stop a sweep
            what = {p.what for p in error.problems}
            job.code = error.code if self.dry and what <= self.shown else print_error(error)
            self.shown |= what
        self.codes.append(job.code)
        return value


def _check_jobs(jobs: list[Job]) -> None:
    """Raises ConfigError with all problems of all jobs of a sweep."""
    problems: list[Problem] = []
    for job in jobs:
        try:
            check.check_config(launcher.name_sweep_job(job.composed))
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(*distinct_problems(problems))


def _run_plugin_sweep(overrides: list[str], jobs: JobResults) -> str:
    """Run a sweep with another sweeper or launcher. -> its best job, if it names one"""
    sweep = multirun.PluginSweep(overrides)
    try:
        sweep.run(jobs.run)
    except ConfigError as error:
        if not jobs.codes:
            raise
        jobs.codes.append(print_error(_sweeper_error(len(jobs.codes), error.problems[0])))
    jobs.codes += sweep.exit_codes
    return sweep.best_job


def _sweeper_error(num_jobs: int, found: Problem) -> ConfigError:
    what = f"Hydra's sweeper stopped after {num_jobs} jobs"
    fix = found.fix or "fix the errors of the failed jobs above, then run it again"
    return ConfigError(Problem(what, "hydra/sweeper", found.what, fix))
