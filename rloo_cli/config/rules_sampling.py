"""Settings that make the sampler's distribution differ from the model's, and their masks.

top_p, top_k and min_p truncate the distribution that a token is sampled from. With
`generation.return_sampling_mask` the remaining ids are known, and the trainer computes its
log-probabilities over them, so settings that only forbid ids are accounted for too. A setting that
changes the relative probability of ids (a penalty, a bias) is not.
"""

from collections.abc import Iterator

from rloo_cli.config.schema import GenerationConfig
from rloo_cli.utils.errors import Problem, clash_problems

MASK_KEY, LIMIT_KEY = "generation.return_sampling_mask", "generation.max_sampling_mask_ids"
# generation.kwargs of the transformers backend that truncate the distribution; that only ban ids.
CUTTING_KWARGS = ("typical_p", "epsilon_cutoff", "eta_cutoff")
BANNING_KWARGS = ("bad_words_ids", "suppress_tokens")
STRUCTURED = "structured_outputs"  # a format that completions follow
BUDGET_KEY = "generation.answer_budget"


def cutting_settings(generation: GenerationConfig) -> list[str]:
    """Settings that truncate the distribution, as `key=value`."""
    active = {
        "top_p": generation.top_p < 1,
        "top_k": generation.top_k > 0,
        "min_p": bool(generation.min_p),
    }
    found = [f"{name}={getattr(generation, name):g}" for name, on in active.items() if on]
    cutting = _cutting_kwargs(generation)
    return found + [f"kwargs={{{n}: {v}}}" for n, v in generation.kwargs.items() if n in cutting]


def _cutting_kwargs(generation: GenerationConfig) -> tuple[str, ...]:
    """Names of generation.kwargs that truncate the distribution, if the sampler's masks show it."""
    forms = (STRUCTURED,) if generation.samples_here else ()
    return (*CUTTING_KWARGS, *forms)


def keeps_masks(generation: GenerationConfig) -> bool:
    """Whether the sampler records the ids that each token was chosen from."""
    return generation.return_sampling_mask and bool(cutting_settings(generation))


def inexact_settings(generation: GenerationConfig, with_masks: bool = False) -> list[str]:
    """Settings with which logp does not describe the sampler, as `key=value`.

    `with_masks`: assuming masks are kept. min_tokens is one: it bans stop ids at first, which makes
    every other token likelier.
    """
    masked = (with_masks or generation.return_sampling_mask) and bool(cutting_settings(generation))
    kwargs = dict(generation.kwargs)
    found = []
    if not masked:
        found = [name for name in cutting_settings(generation) if not name.startswith("kwargs")]
    if generation.repetition_penalty != 1:
        found.append(f"repetition_penalty={generation.repetition_penalty:g}")
    stops = bool(generation.stop_token_ids) or not generation.ignore_eos
    if generation.min_tokens > 0 and stops and not masked:
        found.append(f"min_tokens={generation.min_tokens:g}")
    if masked:
        exact = (*_cutting_kwargs(generation), *BANNING_KWARGS)
        kwargs = {name: value for name, value in kwargs.items() if name not in exact}
    return [*found, *([f"kwargs={kwargs}"] if kwargs else [])]


def mask_problems(generation: GenerationConfig) -> Iterator[Problem]:
    """Settings that do not go with generation.return_sampling_mask."""
    most = generation.max_sampling_mask_ids
    if not keeps_masks(generation):
        return
    if generation.top_k > most:
        what = f"generation.top_k = {generation.top_k} keeps more ids than {LIMIT_KEY} = {most}"
        why = "every token's mask would be too long"
        fix = f"generation.top_k={most}, or {LIMIT_KEY}={generation.top_k}"
        yield Problem(what, LIMIT_KEY, why, fix)


def budget_problems(generation: GenerationConfig, has_agent: bool) -> Iterator[Problem]:
    """Settings that do not go with generation.answer_budget."""
    if generation.answer_budget is None:
        return
    off = f"{BUDGET_KEY}=null"
    clashes = [
        (
            has_agent,
            BUDGET_KEY,
            "an agent",
            "each turn of an episode has its own limit, and a forced turn would make no calls",
            f"{off}, or agent=null",
        ),
        (
            generation.overlap == "carry",
            BUDGET_KEY,
            "generation.overlap=carry",
            "a completion that continues under other weights does not keep the text",
            f"{off}, or generation.overlap=ahead",
        ),
        (
            STRUCTURED in generation.kwargs,
            "generation.kwargs",
            f"generation.kwargs.{STRUCTURED}",
            "the text interrupts the structure, and the answer would begin it again",
            off,
        ),
        (
            generation.min_tokens > 0,
            "generation.min_tokens",
            f"generation.min_tokens={generation.min_tokens}",
            "the answer is sampled by a new request, which would count its tokens from 0",
            "generation.min_tokens=0",
        ),
    ]
    yield from clash_problems(BUDGET_KEY, clashes)
