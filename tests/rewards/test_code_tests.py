"""The reward code_tests: which code, which tests, which score; and that nothing runs unasked."""

import json
from typing import Any

import pytest
from assert_refused import assert_refused
from cli_cases import Rloo
from loop_cases import checked
from reward_cases import PLAIN
from test_reward_examples import group, shipped, values
from test_sandbox import contained

from rloo_cli.config.user_code import user_code_notes
from rloo_cli.rewards.code_tests import extract_code, parse_tests
from rloo_cli.rewards.engine.columns import check_reward_columns
from rloo_cli.rewards.engine.scoring import RewardFailed, score_groups
from rloo_cli.utils.errors import ConfigError, MachineError

pytestmark = pytest.mark.process

CONTAINED = {"sandbox": "bwrap", "time_s": 9.0, "memory_mb": 96, "at_once": 2}
UNSAFE = CONTAINED | {"sandbox": "unsafe_subprocess"}  # for code of our own
GOOD = "Here:\n```python\ndef f(x):\n    return x * 2\n```\nDone."
BAD = GOOD.replace("* 2", "* 3")


def scores(tests: Any, *texts: str, where: dict[str, Any] = UNSAFE, **keys: Any) -> list[Any]:
    columns = keys.pop("columns", {})
    return values(shipped("code_tests", **(where | keys)), group(*texts, tests=tests, **columns))


# Which code


def test_the_code_is_the_last_closed_python_block() -> None:
    two = "```python\na\n```\nand\n```py\nb\n```\n"
    assert extract_code(two, "block") == "b\n"
    assert extract_code(f"{two}```text\nc\n```", "block") == "b\n"
    assert extract_code(f"{two}```python\nc", "block") == "b\n"
    assert extract_code("```Python3 \nx = '```'\ny\n```", "block") == "x = '```'\ny\n"
    for none in ("x = 1", "```\nx\n```", "```python\nx", "", "inline ```python x```"):
        assert extract_code(none, "block") is None
    assert extract_code("x = 1", "text") == "x = 1"


def test_no_code_is_wrong_and_no_tests_are_no_score() -> None:
    assert scores("assert f(2) == 4", GOOD, BAD, "no block at all") == [1.0, 0.0, 0.0]
    assert scores(None, GOOD, "no block at all") == [None, None]
    assert scores("assert f(2) == 4", "def f(x): return 4", extract="text") == [1.0]


def test_a_test_without_a_statement_counts_for_nothing() -> None:
    assert scores(["", "assert f(2) == 4"], GOOD, BAD, partial=True) == [1.0, 0.0]


# Which tests


@contained
def test_one_whole_step_in_the_sandbox_and_why_it_was_wrong() -> None:
    late = GOOD.replace("return x", "import time; time.sleep(9); return x")
    reward = shipped("code_tests", **(CONTAINED | {"time_s": 1.5}))
    found = score_groups(
        [reward], [group(GOOD, BAD, late, "none", tests="assert f(2) == 4")], PLAIN
    )
    assert found.raw.flatten().tolist() == [1.0, 0.0, 0.0, 0.0]
    assert found.extras["code_tests"] == ["passed", "failed", "time", "no code"]


def test_all_tests_pass_or_the_share_of_them_is_the_score() -> None:
    three = ["assert f(2) == 4", "assert f(1) == 3", "assert f(3) == 6"]
    assert scores(three, GOOD) == [0.0]
    assert scores(three, GOOD, BAD, partial=True) == [pytest.approx(2 / 3), pytest.approx(1 / 3)]
    assert scores(json.dumps(three), GOOD, partial=True) == [pytest.approx(2 / 3)]


def test_humanevals_check_is_called_with_the_entry_point() -> None:
    test = "def check(candidate):\n    assert candidate(2) == 4\n"
    row = {"columns": {"name": "f"}, "entry_point": "name"}
    assert scores(test, GOOD, BAD, **row) == [1.0, 0.0]
    assert scores(test, BAD) == [1.0]  # nobody calls check: the key is needed


def test_mbpps_setup_stands_before_each_test() -> None:
    row = {"columns": {"before": "import math\ntwo = 2"}, "setup": "before"}
    tests = ["assert f(two) == 4", "assert math.isclose(f(1), 2)"]
    assert scores(tests, GOOD, BAD, **row) == [1.0, 0.0]
    assert scores(tests, GOOD) == [0.0]


ADDS = "```python\nprint(sum(int(x) for x in input().split()))\n```"
CASES: dict[str, Any] = {
    "one case": {"input": "1 2", "output": "3"},
    "its other names": {"stdin": "1 2\n", "stdout": "3\n\n"},
    "several": [{"input": "1 2", "output": "3"}, {"input": "4 5", "output": "9 "}],
    "lists of them": {"inputs": ["1 2", "4 5"], "outputs": ["3", "9"]},
    "lists of lines": {"input": [["1 2"]], "output": [["3"]]},
    "a string of JSON": json.dumps({"inputs": ["1 2"], "outputs": ["3\n"]}),
}


