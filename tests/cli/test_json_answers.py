"""`--json` of verbs that do something: stdout is one JSON value, what is for people on stderr."""

import json
from pathlib import Path
from typing import Any

import pytest
from cli_cases import Ended, Rloo

from rloo_cli.cli import main
from rloo_cli.cli.answers import json_answer

pytestmark = pytest.mark.wide

SHORT = ("+recipe=smoke", "train.prompts_per_step=2", "algorithm.num_generations=2")


def answer(ended: Ended, code: int = 0) -> Any:
    """What stdout has, whole, as JSON."""
    assert ended.code == code, ended.said
    return json.loads(ended.out)


def test_train_and_eval_and_sft_say_what_came_of_it(rloo: Rloo) -> None:
    ended = rloo("train", *SHORT, "--json")
    got = answer(ended)
    assert got["code"] == 0 and "finished" not in ended.out.splitlines()[0]
    (run,) = got["runs"]
    assert (run["run"], run["state"], run["step"]) == ("runs/smoke", "finished", 2)
    assert run["summary"]["updates"] == 2 and "step 1" in ended.err
    got = answer(rloo("eval", "smoke", "eval.max_samples=2", "--json"))
    assert "eval_reward" in json.dumps(got["metrics"]) and Path(got["results"]).name
    again = answer(rloo("train", *SHORT, "--json", "resume=auto"))
    assert again["runs"][0]["state"] == "finished"
    got = answer(rloo("sft", "+recipe=tldr_mini", "+debug=cpu", "--json"))
    assert Path(rloo.folder, got["model"], "config.json").is_file() and "after" in got["summary"]


def test_a_dry_run_says_its_plan_and_config(rloo: Rloo) -> None:
    ended = rloo("train", "+recipe=smoke", "--dry-run", "--json")
    (run,) = answer(ended)["runs"]
    assert run["config"]["max_steps"] == 2 and run["plan"] and not rloo.left()


def test_a_refusal_is_told_on_stderr_and_its_code_on_stdout(rloo: Rloo) -> None:
    ended = rloo("train", "+recipe=smoke", "max_step=3", "--json", "--errors=json")
    assert answer(ended, code=2) == {"code": 2, "runs": []}
    assert json.loads(ended.err)[0]["code"] == 2


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("recipes", "--json"), "quickstart"),
        (("recipes", "show", "smoke", "--json"), "text"),
        (("recipes", "copy", "smoke", "my.yaml", "--json"), "copied"),
        (("config", "explain", "algorithm.beta", "+recipe=smoke", "--json"), "value"),
        (("config", "--json"), "properties"),
        (("completion", "bash", "--json"), "script"),
        (("slurm", "render", "+recipe=smoke", "--json"), "script"),
        (("fetch", "+recipe=smoke", "--json"), "fetched"),
        (("plan", "+recipe=smoke", "--gpu", "80GiB", "--json"), "memory"),
        (("sweep", "+recipe=smoke", "seed=1,2", "--dry-run", "--json"), "members"),
        (("migrate", "--json", "--from", "rloo", "python", "x.py", "--rloo_k", "2"), "recipe"),
    ],
)
def test_a_verb_answers_in_json(
    words: tuple[str, ...],
    part: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.find_verb([*words])() == 0
    got = json.loads(capfd.readouterr().out)
    assert part in json.dumps(got)


def test_what_is_printed_before_an_answer_is_on_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    import subprocess

    with json_answer(True) as values:
        print("for people")
        subprocess.run(["echo", "of a process"], check=True)
        values["x"] = 1
    got = capfd.readouterr()
    assert json.loads(got.out) == {"x": 1}
    assert "for people" in got.err and "of a process" in got.err
    with json_answer(False) as values:
        print("plain")
    assert capfd.readouterr().out == "plain\n"
