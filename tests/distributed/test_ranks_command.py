"""The command itself, with two ranks that it starts: real processes, really killed and stopped."""

import time
from pathlib import Path

import pytest
from assert_refused import assert_refused
from cli_cases import Rloo, strict
from test_ranks_agree import REWARD

from rloo_cli.utils.files import read_json

pytestmark = pytest.mark.ranks

WORDS = (
    "+recipe=smoke", "distributed=ddp", "distributed.num_processes=2", "distributed.threads=1",
    "logging.console=plain", "max_steps=3", "eval.at_start=false", "eval.max_samples=2",
)  # fmt: skip


def own(rloo: Rloo, what: str) -> list[str]:
    (rloo.folder / "mine.py").write_text(REWARD.format(what=what))
    return ["reward=function", "reward.function.path=mine.py:score"]


@pytest.mark.slow
def test_the_command_trains_with_two_ranks_and_leaves_one_run(rloo):
    said = rloo.real("train", *WORDS)
    assert said.code == 0, said.err
    run = rloo.folder / "runs" / "smoke"
    assert [r["step"] for r in strict(run / "metrics.jsonl") if "loss" in r] == [1, 2, 3]
    assert len(read_json(run / "run.json")["ranks"]) == 2
    assert {p.name for p in (run / "logs" / "attempt_1").glob("rank_*.log")} == {
        "rank_0.log", "rank_1.log",
    }  # fmt: skip


@pytest.mark.slow_but("STOP")
@pytest.mark.parametrize("what", ["KILL", pytest.param("STOP", marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_or_stands_still_ends_the_run_with_6_and_its_place(rloo, what):
    words = own(rloo, f"os.kill(os.getpid(), signal.SIG{what})")
    began = time.monotonic()
    said = rloo.real("train", *WORDS, *words, "distributed.timeout_s=8")
    problem = assert_refused(said, 6, "rank 1" if what == "KILL" else "another rank")
    assert time.monotonic() - began < 120  # a generous limit: 8 s to notice, 8 s to end the other
    assert ("SIGKILL" if what == "KILL" else "step 2") in problem.render()
    for rank in read_json(rloo.folder / "runs" / "smoke" / "run.json")["ranks"]:
        assert not alive(rank["pid"]), rank


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
