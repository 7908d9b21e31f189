"""Adapters: what learns, what does not, and what is written of it."""

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import policy_cases
import pytest
import torch
import yaml
from cli_cases import strict
from loop_cases import cache, digits, make, sampled, step, updated
from lora_cases import adapted, frozen, keys, move, same
from policy_cases import fresh, groups, packed
from resume_cases import attempt, differing, left
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rloo_cli.checkpoint import export, save
from rloo_cli.cli import eval_target
from rloo_cli.config import check
from rloo_cli.data.packing import whole_group_slices
from rloo_cli.evaluation import worker
from rloo_cli.policy import layouts, load, lora
from rloo_cli.policy.model import Policy
from rloo_cli.train.loop import run_training_loop
from rloo_cli.utils.errors import ConfigError
from rloo_cli.utils.files import write_json, write_text

pytestmark = pytest.mark.wide

IDS = torch.arange(5, 25)[None]
KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "a few layers": {"target_modules": ["q_proj", "down_proj"], "exclude_modules": ["layers.0"]},
    "the output embedding": {"target_modules": ["q_proj", "lm_head"]},
    "both embeddings": {"target_modules": ["v_proj", "embed_tokens", "lm_head"]},
    "a layer trained whole": {"modules_to_save": ["lm_head"]},
}
kinds = pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)


@kinds
def test_a_new_adapter_changes_nothing_and_one_that_is_off_is_the_base_bit_for_bit(
    changes: dict[str, Any],
) -> None:
    base, model = fresh().eval(), fresh().eval()
    expected = base(IDS).logits
    lora.attach_adapter(model, keys(**changes), seed=1)
    assert torch.allclose(model(IDS).logits, expected, atol=1e-6)
    move(model)
    assert (model(IDS).logits - expected).abs().max() > 1e-2
    learns = {n for n, p in model.named_parameters() if p.requires_grad}
    with lora.use_adapter(lora.adapter_layers(model), None):
        assert torch.equal(model(IDS).logits, expected)
    assert learns == {n for n, p in model.named_parameters() if p.requires_grad}


def test_an_adapter_is_drawn_from_the_runs_seed_and_leaves_torchs_state_alone() -> None:
    models = [fresh() for _ in range(3)]
    for model, seed, before in zip(models, (1, 1, 2), (3, 4, 4), strict=True):
        torch.manual_seed(before)
        state = torch.get_rng_state()
        lora.attach_adapter(model, keys(), seed)
        assert torch.equal(torch.get_rng_state(), state)
    one, two, other = map(lora.adapter_tensors, models)
    assert same(one, two) and not same(one, other)


@pytest.mark.parametrize("again", [False, True], ids=["plain", "recomputed"])
def test_only_the_adapter_gets_a_gradient(again: bool) -> None:
    model, chosen = adapted(), groups()
    model.train()
    if again:
        load.enable_gradient_checkpointing(model)
    policy = Policy(model, 1.0)
    layouts.choose_policy_layout(policy, "auto", 64)
    assert policy.layout == "shared" and policy.logprob_module.use_fused_head
    micro = policy.pack(chosen, whole_group_slices(chosen, range(len(chosen))))
    policy.logp(micro).logp.sum().backward()
    got = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert set(got) == {n for n, p in model.named_parameters() if "lora_" in n}
    assert all(float(g.abs().sum()) > 0 for g in got.values())
    plain = Policy(adapted(), 1.0)
    plain.logp(packed(chosen, [0, 1, 2])).logp.sum().backward()
    for name, parameter in plain.model.named_parameters():
        if parameter.grad is not None:
            gap = (got[name] - parameter.grad).norm() / parameter.grad.norm()
            assert gap < 1e-5, name


def test_checkpointing_that_is_on_before_the_adapter_gives_it_the_same_gradient() -> None:
    found = []
    for early in (True, False):
        model = fresh()
        if early:
            load.enable_gradient_checkpointing(model)
        lora.attach_adapter(model, keys(), seed=1)
        move(model)
        model.train()
        model(IDS, use_cache=False).logits.sum().backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    assert all(torch.allclose(found[0][n], g, rtol=1e-4, atol=1e-5) for n, g in found[1].items())


@pytest.mark.parametrize("changes", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_adapters_over_a_base_of_half_precision_are_float32_and_learn(
    changes: dict[str, Any],
) -> None:
    model, chosen = adapted(dtype=torch.bfloat16, **changes), groups()
    learns = [p for p in model.parameters() if p.requires_grad]
    assert {p.dtype for p in learns} == {torch.float32}
    assert next(model.parameters()).dtype is torch.bfloat16
    policy = Policy(model, 1.0)
    layouts.choose_policy_layout(policy, "auto", 64)
    policy.logp(policy.pack(chosen, whole_group_slices(chosen, range(3)))).logp.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in learns)


