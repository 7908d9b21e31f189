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
    kl_logp: list[Tensor] | None = None  # K of (T,), the same at the KL's own temperature
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
    kl_logp: Tensor | None = None  # (N,) old_logp at the KL's temperature; None = the same
    ref_logp: Tensor | None = None  # (N,)

    @property
    def kl_old(self) -> Tensor:
        """What the KL is measured from. (N,)"""
        old = self.old_logp if self.kl_logp is None else self.kl_logp
        assert old is not None, "old_logp is not known yet"
        return old

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
        kl_logp=_column([g.kl_logp for g in chosen]),
        ref_logp=_column([g.ref_logp for g in chosen]),
    )
    for name, value in vars(micro).items():
        if isinstance(value, Tensor):
            setattr(micro, name, value.to(device))
    return micro


def unpack(column: Tensor | None, micro: Micro, groups: Sequence[Group], name: str) -> None:
    """Store a (N,) column of a micro-batch on its groups, as the attribute `name`."""
    if column is None:
        return
    lengths = [len(r.completion_ids) for i in micro.index for r in groups[i].rollouts]
    parts = iter(torch.split(column.detach().cpu(), lengths))
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


@dataclass
class Batch:
    """One step's groups, with what is known of each row before any update. P groups of K rows."""

    step: int
    groups: list[Group]
    names: list[str]  # of the F rewards
    raw: Tensor  # (F, P, K) float64, what each reward said; NaN = it does not apply
    score: Tensor  # (P, K) float64, weights applied
    shaped: Tensor  # (P, K) float64, after penalties, normalising and clipping
    scorable: Tensor  # (P, K) bool
    masked: Tensor  # (P, K) bool, rows out of the loss
    active: list[int]  # the groups that are trained on
    draws: int  # prompts consumed for this step, resampled ones included
    facts: dict[str, float] = field(default_factory=dict)  # counts and metrics of its making
    extras: dict[str, list[Any]] = field(default_factory=dict)  # column -> P*K values
    notes: list[str] = field(default_factory=list)
    kl: Tensor | None = None  # (P, K) float64
    reward: Tensor | None = None  # (P, K) float64, score minus beta * KL
    advantage: Tensor | None = None  # (P, K) float64
    usable: Tensor | None = None  # (P, K) bool, rows that have an advantage
    norm_skipped: bool = False
    updated: list[int] = field(default_factory=list)  # the groups of updates that were made

    def table(self, value: str) -> Tensor:
        """An attribute of every rollout, as a tensor. -> (P, K)"""
        return torch.tensor([[getattr(r, value) for r in g.rollouts] for g in self.groups])

    def settle(self, index: list[int], kl: Tensor | None, found: Any) -> None:
        """Keep the KL, reward and advantage of the groups `index` (an algorithm's Advantages)."""
        if self.advantage is None:
            self.reward = torch.zeros_like(self.shaped)
            self.advantage = torch.zeros_like(self.shaped)
            self.usable = torch.zeros_like(self.scorable)
        assert self.reward is not None and self.usable is not None
        self.reward[index], self.advantage[index] = found.reward, found.advantage
        self.usable[index] = found.usable
        self.norm_skipped = self.norm_skipped or found.norm_skipped
        if kl is not None:
            self.kl = torch.zeros_like(self.shaped) if self.kl is None else self.kl
            self.kl[index] = kl

    def advantages_of(self, index: list[int], like: Tensor) -> tuple[Tensor, Tensor]:
        """Advantage and usable of these groups' rows, on the device and in the dtype of `like`.

        -> (S,), (S,)
        """
        assert self.advantage is not None and self.usable is not None
        value = self.advantage[index].reshape(-1).to(like.device, like.dtype)
        return value, self.usable[index].reshape(-1).to(like.device)
