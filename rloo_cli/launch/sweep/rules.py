"""What is refused before a sweep starts anything: all of it at once, for all members."""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rloo_cli.checkpoint import resume
from rloo_cli.config import check, hf_cache, messages
from rloo_cli.config.compose import Composed
from rloo_cli.config.schema import RunConfig
from rloo_cli.launch import preflight
from rloo_cli.launch.launcher import SAME_JOB
from rloo_cli.launch.sweep.state import Member, Rung, setting
from rloo_cli.launch.sweep.turns import LEAST
from rloo_cli.utils import environment, pids
from rloo_cli.utils.errors import ConfigError, Problem, RunError
from rloo_cli.utils.files import read_json

PARKED_SHARE = 0.125  # of a GPU, for members that wait: plans leave more than that unused
NOT_OURS = ("hydra/launcher", "hydra.launcher")


def words(given: Sequence[str], environment: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigError for a place and for words that no sweep can have."""
    problems = []
    for word in given:
        if setting(word).startswith(NOT_OURS):
            why, fix = "members run side by side on this machine", "rloo train --multirun ..."
            problems.append(Problem(f"{word}: a sweep has no launcher", "command line", why, fix))
        if word.startswith(("--cfg", "-c")) and not word.startswith("--config"):
            fix = "rloo sweep --dry-run, or rloo train --multirun --cfg job"
            problems.append(Problem(f"{word} is no flag of sweep", "command line", fix=fix))
    if environment.get("RANK") and environment.get("WORLD_SIZE"):
        why, fix = "a sweep starts the processes of its members itself", "unset RANK WORLD_SIZE"
        problems.append(Problem("RANK and WORLD_SIZE are set", "environment", why, fix))
    if problems:
        raise ConfigError(*problems)


def asked(
    keep: Sequence[int], at: Sequence[int], by: Sequence[str], before: Sequence[Rung]
) -> list[Rung]:
    """Early stopping as the flags have it; what was decided already (`before`) stays so."""
    if len(keep) != len(at) or len(by) not in (0, 1, len(at)):
        why = f"found {len(keep)} --keep, {len(at)} --at, {len(by)} --by"
        fix = "--keep 4 --at 20 --keep 2 --at 40 --by reward"
        raise ConfigError(Problem("each --keep has its --at", "command line", why, fix))
    each = [*by] if len(by) == len(at) else [*by, "reward"][:1] * len(at)
    done = [replace(rung, done=False) for rung in before if rung.done]
    found = [Rung(*rung) for rung in zip(keep, at, each, strict=True)]
    return [replace(rung, done=rung in done) for rung in found]


def rungs(found: Sequence[Rung], members: int, steps: Sequence[int | None]) -> Iterator[Problem]:
    """What early stopping cannot do. `steps`: the lengths of the members that are known."""
    least = min((s for s in steps if s is not None), default=None)
    before, left = 0, members
    for rung in found:
        what = f"--keep {rung.keep} --at {rung.at}"
        if rung.keep >= left:
            yield Problem(f"{what} stops nobody", "command line", f"{left} members come to it")
        if rung.at <= before:
            yield Problem(f"{what} does not come later", "command line", f"than step {before}")
        if least is not None and rung.at >= least:
            why = f"a member has {least} steps: at its end there is nothing to save by stopping"
            yield Problem(f"{what} is too late", "command line", why, f"--at {max(1, least // 2)}")
        if not rung.by.removesuffix(LEAST):
            yield Problem("--by takes the name of a metric", "command line", fix="--by reward")
        before, left = rung.at, rung.keep


def member(run: RunConfig) -> Iterator[Problem]:
    """Why a run can be no member: what it does in a sweep would not be what it does alone."""
    backend, spread = run.generation.backend, run.distributed
    if backend != "transformers":
        why = "its engine would hold the device, or the weights of one member, while others train"
        what = f"generation.backend = {backend} is not for a sweep"
        yield Problem(what, "generation.backend", why, "generation=transformers")
    if spread.engine != "single" or spread.num_nodes > 1:
        why = (
            f"distributed.engine = {spread.engine}: its processes would wait for each other's turns"
        )
        fix = "distributed=single, or rloo train --multirun ... one after the other"
        yield Problem("a member of a sweep is one process", "distributed.engine", why, fix)


def members_that_fit(devices: int, memory: float) -> int:
    """Members that a sweep can have open at a time on `devices` GPUs of `memory` bytes each.

    One trains on each, and every other one keeps some of it while it waits.
    """
    return devices * (1 + int(PARKED_SHARE * memory / environment.PARKED_BYTES))


def too_many(members: int, fit: int | None) -> Iterator[Problem]:
    """More members than their GPUs can hold. `fit`: `members_that_fit`; None = there is no GPU."""
    if fit is None or members <= fit:
        return
    each = f"{environment.PARKED_BYTES / 1e9:g} GB"
    why = f"one that waits keeps {each} of its GPU for CUDA itself, and {fit} fit"
    fix = f"at most {fit} members, --jobs N with N more GPUs, or rloo train --multirun"
    yield Problem(f"{members} members are too many side by side", "command line", why, fix)


def checked(jobs: Sequence[Composed]) -> list[RunConfig]:
    """The configs of members. Raises ConfigError with all that is wrong with any of them."""
    runs: list[RunConfig] = []
    problems: dict[Problem, None] = {}  # in order, each once: most are every member's
    for job in jobs:
        try:
            run = check.check(job)
        except ConfigError as error:
            problems |= dict.fromkeys(error.problems)
            continue
        problems |= dict.fromkeys(messages.placed(p, job.sources) for p in member(run))
        runs.append(run)
    if problems:
        raise ConfigError(*problems)
    return runs


def named(run: RunConfig, who: Member) -> RunConfig:
    """A member's config, as it is when it goes on under its name."""
    values: dict[str, Any] = {"name": who.name, "resume": who.start or "auto"}
    if who.parent is not None:
        values["resume_allow_changes"] = True
    return run.model_copy(update=values)


def able(found: Sequence[tuple[Member, RunConfig]]) -> None:
    """Raises RunError where members cannot begin here: what of them is there already, and what the
    machine lacks."""
    problems: dict[Problem, None] = {}
    kinds: list[type[RunError]] = []
    for who, run in found:
        try:
            _free(Path(run.root, who.name), run)
            with hf_cache.remembered(who.words):
                preflight.check(run)
        except RunError as error:
            problems |= dict.fromkeys(error.problems)
            kinds.append(type(error))
    if kinds:
        raise min(kinds, key=lambda kind: kind.code)(*problems)


def _free(folder: Path, run: RunConfig) -> None:
    """Raises ConfigError where the member's folder is another run's, or is being trained."""
    facts = read_json(folder / "run.json")
    if facts.get("state") in ("starting", "training") and pids.alive(facts):
        what = f"{folder} is being trained by process {facts['pid']}"
        raise ConfigError(Problem(what, "name", fix="wait for it, or name=OTHER"))
    if facts:
        run = run.model_copy(update={"resume": "auto"})
    resume.plan(folder, run)


def apart(names: Sequence[str]) -> None:
    """Raises ConfigError where two members would be one run."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        why = f"what differs is none of the experiment: {', '.join(SAME_JOB)} are left out of names"
        what = f"two members would be the run {twice[0]}"
        raise ConfigError(Problem(what, "name", why, "sweep another key, or name=a,b"))


def digest(given: Sequence[str]) -> str:
    """6 hex digits of the words that make the sweep what it is."""
    kept = [w for w in given if setting(w).partition(".")[0] not in SAME_JOB]
    return hashlib.sha256("\n".join(sorted(kept)).encode()).hexdigest()[:6]
