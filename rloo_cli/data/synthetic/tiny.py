"""A random model, a byte tokenizer and a few prompts, which `+debug=cpu` puts in a recipe.

Nothing can be learned from them; everything can be run with them. The examples alone need no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rloo_cli.data.cache import cached_folder
from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

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
    """64 prompts to train on, or 16 others; with the columns that rewards usually read."""
    first, count = {"train": (0, 64), "test": (64, 16), "validation": (64, 16)}[split]
    return [_tiny_example(i) for i in range(first, first + count)]


def tiny_chat_examples(split: str) -> list[JsonObject]:
    """The same prompts as conversations."""
    examples = tiny_examples(split)
    return [e | {"prompt": [{"role": "user", "content": e["prompt"]}]} for e in examples]


def tiny_pair_examples(split: str) -> list[JsonObject]:
    """The same prompts with two answers: the right one is chosen."""
    return [
        {"prompt": e["prompt"], "chosen": e["answer"], "rejected": f"{e['answer']} or so, perhaps"}
        for e in tiny_examples(split)
    ]


def _tiny_example(i: int) -> JsonObject:
    a, b = 10 + i, 3 + i % 7
    prompt, answer = QUESTIONS[i % len(QUESTIONS)].format(a=a, b=b), str(a + b)
    names = ("answer", "ground_truth", "solution", "reference", "label")
    return {"prompt": prompt, "task": "debug", **dict.fromkeys(names, answer)}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte, and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<eos>"]
    plain = Tokenizer(models.BPE({t: i for i, t in enumerate(special + alphabet)}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = TEMPLATE
    return fast


def tiny_model_folder() -> Path:
    """The folder of a random causal language model."""
    from transformers import Qwen3ForCausalLM

    return _cached_model("tiny", Qwen3ForCausalLM)


def tiny_reward_model_folder() -> Path:
    """The folder of a random reward model: a classifier with one label, the same tokenizer."""
    from transformers import Qwen3ForSequenceClassification

    return _cached_model("tiny-reward", Qwen3ForSequenceClassification)


def _cached_model(name: str, model_class: type[PreTrainedModel]) -> Path:
    import torch
    from transformers import Qwen3Config

    def make(folder: Path) -> None:
        tokenizer = tiny_tokenizer()
        config = Qwen3Config(
            vocab_size=len(tokenizer), num_labels=1, bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, **SHAPE,
        )  # fmt: skip
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model_class(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return cached_folder(name, f"{name}-{SHAPE}-{TEMPLATE}", make)
