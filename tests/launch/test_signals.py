"""A signal in every phase: what is done is saved, exit 75, and the run goes on from there."""

import json
from pathlib import Path

import pytest
from assert_refused import assert_refused
from cli_cases import Ended
from fork_cases import Forked
from resume_cases import differing, left, temporaries

from rloo_cli.checkpoint import manifest
from rloo_cli.utils import signals
from rloo_cli.utils.errors import Stopped, StorageError
from rloo_cli.utils.files import read_json

WORDS = (
    "train", "+recipe=smoke", "max_steps=3", "checkpoint.every=2", "eval.max_samples=2",
    "eval.every=2", "eval.batch_size=1", "algorithm.num_minibatches=2",
    "train.learning_rate=0.01", "train.micro_batch_size=4",
)  # fmt: skip
# Where the signal comes -> what is then on the disk. With eval at 0 in 2 batches of one prompt,
# gen.request counts 1 and 2 there.
PHASES = {
    "load@1": [],
    "eval@1": [],  # before the first step there is nothing to save
    "gen.chunk@60": ["checkpoint-1"],
    "reward@2": ["checkpoint-1-0"],
    "logp@9": ["checkpoint-1-0"],  # before the first update
    "logp@13": ["checkpoint-1-0"],  # half-way in the first
    "logp@15": ["checkpoint-1-1"],  # half-way in the second
    "step@3": ["checkpoint-1-1"],
    "ckpt.write@2": ["checkpoint-2"],
    "eval@4": ["checkpoint-2"],
    "metrics@5": ["checkpoint-3", "checkpoint-2"],
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, fast: dict[str, str]) -> dict[str, object]:
    """What a run leaves that no signal reached."""
    forked = Forked(fast, tmp_path_factory.mktemp("whole"))
    assert forked(*WORDS) == 0, forked.said()
    return left(forked.folder / "runs" / "smoke")


@pytest.mark.slow_but("gen.chunk@60", "ckpt.write@2")
@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_in_any_phase_saves_what_is_done_and_the_run_goes_on(
    phase: str, forked: Forked, whole: dict[str, object]
) -> None:
    assert forked(*WORDS, faults=f"{phase}=term") == 75
    said, run = forked.said(), forked.folder / "runs" / "smoke"
    assert [p.name for p in manifest.list_checkpoints(run)] == PHASES[phase], said
    assert "Traceback" not in said and "stopped" in said
    command = " ".join([*WORDS, "resume=auto"]).removeprefix("train ")
    assert f"rloo train {command}\n" in said
    facts = read_json(run / "run.json")
    assert (facts["state"], facts["code"]) == ("stopped", 75)
    assert facts["ended"]["resume"] == f"rloo train {command}"
    assert (run / "logs" / "latest" / "rank_0.log").read_text().endswith("logs/attempt_1\n")
    assert forked(*WORDS, "resume=auto") == 0, forked.said()
    assert not differing(whole, left(run)) and not temporaries(run)
    assert read_json(run / "run.json")["attempt"] == 2


def test_what_was_sampled_before_a_signal_is_not_sampled_again(forked: Forked) -> None:
    assert forked(*WORDS, faults="step@3=term") == 75
    # Two groups of one update are left of step 2; the next request is the evaluation's.
    assert forked(*WORDS, "resume=auto", faults="gen.request@1=exit:77") == 77
    said, run = forked.said(), forked.folder / "runs" / "smoke"
    assert "runs/smoke/checkpoint-1-1, step 1 of 3" in said
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 2 and rows[-1]["updates"] == 4


def test_a_stop_without_progress_saves_nothing_again(forked: Forked) -> None:
    assert forked(*WORDS, faults="gen.chunk@60=term") == 75
    run = forked.folder / "runs" / "smoke"
    before = (run / "checkpoint-1" / manifest.MANIFEST_FILE).stat().st_mtime_ns
    assert forked(*WORDS, "resume=auto", faults="gen.chunk@2=term") == 75
    assert [p.name for p in manifest.list_checkpoints(run)] == ["checkpoint-1"]
    assert (run / "checkpoint-1" / manifest.MANIFEST_FILE).stat().st_mtime_ns == before


