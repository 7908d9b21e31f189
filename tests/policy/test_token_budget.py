"""The rule by which a run and its plan choose the tokens of a training forward."""

from types import SimpleNamespace
from typing import Any

import pytest
from plan_cases import case

from rloo_cli.config.registry import registered_module
from rloo_cli.planning import peak_memory, static_memory
from rloo_cli.policy import token_budget
from rloo_cli.policy.token_budget import ActivationMemory, choose_token_budget

# An H100 of 80 GB with 0.3 of it for vLLM, and the models of bench/gpu_step.py in bfloat16 with
# float32 masters: what is left, and what autograd keeps of a token. Half of it held 16,084 tokens
# of W8 (Pythia-1B, a reference beside it) and 5,259 of W10 (Qwen2-1.5B).
H100 = 85.07e9
W8 = {"free": 38.359e9, "each": 1.192448e6, "vocabulary": 50304}
W10 = {"free": 30.570e9, "each": 2.906432e6, "vocabulary": 151936}


def memory(free: float, kind: str = "cuda", **more: Any) -> ActivationMemory:
    """The memory of a GPU of 80 GB, with logits of 1 kB a token."""
    given = {"device_bytes": H100, "logits_bytes_per_token": 1e3, "keep_logits_gb": None}
    return ActivationMemory(kind, free_bytes=free, **{**given, "crowded": False, **more})


def h100(facts: dict[str, float], keep_logits_gb: float | None) -> int:
    """The tokens that a workload gets there."""
    size = 2 * facts["vocabulary"]
    room = memory(facts["free"], logits_bytes_per_token=size, keep_logits_gb=keep_logits_gb)
    return choose_token_budget(32768, 0, room.tokens_that_fit(facts["each"]))


@pytest.mark.parametrize(("facts", "without_logits", "with_logits"), [
    (W8, 25_600, 24_064), (W10, 8_192, 7_680),
])  # fmt: skip
def test_an_h100_gets_the_tokens_that_fit_it(
    facts: dict[str, float], without_logits: int, with_logits: int
) -> None:
    assert h100(facts, 0.0) == without_logits
    assert h100(facts, None) == with_logits


@pytest.mark.parametrize("facts", [W8, W10])
@pytest.mark.parametrize("keep_logits_gb", [0.0, 0.5, None])
def test_a_fifth_of_what_kept_logits_leave_stays_free(
    facts: dict[str, float], keep_logits_gb: float | None
) -> None:
    size = 2 * facts["vocabulary"]
    room = memory(facts["free"], logits_bytes_per_token=size, keep_logits_gb=keep_logits_gb)
    tokens = room.tokens_that_fit(facts["each"])
    logits = min(tokens * size, room.most_kept_logits)
    assert tokens * facts["each"] == pytest.approx(0.8 * (facts["free"] - logits))


def test_half_is_left_on_a_cpu_and_beside_a_sampler_that_decodes_meanwhile() -> None:
    plain = memory(1e9, keep_logits_gb=0.0)
    assert plain.tokens_that_fit(1e4) == pytest.approx(0.8 * 1e5)
    for crowded in (memory(1e9, "cpu", keep_logits_gb=0.0),
                    memory(1e9, keep_logits_gb=0.0, crowded=True)):  # fmt: skip
        assert crowded.tokens_that_fit(1e4) == pytest.approx(0.5 * 1e5)


@pytest.mark.parametrize(("fitting", "group", "tokens"), [
    (9000.0, 100, 8192),  # as many as are of use
    (9000.0, 8500, 8500),  # a group is not cut in vain
    (8191.9, 100, 7936),
    (5259.0, 100, 5120),
    (5259.0, 5200, 5200),  # nor for the rounding
    (5259.0, 9000, 5120),
    (300.0, 100, 256),
    (0.0, 100, 64),
])  # fmt: skip
def test_a_budget_is_a_multiple_of_256_that_cuts_no_group_in_vain(
    fitting: float, group: int, tokens: int
) -> None:
    assert choose_token_budget(8192, group, fitting) == tokens


@pytest.mark.parametrize(("backend", "sleep", "share"), [
    ("vllm_colocate", "none", 0.7), ("vllm_colocate", "kv", 0.7), ("vllm_colocate", "weights", 1.0),
    ("vllm_server", "none", 1.0), ("transformers", "none", 1.0),
])  # fmt: skip
def test_an_engine_on_the_same_gpu_has_its_share(backend: str, sleep: str, share: float) -> None:
    engine = SimpleNamespace(sleep=sleep, gpu_memory_utilization=0.3)
    generation = registered_module("generation", backend).Config.model_construct(colocate=engine)
    assert token_budget.gpu_bytes_left(1e9, generation) == pytest.approx(0.98 * share * 1e9)


def test_a_plan_takes_a_colocated_engines_share_off_as_the_run_does() -> None:
    words = ("generation=vllm_colocate", "generation.allow_untested=true")
    inputs = case(*words)
    static = static_memory.estimate_static_memory(inputs)
    held = static.resting_bytes + static.gradients
    room = peak_memory._activation_memory(inputs, static)
    assert room.free_bytes == pytest.approx(0.98 * 0.7 * inputs.device.memory_bytes - held)


def test_a_plan_cuts_a_group_without_kl_before_it_recomputes_as_the_run_does() -> None:
    inputs = case("algorithm.beta=0", "generation.max_completion_length=100")
    assert peak_memory._tokens_in_one_pass(inputs) == 120 < inputs.group_tokens
    inputs = case("algorithm.beta=0.1", "generation.max_completion_length=100")
    assert peak_memory._tokens_in_one_pass(inputs) == inputs.group_tokens
    assert not peak_memory.estimate_peak_memory(inputs).forward.recompute
