"""Parameters counted from config.json, and what autograd keeps of a row, against torch's own."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from assert_refused import assert_refused
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rloo_cli.config import hf_cache, synthetic
from rloo_cli.data.packing import whole_group_slices
from rloo_cli.planning import meta_model, model_spec
from rloo_cli.policy import layouts
from rloo_cli.policy.model import Policy
from rloo_cli.utils.errors import ConfigError, MachineError

COMMON = {
    "vocab_size": 320, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3,
    "num_attention_heads": 6, "max_position_embeddings": 512,
}  # fmt: skip
TWO = {"num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **COMMON, **TWO},
    "llama with biases": {"model_type": "llama", **COMMON, **TWO, "attention_bias": True,
                          "mlp_bias": True},
    "llama, wide heads, tied": {"model_type": "llama", **COMMON, **TWO, "head_dim": 32,
                                "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", **COMMON, **TWO},
    "qwen2": {"model_type": "qwen2", **COMMON, **TWO},
    "qwen3": {"model_type": "qwen3", **COMMON, **TWO, "head_dim": 16},
    "gemma": {"model_type": "gemma", **COMMON, **TWO, "head_dim": 16},
    "gemma2": {"model_type": "gemma2", **COMMON, **TWO, "head_dim": 16},
    "phi3": {"model_type": "phi3", **COMMON, **TWO, "pad_token_id": 0},
    "olmo2": {"model_type": "olmo2", **COMMON, **TWO},
    "smollm3": {"model_type": "smollm3", **COMMON, **TWO, "pad_token_id": 0},
    "granite": {"model_type": "granite", **COMMON, **TWO},
    "mixtral": {"model_type": "mixtral", **COMMON, **TWO, "num_local_experts": 4,
                "num_experts_per_tok": 2},
    "qwen3_moe": {"model_type": "qwen3_moe", **COMMON, **TWO, "head_dim": 16, "num_experts": 4,
                  "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "qwen2_moe": {"model_type": "qwen2_moe", **COMMON, **TWO, "num_experts": 4,
                  "num_experts_per_tok": 2, "moe_intermediate_size": 48,
                  "shared_expert_intermediate_size": 80},
    "gpt_neox": {"model_type": "gpt_neox", **COMMON},
    "gpt2": {"model_type": "gpt2", "vocab_size": 320, "n_embd": 96, "n_layer": 3, "n_head": 6,
             "n_positions": 512},
}  # fmt: skip
KEPT = ("llama", "qwen2", "qwen3", "gpt_neox", "gpt2", "mixtral", "gemma", "phi3", "olmo2")


def build(values: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    config = AutoConfig.for_model(**values)
    with torch.device("meta" if dtype is torch.float32 else "cpu"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def written(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """config.json as transformers saves it, which leaves defaults out."""
    AutoConfig.for_model(**values).save_pretrained(folder)
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_are_those_that_torch_counts(name: str, tmp_path: Path) -> None:
    counted = sum(p.numel() for p in build(FAMILIES[name]).parameters())
    for values in (FAMILIES[name], written(FAMILIES[name], tmp_path)):
        found = model_spec.parse_model_spec(values, name, "here")
        assert found.total_params == counted and not found.guessed
        assert found.body_params >= 3 * found.layer_params


@pytest.mark.slow_but(
    "llama-fp32", "qwen2-bf16", "gpt_neox-bf16", "mixtral-fp32", "phi3-fp32", "olmo2-bf16"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", KEPT)
def test_what_a_layer_keeps_of_a_row_is_what_autograd_saves(name: str, dtype: torch.dtype) -> None:
    held = [_saved(FAMILIES[name] | {_depth(name): n}, dtype) for n in (3, 4)]
    found = model_spec.parse_model_spec(FAMILIES[name], name, "here").saved_bytes(dtype.itemsize)
    assert found == pytest.approx(held[1] - held[0], rel=0.02)


def _depth(name: str) -> str:
    return "n_layer" if name == "gpt2" else "num_hidden_layers"


def _saved(values: dict[str, Any], dtype: torch.dtype) -> float:
    """Bytes a row that a training forward leaves for its backward pass, weights not counted."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values), dtype=dtype).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    policy = Policy(model, 1.0)
    layouts.choose_policy_layout(policy, "auto", 64)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    groups = layouts.probe_groups(policy)
    micro = policy.pack(groups, whole_group_slices(groups, range(len(groups))))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        policy.logprob_module(micro, [1.0], False)
    return sum(held.values()) / micro.input_ids.numel()


