"""ReMax (arXiv 2310.10505): the baseline is the score of the prompt's greedy completion.

    A_i  = r_i - s(greedy completion of the prompt)        r_i = s_i - beta * KL_i
    loss = -1/N sum_i A_i sum_t logp_t

The greedy completion costs one more per prompt; it is scored and shaped as the others are, has no
KL in its score, and is never trained on. A prompt whose greedy completion has no score is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from rloo_cli.algorithms.common import rules
from rloo_cli.algorithms.common.rules import Switches
from rloo_cli.config.schema import RunConfig, key
from rloo_cli.utils.errors import Problem


class Config(Switches):
    name: Literal["remax"] = key("ReMax")

    @property
    def greedy(self) -> bool:
        """Each prompt is answered once more, greedily."""
        return True


def problems(run: RunConfig) -> Iterator[Problem]:
    """Conflicts between keys."""
    yield from rules.problems(run)
    config = rules.switches(run)
    for name, plain in {"normalize_rewards": False, "multi_reward": "sum"}.items():
        if getattr(config, name) != plain:
            yield Problem(
                "a greedy completion's score cannot be normalised over the sampled ones",
                f"algorithm.{name}",
                f"{name}={getattr(config, name)} with algorithm=remax",
                f"algorithm.{name}={str(plain).lower()}",
            )