def test_an_adapter_multiplies_in_the_dtype_of_the_layers_beside_it() -> None:
    seen: list[torch.dtype] = []
    model, chosen = adapted(dtype=torch.bfloat16), groups()
    parts = [m for n, m in model.named_modules() if n.endswith("lora_A.default")]
    assert parts and all(part.weight.dtype is torch.float32 for part in parts)
    for part in parts:
        part.register_forward_hook(lambda _, given, out: seen.extend([given[0].dtype, out.dtype]))
    policy = Policy(model, 1.0)
    policy.logp(
        policy.pack(chosen, whole_group_slices(chosen, range(len(chosen))))
    ).logp.sum().backward()
    assert {*seen} == {torch.bfloat16}
    learned = [p for n, p in model.named_parameters() if "lora_B" in n]
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in learned)
    assert any(bool(p.grad.abs().sum() > 0) for p in learned if p.grad is not None)


@pytest.mark.parametrize("name", ["the output embedding", "a layer trained whole"])
def test_an_output_embedding_that_learns_is_computed_by_the_model_itself(name: str) -> None:
    policy, chosen = Policy(adapted(**KINDS[name]), 0.7), groups()
    level = layouts.choose_policy_layout(policy, "auto", 64)
    assert (level.layout, level.head) == ("shared", "model")
    found = policy.logp(policy.pack(chosen, whole_group_slices(chosen, range(3)))).logp
    with layouts.shared_attention.native_attention(policy.model):
        expected = policy_cases.each_alone(policy.model, chosen, 0.7)[0]
    assert torch.allclose(found.double(), expected, atol=1e-4)


def test_embeddings_that_are_one_tensor_are_not_parted() -> None:
    model = fresh(tie_word_embeddings=True)
    with pytest.raises(ConfigError, match="ties its embeddings"):
        lora.attach_adapter(model, keys(modules_to_save=["lm_head"]), seed=1)


def test_layers_that_the_model_does_not_have_are_refused() -> None:
    with pytest.raises(ConfigError, match="does not fit"):
        lora.attach_adapter(fresh(), keys(target_modules=["nothing"]), seed=1)


# Files.


@kinds
def test_what_is_written_is_loaded_by_peft_and_merged_it_is_the_same_model(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    model = adapted(**changes).eval()
    expected, before = model(IDS).logits, frozen(model)
    lora.save_adapter(model, tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(fresh().eval(), tmp_path / "adapter")
    assert torch.allclose(theirs(IDS).logits, expected, atol=1e-5)
    lora.merged_model(model).save_pretrained(tmp_path / "whole")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert type(again) is type(model) and not lora.has_adapter(again)
    assert torch.allclose(again(IDS).logits, expected, atol=1e-5)
    assert same(frozen(model), before) and torch.equal(model(IDS).logits, expected)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "opt", "bloom"])
def test_other_families_are_merged_too(family: str) -> None:
    model = adapted(family).eval()
    found = lora.merged_model(model)(IDS).logits
    assert torch.allclose(found, model(IDS).logits, atol=1e-5)


def test_an_adapters_files_are_the_same_each_time(tmp_path: Path) -> None:
    model = adapted()
    for name in "ab":
        lora.save_adapter(model, tmp_path / name)
    for file in (lora.PEFT_CONFIG_FILE, lora.PEFT_WEIGHTS_FILE):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    about = lora.read_adapter_config(tmp_path / "a")
    assert about["peft_type"] == "LORA" and about["r"] == 4
    assert about["target_modules"] == sorted(about["target_modules"])


def test_an_adapter_of_other_layers_or_another_rank_is_refused_by_name(tmp_path: Path) -> None:
    lora.save_adapter(adapted(target_modules=["q_proj"]), tmp_path)
    with pytest.raises(ConfigError, match=r"k_proj.*missing"):
        lora.read_adapter_weights(adapted(target_modules=["q_proj", "k_proj"]), tmp_path)
    with pytest.raises(ConfigError, match=r"lora_A.weight: \(4, 32\), expected \(8, 32\)"):
        lora.read_adapter_weights(adapted(target_modules=["q_proj"], r=8), tmp_path)
    (tmp_path / lora.PEFT_WEIGHTS_FILE).write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="cannot be read"):
        lora.read_adapter_weights(adapted(target_modules=["q_proj"]), tmp_path)


# Runs.

WORDS = ("data.eval_split=null", "train.learning_rate=0.01", "train.lr_scheduler=constant")


