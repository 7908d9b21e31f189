"""The command itself, with two ranks that it starts: real processes, really killed and stopped."""

import contextlib
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


# What rank 1 does, the keys beside, seconds from then to the limit, the code, what the error names.
ENDS = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", [], 0, 6, "SIGKILL"),
    "stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", [], 8, 6, "step 2"),
    "sleeping": ("time.sleep(900)", ["reward.function.timeout_s=4"], 4, 5, "timeout_s = 4"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDS)
def test_a_rank_that_is_killed_or_waits_too_long_ends_all_soon_after_the_limit(rloo, name):
    what, keys, limit, code, named = ENDS[name]
    then = f"import time; open('then', 'w').write(str(time.time())); {what}"
    words = own(rloo, then)
    said = rloo.real("train", *WORDS, *words, *keys, "distributed.timeout_s=8")
    late = time.time() - float((rloo.folder / "then").read_text()) - limit
    assert_refused(said, code, named)
    assert late < 60  # a rank that hears nothing is given 8 s, on a quiet machine
    assert len(read_json(rloo.folder / "runs" / "smoke" / "run.json")["ranks"]) == 2
    assert not processes_in(rloo.folder)


def processes_in(folder: Path) -> list[str]:
    """The command lines of all processes that run in a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.joinpath("cwd").readlink() == folder:
                found.append((process / "cmdline").read_text().replace("\0", " "))
    return found
