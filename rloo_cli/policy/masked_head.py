"""Log-probabilities over the ids that a sampler kept of the vocabulary (`data/sampling_mask`).

    z_j  = hidden[token_j] . weight[id_j] + bias[id_j]                  (M,) of all tokens' ids
    logp = z_target / temperature - logsumexp over the token's own j    (N,)

Only these rows of the head are read, in blocks: neither whole logits nor the rows of all ids are
ever in memory. It is exact, since the other ids are not in the sum. The products of
half-precision numbers are summed in float32, as in `fused_head`.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rloo_cli.data.packing import KeptIds
from rloo_cli.data.segments import segment_sum

BLOCK_NUMBERS = 2**22  # numbers of a block of rows: 16 MB of float32


class KeptLogits(torch.autograd.Function):
    """Logits of chosen pairs of tokens and ids, with their gradients."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, kept: KeptIds
    ) -> Tensor:
        """(N, h), (V, h), (V,) or None -> (M,) float32"""
        token, ids = kept.token, kept.ids
        logits = hidden.new_empty(len(ids), dtype=torch.float32)
        for part in _iter_parts(len(ids), hidden.shape[-1]):
            rows, states = weight[ids[part]].float(), hidden[token[part]].float()
            logits[part] = torch.linalg.vecdot(rows, states)
        ctx.save_for_backward(hidden, weight, bias)
        ctx.kept = kept
        return logits if bias is None else logits + bias[ids].float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """(M,) -> the gradients of hidden, weight and bias, each summed in float32"""
        hidden, weight, bias = ctx.saved_tensors
        token, ids, used = ctx.kept.token, ctx.kept.ids, ctx.kept.used
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        dhidden = torch.zeros_like(hidden, dtype=torch.float32) if for_hidden else None
        # rows of other ids have a gradient of 0
        drows = hidden.new_zeros((len(used) if for_weight else 0, hidden.shape[1])).float()
        for part in _iter_parts(len(ids), hidden.shape[-1]):
            if dhidden is not None:
                dhidden.index_add_(0, token[part], weight[ids[part]].float() * g[part, None])
            if for_weight:
                drows.index_add_(
                    0, ctx.kept.used_index[part], hidden[token[part]].float() * g[part, None]
                )
        dweight = dbias = None
        if for_weight:
            dweight = torch.zeros_like(weight).index_copy_(0, used, drows.to(weight.dtype))
        if for_bias:
            dbias = torch.zeros_like(bias, dtype=torch.float32).index_add_(0, ids, g)
            dbias = dbias.to(bias.dtype)
        return None if dhidden is None else dhidden.to(hidden.dtype), dweight, dbias, None


def kept_logprobs(logits: Tensor, kept: KeptIds) -> tuple[Tensor, Tensor]:
    """Log-probability of each token under the softmax over its own ids, and that one's entropy.

    `logits` (M,), divided by the temperature. -> (N,), (N,) in nats
    """
    count = len(kept.target_index)
    largest = logits.new_full((count,), -torch.inf)
    largest = largest.scatter_reduce(0, kept.token, logits.detach(), "amax")
    below = logits - largest[kept.token]
    total = segment_sum(below.exp(), kept.token, count)
    logp = below - total.log()[kept.token]
    return logp[kept.target_index], -segment_sum(logp.exp() * logp, kept.token, count)


def _iter_parts(count: int, width: int) -> Iterator[slice]:
    size = max(1, BLOCK_NUMBERS // width)
    yield from (slice(start, start + size) for start in range(0, count, size))
