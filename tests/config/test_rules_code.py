"""What is found of a user's own code without running it."""

from pathlib import Path

import pytest

from rloo_cli.config.rules_code import code_problems


@pytest.mark.parametrize(
    ("source", "found"),
    [
        pytest.param("f = 3\n", "a.py:f is not callable", id="a-number"),
        pytest.param("f = g = ['x']\n", "a.py:f is not callable", id="a-list"),
        pytest.param("def f(x, /): ...\n", "parameter 'x' cannot be passed by name", id="before-/"),
        pytest.param("def f(x, /, y=1): ...\n", "parameter 'x'", id="before-/-and-a-default"),
    ],
)
def test_a_name_that_can_be_no_reward_is_found(
    source: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.py").write_text(source)
    (problem,) = code_problems("reward.x.path", "a.py:f")
    assert found in problem.what
    assert problem.fix


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("f = 3\nf = len\n", id="bound-again"),
        pytest.param("f = 3\nif True:\n    def f(x): ...\n", id="bound-again-in-a-branch"),
        pytest.param("def f(x=1, /): ...\n", id="a-default"),
        pytest.param("def f(x=1, /, y=2): ...\n", id="two-defaults"),
        pytest.param("@wrap\ndef f(x, /): ...\n", id="a-decorator"),
        pytest.param("class C:\n    def f(self, x, /): ...\nfrom b import *\n", id="a-method"),
        pytest.param("f = make()\n", id="a-call"),
    ],
)
def test_what_only_running_the_file_would_show_is_no_problem(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.py").write_text(source)
    assert not [*code_problems("reward.x.path", "a.py:f")]


def test_arguments_before_a_slash_are_a_problem_of_rewards_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.py").write_text("def f(row, /): return True\n")
    assert not [*code_problems("data.filter", "a.py:f")]
