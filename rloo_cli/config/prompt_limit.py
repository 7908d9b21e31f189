"""Computes the maximum prompt length for the data, an engine and a plan alike. Imports no torch."""

from collections.abc import Iterable

from rloo_cli.config import hf_cache, synthetic
from rloo_cli.config.schema import DatasetConfig, GenerationConfig, ModelConfig

# Tokens of the longest prompt if data.max_prompt_length is null. Planning memory, or sizing an
# engine, for a whole context of 131,072 tokens would be a waste: prompts are rarely that long.
DEFAULT_MAX_PROMPT_TOKENS = 4096


def model_context_length(model: ModelConfig) -> int | None:
    """A model's context length in tokens, from its config.json; None if unknown.

    Raises ValueError for an impossible config.json.
    """
    if model.path.startswith(synthetic.MAKE_PREFIX):
        name = model.path.removeprefix(synthetic.MAKE_PREFIX)
        return synthetic.SYNTHETIC_CONTEXT_LENGTHS.get(name)
    return hf_cache.read_context_length(hf_cache.read_model_config(model.path, model.revision))


def prompt_headroom(generation: GenerationConfig, context_length: int | None) -> int | None:
    """Tokens that the longest completion leaves for the prompt, in the model's context and in the
    engine's max_model_len; None if neither is known. It may be less than 1.
    """
    limits = [n for n in (context_length, _engine_limit(generation)[1]) if n is not None]
    return min(limits) - generation.max_completion_length if limits else None


def max_prompt_tokens(
    generation: GenerationConfig, sources: Iterable[DatasetConfig], context_length: int | None
) -> int:
    """Tokens of the longest prompt that any of these data sets may have; at least 1.

    `context_length`: that of the model in tokens; None = not known.
    """
    limit = max(source.max_prompt_length or DEFAULT_MAX_PROMPT_TOKENS for source in sources)
    headroom = prompt_headroom(generation, context_length)
    return max(1, limit if headroom is None else min(limit, headroom))


def describe_prompt_limit(generation: GenerationConfig, context_length: int | None) -> str:
    """The limit used if data.max_prompt_length is null, and why, for the log."""
    headroom = prompt_headroom(generation, context_length)
    key = "data.max_prompt_length"
    if headroom is None or headroom >= DEFAULT_MAX_PROMPT_TOKENS:
        why = f"the default maximum while {key} is null; set it to allow longer ones"
        return f"prompts of up to {DEFAULT_MAX_PROMPT_TOKENS} tokens: {why}"
    name, limit = _engine_limit(generation)
    bound = f"the model's context of {context_length}"
    if limit is not None and (context_length is None or limit < context_length):
        bound = f"{name} = {limit}"
    why = f"{key} is null, and {bound} leaves that much beside generation.max_completion_length"
    return f"prompts of up to {headroom} tokens: {why} = {generation.max_completion_length}"


def _engine_limit(generation: GenerationConfig) -> tuple[str, int | None]:
    """The name of the backend's key max_model_len, and its value; None without vLLM, or if null."""
    name = f"generation.{generation.section}.max_model_len"
    return name, generation.own_keys.max_model_len if generation.is_engine else None
