"""Sampling in this process with the trainer's own weights. Needs nothing beyond transformers, runs
on a CPU, and is the reference in tests: sampler and trainer are the same module, so behaviour_logp
is old_logp up to rounding.
"""

from typing import Literal

from rloo_cli.config.schema import Frozen, GenerationConfig, Positive, key

IMPLEMENTATION = "rloo_cli.generation.hf.generator:build_transformers_generator"


class TransformersSection(Frozen):
    batch_tokens: Positive | None = key(
        "Most places (rows x prompt + completion) decoded at once; null = everything, on a GPU what"
        " a quarter of its memory holds"
    )
    shared_prompt: Literal["auto", False] = key(
        "Keys of a prompt are kept once for its K completions, by attention of our own; auto = "
        "where the model lets us, false = transformers' cache, K copies"
    )


class Config(GenerationConfig):
    backend: Literal["transformers"] = key("Who samples: this process, with the trainer's weights")
    transformers: TransformersSection
