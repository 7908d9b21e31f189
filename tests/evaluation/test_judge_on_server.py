"""A judge and a reward behind the chat route of a real vLLM server."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from loop_cases import make
from vllm_cases import Real

from rloo_cli.evaluation.evaluate import evaluate_run
from rloo_cli.rewards.common.http_client import EndpointError, HttpService, JsonClient
from rloo_cli.utils import signals
from rloo_cli.utils.http import run_in_event_loop

pytestmark = pytest.mark.vllm
# The server's context has room for 48 tokens, each a byte: short prompts and a short question.
ROWS = [{"prompt": f"{n}+1=", "reference": str(n + 1)} for n in range(4)]
CHOICE = "extra={structured_outputs: {choice: [CHOICES]}}"


@pytest.fixture
def words(server: Real, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys of `eval.judge` and `reward.judge` that name the server and fit into its context."""
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.setenv("JUDGE_KEY", server.token)
    monkeypatch.chdir(tmp_path)
    keys = [f"model={name(server)}", f"base_url={server.url}/v1", "api_key_env=JUDGE_KEY"]
    return [*keys, "max_tokens=4"]


def name(server: Real) -> str:
    """What the server calls its model."""
    token = {"Authorization": f"Bearer {server.token}"}
    asked = urllib.request.Request(f"{server.url}/v1/models", headers=token)
    with urllib.request.urlopen(asked, timeout=30) as answer:
        return str(json.load(answer)["data"][0]["id"])


def held_out(*judge: str) -> list[str]:
    data = ["data.path=sums.jsonl", "data.split=train", "data.eval_split=train"]
    data += ["generation.max_completion_length=2"]
    given = ["template='{prompt}{a}|{b}'", *judge]
    return [*data, "judge=openai", *(f"eval.judge.{word}" for word in given)]


def test_what_a_random_model_says_is_no_verdict(words: list[str], tmp_path: Path) -> None:
    run = make(tmp_path, *held_out(*words))
    row = evaluate_run(run)
    assert row["judge/invalid"] == 4 and "eval_win_rate" not in row
    lines = (run.folder / "samples" / "pairs_000000.jsonl").read_text().splitlines()
    assert all(isinstance(v["said"], str) for p in map(json.loads, lines) for v in p["verdicts"])


def test_made_to_say_a_or_b_it_judges_every_pair(words: list[str], tmp_path: Path) -> None:
    run = make(tmp_path, *held_out(*words, CHOICE.replace("CHOICES", "A, B")))
    row = evaluate_run(run)
    assert row["judge/invalid"] == 0 and 0 <= row["eval_win_rate"] <= 1
    got = [row[f"eval_win_rate/{n}"] for n in ("wins", "ties", "losses")]
    assert sum(got) == 4


def test_a_reward_is_the_number_that_it_is_made_to_say(words: list[str], tmp_path: Path) -> None:
    choice = CHOICE.replace("CHOICES", "'3'")
    given = [*words, choice, "template='{completion}'", "pattern='(\\d)'"]
    data = ["data.path=sums.jsonl", "data.eval_split=null", "generation.max_completion_length=2"]
    run = make(tmp_path, *data, "reward=judge", *(f"reward.judge.{w}" for w in given), rewards={})
    batch = run.rollouts.next_batch(0, 0, run.state.seen_by_rewards(run))
    assert batch.score.flatten().tolist() == pytest.approx([0.3] * batch.score.numel())


def test_a_wrong_key_a_wrong_model_and_too_long_a_question_are_told_apart(
    server: Real, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def error(body: dict[str, Any]) -> EndpointError:
        async def ask() -> None:
            async with JsonClient(
                HttpService(f"{server.url}/v1", "JUDGE_KEY", 1, 30.0), 60.0
            ) as client:
                await client.post("/chat/completions", body)

        with pytest.raises(EndpointError) as refused:
            run_in_event_loop(ask(), signals.raise_if_stopped)
        return refused.value

    body = {"model": name(server), "messages": [{"role": "user", "content": "x" * 99}]}
    long, unknown = error(body), error(body | {"model": "nobody"})
    assert not long.final and "400" in str(long)
    assert unknown.final and "404" in str(unknown) and "nobody" in str(unknown)
    monkeypatch.setenv("JUDGE_KEY", "wrong")
    refused = error(body)
    assert refused.final and "401" in str(refused) and "JUDGE_KEY" in str(refused)
