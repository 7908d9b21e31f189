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

from rloo_cli.config.rules import address
from rloo_cli.config.schema import DistributedConfig, RunConfig
from rloo_cli.distributed import device_count
from rloo_cli.launch.processes import Start
from rloo_cli.utils.environment import Environment, check_numbers, environment_number
from rloo_cli.utils.errors import ConfigError, MachineError, Problem

OURS = "RLOO_LAUNCHER"  # set in the processes that we start: what RANK says there is ours
# Steps that are none: a batch script, the shell of salloc.
NO_STEP = ("", "4294967291", "4294967292", "4294967290", "4294967294", "batch", "interactive")


@dataclass(frozen=True)
class Place:
    """Where this process stands among those that one command, or one job, started."""

    by: str = ""  # what started us: "", "torchrun", "Slurm"
    key: str = ""  # the same for all that belong together, and another at each start
    first: int = 0  # rank of the first process that we start
    here: int = 1  # how many we start
    total: int = 1
    local: int = 0  # the first one's place on this node
    on_node: int = 1  # ranks on this node, whoever starts them
    nodes: int = 1
    launchers: int = 1  # processes like this one
    store: str = ""  # host:port where ranks meet, where others have made it

    @property
    def leads(self) -> bool:
        """Whether the run's folder is ours to make."""
        return self.first == 0


def find(env: Environment, run: RunConfig) -> tuple[Place, RunConfig, list[str]]:
    """Our place, the config with the numbers that hold there, and what to say of it.

    Raises ConfigError where surroundings and config cannot both be right.
    """
    check_numbers(env)
    given = run.distributed
    step = "" if OURS in env else env.get("SLURM_STEP_ID", "")
    nodes, tasks = (
        _number(env, "SLURM_STEP_NUM_NODES", 1),
        _number(env, "SLURM_STEP_NUM_TASKS", 1),
    )
    if OURS not in env and env.get("RANK") and env.get("WORLD_SIZE"):
        place = _of_torchrun(env)
    elif step in NO_STEP or (tasks == nodes == 1):
        here = device_count.here(run)
        place = Place(here=here, total=here, on_node=here)
        if given.num_nodes > 1:
            raise ConfigError(
                _started_once(given, "in a step of one node" if step else "by itself")
            )
    else:
        if given.num_nodes not in (1, nodes):
            raise ConfigError(_other_step(given, nodes))
        place = _of_node(env, run, nodes) if tasks == nodes else _of_task(env, nodes, tasks)
    if given.engine == "single" and place.total > 1:
        raise ConfigError(_single(place))
    return place, *_with_numbers(run, place)


def _with_numbers(run: RunConfig, place: Place) -> tuple[RunConfig, list[str]]:
    """The config as its surroundings have it, and a line for each number that was another."""
    if not place.by:
        return run, []
    given = run.distributed
    holds = {"num_processes": place.on_node, "num_nodes": place.nodes}
    notes = [
        f"distributed.{key} is {value} here, as {place.by} says (the config has {was})"
        for key, value in holds.items()
        if (was := getattr(given, key)) not in (None, value)
    ]
    if given.rdzv is not None and place.store:
        notes.append(f"distributed.rdzv is not used: {place.by} says {place.store}")
    return run.model_copy(update={"distributed": given.model_copy(update=holds)}), notes


