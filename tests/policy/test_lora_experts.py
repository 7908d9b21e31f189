"""Adapters of mixtures of experts: what `all-linear` reaches there, and that it can be saved."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from assert_refused import assert_refused
from loop_cases import make
from lora_cases import CPU, frozen, keys, move, same
from policy_cases import SIZE
from test_loading import config

from rloo_cli.checkpoint import export
from rloo_cli.data.synthetic import tiny
from rloo_cli.policy import load, lora, shared_attention
from rloo_cli.train.loop import run_training_loop
from rloo_cli.utils.errors import ConfigError

IDS = torch.arange(5, 25)[None]
T = transformers
HEADS = SIZE | {"num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
ROUTED = {
    "n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
FAMILIES = {
    "qwen3_moe": lambda: T.Qwen3MoeConfig(**HEADS, **EXPERTS),
    "glm4_moe": lambda: T.Glm4MoeConfig(**HEADS, **ROUTED),
    "deepseek_v3": lambda: T.DeepseekV3Config(
        **SIZE, **ROUTED, num_key_value_heads=4, q_lora_rank=8, kv_lora_rank=8,
        qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
    ),
    "qwen3_next": lambda: T.Qwen3NextConfig(
        **HEADS, **EXPERTS, shared_expert_intermediate_size=16, linear_num_key_heads=2,
        linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    ),
    "mixtral": lambda: T.MixtralConfig(
        **SIZE, num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1,
        sliding_window=None,
    ),
}  # fmt: skip


def mixture(family: str) -> Any:
    """A random model of this family."""
    torch.manual_seed(0)
    return T.AutoModelForCausalLM.from_config(FAMILIES[family]()).eval()


@torch.no_grad()
def says(model: Any) -> torch.Tensor:
    """What a model says of the ids, in eval mode. -> (1, T, V)"""
    return model.eval()(input_ids=IDS).logits.log_softmax(-1)


@pytest.mark.slow_but("qwen3_moe", "mixtral")
@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_of_a_mixture_of_experts_is_saved_merged_and_computes_the_same(
    family: str, tmp_path: Path
) -> None:
    model = mixture(family)
    base = says(model)
    lora.attach_adapter(model, keys(), seed=1)
    lora.check_mergeable(model)
    move(model)
    before, expected = frozen(model), says(model)
    assert (expected - base).abs().max() > 1e-2
    export.write_merged_model(model, tiny.tiny_tokenizer(), tmp_path)
    final = load.load_causal_lm(config(tmp_path), str(tmp_path), CPU)
    assert torch.allclose(says(final), expected, atol=2e-5)
    assert same(before, frozen(model))  # the live model stays as it was
    with lora.use_adapter(lora.adapter_layers(model), None):
        assert torch.equal(says(model), base)
    again = mixture(family)
    lora.attach_adapter(again, keys(), seed=2)
    lora.read_adapter_weights(again, tmp_path / "adapter")
    assert torch.equal(says(again), expected)


ALLOWED = "generation.allow_moe=true"


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a mixture of experts with the tokenizer of make:tiny."""
    folder = tmp_path_factory.mktemp("experts")
    sizes = SIZE | {"vocab_size": 258, "max_position_embeddings": 1024, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = T.AutoModelForCausalLM.from_config(T.Qwen3MoeConfig(**sizes, **EXPERTS, head_dim=8))
    model.save_pretrained(folder)
    tiny.tiny_tokenizer().save_pretrained(folder)
    return folder


def test_a_run_that_adapts_experts_ends_with_a_final_model_that_computes_the_same(
    experts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("lora=default", ALLOWED, f"model.path={experts}", "model.ref_sync.every=1",
             "max_steps=1", "train.learning_rate=0.01")  # fmt: skip
    run = make(tmp_path, *words, noise=0.0)
    assert "experts.down_proj, experts.gate_up_proj" in capsys.readouterr().out
    run_training_loop(run)
    with shared_attention.native_attention(run.policy.model):
        expected = says(run.policy.model)
    folder = export.save_final(run.policy.model, run.tokenizer, run.folder)
    final = load.load_causal_lm(config(folder), str(folder), CPU)
    assert torch.allclose(says(final), expected, atol=2e-5)
    plain = load.load_causal_lm(config(experts), str(experts), CPU)
    assert not torch.allclose(says(plain), expected, atol=1e-4)


def test_an_adapter_that_could_not_be_saved_is_refused_before_the_training(
    experts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sentence
) -> None:
    monkeypatch.setattr(lora, "_plain_layers", lambda model: iter(()))
    with pytest.raises(ConfigError) as caught:
        make(tmp_path, "lora=default", ALLOWED, f"model.path={experts}")
    assert_refused(caught, 2, fix="model.lora.target_modules=[k_proj,o_proj,q_proj,v_proj]")
    sentence(caught, folder=experts)


def test_adapted_experts_are_refused_for_vllm_with_the_layers_that_it_takes(
    experts: Path, tmp_path: Path, sentence
) -> None:
    with pytest.raises(ConfigError) as caught:
        make(tmp_path, "lora=default", ALLOWED, f"model.path={experts}", "generation=vllm_server",
             "generation.server.base_url=http://127.0.0.1:9")  # fmt: skip
    assert_refused(caught, 2, fix="model.lora.target_modules=[k_proj,o_proj,q_proj,v_proj]")
    sentence(caught, folder=experts)
