"""Warns of prompts that end with, or contain, unintended tokens or text.

A model that reads an end-of-text token, or the gold answer, at the end of its prompt is trained on
the wrong task, and no error reports it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rloo_cli.data.batch import Prompt
from rloo_cli.data.render import PromptRow
from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN_IDS = 3  # at the end of a prompt
SHARE_WITH_ANSWER = 0.5  # of the prompts; fewer may match a column's text by chance


def prompt_warnings(
    rows: Sequence[PromptRow], tokenizer: "PreTrainedTokenizerBase", conversational: bool
) -> list[str]:
    """Warnings for the log, each with tokens or text of the first such prompt and a fix.

    `rows`: the first ones of a split.
    """
    prompts, ids = [row.prompt for row in rows], [list(row.ids) for row in rows]
    examples = [row.example for row in rows]
    appended = _appended_ids(str(prompts[0]), ids[0], tokenizer) if not conversational else []
    warnings = [*_end_warnings(ids, tokenizer, conversational, appended)]
    warnings += _beginning_warnings(prompts, ids, tokenizer, conversational)
    warnings += _answered_warnings(prompts) if conversational else _gold_warnings(prompts, examples)
    return [f"warning: {warning}" for warning in warnings]


def _end_warnings(
    ids: Sequence[list[int]],
    tokenizer: "PreTrainedTokenizerBase",
    conversational: bool,
    appended: Sequence[int],
) -> list[str]:
    """Prompts whose last token ends a text. `appended`: the tokenizer's own."""
    ends = {tokenizer.eos_token_id, tokenizer.sep_token_id, *appended[-1:]} - {None}
    rows = [row for row, x in enumerate(ids) if x and x[-1] in ends]
    if not rows:
        return []
    last = ids[rows[0]][-SHOWN_IDS:]
    tokens = ", ".join(
        f"{i} {name!r}" for i, name in zip(last, tokenizer.convert_ids_to_tokens(last), strict=True)
    )
    who, fix = "the rows contain it", "remove it with data.map=file.py:name"
    if conversational:
        who, fix = "the chat template writes it", "model.chat_template=FILE.jinja, one without it"
    elif last[-1:] == [*appended[-1:]]:
        who, fix = "the tokenizer adds it", "model.tokenizer=FOLDER, one that adds none"
    text = f"{len(rows)} of {len(ids)} prompts end with a token that ends a text"
    return [f"{text}; {who}. Row {rows[0]} ends with {tokens}; {fix}"]


def _appended_ids(text: str, whole: list[int], tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """The ids that the tokenizer appends to a text, found from a text and its ids.

    The text is a prompt of the data: a small vocabulary may lack the words of any other.
    """
    plain = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    for start in range(len(whole) - len(plain) + 1):
        if plain and whole[start : start + len(plain)] == plain:
            return whole[start + len(plain) :]
    return []


def _beginning_warnings(
    prompts: Sequence[Prompt],
    ids: Sequence[list[int]],
    tokenizer: "PreTrainedTokenizerBase",
    conversational: bool,
) -> list[str]:
    """Prompts with two BOS tokens. Two at the very start are refused elsewhere."""
    bos = tokenizer.bos_token_id
    if bos is None or bos == tokenizer.eos_token_id:
        return []
    rows = [
        row
        for row, (prompt, x) in enumerate(zip(prompts, ids, strict=True))
        # Some templates begin every turn of a conversation with one.
        if x.count(bos) > 1 and (isinstance(prompt, str) or len(prompt) == 1)
    ]
    if not rows:
        return []
    indices = [i for i, token in enumerate(ids[rows[0]]) if token == bos]
    fix = "model.chat_template=FILE.jinja" if conversational else "data.map=file.py:name"
    text = f"{len(rows)} of {len(ids)} prompts have {bos} {tokenizer.bos_token!r} more than once"
    return [f"{text}: row {rows[0]} at tokens {indices[:SHOWN_IDS]}; {fix} removes the second"]


def _answered_warnings(prompts: Sequence[Prompt]) -> list[str]:
    """Conversations that end with an assistant's message: SFT data has the answer there."""
    ends = {
        row: str(prompt[-1].get("content"))
        for row, prompt in enumerate(prompts)
        if not isinstance(prompt, str) and prompt[-1].get("role") == "assistant"
    }
    if len(set(ends.values())) < 2:
        return []  # the same text in all rows is an intended prefix
    row, text = next(iter(ends.items()))
    what = f"{len(ends)} of {len(prompts)} prompts end with an assistant's message"
    fix = "remove the answers with data.map=file.py:name"
    return [f"{what}, which the model continues. Row {row} ends with {text[-80:]!r}; {fix}"]


def _gold_warnings(prompts: Sequence[Prompt], examples: Sequence[JsonObject]) -> list[str]:
    """Plain prompts that end with the text of another column."""
    for column in examples[0] if examples else ():
        texts = [str(example.get(column) or "").strip() for example in examples]
        rows = [
            row
            for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
            if text and isinstance(prompt, str) and prompt.rstrip().endswith(text)
        ]
        if len(rows) > SHARE_WITH_ANSWER * len(prompts) and len({texts[r] for r in rows}) > 1:
            what = f"{len(rows)} of {len(prompts)} prompts end with the text of column {column}"
            shown = f"row {rows[0]} with {texts[rows[0]][-80:]!r}"
            return [f"{what}, {shown}; if it is the answer, remove it with data.map=file.py:name"]
    return []
