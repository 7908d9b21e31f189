"""Shapes of the tensors in one layer of a language model, by its `model_type`.

It maps the keys of a config.json to the linear layers of a decoder layer, its biases and norms, and
to what autograd keeps per token, which was read in transformers 5.19 and compared with what
`saved_tensors_hooks` counts (tests/planning/test_plan_facts.py).
"""

from collections.abc import Callable
from typing import NamedTuple

from rloo_cli.utils.files import JsonObject

Linear = tuple[str, int, int]  # name, in, out


class ModelSizes(NamedTuple):
    """The numbers of a config.json, under one name each."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    vocab_size: int
    position_rows: int  # learned position embeddings; 0 = none
    experts: int  # 0 = no mixture
    experts_per_token: int
    shared_expert_width: int  # width of the expert that every token goes to; 0 = none

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


class ModelFamily(NamedTuple):
    """How the models of some `model_type` are built."""

    linears: Callable[[ModelSizes], list[Linear]]  # of the attention and of the dense MLP
    bias: tuple[str, ...] = ()  # names of the linears with a bias; ("all",) = every one
    norms: int = 2  # norms of a layer over the hidden size
    uses_layer_norm: bool = False  # LayerNorm (a weight and a bias) instead of RMSNorm
    qk_norm: str = ""  # "head": over a head; "whole": over all heads together
    tied: bool = False  # whether the embeddings are tied if config.json does not say
    layout: str = "shared"  # the fastest that computes the model's own numbers (README, Fast)
    gated: bool = True
    extra_saved: float = 0.0  # further hidden-sized tensors that autograd keeps per token
    activation_tensors: int = 2  # kept tensors of the MLP's width around its activation
    float32_norms: bool = False  # norms are computed in float32 up to the weight


def _llama(s: ModelSizes) -> list[Linear]:
    return [
        ("q_proj", s.hidden, s.q_width),
        ("k_proj", s.hidden, s.kv_width),
        ("v_proj", s.hidden, s.kv_width),
        ("o_proj", s.q_width, s.hidden),
        ("gate_proj", s.hidden, s.mlp_width),
        ("up_proj", s.hidden, s.mlp_width),
        ("down_proj", s.mlp_width, s.hidden),
    ]


def _phi3(s: ModelSizes) -> list[Linear]:
    return [
        ("qkv_proj", s.hidden, s.q_width + 2 * s.kv_width), ("o_proj", s.q_width, s.hidden),
        ("gate_up_proj", s.hidden, 2 * s.mlp_width), ("down_proj", s.mlp_width, s.hidden),
    ]  # fmt: skip


def _neox(s: ModelSizes) -> list[Linear]:
    return [
        ("query_key_value", s.hidden, 3 * s.q_width), ("dense", s.q_width, s.hidden),
        ("dense_h_to_4h", s.hidden, s.mlp_width), ("dense_4h_to_h", s.mlp_width, s.hidden),
    ]  # fmt: skip


def _gpt2(s: ModelSizes) -> list[Linear]:
    return [
        ("c_attn", s.hidden, 3 * s.q_width), ("c_proj", s.q_width, s.hidden),
        ("c_fc", s.hidden, s.mlp_width), ("mlp.c_proj", s.mlp_width, s.hidden),
    ]  # fmt: skip


def _plain_tower(s: ModelSizes) -> list[Linear]:
    return [
        ("q_proj", s.hidden, s.q_width), ("k_proj", s.hidden, s.kv_width),
        ("v_proj", s.hidden, s.kv_width), ("o_proj", s.q_width, s.hidden),
        ("fc1", s.hidden, s.mlp_width), ("fc2", s.mlp_width, s.hidden),
    ]  # fmt: skip


# Layers of vision towers: Qwen2.5-VL's are gated and have RMSNorm, the others' are neither.
VISION_GATED = ModelFamily(_llama, ("all",))
VISION_PLAIN = ModelFamily(
    _plain_tower, ("all",), uses_layer_norm=True, gated=False, activation_tensors=3
)
LLAMA = ModelFamily(_llama)
FAMILIES = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "granite": LLAMA,
    "mixtral": LLAMA,
    "smollm3": ModelFamily(_llama, tied=True),
    "qwen2": ModelFamily(_llama, bias=("q_proj", "k_proj", "v_proj")),
    "qwen2_vl_text": ModelFamily(_llama, bias=("q_proj", "k_proj", "v_proj")),
    "qwen2_5_vl_text": ModelFamily(_llama, bias=("q_proj", "k_proj", "v_proj")),
    "qwen2_moe": ModelFamily(_llama, bias=("q_proj", "k_proj", "v_proj")),
    "qwen3": ModelFamily(_llama, qk_norm="head"),
    "qwen3_moe": ModelFamily(_llama, qk_norm="head"),
    "gemma": ModelFamily(_llama, tied=True, float32_norms=True),
    "gemma2": ModelFamily(_llama, norms=4, tied=True, layout="packed", float32_norms=True),
    "olmo2": ModelFamily(_llama, qk_norm="whole", float32_norms=True),
    "phi3": ModelFamily(_phi3, extra_saved=1.0),
    "gpt_neox": ModelFamily(_neox, ("all",), uses_layer_norm=True, gated=False, extra_saved=1.0),
    "gpt2": ModelFamily(
        _gpt2, ("all",), uses_layer_norm=True, tied=True, layout="packed", gated=False,
        extra_saved=0.5, activation_tensors=5,
    ),
}  # fmt: skip
FUSED_LINEARS = ("query_key_value", "qkv_proj")  # the values keep the whole output alive


def merge_text_config(values: JsonObject) -> JsonObject:
    """The values of a config.json, with those of the language model of a larger one on top."""
    text = values.get("text_config")
    return {**values, **text} if isinstance(text, dict) else values


def read_model_sizes(values: JsonObject) -> ModelSizes:
    """The numbers of a config.json. Raises KeyError for a missing one."""
    c = merge_text_config(values)

    def get(*names: str, default: int | None = None) -> int:
        for name in names:
            if isinstance(c.get(name), int) and not isinstance(c.get(name), bool):
                return int(c[name])
        if default is None:
            raise KeyError(names[0])
        return default

    hidden, heads = get("hidden_size", "n_embd"), get("num_attention_heads", "n_head")
    experts = get("num_local_experts", "num_experts", default=0)
    mlp = get("intermediate_size", "n_inner", default=4 * hidden)
    learned = c.get("model_type") in ("gpt2", "opt")
    return ModelSizes(
        layers=get("num_hidden_layers", "n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=get("num_key_value_heads", default=heads),
        head_dim=get("head_dim", default=hidden // heads),
        mlp_width=get("moe_intermediate_size", default=mlp) if experts else mlp,
        vocab_size=get("vocab_size"),
        position_rows=get("max_position_embeddings", "n_positions", default=1024) if learned else 0,
        experts=experts,
        experts_per_token=get("num_experts_per_tok", default=2) if experts else 0,
        shared_expert_width=get("shared_expert_intermediate_size", default=0) if experts else 0,
    )


def layer_param_counts(
    family: ModelFamily, s: ModelSizes, attention_bias: bool, mlp_bias: bool
) -> tuple[int, int]:
    """Parameters of one layer: all, and those that one token uses."""
    linears = family.linears(s)
    outer = [
        x for x in linears if not s.experts or "o_proj" in x[0] or x[2] in (s.q_width, s.kv_width)
    ]
    dense = [x for x in linears if not s.experts] or outer[:4]
    biased = set(family.bias)
    biased |= {"q_proj", "k_proj", "v_proj", "o_proj"} if attention_bias else set()
    biased |= {"gate_proj", "up_proj", "down_proj"} if mlp_bias else set()
    count = sum(i * o + (o if {name, "all"} & biased else 0) for name, i, o in dense)
    count += family.norms * s.hidden * (2 if family.uses_layer_norm else 1)
    count += {"head": 2 * s.head_dim, "whole": s.q_width + s.kv_width}.get(family.qk_norm, 0)
    if not s.experts:
        return count, count
    expert, always = 3 * s.hidden * s.mlp_width, s.hidden * s.experts  # `always`: the router
    if s.shared_expert_width:
        always += 3 * s.hidden * s.shared_expert_width + s.hidden
    return count + always + s.experts * expert, count + always + s.experts_per_token * expert


def saved_bytes_per_token(family: ModelFamily, s: ModelSizes, bytes_per_weight: int) -> float:
    """Bytes that autograd keeps per token of a layer, with `bytes_per_weight`.

    RMSNorm in half precision keeps its input in float32, its result before and after the weight.
    """
    size, names = bytes_per_weight, {name for name, _, _ in family.linears(s)}
    norm = float(4 * 2 + size if family.float32_norms else 4 + size * 2)
    if family.uses_layer_norm:
        norm = 2.0 * size
    elif size == 4:
        norm = 12.0
    kept = norm * s.hidden * family.norms
    if family.uses_layer_norm and "query_key_value" in names:
        kept -= size * s.hidden  # both norms are of the same input
    qk_width = s.q_width + s.kv_width
    kept += size * qk_width * (3 if names.intersection(FUSED_LINEARS) else 2)
    kept += size * family.extra_saved * s.hidden + 4 * s.heads  # a log-sum-exp for each head
    if family.qk_norm:
        kept += (8 if size == 4 or family.float32_norms else 6) * qk_width
    mlp = 1.0 * size * (4 if family.gated else family.activation_tensors) * s.mlp_width
    if s.experts:
        mlp = s.experts_per_token * (size * 2 * s.hidden + mlp) + size * 6 * s.experts
        mlp += size * 4 * s.shared_expert_width
    return kept + mlp


def transient_bytes_per_token(family: ModelFamily, s: ModelSizes, bytes_per_weight: int) -> float:
    """Bytes per token that a layer holds while it computes, beside what it keeps."""
    width = max(s.mlp_width, s.shared_expert_width) * (s.experts_per_token or 1)
    return bytes_per_weight * ((3 if family.gated else 2) * width + 2 * s.hidden)


def _qwen2(h: int, layers: int, heads: int, kv: int, mlp: int, tied: bool, v: int) -> JsonObject:
    return {
        "model_type": "qwen2", "hidden_size": h, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "intermediate_size": mlp,
        "vocab_size": v, "tie_word_embeddings": tied, "max_position_embeddings": 32768,
    }  # fmt: skip


def _qwen3_config(
    h: int, layers: int, heads: int, kv: int, mlp: int, v: int, positions: int, tied: bool
) -> JsonObject:
    return {
        "model_type": "qwen3", "hidden_size": h, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": 32,
        "intermediate_size": mlp, "vocab_size": v, "tie_word_embeddings": tied,
        "max_position_embeddings": positions,
    }  # fmt: skip


def _known_neox(h: int, layers: int, heads: int, vocabulary: int = 50304) -> JsonObject:
    return {
        "model_type": "gpt_neox", "hidden_size": h, "num_hidden_layers": layers,
        "num_attention_heads": heads, "intermediate_size": 4 * h, "vocab_size": vocabulary,
        "tie_word_embeddings": False, "max_position_embeddings": 2048,
    }  # fmt: skip


def _known_llama(h: int, layers: int, heads: int, mlp: int) -> JsonObject:
    return {
        "model_type": "llama", "hidden_size": h, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": 8, "intermediate_size": mlp,
        "vocab_size": 128256, "tie_word_embeddings": False, "max_position_embeddings": 131072,
    }  # fmt: skip


def _qwen2_5_vl(
    h: int, layers: int, heads: int, kv: int, mlp: int, tied: bool, v: int
) -> JsonObject:
    text = _qwen2(h, layers, heads, kv, mlp, tied, v)
    text |= {"model_type": "qwen2_5_vl_text", "max_position_embeddings": 128000}
    tower = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
             "patch_size": 14}  # fmt: skip
    return {"model_type": "qwen2_5_vl", "text_config": text, "vision_config": tower}


SMALL, LARGE = 151936, 152064
HALF = _qwen2(896, 24, 14, 2, 4864, True, SMALL)
ONE_AND_HALF = _qwen2(1536, 28, 12, 2, 8960, True, SMALL)
SEVEN = _qwen2(3584, 28, 28, 4, 18944, False, LARGE)
SEVENTY_TWO = _qwen2(8192, 80, 64, 8, 29568, False, LARGE)
PYTHIA_1B, PYTHIA_7B = _known_neox(2048, 16, 8), _known_neox(4096, 32, 32, 50432)
KNOWN_CONFIGS: dict[str, JsonObject] = {
    "Qwen/Qwen2-0.5B": HALF, "Qwen/Qwen2-0.5B-Instruct": HALF,
    "Qwen/Qwen2.5-0.5B": HALF, "Qwen/Qwen2.5-0.5B-Instruct": HALF,
    "Qwen/Qwen2.5-Coder-0.5B": HALF,
    "Qwen/Qwen2.5-1.5B": ONE_AND_HALF, "Qwen/Qwen2.5-1.5B-Instruct": ONE_AND_HALF,
    "Qwen/Qwen2.5-Math-1.5B": ONE_AND_HALF | {"max_position_embeddings": 4096},
    "Qwen/Qwen2.5-7B": SEVEN, "Qwen/Qwen2.5-7B-Instruct": SEVEN,
    "Qwen/Qwen2.5-72B": SEVENTY_TWO, "Qwen/Qwen2.5-72B-Instruct": SEVENTY_TWO,
    "Qwen/Qwen3-0.6B": _qwen3_config(1024, 28, 16, 8, 3072, SMALL, 40960, True) | {"head_dim": 128},
    "EleutherAI/pythia-1b": PYTHIA_1B, "EleutherAI/pythia-1b-deduped": PYTHIA_1B,
    "EleutherAI/pythia-6.9b": PYTHIA_7B, "EleutherAI/pythia-6.9b-deduped": PYTHIA_7B,
    "Qwen/Qwen2.5-VL-3B-Instruct": _qwen2_5_vl(2048, 36, 16, 2, 11008, True, SMALL),
    "meta-llama/Llama-3.1-8B": _known_llama(4096, 32, 32, 14336),
    "meta-llama/Llama-3.1-8B-Instruct": _known_llama(4096, 32, 32, 14336),
    "meta-llama/Llama-3.1-70B": _known_llama(8192, 80, 64, 28672),
    "meta-llama/Llama-3.1-70B-Instruct": _known_llama(8192, 80, 64, 28672),
}  # fmt: skip
for _size, _values in (("1b", PYTHIA_1B), ("6.9b", PYTHIA_7B)):
    for _kind in ("sft", "reward"):
        KNOWN_CONFIGS[f"cleanrl/EleutherAI_pythia-{_size}-deduped__{_kind}__tldr"] = _values


# The models that `rloo_cli.config.synthetic` makes: none is made for a plan (a test compares them).
TINY = _qwen3_config(64, 2, 2, 1, 128, 258, 2048, False)
TLDR = _qwen3_config(96, 3, 3, 3, 256, 110, 128, True)
SMOLLM2: JsonObject = {
    "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "intermediate_size": 1536, "vocab_size": 49152,
    "tie_word_embeddings": True, "max_position_embeddings": 8192,
}  # fmt: skip
VISION: JsonObject = {
    "model_type": "qwen2_5_vl",
    "text_config": {
        "model_type": "qwen2_5_vl_text", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "vocab_size": 13, "max_position_embeddings": 256, "tie_word_embeddings": False,
    },
    "vision_config": {
        "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 4,
    },
}  # fmt: skip
SYNTHETIC_CONFIGS: dict[str, JsonObject] = {
    "smollm2": SMOLLM2, "smollm2_shallow": SMOLLM2 | {"num_hidden_layers": 24},
    "addition": _qwen3_config(128, 3, 4, 2, 384, 14, 64, True),
    "addition_shallow": _qwen3_config(128, 2, 4, 2, 384, 14, 64, True),
    "tiny": TINY, "tiny_reward": TINY, "vision": VISION,
    "products": _qwen3_config(64, 2, 2, 1, 192, 20, 256, True),
    "game": _qwen3_config(64, 2, 2, 1, 192, 29, 256, True),
    "tldr_base": TLDR, "tldr_sft": TLDR, "tldr_reward": TLDR,
}  # fmt: skip
