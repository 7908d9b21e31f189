"""Predicted seconds of a step under each generation.overlap."""

import json
from statistics import mean
from typing import Any

import pytest

from rloo_cli.cli import plan as verb
from rloo_cli.planning.overlap_times import (
    StepParts,
    advised_mode,
    simulate_overlap,
    spread_lengths,
)


def test_a_step_takes_both_halves_without_overlap_and_the_longer_one_with_ahead() -> None:
    parts = StepParts([[10, 10]] * 4, lambda n: 0.1, 8, train_s=0.7, reward_s=0.1, sync_s=0.2)
    found = simulate_overlap(parts)
    assert found["none"] == pytest.approx(10 * 0.1 + 0.8 + 0.2)
    assert found["ahead"] == pytest.approx(1.0 + 0.2)


def test_completions_beyond_what_is_decoded_at_once_wait_for_room() -> None:
    parts = StepParts([[5, 5]] * 3, lambda n: 1.0, 2, prefill_s=3.0)
    assert simulate_overlap(parts)["none"] == 3 * 5 + 3.0


def test_carry_never_waits_for_the_longest_where_others_fill_its_step() -> None:
    # In each step one of four groups takes 40 iterations, the others 4; training takes 10 s.
    parts = StepParts([[4], [4], [4], [40]], lambda n: 1.0, 100, train_s=10.0)
    found = simulate_overlap(parts, max_lag=4)
    assert found["none"] == 50 and found["ahead"] == 40
    assert found["carry"] == pytest.approx(10.0, rel=0.05)  # the trainer alone
    assert simulate_overlap(parts, max_lag=1)["carry"] == 25  # the bound makes it wait


def test_lengths_are_spread_with_the_mean_that_was_asked_for() -> None:
    for wanted in (10, 50, 95):
        found = spread_lengths(16, 8, wanted, 100)
        flat = [length for group in found for length in group]
        assert len(found) == 16 and mean(flat) == pytest.approx(wanted, rel=0.02)
        assert min(flat) > 0 and max(flat) == (55 if wanted == 10 else 100)


def test_the_advice_is_the_most_exact_mode_within_a_tenth_of_the_fastest() -> None:
    assert advised_mode({"none": 10, "ahead": 9.5, "carry": 9.2}) == "none"
    assert advised_mode({"none": 10, "ahead": 7.5, "carry": 7.1}) == "ahead"
    assert advised_mode({"none": 10, "ahead": 7, "carry": 4, "turns": 5}) == "carry"
    assert advised_mode({"none": 10, "ahead": 7, "carry": 6, "turns": 5}) == "turns"


def planned(capsys: Any, *words: str) -> tuple[str, dict[str, float]]:
    """The text of a plan, and its seconds by mode."""
    assert verb.run([*words, "--gpu=80GiB"]) == 0
    text = capsys.readouterr().out
    assert verb.run([*words, "--gpu=80GiB", "--json"]) == 0
    return text, json.loads(capsys.readouterr().out)["overlap_seconds"]


@pytest.mark.slow
def test_a_plan_with_a_server_has_the_seconds_of_every_mode_and_advice(capsys: Any) -> None:
    text, seconds = planned(capsys, "+recipe=tldr_1b", "generation=vllm_server")
    assert list(seconds) == ["none", "ahead", "carry", "turns"]
    assert seconds["none"] >= seconds["ahead"]
    assert "overlap    none" in text and "advice: " in text
    text, seconds = planned(capsys, "+recipe=tldr_1b")
    assert not seconds and "overlap" not in text
