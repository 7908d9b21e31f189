"""Pairs to be judged: a greedy completion and the text it is compared with, both stripped."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rloo_cli.data.batch import Group, Rollout
from rloo_cli.data.prompts import Prompts
from rloo_cli.rewards.common.text import texts
from rloo_cli.utils.errors import DataError, Problem

Row = dict[str, Any]


@dataclass(frozen=True)
class Side:
    """One of the two texts."""

    text: str
    ended: bool  # by itself, not at max_completion_length
    tokens: int


@dataclass
class Pair:
    """One prompt, our text and theirs, and what was said of them."""

    set: str
    number: int  # row of the split
    group: Group  # the prompt; its rollouts are not ours
    ours: Side
    theirs: Side
    value: float | None = None  # 1, 1/2, 0; None = no verdict
    said: list[Row] = field(default_factory=list)  # verdict by verdict, as pairs.jsonl has it

    def row(self) -> Row:
        """A line of pairs.jsonl."""
        return {
            "set": self.set or None,
            "row": self.number,
            "prompt": self.group.prompt,
            "ours": self.ours.text,
            "theirs": self.theirs.text,
            "tokens": [self.ours.tokens, self.theirs.tokens],
            "value": self.value,
            "verdicts": self.said,
        }


def of_set(
    name: str,
    prompts: Prompts,
    samples: Sequence[Row],
    others: Mapping[int, Rollout] | None,
    column: str,
    tokenizer: Any,
) -> list[Pair]:
    """The pairs of one set's greedy samples. `others`: row of the split -> another model's answer;
    None: the texts of `column`. A prompt that the other model has no answer to makes no pair.
    """
    pairs = []
    for sample in samples:
        index = sample["draw"]
        number = prompts.numbers[index] if prompts.numbers else index
        if others is None:
            text, ended = reference(prompts.rows[index], column).strip(), True
        elif number in others:
            text, ended = others[number].text.strip(), others[number].terminated
        else:
            continue
        ours = sample["completion"].strip()
        mine, other = (
            Side(t, e, len(tokenizer(t, add_special_tokens=False)["input_ids"]))
            for t, e in ((ours, sample["terminated"]), (text, ended))
        )
        pairs.append(Pair(name, number, prompts.at(index), mine, other))
    return pairs


def reference(row: Mapping[str, Any], column: str) -> str:
    """The text of a reference: a string, or the last assistant message of a conversation.

    "" where there is none. Raises ValueError for anything else.
    """
    found = row[column]
    if found is None or isinstance(found, str):
        return found or ""
    if isinstance(found, list) and all(isinstance(m, dict) and "content" in m for m in found):
        return texts([found])[0]
    raise ValueError(f"{str(found)[:80]!r} is of type {type(found).__name__}")


def check_column(name: str, prompts: Prompts, column: str, where: str) -> None:
    """Raises DataError when `column` of a set holds no reference texts."""
    place = f"{where}, {name}" if name else where
    columns = list(prompts.rows[0])
    if column not in columns:
        what, why = f"there is no column {column!r}", f"columns found: {', '.join(columns) or '-'}"
        fix = f"{where}=COLUMN"
        if column in ("completion", "prompt"):
            why = "columns of this name are not kept"
            fix = f"data.columns={{{column}: reference}} {where}=reference"
        raise DataError(Problem(what, place, why, fix))
    for number, row in enumerate(prompts.rows):
        try:
            reference(row, column)
        except ValueError as error:
            why = f"row {number}: {error}; a text or a conversation that ends with one is expected"
            raise DataError(
                Problem(f"{column} holds no reference texts", place, why, f"{where}=COLUMN")
            ) from None
