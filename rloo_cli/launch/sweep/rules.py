"""What is refused before a sweep starts anything: all of it at once, for all trials."""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rloo_cli.checkpoint import resume
from rloo_cli.config import check, hf_cache, messages
from rloo_cli.config.compose import ComposedConfig
from rloo_cli.config.schema import DistributedConfig, GenerationConfig, RunConfig
from rloo_cli.distributed import device_count
from rloo_cli.launch import leftovers, preflight
from rloo_cli.launch.launcher import KEYS_OF_SAME_JOB
from rloo_cli.launch.sweep.state import Rung, Trial, override_key
from rloo_cli.launch.sweep.time_slices import MINIMIZE_SUFFIX
from rloo_cli.utils import environment, errors
from rloo_cli.utils.errors import ConfigError, Problem, RunError, refuse, value_problem
from rloo_cli.utils.files import JsonObject, read_json

OFFLOADED_GPU_SHARE = 0.125  # of a GPU, for trials that wait: plans leave more than that unused
REFUSED_KEYS = ("hydra/launcher", "hydra.launcher", "hydra/sweeper", "hydra.sweeper")


def check_sweep_overrides(
    overrides: Sequence[str], environment: Mapping[str, str] = os.environ
) -> None:
    """Raises ConfigError for overrides and environment variables that a sweep cannot have."""
    problems = []
    for override in overrides:
        if override_key(override).startswith(REFUSED_KEYS):
            why, fix = "trials run side by side on this machine", "rloo train --multirun ..."
            what = (
                f"{override}: a sweep has no {'launcher' if 'launcher' in override else 'sweeper'}"
            )
            problems.append(Problem(what, "command line", why, fix))
    if environment.get("RANK") and environment.get("WORLD_SIZE"):
        why, fix = "a sweep starts the processes of its trials itself", "unset RANK WORLD_SIZE"
        problems.append(Problem("RANK and WORLD_SIZE are set", "environment", why, fix))
    if problems:
        raise ConfigError(*problems)


def early_stopping_rungs(
    keep: Sequence[int], at: Sequence[int], by: Sequence[str], old_rungs: Sequence[Rung]
) -> list[Rung]:
    """Early stopping as the flags have it; of `old_rungs`, those that were decided stay so.

    Raises ConfigError for flags whose numbers do not fit together.
    """
    if len(keep) != len(at) or len(by) not in (0, 1, len(at)):
        why = f"found {len(keep)} --keep, {len(at)} --at, {len(by)} --by"
        fix = "--keep 4 --at 20 --keep 2 --at 40 --by reward"
        refuse("command line", "each --keep needs an --at", fix, why)
    metrics = [*by] if len(by) == len(at) else [*by, "reward"][:1] * len(at)
    done = [replace(rung, done=False) for rung in old_rungs if rung.done]
    rungs = [Rung(*rung) for rung in zip(keep, at, metrics, strict=True)]
    return [replace(rung, done=rung in done) for rung in rungs]


def rung_problems(
    rungs: Sequence[Rung], num_trials: int, steps: Sequence[int | None]
) -> Iterator[Problem]:
    """Problems of early stopping. `steps`: each trial's number of steps, None = not known."""
    least = min((s for s in steps if s is not None), default=None)
    before, left = 0, num_trials
    for rung in rungs:
        what = f"--keep {rung.keep} --at {rung.at}"
        if rung.keep >= left:
            fix = f"--keep {left // 2} --at {rung.at}" if left > 1 else f"leave out {what}"
            why = f"{left} trials reach this step" if left > 1 else "one trial reaches this step"
            yield Problem(f"{what} stops no trial", "command line", why, fix)
        if rung.at <= before:
            why = f"the rung before it is at step {before}"
            fix = f"--keep {rung.keep} --at {before + 1}, or later"
            yield Problem(f"{what} is not later than the rung before", "command line", why, fix)
        if least is not None and rung.at >= least:
            why = f"a trial has {least} steps; stopping it at its end saves nothing"
            yield Problem(f"{what} is too late", "command line", why, f"--at {max(1, least // 2)}")
        if not rung.by.removesuffix(MINIMIZE_SUFFIX):
            why = f"found {rung.by!r}, without a name"
            yield Problem("--by needs the name of a metric", "command line", why, "--by reward")
        before, left = rung.at, rung.keep


def trial_problems(
    generation: GenerationConfig, distributed: DistributedConfig
) -> Iterator[Problem]:
    """Why a run cannot be a trial: in a sweep it would behave differently than alone."""
    yield from vllm_trial_problems(generation, bool(device_count.visible_gpus()))
    if distributed.engine != "single" or distributed.num_nodes > 1:
        engine = f"distributed.engine = {distributed.engine}"
        why = f"{engine}: its processes would wait for each other's time slices"
        fix = "distributed=single, or rloo train --multirun ... one after the other"
        yield Problem("a trial of a sweep must be one process", "distributed.engine", why, fix)


