"""Each part of a plan's memory against sums done by hand, and what must hold for every run."""

from itertools import pairwise

import pytest
from plan_cases import COUNT, ENGINES, GIB, LAYER, SMALL, TABLE, case, large, lora

from rloo_cli.planning import device, model_spec, peak_memory, plan, static_memory, vllm_memory
from rloo_cli.planning.plan_inputs import PlanInputs

HALF = ("model.dtype=bfloat16",)


def test_a_small_model_is_counted_by_hand() -> None:
    found = model_spec.parse_model_spec(SMALL, "small", "here")
    assert found.total_params == COUNT == 251_328
    parts = found.embedding_params, found.head_params, found.layer_params, found.body_params
    assert parts == (TABLE, TABLE, LAYER, 3 * LAYER + 64)


# What stays: weights, gradients, optimizer. Of COUNT = n numbers on 4 ranks.

STATES = {  # engine -> bytes a number of weights, gradients, masters and moments
    "single": (2, 4, 12), "ddp": (2, 4, 12), "zero1": (2, 4, 3), "zero2": (2, 1, 3),
    "zero3": (0.5, 1, 3), "fsdp2": (0.5, 1, 3),
}  # fmt: skip


@pytest.mark.parametrize("name", ENGINES)
def test_states_are_the_engines_share_of_weights_gradients_and_optimizer(name: str) -> None:
    ranks = 1 if name == "single" else 4
    held = static_memory.estimate_static_memory(case(*HALF, f"distributed={name}", ranks=ranks))
    found = held.weights, held.gradients, held.optimizer
    assert found == pytest.approx([each * COUNT for each in STATES[name]])
    assert held.reference == pytest.approx(2 * COUNT / (4 if name in ("zero3", "fsdp2") else 1))
    assert held.host_bytes == 0 and held.reward_models == 0
    assert (held.gathered > 0) == (name in ("zero3", "fsdp2"))
    assert (held.buffers > 0) == (name != "single")


def test_float32_weights_are_their_own_masters() -> None:
    held = static_memory.estimate_static_memory(case("model.dtype=float32"))
    assert (held.weights, held.gradients, held.optimizer) == (4 * COUNT, 4 * COUNT, 8 * COUNT)


def test_without_masters_gradients_and_weights_are_of_half_precision() -> None:
    held = static_memory.estimate_static_memory(case(*HALF, "distributed.master_weights=none"))
    assert (held.weights, held.gradients, held.optimizer) == (2 * COUNT, 2 * COUNT, 8 * COUNT)


def test_plain_sgd_has_no_moments() -> None:
    held = static_memory.estimate_static_memory(case(*HALF, "train.optimizer=torch.optim:SGD"))
    assert held.optimizer == 4 * COUNT


@pytest.mark.parametrize(("offload", "weights"), [("optimizer", 0.5), ("parameters", 0.0)])
def test_what_is_offloaded_is_in_the_cpus_memory(offload: str, weights: float) -> None:
    words = (*HALF, "distributed=zero3", f"distributed.offload={offload}")
    held = static_memory.estimate_static_memory(case(*words, ranks=4))
    assert held.optimizer == 0 and held.weights == pytest.approx(weights * COUNT)
    assert held.host_bytes == pytest.approx((3 + (0.5 if offload == "parameters" else 0)) * COUNT)


def test_an_adapter_alone_has_gradients_and_moments_and_the_model_is_its_own_reference() -> None:
    found = case(*HALF, lora())
    attention, mlp = 4 * 8 * (64 + 64), 2 * 8 * (64 + 128) + 8 * (128 + 64)
    assert static_memory.trained_params(found) == (0, 3 * (attention + mlp))
    held, count = static_memory.estimate_static_memory(found), 3 * (attention + mlp)
    assert held.weights == 2 * COUNT + 4 * count  # peft's are in float32
    assert (held.gradients, held.optimizer, held.reference) == (4 * count, 8 * count, 0)


def test_an_adapter_of_named_layers_counts_these_alone() -> None:
    found = case(*HALF, lora("[q_proj,v_proj]"))
    assert static_memory.trained_params(found) == (0, 3 * 2 * 8 * (64 + 64))


@pytest.mark.parametrize(("bits", "each"), [(8, 1.0), (4, 0.5625)])
def test_quantised_maps_take_fewer_bytes_and_tables_do_not(bits: int, each: float) -> None:
    words = f"model.quantization={{bits: {bits}, quant_type: nf4, double_quant: false}}"
    found = case(*HALF, lora(), words)
    maps = 3 * (4 * 64 * 64 + 3 * 64 * 128)
    assert static_memory.policy_weight_bytes(found, found.model) == each * maps + 2 * (COUNT - maps)


def test_a_reference_that_is_offloaded_and_one_that_nobody_needs_take_nothing() -> None:
    assert static_memory.estimate_static_memory(case(*HALF, "algorithm.beta=0")).reference == 0
    held = static_memory.estimate_static_memory(case(*HALF, "model.ref_offload=true"))
    assert held.reference == 0 and held.host_bytes == 2 * COUNT
    memory = peak_memory.estimate_peak_memory(case(*HALF, "model.ref_offload=true"))
    assert memory.phases["reference"]["reference"] == 2 * COUNT


