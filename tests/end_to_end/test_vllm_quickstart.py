"""The quickstart with vLLM as its sampler learns what it learns with the trainer's own."""

import json
import os
from pathlib import Path

import pytest
from cli_cases import Rloo, surroundings

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.mark.parametrize("backend", ["vllm_server", "vllm_colocate"])
def test_the_quickstart_learns_with_vllm(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, backend: str
) -> None:
    rloo = Rloo(tmp_path, surroundings(tmp_path_factory.getbasetemp()))
    words = ("+recipe=quickstart", f"generation={backend}", "logging.samples_every=1")
    done = rloo("train", *words, timeout=1200)
    assert done.code == 0, done.said
    folder = tmp_path / "runs" / "quickstart"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "step_time" in row]
    assert len(steps) == 80
    assert max(row["sampling/logp_diff_max"] for row in steps) < 1e-3
    assert [row["eval_reward"] for row in rows if "eval_reward" in row][-1] > 0.9
    for number, file in enumerate(sorted((folder / "samples").glob("step_*.jsonl"))):
        versions = {json.loads(line)["weight_version"] for line in file.read_text().splitlines()}
        assert versions == {number}
    assert not (folder / "server.json").exists()
    assert f"{tmp_path}" not in os.popen("ps -eo args").read()
