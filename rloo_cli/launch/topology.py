"""Where this process stands: alone, one node's launcher, or one rank that others started.

`rloo train` starts its ranks itself. Under torchrun and `accelerate launch` it is a rank already;
in a Slurm step with one task per node it is that node's launcher, with several it is a rank.
"""

import os
import platform
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rloo_cli.config import rules
from rloo_cli.config.rules import parse_address
from rloo_cli.config.schema import DistributedConfig, RunConfig
from rloo_cli.distributed import device_count
from rloo_cli.launch.processes import ProcessSpec
from rloo_cli.utils.environment import Environment, check_environment_numbers, environment_number
from rloo_cli.utils.errors import ConfigError, MachineError, Problem
from rloo_cli.utils.ports import bind_tcp_socket

LAUNCHER_VARIABLE = (
    "RLOO_LAUNCHER"  # set in the processes that we start: what RANK says there is ours
)
# Steps that are none: a batch script, the shell of salloc.
STORE_BACKLOG = 1024  # ranks that may come at once
NOT_A_STEP = ("", "4294967291", "4294967292", "4294967290", "4294967294", "batch", "interactive")


@dataclass(frozen=True)
class ProcessTopology:
    """Where this process stands among those that one command, or one job, started."""

    launched_by: str = ""  # what started us: "", "torchrun", "Slurm"
    launch_id: str = ""  # the same for all that belong together, and another at each start
    first_rank: int = 0  # rank of the first process that we start
    num_started: int = 1  # how many we start
    world_size: int = 1
    first_local_rank: int = 0  # the first one's place on this node
    local_world_size: int = 1  # ranks on this node, whoever starts them
    num_nodes: int = 1
    num_launchers: int = 1  # processes like this one
    store_address: str = ""  # host:port where ranks meet, where others have made it

    @property
    def is_coordinator(self) -> bool:
        """Whether the run's folder is ours to make."""
        return self.first_rank == 0


def find_topology(env: Environment, run: RunConfig) -> tuple[ProcessTopology, RunConfig, list[str]]:
    """Our place, the config with the numbers that hold there, and what to say of it.

    Raises ConfigError where surroundings and config cannot both be right.
    """
    check_environment_numbers(env)
    given = run.distributed
    step = "" if LAUNCHER_VARIABLE in env else env.get("SLURM_STEP_ID", "")
    nodes, tasks = (
        _environment_number(env, "SLURM_STEP_NUM_NODES", 1),
        _environment_number(env, "SLURM_STEP_NUM_TASKS", 1),
    )
    if LAUNCHER_VARIABLE not in env and env.get("RANK") and env.get("WORLD_SIZE"):
        place = _torchrun_topology(env)
    elif step in NOT_A_STEP or (tasks == nodes == 1):
        here = device_count.local_process_count(run)
        place = ProcessTopology(num_started=here, world_size=here, local_world_size=here)
        if given.num_nodes > 1:
            raise ConfigError(
                _started_once(given, "in a step of one node" if step else "by itself")
            )
    else:
        if given.num_nodes not in (1, nodes):
            raise ConfigError(_other_step(given, nodes))
        place = (
            _slurm_node_topology(env, run, nodes)
            if tasks == nodes
            else _slurm_task_topology(env, nodes, tasks)
        )
    run, notes = _with_accelerate_engine(env, run, place)
    if run.distributed.engine == "single" and place.world_size > 1:
        raise ConfigError(_single_engine_problem(place))
    run, more = _with_numbers(run, place)
    return place, run, [*notes, *more]


def accelerate_engine(env: Environment) -> tuple[str, str]:
    """The engine and the offload that `accelerate launch` asks for ("" for each it does not)."""
    cpu, engine, offload = "cpu", "", ""
    if env.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        stage = env.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "")
        engine = f"zero{stage}" if stage in ("1", "2", "3") else "ddp" if stage == "0" else ""
        if env.get("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE") == cpu:
            offload = "optimizer"
        if env.get("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE") == cpu:
            offload = "parameters"
    elif env.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        engine = "fsdp2"
        offload = "parameters" if env.get("FSDP_OFFLOAD_PARAMS", "").lower() == "true" else ""
    return engine, offload


def _with_accelerate_engine(
    env: Environment, run: RunConfig, topology: ProcessTopology
) -> tuple[RunConfig, list[str]]:
    """The config with the engine of `accelerate launch`, if the config chose none itself.

    Raises ConfigError where the two differ: the launcher's file would be obeyed by half.
    """
    given = run.distributed
    engine, offload = accelerate_engine(env)
    plain = "ACCELERATE_MIXED_PRECISION" in env and topology.world_size > 1
    engine = engine or ("ddp" if plain and given.engine == "single" else "")
    if LAUNCHER_VARIABLE in env or not engine:
        return run, []
    wanted = {"engine": engine, "offload": offload or given.offload}
    if wanted == {"engine": given.engine, "offload": given.offload}:
        return run, []
    if given.engine != "single":
        why = f"accelerate launch says {engine}, offload {offload or 'none'}"
        fix = f"distributed.engine={engine} distributed.offload={wanted['offload']}, or start it" \
              " with torchrun"  # fmt: skip
        what = f"distributed.engine = {given.engine}, and accelerate's launcher says another"
        raise ConfigError(Problem(what, "distributed.engine", why, fix))
    run = run.model_copy(update={"distributed": given.model_copy(update=wanted)})
    if problems := [*rules.run_problems(run)]:
        raise ConfigError(*problems)
    return run, [
        f"distributed.{key} is {value} here, as accelerate launch says (the config has {was})"
        for key, value in wanted.items()
        if (was := getattr(given, key)) != value
    ]