# Where facts come from.


FETCHED = {"smollm2", "smollm2_shallow"}  # compared in tests/data/test_smollm2.py
MADE = {path.removeprefix("make:") for path in model_spec.known_models() if "make:" in path}


@pytest.mark.parametrize("name", sorted(MADE - FETCHED))
def test_made_models_are_what_the_plan_takes_them_for(name: str) -> None:
    from rloo_cli.data.synthetic import addition, tiny, tldr, tool_model, vision_model

    shape, tokens = {
        "tiny": (tiny.SHAPE, tiny.tiny_tokenizer),
        "addition": (addition.SHAPE, addition.addition_tokenizer),
        "tldr": (tldr.SHAPE, tldr.tldr_tokenizer),
        "products": (
            tool_model.SHAPE,
            lambda: tool_model.tool_tokenizer(tool_model.PRODUCT_WORDS),
        ),
        "game": (tool_model.GAME_SHAPE, lambda: tool_model.tool_tokenizer(tool_model.GAME_WORDS)),
        "vision": (vision_model.TEXT_SHAPE, vision_model.picture_tokenizer),
    }[name.partition("_")[0]]
    values = model_spec.model_config_values(f"make:{name}")
    own = values.get("text_config", values)
    if name == "addition_shallow":  # the same with half of its layers
        shape = shape | {"num_hidden_layers": 2}
    assert shape | own == shape | own | {k: v for k, v in shape.items() if k in own}
    assert own["vocab_size"] == len(tokens()) and name in synthetic.SYNTHETIC_MODELS


def test_a_folder_comes_before_what_is_built_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    name = "Qwen/Qwen2.5-72B"
    assert model_spec.load_model_spec(name).source == "built in"
    snapshot = tmp_path / "hub" / "models--Qwen--Qwen2.5-72B" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_text(json.dumps(FAMILIES["qwen2"]))
    assert hf_cache.is_in_hub_cache(name, None, "model")
    found = model_spec.load_model_spec(name)
    assert "cache" in found.source and found.total_params < 1e6
    written(FAMILIES["llama"], tmp_path / "mine")
    assert (
        model_spec.load_model_spec(str(tmp_path / "mine")).source
        == f"config.json in {tmp_path / 'mine'}"
    )


def test_a_model_nobody_knows_is_refused_with_the_command_that_fetches_it() -> None:
    with pytest.raises(MachineError) as refused:
        model_spec.load_model_spec("some/model", None, "reward.rm.path")
    assert_refused(refused, 3, "some/model", where="reward.rm.path", fix="rloo fetch")


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "t5"},
        {"model_type": "brand_new", "hidden_size": 64},
        FAMILIES["llama"] | {"hidden_size": "wide"},
    ],
    ids=["encoder and decoder", "a size is missing", "a size is a word"],
)
def test_a_model_that_cannot_be_built_is_refused(values: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError) as refused:
        model_spec.load_model_spec(str(tmp_path))
    assert_refused(refused, 2, where="model.path", fix="model.path=")


def test_a_model_is_measured_where_gradients_are_off() -> None:
    expected = meta_model.count_model(FAMILIES["qwen3"])
    with torch.no_grad():
        assert meta_model.count_model(FAMILIES["qwen3"]) == expected


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stderr", [_Terminal(), io.StringIO()], ids=["terminal", "file"])
def test_a_terminal_is_told_that_torch_is_loaded(
    stderr: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_spec, "sys", SimpleNamespace(modules={}, stderr=stderr))
    model_spec.parse_model_spec(FAMILIES["llama"], "org/model", "here")
    assert ("org/model" in stderr.getvalue()) is stderr.isatty()


def test_an_unknown_family_is_counted_from_the_heads_of_its_weights(tmp_path: Path) -> None:
    values = FAMILIES["llama"] | {"model_type": "brand_new"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    guess = model_spec.load_model_spec(str(tmp_path))
    assert (
        guess.guessed
        and guess.total_params
        == model_spec.parse_model_spec(FAMILIES["llama"], "", "").total_params
    )
    save_file({"a": torch.zeros(guess.total_params + 300)}, tmp_path / "model.safetensors")
    assert model_spec.load_model_spec(str(tmp_path)).total_params == guess.total_params + 300
