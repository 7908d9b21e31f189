"""Pairs to be judged: a greedy completion and the text it is compared with, both stripped."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rloo_cli.config.column_names import field_or_none, is_field_of_rows
from rloo_cli.config.pasted import guess_name, rename_column
from rloo_cli.data.batch import Group, Rollout
from rloo_cli.data.prompts import Prompts
from rloo_cli.rewards.common.text import texts
from rloo_cli.utils.errors import DataError, refuse
from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class JudgedText:
    """One of the two texts of a pair."""

    text: str
    terminated: bool  # it ended on its own, not at max_completion_length
    num_tokens: int


@dataclass
class JudgePair:
    """One prompt, our text and theirs, and the judge's answers."""

    set_name: str
    example_number: int  # number of the example in the split
    group: Group  # the prompt, without rollouts
    ours: JudgedText
    theirs: JudgedText
    value: float | None = None  # 1, 1/2, 0; None = no verdict
    judge_answers: list[JsonObject] = field(default_factory=list)  # the verdicts in pairs.jsonl

    def to_record(self) -> JsonObject:
        """The pair as a line of pairs.jsonl."""
        return {
            "set": self.set_name or None,
            "row": self.example_number,
            "prompt": self.group.prompt,
            "ours": self.ours.text,
            "theirs": self.theirs.text,
            "tokens": [self.ours.num_tokens, self.theirs.num_tokens],
            "value": self.value,
            "verdicts": self.judge_answers,
        }


CSV_COLUMNS = ("set", "row", "prompt", "ours", "theirs", "value")


def pairs_to_csv(records: Sequence[JsonObject]) -> str:
    """The lines of pairs.jsonl as a table; a prompt that is a conversation is JSON in it."""
    file = io.StringIO()
    table = csv.DictWriter(file, CSV_COLUMNS, extrasaction="ignore", lineterminator="\n")
    table.writeheader()
    for record in records:
        prompt = record["prompt"]
        text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
        table.writerow(record | {"prompt": text})
    return file.getvalue()


def pairs_of_set(
    name: str,
    prompts: Prompts,
    samples: Sequence[JsonObject],
    other_answers: Mapping[int, Rollout] | None,
    column: str,
    tokenizer: "PreTrainedTokenizerBase",
) -> list[JudgePair]:
    """The pairs of one set's greedy samples, against `other_answers` (example number -> another
    model's answer; an example without one gives no pair), else against the texts of `column`.
    """

    def judged_text(text: str, ended: bool) -> JudgedText:
        return JudgedText(text, ended, len(tokenizer(text, add_special_tokens=False)["input_ids"]))

    pairs = []
    for sample in samples:
        index = sample["draw"]
        number = int(prompts.example_numbers[index])
        if other_answers is None:
            text, terminated = reference_text(prompts.examples[index], column), True
        elif number in other_answers:
            text, terminated = other_answers[number].text, other_answers[number].terminated
        else:
            continue
        ours = judged_text(sample["completion"].strip(), sample["terminated"])
        theirs = judged_text(text.strip(), terminated)
        pairs.append(JudgePair(name, number, prompts.group_of(index), ours, theirs))
    return pairs


def reference_text(example: Mapping[str, object], column: str) -> str:
    """The text of a reference: a string, or the last assistant message of a conversation.

    It is "" if there is none. Raises ValueError for anything else.
    """
    value = field_or_none(example, column)
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list) and all(isinstance(m, dict) and "content" in m for m in value):
        return texts([value])[0]
    raise ValueError(f"{str(value)[:80]!r} is of type {type(value).__name__}")


def check_reference_column(name: str, prompts: Prompts, column: str, where: str) -> None:
    """Raises DataError if `column` of a set has no reference texts."""
    location = f"{where}, {name}" if name else where
    columns = list(prompts.examples[0])
    fix = f"{where}={guess_name(column, columns, 'COLUMN')}"
    if not is_field_of_rows(prompts.examples, column):
        what, why = f"no column {column!r}", f"columns found: {', '.join(columns) or '-'}"
        if column in ("completion", "prompt"):
            why = "columns with this name are not kept"
        if column == "completion":
            key = f"eval.sets.{name}.columns" if name else "data.columns"
            fix = f"{rename_column(column, 'reference', key)} {where}=reference"
        refuse(location, what, fix, why, error=DataError)
    for number, example in enumerate(prompts.examples):
        try:
            reference_text(example, column)
        except ValueError as error:
            what = f"{column} has no reference texts"
            why = f"row {number}: {error}; expected a text, or a conversation that ends with one"
            refuse(location, what, fix, why, error=DataError)