@pytest.mark.parametrize("choice", ["default", "dora"])
def test_training_moves_the_adapter_and_neither_base_nor_reference(
    tmp_path: Path, choice: str
) -> None:
    run = make(tmp_path, f"lora={choice}", *WORDS, noise=0.0)
    model = run.policy.model
    base, adapter = frozen(model), {n: t.clone() for n, t in lora.adapter_tensors(model).items()}
    batch = sampled(run)
    assert run.reference is not None and run.reference.model is model  # no second one
    micro = run.policy.pack(
        batch.groups, whole_group_slices(batch.groups, range(len(batch.groups)))
    )
    reply = run.reference.frozen_logp(micro).logp
    plain = Policy(
        load.load_causal_lm(run.config.model, run.config.model.path, run.world.device), 1.0
    )
    layouts.copy_layout(plain, run.policy)
    assert torch.equal(plain.frozen_logp(micro).logp, reply)
    updated(run, batch)
    for _ in range(3):
        step(run)
    assert same(base, frozen(model)) and not same(adapter, lora.adapter_tensors(model))
    assert torch.equal(run.reference.frozen_logp(micro).logp, reply)
    assert (run.policy.frozen_logp(micro).logp - reply).abs().max() > 1e-3
    assert run.log.metrics_lines[-1]["kl"] != 0
    assert all("lora_" in name for name in run.optimizer.names)


@pytest.mark.slow_but("a model that follows")
@pytest.mark.parametrize(
    "words",
    [("lora=dora", "model.ref_sync.every=2", "algorithm.num_minibatches=2"),
     ("model.ref_sync.every=1", "algorithm.num_minibatches=2")],
    ids=["an adapter, and one that follows it", "a model that follows"],
)  # fmt: skip
def test_a_run_that_is_stopped_goes_on_as_if_it_had_not_been(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    words = (*words, *WORDS, "max_steps=3")
    looks: list[int] = []
    assert attempt(tmp_path / "whole", *words, looks=looks, digits=digits)
    whole_run = left(tmp_path / "whole" / "smoke")
    times = len(looks)
    assert times > 40
    root = tmp_path / "parts"
    assert not attempt(root, *words, stop_at=2 * times // 3, digits=digits)
    assert attempt(root, *words, digits=digits)
    assert not differing(whole_run, left(root / "smoke"))


def test_checkpoints_hold_the_adapter_alone_and_the_end_both(tmp_path: Path) -> None:
    run = make(tmp_path, "lora=default", *WORDS, "max_steps=1", "checkpoint.every=1", noise=0.0)
    run_training_loop(run)
    run.saved_position = (0, -1)
    saved = save.save_checkpoint(run, raise_on_failure=True)
    assert saved is not None
    assert {p.name for p in saved.iterdir() if p.suffix != ".jinja"} == {
        lora.PEFT_CONFIG_FILE,
        lora.PEFT_WEIGHTS_FILE,
        "MANIFEST.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "trainer",
    }
    assert (
        len(load_file(saved / lora.PEFT_WEIGHTS_FILE)) == 28
    )  # two factors of seven layers of two
    about = json.loads((saved / lora.PEFT_CONFIG_FILE).read_text())
    assert about["base_model_name_or_path"]
    final = export.save_final(run.policy.model, run.tokenizer, run.folder)
    found = AutoModelForCausalLM.from_pretrained(final)
    run.policy.model.eval()
    with layouts.shared_attention.native_attention(run.policy.model):
        expected = run.policy.model(IDS).logits
    assert torch.allclose(found(IDS).logits, expected, atol=1e-5)
    assert (final / "adapter" / lora.PEFT_WEIGHTS_FILE).read_bytes() == (
        saved / lora.PEFT_WEIGHTS_FILE
    ).read_bytes()


def test_a_checkpoint_and_the_end_are_evaluated_as_they_were_in_the_run(tmp_path: Path) -> None:
    words = ("lora=default", "train.learning_rate=0.01", "eval.every=1", "eval.max_samples=4")
    assert attempt(tmp_path, *words, "max_steps=2", "checkpoint.every=1")
    run = tmp_path / "smoke"
    logged = {r["step"]: r for r in strict(run / "metrics.jsonl") if "eval_reward" in r}
    models = []
    for name, number in (("checkpoint-1", 1), ("final", 2)):
        subject = eval_target.eval_target_of_run(str(run / name), [])
        models.append((subject.config.model.path, subject.config.model.lora is not None))
        home = tmp_path / name
        home.mkdir()
        write_text(home / "config.yaml", yaml.safe_dump(check.dump_config(subject.config)))
        write_json(home / "about.json", subject.provenance)
        with mock.patch.dict(os.environ, RLOO_CACHE=cache()):
            found = worker.run_evaluation(home)
        assert found["eval_reward"] == pytest.approx(logged[number]["eval_reward"], rel=1e-6)
    assert models == [("make:tiny", True), (str(run / "final"), False)]