REWARD = ("reward=model", "reward.model.path=make:tiny_reward")


def test_each_rank_has_a_whole_copy_of_a_reward_model_without_its_head() -> None:
    model = model_spec.load_model_spec("make:tiny_reward")
    size = 2 * (model.total_params - model.head_params)
    words = (*HALF, *REWARD, "distributed=zero3")
    held = static_memory.estimate_static_memory(
        case(*words, ranks=4, reward_models={"model": model})
    )
    assert held.reward_models == size
    away = static_memory.estimate_static_memory(
        case(*words, "reward.model.offload=true", reward_models={"model": model})
    )
    assert (away.reward_models, away.host_bytes) == (0, size)


# What comes and goes.


def test_activations_of_a_forward_are_rows_times_what_a_layer_keeps() -> None:
    found = case("model.dtype=float32", "algorithm.num_generations=4", "train.prompts_per_step=2")
    norms, heads = 2 * (12 * 64 + 4), 4 * 4  # a norm keeps its factor
    each = norms + 4 * (4 * 64) + heads + 4 * 4 * 128  # q, k, v, out; log-sum-exps; MLP
    assert peak_memory.kept_bytes_per_layer(found) == each
    cut = peak_memory.estimate_peak_memory(found).forward
    assert (cut.tokens, cut.completion_tokens, cut.micro_batches) == (
        2 * (20 + 4 * 16),
        2 * 4 * 16,
        1,
    )
    assert cut.layer_bytes == 3 * cut.tokens * each
    assert cut.kept_logits_bytes == 4 * cut.completion_tokens * 1000
    again = peak_memory.estimate_peak_memory(
        case("model.dtype=float32", "model.gradient_checkpointing=true")
    ).forward
    assert (
        again.layer_bytes == 3 * again.tokens * 4 * 64
        and again.single_layer_bytes > cut.single_layer_bytes
    )


@pytest.mark.parametrize(("layout", "rows"), [("shared", 20 + 4 * 16), ("packed", 4 * 36)])
def test_a_prompt_counts_once_in_shared_rows(layout: str, rows: int) -> None:
    assert case(f"train.layout={layout}").group_tokens == rows


def test_micro_batches_hold_whole_groups_alike_and_a_group_over_the_budget_is_cut() -> None:
    words = ("train.prompts_per_step=10", "algorithm.num_generations=4")  # groups of 84 rows
    cuts = {}
    for budget in (84, 300, 60):
        cut = peak_memory.estimate_peak_memory(
            case(*words, f"train.micro_batch_tokens={budget}")
        ).forward
        cuts[budget] = cut.tokens, cut.micro_batches
    assert cuts == {84: (84, 10), 300: (3 * 84, 4), 60: (60, 20)}
    cut = peak_memory.estimate_peak_memory(case(*words, "train.micro_batch_size=8")).forward
    assert (cut.tokens, cut.micro_batches) == (2 * 84, 5)


def test_logits_are_kept_up_to_the_size_that_the_key_says() -> None:
    assert (
        peak_memory.estimate_peak_memory(case("train.keep_logits_gb=0")).forward.kept_logits_bytes
        == 0
    )
    assert (
        peak_memory.estimate_peak_memory(case("train.keep_logits_gb=1")).forward.kept_logits_bytes
        > 0
    )


def test_the_transformers_backend_holds_a_whole_copy_beside_its_shard() -> None:
    parts = peak_memory.estimate_peak_memory(case(*HALF, "distributed=zero3", ranks=4)).phases[
        "rollout"
    ]
    assert parts["weights"] == COUNT / 2 and parts["replica"] == 2 * COUNT
    keys = 2 * 3 * 64 * 2  # of a token, in all layers
    assert parts["KV cache"] == keys * (1 * 20 + 4 * 16)  # one prompt a rank, four completions


# vLLM.

SERVER = ("generation=vllm_server", *HALF)
COLOCATE = ("generation=vllm_colocate", *HALF)


def test_a_copy_in_vllm_is_spread_over_its_gpus() -> None:
    words = (*SERVER, "generation.server.tensor_parallel_size=2")
    found = vllm_memory.estimate_engine_memory(large("Qwen/Qwen2.5-7B", *words))
    assert found is not None and found.extra_gpus == 2
    assert found.weight_bytes == 2 * model_spec.load_model_spec("Qwen/Qwen2.5-7B").total_params / 2
    assert found.kv_bytes_per_token == 2 * 28 * 2 * 128 * 2  # 2 of 4 heads
    assert found.least_kv_bytes == found.kv_bytes_per_token * (20 + 16)
    wider = (*SERVER, "generation.server.tensor_parallel_size=8")
    more = vllm_memory.estimate_engine_memory(large("Qwen/Qwen2.5-7B", *wider))
    assert more is not None and more.kv_bytes_per_token == 2 * 28 * 1 * 128 * 2  # a head is not cut


