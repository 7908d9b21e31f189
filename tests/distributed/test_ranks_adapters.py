"""Two ranks train an adapter as one process does, whatever engine keeps the weights, and either
goes on where the other stopped."""

import contextlib
from pathlib import Path

import pytest
import torch
from cli_cases import Rloo, strict
from fork_cases import Forked
from lora_cases import CPU
from resume_cases import untimed
from safetensors.torch import load_file
from test_ranks import PLAIN, WORDS, rates, spread
from transformers import AutoModelForCausalLM

from rloo_cli.config import check
from rloo_cli.policy import lora
from rloo_cli.utils.files import read_json

pytestmark = pytest.mark.ranks

LORA = ("lora=default",)
BEGIN = 3  # the step whose checkpoint is gone on from


@pytest.fixture(scope="module")
def home(fast, tmp_path_factory):
    return Forked(fast, tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def single(home):
    """One process, undisturbed."""
    assert home(*WORDS, *LORA, "name=single") == 0, home.said()
    return home.folder / "runs" / "single"


def beginning(run: Path) -> dict[str, torch.Tensor]:
    """The adapter that a run began with."""
    config = check.read_config(run / "config.yaml")
    with contextlib.chdir(run.parents[1]):  # an adapter's path may be relative
        model = lora.load_trained_model(config.model, None, CPU, config.seed)
    return lora.adapter_tensors(model)


def adapters_apart(one: Path, other: Path) -> float:
    """The largest relative difference of two runs' whole updates of an adapter, over tensors."""
    begin = beginning(one)
    file = Path("final", "adapter", "adapter_model.safetensors")
    a, b = load_file(one / file), load_file(other / file)
    assert a.keys() == b.keys() == begin.keys()
    assert {t.dtype for t in b.values()} == {torch.float32}
    return max(float((a[n] - b[n]).norm() / (a[n] - begin[n]).norm()) for n in a)


@pytest.fixture(scope="module", params=["fsdp2", pytest.param("zero3", marks=pytest.mark.slow)])
def pair(request, home):
    """Two ranks, undisturbed."""
    words = [*WORDS, *LORA, f"name={request.param}", *spread(request.param)]
    assert home(*words, ranks=2) == 0, home.said()
    return home.folder / "runs" / request.param


@pytest.mark.slow_but("zero3")
def test_two_ranks_make_the_adapter_of_one_process(single, pair):
    assert adapters_apart(single, pair) < 1e-4
    assert (pair / "ledger.jsonl").read_text() == (single / "ledger.jsonl").read_text()
    assert rates(pair) == rates(single)
    file = Path("final", "adapter", "adapter_config.json")
    assert read_json(pair / file) == read_json(single / file)


def test_the_final_model_is_whole_and_has_the_adapter_merged(single, pair):
    one, two = (load_file(run / "final" / "model.safetensors") for run in (single, pair))
    assert one.keys() == two.keys()
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    loaded = AutoModelForCausalLM.from_pretrained(pair / "final")
    ids = torch.arange(20, 40)[None]
    ours = lora.load_trained_model(
        check.read_config(pair / "config.yaml").model, pair / "checkpoint-5", CPU, 1
    )
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, ours(ids).logits, rtol=1e-4, atol=1e-4)


def test_the_metrics_of_two_ranks_are_those_of_one(single, pair):
    for one, two in zip(
        strict(single / "metrics.jsonl"), strict(pair / "metrics.jsonl"), strict=True
    ):
        for name in ("kl", "reward", "update/grad_norm", "grad_norm", "sampling/logp_diff_max"):
            if name in (found := untimed(one)):
                assert two[name] == pytest.approx(found[name], rel=1e-3, abs=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_of_two_ranks_goes_on_with_one_and_with_two(home, pair, ranks):
    kept = pair / f"checkpoint-{BEGIN}"
    assert not (kept / "model.safetensors").exists()
    assert (kept / "adapter_model.safetensors").is_file()
    again = f"{pair.name}_on_{ranks}"
    where = ["distributed=single"] if ranks == 1 else spread(pair.name)
    came = f"resume=runs/{pair.name}/checkpoint-{BEGIN}"
    words = [*WORDS, *LORA, f"name={again}", came, *where]
    assert home(*words, ranks=ranks - 1 and 2) == 0, home.said()
    assert adapters_apart(pair, home.folder / "runs" / again) < 1e-4


@pytest.mark.slow
def test_a_checkpoint_of_one_process_goes_on_with_two_ranks(home, single, pair):
    again = f"single_on_{pair.name}"
    came = f"resume=runs/single/checkpoint-{BEGIN}"
    words = [*WORDS, *LORA, f"name={again}", came, *spread(pair.name)]
    assert home(*words, ranks=2) == 0, home.said()
    assert adapters_apart(single, home.folder / "runs" / again) < 1e-4


@pytest.fixture(scope="module")
def plain(home):
    """One process, by plain gradient descent."""
    assert home(*PLAIN, *LORA, "train.learning_rate=0.1", "name=plain") == 0, home.said()
    return home.folder / "runs" / "plain"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["OFT", "IA3"])
def test_two_ranks_of_ddp_make_an_adapter_of_another_kind_as_one_process_does(home, kind):
    arguments = {"OFT": "{oft_block_size:4}", "IA3": "{}"}[kind]
    words = [*PLAIN, "lora=peft", f"model.lora.peft_type={kind}", f"model.lora.kwargs={arguments}"]
    words.append("train.learning_rate=0.1")
    assert home(*words, f"name={kind}") == 0, home.said()
    assert home(*words, f"name=two_{kind}", *spread("ddp"), ranks=2) == 0, home.said()
    assert adapters_apart(home.folder / "runs" / kind, home.folder / "runs" / f"two_{kind}") < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
