"""Our batch scripts on a real Slurm, with a stand-in for `rloo`: what each mistake of the common
script would do here, signals, exit codes, requeues.
"""

import os
import re
import shutil
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest
from slurm_cases import NODES, Job, Slurm, script

from rloo_cli.utils import paths

pytestmark = pytest.mark.slurm
SCRIPTS = sorted(paths.SLURM.glob("*.sbatch"))
# Says where it runs and what it was given; serves until TERM; trains as $TRAIN says.
STAND_IN = """#!/usr/bin/env bash
number=${RLOO_SERVER_NUMBER:+ RLOO_SERVER_NUMBER=$RLOO_SERVER_NUMBER}
echo "$SLURMD_NODENAME $SLURM_PROCID $1$number ${*:2}" >>said
if [[ $1 == vllm-serve ]]; then
    trap 'echo "$SLURMD_NODENAME ended" >>said; exit 0' TERM
    trap : USR1
    while :; do sleep 0.1; done
fi
eval "$TRAIN"
"""
UNTIL_TERM = "trap 'exit 75' TERM USR1; echo training; while :; do sleep 0.1; done"


class Stand:
    """Jobs whose `rloo` is a stand-in, in a folder of their own."""

    def __init__(self, slurm: Slurm, folder: Path):
        self.slurm, self.folder = slurm, folder
        (folder / "bin").mkdir()
        program = folder / "bin" / "rloo"
        program.write_text(STAND_IN)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

    def submit(self, *words: str, train: str = "exit 0", **variables: str) -> Job:
        path = f"{self.folder / 'bin'}:{self.slurm.environment['PATH']}"
        where = f"--chdir={self.folder}"
        return self.slurm.submit(where, *words, TRAIN=train, PATH=path, **variables)

    def said(self) -> list[str]:
        """The stand-ins' lines, sorted."""
        file = self.folder / "said"
        return sorted(file.read_text().splitlines()) if file.exists() else []


@pytest.fixture
def stand(slurm: Slurm, tmp_path: Path) -> Stand:
    return Stand(slurm, tmp_path)


