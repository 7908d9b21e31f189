"""Log-probabilities of targets straight from hidden states: the logits never exist as a whole.

    logits = (hidden @ weight.T + bias) * scale / temperature          (N, V), in tiles
    logp   = logits[target] - logsumexp(logits)                        (N,)
    dlogits = g * (onehot(target) - softmax(logits))                   (N, V), in tiles

A tile is a block of some rows by some words. Forward keeps of each its largest logit and its sum of
exponentials; backward computes the tile again, from which the softmax follows, unless there was
room to keep the exponentials (`keep_bytes`). Blocks of words, not whole rows: each block of the
weight's gradient is finished before the next begins, so it is summed in float32 and rounded once
without a float32 copy of the whole, and a tile small enough for the cache is still a good matrix
product. The sums over tiles are the online softmax's (Milakov and Gimelshein, arXiv 1805.02867).

Rows are multiplied by g * scale / temperature on the (N, h) side of both products and never on the
tile: what backward feeds to them is softmax - onehot alone.
"""

import functools
import importlib.util
import math
import shutil
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE = 2**25  # logits at once: 128 MB of float32
# Measured with one thread at V 8192 and 131072, 2**17 to 2**25: within noise of 2**19 to 2**23,
# 5 to 20 % faster than 2**17 (small products) and than 2**25 (passes that leave the cache).
TILE_CPU = 2**20
LEAST_WORDS = 64  # a tile is at least this wide, so that sums per tile stay far below (N, V)
ALIGNED = 128  # large tiles are multiples of this on both sides, as tensor cores like them


class Plan(NamedTuple):
    """How one call is cut, and in which numbers it computes."""

    rows: int  # of a tile
    words: int  # of a tile
    factor: float  # scale / temperature
    work: torch.dtype  # what the products multiply; their results are float32
    keep: torch.dtype | None  # the exponentials are kept, in this; None = computed again
    entropy: bool

    def buffer(self, like: Tensor) -> Tensor:
        """Room for one tile of logits."""
        return like.new_empty((self.rows, self.words), dtype=torch.float32)


