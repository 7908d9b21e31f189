"""How many tokens a training forward may have: one rule for a run and for its plan.

A run measures what a token keeps for the backward pass and how much memory of its device is used
(`policy/memory.py`); a plan derives both from config and model (`planning/peak_memory.py`). The
rest is computed the same way. Nothing here imports torch.

From the memory that weights, optimizer, other models and a vLLM engine leave, the kept logits are
subtracted, and `ACTIVATION_SHARE` of the rest is for activations. The remainder is for what is not
counted: tiles of logits, the output embedding's gradient, a layer's temporaries, fragments.
"""

from dataclasses import dataclass

from rloo_cli.config.schema import GenerationConfig

ACTIVATION_SHARE = 0.8
# On a CPU, where glibc keeps half of the activations again in fragments (docs/scale.md), and with a
# sampler that decodes during training: its keys and values are in the same memory.
CROWDED_ACTIVATION_SHARE = 0.5
KEPT_LOGITS_SHARE = 0.125  # most of the free memory for logits
MAX_USEFUL_TOKENS = {"cpu": 1024, "cuda": 32768}  # tokens beyond which nothing gets faster
TOKEN_STEP = 256  # budgets are multiples: kernel tiles are full, and few sizes occur
MIN_TOKENS = 64
CUDA_CONTEXT_SHARE = 0.02  # of a GPU: for CUDA, its libraries, and backward buffers


@dataclass(frozen=True)
class ActivationMemory:
    """The memory of a training forward. `kind` is torch's, cpu or cuda; sizes in bytes."""

    kind: str
    device_bytes: float
    free_bytes: float  # left by weights, gradients, optimizer, other models, engine
    logits_bytes_per_token: float
    keep_logits_gb: float | None  # train.keep_logits_gb
    crowded: bool  # `samples_beside_training`

    @property
    def activation_share(self) -> float:
        """The share of the memory left by kept logits that activations may take."""
        return CROWDED_ACTIVATION_SHARE if self.crowded or self.kind == "cpu" else ACTIVATION_SHARE

    @property
    def most_kept_logits(self) -> float:
        """Bytes of logits that may be kept for the backward pass: set by the key, else 2 GB, on a
        GPU a tenth of it; never more than `KEPT_LOGITS_SHARE` of the free memory."""
        most = 0.1 * self.device_bytes if self.kind == "cuda" else 2e9
        most = most if self.keep_logits_gb is None else self.keep_logits_gb * 1e9
        return min(most, KEPT_LOGITS_SHARE * self.free_bytes)

    def tokens_that_fit(self, bytes_per_token: float) -> float:
        """Tokens of a forward that keeps this many bytes of activations per token.

        Solves t * bytes_per_token = share * (free - min(t * logits_bytes_per_token, most kept)):
        a forward of t tokens keeps at most t tokens' logits.
        """
        share = self.activation_share
        all_logits_kept = bytes_per_token + share * self.logits_bytes_per_token
        limited = share * (self.free_bytes - self.most_kept_logits) / bytes_per_token
        return max(share * self.free_bytes / all_logits_kept, limited)


def gpu_bytes_left(device_bytes: float, generation: GenerationConfig) -> float:
    """Bytes of a GPU for the trainer's tensors: without CUDA's own and a colocated vLLM engine's.

    An engine that drops its weights during training leaves its share to us.
    """
    left = device_bytes * (1 - CUDA_CONTEXT_SHARE)
    if not generation.shares_device:
        return left
    engine = generation.colocate  # type: ignore[attr-defined]
    return left if engine.sleep == "weights" else left * (1 - engine.gpu_memory_utilization)


def samples_beside_training(generation: GenerationConfig) -> bool:
    """Whether completions are decoded in the trainer's process during training."""
    return generation.samples_here and generation.overlap != "none"


def choose_token_budget(max_useful: int, max_group_tokens: int, tokens_that_fit: float) -> int:
    """The tokens of a forward: `max_useful`, or `max_group_tokens` if that is more.

    If that many do not fit, it is the largest multiple of `TOKEN_STEP` that does; a group that fits
    is not split for the rounding, since splitting it can cost another pass.
    """
    wanted = max(max_useful, max_group_tokens)
    if wanted <= tokens_that_fit:
        return wanted
    fitting = int(tokens_that_fit) // TOKEN_STEP * TOKEN_STEP
    if fitting < max_group_tokens <= tokens_that_fit:
        return max_group_tokens
    return max(MIN_TOKENS, fitting)
