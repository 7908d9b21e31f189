"""A path that begins with ~ is the user's home folder, in every key that may name a path."""

from pathlib import Path
from typing import Any

import pytest
from cli_cases import Rloo

from rloo_cli.config.check import build_run_config, merge_defaults
from rloo_cli.config.compose import compose_config

KEYS = {
    "root": "root=~/mine",
    "slurm.output": "slurm.output=~/mine",
    "model.path": "model.path=~/mine",
    "model.ref_path": "model.ref_path=~/mine",
    "model.tokenizer": "model.tokenizer=~/mine",
    "model.chat_template": "model.chat_template=~/mine",
    "data.path": "data.path=~/mine",
    "data.map": "data.map=~/mine",
    "data.filter": "data.filter=~/mine",
    "sft.path": "sft.path=~/mine",
    "reward_model.data.path": "reward_model.data.path=~/mine",
    "train.optimizer": "train.optimizer=~/mine",
    "train.lr_scheduler": "train.lr_scheduler=~/mine",
    "logging.events": "logging.events=['~/mine']",
    "reward.function.path": "reward=function reward.function.path=~/mine",
    "reward.model.path": "reward=model reward.model.path=~/mine",
    "resume": "resume=~/mine",
}


def value_at(run: Any, key: str) -> object:
    """The value of a dotted key; the only entry of a list."""
    for part in key.split("."):
        run = run[part] if isinstance(run, dict) else getattr(run, part)
    return run[0] if isinstance(run, list) else run


@pytest.mark.parametrize("key", KEYS)
def test_a_tilde_is_the_home_folder(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    composed = compose_config(["+recipe=smoke", *KEYS[key].split()])
    run = build_run_config(merge_defaults(composed.values, composed.sources))
    assert value_at(run, key) == "/home/somebody/mine"


def test_a_run_and_a_reward_of_the_home_folder_make_no_folder_named_tilde(rloo: Rloo) -> None:
    home = rloo.folder / "home"
    home.mkdir()
    (home / "mine.py").write_text("def f(completions, **k): return [1.0] * len(completions)")
    settings = ("reward=function", "reward.function.path=~/mine.py:f", "root=~/runs")
    ended = rloo("train", "+recipe=smoke", *settings, "max_steps=1", HOME=str(home))
    assert ended.code == 0, ended.said
    assert (home / "runs").is_dir() and not Path(rloo.folder, "~").exists()
