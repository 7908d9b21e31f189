"""The command line: what is refused, in which words, and that a refusal leaves nothing."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from assert_refused import assert_refused, printed_problems
from cli_cases import Ended, Rloo

from rloo_cli.cli import main
from rloo_cli.launch import launcher
from rloo_cli.utils.errors import ConfigError

MINE = """# A recipe of the user's own.
defaults:
  - override /model: tiny
  - override /data: tiny
  - override /reward: unique_chars
max_steps: 2
algorithm:
  num_generation: 4
  beta: abc
train: {prompts_per_stp: 3}
"""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder in which verbs are called in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["rloo"])
    return tmp_path


# What the command itself answers.


def test_help_lists_verbs_on_one_screen_at_once_and_without_torch(rloo_without_torch: Rloo) -> None:
    start = time.monotonic()
    ended = rloo_without_torch("--help")
    assert time.monotonic() - start < 2
    assert ended.code == 0 and ended.out.startswith("usage: rloo VERB")
    assert {*main.VERBS} <= {*ended.out.split()} and "rloo recipes" in ended.out
    assert len(ended.out.splitlines()) <= 40


@pytest.mark.parametrize("words", [[], ["-h"], ["help"], ["train", "--help"], ["config", "-h"],
                                   ["help", "config"]])  # fmt: skip
def test_help_is_never_far(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.find_verb(words)() == 0
    verb = next((word for word in words if word in ("train", "config")), "VERB")
    assert capsys.readouterr().out.startswith(f"usage: rloo {verb}")


def test_an_unknown_verb_is_answered_with_the_nearest(
    rloo: Rloo, sentence: Callable[..., None]
) -> None:
    ended = rloo("trian", "+recipe=smoke")
    assert ended.out == ""
    assert_refused(ended, key="trian", fix="rloo train")
    sentence(ended)


# Refusals: hundreds more, of one key each, are in tests/config/test_refusals_config.py.


def test_a_key_misspelt_in_a_recipe_file_is_named_with_its_line(rloo_without_torch: Rloo) -> None:
    (rloo_without_torch.folder / "sub").mkdir()
    (rloo_without_torch.folder / "sub" / "my.yaml").write_text(MINE)
    ended = rloo_without_torch("train", "+recipe=sub/my.yaml", "seed=-1", "+nonsense=1")
    assert ended.code == 2 and ended.out == "" and "Traceback" not in ended.err
    problems = printed_problems(ended.err)
    assert all(problem.why for problem in problems)
    places = [problem.where for problem in problems]
    assert places == [  # as written: the command line's words, then the file's lines
        "command line: seed=-1",
        "command line: nonsense=1",
        "sub/my.yaml:8",
        "sub/my.yaml:9",
        "sub/my.yaml:10",
    ]
    assert_refused(ended, key="algorithm.num_generation", fix="algorithm.num_generations")
    assert rloo_without_torch.left() == ["sub", "sub/my.yaml"]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> Ended:
    code = main.find_verb(["train", *words])()
    return Ended(code, *capsys.readouterr())


def test_without_a_recipe_what_has_no_value_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = refused(capsys)
    for key in ("model.path", "data.path"):
        assert_refused(ended, key=key)
    assert not [*folder.iterdir()]


def test_at_most_twenty_errors_are_shown_and_the_rest_counted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = refused(capsys, "+recipe=smoke", *(f"nonsense{i}=1" for i in range(23)))
    assert ended.code == 2 and len(printed_problems(ended.err)) == 20
    assert ended.err.splitlines()[-1] == "... and 3 more"


def test_recipe_may_be_written_without_its_plus(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["recipe=smoke"], ["seed=7", "+recipe=smoke"], ["+debug=cpu", "recipe=tldr_1b"]):
        assert main.find_verb(["train", "--dry-run", *words])() == 0
    out = capsys.readouterr().out
    assert out.count("run        runs/smoke") == 2 and out.count("runs/debug/tldr_1b") == 1
    assert "seed: 7" in out


# Flags.


def test_flags_may_stand_anywhere(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for words in (
        ["--cfg", "job", "+recipe=smoke", "seed=9"],
        ["+recipe=smoke", "--cfg=job", "seed=9"],
        ["seed=9", "+recipe=smoke", "-c", "job"],
    ):
        assert main.find_verb(["train", *words])() == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] == said[2]
    assert "seed: 9" in said[0] and "path: make:tiny" in said[0]


@pytest.mark.parametrize("words", [["--cfg"], ["--cfg", "jobs"], ["--config-dir"]])
def test_a_flag_without_its_value_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        main.find_verb(["train", "+recipe=smoke", *words])()
    assert_refused(refused, key=words[0])


@pytest.mark.parametrize("flags", [["--errors=json"], ["--errors", "json"]], ids=" ".join)
def test_errors_can_be_had_as_json(flags: list[str], rloo: Rloo) -> None:
    ended = rloo("train", *flags, "+recipe=smoke", "algorithm.beta=abc", "+algorithm.betta=3")
    first, second = json.loads(ended.err)
    assert ended.code == first["code"] == 2
    assert first["what"] and first["why"] and first["fix"] and first["more"]
    assert [first["where"], second["where"]] == [
        "command line: algorithm.beta=abc", "command line: algorithm.betta=3",
    ]  # fmt: skip


def test_a_traceback_is_shown_on_request_only(rloo: Rloo) -> None:
    plain = rloo("train", "+recipe=smoke", "algorithm.beta=abc")
    debug = rloo("train", "+recipe=smoke", "algorithm.beta=abc", "--debug")
    assert plain.code == debug.code == 2
    assert "Traceback" not in plain.err and "Traceback" in debug.err
    assert plain.err in debug.err


def test_a_dry_run_prints_the_plan_and_leaves_nothing(rloo_without_torch: Rloo) -> None:
    ended = rloo_without_torch("train", "+recipe=tldr_1b", "--dry-run")
    assert ended.code == 0 and ended.err == ""
    for number in ("1024 completions", "977 (", "= 4 per step"):
        assert number in ended.out
    assert "\nalgorithm:\n  name: rloo\n" in ended.out
    assert rloo_without_torch.left() == []


def test_a_key_that_does_nothing_is_told_before_a_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "my.yaml").write_text("defaults: [smoke]\nalgorithm: {loss_type: sapo}\n")
    asked = {
        ("+recipe=smoke", "algorithm.loss_type=sapo"): 1,
        ("+recipe=my.yaml",): 1,
        ("+recipe=smoke", "algorithm=grpo", "algorithm.loss_type=sapo"): 0,
        ("+recipe=smoke", "algorithm.loss_type=null"): 0,
        ("+recipe=smoke", "algorithm.epsilon=0.2"): 0,  # what it is anyway
        ("+recipe=smoke", "algorithm.epsilon=0.3"): 1,
    }
    for words, count in asked.items():
        assert main.find_verb(["train", "--dry-run", *words])() == 0
        assert capsys.readouterr().out.count("note: algorithm.") == count, words


def test_a_run_begins_with_what_has_no_effect(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    sentence: Callable[..., None],
) -> None:
    ran = lambda *_: print("the ranks run") or 0  # noqa: E731
    monkeypatch.setattr(launcher.processes, "run_processes", ran)
    assert main.find_verb(["train", "+recipe=smoke", "algorithm.loss_type=sapo"])() == 0
    before = capsys.readouterr().out.partition("the ranks run")[0]
    (note,) = [line for line in before.splitlines() if line.startswith("note: algorithm.")]
    sentence(note)


def test_a_sweep_checks_every_job_and_ends_with_the_first_bad_code(rloo: Rloo) -> None:
    words = ["train", "-m", "+recipe=smoke", "algorithm.beta=0.0,abc,0.1", "--dry-run"]
    ended = rloo(*words)
    assert ended.code == 2 and ended.out.endswith("3 jobs, 1 failed\n")
    assert ended.out.count("run        runs/smoke-") == 2
    assert ended.err.count("error: ") == 1 and "algorithm.beta=abc" in ended.err
    assert rloo.left() == []
