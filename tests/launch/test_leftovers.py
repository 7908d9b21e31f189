"""`rloo doctor --kill-orphans RUN` ends what a run has left, by pid and start, and no other."""

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from assert_refused import assert_refused

from rloo_cli.cli import doctor
from rloo_cli.launch import leftovers, processes
from rloo_cli.utils.child_process import process_start_time
from rloo_cli.utils.errors import ConfigError

pytestmark = pytest.mark.process

# Prints the pid of a process in its group; with an argument, it ends before that one.
LEADER = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "300"], stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
time.sleep(0 if sys.argv[1:] else 300)
"""


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def pids() -> Iterator[list[int]]:
    """Pids that a test has started, ended with it whatever happens."""
    started: list[int] = []
    yield started
    for pid in started:
        if process_start_time(pid):
            os.kill(pid, signal.SIGKILL)


def ended_process() -> tuple[int, str]:
    """The pid and start of a process that is gone."""
    child = subprocess.Popen(["sleep", "0.2"])
    started = process_start_time(child.pid)
    child.wait()
    return child.pid, started


def left_group(pids: list[int], *arguments: str, **variables: str) -> tuple[int, str, int]:
    """The leader of a group with its start, and the pid of a process in it."""
    leader = subprocess.Popen(
        [sys.executable, "-c", LEADER, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | variables,
    )
    started = process_start_time(leader.pid)
    assert leader.stdout
    inner = int(leader.stdout.readline())
    pids += [leader.pid, inner]
    if arguments:
        leader.wait()
    return leader.pid, started, inner


def record(pid: int, started: str, **more: Any) -> dict[str, Any]:
    return {"pid": pid, "group": pid, "pid_started": started, **more}


def make_run(launcher: tuple[int, str], **facts: Any) -> Path:
    folder = Path("runs/mine")
    folder.mkdir(parents=True)
    values = {
        "state": "training", "attempt": 1, "hash": "abc123", "host": platform.node(),
        "pid": launcher[0], "pid_started": launcher[1], "ranks": [],
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(values | facts))
    return folder


def test_a_rank_and_its_group_that_outlived_the_launcher_are_ended_and_named(
    pids: list[int], capsys: pytest.CaptureFixture[str], sentence
) -> None:
    pid, started, inner = left_group(pids)
    make_run(ended_process(), ranks=[record(pid, started, rank=0)])
    assert doctor.run(["--kill-orphans", "mine"]) == 0
    said = capsys.readouterr().out
    assert f" {pid}: rank 0 of " in said and f" {inner}: group of rank 0 " in said
    assert not process_start_time(pid) and not process_start_time(inner)
    assert doctor.run(["--kill-orphans", "mine"]) == 0
    sentence(capsys.readouterr().out)


def test_a_process_whose_leader_is_gone_is_found_by_the_mark_of_its_launcher(
    pids: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    launcher = ended_process()
    mark = {processes.RUN_MARK_VARIABLE: f"{launcher[0]}.{time.time_ns()}"}
    pid, started, inner = left_group(pids, "end", **mark)
    other = {processes.RUN_MARK_VARIABLE: f"{launcher[0]}.{time.time_ns() - 10**12}"}
    _, _, foreign = left_group(pids, "end", **other)  # a launcher that had this pid before
    make_run(launcher, state="failed", ranks=[record(pid, started, rank=0)])
    assert doctor.run(["--kill-orphans", "mine", "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert [p["pid"] for p in got["ended"]] == [inner] and got["left"] == []
    assert not process_start_time(inner) and process_start_time(foreign)


def test_a_process_that_only_has_the_pid_of_a_rank_is_left_alone(
    pids: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    pid, started, inner = left_group(pids)
    make_run(ended_process(), ranks=[record(pid, str(int(started) - 1), rank=0)])
    assert doctor.run(["--kill-orphans", "mine", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ended"] == []
    assert process_start_time(pid) == started and process_start_time(inner)


def test_a_run_that_goes_on_is_refused_and_keeps_its_processes(pids: list[int]) -> None:
    pid, started, inner = left_group(pids)
    me = os.getpid(), process_start_time(os.getpid())
    folder = make_run(me, ranks=[record(pid, started, rank=0)])
    with pytest.raises(ConfigError) as refused:
        doctor.run(["--kill-orphans", "mine"])
    assert_refused(refused, 2, str(me[0]))
    assert leftovers.find_leftovers(folder) == []
    assert process_start_time(pid) and process_start_time(inner)


def test_a_run_of_another_machine_is_refused() -> None:
    make_run(ended_process(), host="elsewhere")
    with pytest.raises(ConfigError, match="ran on elsewhere"):
        doctor.run(["--kill-orphans", "mine"])


def test_a_server_of_the_run_is_ended_and_one_that_its_user_started_is_not(
    pids: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(ended_process(), state="failed")
    values: dict[str, Any] = dict.fromkeys(("url", "token", "model", "dtype", "vllm"), "x")
    values |= {"transfer": "gloo", "devices": [], "host": platform.node(), "log": "x"}
    log = {leftovers.SERVER_LOG_VARIABLE: str(folder.absolute() / "logs/server/server_1.log")}
    pid, started, inner = left_group(pids, **log)
    server = values | {"pid": pid, "group": pid, "pid_started": started}
    (folder / "server.json").write_text(json.dumps(server | {"by": "vllm-serve"}))
    assert doctor.run(["--kill-orphans", "mine"]) == 0
    assert process_start_time(pid) and process_start_time(inner)
    (folder / "server.json").write_text(json.dumps(server | {"by": "train"}))
    assert doctor.run(["--kill-orphans", "mine"]) == 0
    assert f"ended process {pid}: server" in capsys.readouterr().out
    assert not process_start_time(pid) and not process_start_time(inner)


def test_flags_that_do_not_go_together_are_refused() -> None:
    for words in (["--kill-orphans", "mine", "+recipe=smoke"], ["--deep"], ["mine", "--deep"]):
        with pytest.raises(ConfigError):
            doctor.run(words)
