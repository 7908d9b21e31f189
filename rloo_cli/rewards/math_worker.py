"""The child process of `mathematics`: one JSON question per line in, two lines out.

Out: "gold" or "no gold" once the gold answer is parsed, then "yes" or "no". Parsing as in TRL:
the answer has to be boxed or announced ("the final answer is"), the gold one may be bare.
It ends when its stdin closes, or by its own alarm when one question takes too long.
"""

import json
import logging
import resource
import signal
import sys
from functools import lru_cache
from typing import Any

MEMORY = 4 << 30  # bytes of address space; an answer that needs more counts as too much


@lru_cache(maxsize=4096)
def parse_gold(gold: str) -> list[Any]:
    from math_verify import parse

    return list(parse(gold, parsing_timeout=None))


def parse_answer(text: str) -> list[Any]:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    latex = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True),
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    )
    found = parse(
        text, extraction_config=[latex], extraction_mode="first_match", parsing_timeout=None
    )
    return list(found)


def equal(gold: list[Any], text: str) -> bool:
    from math_verify import verify

    try:
        return bool(verify(gold, parse_answer(text), timeout_seconds=None))
    except (MemoryError, RecursionError):
        return False  # too much to compute: not shown to be equal


def say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    import math_verify  # noqa: F401  (before the first alarm: importing sympy takes seconds)

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    # The default action ends this process from inside the kernel. A Python handler would have to
    # wait for the C call that hangs.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for line in sys.stdin:
        question = json.loads(line)
        signal.alarm(question["seconds"])
        gold = parse_gold(question["gold"])
        if not gold:
            say("no gold")
        else:
            say("gold")
            say("yes" if equal(gold, question["text"]) else "no")
        signal.alarm(0)


if __name__ == "__main__":
    main()
