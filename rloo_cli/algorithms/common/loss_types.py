"""Other policy terms than the clipped ratio, those of some of the loss types of GRPO's kin.

CISPO: MiniMax-M1 (arXiv 2506.13585); SAPO: arXiv 2511.20347; VESPO as in TRL 1.16.
"""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING

from rloo_cli.data.segments import row_sum

if TYPE_CHECKING:
    from torch import Tensor

    from rloo_cli.algorithms.common.importance_weights import Weights
    from rloo_cli.data.packing import Micro

SAPO = {"positive": 1.0, "negative": 1.05}  # temperatures, TRL's defaults
VESPO = {"positive": (2.0, 3.0), "negative": (3.0, 2.0)}  # k and lambda
LEAST = log(1e-8)  # of VESPO's log weight


def cispo(logp: Tensor, rho: Tensor, advantage: Tensor, cap: float) -> Tensor:
    """-sg(min(rho, cap)) A logp: the weight is capped and no token loses its gradient.

    (N,) each -> (N,)
    """
    return -rho.detach().clamp(max=cap) * advantage * logp


def sapo(rho: Tensor, advantage: Tensor) -> Tensor:
    """-f(rho) A with f(x) = sigmoid(t (x - 1)) 4 / t: a soft gate, whose slope at 1 is 1.

    t is 1 where A > 0, else 1.05. (U,), (U,) -> (U,)
    """
    up, down = SAPO["positive"], SAPO["negative"]
    t = advantage.new_tensor(up).where(advantage > 0, advantage.new_tensor(down))
    return -(t * (rho - 1)).sigmoid() * 4 / t * advantage


def vespo(
    logp: Tensor, log_ratio: Tensor, advantage: Tensor, micro: Micro, weights: Weights | None
) -> Tensor:
    """-sg(phi(w)) A logp with log phi = lambda + k log w - lambda w, phi(1) = 1, per token.

    w is the completion's ratio times its correction weight. (k, lambda) is (2, 3) where A >= 0,
    else (3, 2). (N,), (N,), (N,), weights (N,) or (S,) -> (N,)
    """
    d = (micro.mask * log_ratio.detach()).clamp(-20.0, 20.0)
    whole = row_sum(d, micro.sequence, micro.sequences)
    if weights is not None:
        more = weights.weight.log().clamp(LEAST, 20.0).to(whole.dtype)
        by_row = more.shape == whole.shape and not weights.by_token
        whole = whole + (
            more if by_row else row_sum(micro.mask * more, micro.sequence, micro.sequences)
        )
    whole = whole.clamp(LEAST, 20.0)[micro.sequence]
    gains = advantage >= 0
    (k_up, l_up), (k_down, l_down) = VESPO["positive"], VESPO["negative"]
    k = advantage.new_tensor(k_up).where(gains, advantage.new_tensor(k_down))
    scale = advantage.new_tensor(l_up).where(gains, advantage.new_tensor(l_down))
    phi = (scale + k * whole - scale * whole.exp()).exp()
    return -phi * advantage * logp
