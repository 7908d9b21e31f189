"""What rewards are called with and what they may return."""

from typing import Any

import numpy as np
import pytest
import torch
from assert_refused import assert_refused
from reward_cases import CHAT, PLAIN, failure, group, reward, run, values

from rloo_cli.rewards.engine.arguments import REWARD_KWARGS
from rloo_cli.rewards.engine.columns import check_reward_columns
from rloo_cli.rewards.engine.scoring import score_groups
from rloo_cli.utils.errors import DataError

# What a reward is called with


def test_a_function_gets_only_the_names_in_its_signature() -> None:
    seen: list[Any] = []

    def fn(completions, answer, num_generations):
        seen.append((completions, answer, num_generations))
        return [0] * len(completions)

    run(fn, group("a", "b", answer="x", other=1), group("c", "d", answer="y", other=2))
    assert seen == [(["a", "b", "c", "d"], ["x", "x", "y", "y"], 2)]


def test_a_function_with_kwargs_gets_everything_row_by_row() -> None:
    seen: dict[str, Any] = {}

    def fn(**kwargs):
        seen.update(kwargs)
        return [0.0] * 4

    chat = [{"role": "user", "content": "Say"}]
    step = [group("a", "bb", prompt=chat, answer=1), group("ccc", "d", prompt=chat, answer=2)]
    scores = run(fn, *step, context=CHAT)
    assert set(seen) == (REWARD_KWARGS - {"columns"}) | {"answer"}
    assert seen["prompts"] == [chat] * 4
    assert seen["completions"][1] == [{"role": "assistant", "content": "bb"}]
    assert seen["completion_ids"] is seen["completions_ids"]
    assert seen["completion_ids"] == [[1, 9], [2, 9], [3, 9], [1, 9]]
    assert seen["prompt_ids"] == [[1, 2]] * 4
    assert seen["finish_reasons"] == ["stop"] * 4
    assert seen["group_index"] == [0, 0, 1, 1]
    assert seen["num_generations"] == 2
    assert seen["behaviour_logps"] == [[-1.0, -2.0]] * 4
    assert seen["answer"] == [1, 1, 2, 2]
    assert seen["trainer_state"].global_step == 3
    assert scores.raw.shape == (1, 2, 2) and scores.raw.dtype == torch.float64


@pytest.mark.parametrize("name", ["completion_ids", "completions_ids"])
def test_token_ids_come_under_both_names(name: str) -> None:
    scope: dict[str, Any] = {}
    exec(f"def fn({name}): return [len(i) for i in {name}]", scope)
    assert values(scope["fn"]) == [2.0, 2.0]


def test_columns_called_prompt_or_completion_are_never_passed() -> None:
    seen: dict[str, Any] = {}

    def fn(**kwargs):
        seen.update(kwargs)
        return [0, 0]

    run(fn, group("a", "b", prompt_=1, completion="gold", completion_ids=[7]))
    assert "completion" not in seen and seen["completion_ids"] == [[1, 9], [1, 9]]


def test_a_reward_that_changes_its_arguments_changes_nothing_else() -> None:
    chat = [{"role": "user", "content": "Say"}]

    def vandal(prompts, completion_ids, behaviour_logps, prompt_ids):
        for things in (prompts, completion_ids, behaviour_logps, prompt_ids):
            things[0].pop()
        prompts[1][0]["content"] = "changed"
        return [0, 0]

    step = group("a", "b", prompt=chat)
    run(vandal, step, context=CHAT)
    assert step.prompt == [{"role": "user", "content": "Say"}]
    assert step.rollouts[0].completion_ids == [1, 9] and step.prompt_ids == [1, 2]
    assert step.rollouts[0].behaviour_logp == [-1.0, -2.0]


def test_the_trainer_state_cannot_be_changed() -> None:
    def fn(completions, trainer_state):
        trainer_state.step = 0

    assert "field 'step'" in str(failure(fn))


def test_scope_splits_the_calls() -> None:
    def sizes(scope: str) -> list[int]:
        seen: list[int] = []

        def fn(completions):
            seen.append(len(completions))
            return [len(c) for c in completions]

        step = [group("a", "bb"), group("ccc", "dddd")]
        assert values(fn, *step, scope=scope) == [1.0, 2.0, 3.0, 4.0]
        return seen

    assert sizes("batch") == [4]
    assert sizes("group") == [2, 2]
    assert sizes("row") == [1, 1, 1, 1]


def test_logged_columns_and_metrics_arrive_by_row_and_as_means() -> None:
    def fn(completions, log_extra, log_metric):
        log_extra("upper", [c.upper() for c in completions])
        log_metric("length", len(completions[0]))
        return [0.0 for _ in completions]

    scores = run(fn, group("a", "b"), group("ccc", "d"), scope="group")
    assert scores.extras == {"upper": ["A", "B", "CCC", "D"]}
    assert scores.metrics == {"length": 2.0}

    def short(completions, log_extra):
        log_extra("upper", ["A"])
        return [0, 0]

    assert "log_extra('upper') got 1 values, not 2" in str(failure(short))


