"""How many rows a forward may have: from what autograd keeps and from the machine's memory."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from loop_cases import alone
from plan_cases import checked
from policy_cases import fresh

from rloo_cli.config.registry import registered_module
from rloo_cli.data import packing
from rloo_cli.data.bin_packing import forward_tokens
from rloo_cli.data.packing import pack_micro_batch, whole_group_slices
from rloo_cli.planning import peak_memory, static_memory
from rloo_cli.planning.device import cpu_device
from rloo_cli.planning.model_spec import parse_model_spec
from rloo_cli.planning.plan_inputs import PlanInputs
from rloo_cli.policy import layouts, memory
from rloo_cli.policy.model import Policy
from rloo_cli.policy.token_budget import CROWDED_ACTIVATION_SHARE, choose_token_budget


def policy(name="qwen3", **changes):
    found = Policy(fresh(name, **changes).train(), 1.0)
    layouts.choose_policy_layout(found, "auto", 64)
    return found


def config(
    checkpointing="auto", tokens=None, size=None, no_grad=None, backend="transformers", **keys
):
    """The sections model, train and generation."""
    return (
        SimpleNamespace(gradient_checkpointing=checkpointing),
        SimpleNamespace(
            micro_batch_tokens=tokens,
            micro_batch_size=size,
            no_grad_batch_size=no_grad,
            keep_logits_gb=2.0,
        ),
        registered_module("generation", backend).Config.model_construct(overlap="none", **keys),
    )


def test_what_is_kept_of_a_row_is_counted_and_recomputing_keeps_less():
    plain, recomputed = policy(), policy()
    recomputed.model.gradient_checkpointing_enable({"use_reentrant": False})
    assert (
        memory.activation_bytes_per_token(recomputed) < memory.activation_bytes_per_token(plain) / 3
    )
    assert all(w.grad is None for w in plain.model.parameters())


def test_more_layers_keep_more_and_weights_are_not_counted():
    two, four = (
        memory.activation_bytes_per_token(
            policy(num_hidden_layers=n, layer_types=["full_attention"] * n)
        )
        for n in (2, 4)
    )
    assert 1.5 < four / two < 2.1
    rows = layouts.probe_groups(policy())
    micro = pack_micro_batch(rows, whole_group_slices(rows, [0, 1]), layout="shared")
    assert two * micro.input_ids.numel() > 4 * 32 * micro.input_ids.numel()


def test_a_budget_is_what_the_config_says_or_what_the_memory_holds(monkeypatch):
    found, one = policy(), config(tokens=300)
    assert memory.measure_forward_limits(found, *one, 100, False).tokens == 300
    assert (
        memory.measure_forward_limits(found, *config(), 100, False).tokens
        == memory.MAX_USEFUL_TOKENS["cpu"]
    )
    assert (
        memory.measure_forward_limits(found, *config(), 5000, False).tokens == 5000
    )  # a group is not cut in vain
    monkeypatch.setattr(memory, "_device_memory_bytes", lambda device: 8e6)
    small = memory.measure_forward_limits(found, *config(False), 100, False).tokens
    assert 64 <= small < memory.MAX_USEFUL_TOKENS["cpu"] and small % 256 == 0
    assert (
        memory.measure_forward_limits(found, *config(False), 100, True).tokens <= small
    )  # a reference is there too


def test_a_pass_without_gradient_takes_what_still_gets_faster():
    found, most = policy(), memory.MAX_USEFUL_TOKENS["cpu"]
    for tokens, expected in ((100, 400), (300, most), (None, most), (5000, 5000)):
        limits = memory.measure_forward_limits(found, *config(tokens=tokens), 100, False)
        assert limits.no_grad_tokens == expected


def test_a_size_in_completions_counts_instead():
    limits = memory.measure_forward_limits(policy(), *config(size=8), 100, False)
    assert (limits.completions, limits.no_grad_completions) == (8, 16)
    assert (
        memory.measure_forward_limits(
            policy(), *config(size=8, no_grad=8), 100, False
        ).no_grad_completions
        == 8
    )


@pytest.mark.parametrize(("wanted", "fits", "on"), [
    ("auto", True, False), ("auto", False, True), (False, False, False),
])  # fmt: skip
def test_activations_are_recomputed_only_where_the_longest_group_would_not_fit(
    monkeypatch, wanted, fits, on
):
    found = policy()
    logits = CROWDED_ACTIVATION_SHARE * 4 * 40  # of a vocabulary of 40, in float32
    room = 100 * (memory.activation_bytes_per_token(found) + logits) / CROWDED_ACTIVATION_SHARE
    monkeypatch.setattr(memory, "_free_bytes", lambda *given: room)
    memory.measure_forward_limits(found, *config(wanted), 99 if fits else 101, False)
    assert found.model.is_gradient_checkpointing is on


def test_a_layer_that_is_recomputed_is_counted_and_recomputing_stays_on():
    plain, recomputed = policy(), policy()
    recomputed.model.gradient_checkpointing_enable({"use_reentrant": False})
    kept = memory.activation_bytes_per_token(recomputed)
    layer = memory.activation_bytes_per_token(plain) / 2  # of two
    assert memory._working_bytes_per_token(recomputed) == pytest.approx(kept + layer)
    assert memory._working_bytes_per_token(plain) == pytest.approx(2 * layer)
    assert recomputed.model.is_gradient_checkpointing and not plain.model.is_gradient_checkpointing


def test_a_plan_chooses_the_tokens_that_the_run_chooses(monkeypatch):
    found = policy(hidden_size=64, num_hidden_layers=4, layer_types=["full_attention"] * 4)
    spec = parse_model_spec(found.model.config.to_dict(), "tiny", "the test")
    cpu = replace(cpu_device(), memory_bytes=20e6)
    monkeypatch.setattr(memory, "_device_memory_bytes", lambda device: cpu.memory_bytes)
    run = checked("model.gradient_checkpointing=false", "algorithm.beta=0")
    limits = memory.measure_forward_limits(found, run.model, run.train, run.generation, 100, False)
    inputs = PlanInputs(run, spec, cpu, 1, max_prompt_tokens=20)
    static = static_memory.estimate_static_memory(inputs)
    room = peak_memory._activation_memory(inputs, static)
    fitting = room.tokens_that_fit(peak_memory._bytes_per_forward_token(inputs, False))
    assert choose_token_budget(1024, 100, fitting) == limits.tokens < 1024
    assert int(room.most_kept_logits) == found.logprob_module.keep_logits_bytes


def test_logits_are_kept_up_to_a_size_and_an_eighth_of_the_free_memory(monkeypatch):
    found = policy()
    memory.measure_forward_limits(found, *config(), 100, False)
    assert found.logprob_module.keep_logits_bytes == 2e9
    monkeypatch.setattr(memory, "_free_bytes", lambda *given: 8e6)
    memory.measure_forward_limits(found, *config(), 10, False)
    assert found.logprob_module.keep_logits_bytes == 1e6


def test_an_engine_on_the_same_gpu_has_its_share_unless_it_lets_go_of_all(monkeypatch):
    model = fresh().to(torch.bfloat16)
    count = sum(p.numel() for p in model.parameters())
    there = SimpleNamespace(model=model, device=torch.device("cuda"), dtype=torch.bfloat16)
    monkeypatch.setattr(memory, "_device_memory_bytes", lambda device: 1e8)
    for sleep, share in (("none", 0.7), ("kv", 0.7), ("weights", 1.0)):
        engine = SimpleNamespace(sleep=sleep, gpu_memory_utilization=0.3)
        one = config(backend="vllm_colocate", colocate=engine)
        assert memory._free_bytes(there, one[2], True) == pytest.approx(
            0.98 * share * 1e8 - 20 * count
        )
    # 18 bytes a parameter
    assert memory._free_bytes(there, config()[2], False) == pytest.approx(0.98e8 - 18 * count)


@pytest.mark.parametrize("layout", packing.LAYOUTS)
def test_the_longest_group_is_counted_in_the_layout_that_it_will_have(
    tmp_path, monkeypatch, layout
):
    monkeypatch.setitem(memory.MAX_USEFUL_TOKENS, "cpu", 64)
    run = alone(tmp_path, f"train.layout={layout}")
    length = run.config.generation.max_completion_length
    completions = [length] * run.config.algorithm.num_generations
    assert (
        run.forward_limits.tokens
        == forward_tokens(run.prompts.max_length, completions, layout)
        > 64
    )


def test_a_container_has_no_more_memory_than_it_was_given(monkeypatch, tmp_path):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "CGROUP_MEMORY_FILE", limit)
    everything = memory._device_memory_bytes(torch.device("cpu"))
    for text, expected in (("max\n", everything), ("1000000\n", 1e6)):
        limit.write_text(text)
        assert memory._device_memory_bytes(torch.device("cpu")) == expected


def test_a_shape_is_that_of_the_model():
    shape = memory.model_forward_cost(fresh())
    total = sum(p.numel() for p in fresh().parameters())
    assert shape.layer_params == total - 2 * 40 * 32  # embeddings and head
    assert (shape.num_layers, shape.attention_width, shape.hidden_size, shape.vocab_size) == (
        2,
        32,
        32,
        40,
    )
    assert (
        memory.model_forward_cost(fresh(tie_word_embeddings=True)).layer_params
        == shape.layer_params
    )