def vllm_trial_problems(generation: GenerationConfig, has_gpu: bool) -> Iterator[Problem]:
    """Why this run's vLLM cannot serve a trial, which gives its device to others between slices.

    `has_gpu`: trials share GPUs. In CPU memory, waiting engines stay loaded side by side.
    """
    keys: Any = generation
    own = "each trial needs its own engine"
    if keys.is_server and keys.server.base_url is not None:
        key, why = "generation.server.base_url", f"{own}; a server has the weights of one trainer"
        instead = "null, or generation=transformers"
        yield value_problem(key, keys.server.base_url, "is not for a sweep", instead, why)
    elif keys.is_server and keys.server.num_nodes:
        key, why = "generation.server.num_nodes", f"{own}, on this machine"
        instead = "0, or rloo train --multirun ..."
        yield value_problem(key, keys.server.num_nodes, "is not for a sweep", instead, why)
    elif keys.is_server and has_gpu:
        key, why = "generation.backend", "its server would hold a GPU while other trials train"
        fix = "generation=vllm_colocate generation.colocate.sleep=weights, generation=transformers"
        yield Problem(f"{key} = {keys.backend} is not for a sweep on GPUs", key, why, f"{fix}, or"
                      " rloo train --multirun ...")  # fmt: skip
    elif keys.shares_device and has_gpu and keys.colocate.sleep != "weights":
        key = "generation.colocate.sleep"
        why = "the engine would hold weights or its KV cache on the GPU while others train"
        instead = "weights, or generation=transformers"
        yield value_problem(key, keys.colocate.sleep, "is not for a sweep on GPUs", instead, why)
    elif keys.shares_device and has_gpu and not keys.allow_untested:
        key = "generation.backend"
        why = "engines that take turns on one GPU are untested"
        fix = "generation.allow_untested=true, or generation=transformers"
        yield Problem(f"{key} = {keys.backend} in a sweep on GPUs", key, why, fix)


def max_open_trials(devices: int, memory: float, with_engines: bool = False) -> int:
    """How many trials a sweep can have open at a time on `devices` GPUs of `memory` bytes each.

    One trains on each GPU. Every other one keeps some GPU memory while it waits, and twice as much
    with a sleeping inference engine.
    """
    each = environment.OFFLOADED_TRIAL_BYTES * (1 + with_engines)
    return devices * (1 + int(OFFLOADED_GPU_SHARE * memory / each))


def too_many_trials_problems(num_trials: int, max_trials: int | None) -> Iterator[Problem]:
    """More trials than the GPUs can hold (`max_open_trials`); None = no GPU."""
    if max_trials is None or num_trials <= max_trials:
        return
    each = f"{environment.OFFLOADED_TRIAL_BYTES / 1e9:g} GB"
    why = f"a waiting trial keeps {each} of its GPU for the CUDA context; {max_trials} fit"
    fix = f"at most {max_trials} trials, --jobs N with N more GPUs, or rloo train --multirun"
    yield Problem(f"{num_trials} trials do not fit side by side", "command line", why, fix)


def check_trial_configs(jobs: Sequence[ComposedConfig]) -> list[RunConfig]:
    """Check the trials' configs. Raises ConfigError with all that is wrong with any of them."""
    runs: list[RunConfig] = []
    problems: list[Problem] = []
    for job in jobs:
        try:
            run = check.check_config(job)
        except ConfigError as error:
            problems += error.problems
            continue
        found = trial_problems(run.generation, run.distributed)
        problems += [messages.locate_problem(p, job.sources) for p in found]
        runs.append(run)
    if problems:
        raise ConfigError(*errors.distinct_problems(problems))
    return runs


def trial_config(run: RunConfig, trial: Trial) -> RunConfig:
    """A trial's config with its name, and the checkpoint it resumes from."""
    values: JsonObject = {"name": trial.name, "resume": trial.start or "auto"}
    if trial.parent is not None:
        values["resume_allow_changes"] = True
    return run.model_copy(update=values)


def check_trials_can_start(trials: Sequence[tuple[Trial, RunConfig]]) -> None:
    """Raises RunError where a trial's folder is in use, or the machine lacks something."""
    problems: dict[Problem, None] = {}
    kinds: list[type[RunError]] = []
    for trial, run in trials:
        try:
            folder = Path(run.root, trial.name)
            facts = read_json(folder / "run.json")
            if leftovers.is_run_alive(facts):
                leftovers.refuse_busy_folder(folder, facts["pid"])
            resume.plan_resume(folder, run.model_copy(update={"resume": "auto"}) if facts else run)
            with hf_cache.recorded_command(trial.words):
                preflight.check_machine(run)
        except RunError as error:
            problems |= dict.fromkeys(error.problems)
            kinds.append(type(error))
    if kinds:
        raise min(kinds, key=lambda kind: kind.code)(*problems)


def check_distinct_names(names: Sequence[str]) -> None:
    """Raises ConfigError where two trials would be the same run."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        why = f"they differ only in keys that run names omit: {', '.join(KEYS_OF_SAME_JOB)}"
        what = f"two trials would have the run name {twice[0]}"
        refuse("name", what, "sweep another key, or name=a,b", why)


def overrides_digest(overrides: Sequence[str]) -> str:
    """6 hex digits of the overrides that the experiment depends on."""
    hashed = [o for o in overrides if override_key(o).partition(".")[0] not in KEYS_OF_SAME_JOB]
    return hashlib.sha256("\n".join(sorted(hashed)).encode()).hexdigest()[:6]
