"""Tiny models of several families, their sampler, and prompts for it."""

import functools
from pathlib import Path

import tokenizers
import torch
import transformers
import yaml

from rloo_cli.config import registry
from rloo_cli.data.batch import Group
from rloo_cli.generation.hf import generator as hf_generator

WORDS = 40
PAD, EOS, END = 0, 1, 2
YAML = Path(__file__).parents[2] / "conf/generation/transformers.yaml"
SIZE = {
    "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 64, "initializer_range": 0.4,
    "bos_token_id": None, "eos_token_id": EOS, "pad_token_id": PAD, "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES = {
    "qwen3": lambda: transformers.Qwen3Config(**SIZE, num_key_value_heads=2, head_dim=8),
    "llama": lambda: transformers.LlamaConfig(**SIZE, num_key_value_heads=2),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SIZE),
    "gpt2": lambda: transformers.GPT2Config(
        **{k: v for k, v in SIZE.items() if k != "intermediate_size"}
    ),
    "mistral": lambda: transformers.MistralConfig(**SIZE, num_key_value_heads=2, sliding_window=5),
    "lfm2": lambda: transformers.Lfm2Config(  # convolutions: a cache that cannot be repeated
        **SIZE, num_key_value_heads=2, layer_types=["conv", "full_attention"]
    ),
}
PROMPTS = [[5, 6, 7, 8, 9, 10], [11], [12, 13, 14]]
SEEDS = [[1, 2, 3, 4], [5, 6], [7, 8, 9]]


@functools.cache
def make(name="qwen3"):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(FAMILIES[name]()).eval()


def tokenizer(**special):
    vocab = {"<pad>": PAD, "<eos>": EOS, "<end>": END} | {f"w{i}": i for i in range(3, WORDS)}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="w3"))
    special = {"eos_token": "<eos>", "pad_token": "<pad>"} | special
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, **special)


def config(batch_tokens=None, shared_prompt="auto", **changes):
    values = yaml.safe_load(YAML.read_text()) | {"max_completion_length": 12} | changes
    values["transformers"] = {"batch_tokens": batch_tokens, "shared_prompt": shared_prompt}
    return registry.config_class("generation", "transformers")(**values)


def generator(model, context=64, tokens=None, **changes):
    return hf_generator.TransformersGenerator(
        model, tokens or tokenizer(), config(**changes), context
    )


def sample(source, prompts, seeds, greedy=False):
    groups = [Group(i, {}, "", prompt) for i, prompt in enumerate(prompts)]
    source.generate(groups, seeds, greedy)
    return [group.rollouts for group in groups]


def ids(rollouts):
    return [[r.completion_ids for r in group] for group in rollouts]


def processed(model, prompt, completion):
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion])).logits[0].double()
    return logits[len(prompt) - 1 : -1]
