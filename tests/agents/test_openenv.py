"""scripts/openenv/echo_environment.py: OpenEnv's environments as a class of agent=class.

One test holds OpenEnv's own server, and the quick one here, to the same contract.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from agent_cases import call_text, class_agent, episode_generator, play
from environment_servers import OddOpenenv, program_started

from rloo_cli.utils.paths import ROOT

ECHO = "scripts/openenv/echo_environment.py:EchoEnvironment"


@pytest.fixture
def odd(monkeypatch):
    """Starts the server here: (faults, seconds between pings) -> server."""
    started = []

    def start(*arguments):
        started.append(OddOpenenv(*arguments))
        monkeypatch.setenv("OPENENV_URL", started[-1].url)
        return started[-1]

    yield start
    for server in started:
        server.close()


def played(*said, k=1, pause_s=0.0, workers=0):
    """A group that sends these messages, one a turn, and then says that it is done."""

    def script(text, seed):
        time.sleep(pause_s)
        turn = text.count("<tool_response>")
        return call_text("step", message=said[turn]) if turn < len(said) else "the end"

    config = class_agent({"echo": ECHO}, workers=workers, max_tool_s=30.0)
    (group,) = play(episode_generator(config, script), {"topic": "birds"}, k=k)
    return group


def seen(row):
    return [turn.observation[0]["content"] for turn in row.turns[1:]]


def check_contract(folder, monkeypatch, workers):
    """What a server must do, asked from a folder that has no scripts."""
    monkeypatch.chdir(folder)
    for row in played("hello", "", "hi", k=2, workers=workers).rollouts:
        assert row.failed is None and row.episode_facts["ended_by"] == "answer"
        first, empty, last = seen(row)
        assert first == "hello" and last == "hi" and "no echo" in empty
        assert row.environment == {"steps": 2, "done": False}
        assert row.environment_reward == pytest.approx(0.7)
    assert played().rollouts[0].environment_reward == 0.0


def test_the_contract_holds_for_the_server_here(odd, tmp_path, monkeypatch):
    server = odd()
    check_contract(tmp_path, monkeypatch, workers=0)
    seeds = [m["data"]["seed"] for m in server.heard if m["type"] == "reset"]
    assert len({*seeds[:2]}) == 2 and all(seed < 2**31 for seed in seeds)
    deadline = time.monotonic() + 10  # the server may hear the last word after its client has gone
    while (closed := [m["type"] for m in server.heard].count("close")) < len(seeds):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert closed == len(seeds)


def test_a_session_outlives_a_turn_that_takes_longer_than_the_server_waits_for_a_pong(odd):
    odd({}, 0.2)
    (row,) = played("hello", pause_s=0.8).rollouts
    assert row.failed is None and row.environment_reward == pytest.approx(0.5)


def test_an_environment_that_is_done_ends_the_episode(odd):
    odd()
    (row,) = played("bye", "more").rollouts
    assert row.episode_facts["ended_by"] == "done" and row.environment_reward == pytest.approx(0.3)


@pytest.mark.parametrize("asked", ["reset", "step"])
@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (
            '{"type": "error", "data": {"code": "SESSION_ERROR", "message": "gone"}}',
            "SESSION_ERROR",
        ),
        ('{"type": "observation", "data": {}}', "not an observation"),
        ("{", "JSONDecodeError"),
        ("closes", "closed with code"),
    ],
)
def test_a_server_that_loses_the_session_leaves_the_row_out(odd, asked, fault, why):
    odd({asked: fault})
    (row,) = played("hello").rollouts
    assert why in row.failed and row.environment_reward is None


def test_a_server_that_is_not_there_leaves_the_row_out(monkeypatch):
    monkeypatch.setenv("OPENENV_URL", "http://127.0.0.1:9")
    (row,) = played("hello").rollouts
    assert "ClientConnectorError" in row.failed and row.environment_reward is None


def openenv_python():
    """The Python of a virtual environment with the lock file's packages, made where it is not."""
    if named := os.environ.get("RLOO_OPENENV_PYTHON"):
        return named
    folder = Path(os.environ.get("RLOO_CACHE", Path.home() / ".cache" / "rloo")) / "openenv"
    python = str(folder / "bin" / "python")
    if not (folder / "installed").exists():
        lock = ROOT / "scripts" / "openenv" / "requirements.lock"
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        command = [python, "-m", "pip", "install", "--quiet", "-r", str(lock)]
        child = subprocess.run(command, capture_output=True, text=True)
        if child.returncode:
            pytest.skip(f"pip cannot install openenv-core: {child.stderr.strip()[-300:]}")
        (folder / "installed").touch()
    return python


@pytest.mark.slow
@pytest.mark.process
def test_the_contract_holds_for_the_server_of_openenv(tmp_path, monkeypatch):
    program = ROOT / "scripts" / "openenv" / "echo_server.py"
    with program_started(program, "PORT", python=openenv_python()) as (url, _):
        monkeypatch.setenv("OPENENV_URL", url)
        check_contract(tmp_path, monkeypatch, workers=2)
