"""Log-probabilities of targets from hidden states, without ever holding the whole logits.

    logits = (hidden @ weight.T + bias) * scale / temperature          (N, V), in tiles
    logp   = logits[target] - logsumexp(logits)                        (N,)
    dlogits = g * (onehot(target) - softmax(logits))                   (N, V), in tiles

A tile is a block of some tokens by some entries of the vocabulary. Forward keeps each tile's
largest logit and its sum of exponentials; backward recomputes the tile, from which the softmax
follows, unless there was memory to keep the exponentials (`keep_bytes`). A tile does not span all
logits of a token: each block of the weight's gradient is finished before the next begins, so it is
summed in float32 and rounded once, without a float32 copy of the whole, and a tile small enough for
the cache is still a good matrix product. With a single block of tokens it is one product, which
writes the gradient itself. The sums over tiles are those of the online softmax (Milakov and
Gimelshein, arXiv 1805.02867).

Tokens are multiplied by g * scale / temperature on the (N, h) side of both products and never on
the tile: backward feeds only softmax - onehot to the products.
"""

import functools
import importlib.util
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rloo_cli.policy.row_selection import add_row_gradients

# The most logits at once on a GPU, 128 MB of float32, and the fewest. `gpu_tile_logits` chooses
# between them; the lower limit is an estimate: products of fewer leave a large GPU idle.
GPU_TILE_LOGITS, MIN_GPU_TILE_LOGITS = 2**25, 2**22
# Measured with one thread at V 8192 and 131072, 2**17 to 2**25: within noise of 2**19 to 2**23,
# 5 to 20 % faster than 2**17 (small products) and than 2**25 (passes that exceed the cache).
CPU_TILE_LOGITS = 2**20
# Logits of a pass below which a GPU runs `_reduce_tile_in_place` and `_softmax_in_place` instead of
# compiling their twins: Inductor takes 8 to 15 s, and saves less than 2 ms of such a pass.
MIN_COMPILED_LOGITS = 2**28
MIN_TILE_VOCAB = 64  # a tile is at least this wide, so that sums per tile stay far below (N, V)
TILE_ALIGNMENT = 128  # sides of large tiles are multiples of this, for tensor cores


class TilePlan(NamedTuple):
    """How one call is cut into tiles, and in which dtype it computes."""

    tile_tokens: int  # tokens of a tile
    tile_vocab: int  # vocabulary entries of a tile
    logit_factor: float  # scale / temperature
    compute_dtype: torch.dtype  # of the factors; products are float32
    saved_dtype: torch.dtype | None  # of kept exponentials; None = recomputed
    want_entropy: bool
    compiled: bool = False  # one Inductor kernel after each product

    def logits_buffer(self, like: Tensor) -> Tensor:
        """Allocate one tile of logits."""
        return like.new_empty((self.tile_tokens, self.tile_vocab), dtype=torch.float32)


def token_logp(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    temperature: float = 1.0,
    want_entropy: bool = False,
    tile_logits: int | None = None,
    keep_bytes: int = 0,
    float32: bool = False,
    row_index: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """log softmax((hidden @ weight.T + bias) * scale / temperature) at the targets; entropy.

    tile_logits: logits computed at once, at least 64; None = chosen for the device.
    keep_bytes: up to this size the (N, V) exponentials are kept for backward, in hidden's dtype;
        that saves a quarter of the head's work. They are never kept without gradient.
    float32: keep and multiply float32 even if hidden and weight are of less precision. On a GPU
        the products still read both as stored: each product of half-precision numbers is exact,
        and the sums are float32, 15 times as fast as from float32.
    row_index: (N,) the rows of `hidden`, which then has any number of them. Gradients of a row that
        occurs several times are added in float32.

    The entropy is in nats, has no gradient, and is None unless asked for. A target outside the
    vocabulary makes its logp NaN.
    (N, h), (V, h), (N,), (V,) or None -> (N,), (N,) or None, both float32
    """
    num_tokens = len(hidden if row_index is None else row_index)
    trained = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (hidden, weight, bias)
    )
    half = hidden.dtype == weight.dtype and hidden.dtype in (torch.bfloat16, torch.float16)
    narrow = hidden.dtype if half and not float32 else torch.float32
    # a product of half precision with a float32 result exists on CUDA only
    compute_dtype = hidden.dtype if hidden.is_cuda and half else torch.float32
    num_logits = num_tokens * len(weight)
    max_logits = tile_logits or _device_tile_logits(hidden.device, compute_dtype)
    plan = TilePlan(
        *tile_shape(num_tokens, len(weight), max_logits), scale / temperature, compute_dtype,
        saved_dtype=narrow if trained and 0 < num_logits * narrow.itemsize <= keep_bytes else None,
        want_entropy=want_entropy,
        compiled=hidden.is_cuda and worth_compiling(num_logits),
    )  # fmt: skip
    logp, entropy = TokenLogp.apply(hidden, weight, bias, target, row_index, plan)
    return logp, entropy