@pytest.mark.parametrize(
    ("sleep", "held"), [("none", "total_bytes"), ("kv", "weight_bytes"), ("weights", "")]
)
def test_a_colocated_engine_takes_from_training_what_its_sleep_leaves(
    sleep: str, held: str
) -> None:
    found = large("Qwen/Qwen2.5-1.5B", *COLOCATE, f"generation.colocate.sleep={sleep}", ranks=1)
    sampler, memory = (
        vllm_memory.estimate_engine_memory(found),
        peak_memory.estimate_peak_memory(found),
    )
    assert sampler is not None and sampler.extra_gpus == 0
    needs = plan.phase_bytes(found, memory, sampler)
    alone = {name: sum(parts.values()) for name, parts in memory.phases.items()}
    assert needs["rollout"] == alone["rollout"] + sampler.total_bytes
    beside = needs["update"] - alone["update"]
    expected = {
        "none": sampler.total_bytes,
        "kv": sampler.weight_bytes + sampler.forward_bytes / 2,
        "weights": 0,
    }
    assert beside == pytest.approx(expected[sleep]) and (not held or getattr(sampler, held) > 0)


def test_the_recommended_share_has_room_for_every_sequence_and_fits_beside_the_trainer() -> None:
    found = large("Qwen/Qwen2.5-1.5B", *COLOCATE, "train.prompts_per_step=64", ranks=1)
    made = plan.make_run_plan(found.run.model_copy(update={"model": found.run.model.model_copy(
        update={"path": "Qwen/Qwen2.5-1.5B"})}), found.device)  # fmt: skip
    share, sampler = plan.recommended_gpu_utilization(made), made.sampler
    assert share is not None and sampler is not None and share * 100 % 5 == pytest.approx(0)
    room = share * sampler.gpu_bytes - sampler.weight_bytes - sampler.forward_bytes
    assert (
        room >= sampler.wanted_kv_bytes
        and room - 0.05 * sampler.gpu_bytes < sampler.wanted_kv_bytes
    )
    assert made.memory.peak_bytes + share * sampler.gpu_bytes <= found.device.usable_bytes


def test_an_engine_without_room_for_one_sequence_does_not_fit() -> None:
    for share, enough in (("0.5", True), ("0.05", False)):
        words = (*SERVER, "distributed=zero3", f"generation.server.gpu_memory_utilization={share}")
        found = large("Qwen/Qwen2.5-7B", *words)
        sampler = vllm_memory.estimate_engine_memory(found)
        assert sampler is not None and (sampler.kv_cache_bytes >= sampler.least_kv_bytes) is enough
        assert plan.fits_device(found, peak_memory.estimate_peak_memory(found), sampler) is enough


# What must hold for every run.


def peak(found: PlanInputs) -> float:
    return peak_memory.estimate_peak_memory(found).peak_bytes


@pytest.mark.parametrize("name", ENGINES[1:])
def test_more_ranks_never_need_more_of_each(name: str) -> None:
    words = (*HALF, f"distributed={name}", "train.prompts_per_step=64", *SERVER[:1])
    peaks = [peak(large("Qwen/Qwen2.5-7B", *words, ranks=n)) for n in (1, 2, 4, 8, 16, 32, 64)]
    # A first second rank brings buffers to talk through: under ddp they are all that changes.
    allowed = 2 * static_memory.DDP_BUCKET if name == "ddp" else 0
    assert all(b <= a + allowed for a, b in pairwise(peaks))


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-72B"])
def test_a_higher_stage_never_needs_more(model: str, ranks: int) -> None:
    stages = ("ddp", "zero1", "zero2", "zero3")
    words = (*SERVER, "train.micro_batch_tokens=512", "model.gradient_checkpointing=true")
    found = [peak(large(model, *words, f"distributed={s}", ranks=ranks)) for s in stages]
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize(
    ("more", "less"),
    [
        ("train.micro_batch_tokens=8192", "train.micro_batch_tokens=1024"),
        ("model.gradient_checkpointing=false", "model.gradient_checkpointing=true"),
        ("algorithm.beta=0.1", "algorithm.beta=0"),
        ("model.lora=null", lora()),
        ("distributed.master_weights=float32", "distributed.master_weights=none"),
        ("train.keep_logits_gb=4", "train.keep_logits_gb=0"),
    ],
)
def test_what_is_said_to_save_memory_does(more: str, less: str) -> None:
    words = (*SERVER, "train.prompts_per_step=64")
    fixed = () if more.startswith("train.micro") else ("train.micro_batch_tokens=4096",)
    a, b = (peak(large("Qwen/Qwen2.5-1.5B", *words, *fixed, w, ranks=1)) for w in (more, less))
    assert a > b


def test_devices_are_known_by_name_and_by_size() -> None:
    assert device.find_device("H100").name == device.find_device("h100-80gb").name == "H100-80GB"
    assert (
        device.find_device("40GiB").memory_bytes == 40 * GIB
        and device.find_device("80GB").memory_bytes == 80e9
    )
    assert device.find_device("cpu").kind == "cpu"
