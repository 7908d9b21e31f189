"""Real runs on a real Slurm: trained, served, preempted, requeued, and swept by submitit."""

import time
from concurrent.futures import ThreadPoolExecutor
from importlib import util
from pathlib import Path

import pytest
from cli_cases import strict
from resume_cases import differing, left
from slurm_cases import NODES, Job, Slurm, script

from rloo_cli.generation.vllm import server_file
from rloo_cli.utils import ports
from rloo_cli.utils.files import read_json

pytestmark = pytest.mark.slurm
SMALL = (
    "model.dtype=float32", "data.max_prompt_length=32", "data.eval_split=null",
    "distributed.threads=1",
)  # fmt: skip
SUBMITIT = pytest.mark.skipif(
    util.find_spec("hydra_plugins") is None
    or util.find_spec("hydra_plugins.hydra_submitit_launcher") is None,
    reason="there is no hydra-submitit-launcher (the sweep extra)",
)
# Each step takes a while until the file `go` is there, and longer where there is a file `slow`; it
# fails where there is a file `fail`.
REWARD = """
import time
from pathlib import Path

HERE = Path(__file__).parent


def score(completions, **_):
    if (HERE / "fail").exists():
        (HERE / "failed").write_text(str(time.time()))
        raise ValueError("on purpose")
    if not (HERE / "go").exists():
        time.sleep(1.5 if (HERE / "slow").exists() else 0.5)
    return [float(len(str(c))) for c in completions]
"""


@pytest.fixture
def words(slurm: Slurm, tmp_path: Path) -> tuple[str, ...]:
    """A run of this test's own; its reward is in the test's folder."""
    (tmp_path / "mine.py").write_text(REWARD)
    own = ["reward=function", f"reward.function.path={tmp_path / 'mine.py'}:score"]
    return ("smoke", *SMALL, *own, f"root={tmp_path / 'runs'}")


def ended_well(job: Job, restarts: int = 0) -> None:
    facts = job.wait(240)
    found = facts["JobState"], facts["ExitCode"], facts["Restarts"]
    assert found == ("COMPLETED", "0:0", str(restarts)), job.said()
    assert job.slurm.idle(15)


def steps(run: Path) -> list[int]:
    return [row["step"] for row in strict(run / "metrics.jsonl") if "step_time" in row]


# One node that trains, one that serves.


@pytest.mark.parametrize(
    ("training", "more"),
    [
        pytest.param(1, [], marks=[pytest.mark.vllm, pytest.mark.slow], id="one node trains"),
        pytest.param(
            2,
            ["distributed=ddp", "distributed.num_processes=1"],
            marks=[pytest.mark.vllm, pytest.mark.slow],
            id="two nodes train",
        ),
    ],
)
def test_smoke_is_trained_and_served_on_nodes_of_their_own(
    slurm: Slurm, words: tuple[str, ...], tmp_path: Path, training: int, more: list[str]
) -> None:
    (tmp_path / "go").touch()
    job = slurm.submit(f"--nodes={training + 1}", script("train_and_serve"), *words, *more)
    ended_well(job)
    run = tmp_path / "runs" / "smoke"
    assert read_json(run / "run.json")["state"] == "finished" and steps(run) == [1, 2]
    said = job.said()
    assert "parity of trainer" in said and "the server has stopped" in said
    assert not server_file.server_file_paths(run) and [
        *(run / "logs" / "server").glob("server_1.log")
    ]
    assert f"on gpu-node-[01-0{training + 1}]" in said and NODES[0] == "gpu-node-01"


@pytest.mark.slow
@pytest.mark.vllm
def test_a_trainer_that_fails_ends_the_job_with_its_code_and_the_server(
    slurm: Slurm, words: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "fail").touch()
    job = slurm.submit(script("train_and_serve"), *words)
    facts = job.wait(240)
    late = time.time() - float((tmp_path / "failed").read_text())
    assert (facts["JobState"], facts["ExitCode"]) == ("FAILED", "5:0"), job.said()
    assert late < 15 and slurm.idle(5)
    said = job.said()
    assert "on purpose" in said and "the server has stopped" in said
    assert not server_file.server_file_paths(tmp_path / "runs" / "smoke")


@pytest.mark.slow
@pytest.mark.vllm
def test_a_server_that_dies_at_its_start_ends_the_trainer_with_6_and_its_words(
    slurm: Slurm, words: tuple[str, ...], tmp_path: Path
) -> None:
    with ports.bind_tcp_socket("127.0.0.1", 0) as held:
        held.listen()
        port = held.getsockname()[1]
        job = slurm.submit(script("train_and_serve"), *words, f"generation.server.port={port}")
        facts = job.wait(120)
    assert (facts["JobState"], facts["ExitCode"]) == ("FAILED", "6:0"), job.said()
    said = job.said()
    assert said.count(f"generation.server.port = {port} is taken") == 2  # server's, and trainer's


# Preempted, at the limit, requeued.


