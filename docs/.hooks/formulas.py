"""Writes the formulas of a page as MathML, which browsers draw themselves: no script is loaded.

`$...$` and `$$...$$` outside of code are LaTeX, as GitHub shows it.
"""

import re
from typing import Any

from latex2mathml.converter import convert

CODE_OR_FORMULA = re.compile(
    r"(?P<code>^```.*?^```$|`[^`\n]*`)|\$\$(?P<block>.+?)\$\$|\$(?P<inline>[^$\n]+)\$",
    re.MULTILINE | re.DOTALL,
)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs calls it with the text of each page."""
    return CODE_OR_FORMULA.sub(_formula, markdown)


def _formula(found: re.Match[str]) -> str:
    if found["code"] is not None:
        return found[0]
    display = "block" if found["block"] else "inline"
    made = convert(found["block"] or found["inline"], display=display)
    return made.replace("\n", " ").replace("|", "&#x7C;")
