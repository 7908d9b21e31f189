"""A workload's random model, its tokenizer and its prompts, in a folder that both tools read.

The tokenizer has one word per id, `t2` to `t8191`: a prompt's text says exactly which ids it is, so
neither tool can come to other ones.
"""

import json
from pathlib import Path
from typing import Any

import torch
from shapes import Shape
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    logging,
)

PAD, EOS, FIRST = 0, 1, 2
STEPS = 16  # steps until the prompts come round again


def write(shape: Shape, folder: Path, seed: int) -> None:
    """Model and tokenizer to `folder`/model, prompts to `folder`/prompts.jsonl."""
    logging.disable_progress_bar()
    torch.manual_seed(seed)
    model = random_model(shape)
    model.save_pretrained(folder / "model")
    tokenizer(shape.vocabulary).save_pretrained(folder / "model")
    drawn = torch.Generator().manual_seed(seed + 1)
    low, high = shape.prompt
    lines = []
    for _ in range(STEPS * shape.prompts):
        length = int(torch.randint(low, high + 1, (), generator=drawn))
        ids = torch.randint(FIRST, shape.vocabulary, (length,), generator=drawn).tolist()
        lines.append(json.dumps({"prompt": " ".join(f"t{i}" for i in ids)}) + "\n")
    (folder / "prompts.jsonl").write_text("".join(lines))


def random_model(shape: Shape) -> Any:
    """The model with random weights, in float32."""
    common = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": max(1024, shape.prompt[1] + shape.completion[1]),
        "tie_word_embeddings": shape.tied,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    if shape.architecture == "gpt_neox":
        return GPTNeoXForCausalLM(GPTNeoXConfig(**common))
    heads = {"num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim}
    return Qwen3ForCausalLM(Qwen3Config(**common, **heads))


def tokenizer(size: int) -> PreTrainedTokenizerFast:
    """A word per id. An unknown word is an error. No special token begins a word: they are looked
    for inside of words too.
    """
    words = {"<pad>": PAD, "<eos>": EOS} | {f"t{i}": i for i in range(FIRST, size)}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token=None
    )
