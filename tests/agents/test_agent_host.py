"""agent.lifetime=run: one process plays all episodes, and what happens when it does not."""

import sys

import pytest
from agent_cases import write_file
from assert_refused import assert_refused
from proxy_cases import play_agents, proxy_generator

from rloo_cli.utils.errors import GenerationError

pytestmark = pytest.mark.process

TOKEN = "the token of this run"
# It comes for episodes one by one, and does as the row says.
HOST = """
import json, os, sys, time, urllib.request
URL, TOKEN = os.environ["RLOO_PROXY_URL"], os.environ["RLOO_TOKEN"]


def post(url, key, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), method="POST")
    request.add_header("Authorization", "Bearer " + key)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read() or b"null")


while True:
    told = post(URL + "/rloo/next", TOKEN, {})
    if told is None:
        continue
    base, key, row = told["base_url"], told["api_key"], told["row"]
    post(base + "/chat/completions", key, {"model": "policy", "messages": row["prompt"]})
    if row.get("dies"):
        os.kill(os.getpid(), 9)
    while row.get("hangs"):
        time.sleep(1)
    post(base + "/rloo/reward", key, {"reward": 1.0})
    post(base + "/rloo/done", key, {})
"""


def host_generator(folder, text=HOST, **keys):
    """Episodes that a host plays, which is written in Python."""
    command = [sys.executable, "-I", "-S", write_file(folder, text, "host.py")]
    return proxy_generator(command, lambda *_: "yes", token=TOKEN, per_run=True, **keys)


def rows_of(groups):
    return [row for group in groups for row in group.rollouts]


def test_a_host_that_dies_in_mid_episode_costs_that_episode_alone(tmp_path):
    generator = host_generator(tmp_path)
    first = generator.host.process.process.pid
    groups = play_agents(generator, {"n": 0}, {"dies": True}, {"n": 2}, close=False)
    lost = [row.failed for row in rows_of(groups)]
    assert lost[0] is None and lost[2] is None
    assert "host was lost" in lost[1] and "SIGKILL" in lost[1]
    assert [row.environment_reward for row in rows_of(groups)] == [1.0, None, 1.0]
    second = generator.host.process
    assert second.process.pid != first and second.exit_code() is None
    generator.close()
    assert second.exit_code() is not None


def test_a_host_that_hangs_is_started_anew(tmp_path):
    generator = host_generator(tmp_path, max_seconds=0.5)
    groups = play_agents(generator, {"hangs": True}, {"n": 1})
    hung, other = rows_of(groups)
    assert "0.5 s (agent.max_seconds)" in hung.failed
    assert other.failed is None and other.environment_reward == 1.0


def test_a_host_that_never_takes_an_episode_ends_the_run_with_its_last_words(tmp_path):
    generator = host_generator(tmp_path, "raise SystemExit('no such environment')")
    with pytest.raises(GenerationError) as caught:
        play_agents(generator)
    assert_refused(caught, 6, "no such environment", where="agent.command", fix="agent.command")