def test_sampling_masks_go_with_an_adapter_and_with_two_ranks(home, engine):
    masks = ("generation.top_p=0.5", "generation.return_sampling_mask=true")
    words = [*PLAIN, *LORA, *masks, "train.learning_rate=0.1"]
    runs = home.folder / "runs"
    if not (runs / "masked").exists():
        assert home(*words, "name=masked") == 0, home.said()
    assert home(*words, f"name=masked_{engine}", *spread(engine), ranks=2) == 0, home.said()
    assert adapters_apart(runs / "masked", runs / f"masked_{engine}") < 1e-4
    for row in strict(runs / f"masked_{engine}" / "metrics.jsonl"):
        assert row.get("sampling/logp_diff_max", 0) < 1e-4  # renormalized over what was kept


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp2", "zero3", "zero2", "ddp"])
def test_gradients_of_an_adapter_are_as_large_as_those_of_one_process(home, plain, engine):
    words = [*PLAIN, *LORA, "train.learning_rate=0.1", f"name=plain_{engine}", *spread(engine)]
    assert home(*words, ranks=2) == 0, home.said()
    assert adapters_apart(plain, home.folder / "runs" / f"plain_{engine}") < 1e-4


KINDS = {
    "DoRA": ("lora=dora",),
    "rank-stabilised": ("model.lora.use_rslora=true",),
    "whole layers": ("model.lora.modules_to_save=[lm_head]", "++model.init_kwargs={}"),
    "a second adapter as reference": ("model.lora.path=runs/single/final/adapter",),
    "a second model as reference": ("model.ref_path=make:tiny",),
    "recomputed": ("model.gradient_checkpointing=true",),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_adapter_is_trained_as_by_one_process(home, single, kind, engine):
    words = [*WORDS, *LORA, *KINDS[kind], "max_steps=2", "eval.at_start=false"]
    one, two = (f"{kind}-{engine}-{n}".replace(" ", "_") for n in (1, 2))
    assert home(*words, f"name={one}") == 0, home.said()
    assert home(*words, f"name={two}", *spread(engine), ranks=2) == 0, home.said()
    runs = home.folder / "runs"
    assert adapters_apart(runs / one, runs / two) < 2e-4


HALF = ("model.dtype=bfloat16", "max_steps=2", "eval.at_start=false")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
def test_an_adapter_over_half_precision_is_saved_and_gone_on_from(home, engine):
    words = [*WORDS, *LORA, *HALF, "checkpoint.every=1"]
    one, two, again = (f"half-{engine}-{n}" for n in (1, 2, 3))
    runs = home.folder / "runs"
    assert home(*words, f"name={one}") == 0, home.said()
    assert home(*words, f"name={two}", *spread(engine), ranks=2) == 0, home.said()
    came = [f"name={again}", f"resume=runs/{two}/checkpoint-1"]
    assert home(*words, *came, *spread(engine), ranks=2) == 0, home.said()
    file = Path("final", "adapter", "adapter_model.safetensors")
    a, b, c = (load_file(runs / name / file) for name in (one, two, again))
    for name, tensor in a.items():
        for other in (b, c):  # bfloat16 has 8 bits
            torch.testing.assert_close(other[name].float(), tensor.float(), atol=4e-3, rtol=2e-2)
    models = [load_file(runs / name / "final" / "model.safetensors") for name in (one, two)]
    assert {t.dtype for m in models for t in m.values()} == {torch.bfloat16}
    torch.testing.assert_close(*models, atol=1e-2, rtol=2e-2)


def test_shards_that_would_be_reduced_in_two_dtypes_are_refused_with_the_way_out(home):
    words = [*WORDS, *LORA, *HALF, "model.lora.modules_to_save=[lm_head]", "name=mixed"]
    assert home(*words, "distributed=fsdp2") == 2
    said = home.said()
    assert "model.lora.modules_to_save" in said and "bfloat16 and float32" in said, said
    assert "model.dtype=float32, or distributed=zero2" in said


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
def test_vllm_samples_with_the_adapter_that_is_gathered_from_shards(rloo: Rloo, engine: str):
    words = ["train", "+recipe=smoke", "lora=default", "train.learning_rate=1e-2", "max_steps=3"]
    words += ["generation=vllm_server", "eval.at_start=false", "data.eval_split=null"]
    words += ["distributed.threads=1", *spread(engine)]
    said = rloo.real(*words, timeout=500)
    assert said.code == 0, said.said
    run = rloo.folder / "runs" / "smoke"
    rows = [r for r in strict(run / "metrics.jsonl") if "loss" in r]
    assert [r["vllm/weight_version"] for r in rows] == [0, 1, 2]
    # Trainer and engine agree on every sampled token, also once the adapter has moved.
    assert max(r["sampling/logp_diff_max"] for r in rows) < 1e-3
    begin, end = beginning(run), load_file(run / "final/adapter/adapter_model.safetensors")
    assert max(float((end[n] - begin[n]).abs().max()) for n in end) > 1e-2
    whole = load_file(run / "final" / "model.safetensors")
    sent = rows[-1]["vllm/synced_bytes"]
    assert (
        0 < sent == sum(t.numel() * 4 for t in end.values()) < sum(t.nbytes for t in whole.values())
    )