def _with_numbers(run: RunConfig, topology: ProcessTopology) -> tuple[RunConfig, list[str]]:
    """The config as its surroundings have it, and a line for each number that was another."""
    if not topology.launched_by:
        return run, []
    given = run.distributed
    holds = {"num_processes": topology.local_world_size, "num_nodes": topology.num_nodes}
    notes = [
        f"distributed.{key} is {value} here, as {topology.launched_by} says (the config has {was})"
        for key, value in holds.items()
        if (was := getattr(given, key)) not in (None, value)
    ]
    if given.rdzv is not None and topology.store_address:
        notes.append(
            f"distributed.rdzv is not used: {topology.launched_by} says {topology.store_address}"
        )
    return run.model_copy(update={"distributed": given.model_copy(update=holds)}), notes


def _torchrun_topology(env: Environment) -> ProcessTopology:
    rank, total = _environment_number(env, "RANK", 0), _environment_number(env, "WORLD_SIZE", 1)
    local, on_node = (
        _environment_number(env, "LOCAL_RANK", 0),
        _environment_number(env, "LOCAL_WORLD_SIZE", 1),
    )
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    if missing and total > 1:
        why = f"RANK={rank} and WORLD_SIZE={total} are set, as torchrun sets them"
        fix = "unset RANK WORLD_SIZE, or start it with torchrun"
        raise ConfigError(Problem(f"{missing[0]} is not set", "environment", why, fix))
    store = f"{env.get('MASTER_ADDR', '')}:{env.get('MASTER_PORT', '')}"
    parts = (store, env.get("TORCHELASTIC_RUN_ID", ""), env.get("TORCHELASTIC_RESTART_COUNT", ""))
    return ProcessTopology(
        launched_by="torchrun",
        launch_id=":".join(parts),
        first_rank=rank,
        world_size=total,
        first_local_rank=local,
        local_world_size=on_node,
        num_nodes=max(1, -(-total // on_node)),
        num_launchers=total,
        store_address=store,
    )


def _slurm_key(env: Environment) -> str:
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return ".".join(env.get(name) or "0" for name in names)


def _slurm_node_topology(env: Environment, run: RunConfig, nodes: int) -> ProcessTopology:
    here, node = device_count.local_process_count(run), _environment_number(env, "SLURM_NODEID", 0)
    return ProcessTopology(
        launched_by="Slurm",
        launch_id=_slurm_key(env),
        first_rank=node * here,
        num_started=here,
        world_size=nodes * here,
        local_world_size=here,
        num_nodes=nodes,
        num_launchers=nodes,
    )


def _slurm_task_topology(env: Environment, nodes: int, tasks: int) -> ProcessTopology:
    node = _environment_number(env, "SLURM_NODEID", 0)
    counts = _per_node(env.get("SLURM_STEP_TASKS_PER_NODE") or "")
    on_node = counts[node] if node < len(counts) else max(1, tasks // nodes)
    return ProcessTopology(
        launched_by="Slurm",
        launch_id=_slurm_key(env),
        first_rank=_environment_number(env, "SLURM_PROCID", 0),
        world_size=tasks,
        first_local_rank=_environment_number(env, "SLURM_LOCALID", 0),
        local_world_size=on_node,
        num_nodes=nodes,
        num_launchers=tasks,
    )


def has_private_gpu(env: Environment) -> bool:
    """Whether Slurm shows each task of this step a GPU of its own, and no other."""
    each = ("SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU")
    tres = env.get("SLURM_TRES_PER_TASK", "")
    bind = env.get("SLURM_GPU_BIND", "")
    return any(env.get(name) for name in each) or "gpu" in tres or "single" in bind


def with_private_gpu(topology: ProcessTopology, env: Environment) -> ProcessTopology:
    """The same place as the device's number has it: each task's own GPU is its first."""
    if (
        topology.launched_by == "Slurm"
        and topology.num_launchers == topology.world_size
        and has_private_gpu(env)
    ):
        return replace(topology, first_local_rank=0, local_world_size=1)
    return topology


def _per_node(text: str) -> list[int]:
    """Slurm's "2(x3),1" -> [2, 2, 2, 1]; [] where it is not that."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        tasks, _, times = part.partition("(x")
        if not tasks.isdigit() or not (times.rstrip(")") or "1").isdigit():
            return []
        counts += [int(tasks)] * int(times.rstrip(")") or 1)
    return counts


def _environment_number(env: Environment, name: str, default: int) -> int:
    return environment_number(name, default, env)


def _single_engine_problem(topology: ProcessTopology) -> Problem:
    return Problem(
        f"distributed.engine = single, and {topology.launched_by} started {topology.world_size} "
        "processes",
        "distributed.engine",
        "one process trains alone; each of the others would train the same run again",
        "distributed=ddp, distributed=zero2 or distributed=fsdp2",
    )


def _started_once(distributed: Any, how: str) -> Problem:
    return Problem(
        f"distributed.num_nodes = {distributed.num_nodes}, and this process was started {how}",
        "distributed.num_nodes",
        "each node needs a launcher of its own, and nothing here starts the others",
        f"srun --nodes={distributed.num_nodes} --ntasks-per-node=1 rloo train ...\n"
        f"or on each node: torchrun --nnodes={distributed.num_nodes} --nproc-per-node=N "
        "--rdzv-backend=c10d --rdzv-endpoint=HOST:PORT -m rloo_cli train ...",
    )


def _other_step(distributed: DistributedConfig, nodes: int) -> Problem:
    return Problem(
        f"distributed.num_nodes = {distributed.num_nodes}, and this Slurm step has {nodes}",
        "distributed.num_nodes",
        "which of the two is meant cannot be known",
        f"distributed.num_nodes={nodes}, or srun --nodes={distributed.num_nodes}",
    )


LOOPBACK = "127.0.0.1"
SINGLE_RANK_ENVIRONMENT = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
}
STORE_FD_VARIABLE = "RLOO_STORE_FD"


def open_store_socket(run: RunConfig, topology: ProcessTopology) -> socket.socket | None:
    """The socket of the store, listening; None where none is needed or others have made it.

    On one machine it is the loopback's, unless distributed.rdzv says where. Raises MachineError
    where that address is not ours to listen on.
    """
    if topology.world_size == 1 or topology.store_address:
        return None
    given = parse_address(run.distributed.rdzv) if run.distributed.rdzv else None
    if given is None:
        hosts = [LOOPBACK] if topology.num_nodes == 1 else [*_node_addresses(), LOOPBACK]
        for host in hosts:
            try:
                return bind_tcp_socket(host, 0, STORE_BACKLOG)
            except OSError:
                continue
        given = LOOPBACK, 0
    try:
        return bind_tcp_socket(*given, STORE_BACKLOG)
    except OSError as error:
        raise MachineError(
            Problem(
                f"the processes cannot meet at {given[0]}:{given[1]}",
                "distributed.rdzv",
                f"rank 0 is on {platform.node()} and cannot listen there: {error}",
                "distributed.rdzv=null",
            )
        ) from error


def _node_addresses() -> Iterator[str]:
    """This node's addresses as the others resolve its name; then as packets leave it."""
    for name in (os.environ.get("SLURMD_NODENAME"), platform.node()):
        try:
            found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM) if name else []
        except OSError:
            continue
        yield from (str(f[4][0]) for f in found if not str(f[4][0]).startswith(("127.", "::1")))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # kept for documents (RFC 5737): nothing is sent
            yield probe.getsockname()[0]
        except OSError:
            return


def rank_process_specs(
    topology: ProcessTopology, host: str, port: int, listening: socket.socket | None
) -> list[ProcessSpec]:
    """The processes to start: who each of them is, and where all meet. One alone needs nothing.

    host, port: of the store. `listening`: its socket, for rank 0.
    """
    if topology.world_size == 1:
        # What another program left in the environment must not make it one of many.
        stray = {
            name: value for name, value in SINGLE_RANK_ENVIRONMENT.items() if name in os.environ
        }
        return [
            ProcessSpec(
                stray | ({LAUNCHER_VARIABLE: str(os.getpid())} if topology.launched_by else {})
            )
        ]
    env = {
        "WORLD_SIZE": str(topology.world_size),
        "LOCAL_WORLD_SIZE": str(topology.local_world_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        LAUNCHER_VARIABLE: str(os.getpid()),
    }
    if (
        topology.num_nodes == 1
        and sys.platform == "linux"
        and "GLOO_SOCKET_IFNAME" not in os.environ
    ):
        env["GLOO_SOCKET_IFNAME"] = "lo"  # or it looks for an interface that the host's name has
    found = []
    for i in range(topology.num_started):
        who = {
            "RANK": str(topology.first_rank + i),
            "LOCAL_RANK": str(topology.first_local_rank + i),
        }
        first = topology.first_rank + i == 0 and listening is not None
        files = (listening.fileno(),) if first and listening is not None else ()
        store = (
            {STORE_FD_VARIABLE: str(listening.fileno())} if first and listening is not None else {}
        )
        found.append(ProcessSpec(env | who | store, files))
    return found
