"""What of an error's `fix` can be pasted into the command that was refused, and where."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

# `NAME`, `FILE.py`, `ORG/NAME`, `...`: the reader has to write what is meant.
PLACEHOLDER = re.compile(r"\b[A-Z][A-Z_]+\b|=N\b|\.\.\.|\bfile\.py:name\b")
SETTING = re.compile(r"\+{0,2}[a-z][\w./]*=.*", re.DOTALL)
FLAG = re.compile(r"--[a-z][\w-]*")


def pasted_words(fix: str) -> Iterator[list[str]]:
    """The arguments of each alternative of a fix; none where it is told in words."""
    for part in re.split(r", or |, (?=[\w.]+=)| or (?=[\w.]+=)|; |, for |\n", fix):
        try:
            words = shlex.split(part)
        except ValueError:  # words with an apostrophe
            continue
        is_whole = all(SETTING.fullmatch(word) or FLAG.fullmatch(word) for word in words)
        if words and is_whole and not PLACEHOLDER.search(part):
            yield words


def key_of(word: str) -> str:
    """The key of an argument `key=value`."""
    return word.lstrip("+~-").partition("=")[0]


def paste_into(
    command: Sequence[str], pasted: Sequence[str], problem: Mapping[str, str]
) -> Iterator[str]:
    """The command, checked alone, with the arguments in the place of those that the error names."""
    replaced = {key_of(word) for word in pasted}
    words = iter(command)
    for word in words:
        named = word.partition("=")[0].lstrip("+~") or word
        is_wrong = problem["what"].startswith(
            (f"{named} is not", f"'{word}'", f"{named} cannot", f"{word}:")
        )
        if is_wrong and word.startswith("-") and "=" not in word:
            following = next(words, "")  # the value of a flag
            if SETTING.fullmatch(following):
                yield following
        elif not is_wrong and (key_of(word) not in replaced or "=" not in word):
            yield word
    yield from pasted
    yield "--dry-run"


def problems_of(text: str) -> list[dict[str, str]]:
    """The problems that a command printed as JSON."""
    try:
        found: list[dict[str, str]] = json.loads(text)
    except ValueError:
        return []
    return found
