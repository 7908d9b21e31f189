"""Functions and agents of others with vLLM as their sampler: what it sampled is what is trained."""

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import vllm_cases
from agent_cases import CHATML, write_file
from cli_cases import Rloo, surroundings
from episode_runs import ENDS, said_in
from fork_cases import Forked
from proxy_cases import SHORT_TALKS, agent_command
from resume_cases import update_apart
from rollout_cases import TWO_TURNS
from test_episodes_vllm import steps_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

# One process that plays all episodes, two turns each.
HOST = """
import json, os, urllib.request
URL, TOKEN = os.environ["RLOO_PROXY_URL"], os.environ["RLOO_TOKEN"]


def post(url, key, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), method="POST")
    request.add_header("Authorization", "Bearer " + key)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read() or b"null")


while True:
    told = post(URL + "/rloo/next", TOKEN, {})
    if told is None:
        continue
    base, key, messages = told["base_url"], told["api_key"], list(told["row"]["prompt"])
    for turn in range(2):
        asked = {"model": "policy", "messages": messages}
        answer = post(base + "/chat/completions", key, asked)["choices"][0]
        if answer["finish_reason"] == "length":
            break
        messages += [answer["message"], {"role": "user", "content": "more"}]
    post(base + "/rloo/reward", key, {"reward": len(messages[-1]["content"]) % 5})
    post(base + "/rloo/done", key, {})
"""


def words(folder: Path, kind: str, *more: str) -> list[str]:
    """The command line of two steps with an agent of this kind."""
    template = write_file(folder, CHATML.replace("<|im_end|>", "<eos>"), "chat.jinja")
    if kind == "rollout":
        agent = [
            "agent=rollout",
            f"agent.rollout={write_file(folder, TWO_TURNS, 'mine.py')}:play",
            "agent.fields=[earned]",
        ]
    else:
        command = agent_command(folder, SHORT_TALKS)
        if kind == "host":
            command[-1] = write_file(folder, HOST, "host.py")
        agent = ["agent=proxy", f"agent.command='{shlex.join(command)}'", "reward=environment"]
        agent += ["agent.lifetime=run"] if kind == "host" else []
    return [
        "train", "+recipe=smoke", "model.dtype=float32", "distributed.threads=1", "root=runs",
        "logging.console=plain", "data.path=make:tiny_chat", "data.max_prompt_length=100",
        "data.eval_split=null", f"model.chat_template={template}", *agent,
        "agent.max_turns=3", "agent.max_episode_tokens=200", "max_steps=2", ENDS,
        "generation.max_completion_length=6", "train.prompts_per_step=3",
        "algorithm.num_generations=3", "logging.samples=9",
        "train.lr_scheduler=constant", "train.learning_rate=1e-3", *more,
    ]  # fmt: skip


def check_steps(run: Path) -> list[dict[str, float]]:
    """Both steps were trained from what vLLM sampled. -> their lines"""
    rows = steps_of(run)
    assert len(rows) == 2 and max(row["agent/turns"] for row in rows) > 1
    for row in rows:
        assert row["sampling/logp_diff_max"] < 1e-3 and row["grad_norm"] > 0
        assert row["agent/retokenised"] == 0 and row["agent/failures"] < 1
    return rows


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[vllm_cases.Real]:
    """A server with room for episodes."""
    base, room = tmp_path_factory.getbasetemp(), "generation.server.max_model_len=512"
    with vllm_cases.serving(tmp_path_factory.mktemp("served"), base, room) as real:
        yield real


def train_with(served: vllm_cases.Real, forked: Forked, *asked: str, ranks: int = 0) -> int:
    """`rloo train` with that server; the exit code."""
    here = ("generation=vllm_server", f"generation.server.base_url={served.url}")
    return forked(*asked, *here, ranks=ranks, env={"RLOO_SERVER_TOKEN": served.token})


@pytest.mark.parametrize("kind", ["rollout", "proxy", "host"])
def test_a_server_samples_what_they_ask(
    served: vllm_cases.Real, forked: Forked, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("RLOO_SERVER_TOKEN", served.token)
    asked = words(forked.folder, kind, f"name={kind}")
    assert train_with(served, forked, *asked) == 0, forked.said()
    one = check_steps(forked.folder / "runs" / kind)
    if kind == "rollout":
        return
    assert train_with(
        served, forked, *words(forked.folder, kind, "name=pair"), "distributed=ddp",
        "distributed.num_processes=2", ranks=2,
    ) == 0, forked.said()  # fmt: skip
    two = check_steps(forked.folder / "runs" / "pair")
    single, pair = forked.folder / "runs" / kind, forked.folder / "runs" / "pair"
    assert said_in(single) == said_in(pair)
    # Two tensors of 25 have 2e-4, for Adam's first steps ask for the sign of gradients near 0.
    assert update_apart(single, pair) < 1e-3
    for a, b in zip(one, two, strict=True):
        names = [n for n in a if n.startswith("agent/") and n != "agent/tool_s"]
        assert {n: a[n] for n in names} == {n: b[n] for n in names}


@pytest.mark.parametrize("kind", ["rollout", "proxy"])
def test_an_engine_beside_the_trainer_samples_what_they_ask(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    rloo = Rloo(tmp_path, surroundings(tmp_path_factory.getbasetemp()))
    done = rloo(*words(tmp_path, kind, "generation=vllm_colocate"), timeout=1800)
    assert done.code == 0, done.said
    check_steps(tmp_path / "runs" / "smoke")
