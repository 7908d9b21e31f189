"""Groups that are still being sampled, perhaps under successive versions of the weights
(generation.overlap=carry), and their form in a checkpoint.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rloo_cli.data.batch import Group, Rollout
from rloo_cli.data.prompts import Prompts
from rloo_cli.data.sampling_mask import SamplingMask, mask_tensors, read_mask_tensors
from rloo_cli.generation.common.stop_rule import StopRule
from rloo_cli.utils.files import JsonObject
from rloo_cli.utils.rng import derived_seed


@dataclass
class OpenCompletion:
    """A completion, as far as it has been sampled."""

    seed: int
    ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)  # of each id, of the weights that sampled it
    version_spans: list[tuple[int, int]] = field(default_factory=list)  # (version, tokens)
    finish_reason: str | None = None  # stop, length; None = unfinished
    sampling_mask: SamplingMask | None = None  # of each id; None = not kept

    @property
    def segment_seed(self) -> int:
        """The seed of the next tokens: its own at the start, else derived from the position."""
        return derived_seed(self.seed, "carry", len(self.ids)) if self.ids else self.seed

    def add_tokens(
        self,
        ids: list[int],
        logp: list[float],
        version: int,
        finish_reason: str | None,
        sampling_mask: SamplingMask | None = None,
    ) -> None:
        """Append tokens sampled by the weights of `version`, and the reason if it ended."""
        if sampling_mask is not None and (self.sampling_mask is not None or not self.ids):
            self.sampling_mask = self.sampling_mask or SamplingMask()
            self.sampling_mask.append_mask(sampling_mask)
        elif ids:
            self.sampling_mask = None  # without it for one part there is none for the whole
        self.ids += ids
        self.logp += logp
        if ids and self.version_spans and self.version_spans[-1][0] == version:
            self.version_spans[-1] = version, self.version_spans[-1][1] + len(ids)
        elif ids:
            self.version_spans.append((version, len(ids)))
        self.finish_reason = finish_reason  # last: from here on other threads see it as complete

    def count_tokens(self, version: int) -> int:
        """How many of its last tokens the weights of `version` sampled."""
        last = self.version_spans[-1] if self.version_spans else (version, 0)
        return last[1] if last[0] == version else 0

    def to_rollout(self, stop_rule: StopRule) -> Rollout:
        """The completion so far; an unfinished one has the reason `length`."""
        reason = self.finish_reason or "length"
        return Rollout(
            completion_ids=self.ids,
            text=stop_rule.text(self.ids),
            finish_reason=reason,
            terminated=stop_rule.terminated(self.ids, reason),
            seed=self.seed,
            weight_version=self.version_spans[0][0],
            behaviour_logp=self.logp,
            version_spans=list(self.version_spans),
            sampling_mask=self.sampling_mask,
        )


@dataclass
class OpenGroup:
    """K completions of one prompt. `deadline`: the last step, from 0, that may train on them."""

    group: Group
    completions: list[OpenCompletion]
    deadline: int

    @property
    def unfinished(self) -> list[OpenCompletion]:
        """The unfinished ones."""
        return [c for c in self.completions if c.finish_reason is None]


def dump_groups(groups: Sequence[OpenGroup]) -> tuple[dict[str, Tensor], JsonObject]:
    """Groups as named tensors and plain values."""
    completions = [c for g in groups for c in g.completions]
    tensors = {
        "ids": torch.tensor([i for c in completions for i in c.ids], dtype=torch.int64),
        "logp": torch.tensor([x for c in completions for x in c.logp], dtype=torch.float64),
    }
    lengths = [len(c.ids) for c in completions]
    tensors |= mask_tensors([c.sampling_mask for c in completions], lengths)
    return tensors, {
        "groups": [
            {
                "draw": g.group.prompt_offset,
                "deadline": g.deadline,
                "completions": [
                    {"seed": c.seed, "version_spans": c.version_spans, "reason": c.finish_reason}
                    for c in g.completions
                ],
            }
            for g in groups
        ]
    }


def load_groups(tensors: dict[str, Tensor], plain: JsonObject, prompts: Prompts) -> list[OpenGroup]:
    """Rebuild the groups of `dump_groups`. Prompts are read again."""
    ids, logp = tensors["ids"].tolist(), tensors["logp"].tolist()
    groups, start = [], 0
    for saved in plain["groups"]:
        completions = []
        for values in saved["completions"]:
            spans = [(version, count) for version, count in values["version_spans"]]
            end = start + sum(count for _, count in spans)
            parts = ids[start:end], logp[start:end], spans, values["reason"]
            completions.append(OpenCompletion(values["seed"], *parts))
            start = end
        group = prompts.groups_at(saved["draw"], 1)[0]
        groups.append(OpenGroup(group, completions, saved["deadline"]))
    whole = [c for group in groups for c in group.completions]
    masks = read_mask_tensors(tensors, [len(c.ids) for c in whole])
    for completion, mask in zip(whole, masks, strict=True):
        completion.sampling_mask = mask
    return groups
