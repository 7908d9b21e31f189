"""Hydra merges the same choices of groups once in a process: what comes out is what Hydra says."""

from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from rloo_cli.config import compose
from rloo_cli.utils import paths

SETTINGS = (
    "algorithm.beta=0.3", "train={learning_rate: 1e-5}", "name=${root}/x", "eval.every=2",
    "reward.unique_chars.weight=2", "hydra.sweeper.max_batch_size=3",
)  # fmt: skip


def composed_by_hydra(words: list[str]) -> dict:
    """The same, by Hydra alone."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(paths.CONF), version_base="1.3"):
        return whole(hydra_compose("config", overrides=words, return_hydra_config=True))


def whole(cfg) -> dict:
    found = OmegaConf.to_container(cfg, resolve=False)
    hydra = found.pop("hydra")
    wanted = (
        hydra["runtime"]["choices"],
        hydra["overrides"]["task"],
        hydra["sweeper"]["max_batch_size"],
    )
    return {"hydra": wanted, **found}


@pytest.mark.parametrize(
    "words",
    [
        SETTINGS,
        ("algorithm=grpo", "seed=2"),
        ("+debug=cpu", "seed=2"),
        ("eval.every=2", "~eval.every"),
    ],
    ids=["values", "a group", "debug", "a deleted key"],
)
def test_a_config_is_composed_as_hydra_alone_composes_it(words) -> None:
    rewritten = compose.rewrite_overrides(["+recipe=smoke", *words])
    for _ in range(2):  # the second one takes what the first one has kept
        cfg = compose.compose_by_hydra(rewritten)
        assert whole(compose.compose_by_hydra(rewritten)) == composed_by_hydra(rewritten)
        cfg.model.path = "changed by the caller"


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    for steps in (2, 33):
        mine.write_text(f"defaults: [smoke]\nmax_steps: {steps}\n")
        assert compose.compose_config([f"+recipe={mine}"]).values["max_steps"] == steps


def test_a_recipe_file_of_a_folder_that_was_left_is_not_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("defaults: [smoke]\nmax_steps: 7\n")
    assert compose.compose_config(["+recipe=mine.yaml"]).values["max_steps"] == 7
    monkeypatch.chdir("/")
    assert compose.compose_config(["+recipe=smoke", "max_steps=5"]).values["max_steps"] == 5


def test_a_file_of_a_config_dir_that_changes_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for name in ("b", "long"):
        text = f"defaults: [tiny, _self_]\ntokenizer: {name}\n"
        (tmp_path / "model" / "mine.yaml").write_text(text)
        words = ["+recipe=smoke", "model=mine"]
        assert compose.compose_config(words, [tmp_path]).values["model"]["tokenizer"] == name
