"""Escapes in the values of the command line: in double quotes they are read as YAML reads them.

Hydra keeps a backslash as it is, in quotes of either kind: `data.template="Q: {prompt}\\nA:"` would
put a backslash and an n into every prompt, where the same line of a YAML file is a line break. In
single quotes a backslash stays a backslash, as in YAML.
"""

import re

import yaml
from hydra.core.override_parser.types import Quote, QuotedString

from rloo_cli.utils.errors import refuse

QUOTED_TEXT = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)


def decode_escapes(value: str, where: str) -> str:
    """A value as it is typed -> as Hydra takes it: texts in double quotes with their escapes read.

    A value that begins with ~ is quoted, since Hydra does not read that sign outside quotes.
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
            what = f"{quoted} has an escape that cannot be read"
            fix = (
                f"'{quoted[1:-1]}' in single quotes keeps backslashes; in double quotes write \\\\"
            )
            refuse(where, what, fix, why)
        return QuotedString(text=text, quote=Quote.single).with_quotes()

    return QUOTED_TEXT.sub(decode, value)
