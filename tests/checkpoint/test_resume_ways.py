"""Which runs go on, and from where: nothing left to do, older checkpoints, sweeps, requeues."""

import contextlib
import json
from pathlib import Path
from unittest import mock

import pytest
from assert_refused import assert_refused
from cli_cases import Ended, Rloo, surroundings
from fork_cases import Forked
from resume_cases import WORDS, state

from rloo_cli.checkpoint import manifest
from rloo_cli.checkpoint.resume import ResumePlan
from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.launch import launcher
from rloo_cli.utils.files import read_json, update_json

# Where there is nothing to do, and where something was due.


def test_a_run_with_nothing_left_to_do_says_so(copy: Path, forked: Forked) -> None:
    assert forked(*WORDS, "resume=auto") == 0
    forked.said()
    before = state(copy)
    assert forked(*WORDS, "resume=auto") == 0 and "nothing to do" in forked.said()
    assert forked(*WORDS) == 0 and "nothing to do" in forked.said()
    assert forked(*WORDS, "max_steps=2", "resume=auto") == 0
    assert "at step 3 of 2" in forked.said()
    assert state(copy) == before


def test_a_run_that_was_killed_after_its_last_step_still_gets_its_end(forked: Forked) -> None:
    assert forked(*WORDS, faults="ckpt.prune@1=raise; eval@2=kill9") in (0, 6)
    forked.said()
    assert forked(*WORDS, "resume=auto") == 0, forked.said()
    assert (forked.folder / "runs" / "smoke" / "final").is_dir()


def test_an_older_checkpoint_moves_the_later_ones_aside(copy: Path, forked: Forked) -> None:
    assert forked(*WORDS, "resume=runs/smoke/checkpoint-1") == 0
    assert "checkpoint-2.attempt1" in forked.said()
    assert manifest.checkpoint_problem(copy / "checkpoint-2.attempt1") is None
    assert [p.name for p in manifest.list_checkpoints(copy)] == [
        "checkpoint-3", "checkpoint-2", "checkpoint-1",
    ]  # fmt: skip


def test_a_run_may_begin_with_the_checkpoint_of_another(copy: Path, forked: Forked) -> None:
    words = (*WORDS, "name=other", "resume=runs/smoke/checkpoint-2")
    before = state(copy)
    assert forked(*words, faults="gen.chunk@3=term") == 75
    assert forked(*WORDS, "name=other", "resume=auto") == 0, forked.said()
    other = copy.with_name("other")
    assert next(json.loads(x)["step"] for x in (other / "metrics.jsonl").open()) == 3
    assert state(copy) == before


def test_a_launcher_that_was_killed_while_it_made_the_folder_is_no_obstacle(
    forked: Forked,
) -> None:
    run = forked.folder / "runs" / "smoke"
    run.mkdir(parents=True)
    (run / ".run.json.77.tmp").write_text('{"half')
    with (
        contextlib.chdir(forked.folder),
        mock.patch.object(launcher, "write_text", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):  # run.json is there by then, and nothing else
        composed = compose_config(list(WORDS[1:]))
        launcher.write_attempt_files(ResumePlan(run), check.check_config(composed), composed)
    left = [p.name for p in run.iterdir() if p.is_file()]
    assert sorted(left) == [".run.json.77.tmp", "run.json"]
    update_json(run / "run.json", pid_started="0")  # it was this process, which lives
    assert forked(*WORDS, "resume=auto") == 0, forked.said()


def test_metrics_that_do_not_fit_on_the_disk_end_the_run_with_8(forked: Forked) -> None:
    assert forked(*WORDS, faults="metrics@2=enospc") == 8
    said = forked.said()
    assert_refused(Ended(8, "", said), 8, key="the disk")
    assert "Traceback" not in said
    assert forked(*WORDS, "resume=auto") == 0, forked.said()


# A sweep.


@pytest.mark.slow
def test_a_half_killed_sweep_goes_on_and_a_failed_job_does_not_stop_the_rest(
    forked: Forked,
) -> None:
    (forked.folder / "mine.py").write_text(
        "def score(completions, trainer_state, **kwargs):\n"
        "    return [1.0 * len(text) for text in completions]\n"
    )
    words = (
        *WORDS, "--multirun", "reward=function", "reward.function.path=mine.py:score",
        "data.eval_split=null", "algorithm.beta=0.0,0.05,0.1",
    )  # fmt: skip
    assert forked(*words, faults="step@2=raise") == 1  # each job of its own process fails
    assert "3 jobs, 3 failed" in forked.said()
    assert forked(*words, "resume=auto", faults="gen.chunk@20=term") == 75
    runs = sorted((forked.folder / "runs").iterdir())
    assert len(runs) == 3  # the same names with resume=auto as without
    assert forked(*words, "resume=auto") == 0, forked.said()
    assert {read_json(r / "run.json")["state"] for r in runs} == {"finished"}
    forked.said()
    assert forked(*words, "resume=auto") == 0
    assert forked.said().count("nothing to do") == 3


def test_the_environment_variable_of_a_requeued_job_resumes_unasked(
    copy: Path, forked: Forked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert forked(*WORDS) == 0
    assert "resumes from runs/smoke/checkpoint-2" in forked.said()


# What only a real process shows.


@pytest.mark.slow
def test_two_runs_of_one_name_do_not_meet(tmp_path_factory: pytest.TempPathFactory) -> None:
    rloo = Rloo(tmp_path_factory.mktemp("two"), surroundings(tmp_path_factory.getbasetemp()))
    first = rloo.start("train", "+recipe=smoke", "max_steps=100000", "logging.samples=0")
    try:
        while "s/step" not in (rloo.folder / "out").read_text():
            assert first.poll() is None
        ended = rloo("train", "+recipe=smoke", "max_steps=100000", "resume=auto")
        assert_refused(ended, key=f"process {first.pid}")
    finally:
        first.terminate()
        assert first.wait(60) == 75