# Their text.


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.stem)
def test_a_script_is_bash_and_holds_no_secret_and_kills_nothing_by_name(path: Path) -> None:
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0
    text = path.read_text()
    assert not re.search(r"pkill|killall|TOKEN|API_KEY|SECRET|PASSWORD", text)
    for option in ("--requeue", "--open-mode=append", "--signal=USR1@", "--output=%x-%"):
        assert f"#SBATCH {option}" in text
    assert "--kill-on-bad-exit=1" in text and text.count("#rloo: words\n") == 1


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck in PATH")
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.stem)
def test_a_script_passes_shellcheck(path: Path) -> None:
    ended = subprocess.run(["shellcheck", "-s", "bash", str(path)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout


# The five mistakes, each in its right form.


def test_nodes_are_shared_out_by_name_and_each_task_knows_its_own(stand: Stand) -> None:
    """Names with hyphens, joined by commas; the server's words and the trainer's are the same."""
    job = stand.submit("--nodes=3", script("train_and_serve"), "smoke", "seed=2", "data.columns={}",
                       train="sleep 1")  # fmt: skip
    assert job.wait(60)["ExitCode"] == "0:0", job.said()
    both = "+recipe=smoke seed=2 data.columns={} generation=vllm_server"
    both += " generation.server.num_nodes=1 generation.server.allow_remote=true"
    spread = " distributed.num_nodes=2"
    assert stand.said() == [
        f"{NODES[0]} 0 train {both}{spread}",
        f"{NODES[1]} 1 train {both}{spread}",
        f"{NODES[2]} 0 vllm-serve RLOO_SERVER_NUMBER=1 {both} generation.server.host=127.0.0.1",
        f"{NODES[2]} ended",
    ]


def test_each_of_several_serving_nodes_reads_its_own_number(stand: Stand) -> None:
    job = stand.submit("--nodes=3", script("train_and_serve"), "smoke", "generation=mine",
                       train="sleep 1", RLOO_SERVE_NODES="2")  # fmt: skip
    assert job.wait(60)["ExitCode"] == "0:0", job.said()
    said = stand.said()
    numbers = [f"{n} {i} vllm-serve RLOO_SERVER_NUMBER={i + 1}" for i, n in enumerate(NODES[1:])]
    assert [" ".join(line.split()[:4]) for line in said if "NUMBER" in line] == numbers
    assert not [line for line in said if "generation=vllm_server" in line]
    assert [line.split()[0] for line in said if "train" in line.split()] == [NODES[0]]


@pytest.mark.parametrize("name", ["train", "train_and_serve"])
def test_the_jobs_exit_code_is_the_trainers_and_the_nodes_are_free(stand: Stand, name: str) -> None:
    train = "sleep 1; date +%s >>failed; exit 7"  # on two nodes
    job = stand.submit("--nodes=2", script(name), "smoke", train=train)
    facts = job.wait(40)
    late = time.time() - float((stand.folder / "failed").read_text().split()[0])
    assert (facts["JobState"], facts["ExitCode"]) == ("FAILED", "7:0"), job.said()
    assert late < 16 and stand.slurm.idle(5)
    served = [line for line in stand.said() if line.endswith("ended")]
    assert served == ([f"{NODES[1]} ended"] if name == "train_and_serve" else [])


def test_the_code_is_of_the_task_that_failed_first_not_the_highest(stand: Stand) -> None:
    """srun sends the other task TERM, which then ends with 75: no reason to begin again."""
    first = f"[[ $SLURM_PROCID == 1 ]] && {{ sleep 1; exit 5; }}; {UNTIL_TERM}"
    job = stand.submit("--nodes=2", script("train"), "smoke", train=first)
    facts = job.wait(40)
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("FAILED", "5:0", "0")


def test_a_script_waits_for_its_trainer_through_a_signal(stand: Stand) -> None:
    """`wait` returns at once when a trap fires, whatever its child still does."""
    train = "trap : TERM; echo training; sleep 5 & wait; wait; echo saved; exit 7"
    job = stand.submit(script("train"), "smoke", train=train)
    job.until_said("training", 60)
    stand.slurm.run("scancel", "--batch", "--signal=TERM", job.number)
    assert job.wait(60)["ExitCode"] == "7:0" and "saved" in job.said()


def test_one_node_cannot_train_and_serve(stand: Stand) -> None:
    job = stand.submit("--nodes=1", script("train_and_serve"), "smoke")
    assert job.wait(60)["ExitCode"] == "3:0"
    assert "too few" in job.said()
    assert stand.said() == []


# Signals and requeues.


def test_an_early_warning_requeues_the_job_and_the_attempts_share_a_log(stand: Stand) -> None:
    train = f"[[ $SLURM_RESTART_COUNT == 2 ]] && exit 0; {UNTIL_TERM}"
    job = stand.submit("--nodes=2", script("train_and_serve"), "smoke", train=train)
    for again in ("1", "2"):
        wait_for(job, "training", int(again))
        stand.slurm.run("scancel", "--signal=USR1", job.number)
        job.at_once()
    facts = job.wait(40)
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("COMPLETED", "0:0", "2")
    assert [f"attempt {n}, on" in job.said() for n in (1, 2, 3, 4)] == [True, True, True, False]


def test_a_job_that_was_requeued_as_often_as_it_may_be_ends(stand: Stand) -> None:
    job = stand.submit(script("train"), "smoke", train=UNTIL_TERM, max_requeues="1")
    wait_for(job, "training", 1)
    stand.slurm.run("scancel", "--signal=USR1", job.number)
    job.at_once()
    wait_for(job, "training", 2)
    stand.slurm.run("scancel", "--signal=USR1", job.number)
    facts = job.wait(40)
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("FAILED", "75:0", "1")


def wait_for(job: Job, text: str, count: int) -> None:
    until = time.monotonic() + 60
    while job.said().count(text) < count:
        assert time.monotonic() < until, job.said()
        time.sleep(0.1)


def test_a_cancelled_job_is_not_begun_again(stand: Stand) -> None:
    job = stand.submit("--nodes=2", script("train_and_serve"), "smoke", train=UNTIL_TERM)
    job.until_said("training", 60)
    stand.slurm.run("scancel", job.number)
    facts = job.wait(40, "CANCELLED", "PENDING", "FAILED")
    assert stand.slurm.idle(20)
    assert job.state == "CANCELLED" and facts["Restarts"] == "0"


@pytest.mark.slow_but("sweep")
@pytest.mark.parametrize("name", ["sweep", "eval"])
def test_the_other_scripts_requeue_too_and_keep_the_code(stand: Stand, name: str) -> None:
    (stand.folder / "lines").write_text("seed=1\nseed=2 'data.template=\"a b\"'\n")
    words = ["--array=2", script(name), "smoke", "lines"] if name == "sweep" else [
        script(name), "smoke"]  # fmt: skip
    train = f"[[ $SLURM_RESTART_COUNT == 1 ]] && exit 4; {UNTIL_TERM}"
    job = stand.submit(*words, "max_steps=3", train=train)
    job.until_said("training", 60)
    stand.slurm.run("scancel", "--signal=USR1", job.number)
    job.at_once()
    assert job.wait(40)["ExitCode"] == "4:0", job.said()
    line = 'train --multirun +recipe=smoke max_steps=3 seed=2 data.template="a b"'
    given = line if name == "sweep" else "eval +recipe=smoke max_steps=3"
    assert stand.said() == [f"{NODES[0]} 0 {given}"] * 2


def test_a_task_of_a_sweep_without_a_line_is_refused(stand: Stand) -> None:
    (stand.folder / "lines").write_text("seed=1\n")
    job = stand.submit("--array=2", script("sweep"), "smoke", "lines")
    assert job.wait(60)["ExitCode"] == "2:0" and "no line 2" in job.said()


def test_an_evaluation_is_of_a_run_where_there_is_such_a_folder(stand: Stand) -> None:
    (stand.folder / "runs" / "mine").mkdir(parents=True)
    job = stand.submit(script("eval"), "runs/mine")
    assert job.wait(60)["ExitCode"] == "0:0"
    assert stand.said() == [f"{NODES[0]} 0 eval runs/mine"]


def test_a_stopped_slurm_leaves_no_process(tmp_path: Path, slurm: Slurm) -> None:
    """Of the kit itself: what a test starts is gone when it ends."""
    (tmp_path / "s").mkdir()
    other = Slurm(tmp_path / "s", slurm.base, ("one-node",))
    try:
        other.start()
        pids = [int(p.read_text()) for p in (other.folder / "run").glob("*.pid")]
        assert len(pids) == 2
        for pid in pids:
            os.kill(pid, signal.SIGCONT)  # they run
    finally:
        other.stop()
    states = [Path(f"/proc/{pid}/stat") for pid in pids]
    assert all(not s.exists() or s.read_text().rpartition(")")[2].split()[0] == "Z" for s in states)
