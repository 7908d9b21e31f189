"""Environments of verifiers, played by scripts/verifiers/play_episodes.py behind the proxy.

They need verifiers in a Python of its own: .venv/verifiers, which `make test-all` makes, or the one
that RLOO_VERIFIERS_PYTHON names (pip install -r scripts/verifiers/requirements.lock).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from agent_cases import call_text, write_file
from proxy_cases import proxy_generator

from rloo_cli.data.batch import Group
from rloo_cli.data.render import render_prompt
from rloo_cli.utils.paths import ROOT

pytestmark = [pytest.mark.process, pytest.mark.slow]

PROGRAM = str(ROOT / "scripts" / "verifiers" / "play_episodes.py")
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
    """(form, verb, *more) -> the command for an environment that is written here."""
    own = Path(sys.prefix, "verifiers", "bin", "python")
    python = os.environ.get("RLOO_VERIFIERS_PYTHON", str(own) if own.exists() else None)
    if not python:
        pytest.skip("there is no .venv/verifiers, and RLOO_VERIFIERS_PYTHON names no Python")
    write_file(tmp_path, ENVIRONMENTS, "vf_sums.py")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def command(form, verb, *more):
        return [python, "-P", PROGRAM, verb, "vf-sums", *more, f'--args={{"form": "{form}"}}']

    return command


def play_real(real, form, folder, script, k, **keys):
    """Episodes of the second row that the environment writes. -> its group, the generator"""
    rows = folder / "rows"
    subprocess.run(real(form, "data", str(rows)), check=True, timeout=120)
    row = json.loads((rows / "train.jsonl").read_text().splitlines()[1])
    keys = {"max_seconds": 60.0, "token": "the token of this run"} | keys
    generator = proxy_generator(real(form, "play"), script, per_run=True, **keys)
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


def test_a_single_turn_is_scored_by_its_environments_rubric(real, tmp_path):
    said = ["2", "3", "", "broken"]
    group, _ = play_real(real, "single", tmp_path, lambda text, seed: said[seed], k=4)
    assert (tmp_path / "rows" / "test.jsonl").read_text().count("\n") == 1
    assert group.prompt[0] == {"role": "system", "content": "Be brief."}
    *scored, broken = group.rollouts
    assert [row.failed for row in scored] == [None] * 3
    assert [row.environment_reward for row in scored] == [1.0, 0.0, 0.0]
    # verifiers takes 0 for a function that raises; here that is a row without a score.
    assert "broken rubric" in broken.failed and broken.environment_reward is None


def test_tools_of_an_environment_are_shown_called_and_told(real, tmp_path):
    def script(text, seed):
        if seed == 1:
            return "I do not know"
        return "2" if "tool_response" in text else call_text("multiply", a=1, b=2)

    group, generator = play_real(real, "tool", tmp_path, script, k=2)
    called, other = group.rollouts
    decode = generator.rules.renderer.tokenizer.decode
    assert "Multiplies two integers" in decode(group.prompt_ids)
    assert called.turns[0].calls == [{"name": "multiply", "arguments": {"a": 1, "b": 2}}]
    assert called.turns[1].observation[0]["content"] == "2"
    assert called.failed is None and called.environment_reward == 1.0
    assert called.episode_facts["calls"] == 1 and called.episode_facts["refused"] == 0
    assert other.failed is None and other.environment_reward == 0.0 and len(other.turns) == 1


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
        real, "guess", tmp_path, lambda text, _: said[text.count("Wrong.")], k=1, **keys
    )
    (row,) = group.rollouts
    assert row.failed is None and row.environment_reward == reward
    assert row.episode_facts["ended_by"] == ended and len(row.turns) == turns
    assert [t.observation[0]["content"] for t in row.turns[1:]] == ["Wrong."] * (turns - 1)


def test_an_environment_that_scores_by_siblings_is_refused(real, tmp_path):
    done = subprocess.run(real("group", "data", str(tmp_path)), capture_output=True, text=True)
    assert done.returncode == 1 and "group rewards" in done.stderr
