"""The line that says how long the prompts are."""

from loop_cases import make
from prompt_cases import LONG, prepare

from rloo_cli.data import splits
from rloo_cli.data.splits import describe_lengths


def test_a_line_has_the_ends_the_shape_the_median_and_the_tail(sentence) -> None:
    sentence(describe_lengths([*range(1, 97)]))
    sentence(describe_lengths([2, 2, 2, 4]))
    assert describe_lengths([7]) == describe_lengths([7, 7])
    sentence(describe_lengths([7]))


def test_a_bar_that_is_not_empty_is_seen() -> None:
    assert "1 |█▁| 2" in describe_lengths([1] * 10_000 + [2])


def test_what_is_over_the_limit_is_counted() -> None:
    assert describe_lengths([1, 5, 9], [5]).endswith("; 1 over 5")
    assert "over" not in describe_lengths([1, 5], [5])
    found = prepare(LONG, longest=2)  # two of four are dropped, and still told
    assert "| 6," in (said := splits.split_notes(None, found)[1]) and said.endswith("; 2 over 2")


def test_a_run_says_it_at_its_start(tmp_path, capsys) -> None:
    make(tmp_path, "data.eval_split=null")
    assert "prompt tokens: " in capsys.readouterr().out
