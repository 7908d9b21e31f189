"""agent=verifiers: one process plays all episodes, and what happens when it does not.

The slow tests need verifiers in a Python of its own, which RLOO_VERIFIERS_PYTHON names:
pip install -r scripts/verifiers/requirements.lock. The others use hosts that are written here.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from agent_cases import call_text, write_file
from assert_refused import assert_refused
from proxy_cases import play_agents, proxy_generator

from rloo_cli.agents import verifiers
from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.data.batch import Group
from rloo_cli.data.render import render_prompt
from rloo_cli.utils.errors import ConfigError, GenerationError, MachineError

pytestmark = pytest.mark.process

TOKEN = "the token of this run"
# A host without verifiers: it comes for episodes one by one, and does as the row says.
HOST = """
import json, os, sys, time, urllib.request
URL, TOKEN = sys.argv[1], os.environ["RLOO_TOKEN"]


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
    program = write_file(folder, text, "host.py")

    def command(url):
        return [sys.executable, "-I", "-S", program, url]

    script = keys.pop("script", lambda text, seed: "yes")
    return proxy_generator(None, script, token=TOKEN, host_command=command, **keys)


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
    assert_refused(caught, 6, "no such environment", where="agent.id", fix="agent.args")


def settings(*words):
    words = ["+recipe=smoke", "agent=verifiers", "agent.id=vf-sums", *words]
    return check.check_config(compose_config(words)).agent


def test_an_environment_that_cannot_be_loaded_is_refused_before_weights_load(tmp_path, sentence):
    with pytest.raises(ConfigError) as caught:
        check.check_config(compose_config(["+recipe=smoke", "agent=verifiers"]))
    assert_refused(caught, 2, "agent.id", fix="agent.id=")
    for refuse in (verifiers.preflight, verifiers.load_tools):
        with pytest.raises(MachineError) as caught:
            refuse(settings("agent.python=no/such/python"))
        assert_refused(caught, 3, "no/such/python", where="agent.python", fix="agent.python=")
    sentence(caught)
    here = settings(f"agent.python={sys.executable}")  # which has no verifiers
    with pytest.raises(MachineError) as caught:
        verifiers.preflight(here)
    problem = assert_refused(caught, 3, "vf-sums")
    assert "'verifiers'" in problem.why


ENVIRONMENTS = '''
import verifiers as vf
from datasets import Dataset


def exact(completion, answer):
    said = [m["content"] for m in completion if m["role"] == "assistant"][-1]
    if "broken" in said:
        raise ValueError("broken rubric")
    return float(said == answer)


def multiply(a: int, b: int) -> int:
    """Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.
    """
    return a * b


class Guess(vf.MultiTurnEnv):
    async def setup_state(self, state):
        assert isinstance(state["input"]["seed"], int) and state["info"]["n"] >= 0
        return state

    async def env_response(self, messages, state, **kwargs):
        done = messages[-1].content == state["answer"]
        if done:
            state["final_env_response"] = [{"role": "user", "content": "Right."}]
        return [{"role": "user", "content": "Right." if done else "Wrong."}]


def load_environment(form):
    rows = Dataset.from_list([{"question": f"{n} * 2?", "answer": str(2 * n), "info": {"n": n}}
                              for n in range(4)])
    if form == "single":
        rubric = vf.Rubric(funcs=[exact])
        return vf.SingleTurnEnv(dataset=rows, eval_dataset=rows.select([3]), rubric=rubric,
                                system_prompt="Be brief.")
    if form == "tool":
        return vf.ToolEnv(dataset=rows, tools=[multiply], rubric=vf.Rubric(funcs=[exact]))
    if form == "group":
        return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[by_siblings]))
    return Guess(dataset=rows, rubric=vf.Rubric(funcs=[exact]))


def by_siblings(states):
    return [0.0 for _ in states]
'''


@pytest.fixture
def real(tmp_path, monkeypatch):
    """(form, *words) -> agent=verifiers with an environment that is written here."""
    own = Path(sys.prefix, "verifiers", "bin", "python")  # `make test-all` makes it
    python = os.environ.get("RLOO_VERIFIERS_PYTHON", own if own.exists() else None)
    if not python:
        pytest.skip("there is no .venv/verifiers, and RLOO_VERIFIERS_PYTHON names no Python")
    write_file(tmp_path, ENVIRONMENTS, "vf_sums.py")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return lambda form, *words: settings(
        f"agent.python={python}", f"agent.args={{form: {form}}}", *words
    )


