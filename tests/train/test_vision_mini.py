"""The recipe `vision_mini` learns from its pictures, and from nothing else."""

import pytest
from cli_cases import strict
from loop_cases import cache

from rloo_cli import api

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("data", "seen"), [("make:vision", True), ("make:vision_noise", False)])
def test_pictures_are_what_is_learned_from(tmp_path, monkeypatch, data, seen):
    monkeypatch.setenv("RLOO_CACHE", cache())
    keys = [f"data.path={data}", f"root={tmp_path}", "name=run", "logging.console=plain"]
    api.train("vision_mini", overrides=keys)
    rows = strict(tmp_path / "run" / "metrics.jsonl")
    scores = [row["eval_reward"] for row in rows if "eval_reward" in row]
    assert scores[0] < 0.4
    assert scores[-1] > 0.9 if seen else scores[-1] < 0.4  # of four colours a guess hits 0.25
