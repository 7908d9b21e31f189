"""Sampling in this process with the trainer's own weights. Needs nothing beyond transformers, runs
on a CPU, and is the reference in tests: sampler and trainer are the same module, so behaviour_logp
is old_logp up to rounding.
"""

from typing import Literal

from rloo_cli.schema import Frozen, GenerationConfig, Positive, key

IMPLEMENTATION = "rloo_cli.generation.decode:build"


class Section(Frozen):
    batch_tokens: Positive | None = key(
        "Most places (rows x prompt + completion) decoded at once; null = everything"
    )


class Config(GenerationConfig):
    backend: Literal["transformers"] = key("Who samples: this process, with the trainer's weights")
    transformers: Section
