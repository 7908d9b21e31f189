"""Before the run: the data's columns, and the user's own code."""

from functools import partial
from typing import Any

import pytest
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
    said = str(caught.value)
    assert "'mine' needs the data column 'answer'" in said
    assert "question, gold" in said and __file__ in said
    assert caught.value.code == 4
    with pytest.raises(DataError, match="'completion'"):
        check_reward_columns([reward(lambda completion: [0.0])], ["prompt", "completion"])


@pytest.mark.parametrize("column", ["prompts", "completions", "trainer_state", "log_extra"])
def test_a_column_named_like_an_argument_is_refused(column: str) -> None:
    with pytest.raises(ConfigError, match=f"column named '{column}'") as caught:
        check_reward_columns([reward(lambda **kwargs: [])], ["prompt", column])
    assert caught.value.code == 2
    check_reward_columns([reward(lambda **kwargs: [])], ["prompt", "completion", "completion_ids"])


def test_a_positional_parameter_is_named() -> None:
    with pytest.raises(ConfigError, match="parameter 'completions' cannot be given by name"):
        reward(lambda completions, /: [0.0])


# The user's own code


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
    assert score_groups([loaded], [group("a", "abc")], PLAIN).raw.flatten().tolist() == [0.0, 1.0]
    assert loaded.location == f"{file}:1"
    check_reward_columns([loaded], ["prompt"])
    with pytest.raises(ConfigError, match="'than' is a data column and in kwargs"):
        check_reward_columns([loaded], ["prompt", "than"])


def test_a_function_comes_from_a_module() -> None:
    loaded = function("rloo_cli.rewards.length_chars:score")
    assert score_groups([loaded], [group("abc")], PLAIN).raw.item() == 3.0


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
