"""The tests compose configs faster than Hydra does alone: the same configs, and the same errors."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import quick_compose

from rloo_cli.config.compose import compose_config
from rloo_cli.utils import paths
from rloo_cli.utils.errors import ConfigError

WORDS = (
    [],
    ["max_steps=3", "generation=vllm_server", "reward=[length_tokens]"],
    ["distributed=fsdp2", "lora=default", "algorithm=grpo", "algorithm.beta=0.1"],
    ["algorithm/dialect=verl", "+debug=cpu"],
    ["reward=[]", "nothing.of=this"],
    ["generation=none_such"],
    ["max_steps=${algorithm.nothing}"],
    ["data.path=[1,2"],
)


@pytest.fixture(autouse=True)
def _quick_afterwards() -> Iterator[None]:
    yield
    quick_compose.install()


def composed(*words: str) -> Any:
    """The config and what is known of it; or the error."""
    try:
        found = compose_config([*words])
        return {name: value for name, value in vars(found).items() if name != "sources"} | {
            "where": {key: found.sources.location_of(key) for key in found.values}
        }
    except ConfigError as error:
        return str(error)


def both(ask: Callable[[], Any]) -> tuple[Any, Any]:
    """The answer of Hydra alone, and the answer for the second time in our way."""
    quick_compose.remove()
    plain = ask()
    quick_compose.install()
    ask()
    return plain, ask()


@pytest.mark.parametrize("recipe", sorted(paths.recipe_files()))
def test_every_recipe_is_composed_as_hydra_does_it(recipe: str) -> None:
    plain, quick = both(lambda: composed(f"+recipe={recipe}"))
    assert plain == quick


@pytest.mark.parametrize("words", WORDS, ids=range(len(WORDS)))
def test_choices_values_and_errors_are_as_hydra_s(words: list[str]) -> None:
    plain, quick = both(lambda: composed("+recipe=smoke", *words))
    assert plain == quick


def test_a_config_that_is_changed_leaves_the_next_one_alone() -> None:
    first = compose_config(["+recipe=smoke"])
    first.values["algorithm"]["num_generations"] = 77
    assert compose_config(["+recipe=smoke"]).values["algorithm"]["num_generations"] != 77


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    mine = tmp_path / "recipe" / "mine.yaml"
    mine.parent.mkdir()
    for steps in (3, 14):
        mine.write_text(f"# @package _global_\nmax_steps: {steps}\n")
        found = compose_config(["+recipe=mine"], [tmp_path])
        assert found.values["max_steps"] == steps
    group = tmp_path / "data" / "own.yaml"
    group.parent.mkdir()
    for path in ("a", "bc"):
        group.write_text(f"defaults: [default]\npath: {path}\n")
        found = compose_config(["+recipe=smoke", "data=own"], [tmp_path])
        assert found.values["data"]["path"] == path
