"""`rloo train` in several processes: started by itself, by torchrun, or one per node by Slurm.

The ranks are not real (`fake_rank`): what is tried is who starts them, what they are told, and
how the launchers end together.
"""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from assert_refused import assert_refused
from cli_cases import Ended
from rank_cases import Launched, Launchers, gone

from rloo_cli.checkpoint.resume import ResumePlan
from rloo_cli.launch import nodes as launch_nodes
from rloo_cli.launch.topology import ProcessTopology
from rloo_cli.utils.errors import GenerationError
from rloo_cli.utils.files import read_json, write_json

TWO = ("distributed=ddp", "distributed.num_processes=2")
STEP = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
}  # fmt: skip


def run_json(launchers: Launchers) -> Path:
    return launchers.folder / "work" / "runs" / "smoke" / "run.json"


def nodes(launchers: Launchers, plans: dict[int, str], *words: str) -> list[Launched]:
    """The launchers of two nodes of a Slurm step, with two ranks each."""
    envs = [STEP | {"SLURM_NODEID": i, "SLURM_PROCID": i, "SLURM_LOCALID": "0"} for i in "10"]
    given = (*TWO, "train.prompts_per_step=4", *words)
    return [launchers.train(*given, plans=plans, **env) for env in envs][::-1]


def tidy(launchers: Launchers) -> list[str]:
    """What stands beside the run's folder."""
    root = launchers.folder / "work" / "runs"
    return sorted(p.name for p in root.iterdir()) if root.exists() else []


def test_two_ranks_are_told_who_they_are_and_where_they_meet(launchers: Launchers) -> None:
    launched = launchers.train(*TWO, plans={0: "exit:0:0.5", 1: "exit:0:0.5"})
    assert launched.code() == 0, launched.said()
    first, second = launched.facts(0), launched.facts(1)
    port = first["env"]["MASTER_PORT"]
    assert second["env"] == {
        "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
    }  # fmt: skip
    assert first["listens"] == ["127.0.0.1", int(port)]
    assert first["words"] == second["words"]
    (plan,) = first["words"]
    assert ResumePlan.from_json(plan).folder.parts[-2:] == ("runs", "smoke")
    facts = read_json(run_json(launchers))
    found = [(r["rank"], r["pid"], r["group"], r["pid_started"]) for r in facts["ranks"]]
    assert [f[:3] for f in found] == [
        (i, f["pid"], f["pid"]) for i, f in enumerate((first, second))
    ]
    assert all(f[3] for f in found)
    assert tidy(launchers) == ["smoke"]


def test_kill_9_of_one_of_two_ranks_ends_the_run_with_6_and_says_which(
    launchers: Launchers,
) -> None:
    launched = launchers.train(*TWO, plans={0: "wait", 1: "wait"})
    pids = [launched.rank(i)["pid"] for i in (0, 1)]
    began = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    assert launched.code() == 6
    assert time.monotonic() - began < 120 and gone(*pids)  # 10 are promised, on a quiet machine
    why = "rank 1 was killed by SIGKILL (out of memory?)"
    assert f"error: {why}" in launched.said() and f"runs/smoke: {why}, after" in launched.said()
    facts = read_json(run_json(launchers))
    assert (facts["state"], facts["code"], facts["ended"]["why"]) == ("failed", 6, why)


@pytest.mark.slow
def test_several_ranks_that_are_refused_leave_no_run(launchers: Launchers) -> None:
    launched = launchers.train(*TWO, plans={0: "exit:4:0.3", 1: "exit:4:0.2"})
    assert launched.code() == 4
    assert tidy(launchers) == [] and not run_json(launchers).parent.parent.exists()


