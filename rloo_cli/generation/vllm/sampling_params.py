"""vLLM's sampling parameters for a completion, each with an explicit value.

A server's defaults are not used, for they come from the model's own generation config.
"""

from collections.abc import Collection

from rloo_cli.config.schema import GenerationConfig
from rloo_cli.utils.files import JsonObject


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
    if greedy:
        return given | {"temperature": 0.0}
    filters = {"top_p": config.top_p, "top_k": config.top_k, "min_p": config.min_p or 0.0}
    return given | filters | ({} if temperature is None else {"temperature": temperature})


def parity_params(
    config: GenerationConfig, stop_ids: Collection[int], seed: int, max_tokens: int
) -> JsonObject:
    """The parameters for the parity check: only the temperature changes the distribution."""
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
    }
