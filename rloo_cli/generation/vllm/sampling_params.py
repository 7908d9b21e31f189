"""vLLM's sampling parameters for a completion, each with an explicit value.

A server's defaults are not used, for they come from the model's own generation config.
"""

from collections.abc import Collection, Iterator
from typing import Any

from rloo_cli.config.rules_sampling import keeps_masks
from rloo_cli.config.schema import GenerationConfig
from rloo_cli.utils.errors import Problem
from rloo_cli.utils.files import JsonObject

WHOLE_VOCABULARY = 2**24  # as top_k: more ids than any vocabulary has
RESERVED_PARAMS = {  # of vLLM's SamplingParams -> what sets them
    "n": "algorithm.num_generations", "seed": "seed", "temperature": "generation.temperature",
    "max_tokens": "generation.max_completion_length", "min_tokens": "generation.min_tokens",
    "top_p": "generation.top_p", "top_k": "generation.top_k", "min_p": "generation.min_p",
    "repetition_penalty": "generation.repetition_penalty", "stop": "generation.stop",
    "stop_token_ids": "generation.stop_token_ids", "ignore_eos": "generation.ignore_eos",
    "logprobs": "nothing: each token's own is asked for", "detokenize": "nothing",
    "prompt_logprobs": "nothing", "skip_special_tokens": "nothing", "output_kind": "nothing",
    "flat_logprobs": "nothing", "include_stop_str_in_output": "nothing", "extra_args": "nothing",
}  # fmt: skip


def completion_params(
    config: GenerationConfig, stop_ids: Collection[int], seed: int, greedy: bool,
    temperature: float | None,
) -> JsonObject:  # fmt: skip
    """The parameters of a run's completion; `temperature` None is that of the config."""
    given = parity_params(config, stop_ids, seed, config.max_completion_length)
    given |= {
        "min_tokens": config.min_tokens,
        "stop": config.stop,
        "detokenize": bool(config.stop),
        "repetition_penalty": config.repetition_penalty,
    }
    given |= config.kwargs
    masked = keeps_masks(config)
    if greedy:  # an engine that sends masks refuses a temperature of 0, and top_k of 0
        return given | ({"temperature": 1.0, "top_k": 1} if masked else {"temperature": 0.0})
    given |= filter_params(config)
    if temperature is None:
        return given
    # Of held-out prompts no mask is kept, so that no limit may cut what they are answered with.
    whole = {"top_k": config.top_k or WHOLE_VOCABULARY} if masked else {}
    return given | whole | {"temperature": temperature}


def filter_params(config: GenerationConfig) -> JsonObject:
    """What cuts the distribution of a completion that is trained on.

    An engine that sends masks wants a top_k, which bounds them. One id more than a mask may have is
    no limit of ours: a token that was chosen from so many ends the run.
    """
    most = config.max_sampling_mask_ids + 1 if keeps_masks(config) else 0
    return {"top_p": config.top_p, "top_k": config.top_k or most, "min_p": config.min_p or 0.0}


def engine_params(values: JsonObject) -> Any:
    """vLLM's SamplingParams of these values, of which one is a mapping where it wants an object."""
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams  # lazy: slow

    if values.get("logit_bias") is not None:  # JSON's keys are strings
        values = values | {"logit_bias": {int(i): b for i, b in values["logit_bias"].items()}}
    form = values.get("structured_outputs")
    if isinstance(form, dict):
        values = values | {"structured_outputs": StructuredOutputsParams(**form)}
    return SamplingParams(**values)


def sampling_kwargs_problems(kwargs: JsonObject) -> Iterator[Problem]:
    """Names in generation.kwargs that other keys have, or that would hide what was sampled."""
    for name in kwargs:
        if name in RESERVED_PARAMS:
            what = f"generation.kwargs.{name} is rloo's own business"
            fix = f"leave out generation.kwargs.{name}"
            yield Problem(what, "generation.kwargs", f"set by {RESERVED_PARAMS[name]}", fix)


def parity_params(
    config: GenerationConfig, stop_ids: Collection[int], seed: int, max_tokens: int
) -> JsonObject:
    """The parameters for the parity check: only the temperature changes the distribution, and
    what cuts it where its masks are known."""
    filters = filter_params(config) if keeps_masks(config) else {}
    return {
        "seed": seed,
        "temperature": config.temperature,
        "max_tokens": max_tokens,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "ignore_eos": True,  # the stop ids below are all of them
        "stop_token_ids": sorted(stop_ids),
        "logprobs": 0,  # the sampled token's own
        "detokenize": False,
        "skip_special_tokens": True,
    } | filters
