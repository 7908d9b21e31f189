"""Reads shell scripts as bash does, as far as it takes to find a command and its arguments.

Quotes, comments, continued lines, arrays, variables that the script sets and `;`, `&&`, `||`, `|`
are understood. Nothing is executed: command substitutions stay as they are written.
"""

import json
import re
import shlex
from collections.abc import Iterator

WHITESPACE = " \t\r"
TOKEN_BOUNDARIES = f"{WHITESPACE}\n;&|("  # characters after which a token may begin
REDIRECT = re.compile(r"\d*(>>?|<)(&\d|.*)|&>>?.*")
# Longer ones are left as they are written: shlex takes time with the square of a word's length, and
# variables that hold each other twice grow without end.
MAX_COMMAND_CHARS, MAX_VARIABLE_CHARS = 32_000, 8_000
Variables = dict[str, list[str]]


def simple_commands(text: str) -> Iterator[tuple[list[str], Variables]]:
    """The arguments of each command, variables filled in, and the variables set by then."""
    variables: Variables = {}
    for line in _logical_lines(text):
        if not (tokens := split_tokens(line)):
            continue
        if array := re.fullmatch(r"(?:export |declare -a )?(\w+)(\+?)=\((.*)\)", line, re.DOTALL):
            items = _expand_tokens(split_tokens(array[3]), variables)
            before = variables.get(array[1], []) if array[2] else []
            _set_variable(variables, array[1], [*before, *items])
            continue
        args = list(_without_redirects(_expand_tokens(tokens, variables)))
        assignments = [re.fullmatch(r"(\w+)=(.*)", w, re.DOTALL) for w in args if w != "export"]
        if assignments and all(assignments):
            for found in filter(None, assignments):
                _set_variable(variables, found[1], [found[2]])
        elif args:
            yield args, variables


def _set_variable(variables: Variables, name: str, values: list[str]) -> None:
    variables.pop(name, None)
    if sum(len(value) + 1 for value in values) <= MAX_VARIABLE_CHARS:
        variables[name] = values


def split_tokens(line: str) -> list[str]:
    """The tokens of a line by shlex; [] for an open quote, and for a line too long for a command:
    these are prose or data."""
    try:
        return shlex.split(line) if len(line) <= MAX_COMMAND_CHARS else []
    except ValueError:
        return []


def _without_redirects(tokens: list[str]) -> Iterator[str]:
    """The tokens that the program gets as arguments."""
    file_next = False
    for token in tokens:
        if file_next:
            file_next = False
        elif REDIRECT.fullmatch(token):
            file_next = token.endswith((">", "<"))
        else:
            yield token


def _logical_lines(text: str) -> Iterator[str]:
    """Commands with their quotes, without comments; a continued line or an array is one line."""
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
    """Split at newlines and operators outside quotes. Returns lines, and if all quotes are closed.

    `multiline_quotes`: a quote may span lines; else it ends with its line.
    """
    lines, line, quote, array, at = [], "", "", 0, 0
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
            line += char  # in place: `line + char` would copy a long line at each quote
            quote = char
        elif char == "#" and (not line or line[-1] in TOKEN_BOUNDARIES):
            end = text.find("\n", at)
            step = (end if end >= 0 else len(text)) - at
        elif pair == "$(":
            step = _substitution_length(text, at)
            line += "$(...)"
        elif char == "(" and re.search(r"\w=$", line[-2:]):
            line += char
            array += 1
        elif char == ")" and array:
            line += char
            array -= 1
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
    """Whether a command ends at ; & or |, unlike in `2>&1` and `&>`."""
    char, around = text[index], text[max(0, index - 1) : index + 2]
    return char in ";|" or (char == "&" and ">" not in around)


def _substitution_length(text: str, index: int) -> int:
    """The number of characters of `$(...)`, with its brackets."""
    depth = 0
    for end in range(index + 1, len(text)):
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        if depth == 0:
            return end + 1 - index
    return len(text) - index


def _expand_tokens(tokens: list[str], variables: Variables) -> list[str]:
    """Fill in $NAME, ${NAME}, ${NAME:-default} and ${NAME[@]}, but no variable that is not set."""
    expanded = []
    for token in tokens:
        whole = re.fullmatch(r"\$(?:\{(\w+)(?:\[[@*]\])?\}|(\w+))", token)
        values = variables.get(whole[1] or whole[2]) if whole else None
        if values is not None and (len(values) != 1 or values[0].lstrip().startswith("--")):
            # An array, or flags in a string, which bash splits into tokens.
            expanded += values if len(values) != 1 else split_tokens(values[0])
        else:
            expanded.append(_expand_token(token, variables))
    return expanded


def _expand_token(token: str, variables: Variables) -> str:
    def value(match: re.Match[str]) -> str:
        values = variables.get(match[1] or match[3])
        return " ".join(values) if values else match[2] or match[0]

    pattern = r"\$(?:\{(\w+)(?::[-=]([^}]{0,500}))?\}|(\w+))"
    return re.sub(pattern, value, token)


def parse_argument(text: str) -> object:
    """An argument as bool, null, number, JSON or text; `3e-6` is a number (YAML says text)."""
    constants = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in constants:
        return constants[text.lower()]
    for convert in (int, float, json.loads if text[:1] in "[{" else str):
        try:
            return convert(text)
        except ValueError:
            continue
    return text
