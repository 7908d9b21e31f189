"""`rloo train --dry-run` opens the data's first rows, and holds rewards and images against them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rloo_cli.cli import plan
from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.inspection.environment import experiment_data
from rloo_cli.inspection.environment.check_lines import CheckLines
from rloo_cli.utils.errors import RunError

ROWS = [{"question": f"{n} + {n}?", "answer": str(2 * n)} for n in range(40)]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return "data.path=rows.jsonl"


def dry(*words: str) -> int:
    return plan.dry_run(compose_config(["+recipe=smoke", "data=default", *words]))


def refusal(*words: str) -> tuple[int, str]:
    """The exit code, and the key."""
    with pytest.raises(RunError) as error:
        dry(*words)
    return error.value.code, error.value.problems[0].where


def test_a_column_that_the_data_lacks_is_said(data: str) -> None:
    code, where = refusal(data, "data.prompt_column=prompt")
    assert code == 4 and where.startswith("data.prompt_column")
    assert dry(data, "data.prompt_column=question") == 0


def test_a_column_that_a_reward_lacks_is_said(data: str) -> None:
    words = [data, "data.prompt_column=question", "reward=exact_match"]
    code, where = refusal(*words, "reward.exact_match.column=solution")
    assert code == 4 and where.startswith("reward.exact_match")
    assert dry(*words, "reward.exact_match.column=answer") == 0


def test_a_held_out_set_is_opened_too(data: str) -> None:
    words = [data, "data.prompt_column=question"]
    code, where = refusal(*words, "+eval.sets.other={path: rows.jsonl, prompt_column: prompt}")
    assert code == 4 and "eval.sets.other" in where


def test_the_signature_of_a_reward_of_ones_own_is_read(
    data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.py").write_text("print('loud')\ndef score(completions, gold): return [1.0]\n")
    words = [data, "data.prompt_column=question", "reward=function"]
    code, where = refusal(*words, "reward.function.path=mine.py:score")
    assert code == 4 and where.startswith("reward.function")
    assert "loud" not in capsys.readouterr().out
    assert dry(*words, "reward.function.path=mine.py:score", "data.columns={answer: gold}") == 0


def test_of_a_large_file_the_first_rows_are_read(
    data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment_data, "QUICK_FILE_BYTES", 1)
    with Path("rows.jsonl").open("a") as file:
        file.write("not JSON\n")
    assert dry(data, "data.prompt_column=question", "data.split='train[:50%]'") == 0


def test_data_that_is_only_on_a_hub_is_said_not_to_have_been_looked_at(
    data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry("data.path=nobody/nothing-of-this-name", "reward=exact_match") == 0
    said = capsys.readouterr().out.splitlines()
    assert any(line.startswith("data ") and "not checked" in line for line in said)


@pytest.mark.parametrize(
    ("words", "code", "key"),
    [
        (["algorithm=ppo", "algorithm.num_generations=2"], 2, "algorithm"),
        (["model.path=make:tiny"], 4, "model.path"),
        (["agent=proxy", "agent.command=sh"], 2, "agent"),
    ],
    ids=["a value model", "a model of text", "an agent that is sent texts"],
)
def test_what_images_rule_out_is_said_by_a_dry_run(words: list[str], code: int, key: str) -> None:
    composed = compose_config(["+recipe=vision_mini", *words])
    with pytest.raises(RunError) as error:
        plan.dry_run(composed)
    assert (error.value.code, error.value.problems[0].where) == (code, key)


def test_doctor_says_what_images_rule_out() -> None:
    words = ["+recipe=vision_mini", "algorithm=ppo", "algorithm.num_generations=2"]
    lines = CheckLines()
    experiment_data.check_data_rows(lines, check.check_config(compose_config(words)))
    assert [line.name for line in lines.lines if line.status == "fail"] == ["images"]


@pytest.mark.parametrize("engine", ["zero2", "zero3", "fsdp2"])
def test_images_over_shards_are_no_reason_to_refuse_a_run(engine: str) -> None:
    spread = [f"distributed={engine}", "distributed.num_processes=2"]
    assert plan.dry_run(compose_config(["+recipe=vision_mini", *spread])) == 0


@pytest.mark.process
def test_a_dry_run_that_opens_rows_imports_no_torch(data: str) -> None:
    code = (
        "import sys; from rloo_cli.cli import main; sys.argv = ['rloo', *sys.argv[1:]]\n"
        "try: main.main()\n"
        "except SystemExit as end: sys.exit(end.code or 100 * ('torch' in sys.modules))"
    )
    words = ["train", "+recipe=smoke", "--dry-run"]
    ended = subprocess.run([sys.executable, "-P", "-c", code, *words], capture_output=True)
    assert ended.returncode == 0, ended.stderr
