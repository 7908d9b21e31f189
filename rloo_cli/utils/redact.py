"""Finds what looks like a secret, and masks it in everything that is printed, logged or kept.

A config holds none (`compose` and `messages` refuse it), so this is for the output of other code:
an exception of a reward that quotes its environment, a library that prints a token.
"""

import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from rloo_cli.utils import console

if TYPE_CHECKING:  # lazy: `rloo --help` logs nothing
    import logging

MASK = "[secret]"
SHORTEST = 8  # shorter values (1, true, none) would be masked in ordinary text
SECRET_KEY = re.compile(
    r"(^|[._])(api_?key|password|passwd|secret|(hf|auth|access|wandb)_token)$", re.I
)
SECRET_VALUE = re.compile(r"\b(hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_\w{20,})")
# Common non-secrets in command lines: a few lower-case words, a path of such words, a
# short number. They are masked in output, but do not make a command invalid.
HARMLESS_VALUE = re.compile(
    r"[a-z]{1,15}([ ._-][a-z]{1,15}){0,2}|[0-9.]{1,11}"
    r"|~?[a-z._-]{0,20}[0-9]{0,4}(/[a-z._-]{0,20}[0-9]{0,4})+"
)
SECRET_VARIABLE = re.compile(
    r"(^|_)(TOKENS?|SECRETS?|PASS(WORD|WD|PHRASE)?|(API|ACCESS|PRIVATE|SECRET)_?KEY(_ID)?"
    r"|CREDENTIALS?)(_|$)(?!.*(PATH|FILE|DIR)$)",
    re.IGNORECASE,
)


def environment_secrets() -> dict[str, str]:
    """Value -> name of every environment variable that seems to hold a secret."""
    long = [(value, name) for name, value in os.environ.items() if len(value) >= SHORTEST]
    secrets = [(value, name) for value, name in long if SECRET_VARIABLE.search(name)]
    return dict(sorted(secrets, key=lambda pair: -len(pair[0])))  # one can contain another


def find_secret(text: str) -> str:
    """The secret in a text: its variable's name, or its first letters; "" where there is none.

    A variable's value is not a secret if it is an existing path, or plain words."""
    for value, name in environment_secrets().items():
        if value in text and not HARMLESS_VALUE.fullmatch(value) and not os.path.exists(value):
            return name
    match = SECRET_VALUE.search(text)
    return f"{match[0][:3]}..." if match else ""


def redact_text(text: str) -> str:
    """The same text, its secrets masked."""
    for value in environment_secrets():
        text = text.replace(value, MASK)
    return SECRET_VALUE.sub(MASK, text)


def redact_tree(values: Any) -> Any:
    """The same nested dictionaries and lists, the secrets in their strings masked."""
    if isinstance(values, dict):
        return {redact_tree(k): redact_tree(v) for k, v in values.items()}
    if isinstance(values, list | tuple):
        return [redact_tree(v) for v in values]
    return redact_text(values) if isinstance(values, str) else values


class RedactingFormatter:
    """Formats log lines, tracebacks included, with secrets masked and control characters shown."""

    def __init__(self, form: str | None = None):
        from logging import Formatter  # lazy: `rloo --help` logs nothing

        self.inner = Formatter(form)

    def format(self, record: "logging.LogRecord") -> str:
        return console.show_control_characters(redact_text(self.inner.format(record)))


class RedactingStream:
    """A text stream that masks secrets and neutralises control sequences in what is written to it.

    Code that prints text of a model or a data set cleans it more thoroughly; this is for the
    output of other code.
    """

    def __init__(self, inner: TextIO | console.SafeStream):
        self.inner = inner

    def write(self, text: str) -> int:
        self.inner.write(console.disarm_commands(redact_text(text)))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def redact_console() -> None:
    """Mask secrets in stdout, stderr and the handlers of the root logger from now on.

    Printing cannot fail from then on either (`console`).
    """
    out, err = console.guard_stream(sys.stdout), console.guard_stream(sys.stderr)
    sys.stdout, sys.stderr = RedactingStream(out), RedactingStream(err)
    console.keep_streams()
    if logging := sys.modules.get("logging"):  # else no handler exists
        for handler in logging.getLogger().handlers:
            handler.setFormatter(RedactingFormatter(logging.BASIC_FORMAT))


@contextmanager
def redacted_console() -> Iterator[None]:
    """`redact_console`, for as long as the block lasts."""
    before = sys.stdout, sys.stderr
    redact_console()
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout, sys.stderr = before
        console.forget_streams()
