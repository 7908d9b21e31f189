"""Runs that earlier versions wrote: `config/VERSION/` holds them as they were left.

A key that came later (`key(..., since=, before=)`) must not stop an older run: its config is read,
it keeps its name and hash, goes on from its checkpoint, and is evaluated.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from cli_cases import Rloo
from fork_cases import Forked

from rloo_cli.config import check, messages
from rloo_cli.config.compose import compose_config

pytestmark = pytest.mark.wide

OLDER = Path(__file__).parent
RECIPES: dict[str, Any] = json.loads((OLDER / "0.1" / "recipes.json").read_text())
# The folder of a run, and the words it was started with.
STOPPED = ["+recipe=smoke", "name=stopped", "max_steps=4", "logging.console=plain"]
STOPPED += ["train.lr_scheduler=constant"]
MIXTURE = ["+recipe=smoke", "name=null", "max_steps=2", "algorithm=grpo", "data.path=null"]
MIXTURE += ["data.eval_split=null", "eval.max_samples=4"]
MIXTURE += ['eval.sets={more: {path: "make:tiny", split: test, max_samples: 4}}']
MIXTURE += ['data.mixture={a: {path: "make:tiny", weight: 2}, b: {path: "make:tiny", weight: 1}}']
# The data's fingerprint is another since then, and with it the order of the prompts.
OTHER_ORDER = "resume_allow_changes=true"


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """The root of the runs of version 0.1, each in a folder of its own name."""
    for folder in (OLDER / "0.1").iterdir():
        if folder.is_dir():
            name = json.loads((folder / "run.json").read_text())["name"]
            shutil.copytree(folder, tmp_path / "runs" / name)
    return tmp_path / "runs"


@pytest.mark.parametrize("words", RECIPES)
def test_a_recipe_keeps_the_name_and_hash_it_had(words: str, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "mine.py").write_text("def score(completions):\n    return []\n")
    monkeypatch.chdir(tmp_path)
    run = check.check_config(compose_config(words.split()))
    assert {"name": run.name, "hash": check.config_hash(run)} == RECIPES[words]


def test_the_config_of_an_older_run_is_read(older: Path) -> None:
    for folder in older.iterdir():
        run = check.read_config(folder / "config.yaml")
        assert check.config_hash(run) == json.loads((folder / "run.json").read_text())["hash"]


def test_every_newer_key_says_what_means_as_before() -> None:
    run = check.check_config(compose_config(STOPPED))
    written = check.first_version_values(check.dump_config(run))
    older = json.loads((OLDER / "0.1" / "keys.json").read_text())
    assert sorted(k for k, _ in messages.walk_values(written)) == older


def test_a_stopped_run_goes_on(older: Path, forked: Forked) -> None:
    assert forked("train", *STOPPED, "resume=auto", OTHER_ORDER) == 0, forked.said()
    rows = (older / "stopped" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(r)["step"] for r in rows if "step_time" in r] == [1, 2, 3, 4]
    assert json.loads((older / "stopped" / "run.json").read_text())["changes"] == []


def test_a_run_of_several_sections_is_found_by_its_words_and_goes_on(
    older: Path, forked: Forked
) -> None:
    before = sorted(p.name for p in older.iterdir())
    assert forked("train", *MIXTURE, "resume=auto", OTHER_ORDER) == 0, forked.said()
    assert sorted(p.name for p in older.iterdir()) == before


def test_a_finished_run_has_nothing_left_to_do(older: Path, rloo: Rloo) -> None:
    ended = rloo("train", "+recipe=smoke", "name=null")
    assert ended.code == 0 and "nothing to do" in ended.out, ended.said


def test_an_older_run_is_evaluated(older: Path, forked: Forked, rloo: Rloo) -> None:
    ended = rloo("eval", "runs/stopped", "data.eval_split=test", "eval.max_samples=4")
    assert ended.code == 0, ended.said
