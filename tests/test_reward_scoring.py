"""Calling rewards: what they get, what they may return, and what becomes of a failure."""

import asyncio
import json
import math
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rloo_cli.errors import ConfigError, DataError
from rloo_cli.rewards.arguments import KWARGS, Context, TrainerState
from rloo_cli.rewards.build import build, check_columns, from_callable
from rloo_cli.rewards.function import Config as FunctionConfig
from rloo_cli.rewards.scoring import RewardFailed, Scores, score
from rloo_cli.rollout import Group, Rollout
from rloo_cli.schema import RewardConfig

COMMON: dict[str, Any] = {
    "type": "function",
    "weight": 1.0,
    "timeout_s": 20.0,
    "retries": 0,
    "on_error": "raise",
    "max_error_rate": 0.2,
    "nan_is_none": False,
    "scope": "batch",
    "cache": False,
}
STATE = TrainerState(3, 7, 10, 0.5, 96, 1000, 1.0)
PLAIN = Context(conversational=False, trainer_state=STATE)
CHAT = Context(conversational=True, trainer_state=STATE)


def group(*texts: str, prompt: Any = "Say", **row: Any) -> Group:
    rollouts = [Rollout([len(t), 9], t, "stop", True, 0, 0, [-1.0, -2.0]) for t in texts]
    return Group(41, row, prompt, [1, 2], rollouts)


def reward(fn: Any, name: str = "mine", **keys: Any) -> Any:
    return from_callable(name, fn, RewardConfig(**(COMMON | keys)))


def run(fn: Any, *groups: Group, context: Context = PLAIN, **keys: Any) -> Scores:
    return score([reward(fn, **keys)], groups or [group("a", "b")], context)


def values(fn: Any, *groups: Group, **keys: Any) -> list[float | None]:
    flat = run(fn, *groups, **keys).raw.flatten().tolist()
    return [None if math.isnan(x) else x for x in flat]


def failure(fn: Any, *groups: Group, **keys: Any) -> RewardFailed:
    with pytest.raises(RewardFailed) as caught:
        run(fn, *groups, **keys)
    assert caught.value.code == 5
    json.dumps(caught.value.detail)
    return caught.value


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
    assert set(seen) == (KWARGS - {"columns"}) | {"answer"}
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

    assert "cannot assign to field 'step'" in str(failure(fn))


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


# Before the run


def test_a_missing_column_is_found_before_any_model_loads() -> None:
    def fn(completions, answer, threshold=0.5):
        return [0.0]

    check_columns([reward(fn)], ["prompt", "answer"])
    with pytest.raises(DataError) as caught:
        check_columns([reward(fn)], ["prompt", "question", "gold"])
    said = str(caught.value)
    assert "'mine' needs the data column 'answer'" in said
    assert "question, gold" in said and __file__ in said
    assert caught.value.code == 4
    with pytest.raises(DataError, match="'completion'"):
        check_columns([reward(lambda completion: [0.0])], ["prompt", "completion"])


@pytest.mark.parametrize("column", ["prompts", "completions", "trainer_state", "log_extra"])
def test_a_column_named_like_an_argument_is_refused(column: str) -> None:
    with pytest.raises(ConfigError, match=f"column named '{column}'") as caught:
        check_columns([reward(lambda **kwargs: [])], ["prompt", column])
    assert caught.value.code == 2
    check_columns([reward(lambda **kwargs: [])], ["prompt", "completion", "completion_ids"])


def test_a_positional_parameter_is_named() -> None:
    with pytest.raises(ConfigError, match="parameter 'completions' cannot be given by name"):
        reward(lambda completions, /: [0.0])


# The user's own code


def function(path: Any, name: str = "function", **kwargs: Any) -> Any:
    return build(name, FunctionConfig(**COMMON, path=str(path), kwargs=kwargs))


