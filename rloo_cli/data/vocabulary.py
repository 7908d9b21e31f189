"""Whether tokenizer, data and models speak of the same tokens, before any weights load."""

from collections.abc import Iterable, Mapping
from typing import Any

from rloo_cli.config.schema import GenerationConfig
from rloo_cli.data.prompts import Prompts
from rloo_cli.utils.errors import ConfigError, Problem


def check_prompt_ids(
    tokenizer: Any, vocab_size: int | None, prompts: Mapping[str | None, Prompts]
) -> list[str]:
    """Every token of the prompts has a row in the embedding; notes on tokens that have none.

    `size`: rows of the embedding, None = not known. Raises ConfigError.
    """
    if vocab_size is None:
        return []
    used = {
        i
        for prompts in prompts.values()
        for ids in prompts.prompt_ids
        for i in ids
        if i >= vocab_size
    }
    if used:
        shown = ", ".join(repr(t) for t in tokenizer.convert_ids_to_tokens(sorted(used)[:5]))
        why = f"the prompts use {shown}; the largest id is {max(used)}, and {vocab_size} are known"
        fix = "model.tokenizer=the one of this model, or a model whose embedding was enlarged"
        what = f"{len(used)} tokens of the prompts are unknown to the model"
        raise ConfigError(Problem(what, "model.tokenizer", why, fix))
    count = len(tokenizer)
    if count > vocab_size:
        return [f"warning: the tokenizer has {count} tokens, the model {vocab_size}; no prompt uses"
                " the others"]  # fmt: skip
    return []


def check_reference_tokenizer(tokenizer: Any, reference: Any) -> None:
    """Raises ConfigError where the tokenizer of model.ref_path gives words other ids."""
    if same_token_ids(tokenizer, reference):
        return
    theirs, added = reference.get_vocab(), tokenizer.get_added_vocab()
    ours = tokenizer.get_vocab().items()
    odd = sorted((i, w) for w, i in ours if w not in added and theirs.get(w) != i)
    shown = ", ".join(f"{w!r} is {i} and {theirs.get(w, 'nothing')}" for i, w in odd[:3])
    why = f"{len(odd)} tokens have another id in the reference's tokenizer: {shown}"
    fix = "model.ref_path=a model of the policy's family, or null"
    what = "policy and reference differ in vocabulary"
    raise ConfigError(Problem(what, "model.ref_path", why, fix))


def same_token_ids(ours: Any, theirs: Any) -> bool:
    """Whether two tokenizers give one id to each word that is no special token of the first."""
    own, other = ours.get_vocab(), theirs.get_vocab()
    return all(other.get(w) == i for w, i in own.items() if w not in ours.get_added_vocab())


def check_stop_tokens(ids: Iterable[int], vocab_size: int, config: GenerationConfig) -> None:
    """A completion can end before its longest length. Raises ConfigError.

    `ids`: that end a completion; `size`: rows of the embedding.
    """
    if config.ignore_eos or config.stop or any(0 <= i < vocab_size for i in ids):
        return
    found = (
        f"the ids {sorted(ids)} are none of its {vocab_size} tokens" if ids else "neither says one"
    )
    raise ConfigError(
        Problem(
            "no token ends a completion",
            "generation.stop_token_ids",
            f"tokenizer and model were asked for their end-of-text token: {found}",
            "generation.stop_token_ids=[ID], or generation.stop=[TEXT], or"
            " generation.ignore_eos=true for completions of full length",
        )
    )
