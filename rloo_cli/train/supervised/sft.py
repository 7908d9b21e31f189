"""Supervised fine-tuning: the likelihood of the completions that stand in the data.

The loss is of completion tokens alone, and of the end that follows them: a model that has never
seen an end does not stop. Prompt and completion are tokenised apart, as RLOO will sample: what it
is asked to go on from is the prompt's own ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from rloo_cli.config.schema import SftConfig
from rloo_cli.data import segments
from rloo_cli.train.supervised import fit
from rloo_cli.utils.errors import DataError, Problem


@dataclass(frozen=True)
class SftExample:
    """A prompt with the completion that is to follow it."""

    ids: list[int]
    completion_start: int  # where the completion begins; from here on the loss counts


@dataclass(frozen=True)
class SftObjective:
    """Mean negative log-likelihood of a completion token, in nats."""

    def length(self, example: SftExample) -> int:
        """Tokens of prompt, completion and end."""
        return len(example.ids)

    def loss_count(self, example: SftExample) -> int:
        """Tokens of completion and end."""
        return len(example.ids) - example.completion_start

    def loss(self, model: Any, examples: Sequence[SftExample]) -> tuple[Tensor, dict[str, float]]:
        """Summed over completion tokens. (), {}"""
        ids, mask = fit.pad_right([row.ids for row in examples], model)
        starts = mask.new_tensor([row.completion_start for row in examples])[:, None]
        learned = mask.bool() & (mask.cumsum(1) > starts)  # (B, T), never the first place
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        learned = learned[:, 1:]
        return -segments.target_logprobs(logits[learned], ids[:, 1:][learned], 1.0).sum(), {}


def tokenize_example(prompt_ids: Sequence[int], completion: str, tokenizer: Any) -> SftExample:
    """A prompt's ids and the text that is to follow, with an end if it has none.

    Raises DataError where the tokenizer has no end.
    """
    return SftExample(
        [*prompt_ids, *tokenize_with_eos(completion, tokenizer, False)], len(prompt_ids)
    )


def tokenize_with_eos(text: str, tokenizer: Any, add_special_tokens: bool) -> list[int]:
    """The ids of a text, closed by one EOS. `begin`: with the tokenizer's own beginning.

    A chat template may close a turn with EOS and a line's end: what follows EOS is left out.
    """
    if tokenizer.eos_token_id is None:
        what = "the tokenizer has no end-of-text token"
        raise DataError(Problem(what, "model.tokenizer", "a completion could never end"))
    bare = text.rstrip()
    text = bare.removesuffix(tokenizer.eos_token) if bare.endswith(tokenizer.eos_token) else text
    return [
        *tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"],
        tokenizer.eos_token_id,
    ]


def train_sft_model(
    base_path: Path, pairs: Sequence[tuple[str, str]], settings: SftConfig, seed: int, folder: Path
) -> None:
    """Train the model in `start` on (prompt, completion), save it in `folder`: for made models."""
    tokenizer = AutoTokenizer.from_pretrained(base_path)
    model = AutoModelForCausalLM.from_pretrained(base_path)
    examples = [tokenize_example(tokenizer(p)["input_ids"], text, tokenizer) for p, text in pairs]
    fit.SupervisedTrainer(model, SftObjective(), settings, seed).train(examples)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
