"""`rloo slurm`: a recipe as a Slurm batch job, printed or submitted.

KIND: train; train_and_serve, with rollout servers on separate nodes (chosen automatically if
generation.server.num_nodes is set); sweep, one task per combination of key=a,b; eval, which also
takes a run: `rloo slurm render eval runs/NAME`.
"""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from rloo_cli.cli import eval_target, slurm_cluster
from rloo_cli.cli.slurm_template import SLURM_JOB_KINDS, SlurmJob, fill_batch_script
from rloo_cli.cli.verb_parser import parse_verb
from rloo_cli.config import check, compose
from rloo_cli.config.pasted import refuse_unknown_name
from rloo_cli.config.user_files import USER_RECIPE_FILES
from rloo_cli.utils.errors import ConfigError, MachineError, refuse

USAGE = "rloo slurm render|submit [train|train_and_serve|sweep|eval] +recipe=NAME [key=value ...]"
# The batch script adds these itself, from its allocated nodes.
SCRIPT_KEYS = ("slurm", "distributed.num_nodes", "generation.server.num_nodes", "recipe")
SBATCH_TIMEOUT_S = 60.0


def run(args: list[str]) -> int:
    """The verb. Raises ConfigError, and MachineError (3) for a job that cannot run here."""
    options = parse_verb("slurm", args)
    job = job_from_args(options.kind, options.run, options.overrides)
    if note := slurm_cluster.check_time_limit(job):
        print(f"note: {note}", file=sys.stderr)
    if note := _process_count_note(job):
        print(f"note: {note}", file=sys.stderr)
    if options.action == "render":
        script = fill_batch_script(job)
        print(
            json.dumps({"kind": job.kind, "script": script})
            if options.json
            else script.rstrip("\n")
        )
        if note := make_log_folder(job):
            print(note, file=sys.stderr)
        return 0
    slurm_cluster.check_cluster_fits(job)
    lines = submit_job(job)
    if options.json:
        number = lines[0].removeprefix("job ").partition(":")[0]
        values = {"job": number, "kind": job.kind, "run": str(job.folder), "lines": lines}
        print(json.dumps(values, indent=2))
    else:
        print("\n".join(lines))
    return 0


def _process_count_note(job: SlurmJob) -> str:
    """A note if a node's processes and its GPUs may not be what was meant, else ""."""
    spread, asked = job.config.distributed, job.config.slurm.gpus_per_node
    fixed = spread.engine == "single" or spread.num_processes is not None
    if job.kind == "eval" or (asked is None) == fixed:
        return ""
    if asked is not None:
        used = job.used_gpus
        unused = (
            f"slurm.gpus_per_node={asked} reserves {asked} GPUs per node, and the run uses {used}"
        )
        return unused if asked > used else ""
    return (
        f"distributed={spread.engine} trains on one GPU per node here;"
        " distributed.num_processes=8 requests eight"
    )


def job_from_args(kind: str | None, run: str | None, overrides: list[str]) -> SlurmJob:
    """The job for these arguments; `run`: of an evaluation. Raises ConfigError."""
    wrong = kind if kind and kind not in SLURM_JOB_KINDS else run if run and kind != "eval" else ""
    if wrong:
        refuse_unknown_name(
            "kind of job", wrong, SLURM_JOB_KINDS, "rloo slurm render NAME ...", USAGE
        )
    if not run and not any(w.lstrip("+").startswith("recipe=") for w in overrides):
        why = "the batch script starts with a recipe"
        refuse("command line", "rloo slurm needs a recipe", USAGE, why)
    if run:
        settings = eval_target.eval_target_of_run(run, overrides).config
        return SlurmJob("eval", settings, run, _script_overrides(overrides))
    if kind == "sweep":
        return _sweep_job(overrides)
    composed = _composed(kind, overrides)
    settings = check.check_config(composed)
    server: Any = getattr(settings.generation, "server", None)
    served = server is not None and server.num_nodes > 0
    kind = kind or ("train_and_serve" if served else "train")
    if kind == "train" and served:
        what = f"generation.server.num_nodes = {server.num_nodes}, but a train job has none"
        fix = "rloo slurm render train_and_serve ..., or generation.server.num_nodes=0"
        why = "only train_and_serve requests nodes for servers"
        refuse("generation.server.num_nodes", what, fix, why)
    return SlurmJob(kind, settings, _recipe(composed), _script_overrides(composed.user_overrides))


