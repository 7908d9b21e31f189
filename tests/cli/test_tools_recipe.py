"""The recipe with tools for Qwen3 0.6B: planned without the hub, trained on stand-ins."""

from pathlib import Path

import pytest
from cli_cases import strict
from loop_cases import cache

from rloo_cli import api
from rloo_cli.cli import plan
from rloo_cli.config import check
from rloo_cli.config.compose import compose_config

RECIPE = "qwen3_0_6b_tools"


def test_a_dry_run_knows_the_model_its_data_and_its_tool(tmp_path: Path) -> None:
    composed = compose_config([f"+recipe={RECIPE}", f"root={tmp_path}"])
    assert plan.dry_run(composed) == 0
    found = plan.dry_run_values(check.check_config(composed))
    assert "unknown" not in found["plan"]
    assert found["config"]["agent"]["tools"] == ["rloo_cli.data.synthetic.tool_tasks:multiply"]


@pytest.mark.slow
def test_it_trains_a_step_on_stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLOO_CACHE", cache())
    keys = [f"root={tmp_path}", "name=run", "logging.console=plain", "max_steps=1"]
    api.train(RECIPE, overrides=["+debug=cpu", *keys, "eval.every=0"])
    assert len([r for r in strict(tmp_path / "run" / "metrics.jsonl") if "loss" in r]) == 1