def refusal(path: Any, **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        function(path, **kwargs)
    assert caught.value.code == 2
    assert caught.value.problems[0].where.startswith("reward.function.")
    return str(caught.value)


def test_a_function_comes_from_a_file_with_its_kwargs(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def longer(completions, than, **kwargs):\n    return [len(c) > than for c in completions]"
    )
    loaded = function(f"{file}:longer", than=2)
    assert score([loaded], [group("a", "abc")], PLAIN).raw.flatten().tolist() == [0.0, 1.0]
    assert loaded.location == f"{file}:1"
    check_columns([loaded], ["prompt"])
    with pytest.raises(ConfigError, match="'than' is a data column and in kwargs"):
        check_columns([loaded], ["prompt", "than"])


def test_a_function_comes_from_a_module() -> None:
    loaded = function("rloo_cli.rewards.length_chars:score")
    assert score([loaded], [group("abc")], PLAIN).raw.item() == 3.0


def test_kwargs_the_function_does_not_take_are_refused(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def f(completions):\n    return [0.0]")
    assert "the reward takes no 'than'" in refusal(f"{file}:f", than=2)
    assert "reward.function.kwargs.than" in refusal(f"{file}:f", than=2)
    assert "prompts cannot be given" in refusal(f"{file}:f", prompts=2)


def test_code_that_cannot_be_loaded_says_what_and_where(tmp_path) -> None:
    assert "is not a file" in refusal(f"{tmp_path}/nowhere.py:f")
    assert "does not name code" in refusal("nowhere.py")
    assert "no module named 'nowhere'" in refusal("nowhere.module:f")

    file = tmp_path / "mine.py"
    file.write_text("CONSTANT = 3\ndef reward_length(completions):\n    return []\n")
    assert "did you mean reward_length?" in refusal(f"{file}:reward_lenght")
    assert "is not callable" in refusal(f"{file}:CONSTANT")

    (tmp_path / "syntax.py").write_text("def f(:\n")
    said = refusal(f"{tmp_path}/syntax.py:f")
    assert "could not be imported" in said and "syntax.py" in said and "SyntaxError" in said

    (tmp_path / "raises.py").write_text("def g():\n    return 1 / 0\ng()\n")
    said = refusal(f"{tmp_path}/raises.py:f")
    assert "ZeroDivisionError" in said and 'raises.py", line 2, in g' in said
    assert "registry.py" not in said and "importlib" not in said

    (tmp_path / "imports.py").write_text("import no_such_package\n")
    assert "No module named 'no_such_package'" in refusal(f"{tmp_path}/imports.py:f")
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    assert "SystemExit" in refusal(f"{tmp_path}/leaves.py:f")


def test_two_files_of_one_name_in_two_folders_are_two_rewards(tmp_path) -> None:
    both = []
    for value in (1, 2):
        folder = tmp_path / str(value)
        folder.mkdir()
        file = folder / "rewards.py"
        file.write_text(f"def f(completions):\n    return [{value} for _ in completions]")
        both.append(function(f"{file}:f", name=f"r{value}"))
    assert score(both, [group("a")], PLAIN).raw.flatten().tolist() == [1.0, 2.0]


def test_objects_and_partials_can_be_rewards() -> None:
    class Scorer:
        async def __call__(self, completions):
            return [2.0 for _ in completions]

    def fn(completions, value):
        return [value for _ in completions]

    assert reward(Scorer()).is_async and values(Scorer()) == [2.0, 2.0]
    assert values(partial(fn, value=3.0)) == [3.0, 3.0]
    assert reward(partial(fn, value=3.0)).location.startswith(__file__)


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
        ([1.0], "returned 1 values for 2 rows"),
        ([1.0] * 3, "returned 3 values for 2 rows"),
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
    assert said in text
    assert "step 7, row 2 (prompt 1, completion 0, draw 41)" in text
    assert "1 of 4 rows failed" in text and "mine" in text and __file__ in text


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
    scores = score(
        [reward(lambda completions: [1, None, None, None]), reward(lambda task: [None] * 4, "b")],
        step,
        PLAIN,
    )
    assert len(scores.warnings) == 1
    assert "no reward scored 3 of 4 rows" in scores.warnings[0]
    assert "row 1 (prompt 0, completion 1" in scores.warnings[0] and "'x'" in scores.warnings[0]


def test_nan_is_none_when_the_reward_was_written_for_trl() -> None:
    def fn(completions):
        return [float("nan"), 1.0]

    assert values(fn, nan_is_none=True) == [None, 1.0]
    assert run(fn, nan_is_none=True).error_rate == {"mine": 0.0}
    assert "gave nan" in str(failure(fn))


# Failures


def test_a_failed_reward_is_never_a_zero() -> None:
    def fn(completions):
        return [1.0 / len(c) for c in completions]

    step = [group("a", ""), group("b", "c")]
    error = failure(fn, *step)
    why = error.problems[0].why
    assert "ZeroDivisionError: float division by zero" in why
    assert "in fn" in why and "return [1.0 / len(c)" in why
    assert "running.py" not in why and "threading.py" not in why
    assert "rows 0 to 3" in error.problems[0].where
    assert error.detail["rewards"][0]["failed_rows"] == [0, 1, 2, 3]
    assert error.detail["rewards"][0]["rows"][1]["completion"] == ""
    assert "running.py" in error.detail["rewards"][0]["traceback"]
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
        score([reward(one, "one"), reward(two, "two")], [group("a")], PLAIN)
    assert [p.what.split("'")[1] for p in caught.value.problems] == ["one", "two"]
    assert "in two" in caught.value.problems[1].why


def test_a_failure_of_a_shipped_reward_shows_its_frames() -> None:
    config = RewardConfig(**COMMON)
    from rloo_cli.rewards import length_chars

    broken = group("a")
    broken.rollouts[0].text = None  # type: ignore[assignment]
    with pytest.raises(RewardFailed) as caught:
        score([from_callable("n", length_chars.score, config)], [broken], PLAIN)
    why = caught.value.problems[0].why
    assert "length_chars.py" in why and "running.py" not in why


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_a_reward_cannot_end_the_process(kind: type[BaseException]) -> None:
    def fn(completions):
        raise kind(0)

    async def afn(completions):
        raise kind(0)

    async def task(completions):  # from a task of its own, which would end the loop's thread
        async def leave():
            raise kind(0)

        kept = asyncio.ensure_future(leave())
        await asyncio.sleep(0.05)
        assert kept.done()
        return [1.0, 1.0]

    for f in (fn, afn):
        assert kind.__name__ in str(failure(f))
        assert "may not end the process" in str(failure(f))
    assert values(task) == [1.0, 1.0]
    assert values(lambda completions: [1, 2]) == [1.0, 2.0]


def test_sys_exit_zero_inside_a_reward_is_a_failure() -> None:
    assert "SystemExit: 0" in str(failure(lambda completions: sys.exit(0)))


def test_a_hung_function_is_left_behind_at_its_deadline() -> None:
    release = threading.Event()

    def hangs(completions):
        release.wait(60)
        return [1.0, 1.0]

    error = failure(hangs, timeout_s=0.2)
    assert "no answer within timeout_s = 0.2 s" in str(error)
    assert "in hangs" in error.problems[0].why  # where it hung
    release.set()


def test_what_a_hung_function_says_later_is_not_heard() -> None:
    release, done = threading.Event(), threading.Event()

    def late(completions, log_extra):
        release.wait(60)
        log_extra("x", [1, 1])
        done.set()
        return [1.0, 1.0]

    scores = run(late, timeout_s=0.1, on_error="none", max_error_rate=1.0)
    release.set()
    assert done.wait(10)
    assert scores.raw.isnan().all() and scores.extras == {}


def test_a_hung_coroutine_is_cancelled_and_others_go_on() -> None:
    async def hangs(completions):
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                await asyncio.sleep(60)  # it refuses, the first time
                raise

    async def good(completions):
        await asyncio.sleep(0.01)
        return [1.0]

    lenient = {"on_error": "none", "max_error_rate": 1.0, "timeout_s": 0.2}
    scores = score([reward(hangs, "hangs", **lenient), reward(good, "good")], [group("a")], PLAIN)
    assert scores.raw[0].isnan().all() and scores.raw[1].item() == 1.0
    assert scores.error_rate == {"hangs": 1.0, "good": 0.0}
    assert "blocked" not in str(failure(hangs, timeout_s=0.1))


def test_a_coroutine_that_blocks_the_loop_is_found_and_the_next_step_works() -> None:
    release = threading.Event()

    async def blocks(completions):
        release.wait(60)

    error = failure(blocks, timeout_s=0.1)
    assert "the event loop is blocked" in str(error) and "in blocks" in error.problems[0].why

    async def good(completions):
        return [1.0, 1.0]

    assert values(good, timeout_s=5) == [1.0, 1.0]  # before the blocked one is free
    release.set()


def test_async_rewards_run_with_each_other_and_with_sync_ones() -> None:
    # Each waits for something that only the other ones do: in a row they would all time out.
    flags = {name: threading.Event() for name in ("a", "b", "sync")}

    def coroutine(name: str) -> Any:
        async def fn(completions):
            flags[name].set()
            while not all(f.is_set() for f in flags.values()):
                await asyncio.sleep(0.01)
            return [1.0]

        return reward(fn, name, timeout_s=10)

    def sync(completions):
        flags["sync"].set()
        assert all(f.wait(10) for f in flags.values())
        return [2.0]

    rewards = [coroutine("a"), reward(sync, "sync", timeout_s=10), coroutine("b")]
    scores = score(rewards, [group("x")], PLAIN)
    assert scores.raw.flatten().tolist() == [1.0, 2.0, 1.0]
    assert all(s >= 0 for s in scores.seconds.values())


def test_the_calls_of_one_async_reward_run_together() -> None:
    arrived: set[str] = set()

    async def fn(completions):
        arrived.update(completions)
        while len(arrived) < 3:
            await asyncio.sleep(0.01)
        return [1.0]

    assert values(fn, group("a", "b", "c"), scope="row", timeout_s=10) == [1.0, 1.0, 1.0]


def test_results_are_placed_by_row_whatever_ends_first() -> None:
    async def fn(completions):
        await asyncio.sleep(0.05 if completions == ["a"] else 0.0)
        return [float(ord(completions[0]))]

    assert values(fn, group("a", "b"), group("c", "d"), scope="row") == [97.0, 98.0, 99.0, 100.0]


def test_the_event_loop_lives_on_between_steps() -> None:
    loops = []

    async def fn(completions):
        loops.append(asyncio.get_running_loop())
        return [0.0, 0.0]

    run(fn)
    run(fn)
    assert loops[0] is loops[1]


def test_a_plain_function_may_return_a_coroutine() -> None:
    async def inner():
        return [1.0, 1.0]

    assert values(lambda completions: inner()) == [1.0, 1.0]


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
        flat = score([mine], step, PLAIN).raw.flatten().tolist()
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
        assert score([mine], [group("xx", "xx", "y", "y")], PLAIN).error_rate == {"mine": 0.5}
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
    score([mine], [group("a", image=Image()), group("a", image=Image())], PLAIN)
    assert asked == ["a", "a"]


def test_waiting_can_be_given_up() -> None:
    release = threading.Event()

    def stop() -> None:
        raise InterruptedError

    context = Context(conversational=False, trainer_state=SimpleNamespace(step=1), poll=stop)
    start = time.monotonic()
    with pytest.raises(InterruptedError):
        run(lambda completions: release.wait(60), context=context)
    assert time.monotonic() - start < 30
    release.set()


def test_nothing_to_score_is_no_error() -> None:
    assert score([], [group("a")], PLAIN).raw.shape == (0, 1, 1)
    assert score([reward(lambda completions: [])], [], PLAIN).raw.shape == (1, 0, 0)