def play_real(config, folder, script, k, **keys):
    """Episodes of the second row that the environment writes. -> its group, the generator"""
    verifiers.preflight(config)
    rows = folder / "rows"
    subprocess.run(verifiers.host_command(config, "data", str(rows)), check=True, timeout=120)
    row = json.loads((rows / "train.jsonl").read_text().splitlines()[1])

    def host(url):
        return verifiers.host_command(config, "play", url, "--workers=16")

    keys = {"max_seconds": 60.0, "token": TOKEN, "host_command": host} | keys
    generator = proxy_generator(None, script, **keys)
    ids = render_prompt(row["prompt"], generator.rules.renderer.tokenizer, {})
    group = Group(1, row, row["prompt"], ids)
    try:
        generator.generate([group], [list(range(k))])
    finally:
        generator.close()
    asked = [ids for wave in generator.inner.asked for ids in wave]
    for done in group.rollouts:  # what is trained is what was sampled
        whole, end = group.prompt_ids + done.completion_ids, len(group.prompt_ids)
        for turn in done.turns:
            end += len(turn.prompt_ids)
            assert whole[:end] in asked
            end += len(turn.sampled_ids)
    return group, generator


@pytest.mark.slow
def test_a_single_turn_is_scored_by_its_environments_rubric(real, tmp_path):
    said = ["2", "3", "", "broken"]
    group, _ = play_real(real("single"), tmp_path, lambda text, seed: said[seed], k=4)
    assert (tmp_path / "rows" / "test.jsonl").read_text().count("\n") == 1
    assert group.prompt[0] == {"role": "system", "content": "Be brief."}
    *scored, broken = group.rollouts
    assert [row.failed for row in scored] == [None] * 3
    assert [row.environment_reward for row in scored] == [1.0, 0.0, 0.0]
    # verifiers takes 0 for a function that raises; here that is a row without a score.
    assert "broken rubric" in broken.failed and broken.environment_reward is None


@pytest.mark.slow
def test_tools_of_an_environment_are_shown_called_and_told(real, tmp_path):
    def script(text, seed):
        if seed == 1:
            return "I do not know"
        return "2" if "tool_response" in text else call_text("multiply", a=1, b=2)

    group, generator = play_real(real("tool"), tmp_path, script, k=2)
    called, other = group.rollouts
    decode = generator.rules.renderer.tokenizer.decode
    assert "Multiplies two integers" in decode(group.prompt_ids)
    assert called.turns[0].calls == [{"name": "multiply", "arguments": {"a": 1, "b": 2}}]
    assert called.turns[1].observation[0]["content"] == "2"
    assert called.failed is None and called.environment_reward == 1.0
    assert called.episode_facts["calls"] == 1 and called.episode_facts["refused"] == 0
    assert other.failed is None and other.environment_reward == 0.0 and len(other.turns) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "keys", "turns", "ended", "reward"),
    [
        (["7", "9", "2"], {}, 3, "answer", 1.0),
        (["7", "9", "2"], {"max_turns": 2}, 2, "turns", 0.0),
        (["7", "without an end..."], {}, 2, "completion", 0.0),
    ],
)
def test_turns_end_by_the_environment_or_a_limit_of_the_run(
    real, tmp_path, said, keys, turns, ended, reward
):
    group, _ = play_real(
        real("guess"), tmp_path, lambda text, _: said[text.count("Wrong.")], k=1, **keys
    )
    (row,) = group.rollouts
    assert row.failed is None and row.environment_reward == reward
    assert row.episode_facts["ended_by"] == ended and len(row.turns) == turns
    assert [t.observation[0]["content"] for t in row.turns[1:]] == ["Wrong."] * (turns - 1)


@pytest.mark.slow
def test_an_environment_that_scores_by_siblings_is_refused(real):
    with pytest.raises(MachineError, match="cannot be loaded") as caught:
        verifiers.preflight(real("group"))
    assert "group rewards" in caught.value.problems[0].why
