"""The workloads of the benchmark, as data: what is measured, here or on a GPU one day.

Those without `device="cuda"` run with `versus_trl.py`, the others with `gpu.py`.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shape:
    """One workload: a random model, and how long prompts and completions are."""

    name: str
    title: str
    architecture: str  # qwen3, qwen2, gpt_neox
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int
    tied: bool
    prompt: tuple[int, int]  # tokens, drawn uniformly, both ends included
    completion: tuple[int, int]  # equal ends = forced
    k: int  # completions per prompt
    prompts: int  # per step
    device: str = "cpu"
    lora: int = 0  # rank of the adapters that are trained in the place of all weights

    @property
    def batch(self) -> int:
        """Completions per step."""
        return self.k * self.prompts

    def __str__(self) -> str:
        p, c = self.prompt, self.completion
        answer = f"{c[0]} tokens forced" if c[0] == c[1] else f"{c[0]} to {c[1]} tokens"
        heads = f"{self.heads} heads"
        if self.kv_heads != self.heads:
            heads += f" ({self.kv_heads} for keys and values)"
        adapters = f", adapters of rank {self.lora}" if self.lora else ""
        return (
            f"{self.architecture}, {self.layers} layers x {self.hidden}, {heads} of"
            f" {self.head_dim}, MLP {self.mlp}, vocabulary {self.vocabulary},"
            f" {'tied' if self.tied else 'untied'}{adapters}; prompts of {p[0]} to {p[1]} tokens,"
            f" completions of {answer}; K = {self.k}, {self.batch} completions per step"
        )


TOY = {"architecture": "qwen3", "hidden": 256, "layers": 4, "heads": 8, "kv_heads": 4,
       "head_dim": 64, "mlp": 768, "vocabulary": 8192, "tied": True}  # fmt: skip
TLDR = {"architecture": "gpt_neox", "hidden": 256, "layers": 6, "heads": 4, "kv_heads": 4,
        "head_dim": 64, "mlp": 1024, "vocabulary": 8192, "tied": False}  # fmt: skip
PYTHIA_1B = {"architecture": "gpt_neox", "hidden": 2048, "layers": 16, "heads": 8, "kv_heads": 8,
             "head_dim": 256, "mlp": 8192, "vocabulary": 50304, "tied": False}  # fmt: skip
PYTHIA_7B = {"architecture": "gpt_neox", "hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 32,
             "head_dim": 128, "mlp": 16384, "vocabulary": 50432, "tied": False}  # fmt: skip
MATH = {"architecture": "qwen2", "hidden": 1536, "layers": 28, "heads": 12, "kv_heads": 2,
        "head_dim": 128, "mlp": 8960, "vocabulary": 151936, "tied": True}  # fmt: skip
_SUMMARY = {"prompt": (300, 450), "completion": (53, 53)}
_SUMMARY_GPU = {"prompt": (250, 500), "completion": (40, 53), "k": 4, "device": "cuda"}
_W6 = Shape("W6", "TL;DR 6.9B, train phase", **PYTHIA_7B, **_SUMMARY_GPU, prompts=32)
_ALL = (
    Shape("W1", "toy chat, K = 4", **TOY, prompt=(128, 256), completion=(48, 48), k=4, prompts=4),
    Shape("W2-K4", "TL;DR's shape, K = 4", **TLDR, **_SUMMARY, k=4, prompts=4),
    Shape("W2-K2", "TL;DR's shape, K = 2", **TLDR, **_SUMMARY, k=2, prompts=8),
    Shape("W11", "long completions", **TOY, prompt=(80, 250), completion=(1024, 1024), k=8,
          prompts=2),
    Shape("W12", "long prompts", **TOY, prompt=(6000, 6000), completion=(64, 64), k=8, prompts=1),
    Shape("W5", "TL;DR 1B, train phase", **PYTHIA_1B, **_SUMMARY_GPU, prompts=64),
    _W6,  # 83 GB of weights and gradients: no GPU of 80 GB holds it, but the next two
    replace(_W6, name="W6-8L", title="8 layers of TL;DR 6.9B, train phase", layers=8),
    replace(_W6, name="W6-lora", title="TL;DR 6.9B with LoRA, train phase", lora=16),
    Shape("W7", "math 1.5B, train phase", **MATH, prompt=(80, 250), completion=(200, 2000), k=8,
          prompts=8, device="cuda"),
)  # fmt: skip
SHAPES = {shape.name: shape for shape in _ALL}
ON_CPU = [shape.name for shape in _ALL if shape.device == "cpu"]