def _of_torchrun(env: Environment) -> Place:
    rank, total = _number(env, "RANK", 0), _number(env, "WORLD_SIZE", 1)
    local, on_node = (
        _number(env, "LOCAL_RANK", 0),
        _number(env, "LOCAL_WORLD_SIZE", 1),
    )
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    if missing and total > 1:
        why = f"RANK={rank} and WORLD_SIZE={total} are set, as torchrun sets them"
        fix = "unset RANK WORLD_SIZE, or start it with torchrun"
        raise ConfigError(Problem(f"{missing[0]} is not set", "environment", why, fix))
    store = f"{env.get('MASTER_ADDR', '')}:{env.get('MASTER_PORT', '')}"
    parts = (store, env.get("TORCHELASTIC_RUN_ID", ""), env.get("TORCHELASTIC_RESTART_COUNT", ""))
    return Place(
        by="torchrun", key=":".join(parts), first=rank, total=total, local=local, on_node=on_node,
        nodes=max(1, -(-total // on_node)), launchers=total, store=store,
    )  # fmt: skip


def _slurm_key(env: Environment) -> str:
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return ".".join(env.get(name) or "0" for name in names)


def _of_node(env: Environment, run: RunConfig, nodes: int) -> Place:
    here, node = device_count.here(run), _number(env, "SLURM_NODEID", 0)
    return Place(
        by="Slurm", key=_slurm_key(env), first=node * here, here=here, total=nodes * here,
        on_node=here, nodes=nodes, launchers=nodes,
    )  # fmt: skip


def _of_task(env: Environment, nodes: int, tasks: int) -> Place:
    node = _number(env, "SLURM_NODEID", 0)
    counts = _per_node(env.get("SLURM_STEP_TASKS_PER_NODE") or "")
    on_node = counts[node] if node < len(counts) else max(1, tasks // nodes)
    return Place(
        by="Slurm", key=_slurm_key(env), first=_number(env, "SLURM_PROCID", 0), total=tasks,
        local=_number(env, "SLURM_LOCALID", 0), on_node=on_node, nodes=nodes, launchers=tasks,
    )  # fmt: skip


def own_gpu(env: Environment) -> bool:
    """Whether Slurm shows each task of this step a GPU of its own, and no other."""
    each = ("SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU")
    tres = env.get("SLURM_TRES_PER_TASK", "")
    bind = env.get("SLURM_GPU_BIND", "")
    return any(env.get(name) for name in each) or "gpu" in tres or "single" in bind


def alone_on_gpu(place: Place, env: Environment) -> Place:
    """The same place as the device's number has it: each task's own GPU is its first."""
    if place.by == "Slurm" and place.launchers == place.total and own_gpu(env):
        return replace(place, local=0, on_node=1)
    return place


def _per_node(text: str) -> list[int]:
    """Slurm's "2(x3),1" -> [2, 2, 2, 1]; [] where it is not that."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        tasks, _, times = part.partition("(x")
        if not tasks.isdigit() or not (times.rstrip(")") or "1").isdigit():
            return []
        counts += [int(tasks)] * int(times.rstrip(")") or 1)
    return counts


def _number(env: Environment, name: str, without: int) -> int:
    return environment_number(name, without, env)


def _single(place: Place) -> Problem:
    return Problem(
        f"distributed.engine = single, and {place.by} started {place.total} processes",
        "distributed.engine",
        "one process trains alone; each of the others would train the same run again",
        "distributed=ddp, distributed=zero2 or distributed=fsdp2",
    )


def _started_once(given: Any, how: str) -> Problem:
    return Problem(
        f"distributed.num_nodes = {given.num_nodes}, and this process was started {how}",
        "distributed.num_nodes",
        "each node needs a launcher of its own, and nothing here starts the others",
        f"srun --nodes={given.num_nodes} --ntasks-per-node=1 rloo train ...\n"
        f"or on each node: torchrun --nnodes={given.num_nodes} --nproc-per-node=N "
        "--rdzv-backend=c10d --rdzv-endpoint=HOST:PORT -m rloo_cli train ...",
    )


def _other_step(given: DistributedConfig, nodes: int) -> Problem:
    return Problem(
        f"distributed.num_nodes = {given.num_nodes}, and this Slurm step has {nodes}",
        "distributed.num_nodes",
        "which of the two is meant cannot be known",
        f"distributed.num_nodes={nodes}, or srun --nodes={given.num_nodes}",
    )


LOOPBACK = "127.0.0.1"
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
STORE = "RLOO_STORE_FD"


def listen(run: RunConfig, place: Place) -> socket.socket | None:
    """The socket of the store, listening; None where none is needed or others have made it.

    On one machine it is the loopback's, unless distributed.rdzv says where. Raises MachineError
    where that address is not ours to listen on.
    """
    if place.total == 1 or place.store:
        return None
    given = address(run.distributed.rdzv) if run.distributed.rdzv else None
    if given is None:
        hosts = [LOOPBACK] if place.nodes == 1 else [*_own_addresses(), LOOPBACK]
        for host in hosts:
            try:
                return _bound(host, 0)
            except OSError:
                continue
        given = LOOPBACK, 0
    try:
        return _bound(*given)
    except OSError as error:
        raise MachineError(
            Problem(
                f"the processes cannot meet at {given[0]}:{given[1]}",
                "distributed.rdzv",
                f"rank 0 is on {platform.node()} and cannot listen there: {error}",
                "distributed.rdzv=null",
            )
        ) from error


def _bound(host: str, port: int) -> socket.socket:
    family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family, kind)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(where)
        listening.listen(1024)
    except OSError:
        listening.close()
        raise
    return listening


def _own_addresses() -> Iterator[str]:
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


def starts(place: Place, host: str, port: int, listening: socket.socket | None) -> list[Start]:
    """The processes to start: who each of them is, and where all meet. One alone needs nothing.

    host, port: of the store. `listening`: its socket, for rank 0.
    """
    if place.total == 1:
        # What another program left in the environment must not make it one of many.
        stray = {name: value for name, value in ALONE.items() if name in os.environ}
        return [Start(stray | ({OURS: str(os.getpid())} if place.by else {}))]
    env = {
        "WORLD_SIZE": str(place.total),
        "LOCAL_WORLD_SIZE": str(place.on_node),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        OURS: str(os.getpid()),
    }
    if place.nodes == 1 and sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
        env["GLOO_SOCKET_IFNAME"] = "lo"  # or it looks for an interface that the host's name has
    found = []
    for i in range(place.here):
        who = {"RANK": str(place.first + i), "LOCAL_RANK": str(place.local + i)}
        first = place.first + i == 0 and listening is not None
        files = (listening.fileno(),) if first and listening is not None else ()
        store = {STORE: str(listening.fileno())} if first and listening is not None else {}
        found.append(Start(env | who | store, files))
    return found
