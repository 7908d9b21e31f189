"""User code may change the current folder: what a run reads and writes stays where it began."""

import json

import pytest
from cli_cases import Rloo

REWARD = """
import os, tempfile
def f(completions, **kwargs):
    os.chdir(tempfile.gettempdir())
    return [float(len(text)) for text in map(str, completions)]
"""
MAP = """
import os, tempfile
{at_import}
def f(row):
    os.chdir(tempfile.gettempdir())
    return row
"""


def test_a_reward_that_changes_the_folder_changes_no_path_of_a_training(rloo: Rloo) -> None:
    (rloo.folder / "code.py").write_text(REWARD)
    words = ("reward=function", "reward.function.path=code.py:f", "checkpoint.every=1")
    ended = rloo("train", "+recipe=smoke", "name=there", *words)
    assert ended.code == 0, ended.said
    run = rloo.folder / "runs" / "there"
    assert (run / "final" / "model.safetensors").is_file() and (run / "summary.json").is_file()


def test_a_reward_that_changes_the_folder_changes_no_path_of_an_evaluation(rloo: Rloo) -> None:
    (rloo.folder / "code.py").write_text(REWARD)
    words = ("reward=function", "reward.function.path=code.py:f", "data.eval_split=test")
    assert rloo("train", "+recipe=smoke", "name=there", *words).code == 0
    ended = rloo("eval", "runs/there")
    assert ended.code == 0, ended.said
    [written] = (rloo.folder / "runs" / "there").glob("eval/*/metrics.json")
    assert json.loads(written.read_text())


@pytest.mark.parametrize("at_import", ["", "os.chdir(tempfile.gettempdir())"])
@pytest.mark.parametrize("key", ["map", "filter"])
def test_a_map_or_a_filter_that_changes_the_folder_changes_no_path_of_an_sft(
    key: str, at_import: str, rloo: Rloo
) -> None:
    code = MAP.format(at_import=at_import)
    code = code if key == "map" else code.replace("return row", "return True")
    (rloo.folder / "code.py").write_text(code)
    ended = rloo("sft", "+recipe=smoke", "+debug=cpu", f"data.{key}=code.py:f", "name=there")
    assert ended.code == 0, ended.said
    assert list(rloo.folder.rglob("training/summary.json"))
