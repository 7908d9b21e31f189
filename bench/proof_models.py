"""The random models of `gpu_proof.py`'s rows, and a run's config on one of them."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_parts
import torch
import toys
from shapes import MATH, PYTHIA_1B, Shape
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    logging,
)

SEED = 1
SMALL = {"architecture": "qwen3", "hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2,
         "head_dim": 32, "mlp": 128, "vocabulary": 512, "tied": True}  # fmt: skip
QWEN_7B = {"architecture": "qwen2", "hidden": 3584, "layers": 28, "heads": 28, "kv_heads": 4,
           "head_dim": 128, "mlp": 18944, "vocabulary": 152064, "tied": False}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "tiny": SMALL,
    "kernel": SMALL | {"hidden": 256, "layers": 4, "heads": 8, "head_dim": 64, "mlp": 512},
    "0.1B": SMALL | {"hidden": 768, "layers": 12, "heads": 12, "kv_heads": 4, "head_dim": 64,
                     "mlp": 2304, "vocabulary": 32768},
    "odd": SMALL | {"hidden": 256, "layers": 4, "vocabulary": 32771},  # padded on two GPUs
    "1B": PYTHIA_1B,
    "1.5B": MATH,
    "7B": QWEN_7B,
    "moe tiny": SMALL | {"architecture": "qwen3_moe"},
    "moe": SMALL | {"architecture": "qwen3_moe", "hidden": 512, "layers": 4, "heads": 8,
                    "kv_heads": 4, "head_dim": 64, "vocabulary": 8192},
}  # fmt: skip


def shape_of(name: str) -> Shape:
    """A model as a workload of no prompts."""
    return Shape(name, name, **MODELS[name], prompt=(8, 24), completion=(8, 8), k=2, prompts=2)


def build(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    """Its random weights, the same each time."""
    shape = shape_of(name)
    if shape.architecture != "qwen3_moe":
        return gpu_parts.build(shape, device, dtype, SEED, 0.0)
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=shape.vocabulary, hidden_size=shape.hidden,
        intermediate_size=shape.mlp, moe_intermediate_size=shape.mlp, num_experts=4,
        num_experts_per_tok=2, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, norm_topk_prob=True,
        max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1,
        pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(SEED)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device, dtype)


def with_unknown(size: int) -> PreTrainedTokenizerFast:
    """`toys.tokenizer`, but the last id is any unknown word: a server is asked about some texts."""
    words = {"<pad>": toys.PAD, "<eos>": toys.EOS}
    words |= {f"t{i}": i for i in range(toys.FIRST, size - 1)} | {"<unk>": size - 1}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def write(model: Any, words: int, folder: Path, prompts: Sequence[Sequence[int]]) -> None:
    """Model, tokenizer and prompts to a folder, where `words_of` finds them."""
    logging.disable_progress_bar()
    model.save_pretrained(folder / "model")
    # in a folder of its own: beside a Qwen2, transformers would read it as Qwen2's
    with_unknown(words).save_pretrained(folder / "tokenizer")
    lines = [{"prompt": " ".join(f"t{i}" for i in ids)} for ids in prompts]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def words_of(folder: Path, length: int) -> list[str]:
    """The command line of a run on what `write` wrote. Completions have `length` tokens."""
    return [
        "+recipe=smoke",
        f"model.path={folder / 'model'}", f"model.tokenizer={folder / 'tokenizer'}",
        f"data.path={folder / 'prompts.jsonl'}", "data.eval_split=null", f"root={folder}",
        "name=run", "generation.ignore_eos=true", f"generation.max_completion_length={length}",
        "logging.console=plain", "logging.samples=0", "train.forward_all=true",
    ]  # fmt: skip


def tokenizer(folder: Path) -> Any:
    """The one that `write` wrote."""
    return AutoTokenizer.from_pretrained(folder / "tokenizer")


def prompts(shape: Shape, count: int) -> list[list[int]]:
    """Random ids of random lengths."""
    cases = gpu_parts.case(replace(shape, prompts=count, k=1), SEED)
    return [group.prompt_ids for group in cases.groups]