def token_logp(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    temperature: float = 1.0,
    want_entropy: bool = False,
    tile: int | None = None,
    keep_bytes: int = 0,
    float32: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log softmax((hidden @ weight.T + bias) * scale / temperature) at the targets; entropy.

    tile: logits computed at once, at least 64; None = what the device likes.
    keep_bytes: up to this size the (N, V) exponentials are kept for backward, in hidden's dtype;
        that saves a quarter of the head's work. Never without gradient.
    float32: keep and multiply float32 even where hidden and weight are of less precision. On a GPU
        the products still take both as they are: of half precision each product is exact, and they
        are added up in float32, 15 times as fast as from float32.

    The entropy is in nats, has no gradient, and is None unless asked for. A target outside the
    vocabulary makes its logp NaN.
    (N, h), (V, h), (N,), (V,) or None -> (N,), (N,) or None, both float32
    """
    trained = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (hidden, weight, bias)
    )
    half = hidden.dtype == weight.dtype and hidden.dtype in (torch.bfloat16, torch.float16)
    narrow = hidden.dtype if half and not float32 else torch.float32
    size = len(hidden) * len(weight) * narrow.itemsize
    rows, words = shape(len(hidden), len(weight), tile or (TILE if hidden.is_cuda else TILE_CPU))
    plan = Plan(
        rows, words, scale / temperature,
        # a product of half precision with a float32 result exists on CUDA only
        work=hidden.dtype if hidden.is_cuda and half else torch.float32,
        keep=narrow if trained and 0 < size <= keep_bytes else None,
        entropy=want_entropy,
    )  # fmt: skip
    logp, entropy = TokenLogp.apply(hidden, weight, bias, target, plan)
    return logp, entropy


def shape(n: int, vocabulary: int, tile: int) -> tuple[int, int]:
    """Rows and words of a tile of `tile` logits: as square as may be, as its products like it."""

    def aligned(count: int) -> int:
        return count // ALIGNED * ALIGNED if count >= ALIGNED else count

    rows = min(n, aligned(math.isqrt(tile)), tile // LEAST_WORDS) or 1
    words = min(vocabulary, max(aligned(tile // rows), LEAST_WORDS))
    return max(rows, min(n, aligned(tile // words))), words


class TokenLogp(torch.autograd.Function):
    """`token_logp` with its gradients. Saves (N, h), (V, h), a few (N,), and what it keeps."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, plan: Plan
    ) -> tuple[Tensor, Tensor | None]:
        sums = Sums(hidden, weight, plan)
        ctx.kept = {} if plan.keep else None
        # in place, a tile of float32 logits becomes what is kept of it
        buffer = None if plan.keep == torch.float32 else plan.buffer(hidden)
        for number, (words, w) in enumerate(blocks(weight, plan.words)):
            w = w.to(plan.work)
            for rows, h in blocks(hidden, plan.rows):
                z = logits(h, w, bias, words, plan, buffer)
                sums.pick(rows, z, target[rows] - words.start)
                fold = fused(_fold) if z.is_cuda else _fold_in_place
                *found, kept = fold(z, plan.entropy, plan.keep)
                sums.add(number, rows, *found)
                if ctx.kept is not None:
                    ctx.kept[number, rows.start] = kept
        logp, entropy, lse, share = sums.finish()
        ctx.plan = plan
        ctx.save_for_backward(hidden, weight, bias, target, logp, lse, share if plan.keep else None)
        if entropy is not None:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, _: Tensor | None = None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target, logp, lse, share = ctx.saved_tensors
        plan, (for_hidden, for_weight, for_bias) = ctx.plan, ctx.needs_input_grad[:3]
        # Kept tiles become gradients in place, so a second backward has to compute them again.
        kept, ctx.kept = ctx.kept, None
        g = g * -plan.factor
        weighted = (hidden.float() * g[:, None]).to(plan.work) if for_weight else None
        dhidden = torch.zeros_like(hidden, dtype=torch.float32) if for_hidden else None
        dweight = torch.empty_like(weight) if for_weight else None
        dbias = torch.zeros_like(bias, dtype=torch.float32) if for_bias else None
        buffer = plan.buffer(hidden) if kept is None else None
        for number, (words, w) in enumerate(blocks(weight, plan.words)):
            w = w.to(plan.work)
            block = None if dweight is None else _zeros(dweight[words])
            for rows, h in blocks(hidden, plan.rows):
                if kept is None:
                    z = logits(h, w, bias, words, plan, buffer)
                    softmax = fused(_softmax) if z.is_cuda else _softmax_in_place
                    p = softmax(z, lse[rows, None], plan.work)
                else:
                    p = kept.pop((number, rows.start)).to(plan.work).mul_(share[number, rows, None])
                _less_one_hot(p, target[rows] - words.start, logp[rows])
                if dhidden is not None:
                    add_product(dhidden[rows], p, w)
                if block is not None and weighted is not None:
                    add_product(block, p.t(), weighted[rows])
                if dbias is not None:
                    dbias[words] += torch.mv(p.t().float(), g[rows])
            if dweight is not None and block is not None and block.dtype != dweight.dtype:
                dweight[words] = block
        if dhidden is not None:
            dhidden = dhidden.mul_(g[:, None]).to(hidden.dtype)
        return dhidden, dweight, None if dbias is None else dbias.to(bias.dtype), None, None


