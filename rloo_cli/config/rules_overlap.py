"""What `generation.overlap` does not go together with, apart from the algorithm's own settings.

The table of docs/generation.md, as messages: each says what would work instead. What an algorithm's
settings forbid stands with them, in algorithms/common/completion_rules.py.
"""

from collections.abc import Iterator

from rloo_cli.config.schema import GenerationConfig, ModelConfig
from rloo_cli.utils.errors import Problem, clash_problems

OVERLAP = "generation.overlap"


def overlap_problems(
    generation: GenerationConfig, model: ModelConfig, engine: str, has_agent: bool
) -> Iterator[Problem]:
    """Everything in the way of sampling while training goes on. `engine`: distributed.engine."""
    mode = generation.overlap
    if mode == "none":
        return
    clashes = [
        (
            not (generation.is_server or generation.samples_here),
            OVERLAP,
            f"generation={generation.backend}",
            "it does not sample while this process trains",
            "generation=vllm_server",
        ),
        (
            generation.samples_here and model.lora is not None,
            "model.lora",
            "model.lora with generation=transformers",
            "a copy of the weights samples, which has no adapter",
            f"generation=vllm_server, or {OVERLAP}=none",
        ),
        (
            engine != "single",
            OVERLAP,
            f"distributed.engine={engine}",
            "ranks would have to agree on two things at once, and do not yet",
            "distributed=single",
        ),
        (
            has_agent,
            OVERLAP,
            "an agent",
            "an episode's tools would run beside the update, which is not tested yet",
            f"{OVERLAP}=none",
        ),
    ]
    if mode == "carry":
        why = "a completion goes on as a request of its own, whose prompt are its tokens so far"
        for name, off in (("min_tokens", 0), ("repetition_penalty", 1.0)):
            key, value = f"generation.{name}", getattr(generation, name)
            clashes.append((value != off, key, f"{key}={value:g}", why, f"{key}={off}"))
    yield from clash_problems(f"{OVERLAP}={mode}", clashes)
