"""The divergence of a student's distributions from a teacher's, over the whole vocabulary.

Both models' logits of a micro-batch are kept whole: tokens times vocabulary. The values computed
from them are several times as large, so they are computed in blocks of tokens,
and again in the backward pass.
"""

import math

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

BLOCK_LOGITS = 2**24  # logits of a block: 64 MB of float32


def generalized_jsd(student: Tensor, teacher: Tensor, temperature: float, beta: float) -> Tensor:
    """beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p, in nats per token.

    p is the student's distribution, q the teacher's, at this temperature (GKD, arXiv 2306.13649,
    eq. 1). At both ends that is 0; there its limit after division by beta or by 1 - beta is
    used instead, as in TRL: KL(q || p) for beta = 0, KL(p || q) for beta = 1.
    (N, V), (N, V) -> (N,)
    """
    p = (_at_least_float32(student) / temperature).log_softmax(-1)
    q = (_at_least_float32(teacher) / temperature).log_softmax(-1)
    if beta == 0:
        return _kl_divergence(q, p)
    if beta == 1:
        return _kl_divergence(p, q)
    mixture = torch.logaddexp(p + math.log1p(-beta), q + math.log(beta))
    return beta * _kl_divergence(q, mixture) + (1 - beta) * _kl_divergence(p, mixture)


def blockwise_jsd(student: Tensor, teacher: Tensor, temperature: float, beta: float) -> Tensor:
    """`generalized_jsd` in blocks of tokens, which keep nothing for the backward pass.

    (N, V), (N, V) -> (N,)
    """
    size = max(1, BLOCK_LOGITS // student.shape[-1])
    blocks = zip(student.split(size), teacher.split(size), strict=True)
    parts: list[Tensor] = [
        checkpoint(generalized_jsd, p, q, temperature, beta, use_reentrant=False) for p, q in blocks
    ]
    return torch.cat(parts)


def _kl_divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) of log-probabilities. (N, V), (N, V) -> (N,)"""
    return (p.exp() * (p - q)).sum(-1)


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
