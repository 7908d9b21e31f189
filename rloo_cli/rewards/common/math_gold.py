"""Gold answers and a model's answers, as math-verify reads them. Used by `math_worker` alone.

Both are parsed as in TRL: the model's answer has to be boxed or announced ("the final answer is").
Unlike there, a gold answer without a math environment ($...$, \boxed{...}) is read as LaTeX: read
as text, math-verify takes the first number that it finds, 3 for 3\sqrt{13}. What can be read only
in part, a sentence with numbers in it, is not read at all.
"""

import re
from functools import lru_cache
from typing import Any

MATH_ENVIRONMENT = re.compile(
    r"(?<!\\)\$[^$]+(?<!\\)\$|\\\(|\\\[|\\boxed|\\begin\{(equation|align)"
)
NUMBER = r"[-+]?(?:\d{1,3}(?:[ ,]\d{3})+(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)"
SCIENTIFIC = r"([-+]?(?:\d+\.?\d*|\.\d+))[eE]([-+]?\d+)"
WHOLE_SCIENTIFIC = re.compile(rf"\$?\s*{SCIENTIFIC}\s*\$?")
BOXED_SCIENTIFIC = re.compile(rf"\\boxed\{{\s*{SCIENTIFIC}\s*\}}")
WHOLE_NUMBER = re.compile(rf"({NUMBER})\s*(\\?%)?\.?")
DOLLAR_AMOUNT = re.compile(rf"\\?\$\s*({NUMBER})")
NUMBER_WITH_UNIT = re.compile(
    rf"({NUMBER}|\d+/\d+)(?: [a-z]{{3,}}){{1,3}}\.?", re.IGNORECASE
)  # 18 dollars
PLAIN_WORDS = re.compile(
    r"(?=.*[^\W\d_]{4})[^\W\d_]+(?: [^\W\d_]+){0,2}"
)  # Evelyn, no real solution
AFTER_HASHES = re.compile(r".*####\s*(\S[^\n]*?)\s*", re.DOTALL)  # GSM8K's solutions
ANNOUNCED_ANSWER = re.compile(r"answer\s*(?:is|:|=)", re.IGNORECASE)
# Words of four letters or more make a sentence of it, outside of \commands and \text{...}.
LATEX_COMMAND = re.compile(
    r"\\(?:text|mathrm|textbf|operatorname|begin|end)\s*\{[^{}]*\}|\\[a-zA-Z]+"
)
FUNCTION_NAMES = {"sqrt", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh"}
LONG_WORD = re.compile(r"[^\W\d_]{4,}")
ASCII_EQUIVALENTS = str.maketrans(
    {"\N{MINUS SIGN}": "-", "\N{THIN SPACE}": " ", "\N{NO-BREAK SPACE}": " "}
)


@lru_cache(maxsize=4096)
def parse_gold(gold: str) -> list[Any]:
    """What the gold answer can be, for `is_equal`; [] when it cannot be read whole."""
    from math_verify import LatexExtractionConfig, parse

    text = gold.strip().translate(ASCII_EQUIVALENTS)
    if found := WHOLE_SCIENTIFIC.fullmatch(text):
        text = rf"{found[1]} \cdot 10^{{{found[2]}}}"
    if MATH_ENVIRONMENT.search(text):
        return list(parse(gold, parsing_timeout=None))
    if found := AFTER_HASHES.fullmatch(text):
        return parse_gold(found[1])
    if found := DOLLAR_AMOUNT.fullmatch(text) or NUMBER_WITH_UNIT.fullmatch(text):
        text = found[1]
    if found := WHOLE_NUMBER.fullmatch(text):
        plain = re.sub("[ ,]", "", found[1])
        percent = r"\%" if found[2] else ""
        return list(parse(f"${plain}{percent}$", parsing_timeout=None))
    if PLAIN_WORDS.fullmatch(text) and not FUNCTION_NAMES & {*text.split()}:
        text = rf"\text{{{text}}}"
    if {word.lower() for word in LONG_WORD.findall(LATEX_COMMAND.sub(" ", text))} - FUNCTION_NAMES:
        return list(parse(gold, parsing_timeout=None)) if ANNOUNCED_ANSWER.search(text) else []
    latex = [LatexExtractionConfig()]
    read = list(parse(f"${text}$", extraction_config=latex, parsing_timeout=None))
    return read if any(not isinstance(one, str) for one in read) else []


def parse_answer(text: str) -> list[Any]:
    """The answer in a completion; [] when there is none."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    latex = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True),
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    )
    text = BOXED_SCIENTIFIC.sub(r"\\boxed{\1 \\cdot 10^{\2}}", text)
    found = parse(
        text, extraction_config=[latex], extraction_mode="first_match", parsing_timeout=None
    )
    return list(found)


def is_equal_to_gold(gold: list[Any], text: str) -> bool:
    """Whether the answer in `text` is equal to a gold answer that was read."""
    from math_verify import verify

    try:
        return bool(verify(gold, parse_answer(text), timeout_seconds=None))
    except (MemoryError, RecursionError):
        return False  # too much to compute: not shown to be equal
