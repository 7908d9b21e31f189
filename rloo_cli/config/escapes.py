"""Escapes in the values of the command line: in double quotes they are read as in YAML.

Hydra keeps a backslash in quotes of either kind: `data.template="Q: {prompt}\\nA:"` would put a
backslash and an n into every prompt, unlike the same line of a YAML file. In single quotes a
backslash stays a backslash, as in YAML.
"""

import re

import yaml
from hydra.core.override_parser.types import Quote, QuotedString

from rloo_cli.utils.errors import refuse

QUOTED_TEXT = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)


def decode_escapes(value: str, where: str) -> str:
    """A value as typed -> as Hydra expects it, with escapes in double quotes resolved.

    A value that starts with ~ is quoted, since Hydra rejects ~ outside quotes.
    Raises ConfigError for an escape that YAML does not have.
    """
    if value.startswith("~") and not re.search(r"['\"\\,]", value):
        return QuotedString(text=value, quote=Quote.single).with_quotes()

    def decode(found: re.Match[str]) -> str:
        quoted = found[0]
        if quoted.startswith("'") or "\\" not in quoted:
            return quoted
        try:
            text = str(yaml.safe_load(quoted))
        except yaml.YAMLError as error:
            why = str(getattr(error, "problem", error))
            what = f"{quoted} has an invalid escape"
            fix = (
                f"'{quoted[1:-1]}' in single quotes keeps backslashes; in double quotes write \\\\"
            )
            refuse(where, what, fix, why)
        return QuotedString(text=text, quote=Quote.single).with_quotes()

    return QUOTED_TEXT.sub(decode, value)
