"""Before the run: the data's columns, and the user's own code."""

from functools import partial
from typing import Any

import pytest
from assert_refused import assert_refused
from reward_cases import PLAIN, function, group, reward, values

from rloo_cli.rewards.engine.columns import check_reward_columns
from rloo_cli.rewards.engine.scoring import score_groups
from rloo_cli.utils.errors import ConfigError, DataError

# Before the run


def test_a_missing_column_is_found_before_any_model_loads() -> None:
    def fn(completions, answer, threshold=0.5):
        return [0.0]

    check_reward_columns([reward(fn)], ["prompt", "answer"])
    with pytest.raises(DataError) as caught:
        check_reward_columns([reward(fn)], ["prompt", "question", "gold"])
    problem = assert_refused(caught, 4, "'answer'", where=__file__)
    assert "'mine'" in problem.what and "question, gold" in problem.why
    with pytest.raises(DataError, match="'completion'"):
        check_reward_columns([reward(lambda completion: [0.0])], ["prompt", "completion"])


@pytest.mark.parametrize("column", ["prompts", "completions", "trainer_state", "log_extra"])
def test_a_column_named_like_an_argument_is_refused(column: str) -> None:
    with pytest.raises(ConfigError, match=f"column named '{column}'") as caught:
        check_reward_columns([reward(lambda **kwargs: [])], ["prompt", column])
    assert caught.value.code == 2
    check_reward_columns([reward(lambda **kwargs: [])], ["prompt", "completion", "completion_ids"])


def test_a_positional_parameter_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        reward(lambda completions, /: [0.0])
    assert_refused(caught, 2, "'completions'")


# The user's own code


def refusal(path: Any, **kwargs: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        function(path, **kwargs)
    assert caught.value.problems[0].where.startswith("reward.function.")
    return caught.value


def test_a_function_comes_from_a_file_with_its_kwargs(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def longer(completions, than, **kwargs):\n    return [len(c) > than for c in completions]"
    )
    loaded = function(f"{file}:longer", than=2)
    assert score_groups([loaded], [group("a", "abc")], PLAIN).raw.flatten().tolist() == [0.0, 1.0]
    assert loaded.location == f"{file}:1"
    check_reward_columns([loaded], ["prompt"])
    with pytest.raises(ConfigError) as caught:
        check_reward_columns([loaded], ["prompt", "than"])
    assert_refused(caught, 2, "'than'")


def test_a_function_comes_from_a_module() -> None:
    loaded = function("rloo_cli.rewards.length_chars:score")
    assert score_groups([loaded], [group("abc")], PLAIN).raw.item() == 3.0


def test_kwargs_the_function_does_not_take_are_refused(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def f(completions):\n    return [0.0]")
    assert_refused(refusal(f"{file}:f", than=2), 2, "'than'", where="reward.function.kwargs.than")
    assert_refused(refusal(f"{file}:f", prompts=2), 2, "prompts")


FILES = {
    "mine": "CONSTANT = 3\ndef reward_length(completions):\n    return []\n",
    "syntax": "def f(:\n",
    "raises": "def g():\n    return 1 / 0\ng()\n",
    "imports": "import no_such_package\n",
    "leaves": "import sys\nsys.exit(0)\n",
}


@pytest.mark.parametrize(
    ("spec", "key", "fix"),
    [
        ("nowhere.py:f", "nowhere.py", ""),
        ("mine.py:reward_lenght", "'reward_lenght'", "mine.py:reward_length"),
        ("mine.py:other", "it has: reward_length", "define other in "),
        ("mine.py:CONSTANT", "mine.py:CONSTANT", "reward.function.path"),
        ("syntax.py:f", "SyntaxError", "syntax.py"),
        ("raises.py:f", "ZeroDivisionError", "raises.py"),
        ("imports.py:f", "'no_such_package'", "imports.py"),
        ("leaves.py:f", "SystemExit", "leaves.py"),
    ],
)
def test_code_that_cannot_be_loaded_says_what_and_where(spec, key, fix, tmp_path) -> None:
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
    said = assert_refused(refusal(f"{tmp_path}/{spec}"), 2, key, "reward.function", fix).render()
    assert "registry.py" not in said and "importlib" not in said
    assert key != "ZeroDivisionError" or 'raises.py", line 2, in g' in said


def test_a_spec_that_names_no_code_is_refused(sentence) -> None:
    for spec, key in (("nowhere.py", "'nowhere.py'"), ("nowhere.module:f", "'nowhere'")):
        error = refusal(spec)
        assert_refused(error, 2, key)
        sentence(error)


def test_two_files_of_one_name_in_two_folders_are_two_rewards(tmp_path) -> None:
    both = []
    for value in (1, 2):
        folder = tmp_path / str(value)
        folder.mkdir()
        file = folder / "rewards.py"
        file.write_text(f"def f(completions):\n    return [{value} for _ in completions]")
        both.append(function(f"{file}:f", name=f"r{value}"))
    assert score_groups(both, [group("a")], PLAIN).raw.flatten().tolist() == [1.0, 2.0]


def test_objects_and_partials_can_be_rewards() -> None:
    class Scorer:
        async def __call__(self, completions):
            return [2.0 for _ in completions]

    def fn(completions, value):
        return [value for _ in completions]

    assert reward(Scorer()).is_async and values(Scorer()) == [2.0, 2.0]
    assert values(partial(fn, value=3.0)) == [3.0, 3.0]
    assert reward(partial(fn, value=3.0)).location.startswith(__file__)
