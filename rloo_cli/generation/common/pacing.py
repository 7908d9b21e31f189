"""How many groups may be begun, and which are trained next, so that no token is too old.

With `generation.overlap=carry` groups of P prompts a step are begun while older ones go on. Steps
are counted from 0; before step v the weights are of version v at most. A group that is begun with
the weights of step u has the deadline u + max_lag: it must be in the batch of that step or of an
earlier one, and then none of its tokens is older than max_lag.

Two rules keep every deadline, whatever the completions' lengths are and however long they take:

1. Capacity (AReaL, arXiv 2505.24298, section 5.1): with the weights of step u, at most
   (u + max_lag + 1) * P groups are trained, waiting or under way, all together.
2. Choice: step v takes the P finished groups with the earliest deadlines, and waits for more as
   long as afterwards, for any j >= 0, more than j * P groups with a deadline of v + j or earlier
   would be left.

Proof. Let n(j) be the number of groups left with a deadline of v + j at most, before step v.
(a) n(j) <= (j + 1) * P. For j <= max_lag - 2 these were begun with the weights of step v - 2 or
older ones: they were there when step v - 1 chose, and rule 2 says so, with j + 1. For
j = max_lag - 1 they are of version v - 1 at most; by rule 1 there were (v + max_lag) * P of those,
and v * P are trained. For j >= max_lag it is rule 1 with the weights of step v.
(b) So the wait ends: rule 1 lets at least P groups be left, and once all of them have finished,
taking the P with the earliest deadlines leaves max(0, n(j) - P) <= j * P.
(c) Rule 2 with j = 0 leaves no group whose deadline is v: no deadline is ever passed, and, since
every group has one, none waits for ever. Where groups are dropped (resampling), n(j) only falls.
Taking the earliest deadlines is the best choice: exchanging one of them for a later one raises n.
"""

from collections import Counter
from collections.abc import Sequence


def group_capacity(step: int, max_lag: int, prompts_per_step: int, num_steps: int) -> int:
    """The most groups that may be trained, waiting or under way with the weights of `step`.

    A run of `num_steps` steps begins none that it would not train on.
    """
    return min(step + max_lag + 1, num_steps) * prompts_per_step


def choose_groups(
    finished: Sequence[int], unfinished: Sequence[int], step: int, count: int, prompts_per_step: int
) -> list[int] | None:
    """Indices into `finished` of the `count` groups that `step` takes; None = wait for more.

    Groups are given by their deadlines. Of equal ones the first are taken.
    """
    if len(finished) < count:
        return None
    order = sorted(range(len(finished)), key=lambda i: finished[i])
    left = [finished[i] for i in order[count:]] + list(unfinished)
    return order[:count] if keeps_deadlines(left, step + 1, prompts_per_step) else None


def keeps_deadlines(deadlines: Sequence[int], step: int, prompts_per_step: int) -> bool:
    """Whether steps from `step` on can take groups with these deadlines, each in time."""
    due, total = Counter(deadlines), 0
    for deadline in sorted(due):
        total += due[deadline]
        if total > (deadline - step + 1) * prompts_per_step:
            return False
    return True
