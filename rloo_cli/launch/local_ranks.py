"""The processes of `rloo eval`, `rloo sft` and `rloo reward-model`: several ranks on one machine.

Imports no torch. `topology` handles a run's processes, with Slurm and torchrun.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rloo_cli.config.schema import DistributedConfig, RunConfig
from rloo_cli.distributed import device_count
from rloo_cli.launch.processes import ProcessCallbacks, ProcessSpec
from rloo_cli.launch.topology import (
    LOOPBACK,
    ProcessTopology,
    open_store_socket,
    rank_process_specs,
)
from rloo_cli.utils.errors import refuse


def count_local_ranks(run: RunConfig) -> int:
    """The number of processes of a local verb: from `distributed`, but at most the number of
    GPUs, if there are any, since the run may be from a larger machine."""
    wanted = device_count.local_process_count(run.distributed, run.generation)
    gpus = len(device_count.visible_gpus()) - device_count.local_server_gpus(run.generation)
    return min(wanted, gpus) if gpus > 0 else wanted


def check_not_a_rank(verb: str, environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError if another launcher started this process as one of several ranks."""
    if environment.get("RANK") and environment.get("WORLD_SIZE", "1") != "1":
        number = environment["WORLD_SIZE"]
        why = f"RANK and WORLD_SIZE are set, but rloo {verb} starts its processes itself"
        fix = f"rloo {verb} ... distributed=ddp distributed.num_processes={number}"
        refuse("environment", f"rloo {verb} was started as one of {number} processes", fix, why)


@contextmanager
def local_rank_specs(
    distributed: DistributedConfig,
    num_ranks: int,
    env: Mapping[str, str] | None = None,
    poll: Callable[[], None] = lambda: None,
) -> Iterator[tuple[list[ProcessSpec], ProcessCallbacks]]:
    """While inside: the processes to start, and callbacks while they run.

    `env`: variables for each of them. `poll`: called twice a second.
    """
    given = dict(env or {})
    if num_ranks == 1:
        yield [ProcessSpec(given)], ProcessCallbacks(poll=poll)
        return
    topology = ProcessTopology(
        num_started=num_ranks, world_size=num_ranks, local_world_size=num_ranks
    )
    with contextlib.ExitStack() as stack:
        listening = open_store_socket(distributed.rdzv, topology)
        assert listening is not None
        stack.enter_context(listening)
        host, port = listening.getsockname()[:2]
        specs = rank_process_specs(topology, host or LOOPBACK, port, listening)
        specs = [ProcessSpec({**given, **spec.env}, spec.open_files) for spec in specs]
        yield (
            specs,
            ProcessCallbacks(
                lambda pids: listening.close(),  # rank 0 has it
                poll=poll,
                silence_timeout_s=distributed.timeout_s,
            ),
        )
