"""Numbers that torchrun, Slurm and rloo put into a process's environment. Imports no torch."""

import os
from collections.abc import Mapping

from rloo_cli.utils.errors import ConfigError, Problem

Environment = Mapping[str, str]
SWEEP_SOCKET_VARIABLE = "RLOO_TURNS"  # for a trial of a sweep: the sweep's socket, and its number
WAITING_TRIALS_VARIABLE = "RLOO_TURNS_BESIDE"  # how many other trials share its device
OFFLOADED_TRIAL_BYTES = 0.5e9  # that a trial which waits keeps of a GPU: CUDA's context, cuBLAS
NUMBER_VARIABLES = (  # each of these variables holds a number where it is set
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT",
    "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS", "SLURM_NODEID", "SLURM_PROCID",
    "SLURM_LOCALID", "SLURM_RESTART_COUNT",
)  # fmt: skip


def environment_number(name: str, default: int, env: Environment | None = None) -> int:
    """The number that an environment variable holds; `default` where it is not set or empty.

    Raises ConfigError where it holds anything else.
    """
    text = (os.environ if env is None else env).get(name) or str(default)
    if not (text.isascii() and text.isdigit()):
        what, why = (
            f"{name} = {text!r} is not a number",
            "torchrun, Slurm and rloo set it to a whole number",
        )
        raise ConfigError(Problem(what, "the environment", why, f"unset {name}"))
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


def offloaded_trials_bytes() -> float:
    """Bytes of this process's GPU that other trials of its sweep keep while they wait."""
    if SWEEP_SOCKET_VARIABLE not in os.environ:
        return 0.0
    return environment_number(WAITING_TRIALS_VARIABLE, 0) * OFFLOADED_TRIAL_BYTES
