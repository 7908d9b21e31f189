"""Settings that do not go with `generation.overlap`, apart from the algorithm's own.

The table of docs/generation.md, as messages: each says what works instead. Settings that an
algorithm forbids are in algorithms/common/completion_rules.py.
"""

from collections.abc import Iterator

from rloo_cli.config.schema import GenerationConfig, ModelConfig
from rloo_cli.utils.errors import Problem, clash_problems

OVERLAP = "generation.overlap"


def overlap_problems(
    generation: GenerationConfig, model: ModelConfig, engine: str, has_agent: bool
) -> Iterator[Problem]:
    """Everything that prevents sampling during training. `engine`: distributed.engine."""
    mode = generation.overlap
    if mode == "none":
        return
    clashes = [
        (
            not (generation.is_server or generation.samples_here),
            OVERLAP,
            f"generation={generation.backend}",
            "it cannot sample while this process trains",
            "generation=vllm_server",
        ),
        (
            generation.samples_here and model.lora is not None,
            "model.lora",
            "model.lora with generation=transformers",
            "the sampling copy of the weights has no adapter",
            f"generation=vllm_server, or {OVERLAP}=none",
        ),
        (
            engine != "single",
            OVERLAP,
            f"distributed.engine={engine}",
            "several ranks are not supported yet",
            "distributed=single",
        ),
        (
            has_agent,
            OVERLAP,
            "an agent",
            "tools that run during an update are not tested yet",
            f"{OVERLAP}=none",
        ),
    ]
    if mode == "carry":
        why = "a carried completion is sent as a new request, with its tokens so far as the prompt"
        for name, off in (("min_tokens", 0), ("repetition_penalty", 1.0)):
            key, value = f"generation.{name}", getattr(generation, name)
            clashes.append((value != off, key, f"{key}={value:g}", why, f"{key}={off}"))
    yield from clash_problems(f"{OVERLAP}={mode}", clashes)
