"""tests/sentences.txt and `assert_refused`: what the suite asks of every refusal."""

from pathlib import Path

import pytest
from assert_refused import assert_refused, printed_problems
from sentence_snapshot import read_sentences
from suite_marks import COLLECTED

from rloo_cli.utils.errors import ConfigError, Problem

ROOT = Path(__file__).parents[2]
PROBLEM = Problem("algorithm.beta = 'x' is wrong", "my.yaml:3", "two\nlines", "algorithm.beta=0.05")


def test_every_sentence_belongs_to_a_test(request: pytest.FixtureRequest) -> None:
    """By its whole name, in files that this session has collected whole."""
    if any("::" in word for word in request.config.args):
        pytest.skip("only some tests of a file were collected")
    names = request.config.stash[COLLECTED]
    files = {name.partition("::")[0] for name in names}
    asking = {name.partition(" #")[0] for name in read_sentences()}
    assert {name for name in asking if name.partition("::")[0] in files} <= names
    assert all((ROOT / name.partition("::")[0]).is_file() for name in asking)


def test_what_is_printed_is_read_back_whole() -> None:
    assert printed_problems(f"noise\n{PROBLEM.render()}\n\n{PROBLEM.render()}") == [PROBLEM] * 2


@pytest.mark.parametrize(
    "wrong",
    [{"code": 3}, {"key": "algorithm.bet"}, {"key": "beta"}, {"where": "my.yaml:4"}, {"fix": "=1"}],
    ids=str,
)
def test_a_refusal_with_another_code_key_or_place_is_noticed(wrong: dict[str, object]) -> None:
    right = {"code": 2, "key": "algorithm.beta", "where": "my.yaml:3", "fix": "beta=0.05"}
    error = ConfigError(PROBLEM)
    assert assert_refused(error, **right) == PROBLEM  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        assert_refused(error, **(right | wrong))  # type: ignore[arg-type]


def test_a_sentence_that_changed_is_noticed(sentence) -> None:
    with pytest.raises(AssertionError):
        sentence("another text than the file has")
