"""Where a process stands, told from its environment: pure, for torchrun, Slurm and neither."""

import socket
import sys
from dataclasses import asdict
from typing import Any

import pytest
from assert_refused import assert_refused

from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.config.schema import RunConfig
from rloo_cli.distributed import device_count
from rloo_cli.launch import preflight, topology
from rloo_cli.launch.topology import ProcessTopology
from rloo_cli.utils.errors import ConfigError, MachineError

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "n0", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
}  # fmt: skip
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2", "SLURM_RESTART_COUNT": "1"}


def step(nodes: int, tasks: int, node: int = 0, task: int = 0, local: int = 0) -> dict[str, str]:
    """The environment of a task of a Slurm step."""
    return SLURM | {
        "SLURM_STEP_NUM_NODES": str(nodes), "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_NODEID": str(node), "SLURM_PROCID": str(task), "SLURM_LOCALID": str(local),
    }  # fmt: skip


# Environment -> what differs from a process that is alone and starts two ranks.
ALONE: dict[str, Any] = asdict(ProcessTopology(num_started=2, world_size=2, local_world_size=2))
FOURTH: dict[str, Any] = {
    "launched_by": "torchrun", "launch_id": "n0:29500:none:0", "first_rank": 3, "num_started": 1,
    "world_size": 4, "first_local_rank": 1, "num_nodes": 2, "num_launchers": 4,
    "store_address": "n0:29500",
}  # fmt: skip
PLACES: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "RANK without WORLD_SIZE": ({"RANK": "1"}, {}),
    "a rank's own child": (TORCHRUN | {"RLOO_LAUNCHER": "1"}, {}),
    "a rank's own child in a step": (step(2, 2) | {"RLOO_LAUNCHER": "1"}, {}),
    "torchrun": (TORCHRUN, FOURTH),
    "torchrun in a Slurm step": (TORCHRUN | step(2, 2, 1, 1), FOURTH),
    "torchrun with one process": (
        TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        {
            "launched_by": "torchrun", "launch_id": "n0:29500:none:0", "num_started": 1,
            "world_size": 1, "local_world_size": 1, "store_address": "n0:29500",
        },
    ),
    "a batch script": ({"SLURM_JOB_ID": "7", "SLURM_NODEID": "0", "SLURM_PROCID": "0"}, {}),
    "a batch script that calls itself a step": (step(2, 2) | {"SLURM_STEP_ID": "4294967291"}, {}),
    "a step of one task": (step(1, 1), {}),
    "one task per node": (
        step(3, 3, node=2, task=2),
        {
            "launched_by": "Slurm", "launch_id": "7.2.1", "first_rank": 4, "num_started": 2,
            "world_size": 6, "num_nodes": 3, "num_launchers": 3,
        },
    ),
    "several tasks on one node": (
        step(1, 4, 0, 3, 3),
        {
            "launched_by": "Slurm", "launch_id": "7.2.1", "first_rank": 3, "num_started": 1,
            "world_size": 4, "first_local_rank": 3, "local_world_size": 4, "num_launchers": 4,
        },
    ),
    "several tasks per node": (
        step(2, 6, 1, 5, 2),
        {
            "launched_by": "Slurm", "launch_id": "7.2.1", "first_rank": 5, "num_started": 1,
            "world_size": 6, "first_local_rank": 2, "local_world_size": 3, "num_nodes": 2,
            "num_launchers": 6,
        },
    ),
    "not as many tasks on each node": (
        step(2, 5, 1, 4, 1) | {"SLURM_STEP_TASKS_PER_NODE": "3,2"},
        {
            "launched_by": "Slurm", "launch_id": "7.2.1", "first_rank": 4, "num_started": 1,
            "world_size": 5, "first_local_rank": 1, "local_world_size": 2, "num_nodes": 2,
            "num_launchers": 5,
        },
    ),
}  # fmt: skip


def spread(*words: str) -> RunConfig:
    """The smoke recipe in two processes."""
    given = ("+recipe=smoke", "distributed=ddp", "distributed.num_processes=2")
    return check.check_config(compose_config((*given, "train.prompts_per_step=8", *words)))


@pytest.mark.parametrize("name", PLACES)
def test_a_process_knows_where_it_stands(name: str) -> None:
    env, differs = PLACES[name]
    ranks, run, _ = topology.find_topology(env, spread())
    assert asdict(ranks) == ALONE | differs
    assert run.distributed.num_processes == ranks.local_world_size
    assert run.distributed.num_nodes == ranks.num_nodes


