"""Episodes with vLLM as their sampler: the ids that it sampled are the ids that are trained on."""

import json
import shlex
from pathlib import Path

import pytest
from agent_cases import CHATML, write_file
from cli_cases import Rloo, surroundings
from episode_runs import ENDS
from proxy_cases import agent_command

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.mark.parametrize(
    ("recipe", "backend"),
    [("tools_mini", "vllm_server"), ("tools_mini", "vllm_colocate"), ("game_mini", "vllm_server")],
)
def test_a_model_calls_its_tool_with_vllm(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, recipe: str, backend: str
) -> None:
    rloo = Rloo(tmp_path, surroundings(tmp_path_factory.getbasetemp()))
    words = (f"+recipe={recipe}", f"generation={backend}", "max_steps=2", "eval.every=0")
    done = rloo("train", *words, "eval.at_start=false", "data.eval_split=null", timeout=1800)
    assert done.code == 0, done.said
    rows = steps_of(tmp_path / "runs" / recipe)
    assert len(rows) == 2
    for row in rows:
        # A prompt of a turn, or a token of it, that were not the trainer's would differ here.
        assert row["sampling/logp_diff_max"] < 1e-3
        assert row["agent/retokenised"] == 0 and row["agent/failures"] == 0
        assert row["agent/calls"] > 0 and row["agent/turns"] > 1


def steps_of(run: Path) -> list[dict[str, float]]:
    """The lines of a run's steps."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "step_time" in row]


AGENT = """
messages = list(ROW["prompt"])
for turn in range(2):
    status, answer = post("/chat/completions", {"model": "policy", "messages": messages})
    if status != 200 or answer["choices"][0]["finish_reason"] == "length":
        break
    messages += [answer["choices"][0]["message"], {"role": "user", "content": "more"}]
post("/rloo/reward", {"reward": len(messages[-1]["content"]) % 5})
"""


def test_two_ranks_have_one_proxy_where_rank_0_alone_talks_to_the_server(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    command = shlex.join(agent_command(tmp_path, AGENT))
    template = write_file(tmp_path, CHATML.replace("<|im_end|>", "<eos>"), "chat.jinja")
    rloo = Rloo(tmp_path, surroundings(tmp_path_factory.getbasetemp()))
    done = rloo(
        "train", "+recipe=smoke", "generation=vllm_server", "model.dtype=float32",
        "data.path=make:tiny_chat", "agent=proxy", f"agent.command='{command}'", ENDS,
        f"model.chat_template={template}", "reward=environment", "max_steps=2",
        "generation.max_completion_length=6", "train.prompts_per_step=3", "agent.max_turns=2",
        "algorithm.num_generations=3", "data.eval_split=null", "eval.at_start=false",
        "distributed=ddp", "distributed.num_processes=2", "distributed.threads=1",
        "agent.max_seconds=200", timeout=1800,
    )  # fmt: skip
    assert done.code == 0, done.said
    for row in steps_of(tmp_path / "runs" / "smoke"):
        assert row["sampling/logp_diff_max"] < 1e-3
        assert row["agent/retokenised"] == row["agent/failures"] == row["agent/wrong_keys"] == 0
        assert row["agent/turns"] > 1
