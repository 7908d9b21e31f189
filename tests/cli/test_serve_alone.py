"""`rloo vllm-serve model.path=NAME`: a server without a recipe."""

from pathlib import Path

import pytest
from assert_refused import assert_refused

from rloo_cli.cli import vllm_serve
from rloo_cli.config.compose import compose_config
from rloo_cli.generation.vllm.server_file import ServerRecord
from rloo_cli.utils.errors import ConfigError


@pytest.fixture
def served(monkeypatch, tmp_path):
    """What would be served: the settings, the config, and whether there is a recipe."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(vllm_serve.preflight, "check_server_machine", lambda settings: None)
    found = []
    monkeypatch.setattr(vllm_serve, "_serve", lambda *given: found.append(given) or 0)
    return found


def test_a_model_is_served_without_a_recipe(served):
    assert vllm_serve.run(["model.path=org/a-model", "generation.server.port=8001"]) == 0
    [(settings, _, _, is_alone)] = served
    assert is_alone
    assert settings.model.path == "org/a-model"
    assert settings.name == "serve-org-a-model"
    assert settings.generation.server.port == 8001


def test_words_that_are_said_stay_and_a_recipe_needs_none(served):
    words = ["model=tiny", "name=mine", "max_steps=3", "generation=vllm_server"]
    vllm_serve.run(words)
    vllm_serve.run(["+recipe=smoke", "generation=vllm_server"])
    (alone, *_, first), (of_recipe, *_, second) = served
    assert (alone.name, alone.max_steps, first) == ("mine", 3, True)
    assert (of_recipe.name, second) == ("smoke", False)


def test_a_server_without_a_model_is_asked_which(served):
    with pytest.raises(ConfigError) as refused:
        vllm_serve.run(["name=mine"])
    assert_refused(refused, key="model", fix="model.path=")
    assert not served


def test_it_says_how_any_run_finds_it():
    names = ServerRecord.__dataclass_fields__
    server = ServerRecord(**dict.fromkeys(names, "x") | {"url": "http://h:1"})
    words = ["model.path=org/m", "data.path=make:tiny", "reward=length_chars", "max_steps=1"]
    text = vllm_serve._server_text(server, Path("runs/s"), compose_config(words), is_alone=True)
    assert "model.path=org/m generation.server.base_url=http://h:1" in text
    assert "RLOO_SERVER_TOKEN" in text
