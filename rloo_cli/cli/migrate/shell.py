"""Shell scripts as bash reads them, as far as it takes to find a command and its words.

Quotes, comments, continued lines, arrays, variables that the script sets and `;`, `&&`, `||`, `|`
are understood. Nothing is executed: what a command would print stays as it is written.
"""

import re
import shlex
from collections.abc import Iterator

WHITESPACE = " \t\r"
TOKEN_BOUNDARIES = f"{WHITESPACE}\n;&|("  # what a word may begin after
REDIRECT = re.compile(r"\d*(>>?|<)(&\d|.*)|&>>?.*")
Variables = dict[str, list[str]]


def simple_commands(text: str) -> Iterator[tuple[list[str], Variables]]:
    """Words of each command, variables filled in, and the variables that are set by then."""
    variables: Variables = {}
    for line in _logical_lines(text):
        try:
            raw = shlex.split(line)
        except ValueError:  # an open quote: prose
            continue
        if array := re.fullmatch(r"(?:export |declare -a )?(\w+)(\+?)=\((.*)\)", line, re.DOTALL):
            items = _expand_tokens(split_tokens(array[3]), variables)
            variables[array[1]] = [*(variables.get(array[1], []) if array[2] else []), *items]
            continue
        words = list(_without_redirects(_expand_tokens(raw, variables)))
        plain = [re.fullmatch(r"(\w+)=(.*)", w, re.DOTALL) for w in words if w != "export"]
        if plain and all(plain):
            variables |= {m[1]: [m[2]] for m in plain if m}
        elif words:
            yield words, variables


def split_tokens(line: str) -> list[str]:
    """shlex.split; [] where a quote stays open."""
    try:
        return shlex.split(line)
    except ValueError:
        return []


def _without_redirects(tokens: list[str]) -> Iterator[str]:
    """The words that the program itself gets."""
    file_next = False
    for word in tokens:
        if file_next:
            file_next = False
        elif REDIRECT.fullmatch(word):
            file_next = word.endswith((">", "<"))
        else:
            yield word


def _logical_lines(text: str) -> Iterator[str]:
    """Commands with their quotes: comments are gone, continued lines and arrays are one line."""
    lines, closed = _split_commands(text, multiline_quotes=True)
    if not closed:  # an apostrophe in prose: quotes end with their line
        lines, _ = _split_commands(text, multiline_quotes=False)
    end = ""
    for line in lines:
        if end:
            end = "" if line.strip() == end else end
        elif here := re.search(r"<<-?\s*['\"]?(\w+)['\"]?", line):
            end = here[1]
        elif line.strip():
            yield line.strip()


def _split_commands(text: str, multiline_quotes: bool) -> tuple[list[str], bool]:
    """Split at newlines and operators outside quotes. `across`: quotes may span lines."""
    lines, line, quote, array = [], "", "", 0
    at = 0
    while at < len(text):
        char, pair = text[at], text[at : at + 2]
        step = 1
        if char == "\\" and quote != "'":
            newline = re.compile(r"\\\r?\n").match(text, at)
            line += "" if newline else pair
            step = len(newline[0]) if newline else 2
        elif quote:
            if char == "\n" and not multiline_quotes:
                line, quote = "", ""
            else:
                line += char
                quote = "" if char == quote else quote
        elif char in "'\"":
            line, quote = line + char, char
        elif char == "#" and (not line or line[-1] in TOKEN_BOUNDARIES):
            end = text.find("\n", at)
            step = (end if end >= 0 else len(text)) - at
        elif pair == "$(":
            step = _substitution_length(text, at)
            line += "$(...)"
        elif char == "(" and re.search(r"\w=$", line):
            line, array = line + char, array + 1
        elif char == ")" and array:
            line, array = line + char, array - 1
        elif char == "\n" and array:
            line += " "
        elif char == "\n" or (not array and _is_command_end(text, at)):
            lines.append(line)
            line = ""
        else:
            line += char
        at += step
    return [*lines, line], not quote


def _is_command_end(text: str, index: int) -> bool:
    """Whether a command ends at ; & or |, which `2>&1` and `&>` only look like."""
    char, around = text[index], text[max(0, index - 1) : index + 2]
    return char in ";|" or (char == "&" and ">" not in around)


def _substitution_length(text: str, index: int) -> int:
    """Characters of `$(...)`, its own brackets among them."""
    depth = 0
    for end in range(index + 1, len(text)):
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        if depth == 0:
            return end + 1 - index
    return len(text) - index


def _expand_tokens(tokens: list[str], variables: Variables) -> list[str]:
    """$NAME, ${NAME}, ${NAME:-default} and ${NAME[@]}; what the script does not set stays."""
    found = []
    for word in tokens:
        whole = re.fullmatch(r"\$(?:\{(\w+)(?:\[[@*]\])?\}|(\w+))", word)
        values = variables.get(whole[1] or whole[2]) if whole else None
        if values is not None and (len(values) != 1 or values[0].lstrip().startswith("--")):
            # An array, or flags in a string, which bash cuts into words.
            found += values if len(values) != 1 else split_tokens(values[0])
        else:
            found.append(_expand_token(word, variables))
    return found


def _expand_token(token: str, variables: Variables) -> str:
    def value(match: re.Match[str]) -> str:
        known = variables.get(match[1] or match[3])
        return " ".join(known) if known else match[2] or match[0]

    pattern = r"\$(?:\{(\w+)(?::[-=]([^}]*))?\}|(\w+))"
    return re.sub(pattern, value, token)
