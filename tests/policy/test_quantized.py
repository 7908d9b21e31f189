"""A base of few bits under an adapter: bitsandbytes computes them without a GPU too."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from loop_cases import make, step
from lora_cases import CPU, frozen, move, same
from transformers import AutoModelForCausalLM

from rloo_cli.data.packing import whole_group_slices
from rloo_cli.policy import layouts, lora, quantization
from rloo_cli.utils.errors import MachineError

pytest.importorskip("bitsandbytes", reason="there is no bitsandbytes (the extra quantization)")
pytestmark = pytest.mark.process  # only `make test-engines` installs what they need
WORDS = ("data.eval_split=null", "train.learning_rate=0.01", "train.lr_scheduler=constant")
IDS = torch.arange(5, 25)[None]


@pytest.mark.parametrize("words", [
    ("quantization=4bit", "lora=default"), ("quantization=8bit", "lora=default"),
    ("quantization=4bit", "lora=dora"),
], ids=" ".join)  # fmt: skip
def test_an_adapter_over_few_bits_learns_and_is_written_as_a_whole_model(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    run = make(tmp_path, *words, *WORDS, noise=0.0)
    model, reference = run.policy.model, run.reference
    bits = [m for m in model.modules() if quantization.is_quantized(m)]
    assert len(bits) == 14 and all(m.weight.dtype in (torch.uint8, torch.int8) for m in bits)
    learns = {n: p.dtype for n, p in model.named_parameters() if p.requires_grad}
    assert learns and all("lora_" in n for n in learns)
    assert set(learns.values()) == {torch.float32}
    before = frozen(model)
    assert run.layout_choice.layout == "shared" and reference is not None
    _, row, batch = step(run)
    micro = run.policy.pack(
        batch.groups, whole_group_slices(batch.groups, range(len(batch.groups)))
    )
    base = reference.frozen_logp(micro).logp
    _, row, _ = step(run)
    assert row["kl"] != 0 and same(frozen(model), before)
    assert torch.equal(reference.frozen_logp(micro).logp, base)
    move(model, 0.05)
    model.eval()
    with layouts.shared_attention.native_attention(model):
        expected = model(IDS).logits
    merged = lora.merged_model(model)
    assert not any(quantization.is_quantized(m) for m in merged.modules())
    merged.save_pretrained(tmp_path / "final")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    # 8 bits round what comes in too, which a whole model does not.
    close = 1e-4 if words[0] == "quantization=4bit" else 0.2
    assert (found(IDS).logits - expected).abs().max() < close * expected.abs().max()
    lora.save_adapter(model, tmp_path / "adapter")
    keys = run.config.model
    plain = lora.load.load_causal_lm(keys, keys.path, CPU).eval()
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")
    assert torch.allclose(theirs(IDS).logits, expected, atol=1e-4)


def test_a_package_that_does_not_load_is_an_error_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(name: str) -> Any:
        raise OSError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(quantization.importlib, "import_module", broken)
    with pytest.raises(MachineError, match="needs bitsandbytes"):
        quantization.quantized_load_options(None, torch.float32, CPU)  # type: ignore[arg-type]