def test_metrics_samples_and_ledger_are_cut_back_and_what_was_cut_is_kept(forked: Forked) -> None:
    words = (*WORDS, "eval.at_start=false", "eval.every=0", "checkpoint.every=1")
    assert forked(*words, faults="metrics@2=kill9") == 6
    run = Path(forked.folder / "runs" / "smoke")
    torn = '{"step": 2, "rew'
    with (run / "metrics.jsonl").open("a") as file:
        file.write(torn)
    assert sorted(p.name for p in (run / "samples").iterdir()) == [
        "step_000001.jsonl", "step_000002.jsonl",
    ]  # fmt: skip
    assert forked(*words, "resume=auto", faults="gen.request@1=term") == 75
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").open()] == [1]
    assert (run / "metrics.attempt1.tail.jsonl").read_text() == torn
    assert len((run / "ledger.jsonl").read_text().splitlines()) == 2
    assert (run / "ledger.attempt1.tail.jsonl").read_text().startswith('{"step": 2')
    assert [p.name for p in (run / "samples").iterdir()] == ["step_000001.jsonl"]
    tail = [p.name for p in (run / "samples.attempt1.tail").iterdir()]
    assert tail == ["step_000002.jsonl"]


def test_a_stop_that_cannot_be_saved_ends_with_8_and_names_what_is_there(forked: Forked) -> None:
    code = forked(*WORDS, faults="eval@4=term; ckpt.write@1=enospc")
    said, run = forked.said(), forked.folder / "runs" / "smoke"
    problem = assert_refused(Ended(code, said, ""), 8, "checkpoint-2", fix="resume=auto")
    assert "No space left" in problem.why and not temporaries(run)


def test_a_reward_that_fails_at_a_later_step_keeps_the_steps_before(forked: Forked) -> None:
    (forked.folder / "mine.py").write_text(
        "def score(completions, trainer_state, **kwargs):\n"
        "    if trainer_state.step == 1:\n        raise OSError('no answer')\n"
        "    return [1.0 * len(text) for text in completions]\n"
    )
    words = ("reward=function", "reward.function.path=mine.py:score", "data.eval_split=null")
    assert forked(*WORDS, *words) == 5
    said, run = forked.said(), forked.folder / "runs" / "smoke"
    assert "no answer" in said
    assert [p.name for p in manifest.list_checkpoints(run)] == ["checkpoint-1"]


# Loading stops at once, wherever it is: here in a user's file, whose every error is a reward's.
STOPPED_AT_IMPORT = """
import os, signal, sys
if "torch" in sys.modules:
    os.kill(os.getpid(), signal.SIGTERM)
def score(completions, **kwargs):
    return [0.0] * len(completions)
"""


def test_a_signal_that_was_taken_for_an_error_of_what_it_met_is_still_a_stop(
    forked: Forked,
) -> None:
    (forked.folder / "mine.py").write_text(STOPPED_AT_IMPORT)
    reward = "+reward.mine={type: function, path: 'mine.py:score'}"
    code, said = forked(*WORDS, "reward=[]", reward), forked.said()
    assert code == 75 and "error: " not in said, said


def test_what_goes_wrong_while_a_run_is_saved_for_a_stop_is_not_hidden_by_it() -> None:
    def fails_after(stopped: Stopped) -> Exception:
        try:
            try:
                raise stopped
            except Stopped:
                raise StorageError("the disk is full") from None
        except StorageError as error:
            return error

    late, at_once = Stopped("asked to end"), Stopped("asked to end")
    at_once.at_once = True
    assert isinstance(signals.stop_behind(fails_after(late)), StorageError)
    assert signals.stop_behind(fails_after(at_once)) is at_once
