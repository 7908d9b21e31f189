"""config.json of well-known models, as far as a plan reads it: for machines where none lies."""

from typing import Any

Values = dict[str, Any]


def _qwen2(h: int, layers: int, heads: int, kv: int, mlp: int, tied: bool, v: int) -> Values:
    return {
        "model_type": "qwen2", "hidden_size": h, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "intermediate_size": mlp,
        "vocab_size": v, "tie_word_embeddings": tied, "max_position_embeddings": 32768,
    }  # fmt: skip


def _neox(h: int, layers: int, heads: int, vocabulary: int = 50304) -> Values:
    return {
        "model_type": "gpt_neox", "hidden_size": h, "num_hidden_layers": layers,
        "num_attention_heads": heads, "intermediate_size": 4 * h, "vocab_size": vocabulary,
        "tie_word_embeddings": False, "max_position_embeddings": 2048,
    }  # fmt: skip


def _llama(h: int, layers: int, heads: int, mlp: int) -> Values:
    return {
        "model_type": "llama", "hidden_size": h, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": 8, "intermediate_size": mlp,
        "vocab_size": 128256, "tie_word_embeddings": False, "max_position_embeddings": 131072,
    }  # fmt: skip


SMALL, LARGE = 151936, 152064
HALF, ONE_AND_HALF = _qwen2(896, 24, 14, 2, 4864, True, SMALL), _qwen2(
    1536, 28, 12, 2, 8960, True, SMALL
)  # fmt: skip
SEVEN = _qwen2(3584, 28, 28, 4, 18944, False, LARGE)
SEVENTY_TWO = _qwen2(8192, 80, 64, 8, 29568, False, LARGE)
PYTHIA_1B, PYTHIA_7B = _neox(2048, 16, 8), _neox(4096, 32, 32, 50432)
MODELS: dict[str, Values] = {
    "Qwen/Qwen2-0.5B": HALF, "Qwen/Qwen2-0.5B-Instruct": HALF,
    "Qwen/Qwen2.5-0.5B": HALF, "Qwen/Qwen2.5-0.5B-Instruct": HALF,
    "Qwen/Qwen2.5-Coder-0.5B": HALF,
    "Qwen/Qwen2.5-1.5B": ONE_AND_HALF, "Qwen/Qwen2.5-1.5B-Instruct": ONE_AND_HALF,
    "Qwen/Qwen2.5-Math-1.5B": ONE_AND_HALF | {"max_position_embeddings": 4096},
    "Qwen/Qwen2.5-7B": SEVEN, "Qwen/Qwen2.5-7B-Instruct": SEVEN,
    "Qwen/Qwen2.5-72B": SEVENTY_TWO, "Qwen/Qwen2.5-72B-Instruct": SEVENTY_TWO,
    "EleutherAI/pythia-1b": PYTHIA_1B, "EleutherAI/pythia-1b-deduped": PYTHIA_1B,
    "EleutherAI/pythia-6.9b": PYTHIA_7B, "EleutherAI/pythia-6.9b-deduped": PYTHIA_7B,
    "meta-llama/Llama-3.1-8B": _llama(4096, 32, 32, 14336),
    "meta-llama/Llama-3.1-8B-Instruct": _llama(4096, 32, 32, 14336),
    "meta-llama/Llama-3.1-70B": _llama(8192, 80, 64, 28672),
    "meta-llama/Llama-3.1-70B-Instruct": _llama(8192, 80, 64, 28672),
}  # fmt: skip
for _size, _values in (("1b", PYTHIA_1B), ("6.9b", PYTHIA_7B)):
    for _kind in ("sft", "reward"):
        MODELS[f"cleanrl/EleutherAI_pythia-{_size}-deduped__{_kind}__tldr"] = _values


def _made(
    h: int, layers: int, heads: int, kv: int, mlp: int, v: int, places: int, tied: bool
) -> Values:
    return {
        "model_type": "qwen3", "hidden_size": h, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": 32,
        "intermediate_size": mlp, "vocab_size": v, "tie_word_embeddings": tied,
        "max_position_embeddings": places,
    }  # fmt: skip


# What `rloo_cli.config.synthetic` makes, which is not made to be planned (a test compares the two).
TINY, TLDR = _made(64, 2, 2, 1, 128, 258, 2048, False), _made(96, 3, 3, 3, 256, 110, 128, True)
MADE: dict[str, Values] = {
    "addition": _made(128, 3, 4, 2, 384, 14, 64, True), "tiny": TINY, "tiny_reward": TINY,
    "tldr_base": TLDR, "tldr_sft": TLDR, "tldr_reward": TLDR,
}  # fmt: skip