# What a reward may return


@pytest.mark.parametrize(
    "returned",
    [
        [1, True],
        (1.0, 1),
        np.array([1.0, 1.0], dtype=np.float32),
        [np.float32(1), np.bool_(True)],
        torch.ones(2, dtype=torch.bfloat16, requires_grad=True),
        [torch.tensor(1.0, requires_grad=True), torch.tensor([1])],
    ],
)
def test_lists_arrays_and_tensors_of_numbers_are_scores(returned: Any) -> None:
    assert values(lambda completions: returned) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ([1.0], "returned 1 values for 2 completions"),
        ([1.0] * 3, "returned 3 values for 2 completions"),
        (1.0, "returned 1.0 (float), not a list"),
        (None, "returned None (NoneType), not a list"),
        (torch.ones(2, 1), "returned a Tensor of shape (2, 1)"),
        (np.float64(1), "returned a float64 of shape ()"),
        ({"a": 1, "b": 2}, "(dict), not a list"),
        ("ab", "returned 'ab' (str), not a list"),
    ],
)
def test_a_wrong_return_is_refused_with_both_counts(returned: Any, said: str) -> None:
    text = str(failure(lambda completions: returned))
    assert said in text
    assert "reward 'mine'" in text and f"{__file__}:" in text


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (float("nan"), "gave nan"),
        (float("inf"), "gave inf"),
        (float("-inf"), "gave -inf"),
        (1e40, "gave 1e+40"),
        (10**400, "beyond 1e30"),
        ("1.0", "gave '1.0' (str), not a number"),
        (1j, "not a number"),
        ([1.0], "not a number"),
        (torch.ones(2), "not a number"),
        (torch.tensor(float("nan")), "gave nan"),
    ],
)
def test_a_value_that_is_no_finite_number_is_refused_with_its_row(value: Any, said: str) -> None:
    text = str(
        failure(lambda completions: [0.0, 0.0, value, 0.0], group("a", "b"), group("c", "d"))
    )
    assert said in text and "mine" in text and __file__ in text
    for part in ("step 7", "row 2", "prompt 1", "completion 0", "draw 41", "1 of 4"):
        assert part in text


def test_a_value_that_raises_when_it_is_looked_at_is_a_failure() -> None:
    class Odd:
        shape = ()

        def item(self) -> float:
            raise RuntimeError("no value yet")

    assert "no value yet" in str(failure(lambda completions: [Odd(), 1.0]))


def test_none_is_no_score_and_not_a_zero() -> None:
    scores = run(lambda completions: [None, 0.0])
    assert scores.raw.isnan().flatten().tolist() == [True, False]
    assert scores.error_rate == {"mine": 0.0}


def test_rows_that_no_reward_scores_are_told_once_with_the_row() -> None:
    step = [group("a", "b", task="x"), group("c", "d", task="y")]
    scores = score_groups(
        [reward(lambda completions: [1, None, None, None]), reward(lambda task: [None] * 4, "b")],
        step,
        PLAIN,
    )
    assert len(scores.warnings) == 1
    for part in ("3 of 4 rows", "row 1 ", "prompt 0", "completion 1", "'x'"):
        assert part in scores.warnings[0]


def test_nan_is_none_when_the_reward_was_written_for_trl() -> None:
    def fn(completions):
        return [float("nan"), 1.0]

    assert values(fn, nan_is_none=True) == [None, 1.0]
    assert run(fn, nan_is_none=True).error_rate == {"mine": 0.0}
    assert "gave nan" in str(failure(fn))


def test_nothing_to_score_is_no_error() -> None:
    assert score_groups([], [group("a")], PLAIN).raw.shape == (0, 1, 1)
    assert score_groups([reward(lambda completions: [])], [], PLAIN).raw.shape == (1, 0, 0)


@pytest.mark.parametrize("scope", ["batch", "group", "row"])
def test_only_says_which_rows_a_reward_is_asked_about(scope: str) -> None:
    seen: list[str] = []

    def fn(completions):
        seen.extend(completions)
        return [1.0] * len(completions)

    rows = [group("a", "b", task="math"), group("c", "d", task="code"), group("e", "f", task="art")]
    one = values(fn, *rows, only={"task": "math"}, scope=scope)
    assert one == [1.0, 1.0, None, None, None, None] and sorted(seen) == ["a", "b"]
    both = values(fn, *rows, only={"task": ["math", "code"]}, scope=scope)
    assert both == [1.0, 1.0, 1.0, 1.0, None, None]


def test_a_column_that_only_names_has_to_be_there() -> None:
    one = reward(lambda completions: [1.0], only={"subject": "math"})
    with pytest.raises(DataError) as caught:
        check_reward_columns([one], ["task"])
    assert_refused(caught, 4, "'subject'")
