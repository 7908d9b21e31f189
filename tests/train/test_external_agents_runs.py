"""Whole runs with agents behind the proxy: the trainer is killed, and several ranks train."""

import json
import shlex
import time

import psutil
import pytest
from agent_cases import CHATML, write_file
from episode_runs import ENDS, said_in
from fork_cases import Forked
from proxy_cases import SHORT_TALKS, agent_command
from resume_cases import update_apart

pytestmark = pytest.mark.slow  # whole runs, whose agents are processes

# Each starts a process that leaves its group; a run that ends by itself ends that, too.
AGENT = (
    """
import subprocess
subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"],
                 start_new_session=True)
"""
    + SHORT_TALKS
)


@pytest.fixture(scope="module")
def home(fast, tmp_path_factory):
    return Forked(fast, tmp_path_factory.mktemp("external"))


def words(home: Forked, name: str, *more: str) -> list[str]:
    command = shlex.join(agent_command(home.folder, AGENT))
    template = write_file(home.folder, CHATML.replace("<|im_end|>", "<eos>"), "chat.jinja")
    return [
        "train", "+recipe=smoke", "distributed.threads=1", "logging.console=plain",
        "data.path=make:tiny_chat", "agent=proxy", f"agent.command='{command}'",
        f"model.chat_template={template}", "reward=environment", "max_steps=2",
        "generation.max_completion_length=6", "train.prompts_per_step=3", "agent.max_turns=3",
        "algorithm.num_generations=3", "data.eval_split=null", "logging.samples=9",
        "checkpoint.every=1", "train.lr_scheduler=constant", "train.learning_rate=1e-3", ENDS,
        "root=runs", f"name={name}", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def whole(home):
    """A run of one process that nothing disturbs."""
    assert home(*words(home, "whole")) == 0, home.said()
    return home.folder / "runs" / "whole"


def test_a_trainer_that_is_killed_leaves_no_agent_and_samples_the_step_again(home, whole):
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    played = [line for line in lines if "agent/turns" in line]
    assert max(line["agent/turns"] for line in played) > 1
    assert any(0 < line["agent/failures"] < 1 for line in played)
    mark = {"TEST_FOLDER": str(home.folder)}
    asked = words(home, "killed")
    assert home(*asked, faults="turn@3=kill9", env=mark) == 6, home.said()
    end = time.monotonic() + 20
    while left := [p for p in psutil.process_iter() if _has_mark(p, home.folder)]:
        assert time.monotonic() < end, left
        time.sleep(0.05)
    assert home(*asked, "resume=auto") == 0, home.said()
    found = home.folder / "runs" / "killed"
    # Agents are quicker or slower, so that waves have other rows: equal but for rounding.
    assert update_apart(whole, found) < 1e-4
    assert (found / "ledger.jsonl").read_text() == (whole / "ledger.jsonl").read_text()
    assert said_in(found) == said_in(whole)


def _has_mark(process, folder):
    try:
        return process.environ().get("TEST_FOLDER") == str(folder)
    except (psutil.Error, OSError):  # gone, a zombie, or somebody else's
        return False


def test_two_ranks_have_a_proxy_each_and_make_the_update_of_one_process(home, whole):
    spread = ("distributed=ddp", "distributed.num_processes=2")
    assert home(*words(home, "pair", *spread), ranks=2) == 0, home.said()
    pair = home.folder / "runs" / "pair"
    assert update_apart(whole, pair) < 1e-4
    one, two = (
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (whole, pair)
    )
    for a, b in zip(one, two, strict=True):
        names = [n for n in a if n.startswith("agent/") and n != "agent/tool_s"]
        assert {n: a[n] for n in names} == {n: b[n] for n in names}
