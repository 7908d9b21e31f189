"""ReMax (arXiv 2310.10505): the baseline is the score of the prompt's greedy completion.

    A_i  = r_i - s(greedy completion of the prompt)        r_i = s_i - beta * KL_i
    loss = -1/N sum_i A_i sum_t logp_t

Each prompt has one additional greedy completion; it is scored and shaped like the others, has no KL
in its score, and is never trained on. A prompt whose greedy completion has no score is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from rloo_cli.algorithms.common.completion_rules import needed_value_problems
from rloo_cli.algorithms.common.config import Switches
from rloo_cli.algorithms.rloo import RLOO
from rloo_cli.config.schema import RunConfig, key
from rloo_cli.utils.errors import Problem


class Config(Switches):
    name: Literal["remax"] = key("ReMax")

    @property
    def needs_greedy(self) -> bool:
        """Each prompt is answered once more, greedily."""
        return True


class ReMax(RLOO[Config]):
    """Advantages are RLOO's, with the greedy completion's score as the baseline."""

    def rules(self, run: RunConfig) -> Iterator[Problem]:
        """Settings that normalize scores, which do not apply to a greedy completion's score."""
        yield from super().rules(run)
        needed = {"normalize_rewards": False, "multi_reward": "sum"}
        why = "a greedy completion's score cannot be normalized over the sampled ones"
        yield from needed_value_problems(self.config, "algorithm=remax", needed, why)
