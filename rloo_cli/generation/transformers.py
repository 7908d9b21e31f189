"""Sampling in this process with the trainer's own weights.

It needs only transformers, runs on a CPU too, and is the reference in tests: sampler and trainer
are the same module, so behaviour_logp is old_logp up to rounding.
"""

from collections.abc import Iterator
from typing import Literal

from rloo_cli.config.schema import Frozen, GenerationConfig, Positive, RunConfig, key
from rloo_cli.utils.errors import Problem

IMPLEMENTATION = "rloo_cli.generation.hf.generator:build_transformers_generator"


class TransformersSection(Frozen):
    """How completions are decoded here."""

    batch_tokens: Positive | None = key(
        "Most tokens, padding included, decoded at once; null = all, on a GPU 1/4 of its memory"
    )
    shared_prompt: Literal["auto", False] = key(
        "Keep a prompt's keys and values once for its K completions; auto = where the model allows"
        " it, false = K copies in transformers' cache"
    )


class Config(GenerationConfig):
    backend: Literal["transformers"] = key("Sampler: this process, with the trainer's weights")
    transformers: TransformersSection


# Sampling arguments of transformers' generate, whose processors look at no other row.
SAMPLING_KWARGS = (
    "bad_words_ids", "epsilon_cutoff", "eta_cutoff", "sequence_bias", "suppress_tokens", "typical_p"
)  # fmt: skip


def rules(run: RunConfig) -> Iterator[Problem]:
    """The settings that this backend refuses."""
    for name in run.generation.kwargs:
        if name not in SAMPLING_KWARGS:
            what = f"generation.kwargs.{name} is not taken by generation=transformers"
            fix = "one of these, a key of generation, or generation=vllm_colocate"
            yield Problem(what, "generation.kwargs", f"known: {', '.join(SAMPLING_KWARGS)}", fix)