@pytest.mark.slow
def test_a_step_of_two_nodes_is_one_run_of_four_ranks(launchers: Launchers) -> None:
    plans = dict.fromkeys(range(4), "exit:0:8")  # none ends before the last has begun
    first, second = nodes(launchers, plans)
    assert (first.code(), second.code()) == (0, 0), first.said() + second.said()
    got = [first.facts(i)["env"] for i in range(4)]
    assert [(e["RANK"], e["LOCAL_RANK"], e["WORLD_SIZE"]) for e in got] == [
        ("0", "0", "4"), ("1", "1", "4"), ("2", "0", "4"), ("3", "1", "4"),
    ]  # fmt: skip
    assert len({(e["MASTER_ADDR"], e["MASTER_PORT"]) for e in got}) == 1
    assert ["RLOO_STORE_FD" in e for e in got] == [True, False, False, False]
    assert tidy(launchers) == ["smoke"]  # no word of theirs is left
    assert "num_nodes is 2" in first.said() and not second.said()
    assert [r["rank"] for r in read_json(run_json(launchers))["ranks"]] == [0, 1]


@pytest.mark.slow
def test_what_ends_on_one_node_ends_the_other_with_the_same_code(launchers: Launchers) -> None:
    plans = {0: "wait", 1: "wait", 2: "wait", 3: "exit:7:1.5"}
    first, second = nodes(launchers, plans)
    pids = [(first if i < 2 else second).rank(i)["pid"] for i in range(3)]
    assert (first.code(), second.code()) == (7, 7), first.said() + second.said()
    assert gone(*pids) and tidy(launchers) == ["smoke"]
    assert read_json(run_json(launchers))["code"] == 7


@pytest.mark.slow
def test_a_refusal_by_rank_0s_launcher_ends_the_others_at_once(launchers: Launchers) -> None:
    run_json(launchers).parent.mkdir(parents=True)
    (run_json(launchers).parent / "other").write_text("what is no run")
    first, second = nodes(launchers, {})
    assert (first.code(), second.code()) == (2, 2), first.said() + second.said()
    assert "runs/smoke exists" in first.said() and not second.said()
    assert tidy(launchers) == ["smoke"]


@pytest.mark.slow
def test_a_refusal_by_another_nodes_launcher_ends_rank_0s(launchers: Launchers) -> None:
    plans = dict.fromkeys(range(4), "wait")
    base = STEP | {"SLURM_LOCALID": "0"}
    words = ("distributed=ddp", "train.prompts_per_step=4")
    first = launchers.train(
        *words, "distributed.num_processes=2", plans=plans, **base, SLURM_NODEID="0"
    )
    second = launchers.train(
        *words, "distributed.num_processes=1", plans=plans, **base, SLURM_NODEID="1"
    )
    assert (first.code(), second.code()) == (3, 3), first.said() + second.said()
    refused = Ended(3, second.said(), "")
    assert_refused(refused, 3, "4", where="distributed.num_processes")
    assert tidy(launchers) == []  # the run had not begun


