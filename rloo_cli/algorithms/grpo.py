"""GRPO, group-relative policy optimization (arXiv 2402.03300), and its variants by `loss_type`.

    A_i  = (s_i - group mean) / (group std + 1e-4)        equal scores: exactly 0
    l_t  = -min(rho_t A_i, clip(rho_t) A_i) + beta * k3_t     rho_t = pi(y_t) / pi_old(y_t)
    loss = the l_t as `loss_type` combines them (common/config.py: TRIPLES)

advantage_scale: group, batch (std of the step's scores) or none (Dr. GRPO). The mean over each
completion's tokens (loss_type=grpo) favours short right and long wrong completions, because a
token of a long completion weighs less; dapo and dr_grpo do not.
"""

from __future__ import annotations

from typing import Literal

from rloo_cli.algorithms.common.config import Switches
from rloo_cli.algorithms.rloo import RLOO
from rloo_cli.config.schema import MAX_GENERATIONS, key


class Config(Switches):
    name: Literal["grpo"] = key("Group-relative policy optimization")
    num_generations: int = key("Completions per prompt, at least 2", ge=2, le=MAX_GENERATIONS)


class GRPO(RLOO[Config]):
    """Advantages are RLOO's, with the switches of `conf/algorithm/grpo.yaml`."""
