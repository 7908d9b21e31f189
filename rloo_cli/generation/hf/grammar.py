"""Completions that follow a form: a regular expression, a JSON schema, a choice, a grammar.

`generation.kwargs.structured_outputs` has vLLM's names, and the package that vLLM uses by default,
`xgrammar`, says which ids may come next. All others get no probability, before temperature and
filters, so a sampling mask has what is left.
"""

import json
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rloo_cli.generation.hf.decode_batch import DecodeSequence
from rloo_cli.utils.errors import ConfigError, GenerationError, Problem
from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:
    import xgrammar

KEY = "generation.kwargs.structured_outputs"


class Grammar:
    """A form that completions follow, compiled for a tokenizer and V ids."""

    def __init__(self, compiled: "xgrammar.CompiledGrammar", vocab_size: int, stop_ids: set[int]):
        self.compiled, self.vocab_size, self.stop_ids = compiled, vocab_size, sorted(stop_ids)

    def mask_logits(self, sequences: list[DecodeSequence], logits: Tensor) -> None:
        """Set the logits of ids that may not come next to -inf, in place. (R, V)

        Raises GenerationError where no id may: the form cannot be ended with these stop ids.
        """
        import xgrammar  # lazy: optional

        allowed = xgrammar.allocate_token_bitmask(len(sequences), self.vocab_size)  # all of them
        for row, sequence in enumerate(sequences):
            if sequence.finish_reason is not None:
                continue  # it is still in the batch
            if sequence.matcher is None:
                sequence.matcher = xgrammar.GrammarMatcher(
                    self.compiled, override_stop_tokens=self.stop_ids or None
                )
            ids = sequence.all_ids
            for token in ids[sequence.num_matched :]:
                if not sequence.matcher.accept_token(token):
                    what = f"a completion left its form at token {sequence.num_matched}"
                    raise GenerationError(Problem(what, KEY))
                sequence.num_matched += 1
            ended = sequence.matcher.is_terminated()
            if not ended:
                sequence.matcher.fill_next_token_bitmask(allowed, row)
            if ended or not bool(allowed[row].any()):
                why = f"after {sequence.num_matched} tokens nothing may follow, not even an end"
                fix = "a form that may end, with generation.ignore_eos=false"
                raise GenerationError(Problem("a form cannot be ended", KEY, why, fix))
        xgrammar.apply_token_bitmask_inplace(logits, allowed.to(logits.device))


def load_grammar(
    form: JsonObject, tokenizer: PreTrainedTokenizerBase, vocab_size: int, stop_ids: set[int]
) -> Grammar:
    """The form of `structured_outputs`, compiled. Raises ConfigError for one that is none."""
    import xgrammar  # lazy: optional

    info = xgrammar.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=vocab_size, stop_token_ids=sorted(stop_ids) or None
    )
    compiler = xgrammar.GrammarCompiler(info)
    ((kind, value),) = form.items()
    return Grammar(compiler.compile_grammar(parse_form(kind, value)), vocab_size, stop_ids)


def parse_form(kind: str, value: Any) -> "xgrammar.Grammar":
    """A form of this kind, read without a tokenizer. Raises ConfigError for one that is none."""
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
    except Exception as error:  # the text of a parser in C++
        why = str(error).strip().rpartition("\n")[2][:300]
        raise ConfigError(Problem(f"{KEY}.{kind} cannot be read", KEY, why)) from None
