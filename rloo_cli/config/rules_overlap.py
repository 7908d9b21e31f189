"""What `generation.overlap` does not go together with, apart from the algorithm's own settings.

The table of docs/overlap.md, as messages: each says what would work instead. What an algorithm's
settings forbid stands with them, in algorithms/common/completion_rules.py.
"""

from collections.abc import Iterator

from rloo_cli.config.schema import GenerationConfig, ModelConfig
from rloo_cli.utils.errors import Problem

OVERLAP = "generation.overlap"


def overlap_problems(
    generation: GenerationConfig, model: ModelConfig, engine: str, has_agent: bool
) -> Iterator[Problem]:
    """Everything in the way of sampling while training goes on. `engine`: distributed.engine."""
    mode = generation.overlap
    if mode == "none":
        return
    asked = f"{OVERLAP}={mode}"
    if not (generation.is_server or generation.samples_here):
        why = f"generation={generation.backend} does not sample while this process trains"
        yield Problem(f"{asked} needs a sampler of its own", OVERLAP, why, "generation=vllm_server")
    if generation.samples_here and model.lora is not None:
        why = "generation=transformers samples with a copy of the weights, which has no adapter"
        fix = f"generation=vllm_server, or {OVERLAP}=none"
        yield Problem(f"{asked} and model.lora do not go together here", "model.lora", why, fix)
    if engine != "single":
        why = f"distributed.engine={engine}: ranks would have to agree on two things at once,"
        why += " and do not yet"
        yield Problem(f"{asked} trains in one process", OVERLAP, why, "distributed=single")
    if mode == "carry":
        yield from _carry_problems(generation)
    if has_agent:
        why = "an episode's tools would run beside the update, which nobody has tried"
        yield Problem(
            f"{asked} and an agent do not go together yet", OVERLAP, why, f"{OVERLAP}=none"
        )


def _carry_problems(generation: GenerationConfig) -> Iterator[Problem]:
    """What a completion that is cut and goes on as a new request cannot have."""
    for name, off in (("min_tokens", 0), ("repetition_penalty", 1.0)):
        value = getattr(generation, name)
        if value != off:
            why = "a completion goes on as a request of its own, whose prompt are its tokens so far"
            what = f"{OVERLAP}=carry does not know generation.{name} = {value:g}"
            yield Problem(what, f"generation.{name}", why, f"generation.{name}={off}")