class Sums:
    """What forward knows of each block of words, and what follows from it for whole rows."""

    def __init__(self, hidden: Tensor, weight: Tensor, plan: Plan):
        n, count = len(hidden), math.ceil(len(weight) / plan.words)
        # (N,) the targets' logits; NaN where a target is no word
        self.picked = hidden.new_full((n,), math.nan, dtype=torch.float32)
        self.largest = hidden.new_empty((count, n), dtype=torch.float32)  # (C, N) of C blocks
        self.total = torch.empty_like(self.largest)  # (C, N) sum of e^(z - largest)
        self.spread = torch.empty_like(self.largest) if plan.entropy else None  # (C, N) below

    def pick(self, rows: slice, z: Tensor, local: Tensor) -> None:
        """Take the targets' logits that are in this tile. (n, v), (n,)"""
        inside, local = _inside(local, z)
        here = z.gather(1, local[:, None]).squeeze(1)
        self.picked[rows] = torch.where(inside, here, self.picked[rows])

    def add(self, number: int, rows: slice, largest: Tensor, total: Tensor, spread: Any) -> None:
        """Note one tile. (n,) each; spread: sum of e^(z - largest) (z - largest), or None."""
        self.largest[number, rows], self.total[number, rows] = largest, total
        if self.spread is not None:
            self.spread[number, rows] = spread

    def finish(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """logp (N,), entropy (N,) or None, log-sum-exp (N,), and softmax / kept, (C, N)."""
        largest = self.largest.amax(0)
        below = self.largest - largest
        share = below.exp()
        total = (self.total * share).sum(0)
        # in this order, since both terms are small where the target is likely
        logp = (self.picked - largest) - total.log()
        entropy = None
        if self.spread is not None:
            entropy = total.log() - (share * (self.spread + below * self.total)).sum(0) / total
        return logp, entropy, largest + total.log(), share / total


def blocks(tensor: Tensor, size: int) -> Iterator[tuple[slice, Tensor]]:
    """The tensor in blocks of `size` rows, each with its place."""
    for start in range(0, len(tensor), size):
        place = slice(start, min(start + size, len(tensor)))
        yield place, tensor[place]


def logits(
    h: Tensor, w: Tensor, bias: Tensor | None, words: slice, plan: Plan, buffer: Tensor | None
) -> Tensor:
    """One tile of logits, in float32. (n, h), (v, h) -> (n, v)"""
    if buffer is None:
        z = h.new_empty((len(h), len(w)), dtype=torch.float32)
    else:
        z = buffer[: len(h), : len(w)]
    add_product(z, h.to(plan.work), w.t(), beta=0.0, alpha=plan.factor)
    return z if bias is None else z.add_(bias[words].float(), alpha=plan.factor)


def add_product(out: Tensor, a: Tensor, b: Tensor, beta: float = 1.0, alpha: float = 1.0) -> None:
    """out = beta * out + alpha * a @ b, in a float32 `out` whatever a and b are."""
    if a.dtype == torch.float32:
        torch.addmm(out, a, b, beta=beta, alpha=alpha, out=out)
    else:
        torch.addmm(out, a, b, out_dtype=torch.float32, beta=beta, alpha=alpha, out=out)


def _zeros(part: Tensor) -> Tensor:
    """A float32 block to sum a part of a gradient in: that part itself where it is float32."""
    return (
        part.zero_() if part.dtype == torch.float32 else torch.zeros_like(part, dtype=torch.float32)
    )


def _inside(local: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Which targets are words of this tile, and places that are safe to look at. No waiting."""
    last = z.shape[1] - 1
    return (local >= 0) & (local <= last), local.clamp(0, last)


def _less_one_hot(p: Tensor, local: Tensor, logp: Tensor) -> None:
    """p - onehot in place; at the target from logp, exact where p rounds to 1. (n, v), (n,)"""
    inside, local = _inside(local, p)
    here = p.gather(1, local[:, None])
    p.scatter_(
        1, local[:, None], torch.where(inside[:, None], logp.expm1()[:, None].to(p.dtype), here)
    )


def _fold(
    z: Tensor, entropy: bool, keep: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Of a tile: largest logits, sums, spreads (see `Sums`), exponentials. For torch.compile."""
    largest = z.amax(1)
    below = z - largest[:, None]
    e = below.exp()
    spread = (e * below).sum(1) if entropy else None
    return largest, e.sum(1), spread, None if keep is None else e.to(keep)


def _fold_in_place(
    z: Tensor, entropy: bool, keep: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """`_fold` in as few passes and as little memory as eager operations can. Consumes z."""
    largest = z.amax(1)
    below = z.sub_(largest[:, None])
    e = below.exp() if entropy else below.exp_()
    spread = below.mul_(e).sum(1) if entropy else None
    return largest, e.sum(1), spread, None if keep is None else e.to(keep)


def _softmax(z: Tensor, lse: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(z - lse). For torch.compile. (n, v), (n, 1) -> (n, v)"""
    return (z - lse).exp().to(dtype)


def _softmax_in_place(z: Tensor, lse: Tensor, dtype: torch.dtype) -> Tensor:
    return z.sub_(lse).exp_().to(dtype)


@functools.cache
def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled into one kernel, where Triton and a C compiler are there to do it."""
    if importlib.util.find_spec("triton") and any(map(shutil.which, ("cc", "gcc", "clang"))):
        return torch.compile(function, dynamic=True)
    return function
