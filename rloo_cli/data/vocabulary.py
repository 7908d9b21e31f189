"""Checks that tokenizer, data and models have the same tokens, before any weights load."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rloo_cli.config.schema import GenerationConfig
from rloo_cli.data.prompts import Prompts
from rloo_cli.utils.errors import refuse

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_prompt_ids(
    tokenizer: "PreTrainedTokenizerBase",
    vocab_size: int | None,
    prompts: Mapping[str | None, Prompts],
) -> list[str]:
    """Check that the embedding has every token of the prompts. -> notes on unused tokens it lacks

    `vocab_size`: of the embedding, None = not known. `prompts`: by split. Raises ConfigError.
    """
    if vocab_size is None:
        return []
    used = {int(i) for split in prompts.values() for i in split.used_ids if i >= vocab_size}
    if used:
        shown = ", ".join(repr(t) for t in tokenizer.convert_ids_to_tokens(sorted(used)[:5]))
        why = f"the prompts use {shown}; the largest is {max(used)}, the model has {vocab_size}"
        fix = "model.tokenizer=this model's own, or a model with a larger embedding"
        what = f"{len(used)} tokens of the prompts are not in the model's embedding"
        refuse("model.tokenizer", what, fix, why)
    count = len(tokenizer)
    if count > vocab_size:
        return [f"warning: the tokenizer has {count} tokens, the model {vocab_size}; no prompt uses"
                " the others"]  # fmt: skip
    return []


def check_reference_tokenizer(
    tokenizer: "PreTrainedTokenizerBase", reference: "PreTrainedTokenizerBase"
) -> None:
    """Raise ConfigError if tokens have other ids in the tokenizer of model.ref_path."""
    if same_token_ids(tokenizer, reference):
        return
    theirs, added = reference.get_vocab(), tokenizer.get_added_vocab()
    ours = tokenizer.get_vocab().items()
    odd = sorted((i, token) for token, i in ours if token not in added and theirs.get(token) != i)
    shown = ", ".join(f"{t!r} is {i} and {theirs.get(t, 'missing')}" for i, t in odd[:3])
    why = f"{len(odd)} tokens have another id in the reference's tokenizer: {shown}"
    fix = "model.ref_path=a model of the policy's family, or null"
    what = "policy and reference have different vocabularies"
    refuse("model.ref_path", what, fix, why)


def check_vocabulary_sizes(policy_size: int, reference_size: int) -> None:
    """Raise ConfigError if policy and reference do not have the same number of tokens."""
    if policy_size != reference_size:
        why = f"the policy has {policy_size} tokens, the reference {reference_size}"
        what = "policy and reference have different vocabularies"
        refuse("model.ref_path", what, "model.ref_path=null", why)


def same_token_ids(ours: "PreTrainedTokenizerBase", theirs: "PreTrainedTokenizerBase") -> bool:
    """Whether two tokenizers have the same ids for the first one's ordinary tokens."""
    our_vocab, their_vocab, added = ours.get_vocab(), theirs.get_vocab(), ours.get_added_vocab()
    return all(their_vocab.get(w) == i for w, i in our_vocab.items() if w not in added)


def answer_budget_ids(tokenizer: "PreTrainedTokenizerBase", config: GenerationConfig) -> list[int]:
    """The ids of the text of generation.answer_budget; [] without one.

    Raises ConfigError if a completion with text and answer exceeds max_completion_length.
    """
    if (budget := config.answer_budget) is None:
        return []
    ids: list[int] = tokenizer.encode(budget.text, add_special_tokens=False)
    total, most = budget.at + len(ids) + budget.tokens, config.max_completion_length
    if total > most:
        what = f"a completion with a forced answer can have {total} tokens, more than {most}"
        why = f"at {budget.at} + the text's {len(ids)} + tokens {budget.tokens} = {total}"
        fix = f"generation.max_completion_length={total}"
        refuse("generation.answer_budget", what, fix, why)
    return ids


def check_stop_tokens(ids: Iterable[int], vocab_size: int, config: GenerationConfig) -> None:
    """Check that a completion can end before its length limit. Raises ConfigError.

    `ids`: the tokens that end a completion; `vocab_size`: of the embedding.
    """
    if config.ignore_eos or config.stop or any(0 <= i < vocab_size for i in ids):
        return
    answer = "neither has one"
    if ids:
        answer = f"the ids {sorted(ids)} are not among its {vocab_size} tokens"
    why = f"looked for an end-of-text token in tokenizer and model: {answer}"
    fix = (
        "generation.stop_token_ids=[ID], or generation.stop=[TEXT], or"
        " generation.ignore_eos=true for completions of full length"
    )
    refuse("generation.stop_token_ids", "no token can end a completion", fix, why)
