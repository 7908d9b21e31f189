"""What was sampled, and how it is laid out for a forward pass.

`Rollout` is one completion, `Group` the K completions of one draw of a prompt. They stay together
from sampling to gradient. `pack` lays whole groups out as one `Micro`-batch and aligns its
columns, once: from then on everything per token is a flat column over the completion tokens of
the micro-batch, (N,), and `sequence` says which completion a token belongs to. No column knows
how the rows were laid out, so a packed or prefix-shared layout can replace this padded one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Prompt = str | list[dict[str, Any]]


@dataclass
class Rollout:
    """One completion: what was sampled, by whom and how."""

    completion_ids: list[int]  # T ids, the stop token (or the stop string's tokens) included
    text: str  # without the stop token, stop string cut off
    finish_reason: str  # stop, length
    terminated: bool  # it ended by itself (OBJECTIVE 7); truncated otherwise
    seed: int
    weight_version: int  # optimizer updates its sampler had seen
    behaviour_logp: list[float] | None = None  # T, as the sampler really drew
    mask: list[int] | None = None  # T, 1 = sampled by the policy; None = all of them
    images: list[Any] | None = None

    @property
    def length(self) -> int:
        """T, the trained tokens."""
        return len(self.completion_ids) if self.mask is None else sum(self.mask)


@dataclass
class Group:
    """K completions of one draw of a prompt, and everything computed per token for them."""

    draw: int  # place in the step's global order
    row: dict[str, Any]  # the data set's other columns
    prompt: Prompt
    prompt_ids: list[int]
    rollouts: list[Rollout] = field(default_factory=list)
    old_logp: list[Tensor] | None = None  # K of (T,), the policy at rollout time
    ref_logp: list[Tensor] | None = None  # K of (T,), the reference


@dataclass
class Micro:
    """Whole groups laid out for one forward pass. S = sequences = groups * K, N = their tokens."""

    index: list[int]  # which groups of the step
    input_ids: Tensor  # (S, L) right-padded rows of prompt + completion
    position_ids: Tensor  # (S, L)
    attention_mask: Tensor  # (S, L), from lengths, never from the pad id
    source: Tensor  # (N,) place in the flattened rows that predicts each completion token
    target: Tensor  # (N,) the token
    sequence: Tensor  # (N,) which of the S sequences it belongs to
    mask: Tensor  # (N,) float, 1 = sampled by the policy and trained on
    behaviour_logp: Tensor | None = None  # (N,), NaN where the sampler did not say
    old_logp: Tensor | None = None  # (N,)
    ref_logp: Tensor | None = None  # (N,)

    @property
    def sequences(self) -> int:
        return self.input_ids.shape[0]


def pack(
    groups: Sequence[Group],
    index: Sequence[int],
    dropped: Tensor | None = None,
    device: torch.device | str = "cpu",
) -> Micro:
    """Lay the groups `index` of `groups` out for a forward pass.

    `dropped` (P, K) bool: rows whose mask is 0 (truncated completions that are masked out). They
    keep their place, so that whole groups stay whole.
    """
    chosen = [groups[i] for i in index]
    pairs = [(g.prompt_ids, r) for g in chosen for r in g.rollouts]
    lengths = [len(p) + len(r.completion_ids) for p, r in pairs]
    width = max(lengths)
    ids = torch.zeros(len(pairs), width, dtype=torch.long)
    for row, (prompt, rollout) in enumerate(pairs):
        ids[row, : lengths[row]] = torch.tensor(prompt + rollout.completion_ids)
    places = torch.arange(width)
    attention = (places < torch.tensor(lengths)[:, None]).long()
    spans = [
        row * width + len(p) - 1 + torch.arange(len(r.completion_ids))
        for row, (p, r) in enumerate(pairs)
    ]
    source = torch.cat(spans)
    counts = torch.tensor([len(s) for s in spans])
    sequence = torch.repeat_interleave(torch.arange(len(pairs)), counts)
    mask = torch.tensor(
        [m for _, r in pairs for m in (r.mask or [1] * len(r.completion_ids))], dtype=torch.float32
    )
    if dropped is not None:
        mask = mask * (~dropped[list(index)].reshape(-1))[sequence].to(mask.dtype)
    micro = Micro(
        index=list(index),
        input_ids=ids,
        position_ids=(places * attention),
        attention_mask=attention,
        source=source,
        target=ids.reshape(-1)[source + 1],
        sequence=sequence,
        mask=mask,
        behaviour_logp=_behaviour(pairs),
        old_logp=_column([g.old_logp for g in chosen]),
        ref_logp=_column([g.ref_logp for g in chosen]),
    )
    for name, value in vars(micro).items():
        if isinstance(value, Tensor):
            setattr(micro, name, value.to(device))
    return micro


def unpack(column: Tensor, micro: Micro, groups: Sequence[Group], name: str) -> None:
    """Store a (N,) column of a micro-batch on its groups, as the attribute `name`."""
    lengths = [len(r.completion_ids) for i in micro.index for r in groups[i].rollouts]
    parts = iter(column.detach().cpu().split(lengths))
    for i in micro.index:
        setattr(groups[i], name, [next(parts) for _ in groups[i].rollouts])


def _behaviour(pairs: list[tuple[list[int], Rollout]]) -> Tensor | None:
    if all(r.behaviour_logp is None for _, r in pairs):
        return None
    nan = float("nan")
    flat = [x for _, r in pairs for x in (r.behaviour_logp or [nan] * len(r.completion_ids))]
    return torch.tensor(flat, dtype=torch.float32)


def _column(parts: list[list[Tensor] | None]) -> Tensor | None:
    if any(p is None for p in parts):
        return None
    return torch.cat([t for p in parts for t in p or []])
