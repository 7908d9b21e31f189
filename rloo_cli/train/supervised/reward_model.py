"""A reward model from preferences: Bradley-Terry, -log sigmoid(chosen - rejected).

The score is read at the last real token of prompt and completion, the end, found by its place:
padding and end may be one id. Source: Stiennon et al. (arXiv 2009.01325), equation of section 3.4;
the centring term is that of TRL's RewardTrainer (arXiv 2312.09244).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rloo_cli.config.schema import RewardModelConfig
from rloo_cli.train.supervised import fit
from rloo_cli.train.supervised.sft import ended


@dataclass(frozen=True)
class Pair:
    """Two completions of one prompt, each with the prompt and an end; ids."""

    chosen: list[int]
    rejected: list[int]


@dataclass(frozen=True)
class Objective:
    """Mean over pairs; `center` weighs (chosen + rejected)^2."""

    center: float = 0.0

    def length(self, row: Pair) -> int:
        """Tokens of the longer one."""
        return max(len(row.chosen), len(row.rejected))

    def units(self, row: Pair) -> int:
        """A pair counts once."""
        return 1

    def loss(self, model: Any, rows: Sequence[Pair]) -> tuple[Tensor, dict[str, float]]:
        """Summed over pairs; with it accuracy and margin. ()"""
        found = scores(model, [r.chosen for r in rows] + [r.rejected for r in rows])
        chosen, rejected = found.chunk(2)
        loss = bradley_terry(chosen, rejected, self.center)
        gap = (chosen - rejected).detach()
        # A tie says nothing: it counts half.
        right = (gap > 0).sum() + 0.5 * (gap == 0).sum()
        return loss.sum(), {"accuracy": float(right), "margin": float(gap.sum())}


def bradley_terry(chosen: Tensor, rejected: Tensor, center: float = 0.0) -> Tensor:
    """-log sigmoid(chosen - rejected) + center * (chosen + rejected)^2. (N,), (N,) -> (N,)"""
    return -nn.functional.logsigmoid(chosen - rejected) + center * (chosen + rejected) ** 2


def scores(model: Any, rows: Sequence[Sequence[int]]) -> Tensor:
    """The score of each row of ids at its last token, in float32. -> (N,)"""
    ids, mask = fit.padded(rows, model)
    hidden = model.base_model(input_ids=ids, attention_mask=mask)[0]  # (N, T, H)
    last = mask.sum(1) - 1
    read = hidden[torch.arange(len(rows), device=ids.device), last]
    return nn.functional.linear(read.float(), model.score.weight.float()).squeeze(-1)


def pair(prompt: str, chosen: str, rejected: str, tokenizer: Any) -> Pair:
    """Both texts as a reward of type `model` reads them: prompt and completion in one, then EOS."""
    return Pair(*(ended(prompt + text, tokenizer, True) for text in (chosen, rejected)))


def new_head(model: Any, seed: int) -> None:
    """Give the score head its first weights: N(0, 1 / (H + 1)), no bias (arXiv 2403.17031)."""
    weight = model.score.weight
    draw = torch.Generator().manual_seed(seed)
    first = torch.randn(weight.shape, generator=draw) / (weight.shape[1] + 1) ** 0.5
    with torch.no_grad():
        weight.copy_(first)


def of_strings(
    start: Path,
    rows: Sequence[tuple[str, str, str]],
    settings: RewardModelConfig,
    seed: int,
    folder: Path,
) -> None:
    """Train a reward model from the language model in `start` on (prompt, chosen, rejected), save
    it in `folder`: for made models."""
    tokenizer = AutoTokenizer.from_pretrained(start)
    model = AutoModelForSequenceClassification.from_pretrained(start, num_labels=1)
    new_head(model, seed)
    objective = Objective(settings.center_rewards_coefficient)
    fit.Fit(model, objective, settings, seed).run([pair(*row, tokenizer) for row in rows])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