def gpu_tile_logits(l2_bytes: int, itemsize: int) -> int:
    """The logits of a tile that stays in a GPU's L2 cache of `l2_bytes`: a power of two.

    `itemsize`: bytes of a number that the products multiply. A tile is there in float32 and in
    that dtype. An H100 (50 MB) in half precision gets 2^23. If the cache is unknown (0), or too
    small for a good product, a tile is as large as `GPU_TILE_LOGITS`.
    """
    fitting = l2_bytes // (torch.float32.itemsize + itemsize)
    if fitting < MIN_GPU_TILE_LOGITS:
        return GPU_TILE_LOGITS
    return min(2 ** (fitting.bit_length() - 1), GPU_TILE_LOGITS)


def worth_compiling(num_logits: int) -> bool:
    """Whether a GPU's pass over this many logits is worth Inductor's compile time."""
    return num_logits >= MIN_COMPILED_LOGITS


def _device_tile_logits(device: torch.device, compute_dtype: torch.dtype) -> int:
    """Logits of a tile on this device."""
    if device.type != "cuda":
        return CPU_TILE_LOGITS
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return gpu_tile_logits(l2_bytes, compute_dtype.itemsize)


def tile_shape(num_tokens: int, vocab_size: int, max_logits: int) -> tuple[int, int]:
    """Tokens and vocabulary entries of a tile of `max_logits` logits: about square."""

    def aligned(count: int) -> int:
        return count // TILE_ALIGNMENT * TILE_ALIGNMENT if count >= TILE_ALIGNMENT else count

    tokens = min(num_tokens, aligned(math.isqrt(max_logits)), max_logits // MIN_TILE_VOCAB) or 1
    width = min(vocab_size, max(aligned(max_logits // tokens), MIN_TILE_VOCAB))
    return max(tokens, min(num_tokens, aligned(max_logits // width))), width


class TokenLogp(torch.autograd.Function):
    """`token_logp` with its gradients. Saves (N, h), (V, h), a few (N,), kept exponentials."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        row_index: Tensor | None,
        plan: TilePlan,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.num_rows = len(hidden)
        if row_index is not None:
            hidden = hidden.index_select(0, row_index)
        sums = TileSums(hidden, weight, plan)
        ctx.kept = {} if plan.saved_dtype else None
        # in place, a tile of float32 logits becomes its kept values
        buffer = None if plan.saved_dtype == torch.float32 else plan.logits_buffer(hidden)
        for number, (vocab, w) in enumerate(iter_blocks(weight, plan.tile_vocab)):
            w = w.to(plan.compute_dtype)
            for tokens, h in iter_blocks(hidden, plan.tile_tokens):
                z = compute_tile_logits(h, w, bias, vocab, plan, buffer)
                sums.pick_targets(tokens, z, target[tokens] - vocab.start)
                reduce = compile_kernel(_reduce_tile) if plan.compiled else _reduce_tile_in_place
                *tile_sums, exponentials = reduce(z, plan.want_entropy, plan.saved_dtype)
                sums.add_tile(number, tokens, *tile_sums)
                if ctx.kept is not None:
                    ctx.kept[number, tokens.start] = exponentials
        logp, entropy, lse, share = sums.combine_tiles()
        ctx.plan = plan
        saved_share = share if plan.saved_dtype else None
        ctx.save_for_backward(hidden, weight, bias, target, row_index, logp, lse, saved_share)
        if entropy is not None:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, _: Tensor | None = None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target, row_index, logp, lse, share = ctx.saved_tensors
        plan, (for_hidden, for_weight, for_bias) = ctx.plan, ctx.needs_input_grad[:3]
        # Kept tiles become gradients in place, so a second backward has to compute them again.
        kept, ctx.kept = ctx.kept, None
        g = g * -plan.logit_factor
        weighted = (hidden.float() * g[:, None]).to(plan.compute_dtype) if for_weight else None
        dhidden = torch.empty_like(hidden, dtype=torch.float32) if for_hidden else None
        dweight = WeightGradient(weight, len(hidden), plan) if for_weight else None
        dbias = torch.zeros_like(bias, dtype=torch.float32) if for_bias else None
        buffer = plan.logits_buffer(hidden) if kept is None else None
        for number, (vocab, w) in enumerate(iter_blocks(weight, plan.tile_vocab)):
            w = w.to(plan.compute_dtype)
            for tokens, h in iter_blocks(hidden, plan.tile_tokens):
                if kept is None:
                    z = compute_tile_logits(h, w, bias, vocab, plan, buffer)
                    softmax = compile_kernel(_softmax) if plan.compiled else _softmax_in_place
                    p = softmax(z, lse[tokens, None], plan.compute_dtype)
                else:
                    p = kept.pop((number, tokens.start)).to(plan.compute_dtype)
                    p = p.mul_(share[number, tokens, None])
                _subtract_one_hot(p, target[tokens] - vocab.start, logp[tokens])
                if dhidden is not None:
                    add_product(dhidden[tokens], p, w, beta=float(number > 0))
                if dweight is not None and weighted is not None:
                    dweight.add_tile(vocab, tokens, p, weighted[tokens])
                if dbias is not None:
                    dbias[vocab] += torch.mv(p.t().float(), g[tokens])
        if dhidden is not None:
            dhidden = dhidden.mul_(g[:, None])
            if row_index is None:
                dhidden = dhidden.to(hidden.dtype)
            else:
                dhidden = add_row_gradients(dhidden, row_index, ctx.num_rows, hidden.dtype)
        dbias = None if dbias is None else dbias.to(bias.dtype)
        return dhidden, None if dweight is None else dweight.total, dbias, None, None, None


class TileSums:
    """The sums that forward keeps of each block of the vocabulary, and their totals."""

    def __init__(self, hidden: Tensor, weight: Tensor, plan: TilePlan):
        n, count = len(hidden), math.ceil(len(weight) / plan.tile_vocab)
        # (N,) the targets' logits; NaN if a target is not in the vocabulary
        self.target_logits = hidden.new_full((n,), math.nan, dtype=torch.float32)
        self.max_logit = hidden.new_empty((count, n), dtype=torch.float32)  # (C, N) of C blocks
        self.exp_sum = torch.empty_like(self.max_logit)  # (C, N) sum of e^(z - largest)
        # (C, N) sum of e^(z - largest) (z - largest)
        self.entropy_sum = torch.empty_like(self.max_logit) if plan.want_entropy else None

    def pick_targets(self, tokens: slice, z: Tensor, local: Tensor) -> None:
        """Store the targets' logits that are in this tile. (n, v), (n,)"""
        inside, local = _targets_in_tile(local, z)
        here = z.gather(1, local[:, None]).squeeze(1)
        self.target_logits[tokens] = torch.where(inside, here, self.target_logits[tokens])

    def add_tile(
        self,
        block_index: int,
        tokens: slice,
        max_logit: Tensor,
        exp_sum: Tensor,
        entropy_sum: Tensor | None,
    ) -> None:
        """Store the sums of one tile. (n,) each"""
        self.max_logit[block_index, tokens], self.exp_sum[block_index, tokens] = max_logit, exp_sum
        if self.entropy_sum is not None and entropy_sum is not None:
            self.entropy_sum[block_index, tokens] = entropy_sum

    def combine_tiles(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """logp (N,), entropy (N,) or None, log-sum-exp (N,), and softmax / kept, (C, N)."""
        largest = self.max_logit.amax(0)
        below = self.max_logit - largest
        share = below.exp()
        total = (self.exp_sum * share).sum(0)
        # in this order, since both terms are small where the target is likely
        logp = (self.target_logits - largest) - total.log()
        entropy = None
        if self.entropy_sum is not None:
            spread = (share * (self.entropy_sum + below * self.exp_sum)).sum(0)
            entropy = total.log() - spread / total
        return logp, entropy, largest + total.log(), share / total


class WeightGradient:
    """The weight's gradient, one block of the vocabulary after another.

    Each is summed over the blocks of tokens in float32 and rounded once, at the last of them.
    """

    def __init__(self, weight: Tensor, num_tokens: int, plan: TilePlan):
        self.num_tokens = num_tokens
        # without tokens no product writes it
        self.total = torch.empty_like(weight) if num_tokens else torch.zeros_like(weight)  # (V, h)
        self.sum: Tensor | None = None  # (v, h) float32, where `total` is not and tiles are added
        if weight.dtype != torch.float32 and num_tokens > plan.tile_tokens:
            self.sum = weight.new_empty((plan.tile_vocab, weight.shape[1]), dtype=torch.float32)

    def add_tile(self, vocab: slice, tokens: slice, p: Tensor, weighted: Tensor) -> None:
        """Add one tile's product, p.T @ weighted. (n, v), (n, h)"""
        block, beta = self.total[vocab], float(tokens.start > 0)
        if block.dtype == torch.float32:
            add_product(block, p.t(), weighted, beta)
        elif self.sum is None:
            write_product(block, p.t(), weighted)
        else:
            add_product(self.sum[: len(block)], p.t(), weighted, beta)
            if tokens.stop == self.num_tokens:
                block.copy_(self.sum[: len(block)])


def iter_blocks(tensor: Tensor, size: int) -> Iterator[tuple[slice, Tensor]]:
    """Split the tensor along its first dimension. -> the slice of each block, and the block"""
    for start in range(0, len(tensor), size):
        block = slice(start, min(start + size, len(tensor)))
        yield block, tensor[block]


def compute_tile_logits(
    h: Tensor,
    w: Tensor,
    bias: Tensor | None,
    vocab_slice: slice,
    plan: TilePlan,
    buffer: Tensor | None,
) -> Tensor:
    """One tile of logits, in float32. (n, h), (v, h) -> (n, v)"""
    if buffer is None:
        z = h.new_empty((len(h), len(w)), dtype=torch.float32)
    else:
        z = buffer[: len(h), : len(w)]
    add_product(z, h.to(plan.compute_dtype), w.t(), beta=0.0, alpha=plan.logit_factor)
    return z if bias is None else z.add_(bias[vocab_slice].float(), alpha=plan.logit_factor)


def add_product(out: Tensor, a: Tensor, b: Tensor, beta: float = 1.0, alpha: float = 1.0) -> None:
    """out = beta * out + alpha * a @ b, in a float32 `out` whatever the dtypes of a and b."""
    if a.dtype == torch.float32:
        torch.addmm(out, a, b, beta=beta, alpha=alpha, out=out)
    else:
        torch.addmm(out, a, b, out_dtype=torch.float32, beta=beta, alpha=alpha, out=out)


def write_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out = a @ b, summed in float32 and rounded once, in an `out` of lower precision."""
    if a.dtype != out.dtype:
        out.copy_(a @ b)
        return
    with _float32_sums():
        torch.mm(a, b, out=out)


@contextmanager
def _float32_sums() -> Iterator[None]:
    """No product on a GPU adds partial sums in half precision, which cuBLAS may otherwise do."""
    flags = torch.backends.cuda.matmul
    names = [f"allow_{dtype}_reduced_precision_reduction" for dtype in ("bf16", "fp16")]
    before = {name: getattr(flags, name) for name in names}
    try:
        for name in names:
            setattr(flags, name, False)
        yield
    finally:
        for name, value in before.items():
            setattr(flags, name, value)


def _targets_in_tile(local: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Which targets are in this tile, and indices that are safe to gather. Without a sync."""
    last = z.shape[1] - 1
    return (local >= 0) & (local <= last), local.clamp(0, last)


def _subtract_one_hot(p: Tensor, local: Tensor, logp: Tensor) -> None:
    """p - onehot in place; at the target from logp, exact where p rounds to 1. (n, v), (n,)"""
    inside, local = _targets_in_tile(local, p)
    here = p.gather(1, local[:, None])
    exact = logp.expm1()[:, None].to(p.dtype)
    p.scatter_(1, local[:, None], torch.where(inside[:, None], exact, here))


def _reduce_tile(
    z: Tensor, want_entropy: bool, saved_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """A tile's largest logits, sums, entropy sums and exponentials. For torch.compile."""
    largest = z.amax(1)
    below = z - largest[:, None]
    e = below.exp()
    spread = (e * below).sum(1) if want_entropy else None
    return largest, e.sum(1), spread, None if saved_dtype is None else e.to(saved_dtype)


def _reduce_tile_in_place(
    z: Tensor, want_entropy: bool, saved_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """`_reduce_tile` in as few passes and as little memory as eager code allows. Consumes z."""
    largest = z.amax(1)
    below = z.sub_(largest[:, None])
    e = below.exp() if want_entropy else below.exp_()
    spread = below.mul_(e).sum(1) if want_entropy else None
    return largest, e.sum(1), spread, None if saved_dtype is None else e.to(saved_dtype)


def _softmax(z: Tensor, lse: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(z - lse). For torch.compile. (n, v), (n, 1) -> (n, v)"""
    return (z - lse).exp().to(dtype)


def _softmax_in_place(z: Tensor, lse: Tensor, dtype: torch.dtype) -> Tensor:
    return z.sub_(lse).exp_().to(dtype)


@functools.cache
def compile_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile the function into one kernel if Triton and a C compiler are installed."""
    if importlib.util.find_spec("triton") and any(map(shutil.which, ("cc", "gcc", "clang"))):
        return torch.compile(function, dynamic=True)
    return function
