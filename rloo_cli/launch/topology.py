"""Determines this process's role: alone, a node's launcher, or a rank started by others.

`rloo train` starts its ranks itself. Under torchrun and `accelerate launch` it is already a rank.
In a Slurm step with one task per node it is that node's launcher; with several it is a rank.
"""

import os
import platform
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NoReturn

from rloo_cli.config import rules
from rloo_cli.config.rules import parse_address
from rloo_cli.config.schema import DistributedConfig, RunConfig
from rloo_cli.distributed import device_count
from rloo_cli.launch.processes import ProcessSpec
from rloo_cli.utils.environment import Environment, check_environment_numbers, environment_number
from rloo_cli.utils.errors import ConfigError, MachineError, Problem, refuse
from rloo_cli.utils.ports import bind_failure, bind_tcp_socket

LAUNCHER_VARIABLE = "RLOO_LAUNCHER"  # set in the processes that we start, where RANK is ours
STORE_BACKLOG = 1024  # ranks that may connect at once
# SLURM_STEP_ID outside srun: a batch script, the shell of salloc.
NOT_A_STEP = ("", "4294967291", "4294967292", "4294967290", "4294967294", "batch", "interactive")


@dataclass(frozen=True)
class ProcessTopology:
    """Which ranks of a run this process starts, and which there are on this node and in all."""

    launched_by: str = ""  # our launcher: "", "torchrun", "Slurm"
    launch_id: str = ""  # the same for all launchers of one start, different for each start
    first_rank: int = 0  # rank of the first process we start
    num_started: int = 1  # how many we start
    world_size: int = 1
    first_local_rank: int = 0  # local rank of the first process that we start
    local_world_size: int = 1  # ranks on this node, whoever starts them
    num_nodes: int = 1
    num_launchers: int = 1  # number of launcher processes
    store_address: str = ""  # host:port of the store, if others created it

    @property
    def is_coordinator(self) -> bool:
        """Whether we create the run's folder."""
        return self.first_rank == 0


def find_topology(env: Environment, run: RunConfig) -> tuple[ProcessTopology, RunConfig, list[str]]:
    """This process's topology, the config with its numbers of processes and nodes, and notes.

    Raises ConfigError if environment and config contradict each other.
    """
    check_environment_numbers(env)
    given = run.distributed
    step = "" if LAUNCHER_VARIABLE in env else env.get("SLURM_STEP_ID", "")
    nodes = environment_number("SLURM_STEP_NUM_NODES", 1, env)
    tasks = environment_number("SLURM_STEP_NUM_TASKS", 1, env)
    if LAUNCHER_VARIABLE not in env and env.get("RANK") and env.get("WORLD_SIZE"):
        processes = _torchrun_topology(env)
    elif step in NOT_A_STEP or (tasks == nodes == 1):
        count = device_count.local_process_count(run.distributed, run.generation)
        processes = ProcessTopology(num_started=count, world_size=count, local_world_size=count)
        if given.num_nodes > 1:
            how = "in a one-node step" if step else "without srun or torchrun"
            _refuse_lone_launcher(given, how)
    elif given.num_nodes not in (1, nodes):
        _refuse_other_step(given, nodes)
    elif tasks == nodes:
        count = device_count.local_process_count(run.distributed, run.generation)
        processes = _slurm_node_topology(env, count, nodes)
    else:
        processes = _slurm_task_topology(env, nodes, tasks)
    distributed, notes = _with_accelerate_engine(env, given, processes)
    if distributed != given:
        run = run.model_copy(update={"distributed": distributed})
        if problems := [*rules.run_problems(run)]:
            raise ConfigError(*problems)
    if distributed.engine == "single" and processes.world_size > 1:
        _refuse_many_processes(processes)
    distributed, more = _with_numbers(distributed, processes)
    if env.get("RANK") and not env.get("WORLD_SIZE"):
        more.append(f"RANK={env['RANK']} is ignored because WORLD_SIZE is not set; unset RANK")
    return processes, run.model_copy(update={"distributed": distributed}), [*notes, *more]


def accelerate_engine(env: Environment) -> tuple[str, str]:
    """The engine and the offload that `accelerate launch` requests ("" if it does not)."""
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
    env: Environment, given: DistributedConfig, topology: ProcessTopology
) -> tuple[DistributedConfig, list[str]]:
    """The section with the engine of `accelerate launch`, if the config does not choose one.

    Raises ConfigError if the two differ: the launcher's file would only be half obeyed.
    """
    engine, offload = accelerate_engine(env)
    plain = "ACCELERATE_MIXED_PRECISION" in env and topology.world_size > 1
    engine = engine or ("ddp" if plain and given.engine == "single" else "")
    if LAUNCHER_VARIABLE in env or not engine:
        return given, []
    wanted = {"engine": engine, "offload": offload or given.offload}
    if wanted == {"engine": given.engine, "offload": given.offload}:
        return given, []
    if given.engine != "single":
        why = f"accelerate launch sets {engine}, offload {offload or 'none'}"
        fix = f"distributed.engine={engine} distributed.offload={wanted['offload']}, or start it" \
              " with torchrun"  # fmt: skip
        what = f"distributed.engine = {given.engine}, but accelerate launch sets another engine"
        raise ConfigError(Problem(what, "distributed.engine", why, fix))
    return given.model_copy(update=wanted), [
        f"distributed.{key} is {value}, from accelerate launch (the config has {was})"
        for key, value in wanted.items()
        if (was := getattr(given, key)) != value
    ]


