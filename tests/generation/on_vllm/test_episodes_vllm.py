"""Episodes with vLLM as their sampler: the ids that it sampled are the ids that are trained on."""

import json
from pathlib import Path

import pytest
from cli_cases import Rloo, surroundings

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
