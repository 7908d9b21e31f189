"""The policy terms of loss types that do not use the clipped ratio.

CISPO: MiniMax-M1 (arXiv 2506.13585); SAPO: arXiv 2511.20347; VESPO as in TRL 1.16.
"""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING

from rloo_cli.data.segments import segment_sum

if TYPE_CHECKING:
    from torch import Tensor

    from rloo_cli.algorithms.common.importance_weights import Weights
    from rloo_cli.data.packing import MicroBatch

VESPO = {"positive": (2.0, 3.0), "negative": (3.0, 2.0)}  # k and lambda
LEAST = log(1e-8)  # the smallest log weight of VESPO


def cispo_term(logp: Tensor, ratio: Tensor, advantage: Tensor, cap: float) -> Tensor:
    """-sg(min(rho, cap)) A logp: the weight is capped and no token loses its gradient.

    (N,) each -> (N,)
    """
    return -ratio.detach().clamp(max=cap) * advantage * logp


def sapo_term(ratio: Tensor, advantage: Tensor, up: float, down: float) -> Tensor:
    """-f(rho) A with f(x) = sigmoid(t (x - 1)) 4 / t: a soft gate, whose slope at 1 is 1.

    t is `up` where A > 0, else `down`. (U,), (U,) -> (U,)
    """
    t = advantage.new_tensor(up).where(advantage > 0, advantage.new_tensor(down))
    return -(t * (ratio - 1)).sigmoid() * 4 / t * advantage


def vespo_term(
    logp: Tensor,
    log_ratio: Tensor,
    advantage: Tensor,
    micro_batch: MicroBatch,
    weights: Weights | None,
) -> Tensor:
    """-sg(phi(w)) A logp with log phi = lambda + k log w - lambda w, phi(1) = 1, per token.

    w is the completion's ratio times its correction weight. (k, lambda) is (2, 3) where A >= 0,
    else (3, 2). (N,), (N,), (N,), weights (N,) or (S,) -> (N,)
    """
    d = (micro_batch.mask * log_ratio.detach()).clamp(-20.0, 20.0)
    index, count = micro_batch.sequence_ids, micro_batch.num_sequences
    log_w = segment_sum(d, index, count)
    if weights is not None:
        correction = weights.weight.log().clamp(LEAST, 20.0).to(log_w.dtype)
        if weights.by_token or correction.shape != log_w.shape:
            correction = segment_sum(micro_batch.mask * correction, index, count)
        log_w = log_w + correction
    log_w = log_w.clamp(LEAST, 20.0)[index]
    gains = advantage >= 0
    (k_up, l_up), (k_down, l_down) = VESPO["positive"], VESPO["negative"]
    k = advantage.new_tensor(k_up).where(gains, advantage.new_tensor(k_down))
    scale = advantage.new_tensor(l_up).where(gains, advantage.new_tensor(l_down))
    phi = (scale + k * log_w - scale * log_w.exp()).exp()
    return -phi * advantage * logp
