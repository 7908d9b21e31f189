"""Episodes with vLLM as their sampler: the ids that it sampled are the ids that are trained on."""

import json
from pathlib import Path

import pytest
from cli_cases import Rloo, surroundings

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.mark.parametrize("backend", ["vllm_server", "vllm_colocate"])
def test_a_model_calls_its_tool_with_vllm(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, backend: str
) -> None:
    rloo = Rloo(tmp_path, surroundings(tmp_path_factory.getbasetemp()))
    words = ("+recipe=tools_mini", f"generation={backend}", "max_steps=4", "eval.every=0")
    done = rloo("train", *words, "logging.samples_every=1", timeout=1800)
    assert done.code == 0, done.said
    lines = (tmp_path / "runs" / "tools_mini" / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if "step_time" in row]
    assert len(steps) == 4
    for row in steps:
        # A prompt of a turn, or a token of it, that were not the trainer's would differ here.
        assert row["sampling/logp_diff_max"] < 1e-3
        assert row["agent/retokenised"] == 0 and row["agent/failures"] == 0
        assert row["agent/calls"] > 0 and row["agent/turns"] > 1
