"""peft's other kinds of adapters (model.lora.peft_type): as LoRA, but for vLLM and shards."""

from pathlib import Path
from typing import Any

import policy_cases
import pytest
import torch
from assert_refused import assert_refused
from loop_cases import digits, make, sampled, step, updated
from lora_cases import adapted, frozen, keys, same
from policy_cases import fresh, groups, packed
from resume_cases import attempt, differing, left

from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.data.packing import whole_group_slices
from rloo_cli.policy import layouts, lora
from rloo_cli.policy.model import Policy
from rloo_cli.utils import paths
from rloo_cli.utils.errors import ConfigError

IDS = torch.arange(5, 25)[None]
ARGUMENTS: dict[str, dict[str, Any]] = {
    "LOHA": {"r": 4, "alpha": 8},
    "LOKR": {"r": 4, "alpha": 8},
    "IA3": {},
    "OFT": {"oft_block_size": 4},
    "HRA": {"r": 4},
    "MISS": {"r": 4},
    "ROAD": {"group_size": 4},
}
kinds = pytest.mark.parametrize("kind", ARGUMENTS)


def changes(kind: str) -> dict[str, Any]:
    """The keys of an adapter of this kind."""
    return {"peft_type": kind, "kwargs": ARGUMENTS[kind]}


def words(kind: str) -> tuple[str, ...]:
    """The same on a command line."""
    given = ",".join(f"{name}: {value}" for name, value in ARGUMENTS[kind].items())
    return "lora=peft", f"model.lora.peft_type={kind}", f"model.lora.kwargs={{{given}}}"


@kinds
def test_it_begins_as_nothing_and_off_it_is_the_base_and_merged_and_read_again_it_is_itself(
    kind: str, tmp_path: Path
) -> None:
    base = fresh().eval()(IDS).logits
    new = fresh().eval()
    lora.attach_adapter(new, keys(**changes(kind)), seed=1)
    assert torch.allclose(new(IDS).logits, base, atol=1e-4)
    model = adapted(**changes(kind)).eval()
    logits = model(IDS).logits
    assert (logits - base).abs().max() > 1e-2
    with lora.use_adapter(lora.adapter_layers(model), None):
        assert torch.equal(model(IDS).logits, base)
    assert torch.allclose(lora.merged_model(model)(IDS).logits, logits, atol=1e-3)
    lora.save_adapter(model, tmp_path)
    lora.read_adapter_weights(new, tmp_path)
    assert torch.equal(new(IDS).logits, logits)


@kinds
def test_packed_rows_give_it_the_gradient_of_rows_by_themselves_and_the_base_none(
    kind: str,
) -> None:
    chosen, found = groups(), []
    for shared in (True, False):
        policy = Policy(adapted(**changes(kind)), 1.0)
        policy.model.train()
        if shared:
            layouts.choose_policy_layout(policy, "auto", 64)
            assert policy.layout == "shared"
            micro = policy.pack(chosen, whole_group_slices(chosen, range(len(chosen))))
        else:
            micro = packed(chosen, [0, 1, 2])
        policy.logp(micro).logp.sum().backward()
        trained = policy.model.named_parameters()
        found.append({n: p.grad for n, p in trained if p.grad is not None})
    own = {n for n, p in policy.model.named_parameters() if p.requires_grad}
    assert found[0].keys() == own and not any(name.endswith("base_layer.weight") for name in own)
    for name, gradient in found[1].items():
        assert (found[0][name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7, name


@kinds
def test_over_a_base_of_half_precision_it_is_float32_and_learns(kind: str) -> None:
    model = adapted(dtype=torch.bfloat16, **changes(kind)).train()
    learns = [p for p in model.parameters() if p.requires_grad]
    assert {p.dtype for p in learns} == {torch.float32}
    model(IDS, use_cache=False).logits.float().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in learns)


@pytest.mark.parametrize("kind", ["LOHA", "IA3"])
def test_training_moves_it_and_neither_base_nor_reference(kind: str, tmp_path: Path) -> None:
    run = make(tmp_path, *words(kind), "train.learning_rate=1e-2", noise=0.0)
    model = run.policy.model
    base, before = frozen(model), {n: t.clone() for n, t in lora.adapter_tensors(model).items()}
    assert before and run.reference is not None and run.reference.model is model
    updated(run, sampled(run))
    step(run)
    assert same(base, frozen(model)) and not same(before, lora.adapter_tensors(model))
    assert run.log.metrics_lines[-1]["kl"] != 0


@pytest.mark.slow
def test_a_run_that_is_stopped_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    asked = (*words("OFT"), "max_steps=2", "checkpoint.every=1", "train.learning_rate=1e-2")
    looks: list[int] = []
    assert attempt(tmp_path / "whole", *asked, looks=looks, digits=digits)
    assert not attempt(tmp_path / "parts", *asked, stop_at=2 * len(looks) // 3, digits=digits)
    assert attempt(tmp_path / "parts", *asked, digits=digits)
    assert not differing(left(tmp_path / "whole" / "smoke"), left(tmp_path / "parts" / "smoke"))


def test_an_adapter_made_with_another_scale_is_not_gone_on_from(tmp_path: Path) -> None:
    lora.save_adapter(adapted(**changes("LOHA")), tmp_path)
    same_scale = keys(**changes("LOHA"), path=str(tmp_path))
    lora._check_arguments(same_scale)
    with pytest.raises(ConfigError, match=r"alpha is 16, .* 8"):
        lora._check_arguments(same_scale.model_copy(update={"kwargs": {"r": 4, "alpha": 16}}))


REFUSED = {
    "vLLM": (("generation=vllm_server",), "generation=transformers"),
    "shards": (("distributed=fsdp2",), "distributed=ddp"),
    "a reference that moves": (("model.ref_sync.every=1",), "model.ref_sync.every=0"),
    "few bits": (("quantization=4bit",), "model.quantization=null"),
    "layers twice": (("model.lora.kwargs={target_modules: [q_proj]}",), "target_modules=..."),
    "biases": (("model.lora.kwargs={bias: all}",), "bias"),
    "a LoRA's arguments": (
        ("model.lora.peft_type=LORA", "model.lora.kwargs={lora_alpha: 3}"), ""),
}  # fmt: skip


@pytest.mark.parametrize(("more", "fix"), REFUSED.values(), ids=REFUSED)
def test_what_it_does_not_go_with_is_refused_with_what_to_change(
    more: tuple[str, ...], fix: str, sentence
) -> None:
    with pytest.raises(ConfigError) as caught:
        check.check_config(compose_config(["+recipe=smoke", "lora=peft", *more]))
    assert_refused(caught, 2, fix=fix)
    sentence(caught, folder=paths.CONF)


def test_an_argument_that_its_kind_does_not_have_is_refused_with_those_it_has() -> None:
    with pytest.raises(ConfigError) as caught:
        lora.make_adapter_config(keys(peft_type="IA3", kwargs={"r": 8}))
    assert_refused(caught, 2, "feedforward_modules", where="model.lora.kwargs.r")
    with pytest.raises(ConfigError, match="OFTConfig rejects"):
        lora.make_adapter_config(keys(peft_type="OFT", kwargs={"r": 4, "oft_block_size": 4}))
    with pytest.raises(ConfigError, match="does not fit"):
        lora.attach_adapter(
            policy_cases.fresh(), keys(peft_type="ROAD", kwargs={"group_size": 6}), seed=1
        )
