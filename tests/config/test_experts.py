"""Mixtures of experts: refused with the reason, or allowed with a loud line."""

import json
from pathlib import Path

import pytest

from rloo_cli.config import check, rules_model
from rloo_cli.config.compose import compose_config
from rloo_cli.utils.errors import ConfigError

DENSE = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 300}


def model_folder(folder: Path, **values: object) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(DENSE | values))
    (folder / "tokenizer.json").write_text("{}")
    return str(folder)


def checked(path: str, *words: str):
    return check.check_config(compose_config(["+recipe=smoke", f"model.path={path}", *words]))


@pytest.mark.parametrize("name", rules_model.EXPERT_COUNTS)
def test_a_mixture_of_experts_is_refused_before_anything_starts(tmp_path: Path, name: str) -> None:
    path = model_folder(tmp_path / "moe", **{name: 8})
    with pytest.raises(ConfigError, match="mixture of experts") as error:
        checked(path)
    (problem,) = error.value.problems
    assert problem.where.startswith("command line") and name in problem.what
    assert "router" in problem.why and "generation.allow_moe=true" in problem.fix


def test_a_mixture_that_is_allowed_is_told_of_loudly(tmp_path: Path) -> None:
    run = checked(model_folder(tmp_path / "moe", num_experts=8), "generation.allow_moe=true")
    (note,) = rules_model.model_file_notes(run.model, allow_moe=True)
    assert note.startswith("warning: ") and "not replayed" in note


def test_a_dense_model_needs_no_leave_and_has_no_note(tmp_path: Path) -> None:
    path = model_folder(tmp_path / "dense", num_experts=1)
    for words in ((), ("generation.allow_moe=true",)):
        run = checked(path, *words)
        assert rules_model.model_file_notes(run.model, run.generation.allow_moe) == []


def test_experts_of_a_models_text_part_are_counted(tmp_path: Path) -> None:
    path = model_folder(tmp_path / "moe", text_config={"num_local_experts": 2})
    with pytest.raises(ConfigError, match="num_local_experts"):
        checked(path)
