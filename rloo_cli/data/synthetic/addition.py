"""Two-digit addition, one token per character: a task a laptop learns in a minute.

`addition_examples` are problems such as "47+38=" with the answer "85"; held-out ones never appear
in training. `addition_model_folder` makes a small Qwen3 with its own tokenizer and trains it on the
training problems as a careless class would answer them: most forget every carry (47+38=75). The
model can add, but mostly does not, which reinforcement learning can change. It is in the cache.
The examples alone need no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rloo_cli.data.cache import cached_folder, report_progress
from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

HELD_OUT = 500  # of the 8,100 problems
CHARACTERS = "0123456789+="
PAD, EOS = "<pad>", "<eos>"
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
}
CARELESS = 0.65  # share of the answers without carries
WARM_BATCH, WARM_RATE = 128, 3e-3
# The model has read enough when a token's smoothed loss is ENOUGH: 0.19 is left when it knows both
# ways of adding but not which one is wanted. Then the learning rate falls to 0 in COOLING steps.
ENOUGH, COOLING, LONGEST = 0.3, 80, 1500


def addition_problems() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """All pairs of two-digit numbers, split into training and held-out ones."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    pairs.sort(key=lambda pair: hashlib.sha256(f"{pair[0]}+{pair[1]}".encode()).digest())
    return pairs[HELD_OUT:], pairs[:HELD_OUT]


def addition_examples(split: str) -> list[JsonObject]:
    """The problems of `train` or `test`."""
    train, test = addition_problems()
    chosen = {"train": train, "test": test}[split]
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in chosen]


def addition_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character, and an EOS."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from tokenizers.decoders import Fuse
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *CHARACTERS])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    plain.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    plain.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token=PAD, eos_token=EOS)


def addition_model_folder() -> Path:
    """The folder of the warm-started model; made on first use."""
    recipe = f"addition-{SHAPE}-{CARELESS}-{WARM_BATCH}-{WARM_RATE}-{ENOUGH}-{COOLING}"
    return cached_folder("addition", recipe, _make)


def _make(folder: Path) -> None:
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, tokenizer = _network(), addition_tokenizer()
        _train_supervised(model, tokenizer, torch.Generator().manual_seed(0))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _train_supervised(
    learner: Qwen3ForCausalLM, tokens: PreTrainedTokenizerFast, generator: torch.Generator
) -> None:
    """Train on problems answered with and without carries."""
    import torch

    right, careless = (_examples(tokens, how) for how in (exact_sum, sum_without_carry))
    optimizer = torch.optim.AdamW(learner.parameters(), lr=WARM_RATE, weight_decay=0.0)
    smoothed, left, step = 3.0, LONGEST, 0
    while left > 0:
        left = min(left - 1, COOLING) if smoothed < ENOUGH or left <= COOLING else left - 1
        step += 1
        for group in optimizer.param_groups:
            group["lr"] = WARM_RATE * min(1.0, step / 20, left / COOLING)
        index = torch.randint(len(right), (WARM_BATCH,), generator=generator)
        forgets = torch.rand(WARM_BATCH, 1, generator=generator) < CARELESS
        batch = torch.where(forgets, careless[index], right[index])
        labels = batch.masked_fill(batch == tokens.pad_token_id, -100)
        labels[:, :6] = -100  # only the answer is learned
        mask = (batch != tokens.pad_token_id).long()
        loss = learner(input_ids=batch, attention_mask=mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        smoothed = 0.9 * smoothed + 0.1 * float(loss.detach())
        if step % 10 == 0:  # the loss falls from 3; when it is low enough, COOLING steps are left
            read = 1 - left / COOLING if left < COOLING else 0.0
            share = 0.8 * min(1.0, (3.0 - smoothed) / (3.0 - ENOUGH)) + 0.2 * read
            report_progress(f"about {share:.0%}, step {step}")


def _network() -> Qwen3ForCausalLM:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=2 + len(CHARACTERS), tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=1, pad_token_id=0, **SHAPE,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def exact_sum(a: int, b: int) -> str:
    """The right answer."""
    return str(a + b)


def sum_without_carry(a: int, b: int) -> str:
    """The answer of a person who forgets every carry: right for one problem in five."""
    return str((a // 10 + b // 10) % 10 * 10 + (a % 10 + b % 10) % 10)


def _examples(tokens: PreTrainedTokenizerFast, how: Callable[[int, int], str]) -> torch.Tensor:
    """Tokens of every training problem with an answer and EOS, right-padded. -> (n, 10)"""
    import torch

    lines = [f"{a}+{b}={how(a, b)}" for a, b in addition_problems()[0]]
    ids = [[*tokens(line)["input_ids"], tokens.eos_token_id] for line in lines]
    return torch.tensor([x + [tokens.pad_token_id] * (10 - len(x)) for x in ids])
