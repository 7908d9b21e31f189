"""Writes the formulas of a page as MathML, which browsers draw themselves: no script is loaded.

`$...$`, `$$...$$` and blocks fenced as ```math are LaTeX, as GitHub shows it; other code is kept.
"""

import re
from typing import Any

from latex2mathml.converter import convert

CODE_OR_FORMULA = re.compile(
    r"^```math\n(?P<fenced>.*?)^```$|(?P<code>^```.*?^```$|`[^`\n]*`)"
    r"|\$\$(?P<block>.+?)\$\$|\$(?P<inline>[^$\n]+)\$",
    re.MULTILINE | re.DOTALL,
)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs calls it with the text of each page."""
    return CODE_OR_FORMULA.sub(_formula, markdown)


def _formula(found: re.Match[str]) -> str:
    if found["code"] is not None:
        return found[0]
    if fenced := found["fenced"]:
        return f'<div style="overflow-x: auto">{_mathml(fenced, "block")}</div>'  # on a phone
    display = "block" if found["block"] else "inline"
    return _mathml(found["block"] or found["inline"], display)


def _mathml(latex: str, display: str) -> str:
    return convert(latex, display=display).replace("\n", " ").replace("|", "&#x7C;")
