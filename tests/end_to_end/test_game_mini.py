"""`rloo train +recipe=game_mini`, shortened: a model learns to use what a game told it."""

from pathlib import Path

import pytest
from cli_cases import Rloo, strict, surroundings


@pytest.mark.slow
def test_a_shortened_run_of_the_guessing_game_wins_more_held_out_games(tmp_path: Path) -> None:
    rloo = Rloo(tmp_path, surroundings(tmp_path))
    ended = rloo(
        "train", "+recipe=game_mini", "max_steps=50", "eval.every=50", "logging.samples=0",
        timeout=1500,
    )  # fmt: skip
    assert ended.code == 0 and not ended.own_err, ended.said
    rows = strict(tmp_path / "runs" / "game_mini" / "metrics.jsonl")
    first, last = (row for row in rows if "eval_avg@8" in row)
    assert last["eval_reward"] > first["eval_reward"]
    assert 0.3 < first["eval_avg@8"] < 0.55 < last["eval_avg@8"]  # 360 games each
    assert last["eval_agent/failures"] == last["eval_agent/retokenised"] == 0
