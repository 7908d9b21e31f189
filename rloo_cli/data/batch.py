"""Rollouts, with their scores, log-probabilities and advantages.

`Rollout` is one completion, `Group` the K completions of one sampled prompt. They stay together
from sampling to gradient. `Batch` is a step's groups. `packing` lays them out for forward passes.
Rollouts and groups need no torch: rewards can be tried without it.

With tools or environments a completion is an episode, a list of `Turn`. Its flat ids also contain
the environment's tokens, which the model only reads. Log-probability, KL, entropy, value, advantage
and length cover only a completion's S sampled tokens (data/packing.py has S completions, N tokens).
The text of a forced answer (generation.answer_budget) is read like these.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rloo_cli.data.sampling_mask import SamplingMask
from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:
    from torch import Tensor

    from rloo_cli.data.media import Media

Prompt = str | list[JsonObject]
Value = TypeVar("Value")
CONSTANTS = {str, int, float, bool, bytes, type(None)}  # immutable types


def copy_value(value: Any) -> Any:
    """A deep copy of a row's value, or of an argument, as far as it is mutable."""
    if type(value) in CONSTANTS:
        return value
    if isinstance(value, list):
        constant = {*map(type, value)} <= CONSTANTS  # token ids: one pass in C
        return value.copy() if constant else [copy_value(one) for one in value]
    if isinstance(value, dict):
        return {name: copy_value(one) for name, one in value.items()}
    return copy.deepcopy(value)


@dataclass
class Turn:
    """One call of the sampler within an episode: the new prompt tokens, and the sampled ones."""

    prompt_ids: list[int]  # new tokens before the sampled ones; [] if it answers the group's prompt
    sampled_ids: list[int]  # the stop token (or the stop string's tokens) included
    logp: list[float] | None  # of each sampled id, of the sampler's own distribution
    text: str  # what was sampled, without the stop token
    finish_reason: str  # stop, length
    weight_version: int
    calls: list[JsonObject] = field(default_factory=list)  # name and arguments, as they were parsed
    observation: list[JsonObject] = field(default_factory=list)  # the messages of prompt_ids
    reward: float | None = None  # the turn's reward from the environment; None = none
    begins_row: bool = False  # prompt_ids are a whole prompt, without earlier turns
    sampling_mask: SamplingMask | None = None  # of sampled_ids
    images: list[str] = field(default_factory=list)  # in prompt_ids: the base64 of PNG files


# The fields of a batch, for code that saves one.
BATCH_TENSORS = ("raw", "score", "shaped", "scorable", "masked")  # every batch has them
ADVANTAGE_TENSORS = ("kl", "reward", "advantage", "usable")  # once advantages are known
OPTIONAL_BATCH_TENSORS = ("greedy", "plain")  # only some algorithms set them
BATCH_VALUES = ("step", "names", "active", "draws", "norm_skipped", "updated")
# Only in batches whose groups were started in earlier steps (generation.overlap=carry).
CARRIED_VALUES = ("pending", "left_out")
ROLLOUT_FIELDS = ("text", "finish_reason", "terminated", "seed", "weight_version")


