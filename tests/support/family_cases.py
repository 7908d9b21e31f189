"""Tiny configs of the families of transformers, and whether a prompt may be shared in them."""

import transformers
from policy_cases import SHORT, SIZE

GROUPED = SIZE | {"num_key_value_heads": 2}
HEADS = GROUPED | {"head_dim": 8}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
OPT = SHORT | {"ffn_dim": 64, "word_embed_proj_dim": 32}
RECURRENT = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2}
T = transformers
PASSES = {
    "llama": lambda: T.LlamaConfig(**GROUPED),
    "mistral": lambda: T.MistralConfig(**GROUPED, sliding_window=None),
    "mixtral": lambda: T.MixtralConfig(
        **GROUPED, num_local_experts=2, num_experts_per_tok=1, sliding_window=None
    ),
    "qwen2": lambda: T.Qwen2Config(**GROUPED),  # says sliding_window 4096, and not to use it
    "qwen3": lambda: T.Qwen3Config(**HEADS),
    "qwen3_moe": lambda: T.Qwen3MoeConfig(**HEADS, **EXPERTS),
    "gemma": lambda: T.GemmaConfig(**HEADS),
    "phi": lambda: T.PhiConfig(**GROUPED),
    "phi3": lambda: T.Phi3Config(**GROUPED, sliding_window=None),
    "olmo2": lambda: T.Olmo2Config(**GROUPED),
    "gpt_neox": lambda: T.GPTNeoXConfig(**SIZE),
    "gpt2": lambda: T.GPT2Config(**SHORT),
    "opt": lambda: T.OPTConfig(**OPT),
    "smollm3": lambda: T.SmolLM3Config(**GROUPED),
    "granite": lambda: T.GraniteConfig(**GROUPED),
    "cohere": lambda: T.CohereConfig(**GROUPED),
    "glm": lambda: T.GlmConfig(**HEADS),
    "glm4": lambda: T.Glm4Config(**HEADS),
    "starcoder2": lambda: T.Starcoder2Config(**GROUPED, sliding_window=None),
    "ernie4_5": lambda: T.Ernie4_5Config(**HEADS),
    "nemotron": lambda: T.NemotronConfig(**GROUPED),  # passes, and never asks our function
}
TWO = {"layer_types": ["sliding_attention", "full_attention"]}
REFUSED = {  # and a part of the reason
    "mistral": (lambda: T.MistralConfig(**GROUPED, sliding_window=5), "sliding window of 5"),
    "mixtral": (lambda: T.MixtralConfig(
        **GROUPED, num_local_experts=2, num_experts_per_tok=1, sliding_window=5
    ), "sliding window of 5"),
    "phi3": (lambda: T.Phi3Config(**GROUPED, sliding_window=5), "sliding window of 5"),
    "qwen2": (lambda: T.Qwen2Config(
        **GROUPED, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ), "sliding window of 5"),
    "gemma2": (lambda: T.Gemma2Config(**HEADS, sliding_window=5), "sliding window of 5"),
    "gemma3": (lambda: T.Gemma3TextConfig(**HEADS, sliding_window=5, **TWO), "sliding window of 5"),
    "olmo3": (lambda: T.Olmo3Config(**GROUPED, sliding_window=5, **TWO), "sliding window of 5"),
    "cohere2": (lambda: T.Cohere2Config(**GROUPED, sliding_window=5, **TWO), "window of 5"),
    "exaone4": (lambda: T.Exaone4Config(**GROUPED, sliding_window=5, **TWO), "window of 5"),
    "stablelm": (lambda: T.StableLmConfig(**GROUPED), "do not pass arguments on"),
    "gptj": (lambda: T.GPTJConfig(**SHORT, rotary_dim=8), "cannot be set"),
    "gpt_neo": (lambda: T.GPTNeoConfig(
        **RECURRENT, num_heads=4, attention_types=[[["global", "local"], 1]]
    ), "cannot be set"),
    "bloom": (lambda: T.BloomConfig(**SHORT), "cannot be set"),
    "falcon": (lambda: T.FalconConfig(**SHORT), "cannot be set"),
    "mpt": (lambda: T.MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=40), "cannot be set"),
    "gpt_oss": (lambda: T.GptOssConfig(**HEADS, num_local_experts=2, num_experts_per_tok=1),
        "sliding window of 128"),
    "mamba": (lambda: T.MambaConfig(**RECURRENT), "keep a state"),
    "mamba2": (lambda: T.Mamba2Config(
        **RECURRENT, num_heads=8, head_dim=8, n_groups=1, state_size=8
    ), "keep a state"),
    "jamba": (lambda: T.JambaConfig(
        **GROUPED, num_experts=2, num_experts_per_tok=1, attn_layer_offset=1, attn_layer_period=2,
        use_mamba_kernels=False,
    ), "keep a state"),
    "bamba": (lambda: T.BambaConfig(
        **GROUPED, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8,
        mamba_n_groups=1,
    ), "keep a state"),
    "falcon_h1": (lambda: T.FalconH1Config(
        **HEADS, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1
    ), "keep a state"),
    "qwen3_next": (lambda: T.Qwen3NextConfig(
        **HEADS, **EXPERTS, layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8,
    ), "keep a state"),
    "lfm2": (lambda: T.Lfm2Config(**GROUPED, layer_types=["conv", "full_attention"]),
        "not full attention (conv)"),
    "recurrent_gemma": (lambda: T.RecurrentGemmaConfig(
        **HEADS, lru_width=32, block_types=["recurrent", "attention"]
    ), "keep a state"),
    "rwkv": (lambda: T.RwkvConfig(**RECURRENT, attention_hidden_size=32), "keep a state"),
    "minimax": (lambda: T.MiniMaxConfig(
        **HEADS, num_local_experts=2, num_experts_per_tok=1,
        layer_types=["linear_attention", "full_attention"],
    ), "not full attention (linear_attention)"),
}  # fmt: skip
