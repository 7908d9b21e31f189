"""The loop that trains the made models of the TL;DR miniature, so that they need no extra.

`rloo sft` and `rloo reward-model` are TRL's trainers. What is made here has to be the same numbers
on every machine with the same torch, so it keeps a small loop of its own: batches of like length in
a seeded order, AdamW, a linear warm-up and a linear decay to 0.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    get_scheduler,
)

from rloo_cli.config.schema import RewardModelConfig, SftConfig, TrainingConfig
from rloo_cli.data import segments
from rloo_cli.data.order import like_length_batches

# Some examples -> their loss summed, (), and how many tokens or pairs it is a sum of.
BatchLoss = Callable[[Sequence[Any]], tuple[Tensor, int]]


def train_sft_model(
    base_path: Path, pairs: Sequence[tuple[str, str]], settings: SftConfig, seed: int, folder: Path
) -> None:
    """Train the model in `base_path` on (prompt, completion) and save it in `folder`."""
    tokenizer = AutoTokenizer.from_pretrained(base_path)
    model = AutoModelForCausalLM.from_pretrained(base_path)
    examples = []
    for prompt, completion in pairs:
        ids = tokenizer(prompt)["input_ids"]
        examples.append(([*ids, *_with_eos(completion, tokenizer)], len(ids)))

    def loss(batch: Sequence[tuple[list[int], int]]) -> tuple[Tensor, int]:
        """The loss counts completion tokens and their EOS, and no other."""
        ids, mask = _pad_right([ids for ids, _ in batch])
        starts = mask.new_tensor([start for _, start in batch])[:, None]
        learned = (mask.bool() & (mask.cumsum(1) > starts))[:, 1:]  # never the first position
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        logprobs = segments.target_logprobs(logits[learned], ids[:, 1:][learned], 1.0)
        return -logprobs.sum(), sum(len(ids) - start for ids, start in batch)

    _train(model, loss, examples, [len(ids) for ids, _ in examples], settings, seed)
    _save(model, tokenizer, folder)


def train_reward_model(
    base_path: Path,
    pairs: Sequence[tuple[str, str, str]],
    settings: RewardModelConfig,
    seed: int,
    folder: Path,
) -> None:
    """Train a reward model from the language model in `base_path` and save it in `folder`.

    `pairs`: (prompt, chosen, rejected). The loss is Bradley and Terry's, -log sigmoid(chosen -
    rejected); a score is read at the EOS.
    """
    tokenizer = AutoTokenizer.from_pretrained(base_path)
    model = AutoModelForSequenceClassification.from_pretrained(base_path, num_labels=1)
    _init_score_head(model, seed)
    examples = [
        tuple(_with_eos(prompt + text, tokenizer) for text in texts) for prompt, *texts in pairs
    ]

    def loss(batch: Sequence[tuple[list[int], list[int]]]) -> tuple[Tensor, int]:
        sequences = [pair[0] for pair in batch] + [pair[1] for pair in batch]
        chosen, rejected = _score_sequences(model, sequences).chunk(2)
        center = settings.center_rewards_coefficient * (chosen + rejected) ** 2
        return (-nn.functional.logsigmoid(chosen - rejected) + center).sum(), len(batch)

    _train(model, loss, examples, [max(map(len, pair)) for pair in examples], settings, seed)
    _save(model, tokenizer, folder)


def _init_score_head(model: PreTrainedModel, seed: int) -> None:
    """Initialize the score head: N(0, 1 / (H + 1)), no bias (arXiv 2403.17031)."""
    weight = model.score.weight
    generator = torch.Generator().manual_seed(seed)
    initial = torch.randn(weight.shape, generator=generator) / (weight.shape[1] + 1) ** 0.5
    with torch.no_grad():
        weight.copy_(initial)


def _score_sequences(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> Tensor:
    """The score of each sequence of ids at its last token. -> (N,)"""
    ids, mask = _pad_right(sequences)
    hidden = model.base_model(input_ids=ids, attention_mask=mask)[0]  # (N, T, H)
    scores: Tensor = model.score(hidden[torch.arange(len(sequences)), mask.sum(1) - 1])
    return scores.squeeze(-1)


def _train(
    model: PreTrainedModel,
    loss_of: BatchLoss,
    examples: Sequence[Any],
    lengths: Sequence[int],
    settings: TrainingConfig,
    seed: int,
) -> None:
    """Train all weights of a float32 model on a CPU. `lengths`: tokens of each example."""
    steps = math.ceil(settings.epochs * len(examples) / settings.batch_size)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        weights, lr=settings.learning_rate, weight_decay=settings.weight_decay
    )
    schedule = get_scheduler("linear", optimizer, settings.warmup_steps, steps)
    batches = like_length_batches(lengths, settings.batch_size, seed)
    model.train()
    for _, indices in zip(range(steps), batches, strict=False):
        loss, count = loss_of([examples[i] for i in indices])
        (loss / count).backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.get_total_norm([p.grad for p in weights if p.grad is not None])
        if settings.max_grad_norm is not None:
            nn.utils.clip_grads_with_norm_(weights, settings.max_grad_norm, norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def _with_eos(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of a text and an EOS."""
    return [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]


def _pad_right(sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Right-padded ids and their mask, (B, T) each."""
    width = max(map(len, sequences))
    ids = torch.tensor([[*ids] + [0] * (width - len(ids)) for ids in sequences])
    lengths = torch.tensor([*map(len, sequences)])
    return ids, (torch.arange(width) < lengths[:, None]).long()


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
