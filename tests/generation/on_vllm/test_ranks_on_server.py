"""Ranks that have shards of the weights feed a real vLLM server, which is right at every step."""

import json
import re

import pytest
import vllm_cases
from cli_cases import strict

pytestmark = pytest.mark.vllm


@pytest.mark.slow_but("fsdp2")
@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
def test_shards_reach_the_server_layer_by_layer_and_are_right(forked, server, engine, monkeypatch):
    monkeypatch.setenv("RLOO_SERVER_TOKEN", server.token)
    code = forked(
        "train", "+recipe=smoke", *vllm_cases.WORDS, f"generation.server.base_url={server.url}",
        "max_steps=3", "eval.max_samples=2", "eval.at_start=false", "train.learning_rate=1e-3",
        f"distributed={engine}",
        "distributed.num_processes=2", "distributed.threads=1", "algorithm.beta=0.05",
        ranks=2, env={"RLOO_SERVER_TOKEN": server.token},
    )  # fmt: skip
    said = forked.said()
    assert code == 0, said
    assert re.search(r"vLLM on \d+ prompts", said)
    run = forked.folder / "runs" / "smoke"
    rows = [r for r in strict(run / "metrics.jsonl") if "step_time" in r]
    assert [r["vllm/weight_version"] for r in rows] == [0, 1, 2]
    assert all(r["sampling/logp_diff_max"] < 1e-4 and r["sampling/missing_frac"] == 0 for r in rows)
    assert all(r["staleness/max"] == 0 for r in rows)
    samples = (run / "samples" / "step_000003.jsonl").read_text().splitlines()
    assert {json.loads(line)["weight_version"] for line in samples} == {2}
