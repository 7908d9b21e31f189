"""A random model, a byte tokenizer and a few prompts: what `+debug=cpu` puts in a recipe's place.

Nothing can be learned from it; everything can be run with it.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

from rloo_cli.data.synthetic.cache import cached_folder
from rloo_cli.utils.files import JsonObject

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # the smallest that vLLM has kernels for without a GPU
    "max_position_embeddings": 2048,
}
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
QUESTIONS = (
    "What is {a} + {b}?",
    "Write one sentence about the number {a}.",
    "Name {a} things that are blue.",
    "Summarise: {a} birds sat on a wire, {b} flew away.",
)


def tiny_examples(split: str) -> list[JsonObject]:
    """64 prompts to train on, 16 others to hold out; with the columns rewards usually read."""
    first, count = {"train": (0, 64), "test": (64, 16), "validation": (64, 16)}[split]
    return [_tiny_example(i) for i in range(first, first + count)]


def tiny_chat_examples(split: str) -> list[JsonObject]:
    """The same prompts as conversations."""
    return [
        r | {"prompt": [{"role": "user", "content": r["prompt"]}]} for r in tiny_examples(split)
    ]


def tiny_pair_examples(split: str) -> list[JsonObject]:
    """The same prompts with two answers: the right one is chosen."""
    return [
        {"prompt": r["prompt"], "chosen": r["answer"], "rejected": f"{r['answer']} or so, perhaps"}
        for r in tiny_examples(split)
    ]


def _tiny_example(i: int) -> JsonObject:
    a, b = 10 + i, 3 + i % 7
    prompt, answer = QUESTIONS[i % len(QUESTIONS)].format(a=a, b=b), str(a + b)
    names = ("answer", "ground_truth", "solution", "reference", "label")
    return {"prompt": prompt, "task": "debug", **dict.fromkeys(names, answer)}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, with a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<eos>"]
    plain = Tokenizer(models.BPE({t: i for i, t in enumerate(special + alphabet)}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>")
    made.chat_template = TEMPLATE
    return made


def tiny_model_folder() -> Path:
    """The folder of a random causal language model."""
    return cached_folder(
        "tiny", f"tiny-{SHAPE}-{TEMPLATE}", lambda folder: _make(folder, Qwen3ForCausalLM)
    )


def tiny_reward_model_folder() -> Path:
    """The folder of a random reward model: a classifier with one label, the same tokenizer."""
    make = lambda folder: _make(folder, Qwen3ForSequenceClassification)  # noqa: E731
    return cached_folder("tiny-reward", f"tiny-reward-{SHAPE}-{TEMPLATE}", make)


def _make(folder: Path, kind: Any) -> None:
    tokens = tiny_tokenizer()
    ends = {"bos_token_id": None, "eos_token_id": tokens.eos_token_id}
    config = Qwen3Config(
        vocab_size=len(tokens), num_labels=1, pad_token_id=tokens.pad_token_id, **ends, **SHAPE
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        kind(config).save_pretrained(folder)
    tokens.save_pretrained(folder)
