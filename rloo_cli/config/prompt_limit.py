"""How long a prompt may be: one answer for the data, an engine and a plan. Imports no torch."""

from collections.abc import Iterable

from rloo_cli.config import hf_cache, synthetic
from rloo_cli.config.schema import DatasetConfig, ModelConfig, RunConfig

VLLM_SECTIONS = {"vllm_server": "server", "vllm_colocate": "colocate"}  # backend -> its section
# Tokens of the longest prompt where data.max_prompt_length is null. A context of 131,072 tokens is
# no reason to plan memory, or to size an engine, for prompts that hardly any data set has.
DEFAULT_MAX_PROMPT_TOKENS = 4096


def model_context_length(model: ModelConfig) -> int | None:
    """The most positions of a model as its config.json says; None where that is not known here.

    Raises ValueError for a config.json that no model has.
    """
    if model.path.startswith(synthetic.MAKE_PREFIX):
        return synthetic.SYNTHETIC_CONTEXT_LENGTHS.get(
            model.path.removeprefix(synthetic.MAKE_PREFIX)
        )
    return hf_cache.read_context_length(hf_cache.read_model_config(model.path, model.revision))


def prompt_headroom(run: RunConfig, context_length: int | None) -> int | None:
    """Tokens that a completion of the full length leaves in the model's context, and in what the
    engine is told to hold; None where neither is known. It may be less than 1.
    """
    limits = [n for n in (context_length, _engine_limit(run)[1]) if n is not None]
    return min(limits) - run.generation.max_completion_length if limits else None


def max_prompt_tokens(
    run: RunConfig, sources: Iterable[DatasetConfig], context_length: int | None
) -> int:
    """Tokens of the longest prompt that any of these data sets may have; at least 1.

    `context`: the most positions of the model; None = not known.
    """
    asked = max(source.max_prompt_length or DEFAULT_MAX_PROMPT_TOKENS for source in sources)
    room = prompt_headroom(run, context_length)
    return max(1, asked if room is None else min(asked, room))


def describe_prompt_limit(run: RunConfig, context_length: int | None) -> str:
    """What a data.max_prompt_length of null became, and why, for the log."""
    room = prompt_headroom(run, context_length)
    key = "data.max_prompt_length"
    if room is None or room >= DEFAULT_MAX_PROMPT_TOKENS:
        why = f"the most while {key} is null; another number allows longer ones"
        return f"prompts of up to {DEFAULT_MAX_PROMPT_TOKENS} tokens: {why}"
    name, limit = _engine_limit(run)
    bound = f"the model's context of {context_length}"
    if limit is not None and (context_length is None or limit < context_length):
        bound = f"{name} = {limit}"
    why = f"{key} is null, and {bound} leaves no more beside generation.max_completion_length"
    return f"prompts of up to {room} tokens: {why} = {run.generation.max_completion_length}"


def _engine_limit(run: RunConfig) -> tuple[str, int | None]:
    """The key of a vLLM engine's most tokens, and its value; null where it is left to rloo."""
    section = VLLM_SECTIONS.get(run.generation.backend, "")
    engine = getattr(run.generation, section, None) if section else None
    return f"generation.{section}.max_model_len", getattr(engine, "max_model_len", None)
