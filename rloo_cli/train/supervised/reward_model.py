"""A reward model from preferences: Bradley-Terry, -log sigmoid(chosen - rejected).

The score is read at the last real token of prompt and completion, the EOS, found by its position:
padding and EOS may be one id. Source: Stiennon et al. (arXiv 2009.01325), equation of section 3.4;
the centring term is that of TRL's RewardTrainer (arXiv 2312.09244).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rloo_cli.config.schema import RewardModelConfig
from rloo_cli.policy.model import replaced_forward
from rloo_cli.train.supervised import fit
from rloo_cli.train.supervised.sft import tokenize_with_eos


@dataclass(frozen=True)
class PreferencePair:
    """Two completions of one prompt, each with the prompt and an EOS, as ids."""

    chosen: list[int]
    rejected: list[int]


@dataclass(frozen=True)
class PreferenceObjective:
    """The Bradley-Terry loss of a pair; `center` weighs (chosen + rejected)^2."""

    center: float = 0.0

    def length(self, example: PreferencePair) -> int:
        """Tokens of the longer sequence."""
        return max(len(example.chosen), len(example.rejected))

    def loss_count(self, example: PreferencePair) -> int:
        """1: the loss is averaged over pairs."""
        return 1

    def loss(
        self, model: PreTrainedModel, examples: Sequence[PreferencePair]
    ) -> tuple[Tensor, dict[str, float]]:
        """The loss summed over pairs, (), with accuracy and margin."""
        sequences = [pair.chosen for pair in examples] + [pair.rejected for pair in examples]
        chosen, rejected = score_sequences(model, sequences).chunk(2)
        loss = bradley_terry_loss(chosen, rejected, self.center)
        gap = (chosen - rejected).detach()
        # A tie counts half.
        right = (gap > 0).sum() + 0.5 * (gap == 0).sum()
        return loss.sum(), {"accuracy": float(right), "margin": float(gap.sum())}


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, center: float = 0.0) -> Tensor:
    """-log sigmoid(chosen - rejected) + center * (chosen + rejected)^2. (N,), (N,) -> (N,)"""
    return -nn.functional.logsigmoid(chosen - rejected) + center * (chosen + rejected) ** 2


def score_sequences(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> Tensor:
    """The score of each sequence of ids at its last token, in float32. -> (N,)"""
    ids, mask = fit.pad_right(sequences, model)
    hidden = model.base_model(input_ids=ids, attention_mask=mask)[0]  # (N, T, H)
    last = mask.sum(1) - 1
    read = hidden[torch.arange(len(sequences), device=ids.device), last]
    head = model.score

    def float32_head(states: Tensor) -> Tensor:
        return nn.functional.linear(states.float(), head.weight.float())

    with replaced_forward(head, float32_head):  # by a call, for which its weights are gathered
        scores: Tensor = head(read).squeeze(-1)
    return scores


def tokenize_pair(
    prompt: str, chosen: str, rejected: str, tokenizer: PreTrainedTokenizerBase
) -> PreferencePair:
    """Tokenize both as a reward of type `model` does: prompt and completion, then EOS."""
    return PreferencePair(
        *(tokenize_with_eos(prompt + text, tokenizer, True) for text in (chosen, rejected))
    )


def init_score_head(model: PreTrainedModel, seed: int) -> None:
    """Initialise the score head: N(0, 1 / (H + 1)), no bias (arXiv 2403.17031)."""
    weight = model.score.weight
    generator = torch.Generator().manual_seed(seed)
    initial = torch.randn(weight.shape, generator=generator) / (weight.shape[1] + 1) ** 0.5
    with torch.no_grad():
        weight.copy_(initial)


def train_reward_model(
    base_path: Path,
    pairs: Sequence[tuple[str, str, str]],
    settings: RewardModelConfig,
    seed: int,
    folder: Path,
) -> None:
    """Train a reward model from the language model in `base_path` and save it in `folder`.

    `pairs`: (prompt, chosen, rejected). For synthetic models.
    """
    tokenizer = AutoTokenizer.from_pretrained(base_path)
    model = AutoModelForSequenceClassification.from_pretrained(base_path, num_labels=1)
    init_score_head(model, seed)
    objective = PreferenceObjective(settings.center_rewards_coefficient)
    examples = [tokenize_pair(*texts, tokenizer) for texts in pairs]
    fit.SupervisedTrainer(model, objective, settings, seed).train(examples)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