def test_numbers_that_the_surroundings_change_are_said(sentence) -> None:
    given = spread("distributed.num_processes=4", "distributed.rdzv=h:1")
    notes = [
        *topology.find_topology(step(3, 3), spread())[2],
        *topology.find_topology(TORCHRUN, given)[2],
    ]
    keys = [note.partition(" ")[0].removeprefix("distributed.") for note in notes]
    assert keys == ["num_nodes", "num_processes", "num_nodes", "rdzv"]
    sentence("\n".join(notes))
    assert topology.find_topology(TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}, given)[2] == notes[3:]
    silent = spread("distributed.num_processes=null")  # one per GPU: no number was said
    assert len(topology.find_topology(step(1, 4), silent)[2]) == 0


@pytest.mark.parametrize(
    ("env", "words", "key"),
    [
        ({}, ("distributed.num_nodes=2",), "srun --nodes=2 --ntasks-per-node=1"),
        (step(1, 1), ("distributed.num_nodes=2",), "distributed.num_nodes"),
        (step(3, 3), ("distributed.num_nodes=2",), "distributed.num_nodes"),
        (step(1, 2), ("distributed=single", "distributed.num_processes=1"), "Slurm started 2"),
        (TORCHRUN, ("distributed=single", "distributed.num_processes=1"), "distributed=zero2"),
        (TORCHRUN | {"RANK": "x"}, (), "RANK = 'x'"),
        ({"LOCAL_RANK": "²"}, (), "LOCAL_RANK = '²'"),
        ({"SLURM_RESTART_COUNT": "abc"}, (), "SLURM_RESTART_COUNT = 'abc'"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, (), "MASTER_PORT"),
    ],
    ids=["no Slurm", "one node", "three nodes", "two tasks", "torchrun", "RANK", "LOCAL_RANK",
         "SLURM_RESTART_COUNT", "MASTER_PORT"],
)  # fmt: skip
def test_what_cannot_both_be_right_is_refused(
    env: dict[str, str], words: tuple[str, ...], key: str, sentence
) -> None:
    with pytest.raises(ConfigError) as refused:
        topology.find_topology(env, spread(*words))
    assert_refused(refused, 2, key)
    sentence(refused)


def test_a_task_that_sees_one_gpu_of_its_own_takes_its_first() -> None:
    env = step(1, 4, 0, 3, 3)
    ranks, _, _ = topology.find_topology(env, spread())
    assert topology.with_private_gpu(ranks, env) == ranks
    for name, value in {"SLURM_GPUS_PER_TASK": "1", "SLURM_GPU_BIND": "single:1"}.items():
        own = topology.with_private_gpu(ranks, env | {name: value})
        assert (own.first_local_rank, own.local_world_size) == (0, 1)
        assert (own.first_rank, own.world_size) == (3, 4)
    node, _, _ = topology.find_topology(step(2, 2), spread())  # this one starts them all itself
    assert topology.with_private_gpu(node, {"SLURM_GPUS_PER_TASK": "2"}) == node


def test_bc_20_more_processes_than_gpus_are_refused_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch, sentence
) -> None:
    monkeypatch.setattr(device_count, "visible_gpus", lambda: ["GPU-a"])
    with pytest.raises(MachineError) as refused:
        preflight.check_machine(spread(), local_ranks=2)
    assert_refused(refused, 3, "GPU-a", fix="distributed.num_processes=1")
    sentence(refused)
    preflight.check_machine(spread(), local_ranks=1)
    monkeypatch.setattr(device_count, "visible_gpus", list)
    preflight.check_machine(spread(), local_ranks=2)  # on the CPU they share the cores


def test_bc_22_deepspeed_is_refused_with_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = spread("distributed=zero2")
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    with pytest.raises(MachineError) as refused:
        preflight.check_machine(run)
    fix = "pip install 'rloo-cli[deepspeed]'"
    assert_refused(refused, 3, where="distributed.engine", fix=fix)
    preflight.check_machine(run, downloads=False)  # a plan installs nothing


def test_processes_of_one_machine_meet_on_the_loopback_and_rank_0_gets_the_socket() -> None:
    ranks = ProcessTopology(num_started=2, world_size=2, local_world_size=2)
    listening = topology.open_store_socket(None, ranks)
    assert listening is not None
    with listening:
        host, port = listening.getsockname()
        assert host == "127.0.0.1" and port > 0
        first, second = topology.rank_process_specs(ranks, host, port, listening)
    assert first.open_files == (int(first.env["RLOO_STORE_FD"]),) and not second.open_files
    assert "RLOO_STORE_FD" not in second.env
    assert (first.rank, second.rank) == (0, 1)
    assert second.env["LOCAL_RANK"] == "1" and second.env["MASTER_PORT"] == str(port)
    assert sys.platform != "linux" or first.env["GLOO_SOCKET_IFNAME"] == "lo"