def _composed(kind: str | None, overrides: list[str]) -> compose.ComposedConfig:
    composed = compose.compose_config(overrides)
    if kind == "train_and_serve" and composed.values["generation"]["backend"] != "vllm_server":
        # The script and `rloo vllm-serve` choose the server backend too.
        own = [w for w in overrides if not w.startswith("generation=")]
        composed = compose.compose_config([*own, "generation=vllm_server"])
    return composed


def _recipe(composed: compose.ComposedConfig) -> str:
    """The recipe's name or file."""
    found = next(w.partition("=")[2] for w in composed.user_overrides if w.startswith("+recipe="))
    return str(USER_RECIPE_FILES.get(found, found))


def _script_overrides(overrides: Any) -> list[str]:
    """The run's overrides, without those that the script passes itself."""
    bare = {w: w.lstrip("+~").partition("=")[0] for w in overrides if not w.startswith("hydra.")}
    return [w for w, key in bare.items() if not any(key == o or key.startswith(f"{o}.")
                                                    for o in SCRIPT_KEYS)]  # fmt: skip


def _sweep_job(overrides: list[str]) -> SlurmJob:
    """One run per combination of the overrides with several values. Raises ConfigError."""
    plain = compose.split_config_dirs(overrides)[0]
    try:
        parsed = OverridesParser.create().parse_overrides(plain)
    except HydraException as error:
        raise ConfigError(compose.hydra_problem(error, plain)) from None
    several = {word: p for word, p in zip(plain, parsed, strict=True) if p.is_sweep_override()}
    if not several:
        what, fix = "a sweep needs a key with several values", "algorithm.beta=0.01,0.05"
        refuse("command line", what, fix, f"found one value for each key: {' '.join(plain)}")
    values = [
        [f"{word.partition('=')[0]}={v}" for v in p.sweep_string_iterator()]
        for word, p in several.items()
    ]
    fixed = [w for w in overrides if w not in several]
    lines = [" ".join(map(_xargs_quoted, each)) for each in itertools.product(*values)]
    for each in itertools.product(*values):  # check each: an invalid one costs a job
        composed = compose.compose_config([*fixed, *each])
        settings = check.check_config(composed)
    words = [w for w in composed.user_overrides if w not in {*each}]
    return SlurmJob("sweep", settings, _recipe(composed), _script_overrides(words), lines)


def _xargs_quoted(override: str) -> str:
    """Quoted as `xargs` reads it in the script."""
    return (
        '"' + override.replace('"', '"\\""') + '"' if set(override) & set(" \t'\"\\") else override
    )


def make_log_folder(job: SlurmJob) -> str:
    """Make the folder of the job's log if it is missing. -> a line about it, or ""

    Slurm opens the log before the script starts; without its folder the log is lost.
    """
    folder = Path(job.log).parent
    if "%" in str(folder) or folder.is_dir():  # contains the job id: Slurm creates no such folder
        return ""
    try:
        folder.mkdir(parents=True)
        return f"created {folder} for the job's log: run sbatch in this folder"
    except OSError as error:
        return f"warning: the job's log needs the folder {folder}: mkdir -p {folder} ({error})"


def submit_job(job: SlurmJob) -> list[str]:
    """Submit the job. -> lines that describe it. Raises MachineError with sbatch's error."""
    make_log_folder(job)
    ended = subprocess.run(
        ["sbatch", "--parsable"],
        input=fill_batch_script(job),
        capture_output=True,
        text=True,
        timeout=SBATCH_TIMEOUT_S,
    )
    if ended.returncode:
        fix = "correct the slurm key that it names; `rloo slurm render` prints the script"
        refuse("slurm", "sbatch refuses the job", fix, ended.stderr.strip(), error=MachineError)
    number = ended.stdout.strip().splitlines()[-1].partition(";")[0]
    log = job.log.replace("%x", str(job.config.name)).replace("%j", number).replace("%A", number)
    return [
        f"job {number}: {job.kind} on {job.nodes} node{'s' * (job.nodes > 1)}",
        f"  run   {job.folder}",
        f"  log   {log}",
        f"  stop  scancel {number}",
    ]
