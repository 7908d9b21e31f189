"""Groups of unequal lengths, policies of each layout and head, and the rows alone to compare."""

import torch
from policy_cases import fresh, rollout

from rloo_cli.data.batch import Group
from rloo_cli.data.packing import pack_micro_batch, whole_group_slices
from rloo_cli.policy import load, shared_attention
from rloo_cli.policy.model import Policy

# Lengths of a prompt and of its completions: unequal, of a single token, one alone, equal ones.
SEVERAL = ((7, (5, 1, 3)), (4, (2, 6, 4)), (1, (1, 1)), (9, (20,)), (3, (4, 4, 4)))


def made(lengths=SEVERAL, words=40, seed=1):
    """Groups of random ids of these lengths."""
    draw = torch.Generator().manual_seed(seed)

    def ids(count):
        return torch.randint(words, (count,), generator=draw).tolist()

    return [
        Group(i, {}, "", ids(p), [rollout(ids(c)) for c in completions])
        for i, (p, completions) in enumerate(lengths)
    ]


def laid(groups, layout, parts=None, masked=None):
    """All completions of all groups, or some parts of them, in a layout."""
    return pack_micro_batch(
        groups, parts or whole_group_slices(groups, range(len(groups))), masked, layout=layout
    )


def policy(name, layout, fused=True, checkpointed=False, model=None, temperature=0.7):
    """A policy as `levels.settle` would leave it at this layout, without its gates."""
    model = fresh(name) if model is None else model
    load.zero_dropout(model)
    model.train()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    found = Policy(model, temperature)
    found.layout, found.logprob_module.use_fused_head = layout, fused
    if layout == "shared":
        shared_attention.install_shared_attention(model)
    return found


def gradients(model):
    """Of all weights, by name."""
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def worst(found, expected):
    """Relative L2 distance of the tensor that is farthest off; of tiny ones to the largest."""
    assert found.keys() == expected.keys()
    floor = 1e-2 * max(float(g.norm()) for g in expected.values())
    return max(
        float((found[n] - g).norm()) / max(float(g.norm()), floor) for n, g in expected.items()
    )