def _with_numbers(
    config: DistributedConfig, topology: ProcessTopology
) -> tuple[DistributedConfig, list[str]]:
    """The section with the launcher's numbers, and notes on those that differ from the config."""
    if not topology.launched_by:
        return config, []
    launcher = topology.launched_by
    numbers = {"num_processes": topology.local_world_size, "num_nodes": topology.num_nodes}
    notes = [
        f"distributed.{key} is {value}, from {launcher} (the config has {was})"
        for key, value in numbers.items()
        if (was := getattr(config, key)) not in (None, value)
    ]
    if config.rdzv is not None and topology.store_address:
        notes.append(f"distributed.rdzv is ignored: {launcher} sets {topology.store_address}")
    return config.model_copy(update=numbers), notes


def _torchrun_topology(env: Environment) -> ProcessTopology:
    rank, total = environment_number("RANK", 0, env), environment_number("WORLD_SIZE", 1, env)
    on_node = environment_number("LOCAL_WORLD_SIZE", 1, env)
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    if missing and total > 1:
        why = f"RANK={rank} and WORLD_SIZE={total} are set, as by torchrun"
        fix = "unset RANK WORLD_SIZE, or start it with torchrun"
        refuse("environment", f"{missing[0]} is not set", fix, why)
    store = f"{env.get('MASTER_ADDR', '')}:{env.get('MASTER_PORT', '')}"
    parts = (store, env.get("TORCHELASTIC_RUN_ID", ""), env.get("TORCHELASTIC_RESTART_COUNT", ""))
    return ProcessTopology(
        launched_by="torchrun",
        launch_id=":".join(parts),
        first_rank=rank,
        world_size=total,
        first_local_rank=environment_number("LOCAL_RANK", 0, env),
        local_world_size=on_node,
        num_nodes=max(1, -(-total // on_node)),
        num_launchers=total,
        store_address=store,
    )


def _slurm_key(env: Environment) -> str:
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return ".".join(env.get(name) or "0" for name in names)


def _slurm_node_topology(env: Environment, count: int, nodes: int) -> ProcessTopology:
    return ProcessTopology(
        launched_by="Slurm",
        launch_id=_slurm_key(env),
        first_rank=environment_number("SLURM_NODEID", 0, env) * count,
        num_started=count,
        world_size=nodes * count,
        local_world_size=count,
        num_nodes=nodes,
        num_launchers=nodes,
    )


def _slurm_task_topology(env: Environment, nodes: int, tasks: int) -> ProcessTopology:
    node = environment_number("SLURM_NODEID", 0, env)
    counts = _per_node(env.get("SLURM_STEP_TASKS_PER_NODE") or "")
    on_node = counts[node] if node < len(counts) else max(1, tasks // nodes)
    return ProcessTopology(
        launched_by="Slurm",
        launch_id=_slurm_key(env),
        first_rank=environment_number("SLURM_PROCID", 0, env),
        world_size=tasks,
        first_local_rank=environment_number("SLURM_LOCALID", 0, env),
        local_world_size=on_node,
        num_nodes=nodes,
        num_launchers=tasks,
    )


def has_private_gpu(env: Environment) -> bool:
    """Whether Slurm shows each task of this step only its own GPU."""
    per_task = ("SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU")
    tres = env.get("SLURM_TRES_PER_TASK", "")
    bind = env.get("SLURM_GPU_BIND", "")
    return any(env.get(name) for name in per_task) or "gpu" in tres or "single" in bind


def with_private_gpu(topology: ProcessTopology, env: Environment) -> ProcessTopology:
    """The topology with local rank 0 if Slurm shows each task only its own GPU, as number 0."""
    is_task = topology.launched_by == "Slurm" and topology.num_launchers == topology.world_size
    if is_task and has_private_gpu(env):
        return replace(topology, first_local_rank=0, local_world_size=1)
    return topology


def _per_node(text: str) -> list[int]:
    """Slurm's "2(x3),1" -> [2, 2, 2, 1]; [] if invalid."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        tasks, _, times = part.partition("(x")
        if not tasks.isdigit() or not (times.rstrip(")") or "1").isdigit():
            return []
        counts += [int(tasks)] * int(times.rstrip(")") or 1)
    return counts


def _refuse_many_processes(topology: ProcessTopology) -> NoReturn:
    started = f"{topology.launched_by} started {topology.world_size} processes"
    refuse(
        "distributed.engine",
        f"distributed.engine = single, but {started}",
        "distributed=ddp, distributed=zero2 or distributed=fsdp2",
        "single trains in one process; each process would train the same run",
    )


def _refuse_lone_launcher(distributed: DistributedConfig, how: str) -> NoReturn:
    nodes = distributed.num_nodes
    refuse(
        "distributed.num_nodes",
        f"distributed.num_nodes = {nodes}, but this process was started {how}",
        f"srun --nodes={nodes} --ntasks-per-node=1 rloo train ...\n"
        f"or on each node: torchrun --nnodes={nodes} --nproc-per-node=N "
        "--rdzv-backend=c10d --rdzv-endpoint=HOST:PORT -m rloo_cli train ...",
        "each node needs its own launcher, and rloo does not start the others",
    )


def _refuse_other_step(distributed: DistributedConfig, nodes: int) -> NoReturn:
    refuse(
        "distributed.num_nodes",
        f"distributed.num_nodes = {distributed.num_nodes}, but this Slurm step has {nodes}",
        f"distributed.num_nodes={nodes}, or srun --nodes={distributed.num_nodes}",
        "the two contradict each other",
    )


LOOPBACK = "127.0.0.1"
SINGLE_RANK_ENVIRONMENT = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
}  # fmt: skip
STORE_FD_VARIABLE = "RLOO_STORE_FD"


def open_store_socket(rdzv: str | None, topology: ProcessTopology) -> socket.socket | None:
    """The store's listening socket; None if none is needed or others created the store.

    On one machine it is on loopback, unless `rdzv` (distributed.rdzv), or MASTER_ADDR
    and MASTER_PORT, set it. Raises MachineError if this machine cannot listen there.
    """
    if topology.world_size == 1 or topology.store_address:
        return None
    address, key = _given_store_address(rdzv, os.environ)
    if address is None:
        hosts = [LOOPBACK] if topology.num_nodes == 1 else [*_node_addresses(), LOOPBACK]
        for host in hosts:
            try:
                return bind_tcp_socket(host, 0, STORE_BACKLOG)
            except OSError:
                continue
        address = LOOPBACK, 0
    try:
        return bind_tcp_socket(*address, STORE_BACKLOG)
    except OSError as error:
        what = f"the processes cannot meet at {address[0]}:{address[1]}"
        why = f"rank 0 is on {platform.node()} and cannot listen there: {bind_failure(error)}"
        fix = f"{key}=null" if key == "distributed.rdzv" else "unset MASTER_ADDR MASTER_PORT"
        refuse(key, what, fix, why, error=MachineError)


def _given_store_address(rdzv: str | None, env: Environment) -> tuple[tuple[str, int] | None, str]:
    """The rendezvous address from the config or the environment, and the name of its source.

    In a process started by our launcher, the variables belong to its own run.
    """
    if rdzv:
        return parse_address(rdzv), "distributed.rdzv"
    if LAUNCHER_VARIABLE in env or not env.get("MASTER_PORT"):
        return None, "distributed.rdzv"
    return (env.get("MASTER_ADDR") or LOOPBACK, environment_number("MASTER_PORT", 0, env)), \
        "MASTER_PORT"  # fmt: skip


def _node_addresses() -> Iterator[str]:
    """This node's addresses, by its resolved name, then by its outgoing route."""
    for name in (os.environ.get("SLURMD_NODENAME"), platform.node()):
        try:
            entries = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM) if name else []
        except OSError:
            continue
        addresses = (str(entry[4][0]) for entry in entries)
        yield from (a for a in addresses if not a.startswith(("127.", "::1")))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # for documentation (RFC 5737): nothing is sent
            yield probe.getsockname()[0]
        except OSError:
            return


def rank_process_specs(
    topology: ProcessTopology, host: str, port: int, listening: socket.socket | None
) -> list[ProcessSpec]:
    """The processes to start: the environment of each rank, in which it also finds the store.

    `host`, `port`: of the store. `listening`: its socket, for rank 0. A single rank needs none.
    """
    launcher = {LAUNCHER_VARIABLE: str(os.getpid())}
    if topology.world_size == 1:
        # Variables left by another program must not turn it into one of several ranks.
        stray = {name: n for name, n in SINGLE_RANK_ENVIRONMENT.items() if name in os.environ}
        return [ProcessSpec(stray | (launcher if topology.launched_by else {}))]
    common = launcher | {
        "WORLD_SIZE": str(topology.world_size),
        "LOCAL_WORLD_SIZE": str(topology.local_world_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }
    one_node = topology.num_nodes == 1 and sys.platform == "linux"
    if one_node and "GLOO_SOCKET_IFNAME" not in os.environ:
        common["GLOO_SOCKET_IFNAME"] = "lo"  # or it looks for an interface with the host's name
    specs = []
    for i in range(topology.num_started):
        rank, local_rank = topology.first_rank + i, topology.first_local_rank + i
        env = common | {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        if rank == 0 and listening is not None:
            store = {STORE_FD_VARIABLE: str(listening.fileno())}
            specs.append(ProcessSpec(env | store, (listening.fileno(),)))
        else:
            specs.append(ProcessSpec(env))
    return specs
