"""A library that is missing or too old is named as such, not as a mistake of the config."""

from types import SimpleNamespace
from typing import Any

import pytest
from assert_refused import assert_refused
from lora_cases import keys
from policy_cases import fresh

from rloo_cli.policy import load, lora, reward_load
from rloo_cli.utils.errors import ConfigError, MachineError

TOO_OLD = "The version of PEFT you are using is not compatible, please use a version greater than 1"


@pytest.mark.parametrize("error", [ValueError(TOO_OLD), ImportError("peft>=0.20 is required")])
def test_a_peft_too_old_for_transformers_is_an_error_of_the_machine(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fresh("qwen3")

    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(type(model), "add_adapter", refuse)
    with pytest.raises(MachineError) as refused:
        lora.attach_adapter(model, keys(), seed=1)
    assert str(error) in refused.value.problems[0].why


def test_an_adapter_that_does_not_fit_stays_an_error_of_the_config(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = fresh("qwen3")

    def refuse(*_: object) -> None:
        raise ValueError("Target modules {'nothing'} not found in the base model")

    monkeypatch.setattr(type(model), "add_adapter", refuse)
    with pytest.raises(ConfigError):
        lora.attach_adapter(model, keys(), seed=1)


@pytest.mark.parametrize("kind", ["policy", "reward"])
def test_a_model_that_needs_a_package_names_the_package(kind: str, tmp_path: Any) -> None:
    error = ImportError("LlamaTokenizer requires the SentencePiece library", name="sentencepiece")

    def refuse(*_: object, **__: object) -> None:
        raise error

    config: Any = SimpleNamespace(revision=None, trust_remote_code=False, path=str(tmp_path))
    with pytest.raises(MachineError) as refused:
        if kind == "policy":
            load._load_pretrained(refuse, str(tmp_path), str(tmp_path), config)
        else:
            reward_load._load_pretrained_reward(
                refuse, str(tmp_path), "here", "reward.model", config
            )
    assert_refused(refused, 3, fix="pip install --upgrade sentencepiece")
