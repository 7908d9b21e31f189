"""What adapters, quantized weights and references that move rule out, before torch is there."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from assert_refused import assert_refused
from cli_cases import Rloo

from rloo_cli.config import check, rules_lora
from rloo_cli.config.compose import compose_config
from rloo_cli.launch import preflight
from rloo_cli.utils import paths
from rloo_cli.utils.errors import ConfigError, MachineError

SMOKE = ("+recipe=smoke",)
SERVER, COLOCATE = "generation=vllm_server", "generation=vllm_colocate"
# The key, or what the fix sets.
REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "dropout that is turned off": (
        ("lora=default", "model.lora.dropout=0.1"), "model.disable_dropout=false"),
    "biases of the reference": (("lora=default", "model.lora.bias=all"), "model.lora.bias"),
    "DoRA in vLLM": (("lora=dora", SERVER), "generation=transformers"),
    "whole layers in vLLM": (
        ("lora=default", COLOCATE, "model.lora.modules_to_save=[lm_head]"),
        "model.lora.modules_to_save=[]"),
    "biases in vLLM": (
        ("lora=default", SERVER, "model.lora.bias=all", "algorithm.beta=0"), "model.lora.bias"),
    "a rank that vLLM has no room for": (
        ("lora=default", SERVER, "model.lora.r=600"), "model.lora.r=512"),
    "a transfer of whole models": (
        ("lora=default", SERVER, "generation.server.transfer=nccl"),
        "generation.server.transfer=auto"),
    "few bits that would be trained": (("quantization=4bit",), "lora=default"),
    "few bits in vLLM": (("quantization=4bit", "lora=default", SERVER), "model.quantization=null"),
    "few bits that would be moved": (
        ("quantization=8bit", "lora=default", "model.ref_path=make:tiny",
         "model.ref_offload=true"), "model.ref_offload=false"),
    "a second model that is not there": (
        ("lora=default", "model.ref_offload=true"), "model.ref_offload"),
    "a model that follows an adapter": (
        ("lora=default", "model.ref_path=make:tiny", "model.ref_sync.every=1"),
        "model.ref_sync.every=0"),
    "no adapter": (("lora=default", "model.lora.path=./nothing"), "model.lora.path"),
}  # fmt: skip


@pytest.mark.parametrize(("words", "key"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_with_what_to_change(
    words: tuple[str, ...], key: str, sentence: Callable[..., None]
) -> None:
    with pytest.raises(ConfigError) as caught:
        check.check_config(compose_config([*SMOKE, *words]))
    problem = assert_refused(caught, key=key)
    assert len(caught.value.problems) == 1
    if ".yaml" not in problem.where:  # a line of conf/, which may move
        sentence(caught, folder=Path.cwd())


@pytest.mark.parametrize("words", [
    ("lora=default", "algorithm.beta=0", "model.ref_offload=true"), ("lora=default", SERVER),
    ("lora=dora", "model.ref_sync.every=5"), ("model.ref_sync.every=5", "model.ref_offload=true"),
    ("lora=default", "model.lora.dropout=0.1", "model.disable_dropout=false"),
    ("quantization=4bit", "lora=default"), ("lora=default", "+debug=cpu"),
    ("lora=default", "distributed=fsdp2"), ("lora=dora", "distributed=zero3"),
])  # fmt: skip
def test_what_can_be_is_taken(words: tuple[str, ...]) -> None:
    check.check_config(compose_config([*SMOKE, *words]))


def adapter(folder: Path, **changes: Any) -> str:
    """The config of an adapter that lora=default fits, with changes."""
    about = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "use_dora": False} | changes
    (folder / rules_lora.ADAPTER_CONFIG_FILE).write_text(json.dumps(about))
    return f"model.lora.path={folder}"


@pytest.mark.parametrize(("changes", "key"), [
    ({"r": 8}, "model.lora.r=8"), ({"lora_alpha": 16}, "model.lora.alpha=16"),
    ({"use_dora": True}, "model.lora.use_dora=true"),
    ({"use_rslora": True}, "model.lora.use_rslora=true"), ({"peft_type": "IA3"}, "IA3"),
])  # fmt: skip
def test_keys_that_are_not_the_adapters_are_refused(
    tmp_path: Path, changes: dict[str, Any], key: str
) -> None:
    check.check_config(compose_config([*SMOKE, "lora=default", adapter(tmp_path)]))
    with pytest.raises(ConfigError) as caught:
        check.check_config(compose_config([*SMOKE, "lora=default", adapter(tmp_path, **changes)]))
    assert_refused(caught, key=key)


def test_a_debug_run_does_not_take_the_adapter_of_another_model(tmp_path: Path) -> None:
    run = check.check_config(
        compose_config([*SMOKE, "lora=default", adapter(tmp_path), "+debug=cpu"])
    )
    assert run.model.lora is not None and run.model.lora.path is None


@pytest.mark.parametrize(("package", "words", "extra"), [
    ("peft", ("lora=default",), "peft"),
    ("bitsandbytes", ("lora=default", "quantization=4bit"), "quantization"),
])  # fmt: skip
def test_a_package_that_is_not_here_is_named_with_how_to_get_it(
    package: str, words: tuple[str, ...], extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        rules_lora, "find_spec", lambda name: None if name == package else found("os")
    )
    with pytest.raises(MachineError) as caught:
        preflight.check_machine(check.check_config(compose_config([*SMOKE, *words])))
    assert_refused(caught, 3, fix=f"pip install 'rloo-cli[{extra}]'")


@pytest.mark.parametrize("group", ["lora", "quantization"])
def test_a_choice_has_a_value_for_every_key(group: str) -> None:
    for choice in paths.group_choices([])[group]:
        more = ["lora=default"] if group == "quantization" else []
        run = check.check_config(compose_config([*SMOKE, f"{group}={choice}", *more]))
        assert getattr(run.model, group) is not None


@pytest.mark.parametrize(
    ("words", "key", "fix"),
    [
        ("sft lora=default quantization=4bit", "model.quantization", "model.quantization=null"),
        ("reward-model lora=default model.lora.path=ADAPTER", "model.lora.path", "=null"),
        (
            "sft lora=default distributed=zero3 distributed.num_processes=2",
            "distributed.engine",
            "distributed.engine=ddp",
        ),
    ],
)
def test_an_adapter_that_a_training_before_rloo_cannot_have_is_refused_without_torch(
    words: str, key: str, fix: str, tmp_path: Path, rloo_without_torch: Rloo
) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    made = {"peft_type": "LORA", "r": 16, "lora_alpha": 32.0}
    (adapter / "adapter_config.json").write_text(json.dumps(made))
    verb, *rest = words.replace("ADAPTER", str(adapter)).split()
    ended = rloo_without_torch(verb, "+recipe=smoke", *rest)
    assert_refused(ended, key=key, fix=fix)


def test_an_adapters_folder_as_the_model_is_named_with_its_base(tmp_path: Path) -> None:
    base = {"base_model_name_or_path": "ORG/BASE", "peft_type": "LORA"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(base))
    with pytest.raises(ConfigError) as refused:
        check.check_config(compose_config(["+recipe=smoke", f"model.path={tmp_path}"]))
    [problem] = refused.value.problems
    assert problem.fix == f"model.path=ORG/BASE lora=default model.lora.path={tmp_path}"