@dataclass
class Rollout:
    """One completion: its tokens, and how it was sampled. S of its T tokens are the policy's."""

    completion_ids: list[int]  # T ids, the stop token (or the stop string's tokens) included
    text: str  # without the stop token, stop string cut off; of an episode: its last turn's
    finish_reason: str  # stop, length
    terminated: bool  # it ended on its own; False = truncated
    seed: int
    weight_version: int  # optimizer updates in its sampler's weights at the start
    behaviour_logp: list[float] | None = None  # T, of the sampler's own distribution
    mask: list[int] | None = None  # T, 1 = sampled by the policy, 0 = read; None = all 1
    images: list[object] | None = None
    turns: list[Turn] | None = None  # of an episode; None = one answer to the prompt
    failed: str | None = None  # why its environment failed: it has no score, and is left out
    # of baseline and loss. None = it did not fail.
    opening_ids: list[int] | None = None  # its group's prompt, if the environment changed it
    environment: JsonObject | None = None  # the environment's public attributes at the end
    environment_reward: float | None = None  # its get_reward() and its turns' rewards
    episode_facts: JsonObject | None = None  # counts of its calls, and why it ended
    columns: JsonObject | None = None  # from a user function, for rewards
    # (version, tokens) of the weights that sampled it, one after the other; None = one version.
    version_spans: list[tuple[int, int]] | None = None
    # S, the ids that each was chosen from; None = the whole vocabulary, or not kept.
    sampling_mask: SamplingMask | None = None
    # Of an episode with images: the prompt's and its own (`episode_media.row_media`).
    media: Media | None = field(default=None, compare=False, repr=False)

    def __getstate__(self) -> JsonObject:
        """Without pixels and processor: other ranks read the turns' images themselves."""
        return vars(self) | {"media": None}

    @property
    def row_starts(self) -> list[int]:
        """Indices in its ids where further rows begin: separate prompts, which read nothing before.

        An episode has several rows if its agent truncated its history, or ran a second agent.
        They share its score and its advantage.
        """
        starts, offset = [], 0
        for turn in self.turns or []:
            if turn.begins_row and offset:
                starts.append(offset)
            offset += len(turn.prompt_ids) + len(turn.sampled_ids)
        return starts

    @property
    def token_versions(self) -> list[int]:
        """The version of the weights that sampled each sampled token. (S,)"""
        spans = self.version_spans or [(self.weight_version, self.length)]
        return [version for version, count in spans for _ in range(count)]

    def count_tokens(self, version: int) -> int:
        """How many of its last tokens the weights of `version` sampled."""
        last, count = (self.version_spans or [(self.weight_version, self.length)])[-1]
        return count if last == version else 0

    @property
    def last_version(self) -> int:
        """The version of the weights that sampled its last token."""
        return self.version_spans[-1][0] if self.version_spans else self.weight_version

    @property
    def length(self) -> int:
        """The number of sampled tokens, S."""
        return len(self.completion_ids) if self.mask is None else sum(self.mask)

    @property
    def has_forced_answer(self) -> bool:
        """Whether it did not end in time, and got the text of generation.answer_budget."""
        return self.mask is not None and self.turns is None

    @property
    def failed_in_environment(self) -> bool:
        """Whether it has no score because its environment failed."""
        return self.failed is not None

    @property
    def sampled_ids(self) -> list[int]:
        """The tokens that the policy sampled. (S,)"""
        return self.completion_ids if self.mask is None else self._sampled(self.completion_ids)

    @property
    def sampled_logp(self) -> list[float] | None:
        """The sampler's log-probabilities of these. (S,)"""
        if self.behaviour_logp is None or self.mask is None:
            return self.behaviour_logp
        return self._sampled(self.behaviour_logp)

    def _sampled(self, values: list[Value]) -> list[Value]:
        assert self.mask is not None
        return [value for value, kept in zip(values, self.mask, strict=True) if kept]

    @classmethod
    def from_turns(cls, turns: list[Turn], terminated: bool, seed: int) -> Rollout:
        """An episode's rollout, with flat ids, mask and log-probabilities; it has a turn at least.

        The environment's tokens have the mask 0 and the log-probability NaN.
        """
        nan, last = float("nan"), turns[-1]
        logps = [turn.logp or [nan] * len(turn.sampled_ids) for turn in turns]
        known = any(turn.logp is not None for turn in turns)
        flat = [
            x
            for t, logp in zip(turns, logps, strict=True)
            for x in (*[nan] * len(t.prompt_ids), *logp)
        ]
        return cls(
            completion_ids=[i for turn in turns for i in (*turn.prompt_ids, *turn.sampled_ids)],
            text=last.text,
            finish_reason=last.finish_reason,
            terminated=terminated,
            seed=seed,
            weight_version=min(turn.weight_version for turn in turns),
            behaviour_logp=flat if known else None,
            mask=[m for t in turns for m in (*[0] * len(t.prompt_ids), *[1] * len(t.sampled_ids))],
            turns=turns,
            sampling_mask=_turns_mask(turns),
        )


def _turns_mask(turns: list[Turn]) -> SamplingMask | None:
    """The sampling mask of an episode's turns; None if any turn has none."""
    joined = SamplingMask()
    for turn in turns:
        if turn.sampled_ids and turn.sampling_mask is None:
            return None
        joined.append_mask(turn.sampling_mask or SamplingMask())
    return joined


@dataclass
class Group:
    """K completions of one sampled prompt, and everything computed per token for them."""

    prompt_offset: int  # position in the endless order of prompts
    example: JsonObject  # the data set's other columns
    prompt: Prompt
    prompt_ids: list[int]
    rollouts: list[Rollout] = field(default_factory=list)
    old_logp: list[Tensor] | None = None  # K of (S,), the policy that sampled, by the trainer
    kl_logp: list[Tensor] | None = None  # K of (S,), old_logp at the KL's own temperature
    ref_logp: list[Tensor] | None = None  # K of (S,), the reference
    value: list[Tensor] | None = None  # K of (S,), the value model at rollout time
    entropy: list[Tensor] | None = None  # K of (S,), the policy's, for top_entropy_quantile
    advantage: list[Tensor] | None = None  # K of (S,), where every token has its own
    returns: list[Tensor] | None = None  # K of (S,), what the value model is fitted to
    media: Media | None = None  # the prompt's images; None = no images
    # The most tokens to sample for it in one call; None = generation.max_completion_length.
    max_tokens: int | None = None

    def take_rollouts(self, rollouts: list[Rollout]) -> None:
        """Store the sampled rollouts, and the prompt that the sampler really got."""
        self.rollouts = rollouts
        if rollouts and rollouts[0].opening_ids is not None:
            self.prompt_ids = rollouts[0].opening_ids


