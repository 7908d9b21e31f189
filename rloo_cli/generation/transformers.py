"""Sampling in this process with the trainer's own weights.

It needs only transformers, also runs on a CPU, and is the reference in tests: sampler and trainer
are the same module, so behaviour_logp is old_logp up to rounding.
"""

import importlib.util
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from rloo_cli.config.rules_sampling import STRUCTURED
from rloo_cli.config.schema import Frozen, GenerationConfig, Positive, key
from rloo_cli.utils.errors import ConfigError, Problem, refuse

if TYPE_CHECKING:
    import xgrammar

IMPLEMENTATION = "rloo_cli.generation.hf.generator:build_transformers_generator"


class TransformersSection(Frozen):
    """Keys of decoding in this process."""

    batch_tokens: Positive | None = key(
        "Most tokens, padding included, decoded at once; null = all, on a GPU 1/4 of its memory"
    )
    shared_prompt: Literal["auto", False] = key(
        "Keep a prompt's keys and values once for its K completions; auto = where the model allows"
        " it, false = K copies in transformers' cache"
    )


class Config(GenerationConfig):
    section, samples_here = "transformers", True

    backend: Literal["transformers"] = key("Sampler: this process, with the trainer's weights")
    transformers: TransformersSection


# Sampling arguments of transformers' generate whose processors look at one row at a time.
SAMPLING_KWARGS = (
    "bad_words_ids", "epsilon_cutoff", "eta_cutoff", "sequence_bias", "suppress_tokens",
    "typical_p",
)  # fmt: skip
# Structured outputs, by vLLM's names.
FORM_KEY = f"generation.kwargs.{STRUCTURED}"
FORMS = ("regex", "json", "json_object", "choice", "grammar")
FORM_EXAMPLES = {  # one of each kind
    "regex": "'[0-9]+'", "json": "{type: object}", "choice": "['yes', 'no']",
    "grammar": "'root ::= [0-9]+'",
}  # fmt: skip


def rules(config: Config, max_prompt_length: int | None) -> Iterator[Problem]:
    """The settings that this backend refuses. `max_prompt_length`: of data; None = unknown."""
    known = (*SAMPLING_KWARGS, STRUCTURED)
    for name, value in config.kwargs.items():
        if name not in known:
            what = f"generation.kwargs.{name} is not supported by generation=transformers"
            fix = "one of these, a key of generation, or generation=vllm_colocate"
            yield Problem(what, "generation.kwargs", f"known: {', '.join(known)}", fix)
        elif name == STRUCTURED:
            yield from _form_problems(value)


def _form_problems(form: object) -> Iterator[Problem]:
    """Faults of a structured-output specification."""
    where = FORM_KEY
    if not (isinstance(form, dict) and len(form) == 1 and next(iter(form)) in FORMS):
        why = f"it must have exactly one of: {', '.join(FORMS)}"
        yield Problem(f"{where} = {form!r:.80} is invalid", where, why, f"{{{FORMS[0]}: '[0-9]+'}}")
    elif importlib.util.find_spec("xgrammar") is None:
        fix = "pip install 'rloo-cli[structured]', or generation=vllm_colocate"
        yield Problem("xgrammar is not installed", where, "structured outputs need it", fix)
    else:
        try:
            parse_form(*next(iter(form.items())))
        except ConfigError as error:
            yield from error.problems


def parse_form(kind: str, value: Any) -> "xgrammar.Grammar":
    """A specification of this kind, parsed without a tokenizer. Raises ConfigError."""
    from xgrammar import Grammar as Parsed  # lazy: optional

    try:
        if kind == "json_object":
            return Parsed.builtin_json_grammar()
        if kind == "choice":
            words = " | ".join(json.dumps(word, ensure_ascii=False) for word in value)
            return Parsed.from_ebnf(f"root ::= {words}")
        if kind == "json":
            return Parsed.from_json_schema(value if isinstance(value, str) else json.dumps(value))
        return Parsed.from_regex(value) if kind == "regex" else Parsed.from_ebnf(value)
    except Exception as error:  # the message of a C++ parser
        why = str(error).strip().rpartition("\n")[2][:300]
        what = f"{FORM_KEY}.{kind} cannot be read"
        fix = f"correct it; a valid example: {{{kind}: {FORM_EXAMPLES.get(kind)}}}"
        refuse(FORM_KEY, what, fix, why)
