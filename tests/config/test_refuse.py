"""`refuse`, and where a refusal says that its key was written, once a run has begun."""

from pathlib import Path

import pytest
from assert_refused import assert_refused, printed_problems

from rloo_cli.config.messages import locate_in_run
from rloo_cli.train import worker
from rloo_cli.utils.errors import ConfigError, DataError, Problem, refuse


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("# @package _global_\nmax_steps: 2\ndata:\n  chat: true\n")
    words = [f"+recipe={recipe}", "data.path=rows.jsonl", "generation=vllm_server"]
    (tmp_path / "overrides.txt").write_text("".join(f"{word}\n" for word in words))
    return tmp_path


def test_a_refusal_has_four_parts_and_the_class_that_is_asked_for() -> None:
    with pytest.raises(DataError) as refused:
        refuse("data.path", "no rows", "data.path=FILE", "found 0", at="row 3", error=DataError)
    assert assert_refused(refused, 4, "data.path", "row 3") == Problem(
        "no rows", "data.path, row 3", "found 0", "data.path=FILE"
    )
    with pytest.raises(ConfigError):
        refuse("data.path", "no rows", "data.path=FILE")


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ValueError("the text\nand more"), "the text\nand more"),
        (ValueError(), "ValueError"),
        (KeyError("answer"), "KeyError: 'answer'"),
        (OSError("x" * 400), "x" * 300),
    ],
    ids=["text", "empty", "key", "long"],
)
def test_an_exception_stands_for_its_text(error: Exception, why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        refuse("data.path", "it fails", "mend it", error)
    assert refused.value.problems[0].why == why


@pytest.mark.parametrize(
    ("key", "where"),
    [
        ("data.path", "command line: data.path=rows.jsonl"),
        ("generation.server.port", "command line: generation=vllm_server"),
        ("max_steps", "mine.yaml:2"),
        ("data.chat", "mine.yaml:4"),
        ("data.prompt_column", "data.prompt_column"),
        ("this machine", "this machine"),
    ],
)
def test_a_run_that_has_begun_says_where_a_key_was_written(
    key: str, where: str, folder: Path
) -> None:
    (found,) = locate_in_run([Problem("wrong", key)], folder)
    assert found.where.endswith(where)
    assert (found.more == f"rloo config explain {key}") is (found.where != key)


def test_a_rank_prints_where_the_key_was_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker._report_refusal(folder, DataError(Problem("no rows", "data.path", "", "FILE")), 0)
    (problem,) = printed_problems(capsys.readouterr().err)
    assert problem.where == "command line: data.path=rows.jsonl"


def test_a_folder_without_overrides_leaves_the_key(tmp_path: Path) -> None:
    problem = Problem("no rows", "data.path")
    assert locate_in_run([problem], tmp_path) == [problem]
