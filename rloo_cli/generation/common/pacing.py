"""How many groups may be started, so that no token is too old when it is trained on.

With `generation.overlap=carry` groups of P prompts a step are started while older ones continue.
Steps count from 0; before step v the weights are of version v at most. A group started with the
weights of step u has the deadline u + max_lag: it must be in the batch of that step or of an
earlier one; then none of its tokens is older than max_lag.

Two rules meet every deadline, whatever the completions' lengths and durations:

1. Capacity (AReaL, arXiv 2505.24298, section 5.1): with the weights of step u, at most
   (u + max_lag + 1) * P groups are trained, waiting or in flight, all together.
2. Order: a step takes the P oldest groups that are left, and waits until all of them have finished.

Proof. A group started with the weights of step u is, by rule 1, among the first
(u + max_lag + 1) * P; by rule 2 these have been taken once step u + max_lag has. So no deadline is
missed, and no group waits for ever. If groups are dropped (resampling), later ones move up.

With overlap `none` the order is the same: a step's prompts do not depend on how long their
completions are. Taking whatever has finished would favour short completions at first.
"""

from collections.abc import Sequence


def group_capacity(step: int, max_lag: int, prompts_per_step: int, num_steps: int) -> int:
    """The most groups that may be trained, waiting or in flight with the weights of `step`.

    A run of `num_steps` steps starts no group that it would not train on.
    """
    return min(step + max_lag + 1, num_steps) * prompts_per_step


def keeps_deadlines(deadlines: Sequence[int], step: int, prompts_per_step: int) -> bool:
    """Whether steps from `step` on take the groups with these deadlines, oldest first, in time."""
    return all(
        step + index // prompts_per_step <= deadline for index, deadline in enumerate(deadlines)
    )
