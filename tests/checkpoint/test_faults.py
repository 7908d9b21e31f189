"""Faults on purpose: whatever happens in a save, and wherever a run is killed, nothing is lost."""

import contextlib
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from cli_cases import Rloo, children
from fork_cases import Forked
from resume_cases import differing, left, temporaries

from rloo_cli.checkpoint import manifest

WORDS = (
    "train", "+recipe=smoke", "max_steps=3", "checkpoint.every=1", "eval.at_start=false",
    "eval.max_samples=2", "train.learning_rate=0.01", "train.lr_scheduler=constant",
)  # fmt: skip
POINTS = ("ckpt.write", "ckpt.fsync", "ckpt.manifest", "ckpt.rename", "ckpt.latest", "ckpt.prune")


def complete(run: Path) -> list[str]:
    """Names of the run's complete checkpoints."""
    return [
        p.name for p in manifest.list_checkpoints(run) if manifest.checkpoint_problem(p) is None
    ]


def in_the_third_save(forked: Forked) -> Path:
    """A run that was stopped with two checkpoints; its next save is the third."""
    code = forked(*WORDS, faults="gen.request@3=term")
    assert code == 75, forked.said()
    assert complete(forked.folder / "runs" / "smoke") == ["checkpoint-2", "checkpoint-1"]
    shutil.copytree(forked.folder / "runs", forked.folder / "two")
    return forked.folder / "runs"


def again(forked: Forked, runs: Path) -> Path:
    """The same start once more."""
    shutil.rmtree(runs)
    shutil.copytree(forked.folder / "two", runs, symlinks=True)
    return runs / "smoke"


@pytest.fixture
def whole(forked: Forked) -> dict[str, object]:
    """What a run leaves that nobody disturbed."""
    assert forked(*WORDS, "root=whole") == 0, forked.said()
    return left(forked.folder / "whole" / "smoke")


@pytest.mark.slow_but("all")
@pytest.mark.parametrize(
    "points",
    [
        pytest.param(("ckpt.rename", "ckpt.latest"), id="two"),
        pytest.param(POINTS, marks=pytest.mark.slow, id="all"),
    ],
)
def test_kill_9_at_every_point_of_a_save_loses_nothing(
    points: tuple[str, ...], forked: Forked, whole: dict[str, object]
) -> None:
    runs = in_the_third_save(forked)
    for point in points:
        passed = 0
        while True:
            run = again(forked, runs)
            code = forked(*WORDS, "resume=auto", faults=f"{point}@{passed + 1}=kill9")
            found = complete(run)
            assert found and found[0] in ("checkpoint-2", "checkpoint-3"), (point, passed)
            if code == 0:
                break
            assert code == 6, forked.said()
            passed += 1
            named = (run / "latest").read_text().strip()
            assert named in found  # `latest` never names what is not complete
            assert forked(*WORDS, "resume=auto") == 0, forked.said()
            assert not differing(whole, left(run)), (point, passed)
            assert not temporaries(run), (point, passed)
        assert passed, f"a save does not pass {point}"


@pytest.mark.slow_but("ckpt.write-enospc", "ckpt.write-raise")
@pytest.mark.parametrize(
    ("point", "action"), [*((p, "enospc") for p in POINTS[:5]), ("ckpt.write", "raise")]
)
def test_a_save_that_fails_leaves_the_old_ones_and_the_run_goes_on(
    point: str, action: str, forked: Forked, whole: dict[str, object]
) -> None:
    runs = in_the_third_save(forked)
    forked.said()
    run, later = runs / "smoke", (*WORDS, "max_steps=4", "resume=auto")
    assert forked(*later, faults=f"{point}@1={action}") == 0
    said = forked.said()
    assert "checkpoint-3 was not" in said and "GB" in said
    assert complete(run)[0] == "checkpoint-4" and not temporaries(run)
    assert (run / "final").exists()


@pytest.mark.parametrize("passed", [pytest.param(1, marks=pytest.mark.slow), 2, 4])
def test_a_checkpoint_that_cannot_be_removed_is_no_failed_save_and_is_removed_later(
    passed: int, forked: Forked
) -> None:
    runs = in_the_third_save(forked)
    forked.said()
    later = (*WORDS, "max_steps=4", "resume=auto")
    assert forked(*later, faults=f"ckpt.prune@{passed}=enospc") == 0
    said = forked.said()
    assert "not removed: [Errno 28]" in said
    assert "was not saved" not in said
    assert complete(runs / "smoke") == ["checkpoint-4", "checkpoint-3"]
    assert not temporaries(runs / "smoke")


@pytest.mark.slow
def test_twenty_kills_at_random_times_lose_nothing(rloo: Rloo) -> None:
    words = (*WORDS, "max_steps=500", "checkpoint.every=5", "logging.samples=0")
    words = (*words, "generation.max_completion_length=8", "logging.samples_every=20")
    whole = rloo(*words, "root=whole")
    assert whole.code == 0, whole.said
    draw, run, killed = random.Random(11), rloo.folder / "runs" / "smoke", 0
    for kill in range(20):
        process = rloo.start(*words, "resume=auto")
        end = time.monotonic() + draw.uniform(2.0, 9.0)
        while time.monotonic() < end and process.poll() is None:
            time.sleep(0.01)
        killed += process.poll() is None
        workers = children(process.pid)
        if kill % 2 and workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(workers[0], signal.SIGKILL)
            assert process.wait(60) in (0, 6)
        else:
            process.kill()
            process.wait()
        if kill > 2 and manifest.list_checkpoints(run):
            assert complete(run)
    ended = rloo(*words, "resume=auto")
    assert ended.code == 0, ended.said
    assert killed == 20, "it was finished before the last kill"
    assert not differing(left(rloo.folder / "whole" / "smoke"), left(run))
    assert not temporaries(run)
