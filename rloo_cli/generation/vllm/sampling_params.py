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
    "logprobs": "rloo: each token's own is always requested", "detokenize": "rloo",
    "prompt_logprobs": "rloo", "skip_special_tokens": "rloo", "output_kind": "rloo",
    "flat_logprobs": "rloo", "include_stop_str_in_output": "rloo", "extra_args": "rloo",
}  # fmt: skip


def completion_params(
    config: GenerationConfig, stop_ids: Collection[int], seed: int, greedy: bool,
    temperature: float | None,
) -> JsonObject:  # fmt: skip
    """The parameters of a run's completion; `temperature` None means the config's."""
    given = parity_params(config, stop_ids, seed, config.max_completion_length)
    given |= {
        "min_tokens": config.min_tokens,
        "stop": config.stop,
        "detokenize": bool(config.stop),
        "repetition_penalty": config.repetition_penalty,
    }
    given |= config.kwargs
    masked = keeps_masks(config)
    if greedy:  # an engine that sends masks refuses temperature 0 and top_k 0
        return given | ({"temperature": 1.0, "top_k": 1} if masked else {"temperature": 0.0})
    given |= filter_params(config)
    if temperature is None:
        return given
    # No mask is kept for held-out prompts, so no mask limit may cut their answers.
    whole = {"top_k": config.top_k or WHOLE_VOCABULARY} if masked else {}
    return given | whole | {"temperature": temperature}


def filter_params(config: GenerationConfig) -> JsonObject:
    """The filters of the distribution of a completion that is trained on.

    An engine that sends masks needs a top_k, which bounds them. It is one above the mask limit,
    so that it does not limit sampling: a token chosen from that many ids ends the run.
    """
    most = config.max_sampling_mask_ids + 1 if keeps_masks(config) else 0
    return {"top_p": config.top_p, "top_k": config.top_k or most, "min_p": config.min_p or 0.0}


def engine_params(values: JsonObject) -> Any:
    """vLLM's SamplingParams of these values, one of which must be an object there."""
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams  # lazy: slow

    if values.get("logit_bias") is not None:  # JSON's keys are strings
        values = values | {"logit_bias": {int(i): b for i, b in values["logit_bias"].items()}}
    form = values.get("structured_outputs")
    if isinstance(form, dict):
        values = values | {"structured_outputs": StructuredOutputsParams(**form)}
    return SamplingParams(**values)


def sampling_kwargs_problems(kwargs: JsonObject) -> Iterator[Problem]:
    """Names in generation.kwargs that have their own keys, or would hide what was sampled."""
    for name in kwargs:
        if name in RESERVED_PARAMS:
            what = f"generation.kwargs.{name} cannot be set here"
            fix = f"leave out generation.kwargs.{name}"
            yield Problem(what, "generation.kwargs", f"set by {RESERVED_PARAMS[name]}", fix)


def parity_params(
    config: GenerationConfig, stop_ids: Collection[int], seed: int, max_tokens: int
) -> JsonObject:
    """The parameters for the parity check: only the temperature changes the distribution, and
    its filters if the masks are known."""
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