@pytest.mark.slow_but("train_and_serve")
@pytest.mark.parametrize(
    "name", ["train", pytest.param("train_and_serve", marks=[pytest.mark.vllm, pytest.mark.slow])]
)
def test_a_preempted_job_is_requeued_and_goes_on_in_the_same_folder(
    slurm: Slurm, words: tuple[str, ...], tmp_path: Path, name: str
) -> None:
    """Trainer and server are told to end at the same moment."""
    job = slurm.submit("--partition=low", script(name), *words, "max_steps=8")
    job.until_said("step 2/8", 240)
    before = slurm.submit("--partition=high", "--nodes=3", "--exclusive", "--wrap=sleep 1")
    job.wait(30, "PENDING")
    assert before.wait(60)["JobState"] == "COMPLETED"
    (tmp_path / "go").touch()
    job.at_once()
    ended_well(job, restarts=1)
    run = tmp_path / "runs" / "smoke"
    assert sorted(p.name for p in (run / "logs").glob("attempt_*")) == ["attempt_1", "attempt_2"]
    assert steps(run) == [*range(1, 9)] and read_json(run / "run.json")["attempt"] == 2
    assert "attempt 1, on" in job.said() and "attempt 2, on" in job.said()
    if name == "train":  # what is left is what a run leaves that nobody disturbed
        root = tmp_path / "undisturbed"
        ended_well(slurm.submit(script(name), *words, "max_steps=8", f"root={root}"))
        assert differing(left(run), left(root / "smoke")) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train", "train_and_serve"])
def test_a_job_at_its_time_limit_saves_and_is_requeued(
    slurm: Slurm, words: tuple[str, ...], tmp_path: Path, name: str
) -> None:
    (tmp_path / "slow").touch()  # no more than 60 steps in the 90 s of an attempt
    limits = ("--time=2", "--signal=USR1@30")
    job = slurm.submit(*limits, script(name), *words, "max_steps=150")
    job.wait(60, "RUNNING")
    for _ in range(2):
        job.wait(180, "PENDING")
        job.at_once()
        job.wait(60, "RUNNING")
    (tmp_path / "go").touch()
    ended_well(job, restarts=2)
    run = tmp_path / "runs" / "smoke"
    assert steps(run) == [*range(1, 151)] and read_json(run / "run.json")["attempt"] == 3


@pytest.mark.slow
def test_slurms_own_two_minutes_are_waited_for(
    slurm: Slurm, words: tuple[str, ...], tmp_path: Path
) -> None:
    """As on a cluster: nobody moves the requeued job's start."""
    job = slurm.submit(script("train"), *words, "max_steps=8")
    job.until_said("step 2/8", 120)
    slurm.run("scancel", "--signal=TERM", job.number)
    (tmp_path / "go").touch()
    ended_well(job, restarts=1)


# Sweeps.


@SUBMITIT
@pytest.mark.slow
def test_submitit_runs_each_job_of_a_sweep_as_a_job_of_slurm(slurm: Slurm, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    ended = slurm.command(
        "rloo", "train", "--multirun", "hydra/launcher=submitit_slurm", "+recipe=smoke",
        *SMALL, "algorithm.beta=0.01,0.05", f"root={root}",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout
    assert "2 jobs, 0 failed" in ended.stdout
    runs = [read_json(p) for p in root.glob("smoke-*/run.json")]
    assert [run["state"] for run in runs] == ["finished"] * 2
    assert len([*root.glob(".submitit/*/*_submission.sh")]) == 1  # an array of two
    assert not [*root.glob(".submitit/rloo-sweep-*")]


@SUBMITIT
@pytest.mark.slow
def test_a_failed_job_of_submitits_is_counted_and_a_stopped_one_goes_on(
    slurm: Slurm, words: tuple[str, ...], tmp_path: Path
) -> None:
    recipe, *rest = words
    sweep = ["--multirun", "hydra/launcher=submitit_slurm", f"+recipe={recipe}", *rest]
    with ThreadPoolExecutor(1) as beside:
        verb = beside.submit(
            slurm.command, "rloo", "train", *sweep, "data.split=train,nothing", "max_steps=8"
        )
        until = time.monotonic() + 120
        while not [*tmp_path.glob("runs/smoke-*/metrics.jsonl")]:
            assert time.monotonic() < until and not verb.done(), verb.result()
            time.sleep(0.2)
        listed = slurm.run("squeue", "--noheader", "--format=%K %A").splitlines()
        number = dict(line.split() for line in listed)["0"]  # of the array: the one that trains
        slurm.run("scancel", "--signal=USR2", number)
        (tmp_path / "go").touch()
        Job(slurm, number).at_once()
        ended = verb.result(240)
    assert ended.returncode == 4 and "2 jobs, 1 failed" in ended.stdout, ended.stdout
    (run,) = tmp_path.glob("runs/smoke-*/run.json")
    assert read_json(run)["state"] == "finished" and read_json(run)["attempt"] == 2


@pytest.mark.slow
@pytest.mark.skipif(
    util.find_spec("hydra_plugins") is None
    or util.find_spec("hydra_plugins.hydra_joblib_launcher") is None,
    reason="there is no hydra-joblib-launcher (the sweep extra)",
)
def test_joblibs_processes_give_their_codes_back(slurm: Slurm, tmp_path: Path) -> None:
    words = ("--multirun", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "+recipe=smoke")
    ended = slurm.command(
        "rloo", "train", *words, *SMALL, "data.split=train,nothing", f"root={tmp_path / 'runs'}"
    )
    assert ended.returncode == 4 and "2 jobs, 1 failed" in ended.stdout, ended.stdout
