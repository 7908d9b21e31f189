"""Which of vLLM's model runners an engine uses, and when the second is asked for."""

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.generation.vllm import arguments, model_runner
from rloo_cli.generation.vllm.model_runner import RUNNER_VARIABLE

ASKED = {RUNNER_VARIABLE: "1"}
EXTRA = "+generation.colocate.extra."


@pytest.fixture(autouse=True)
def machine_with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "has_triton", lambda on_gpu: True)
    monkeypatch.setattr(metadata, "entry_points", lambda group: ())
    monkeypatch.delenv(RUNNER_VARIABLE, raising=False)


def sections_of(folder: Path, architecture: str, *words: str, **values: Any) -> tuple[Any, Any]:
    """The sections model and generation of a run with a model of this architecture."""
    facts = {"architectures": [architecture], "max_position_embeddings": 512} | values
    (folder / "config.json").write_text(json.dumps(facts))
    (folder / "tokenizer.json").touch()
    named = ["+recipe=smoke", "generation=vllm_colocate", f"model.path={folder}", *words]
    run = check.check_config(compose_config(named))
    return run.model, run.generation


@pytest.mark.parametrize("name", ["Qwen2ForCausalLM", "LlamaForCausalLM", "GPTNeoXForCausalLM"])
def test_an_older_vllm_on_a_gpu_is_asked_for_runner_v2(tmp_path: Path, name: str) -> None:
    given = sections_of(tmp_path, name)
    assert model_runner.runner_environment(*given, "0.22.1", True, {}) == ASKED
    assert model_runner.runner_environment(*given, "0.22.1", False, {}) == {}
    assert model_runner.runner_environment(*given, "0.32.0", True, {}) == {}


@pytest.mark.parametrize(
    ("name", "words", "values"),
    [
        ("MambaForCausalLM", (), {}),
        ("Gemma3ForConditionalGeneration", (), {}),
        ("Qwen2ForCausalLM", ("generation.colocate.quantization=fp8",), {}),
        ("Qwen2ForCausalLM", (), {"quantization_config": {"quant_method": "awq"}}),
        ("Qwen2ForCausalLM", ("generation.colocate.model_impl=transformers",), {}),
        ("Qwen2ForCausalLM", (EXTRA + "speculative_config={method:ngram}",), {}),
        ("Qwen2ForCausalLM", (EXTRA + "compilation_config={mode:1}",), {}),
        ("Qwen2ForCausalLM", (EXTRA + "compilation_config=3",), {}),
    ],
    ids=str,
)
def test_what_runner_v2_may_not_take_is_left_to_vllm(
    tmp_path: Path, name: str, words: tuple[str, ...], values: dict[str, Any]
) -> None:
    given = sections_of(tmp_path, name, *words, **values)
    assert model_runner.runner_environment(*given, "0.22.1", True, {}) == {}


@pytest.mark.parametrize("words", [EXTRA + "compilation_config={mode:0}", EXTRA + "max-logprobs=3"])
def test_harmless_arguments_do_not_keep_runner_v2_away(tmp_path: Path, words: str) -> None:
    given = sections_of(tmp_path, "Qwen2ForCausalLM", words)
    assert model_runner.runner_environment(*given, "0.22.1", True, {}) == ASKED


def test_a_machines_packages_may_keep_runner_v2_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = sections_of(tmp_path, "Qwen2ForCausalLM")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [group])
    assert model_runner.runner_environment(*given, "0.22.1", True, {}) == {}
    monkeypatch.setattr(metadata, "entry_points", lambda group: ())
    monkeypatch.setattr(model_runner, "has_triton", lambda on_gpu: False)
    assert model_runner.runner_environment(*given, "0.22.1", True, {}) == {}


def test_what_the_user_has_set_stays(tmp_path: Path) -> None:
    given = sections_of(tmp_path, "Qwen2ForCausalLM")
    for value in ("0", "1"):
        own = {RUNNER_VARIABLE: value}
        assert model_runner.runner_environment(*given, "0.22.1", True, own) == {}


def test_an_engine_is_started_with_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = sections_of(tmp_path, "LlamaForCausalLM")
    monkeypatch.setattr(arguments, "visible_gpus", lambda: ["0"])
    for version, wanted in (("0.22.1", "1"), ("0.32.0", None)):
        monkeypatch.setattr(arguments, "installed_vllm_version", lambda version=version: version)
        assert arguments.engine_environment(*given).get(RUNNER_VARIABLE) == wanted
