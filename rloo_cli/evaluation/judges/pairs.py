"""Pairs to be judged: a greedy completion and the text it is compared with, both stripped."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rloo_cli.data.batch import Group, Rollout
from rloo_cli.data.prompts import Prompts
from rloo_cli.rewards.common.text import texts
from rloo_cli.utils.errors import DataError, Problem
from rloo_cli.utils.files import JsonObject


@dataclass(frozen=True)
class JudgedText:
    """One of the two texts."""

    text: str
    terminated: bool  # by itself, not at max_completion_length
    num_tokens: int


@dataclass
class JudgePair:
    """One prompt, our text and theirs, and what was said of them."""

    set_name: str
    example_number: int  # row of the split
    group: Group  # the prompt; its rollouts are not ours
    ours: JudgedText
    theirs: JudgedText
    value: float | None = None  # 1, 1/2, 0; None = no verdict
    judge_answers: list[JsonObject] = field(
        default_factory=list
    )  # verdict by verdict, as pairs.jsonl has it

    def to_record(self) -> JsonObject:
        """A line of pairs.jsonl."""
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


def pairs_of_set(
    name: str,
    prompts: Prompts,
    samples: Sequence[JsonObject],
    other_answers: Mapping[int, Rollout] | None,
    column: str,
    tokenizer: Any,
) -> list[JudgePair]:
    """The pairs of one set's greedy samples. `others`: row of the split -> another model's answer;
    None: the texts of `column`. A prompt that the other model has no answer to makes no pair.
    """
    pairs = []
    for sample in samples:
        index = sample["draw"]
        number = prompts.example_numbers[index] if prompts.example_numbers else index
        if other_answers is None:
            text, ended = reference_text(prompts.examples[index], column).strip(), True
        elif number in other_answers:
            text, ended = other_answers[number].text.strip(), other_answers[number].terminated
        else:
            continue
        ours = sample["completion"].strip()
        mine, other = (
            JudgedText(t, e, len(tokenizer(t, add_special_tokens=False)["input_ids"]))
            for t, e in ((ours, sample["terminated"]), (text, ended))
        )
        pairs.append(JudgePair(name, number, prompts.group_of(index), mine, other))
    return pairs


def reference_text(example: Mapping[str, Any], column: str) -> str:
    """The text of a reference: a string, or the last assistant message of a conversation.

    "" where there is none. Raises ValueError for anything else.
    """
    found = example[column]
    if found is None or isinstance(found, str):
        return found or ""
    if isinstance(found, list) and all(isinstance(m, dict) and "content" in m for m in found):
        return texts([found])[0]
    raise ValueError(f"{str(found)[:80]!r} is of type {type(found).__name__}")


def check_reference_column(name: str, prompts: Prompts, column: str, where: str) -> None:
    """Raises DataError when `column` of a set holds no reference texts."""
    place = f"{where}, {name}" if name else where
    columns = list(prompts.examples[0])
    if column not in columns:
        what, why = f"there is no column {column!r}", f"columns found: {', '.join(columns) or '-'}"
        fix = f"{where}=COLUMN"
        if column in ("completion", "prompt"):
            why = "columns of this name are not kept"
            fix = f"data.columns={{{column}: reference}} {where}=reference"
        raise DataError(Problem(what, place, why, fix))
    for number, row in enumerate(prompts.examples):
        try:
            reference_text(row, column)
        except ValueError as error:
            why = f"row {number}: {error}; a text or a conversation that ends with one is expected"
            raise DataError(
                Problem(f"{column} holds no reference texts", place, why, f"{where}=COLUMN")
            ) from None
