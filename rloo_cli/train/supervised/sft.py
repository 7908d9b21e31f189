"""Supervised fine-tuning: the likelihood of the data's completions.

The loss counts completion tokens and the EOS after them, and no other: a model that was not trained
on an EOS does not stop. Prompt and completion are tokenised separately, because in RLOO's sampling
a completion continues the prompt's own ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rloo_cli.config.schema import SftConfig
from rloo_cli.data import segments
from rloo_cli.train.supervised import fit
from rloo_cli.utils.errors import DataError, Problem


@dataclass(frozen=True)
class SftExample:
    """A prompt and its completion."""

    ids: list[int]
    completion_start: int  # where the completion begins; from here on the loss counts


@dataclass(frozen=True)
class SftObjective:
    """Mean negative log-likelihood of a completion token, in nats."""

    def length(self, example: SftExample) -> int:
        """Tokens of prompt, completion and EOS."""
        return len(example.ids)

    def loss_count(self, example: SftExample) -> int:
        """Tokens of completion and EOS."""
        return len(example.ids) - example.completion_start

    def loss(
        self, model: PreTrainedModel, examples: Sequence[SftExample]
    ) -> tuple[Tensor, dict[str, float]]:
        """The loss summed over completion tokens. (), {}"""
        ids, mask = fit.pad_right([example.ids for example in examples], model)
        starts = mask.new_tensor([example.completion_start for example in examples])[:, None]
        learned = mask.bool() & (mask.cumsum(1) > starts)  # (B, T), never the first position
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        learned = learned[:, 1:]
        return -segments.target_logprobs(logits[learned], ids[:, 1:][learned], 1.0).sum(), {}


def tokenize_example(
    prompt_ids: Sequence[int], completion: str, tokenizer: PreTrainedTokenizerBase
) -> SftExample:
    """Append the completion's ids and an EOS to a prompt's. Raises DataError without an EOS."""
    completion_ids = tokenize_with_eos(completion, tokenizer, False)
    return SftExample([*prompt_ids, *completion_ids], len(prompt_ids))


def tokenize_with_eos(
    text: str, tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool
) -> list[int]:
    """The ids of a text, closed by one EOS. `add_special_tokens`: with the tokenizer's BOS.

    A chat template may close a turn with EOS and a newline: the newline is left out.
    """
    if tokenizer.eos_token_id is None:
        what = "the tokenizer has no end-of-text token"
        why, fix = "a completion could never end", "model.tokenizer=PATH of one that has it"
        raise DataError(Problem(what, "model.tokenizer", why, fix))
    bare = text.rstrip()
    text = bare.removesuffix(tokenizer.eos_token) if bare.endswith(tokenizer.eos_token) else text
    ids = tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
    return [*ids, tokenizer.eos_token_id]


def train_sft_model(
    base_path: Path, pairs: Sequence[tuple[str, str]], settings: SftConfig, seed: int, folder: Path
) -> None:
    """Train the model in `base_path` on (prompt, completion) and save it in `folder`.

    For synthetic models.
    """
    tokenizer = AutoTokenizer.from_pretrained(base_path)
    model = AutoModelForCausalLM.from_pretrained(base_path)
    examples = [tokenize_example(tokenizer(p)["input_ids"], text, tokenizer) for p, text in pairs]
    fit.SupervisedTrainer(model, SftObjective(), settings, seed).train(examples)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