def test_several_nodes_meet_where_others_can_reach_it_or_where_the_config_says() -> None:
    ranks = ProcessTopology(
        num_started=2, world_size=4, local_world_size=2, num_nodes=2, num_launchers=2,
        launched_by="Slurm",
    )  # fmt: skip
    listening = topology.open_store_socket(None, ranks)
    assert listening is not None
    with listening:
        host, port = listening.getsockname()[:2]
        starts = topology.rank_process_specs(ranks, host, port, listening)
        assert host != "0.0.0.0" and "GLOO_SOCKET_IFNAME" not in starts[0].env
    taken = topology.open_store_socket("127.0.0.1:0", ranks)
    assert taken is not None
    with taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(MachineError) as refused:
            topology.open_store_socket(where, ranks)
    assert_refused(refused, 3, where)
    there = ProcessTopology(world_size=2, store_address="n0:1", launched_by="torchrun")
    assert topology.open_store_socket(None, there) is None


def test_a_process_alone_is_told_nothing() -> None:
    ranks = ProcessTopology()
    assert topology.open_store_socket(None, ranks) is None
    assert [dict(s.env) for s in topology.rank_process_specs(ranks, "", 0, None)] == [{}]


FSDP_LAUNCH = {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_FSDP": "true"}
ZERO_LAUNCH = {
    "ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
}  # fmt: skip


@pytest.mark.parametrize(
    ("launch", "engine", "offload"),
    [
        (FSDP_LAUNCH, "fsdp2", "none"),
        (FSDP_LAUNCH | {"FSDP_OFFLOAD_PARAMS": "true"}, "fsdp2", "parameters"),
        (ZERO_LAUNCH, "zero2", "optimizer"),
        ({"ACCELERATE_MIXED_PRECISION": "no"}, "ddp", "none"),
    ],
)
def test_the_engine_of_accelerate_launch_is_taken_over_and_said(
    launch: dict[str, str], engine: str, offload: str
) -> None:
    run = check.check_config(compose_config(["+recipe=smoke"]))
    _, found, notes = topology.find_topology(TORCHRUN | launch, run)
    assert (found.distributed.engine, found.distributed.offload) == (engine, offload)
    assert any(note.startswith(f"distributed.engine is {engine}, ") for note in notes)


def test_an_engine_of_the_config_that_accelerate_launch_contradicts_is_refused(sentence) -> None:
    run = check.check_config(compose_config(["+recipe=smoke", "distributed=zero3"]))
    with pytest.raises(ConfigError) as refused:
        topology.find_topology(TORCHRUN | ZERO_LAUNCH, run)
    key = "distributed.engine"
    assert_refused(refused, 2, "zero3", key, f"{key}=zero2 distributed.offload=optimizer")
    sentence(refused)
    # What a rank of ours inherits from the shell is not its launcher's.
    _, found, _ = topology.find_topology(TORCHRUN | ZERO_LAUNCH | {"RLOO_LAUNCHER": "1"}, run)
    assert found.distributed.engine == "zero3"


def test_an_engine_of_accelerate_launch_that_the_config_cannot_have_is_refused() -> None:
    run = check.check_config(compose_config(["+recipe=smoke", "model.ref_sync.every=4"]))
    with pytest.raises(ConfigError) as refused:
        topology.find_topology(TORCHRUN | FSDP_LAUNCH, run)
    assert_refused(refused, 2, "distributed.engine=fsdp2")


def test_ranks_meet_where_master_addr_and_master_port_say(monkeypatch):
    ranks = topology.ProcessTopology(num_started=2, world_size=2, local_world_size=2)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(port))
    with topology.open_store_socket(None, ranks) as listening:
        assert listening.getsockname() == ("127.0.0.1", port)
        with pytest.raises(MachineError) as refused:
            topology.open_store_socket(None, ranks)
        assert_refused(refused, 3, str(port), fix="unset MASTER_ADDR MASTER_PORT")
        other = topology.open_store_socket("127.0.0.1:0", ranks)
        assert other.getsockname()[1] != port  # the config comes first
        other.close()
        monkeypatch.setenv(topology.LAUNCHER_VARIABLE, "1")  # those of a run of ours
        topology.open_store_socket(None, ranks).close()