def ranks_of_torchrun(launchers: Launchers, *words: str, plans: dict[int, str]) -> list[Launched]:
    """Two processes with the environment that torchrun gives."""
    env = {
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    given = ("distributed=ddp", *words)
    return [launchers.train(*given, plans=plans, **env, RANK=i, LOCAL_RANK=i) for i in ("0", "1")]


def test_under_torchrun_each_process_is_one_rank_of_the_same_run(launchers: Launchers) -> None:
    first, second = ranks_of_torchrun(launchers, plans={0: "exit:0:3", 1: "exit:0:3"})
    assert (first.code(), second.code()) == (0, 0), first.said() + second.said()
    got = [first.facts(i) for i in (0, 1)]
    assert [t["env"]["RANK"] for t in got] == ["0", "1"]
    assert all(t["env"]["MASTER_PORT"] == "29511" for t in got)  # its store, not one of ours
    assert all(t["env"]["TORCHELASTIC_USE_AGENT_STORE"] == "True" for t in got)
    assert not any("RLOO_STORE_FD" in t["env"] for t in got)
    assert tidy(launchers) == ["smoke"]


@pytest.mark.slow
def test_under_torchrun_the_code_and_the_signals_are_ours(launchers: Launchers) -> None:
    first, second = ranks_of_torchrun(launchers, plans={0: "wait", 1: "exit:7:1.5"})
    assert (first.code(), second.code()) == (7, 7), first.said() + second.said()
    shutil.rmtree(run_json(launchers).parent)
    shutil.rmtree(first.folder)
    first.folder.mkdir()
    first, second = ranks_of_torchrun(launchers, plans={0: "signals", 1: "signals"})
    for rank, launched in enumerate((first, second)):
        launched.rank(rank)
    for launched in (first, second):
        launched.process.send_signal(signal.SIGUSR1)
    assert (first.code(), second.code()) == (75, 75), first.said() + second.said()
    assert read_json(run_json(launchers))["state"] == "stopped"


@pytest.mark.slow
def test_the_real_torchrun_starts_a_run_of_two_ranks(launchers: Launchers) -> None:
    count = ["--standalone", "--nproc-per-node", "2", "-m", "rloo_cli", "train", "+recipe=smoke"]
    words = ["-m", "torch.distributed.run", *count, "distributed=ddp"]
    launched = launchers.start(words, {0: "exit:0:1", 1: "exit:0:1"})
    assert launched.code(120) == 0, launched.said()
    assert [launched.facts(i)["env"]["RANK"] for i in (0, 1)] == ["0", "1"]
    assert tidy(launchers) == ["smoke"]


@pytest.mark.slow
def test_the_real_accelerate_launch_starts_a_run_of_two_ranks_by_its_file(
    launchers: Launchers,
) -> None:
    file = launchers.folder / "accelerate.yaml"
    file.write_text("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nnum_processes: 2\n"
                    "num_machines: 1\nmixed_precision: 'no'\n")  # fmt: skip
    words = ["-m", "accelerate.commands.launch", "--config_file", str(file), "-m", "rloo_cli"]
    launched = launchers.start([*words, "train", "+recipe=smoke"], {0: "exit:0:1", 1: "exit:0:1"})
    assert launched.code(120) == 0, launched.said()
    assert "distributed.engine is fsdp2 " in launched.said()
    assert [launched.facts(i)["env"]["RANK"] for i in (0, 1)] == ["0", "1"]


PLACE = ProcessTopology(
    launched_by="Slurm", launch_id="7.0.0", first_rank=1, world_size=2, num_nodes=2, num_launchers=2
)


def test_whoever_waits_for_rank_0_gives_up_at_the_limit_and_says_for_what(
    tmp_path: Path, sentence
) -> None:
    with (
        pytest.raises(GenerationError) as refused,
        launch_nodes.join_coordinator(tmp_path, "a", PLACE) as it,
    ):
        it.wait_for_message(0.5)
    file = launch_nodes.coordinator_file(tmp_path, "a", "7.0.0")
    assert_refused(refused, 6, str(file), fix="distributed.timeout_s")
    sentence(refused.value.render().replace(str(file), "FILE"))
    assert [json.loads(p.read_text())["code"] for p in tmp_path.iterdir()] == [6]


def test_the_word_of_a_start_that_was_killed_is_not_believed(tmp_path: Path) -> None:
    old = {"start": "{}", "code": 5, "answered": ["0123456789abcdef"]}
    write_json(launch_nodes.coordinator_file(tmp_path, "a", "7.0.0"), old)
    write_json(tmp_path / f"{launch_nodes.coordinator_file(tmp_path, 'a', '7.0.0').stem}-1.json",
               {"nonce": "0123456789abcdef", "code": 7})  # fmt: skip
    follower = launch_nodes.NodeWorker(tmp_path, "a", PLACE)
    with pytest.raises(GenerationError):
        follower.wait_for_message(0.5)
    leader = launch_nodes.NodeCoordinator(
        tmp_path, "a", ProcessTopology(launch_id="7.0.0", world_size=2, num_launchers=2)
    )
    assert leader.poll_failure() is None
    leader.send_message(start="the plan")
    assert not [*tmp_path.glob(".go-*-1.json")]  # its own word went with the old ones
    limit = time.monotonic() + 5
    follower.worker_path.write_text(json.dumps({"nonce": follower.nonce}))
    while leader.poll_failure() is None and not leader.answered_nonces:
        assert time.monotonic() < limit
    assert follower.wait_for_message(1)["start"] == "the plan"
