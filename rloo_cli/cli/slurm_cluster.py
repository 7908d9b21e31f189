"""The cluster's partitions, by `sinfo`, and why a job would never start."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from rloo_cli.cli.slurm_template import SlurmJob
from rloo_cli.config.old_names import nearest_names
from rloo_cli.utils.errors import ConfigError, MachineError, Problem, refuse

SINFO_TIMEOUT_S = 30.0
ELSEWHERE = "run this on a login node of the cluster; `rloo slurm render` works anywhere"
SECONDS_PER_UNIT = (1, 60, 3600, 86400)


@dataclass(frozen=True)
class Partition:
    """A line of `sinfo`."""

    name: str
    default: bool
    limit_s: int | None  # None: no limit
    nodes: int

    def __str__(self) -> str:
        nodes = f"{self.nodes} node{'s' * (self.nodes != 1)}"
        return f"{self.name} ({nodes}, {time_limit_text(self.limit_s)})"


def check_cluster_fits(job: SlurmJob) -> None:
    """Raises MachineError (exit 3) with every reason why this job cannot run here."""
    if shutil.which("sbatch") is None:
        why = f"looked in {os.environ.get('PATH', '')}"
        refuse("PATH", "sbatch not found", ELSEWHERE, why, error=MachineError)
    found = cluster_partitions()
    if problems := [*_problems(job, found)]:
        raise MachineError(*problems)


def _problems(job: SlurmJob, partitions: list[Partition]) -> Iterator[Problem]:
    asked, facts = job.config.slurm, f"sinfo: {'; '.join(map(str, partitions)) or 'no partitions'}"
    names = (asked.partition or "").split(",")
    mine = [p for p in partitions if (p.name in names if asked.partition else p.default)]
    for name in names if asked.partition else ():
        if name not in [p.name for p in partitions]:
            close = nearest_names(name, [p.name for p in partitions])
            fix = f"slurm.partition={close[0] if close else 'null'}"
            yield Problem(f"partition {name!r} does not exist", "slurm.partition", facts, fix)
    limits = [p.limit_s for p in mine]
    if mine and job.nodes > max(p.nodes for p in mine):
        where = "generation.server.num_nodes" if job.serving_nodes else "distributed.num_nodes"
        parts = f"{job.nodes - job.serving_nodes} to train"
        parts += f" and {job.serving_nodes} to serve" if job.serving_nodes else ""
        fix = _nodes_fix(job, partitions, max(p.nodes for p in mine))
        yield Problem(f"the job needs {job.nodes} nodes: {parts}", where, facts, fix)
    longest = None if None in limits else max((n for n in limits if n is not None), default=None)
    asked_s = parse_slurm_time(asked.time) if asked.time else None
    if asked_s is not None and longest is not None and asked_s > longest:
        what = f"slurm.time = {asked.time} exceeds the partition's time limit"
        yield Problem(what, "slurm.time", facts, f"slurm.time={format_slurm_time(longest)}")
    limit = asked_s if asked_s is not None else longest
    if limit is not None and limit <= job.lead_s:
        yield _short_limit_problem(job, limit, f"\n{facts}")


def _short_limit_problem(job: SlurmJob, limit_s: int, facts: str = "") -> Problem:
    """The problem of a time limit shorter than the early warning."""
    what = f"a time limit of {time_limit_text(limit_s)} is too short for this job"
    why = f"the run saves {job.lead_s} s before the limit: each attempt would stop at once{facts}"
    longer = format_slurm_time(job.lead_s * 2)
    fix = f"slurm.time={longer}, or slurm.lead_s={max(1, limit_s // 2)}"
    return Problem(what, "slurm.time", why, fix)


def check_time_limit(job: SlurmJob) -> str:
    """A note if the job sets no time limit; else "". Needs no Slurm.

    Raises ConfigError if the limit is not longer than the early warning.
    """
    given = job.config.slurm.time
    if given is None:
        return (
            "slurm.time is not set: the partition's limit applies; a shorter one, such as"
            " slurm.time=04:00:00, may start sooner"
        )
    given_s = parse_slurm_time(given)
    if given_s is not None and given_s <= job.lead_s:
        raise ConfigError(_short_limit_problem(job, given_s))
    return ""


def _nodes_fix(job: SlurmJob, partitions: list[Partition], most: int) -> str:
    """A partition with enough nodes for a job, else as many nodes as its partition has, `most`."""
    larger = [p.name for p in partitions if p.nodes >= job.nodes]
    if larger:
        return f"slurm.partition={larger[0]}"
    key, fewer = "distributed.num_nodes", most
    if job.serving_nodes:
        key, fewer = "generation.server.num_nodes", most - (job.nodes - job.serving_nodes)
    return f"{key}={fewer}" if fewer > 0 else "a cluster with more nodes"


def cluster_partitions() -> list[Partition]:
    """Every partition. Raises MachineError if the controller does not answer."""
    words = ["sinfo", "--noheader", "--format=%P|%l|%D"]
    try:
        ended = subprocess.run(words, capture_output=True, text=True, timeout=SINFO_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        refuse("PATH", "sinfo does not answer", ELSEWHERE, str(error), error=MachineError)
    if ended.returncode:
        fix = "try again when `sinfo` answers"
        refuse("PATH", "sinfo does not answer", fix, ended.stderr.strip(), error=MachineError)
    found: dict[str, Partition] = {}
    for line in ended.stdout.splitlines():
        name, limit, nodes = line.strip().split("|")
        plain = name.rstrip("*")
        before = found[plain].nodes if plain in found else 0
        found[plain] = Partition(plain, name != plain, parse_slurm_time(limit), before + int(nodes))
    return [*found.values()]


def parse_slurm_time(text: str) -> int | None:
    """Slurm's spelling of a time (30, 10:00, 1:00:00, 2-12:00:00) in seconds; None = no limit."""
    if not re.fullmatch(r"[\d:-]+", text):
        return None  # infinite, n/a
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:  # D-HH[:MM[:SS]]
        parts = [int(days), *parts, *[0] * (3 - len(parts))]
    elif len(parts) == 1:  # MINUTES
        parts = [parts[0], 0]
    return sum(n * unit for n, unit in zip(reversed(parts), SECONDS_PER_UNIT, strict=False))


def format_slurm_time(time_s: int) -> str:
    """Seconds as HH:MM:SS."""
    return f"{time_s // 3600:02}:{time_s // 60 % 60:02}:{time_s % 60:02}"


def time_limit_text(limit_s: int | None) -> str:
    """A time limit as text."""
    if limit_s is None:
        return "no limit"
    return f"{limit_s / 3600:.3g} h" if limit_s >= 3600 else f"{limit_s / 60:.3g} min"