class AdvantageColumns(Protocol):
    """An algorithm's `Advantages` (algorithms/common/hooks.py)."""

    @property
    def reward(self) -> Tensor: ...
    @property
    def advantage(self) -> Tensor: ...
    @property
    def usable(self) -> Tensor: ...
    @property
    def norm_skipped(self) -> bool: ...


@dataclass
class Batch:
    """One step's P groups of K completions, with their scores, rewards and advantages."""

    step: int
    groups: list[Group]
    names: list[str]  # of the F rewards
    raw: Tensor  # (F, P, K) float64, what each reward returned; NaN = it does not apply
    score: Tensor  # (P, K) float64, weights applied
    shaped: Tensor  # (P, K) float64, after penalties, normalizing and clipping
    scorable: Tensor  # (P, K) bool
    masked: Tensor  # (P, K) bool, True = whole completion out of the loss
    active: list[int]  # indices of the groups that are trained on
    draws: int  # prompts consumed by this step, discarded ones included
    facts: dict[str, float] = field(default_factory=dict)  # metrics of sampling and scoring
    fact_counts: dict[str, float] = field(default_factory=dict)  # number of values behind each mean
    extras: dict[str, list[object]] = field(default_factory=dict)  # column -> P*K values
    notes: list[str] = field(default_factory=list)
    kl: Tensor | None = None  # (P, K) float64
    reward: Tensor | None = None  # (P, K) float64, score minus beta * KL
    advantage: Tensor | None = None  # (P, K) float64
    usable: Tensor | None = None  # (P, K) bool, completions that have an advantage
    greedy: Tensor | None = None  # (P,) float64, shaped score of each prompt's greedy completion
    reward_weights: Tensor | None = None  # (F,) float64, of the rewards
    # (P, K) float64, the weighted sum of raw scores, shown by metrics where `score` is another
    # number (multi_reward=normalize_then_sum).
    plain: Tensor | None = None
    norm_skipped: bool = False
    updated: list[int] = field(default_factory=list)  # indices of the groups of updates made
    # Prompt offsets that are drawn but wait for a later step; None = a step draws its own.
    pending: list[int] | None = None
    left_out: list[int] = field(default_factory=list)  # offsets that resampling replaced

    @property
    def group_columns(self) -> dict[str, Tensor | None]:
        """The tensors with a row per group, as sampling and scoring make them."""
        return {
            "score": self.score, "shaped": self.shaped, "scorable": self.scorable,
            "masked": self.masked, "greedy": self.greedy, "plain": self.plain,
        }  # fmt: skip

    @property
    def plain_values(self) -> JsonObject:
        """The fields that are neither tensors nor parts of rollouts, for saving a batch."""
        carried = CARRIED_VALUES if self.pending is not None else ()
        return {name: getattr(self, name) for name in (*BATCH_VALUES, *carried)}

    @property
    def num_sampled(self) -> int:
        """Completions (not tokens) sampled for this step, with discarded and greedy ones."""
        per_prompt = self.score.shape[1] + (self.greedy is not None)
        return int(self.draws * per_prompt)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompts (K copies each) and completions, including those of environments."""
        rows = [(group, rollout) for group in self.groups for rollout in group.rollouts]
        return sum(len(g.prompt_ids) + len(r.completion_ids) for g, r in rows)

    def rollout_values(self, attribute: str) -> Tensor:
        """An attribute of every rollout, as a tensor. -> (P, K)"""
        import torch

        return torch.tensor([[getattr(r, attribute) for r in g.rollouts] for g in self.groups])

    def add_kl(self, index: list[int], kl: Tensor) -> None:
        """Add KLs of the groups `index`, (len(index), K): 0 for completions without one."""
        import torch

        self.kl = torch.zeros_like(self.shaped) if self.kl is None else self.kl
        self.kl[index] += kl

    def set_advantages(self, index: list[int], advantages: AdvantageColumns) -> None:
        """Store rewards and advantages of the groups `index`, (len(index), K) each."""
        import torch

        if self.advantage is None:
            self.reward = torch.zeros_like(self.shaped)
            self.advantage = torch.zeros_like(self.shaped)
            self.usable = torch.zeros_like(self.scorable)
        assert self.reward is not None and self.usable is not None
        self.reward[index], self.advantage[index] = advantages.reward, advantages.advantage
        self.usable[index] = advantages.usable
        self.norm_skipped = self.norm_skipped or advantages.norm_skipped
