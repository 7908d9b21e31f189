"""Parses gold answers and a model's answers with math-verify, in worker processes of `math_equal`.

Both are parsed as in TRL: the model's answer has to be boxed or announced ("the final answer is").
Unlike there, a gold answer without a math environment ($...$, \boxed{...}) is read as LaTeX: from
plain text, math-verify takes the first number that it finds, 3 for 3\sqrt{13}. A gold answer that
can be read only in part, such as a sentence with numbers in it, is not read at all.
"""

import logging
import re
import resource
from functools import lru_cache

from rloo_cli.utils.files import JsonObject

MAX_ADDRESS_SPACE = 4 << 30  # bytes of a worker; an answer that needs more is too much
MATH_ENVIRONMENT = re.compile(
    r"(?<!\\)\$[^$]+(?<!\\)\$|\\\(|\\\[|\\boxed|\\begin\{(equation|align)"
)
NUMBER = r"[-+]?(?:\d{1,3}(?:[ ,]\d{3})+(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)"
SCIENTIFIC = r"([-+]?(?:\d+\.?\d*|\.\d+))[eE]([-+]?\d+)"
WHOLE_SCIENTIFIC = re.compile(rf"\$?\s*{SCIENTIFIC}\s*\$?")
BOXED_SCIENTIFIC = re.compile(rf"\\boxed\{{\s*{SCIENTIFIC}\s*\}}")
WHOLE_NUMBER = re.compile(rf"({NUMBER})\s*(\\?%)?\.?")
DOLLAR_AMOUNT = re.compile(rf"\\?\$\s*({NUMBER})")
# 18 dollars
NUMBER_WITH_UNIT = re.compile(rf"({NUMBER}|\d+/\d+)(?: [a-z]{{3,}}){{1,3}}\.?", re.IGNORECASE)
# Evelyn, no real solution
PLAIN_WORDS = re.compile(r"(?=.*[^\W\d_]{4})[^\W\d_]+(?: [^\W\d_]+){0,2}")
AFTER_HASHES = re.compile(r".*####\s*(\S[^\n]*?)\s*", re.DOTALL)  # GSM8K's solutions
ANNOUNCED_ANSWER = re.compile(r"answer\s*(?:is|:|=)", re.IGNORECASE)
# A text with words of four letters or more outside of \commands and \text{...} is a sentence.
LATEX_COMMAND = re.compile(
    r"\\(?:text|mathrm|textbf|operatorname|begin|end)\s*\{[^{}]*\}|\\[a-zA-Z]+"
)
FUNCTION_NAMES = {"sqrt", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh"}
LONG_WORD = re.compile(r"[^\W\d_]{4,}")
ASCII_EQUIVALENTS = str.maketrans(
    {"\N{MINUS SIGN}": "-", "\N{THIN SPACE}": " ", "\N{NO-BREAK SPACE}": " "}
)


@lru_cache(maxsize=4096)
def parse_gold(gold: str) -> list[object]:
    """Possible values of the gold answer, for `is_equal_to_gold`; [] if unreadable as a whole."""
    from math_verify import LatexExtractionConfig, parse

    text = gold.strip().translate(ASCII_EQUIVALENTS)
    if match := WHOLE_SCIENTIFIC.fullmatch(text):
        text = rf"{match[1]} \cdot 10^{{{match[2]}}}"
    if MATH_ENVIRONMENT.search(text):
        return list(parse(gold, parsing_timeout=None))
    if match := AFTER_HASHES.fullmatch(text):
        return parse_gold(match[1])
    if match := DOLLAR_AMOUNT.fullmatch(text) or NUMBER_WITH_UNIT.fullmatch(text):
        text = match[1]
    if match := WHOLE_NUMBER.fullmatch(text):
        plain = re.sub("[ ,]", "", match[1])
        percent = r"\%" if match[2] else ""
        return list(parse(f"${plain}{percent}$", parsing_timeout=None))
    if PLAIN_WORDS.fullmatch(text) and not FUNCTION_NAMES & {*text.split()}:
        text = rf"\text{{{text}}}"
    if {word.lower() for word in LONG_WORD.findall(LATEX_COMMAND.sub(" ", text))} - FUNCTION_NAMES:
        return list(parse(gold, parsing_timeout=None)) if ANNOUNCED_ANSWER.search(text) else []
    latex = [LatexExtractionConfig()]
    read = list(parse(f"${text}$", extraction_config=latex, parsing_timeout=None))
    return read if any(not isinstance(one, str) for one in read) else []


def parse_answer(text: str) -> list[object]:
    """The answer in a completion; [] if there is none."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    latex = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True),
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    )
    text = BOXED_SCIENTIFIC.sub(r"\\boxed{\1 \\cdot 10^{\2}}", text)
    return list(parse(text, [latex], extraction_mode="first_match", parsing_timeout=None))


def is_equal_to_gold(gold: list[object], text: str) -> bool:
    """Whether the answer in `text` equals a gold answer from `parse_gold`."""
    from math_verify import verify

    try:
        return bool(verify(gold, parse_answer(text), timeout_seconds=None))
    except (MemoryError, RecursionError):
        return False  # too much to compute: not shown to be equal


class MathWorkerCode:
    """The worker process of `math_equal`. A question has two messages, so two deadlines.

    {"gold": text} is answered by `no gold` if the gold answer cannot be read, else `read`; then
    {"text": text} by `yes` or `no`.
    """

    def __init__(self) -> None:
        self.gold: list[object] = []

    def prepare(self) -> None:
        """Import sympy, which takes seconds, and parse once: the first time is slow as well."""
        # It warns that its timeouts are off.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        is_equal_to_gold(parse_gold(r"\frac{1}{2}"), r"\boxed{0.5}")

    def start(self) -> None:
        """Limit the worker's memory."""
        hard_limit = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_SPACE, hard_limit))

    def answer(self, message: JsonObject) -> bytes:
        """The answer to one of the two messages."""
        if "gold" in message:
            self.gold = parse_gold(message["gold"])
            return b"read" if self.gold else b"no gold"
        return b"yes" if is_equal_to_gold(self.gold, message["text"]) else b"no"
