"""What becomes of a failed reward, and what is remembered."""

import math
from typing import Any

import pytest
from reward_cases import COMMON, PLAIN, failure, group, reward, run, values

from rloo_cli.config.schema import RewardConfig
from rloo_cli.rewards.engine.build import reward_from_callable
from rloo_cli.rewards.engine.scoring import RewardFailed, score_groups


def test_a_failed_reward_is_never_a_zero() -> None:
    def fn(completions):
        return [1.0 / len(c) for c in completions]

    step = [group("a", ""), group("b", "c")]
    error = failure(fn, *step)
    why = error.problems[0].why
    assert "ZeroDivisionError:" in why
    assert "in fn" in why and "return [1.0 / len(c)" in why
    assert "reward_calls.py" not in why and "threading.py" not in why
    assert "rows 0 to 3" in error.problems[0].where
    assert error.detail["rewards"][0]["failed_rows"] == [0, 1, 2, 3]
    assert error.detail["rewards"][0]["rows"][1]["completion"] == ""
    assert "reward_calls.py" in error.detail["rewards"][0]["traceback"]
    assert error.detail["step"] == 7


def test_a_row_that_fails_alone_is_named() -> None:
    def fn(completions):
        return [1.0 / len(c) for c in completions]

    error = failure(fn, group("a", ""), group("b", "c"), scope="row")
    assert error.detail["rewards"][0]["failed_rows"] == [1]
    assert "row 1 (prompt 0, completion 1" in error.problems[0].where


def test_one_failed_row_of_many_stops_the_run_unless_told_otherwise() -> None:
    def fn(completions):
        return [float("nan") if c == "j" else 1.0 for c in completions]

    step = group(*"abcdefghij")
    assert failure(fn, step).detail["rewards"][0]["failed_rows"] == [9]
    assert run(fn, step, on_error="none").error_rate == {"mine": 0.1}


def test_every_reward_that_fails_is_told() -> None:
    def one(completions):
        raise ValueError("first")

    async def two(completions):
        raise KeyError("second")

    with pytest.raises(RewardFailed) as caught:
        score_groups([reward(one, "one"), reward(two, "two")], [group("a")], PLAIN)
    assert [p.what.split("'")[1] for p in caught.value.problems] == ["one", "two"]
    assert "in two" in caught.value.problems[1].why


def test_a_failure_of_a_shipped_reward_shows_its_frames() -> None:
    config = RewardConfig(**COMMON)
    from rloo_cli.rewards import length_chars

    broken = group("a")
    broken.rollouts[0].text = None  # type: ignore[assignment]
    with pytest.raises(RewardFailed) as caught:
        score_groups([reward_from_callable("n", length_chars.score, config)], [broken], PLAIN)
    why = caught.value.problems[0].why
    assert "length_chars.py" in why and "reward_calls.py" not in why


def test_on_error_none_leaves_out_only_the_rows_that_failed() -> None:
    scores = run(
        lambda completions: [1.0, float("inf"), 0.0, 2.0, 3.0],
        group("a", "b", "c", "d", "e"),
        on_error="none",
    )
    assert scores.raw.isnan().flatten().tolist() == [False, True, False, False, False]
    assert scores.error_rate == {"mine": 0.2}


def test_on_error_number_is_the_number_the_user_wrote() -> None:
    def fn(completions):
        if completions == ["b"]:
            raise ValueError
        return [1.0]

    step = group("a", "b", "c", "d", "e")
    assert values(fn, step, on_error=-1.0, scope="row") == [1.0, -1.0, 1.0, 1.0, 1.0]
    assert run(fn, step, on_error=-1, scope="row").error_rate == {"mine": 0.2}


@pytest.mark.parametrize("on_error", ["none", -1.0])
def test_too_many_failures_stop_the_run_whatever_on_error_says(on_error: Any) -> None:
    def fn(completions):
        return [None, float("nan")]

    assert run(fn, on_error=on_error, max_error_rate=0.5).error_rate == {"mine": 0.5}
    error = failure(fn, on_error=on_error, max_error_rate=0.4)
    assert "max_error_rate = 0.4" in str(error) and "1 of 2 rows failed" in str(error)


def test_a_lost_step_is_not_waited_for() -> None:
    calls: list[int] = []

    def fn(completions):
        calls.append(1)
        raise ValueError

    failure(fn, group(*"abcdefghij"), scope="row", on_error="none")
    assert len(calls) == 3  # the third is above 20 % of ten rows


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_retries_try_again_and_keep_no_log_of_the_failure(kind: str) -> None:
    tries: list[int] = []

    def fn(completions, log_metric):
        tries.append(1)
        log_metric("m", len(tries))
        if len(tries) < 3:
            raise ValueError
        return [1.0, 2.0]

    async def afn(completions, log_metric):
        return fn(completions, log_metric)

    chosen = fn if kind == "sync" else afn
    scores = run(chosen, retries=2)
    assert scores.raw.flatten().tolist() == [1.0, 2.0]
    assert scores.metrics == {"m": 3.0} and scores.error_rate == {"mine": 0.0}
    tries.clear()
    failure(chosen, retries=1)
    assert len(tries) == 2


def test_cache_scores_an_equal_completion_of_an_equal_prompt_once() -> None:
    asked: list[str] = []

    def fn(completions):
        asked.extend(completions)
        return [None if c == "none" else float(len(c)) for c in completions]

    mine = reward(fn, cache=True)
    step = [group("aa", "aa", "none", gold=1), group("aa", "b", "b", gold=2)]
    expected = [2.0, 2.0, None, 2.0, 1.0, 1.0]
    for _ in range(2):
        flat = score_groups([mine], step, PLAIN).raw.flatten().tolist()
        assert [None if math.isnan(x) else x for x in flat] == expected
    # The second prompt has another gold answer: its "aa" is another question.
    assert asked == ["aa", "none", "aa", "b"]


def test_cache_keeps_no_failure_and_counts_equal_rows() -> None:
    asked: list[str] = []

    def fn(completions):
        asked.extend(completions)
        return [float("nan") if c == "xx" else 1.0 for c in completions]

    mine = reward(fn, cache=True, on_error="none", max_error_rate=1.0)
    for _ in range(2):
        assert score_groups([mine], [group("xx", "xx", "y", "y")], PLAIN).error_rate == {
            "mine": 0.5
        }
    assert asked == ["xx", "y", "xx"]


def test_cache_never_trusts_the_repr_of_an_image() -> None:
    asked: list[str] = []

    def fn(completions):
        asked.extend(completions)
        return [1.0 for _ in completions]

    class Image:
        def __repr__(self) -> str:
            return "<Image at 0x7f>"

    mine = reward(fn, cache=True)
    score_groups([mine], [group("a", image=Image()), group("a", image=Image())], PLAIN)
    assert asked == ["a", "a"]
