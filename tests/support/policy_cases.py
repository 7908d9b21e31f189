"""Tiny models of several families, and groups to compare them on."""

import functools

import torch
import transformers

from rloo_cli.data.batch import Group, Rollout
from rloo_cli.data.packing import pack_micro_batch, whole_group_slices

WORDS = 40
SIZE = {
    "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 64, "initializer_range": 0.3,
    "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 3, "tie_word_embeddings": False,
}  # fmt: skip
SHORT = {k: v for k, v in SIZE.items() if k != "intermediate_size"}
FAMILIES = {
    "qwen3": lambda: transformers.Qwen3Config(**SIZE, num_key_value_heads=2, head_dim=8),
    "llama": lambda: transformers.LlamaConfig(**SIZE, num_key_value_heads=2),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SIZE),
    "gpt2": lambda: transformers.GPT2Config(**SHORT),  # absolute positions
    "gemma2": lambda: transformers.Gemma2Config(  # a cap on the logits, windows, scaled embeddings
        **SIZE, num_key_value_heads=2, head_dim=8, final_logit_softcapping=2.0, sliding_window=5
    ),
    "bloom": lambda: transformers.BloomConfig(**SHORT),  # alibi, takes no positions
    "falcon": lambda: transformers.FalconConfig(**SHORT, alibi=True),
    "opt": lambda: transformers.OPTConfig(**SHORT, ffn_dim=64, word_embed_proj_dim=32, dropout=0.0),
    "mamba": lambda: transformers.MambaConfig(  # no attention at all
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, initializer_range=0.3
    ),
}


@functools.cache
def make(name="qwen3"):
    """A random model, not to be changed: it is made once."""
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(FAMILIES[name]()).eval()


def fresh(name="qwen3", **changes):
    """A random model of one's own."""
    torch.manual_seed(0)
    config = FAMILIES[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    return transformers.AutoModelForCausalLM.from_config(config)


def rollout(ids, **values):
    """A completion with these ids."""
    return Rollout(list(ids), "", "stop", True, 0, 0, **values)


def groups():
    """Three groups of two: unequal lengths, completions of one token, ids that are pad and EOS."""
    rows = [
        ([5, 6, 7, 8, 9, 10], [[11, 12, 1], [13]]),
        ([0], [[0, 0, 14, 15, 16, 17, 18, 1], [0]]),
        ([20, 1, 21], [[22, 23], [1, 0, 24, 25]]),
    ]
    return [
        Group(i, {}, "", prompt, [rollout(ids) for ids in completions])
        for i, (prompt, completions) in enumerate(rows)
    ]


def alone(model, prompt, completion, temperature):
    """The textbook: one unpadded row, softmax over all its logits in float64. -> (T,), (T,)"""
    logits = model(torch.tensor([prompt + completion])).logits[0].double() / temperature
    logp = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(-1, torch.tensor(completion)[:, None]).squeeze(-1), entropy


def each_alone(model, chosen, temperature):
    """`alone` for every completion of the groups, in order. -> (N,), (N,)"""
    parts = [
        alone(model, g.prompt_ids, r.completion_ids, temperature)
        for g in chosen
        for r in g.rollouts
    ]
    return torch.cat([logp for logp, _ in parts]), torch.cat([entropy for _, entropy in parts])


def packed(chosen, index, masked=None, layout="padded"):
    """These groups with all their completions, laid out."""
    return pack_micro_batch(chosen, whole_group_slices(chosen, index), masked, layout=layout)
