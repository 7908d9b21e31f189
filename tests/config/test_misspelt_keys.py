"""Misspelt keys: each is guessed, and none hides the others."""

from pathlib import Path

import pytest
import yaml
from assert_refused import assert_refused

from rloo_cli.config import check, messages, registry
from rloo_cli.config.compose import compose_config
from rloo_cli.config.schema import RunConfig
from rloo_cli.utils import paths
from rloo_cli.utils.errors import ConfigError

OWN_NAMES = ("reward.", "eval.sets.", "data.mixture.")  # below these a user names things
SLIPS = """
model:
  ptah: make:tiny
data:
  path: make:tiny
algoritm:
  beta: 0.1
train:
  learning_rat: 1.0
  prompts_per_step: many
max_steps: 1
defaults:
  - override /reward: [unique_chars]
"""


def test_a_misspelt_required_key_hides_no_other_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("slip.yaml").write_text(SLIPS)
    with pytest.raises(ConfigError) as error:
        check.check_config(compose_config(["+recipe=slip.yaml"]))
    problems = error.value.problems
    assert [p.what.split(" ")[0] for p in problems] == [
        "model.ptah", "algoritm", "train.learning_rat", "train.prompts_per_step",
    ]  # fmt: skip
    assert problems[0].fix == "model.path=make:tiny"
    assert [p.where.partition(":")[2] for p in problems] == ["3", "6", "9", "10"]


def test_a_key_without_a_value_hides_no_other_mistake() -> None:
    words = ["+recipe=smoke", "model.path=???", "++train.learning_rat=1.0"]
    with pytest.raises(ConfigError) as error:
        check.check_config(compose_config(words))
    assert len(error.value.problems) == 2
    for key in ("model.path", "train.learning_rat"):
        assert_refused(error, key=key)


def test_a_section_that_a_run_needs_is_not_chosen_away() -> None:
    with pytest.raises(ConfigError) as error:
        compose_config(["+recipe=smoke", "algorithm=null"])
    assert_refused(error, key="algorithm 'null' not found", where="command line: algorithm=null")


def keys_of_recipes() -> set[str]:
    """Every dotted key that a shipped recipe sets."""
    found = set()
    for path in paths.recipe_files().values():
        values = yaml.safe_load(path.read_text())
        values.pop("defaults", None)
        for key, value in messages.walk_values(values):
            plain = not key.startswith((*OWN_NAMES, "hydra")) and not isinstance(value, dict)
            if plain and not any(part.isdigit() for part in key.split(".")):
                found.add(key)
    return found


def slip(key: str) -> str:
    """The key with two neighbours of its last part exchanged, as fingers do it."""
    section, dot, leaf = key.rpartition(".")
    at = max(1, len(leaf) // 2)
    return f"{section}{dot}{leaf[: at - 1]}{leaf[at : at + 1]}{leaf[at - 1]}{leaf[at + 1 :]}"


def all_keys() -> dict[str, str]:
    """Every key of every algorithm, backend and agent, without composing one."""
    keys = messages.schema_keys(RunConfig)
    for kind, section in (("algorithms", "algorithm"), ("generation", "generation"),
                          ("agents", "agent")):  # fmt: skip
        for name in registry.registry_names(kind):
            own = messages.schema_keys(registry.config_class(kind, name))
            keys |= {f"{section}.{key}": meaning for key, meaning in own.items()}
    return keys


@pytest.mark.wide
def test_every_key_of_every_recipe_is_guessed_when_it_is_misspelt() -> None:
    keys, known, wrong = keys_of_recipes(), all_keys(), []
    for key in sorted(keys):
        misspelt = slip(key)
        short = len(key.rpartition(".")[2]) < 4  # too short to be like another
        if key not in known or misspelt in known or misspelt == key or short:
            continue
        problem = messages.unknown_key_problem(misspelt, known)
        if key not in problem.fix:
            wrong.append((key, problem.fix))
    assert len(keys) > 70 and len(keys - known.keys()) < len(keys) / 5
    assert not wrong


def test_a_recipe_that_replaces_the_rewards_of_its_base_is_rid_of_their_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """smoke sets reward.length_tokens.weight."""
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text("defaults: [smoke, override /reward: unique_chars]\n")
    assert [*check.check_config(compose_config(["+recipe=my.yaml"])).rewards] == ["unique_chars"]
    own = "reward: {lenght: {weight: 2}}\n"  # what it says itself is a mistake to be told
    Path("my.yaml").write_text(f"defaults: [smoke, override /reward: unique_chars]\n{own}")
    with pytest.raises(ConfigError, match=r"reward\.lenght"):
        check.check_config(compose_config(["+recipe=my.yaml"]))
