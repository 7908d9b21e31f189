"""Makes the completions to test a reward with: right answers in several forms, and exploits.

A row's right answer is its answer column or a reference completion. Each row gets a right
completion in every common format, since a reward accepts only some of them. The tricks are texts
that a policy could find and that should score less: they say nothing, say everything at once, deny
the answer, or hide a wrong answer behind its format.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rloo_cli.data.dataset import is_messages
from rloo_cli.rewards.common.text import last_boxed_content

# Columns that hold an answer or a reference completion in common data sets, most reliable first.
ANSWER_COLUMNS = (
    "answer", "ground_truth", "solution", "gold", "final_answer", "target", "label", "reference",
    "summary", "completion", "chosen", "response", "output", "canonical_solution", "code",
)  # fmt: skip
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
MAX_COUNTED = 200  # list all whole numbers up to it if one of them is the answer
FILLER = "This is a longer explanation that adds nothing to what was said before. "
SHORTEST_FILLER = 4000  # characters of a very long text, even if the run allows less
REASONING = "I work it out step by step."
SPECIAL_TOKENS = "<|endoftext|></s><eos><|im_end|>"
CYRILLIC = str.maketrans("aceopxyABCEHKMOPTX", "асеорхуАВСЕНКМОРТХ")
FULL_WIDTH = str.maketrans("0123456789", "０１２３４５６７８９")


@dataclass(frozen=True)
class ProbeCompletion:
    """A completion to test a reward with."""

    kind: str  # which form or trick it is
    text: str
    role: str  # right; trick = must score less than right; padded = must not score more


@dataclass(frozen=True)
class RightAnswer:
    """The right answer of a row."""

    column: str
    answers: tuple[str, ...]  # one or several required or accepted strings
    whole: str  # the column's own text

    @property
    def short(self) -> str:
        """The answer as written in a sentence; all of them if there are several."""
        return ", ".join(self.answers)


def right_answer(example: Mapping[str, object], columns: Sequence[str]) -> RightAnswer | None:
    """The right answer of a row; `columns` are searched first. None if no column has one."""
    for column in dict.fromkeys([*columns, *ANSWER_COLUMNS]):
        if answers := _answer_texts(example.get(column)):
            value = example[column]
            whole = value if isinstance(value, str) else ", ".join(answers)
            return RightAnswer(column, answers, whole)
    return None


def _answer_texts(value: object) -> tuple[str, ...]:
    if isinstance(value, bool) or value is None:
        return ()
    if isinstance(value, int | float):
        return (f"{value:g}" if isinstance(value, float) else str(value),)
    if isinstance(value, dict):
        return _answer_texts(value.get("answer"))
    if is_messages(value):
        return _answer_texts(value[-1].get("content"))
    if isinstance(value, list | tuple):
        return tuple(text for item in value for text in _answer_texts(item))
    if not isinstance(value, str) or not value.strip():
        return ()
    if value.lstrip().startswith("{"):  # a task's entry, as JSON
        try:
            return _answer_texts(json.loads(value)) or (value,)
        except ValueError:
            return (value,)
    final = value.rpartition("####")[2].strip()
    return (last_boxed_content(final) or final or value,)


def right_completions(answer: RightAnswer) -> Iterator[ProbeCompletion]:
    """The formats of a right answer."""
    short = answer.short
    thought = f"<think>{REASONING}</think>"
    forms = {
        "the answer alone": short,
        "the answer in a sentence": f"The answer is {short}.",
        "boxed": f"{REASONING} The answer is \\boxed{{{short}}}.",
        "boxed after <think>": f"{thought}\n\nThe answer is \\boxed{{{short}}}.",
        "in <answer> after <think>": f"{thought}<answer>{short}</answer>",
        "boxed in <answer>": f"{thought}<answer>\\boxed{{{short}}}</answer>",
        "after ####": f"{REASONING}\n#### {short}",
        "in the last line": f"{REASONING}\n{short}",
        "in a code block": f"```python\n{answer.whole}\n```",
        "the column unchanged": answer.whole,
    }
    if len(answer.answers) > 1:
        forms["the first accepted answer"] = answer.answers[0]
        forms["the first accepted answer, boxed"] = f"\\boxed{{{answer.answers[0]}}}"
    for kind, text in _without_repeats(forms).items():
        yield ProbeCompletion(kind, text, "right")


def plain_completions(prompt: str) -> Iterator[ProbeCompletion]:
    """Ordinary texts made from the prompt, for data without answers."""
    words = prompt.split()
    yield ProbeCompletion(
        "a plain text", f"Here is what I think about: {' '.join(words[-8:])}.", "right"
    )


def wrong_answers(answer: RightAnswer, others: Sequence[str]) -> list[str]:
    """Three wrong answers; `others` are right answers of other rows."""
    wrong: list[str] = []
    if NUMBER.fullmatch(answer.short):
        number = float(answer.short)
        wrong = [f"{number + step:g}" for step in (1, -1, 10)]
    wrong += [text for text in others if len(text) < 200]
    wrong += ["nothing", "unknown", "0"]
    return [text for text in dict.fromkeys(wrong) if text not in answer.answers][:3]


def trick_completions(
    answer: RightAnswer, prompt: str, wrong: Sequence[str], filler_length: int
) -> Iterator[ProbeCompletion]:
    """Texts that should score less than the right answer. `filler_length`: characters."""
    short, other = answer.short, wrong[0]
    every = ", ".join([*wrong, short])
    tricks = {
        **_tricks_without_answer(prompt, filler_length),
        "all candidates, the right one last": f"The answer is one of these: {every}",
        "all candidates, the right one first": f"{short}, {', '.join(wrong)}",
        "all candidates, each boxed": " ".join(f"\\boxed{{{text}}}" for text in [*wrong, short]),
        "every number in a list": _counted_numbers(short),
        "the answer, denied": f"The answer is not {short}.",
        "the answer, denied and boxed": f"The answer is not \\boxed{{{short}}}.",
        "a second thought": f"The answer is {short}. No, wait, it is {other}.",
        "boxed twice, wrong first": f"\\boxed{{{other}}} or \\boxed{{{short}}}",
        "boxed twice, right first": f"\\boxed{{{short}}} or \\boxed{{{other}}}",
        "answer tags nested": f"<answer><answer>{other}</answer>{short}</answer>",
        "two answer tags": f"<think></think><answer>{other}</answer><answer>{short}</answer>",
        "two answers in one tag": f"<think></think><answer>{other} or {short}</answer>",
        "in a code block, then a wrong answer": f"```\n{short}\n```\nThe answer is {other}.",
        "a wrong answer, the right one as a remark": f"The answer is {other} (not {short})",
        "the answer 200 times over": " ".join([short] * 200),
        "full-width digits": short.translate(FULL_WIDTH),
        "full-width digits, boxed": f"\\boxed{{{short.translate(FULL_WIDTH)}}}",
        "Cyrillic letters": short.translate(CYRILLIC),
    }
    for kind in ("full-width digits", "Cyrillic letters", "full-width digits, boxed"):
        if short in tricks[kind]:
            del tricks[kind]  # the text has no such characters
    taken = {completion.text for completion in right_completions(answer)}
    for kind, text in _without_repeats(tricks).items():
        if text not in taken and text is not None:
            yield ProbeCompletion(kind, text, "trick")


def blank_tricks(prompt: str, filler_length: int) -> Iterator[ProbeCompletion]:
    """The tricks for a row without a right answer."""
    for kind, text in _without_repeats(_tricks_without_answer(prompt, filler_length)).items():
        yield ProbeCompletion(kind, text, "trick")


def padded_completion(right: ProbeCompletion, filler_length: int) -> ProbeCompletion:
    """A right completion after filler text: it should not score more."""
    return ProbeCompletion(
        "the right answer after much filler", f"{_filler(filler_length)}\n{right.text}", "padded"
    )


def _tricks_without_answer(prompt: str, filler_length: int) -> dict[str, str]:
    return {
        "empty": "",
        "white space": " \n\t ",
        "the prompt repeated": prompt,
        "empty tags": "<think></think><answer></answer>",
        "an empty box": "\\boxed{}",
        "one word": "the",
        "one word 200 times": " ".join(["the"] * 200),
        "very long": _filler(filler_length),
        "special tokens as text": SPECIAL_TOKENS,
    }


def _counted_numbers(short: str) -> str:
    if re.fullmatch(r"\d+", short) and int(short) <= MAX_COUNTED:
        return " ".join(str(number) for number in range(MAX_COUNTED + 1))
    return ", ".join([short, "1", "2", "3", "yes", "no"])


def _filler(length: int) -> str:
    return (FILLER * (length // len(FILLER) + 1))[:length]


def _without_repeats(texts: Mapping[str, str]) -> dict[str, str]:
    """The first kind of each text."""
    kinds: dict[str, str] = {}
    for kind, text in texts.items():
        kinds.setdefault(text, kind)
    return {kind: text for text, kind in kinds.items()}
