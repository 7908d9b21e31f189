"""The order `train.micro_batch_order=virtual_time`: groups as an engine in lock step ends them.

Training on groups while others are still being sampled (generation.overlap=stream) needs an order
that no clock decides. In virtual time every unfinished completion gains one token a tick, so a
group ends at the tick that is the length of its longest completion; groups that end together are
ordered by their index. That is a function of the batch's lengths alone, and near the order in which
a real engine ends them. Where an engine begins completions later, since it has no room for all of
them, is no part of it: its room is a matter of placement, which a resumed run may change.
"""

from collections.abc import Sequence
from itertools import takewhile

from rloo_cli.data.batch import Group


def virtual_order(longest: Sequence[int]) -> list[int]:
    """Groups in the order of virtual time, given the length of each one's longest completion."""
    return sorted(range(len(longest)), key=lambda i: (longest[i], i))


def order_groups(groups: Sequence[Group], group_indices: Sequence[int]) -> list[int]:
    """These groups' indices in virtual time; every completion counts, forwarded or not."""
    longest = [longest_completion(groups[i]) for i in group_indices]
    return [group_indices[n] for n in virtual_order(longest)]


def longest_completion(group: Group) -> int:
    """The tokens of a whole group's longest completion."""
    return max(len(rollout.completion_ids) for rollout in group.rollouts)


def released_groups(longest: Sequence[int], is_finished: Sequence[bool]) -> list[int]:
    """The groups whose place in `virtual_order` cannot change any more, in that order.

    `longest`: of a finished group the length of its longest completion; of any other a number of
    tokens that its longest completion will have at least. Groups are sorted by (longest, index),
    and the finished ones before the first that is not finished are released.

    Why this is final: let f be the last group released, and u any group that is not finished now.
    u stands behind f, so (longest_u, u) > (longest_f, f). Its true length is at least longest_u, so
    its true key is behind f's, too; keys of finished groups are true already. So no group that is
    not released can come before f, and released ones have their true order among each other. Later
    answers begin with this one, therefore, and the last of them is `virtual_order`.
    """
    order = virtual_order(longest)
    return [*takewhile(lambda i: is_finished[i], order)]
