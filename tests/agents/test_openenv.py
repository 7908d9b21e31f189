"""agent=openenv: the protocol of OpenEnv's servers, and servers that misbehave.

`test_openenv_contract` holds the server here, which is quick and misbehaves at will, and OpenEnv's
own server classes to the same test.
"""

import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from agent_cases import call_text, episode_generator, play, remote_agent
from assert_refused import assert_refused
from environment_servers import OddOpenenv, wait_for_port

from rloo_cli.agents import openenv
from rloo_cli.utils.errors import MachineError
from rloo_cli.utils.paths import ROOT

AGENT = {
    "max_tool_s": 1.0, "max_observation_tokens": 60, "max_turns": 4, "observation": None,
    "reward": "sum",
}  # fmt: skip


@pytest.fixture
def odd():
    """Starts servers that misbehave: (form, faults) -> server."""
    started = []

    def start(*arguments):
        started.append(OddOpenenv(*arguments))
        return started[-1]

    yield start
    for server in started:
        server.close()


def played(url, form, said="hello", k=1, **keys):
    """A group whose every turn sends a message, until it has had three."""
    name = "step" if form == "plain" else "echo_message"

    def script(text, seed):
        done = text.count("<tool_response>") == 2
        return "the end" if done else call_text(name, message=said)

    generator = episode_generator(remote_agent("openenv", url, **AGENT | keys), script)
    (group,) = play(generator, {"topic": "birds"}, k=k)
    return generator, group


def told(row):
    return [turn.observation[0]["content"] for turn in row.turns[1:]]


def check_contract(url, form, reward):
    """What both servers must do."""
    generator, group = played(url, form, k=2, max_tool_s=20.0, max_observation_tokens=200)
    (schema,) = generator.rules.tools.environments[""].schemas
    assert schema["function"]["parameters"]["required"] == ["message"]
    decode = generator.rules.renderer.tokenizer.decode
    assert ("Ready." in decode(group.prompt_ids)) == (form == "plain")
    for row in group.rollouts:
        assert row.failed is None and row.episode_facts["ended_by"] == "answer"
        assert all("hello" in text for text in told(row))
        assert row.environment["step_count"] == (2 if form == "plain" else 0)
        assert row.environment_reward == pytest.approx(reward)
    _, group = played(url, form, said="", max_tool_s=20.0, max_observation_tokens=200)
    assert group.rollouts[0].episode_facts["errors"] == 2
    assert all("no echo" in text for text in told(group.rollouts[0]))


@pytest.mark.parametrize(("form", "reward"), [("plain", 10.0), ("tools", 0.0)])
def test_the_contract_holds_for_the_server_here(odd, form, reward):
    server = odd(form)
    check_contract(server.url, form, reward)
    seeds = [m["data"]["seed"] for m in server.heard if m["type"] == "reset"]
    assert server.most >= 2 and len(set(seeds[:2])) == 2
    assert {m["data"]["topic"] for m in server.heard if m["type"] == "reset"} == {"birds"}


def test_an_episode_without_a_step_has_the_reward_of_its_reset(odd):
    generator = episode_generator(remote_agent("openenv", odd().url, **AGENT), lambda *_: "no")
    (group,) = play(generator, {})
    assert group.rollouts[0].failed is None and group.rollouts[0].environment_reward == 0.0


def test_a_session_outlives_a_turn_that_takes_longer_than_the_server_waits_for_a_pong(odd):
    server = odd("plain", {}, 0.2)

    def script(text, seed):
        time.sleep(0.8)
        return "the end" if "tool_response" in text else call_text("step", message="hello")

    generator = episode_generator(remote_agent("openenv", server.url, **AGENT), script)
    (group,) = play(generator, {})
    assert group.rollouts[0].failed is None and group.rollouts[0].environment_reward == 5.0


def test_one_field_of_the_observation_can_be_chosen(odd):
    server = odd()
    _, group = played(server.url, "plain", observation="echoed_message", reward="last")
    assert told(group.rollouts[0]) == ["hello", "hello"]
    assert group.rollouts[0].environment_reward == 5.0
    _, group = played(server.url, "plain", observation="echo")
    for part in ("'echo'", "agent.observation", "echoed_message"):
        assert part in group.rollouts[0].failed


def test_an_environment_that_is_done_ends_the_episode(odd):
    server = odd("plain", {"step": "done"})
    _, group = played(server.url, "plain")
    assert group.rollouts[0].episode_facts["ended_by"] == "done"
    assert group.rollouts[0].environment_reward == 2.0


# (what is asked, what the server does) -> the failure of the row
GONE = {
    ("connect", "redirect"): "redirects to '/elsewhere', which is not followed",
    ("connect", "status"): "403",
    ("connect", "full"): "CAPACITY_REACHED: at capacity (the server's max_concurrent_envs)",
    ("reset", "session_error"): "SESSION_ERROR: it is gone",
    ("step", "session_error"): "SESSION_ERROR: it is gone",
    ("step", "never_answers"): "no answer within 1 s",
    ("step", "garbage"): "is not a JSON object",
    ("step", "list"): "is not a JSON object",
    ("step", "no_data"): "is not an answer of OpenEnv",
    ("step", "huge"): "too long a message",
    ("step", "other_type"): "is not an observation",
    ("step", "nan"): "the reward inf is not a finite number",
    ("step", "dies"): "closed",
    ("state", "dies"): "closed",
}


@pytest.mark.parametrize(("asked", "fault"), GONE)
def test_a_server_that_misbehaves_leaves_the_row_out(odd, asked, fault):
    server = odd("plain", {asked: fault})
    limit = 1.0 if fault == "never_answers" else 20.0
    _, group = played(server.url, "plain", max_tool_s=limit)
    (row,) = group.rollouts
    assert row.failed is not None and GONE[asked, fault] in row.failed
    assert row.environment_reward is None and "/elsewhere" not in server.paths


def test_the_token_is_sent_with_the_connection(odd, monkeypatch):
    monkeypatch.setenv("WORLD_TOKEN", "sesame-7319")
    server = odd()
    played(server.url, "plain", token_env="WORLD_TOKEN")
    assert server.keys == ["Bearer sesame-7319"]
    monkeypatch.delenv("WORLD_TOKEN")
    with pytest.raises(MachineError) as caught:
        keys = AGENT | {"token_env": "WORLD_TOKEN"}
        openenv.preflight(remote_agent("openenv", server.url, **keys))
    assert_refused(caught, 3, "WORLD_TOKEN", where="agent.token_env")


def test_no_server_at_the_start_is_one_clear_error():
    server = OddOpenenv()
    server.close()
    config = remote_agent("openenv", server.url, **AGENT)
    with pytest.raises(MachineError) as caught:
        openenv.load_tools(config)
    assert_refused(caught, 3, server.url, where="agent.url", fix="agent.url=")


@contextmanager
def real_server(form):
    """OpenEnv's own server, in an environment of its own, with the versions of the lock file."""
    python = os.environ.get("RLOO_OPENENV_PYTHON")
    if not python:
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
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    script = ROOT / "scripts" / "openenv" / "echo_server.py"
    process = subprocess.Popen([python, "-P", str(script), str(port), form])
    try:
        wait_for_port(port, process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize(("form", "reward"), [("plain", 1.0), ("tools", 0.0)])
def test_the_contract_holds_for_the_servers_of_openenv(form, reward):
    with real_server(form) as url:
        check_contract(url, form, reward)
