"""REINFORCE with a simple baseline, or none (Williams 1992), for comparison with RLOO.

    A_i  = r_i - b                             b = mean of r over the step, itself included
    loss = -1/N sum_i A_i sum_t logp_t         r_i = s_i - beta * KL_i

b is `batch_mean`, `ema` (moving average of earlier steps) or `none`. The step's mean contains the
reward it is subtracted from, so it shrinks the gradient by (B-1)/B; no siblings are needed.
"""

from __future__ import annotations

from typing import Literal

from rloo_cli.algorithms.common.config import Switches
from rloo_cli.algorithms.rloo import RLOO
from rloo_cli.config.schema import key


class Config(Switches):
    name: Literal["reinforce"] = key("REINFORCE with the step's mean, a moving average, or nothing")


class Reinforce(RLOO[Config]):
    """Advantages are RLOO's, with a baseline from outside the group."""