@pytest.mark.slow_but("one case", "a string of JSON")
@pytest.mark.parametrize("name", CASES)
def test_input_and_output_come_as_the_data_sets_have_them(name: str) -> None:
    assert scores(CASES[name], ADDS, ADDS.replace("sum", "max")) == [1.0, 0.0]


def test_an_output_is_compared_line_by_line() -> None:
    (test,) = parse_tests({"input": "", "output": "1 2\n3\n"})
    for same in ("1 2\n3\n", "1 2 \n3", "1 2\r\n3\n\n"):
        assert test.passes(same), same
    for other in ("1 2 3", "1  2\n3", " 1 2\n3", "1 2\n\n3", "", "1 2\n3\n4"):
        assert not test.passes(other), other


def test_an_output_beyond_what_was_wanted_is_wrong() -> None:
    flood = "```python\nprint('3')\nprint('x' * 99999)\n```"
    assert scores(CASES["one case"], flood) == [0.0]


def test_functions_of_apps_are_called_and_compared() -> None:
    case = {"fn_name": "f", "inputs": [[2], [3]], "outputs": [4, [6]]}
    assert scores(case, GOOD, BAD) == [1.0, 0.0]
    method = "```python\nclass Solution:\n    def f(self, x): return 2 * x\n```"
    assert scores(json.dumps(case), method) == [1.0]


@pytest.mark.slow_but("assert f(2 ==-not valid Python", "tests5-has no test", "tests6-has no test")
@pytest.mark.parametrize(
    ("tests", "said"),
    [
        ("assert f(2 ==", "not valid Python"),
        (3, "not 3"),
        ({"input": "1"}, "a case has an input and an output"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"fn_name": "f()", "inputs": [[1]], "outputs": [1]}, "not a function name"),
        ([], "contains no test"),
        (["", " "], "contains no test"),
    ],
)
def test_tests_that_are_none_fail_the_reward_and_are_no_zero(tests: Any, said: str) -> None:
    with pytest.raises(RewardFailed, match=said):
        scores(tests, GOOD)


def test_a_sandbox_that_fails_in_the_run_is_no_zero() -> None:
    reward = shipped("code_tests", **UNSAFE)
    broken = reward.config.model_copy(update={"sandbox": "external", "command": "false"})
    object.__setattr__(reward, "fixed_arguments", {"config": broken})
    with pytest.raises(RewardFailed, match="did not start"):
        values(reward, group(GOOD, tests="assert f(2) == 4"))


# Before the run


def test_the_columns_it_reads_are_asked_for() -> None:
    reward = shipped("code_tests", **UNSAFE, entry_point="name", setup="before")
    assert reward.required_columns == ("tests", "name", "before")
    check_reward_columns([reward], ["tests", "name", "before"])


def test_no_code_runs_before_a_sandbox_is_chosen(rloo_without_torch: Rloo) -> None:
    ended = rloo_without_torch("train", "+recipe=smoke", "reward=code_tests")
    problem = assert_refused(ended, 2, "reward.code_tests.sandbox")
    for choice in ("bwrap", "external", "unsafe_subprocess"):
        assert choice in problem.render()
    assert rloo_without_torch.left() == []


def test_a_command_goes_with_external_alone() -> None:
    for words in (("sandbox=external",), ("sandbox=bwrap", "command=podman")):
        with pytest.raises(ConfigError, match="they go together"):
            checked((), ("reward=code_tests", *(f"reward.code_tests.{w}" for w in words)))


def test_a_machine_without_bubblewrap_refuses_the_run(rloo_without_torch: Rloo, tmp_path) -> None:
    words = ("train", "+recipe=smoke", "reward=code_tests", "reward.code_tests.sandbox=bwrap")
    ended = rloo_without_torch(*words, PATH=str(tmp_path))
    assert ended.code == 3 and "apt-get install bubblewrap" in ended.err
    assert "reward.code_tests" in ended.err and rloo_without_torch.left() == []


def test_a_sandbox_that_does_not_work_is_found_when_the_reward_is_built() -> None:
    with pytest.raises(MachineError) as caught:
        shipped("code_tests", sandbox="external", command="false")
    assert_refused(caught, 3, "external")


def test_running_uncontained_is_said_in_the_log() -> None:
    one = "reward.code_tests.sandbox=unsafe_subprocess"
    (note,) = user_code_notes(checked((), ("reward=code_tests", one)))
    assert note.startswith("warning: reward.code_tests.sandbox=unsafe_subprocess")
    contained = one.replace("unsafe_subprocess", "bwrap")
    assert user_code_notes(checked((), ("reward=code_tests", contained))) == []
