"""What a process finds around it: numbers from torchrun, Slurm and rloo; limits. No torch."""

import os
import resource
import sys
from collections.abc import Mapping

from rloo_cli.utils.errors import ConfigError, MachineError, Problem, refuse

Environment = Mapping[str, str]
MIN_OPEN_FILES = 256  # needed by a run's processes: libraries, pipes, sockets, shards
SWEEP_SOCKET_VARIABLE = "RLOO_TURNS"  # for a trial of a sweep: the sweep's socket, and its number
WAITING_TRIALS_VARIABLE = "RLOO_TURNS_BESIDE"  # how many other trials share its device
OFFLOADED_TRIAL_BYTES = 0.5e9  # GPU memory kept by a waiting trial: CUDA's context, cuBLAS
NUMBER_VARIABLES = (  # each of these variables holds a number where it is set
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT",
    "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS", "SLURM_NODEID", "SLURM_PROCID",
    "SLURM_LOCALID", "SLURM_RESTART_COUNT",
)  # fmt: skip


def environment_number(name: str, default: int, env: Environment | None = None) -> int:
    """The number that an environment variable holds; `default` if it is unset or empty.

    Raises ConfigError if it holds anything else.
    """
    text = (os.environ if env is None else env).get(name) or str(default)
    if not (text.isascii() and text.isdigit()):
        what, why = (
            f"{name} = {text!r} is not a number",
            "torchrun, Slurm and rloo set it to a whole number",
        )
        refuse("environment", what, f"unset {name}", why)
    return int(text)


def check_environment_numbers(env: Environment) -> None:
    """Raises ConfigError with every variable that should hold a number and does not."""
    problems: list[Problem] = []
    for name in NUMBER_VARIABLES:
        try:
            environment_number(name, 0, env)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(*problems)
    rank, size = env.get("RANK"), env.get("WORLD_SIZE")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        if env.get(name) and environment_number(name, 1, env) == 0:
            what, why = f"{name} = 0 is not a number of processes", "a launcher sets 1 or more"
            problems.append(Problem(what, "environment", why, f"unset {name}"))
    if rank and size and 0 < int(size) <= int(rank):
        what, why = f"RANK = {rank} is not below WORLD_SIZE = {size}", "ranks count from 0"
        problems.append(Problem(what, "environment", why, "unset RANK WORLD_SIZE"))
    if problems:
        raise ConfigError(*problems)


def check_process_limits() -> None:
    """Allow this process and its children enough open files, as far as the machine permits.

    Raises MachineError if too few are allowed, or if Python would wait for input at exit.
    """
    if sys.flags.inspect or os.environ.get("PYTHONINSPECT"):
        what = "PYTHONINSPECT or python -i is set: each process would wait for input at exit"
        why = "runs start processes and wait for them to exit"
        refuse("environment", what, "unset PYTHONINSPECT", why, error=MachineError)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= MIN_OPEN_FILES:
        return
    if hard == resource.RLIM_INFINITY or hard >= MIN_OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (MIN_OPEN_FILES, hard))
        return
    what = f"the limit of open files is {hard}"
    why = f"a run needs at least {MIN_OPEN_FILES}"
    refuse("ulimit -n", what, f"ulimit -n {MIN_OPEN_FILES}", why, error=MachineError)


def offloaded_trials_bytes() -> float:
    """Bytes of this process's GPU that other trials of its sweep keep while they wait."""
    if SWEEP_SOCKET_VARIABLE not in os.environ:
        return 0.0
    return environment_number(WAITING_TRIALS_VARIABLE, 0) * OFFLOADED_TRIAL_BYTES
