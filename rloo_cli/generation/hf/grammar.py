"""Structured outputs: completions that follow a regex, a JSON schema, a choice or a grammar.

`structured_outputs` of `generation.kwargs` has vLLM's names, and the package that vLLM uses by
default, `xgrammar`, decides which ids may come next. All others get probability 0, before
temperature and filters, so a sampling mask holds the remaining ids.
"""

from typing import TYPE_CHECKING

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rloo_cli.generation.hf.decode_batch import DecodeSequence
from rloo_cli.generation.transformers import FORM_KEY, parse_form
from rloo_cli.utils.errors import GenerationError, refuse
from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:
    import xgrammar


class Grammar:
    """A structured-output specification, compiled for a tokenizer and V ids."""

    def __init__(self, compiled: "xgrammar.CompiledGrammar", vocab_size: int, stop_ids: set[int]):
        self.compiled, self.vocab_size, self.stop_ids = compiled, vocab_size, sorted(stop_ids)

    def mask_logits(self, sequences: list[DecodeSequence], logits: Tensor) -> None:
        """Set the logits of ids that may not come next to -inf, in place. (R, V)

        Raises GenerationError if none may: the specification cannot end with these stop ids.
        """
        import xgrammar  # lazy: optional

        allowed = xgrammar.allocate_token_bitmask(len(sequences), self.vocab_size)  # all of them
        for row, sequence in enumerate(sequences):
            if sequence.finish_reason is not None:
                continue  # still in the batch
            if sequence.matcher is None:
                sequence.matcher = xgrammar.GrammarMatcher(
                    self.compiled, override_stop_tokens=self.stop_ids or None
                )
            ids = sequence.all_ids
            for token in ids[sequence.num_matched :]:
                taken = sequence.matcher.accept_token(token)
                assert taken, f"the grammar rejects id {token}, which its bitmask allowed"
                sequence.num_matched += 1
            ended = sequence.matcher.is_terminated()
            if not ended:
                sequence.matcher.fill_next_token_bitmask(allowed, row)
            if ended or not bool(allowed[row].any()):
                why = f"after {sequence.num_matched} tokens no token is allowed, not even a stop id"
                fix = "a specification that can end, with generation.ignore_eos=false"
                refuse(FORM_KEY, "structured output cannot end", fix, why, error=GenerationError)
        xgrammar.apply_token_bitmask_inplace(logits, allowed.to(logits.device))


def load_grammar(
    form: JsonObject, tokenizer: PreTrainedTokenizerBase, vocab_size: int, stop_ids: set[int]
) -> Grammar:
    """The compiled `structured_outputs`. Raises ConfigError if it is not valid."""
    import xgrammar  # lazy: optional

    info = xgrammar.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=vocab_size, stop_token_ids=sorted(stop_ids) or None
    )
    compiler = xgrammar.GrammarCompiler(info)
    ((kind, value),) = form.items()
    return Grammar(compiler.compile_grammar(parse_form(kind, value)), vocab_size, stop_ids)
