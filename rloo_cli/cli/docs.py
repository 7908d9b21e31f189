"""`rloo docs [PAGE]`: list the pages of docs/, or print one. A wheel has them, too.

On a terminal a page is shown as rich shows Markdown; a pipe or a file gets the Markdown itself.
"""

import json
import re
import sys
from pathlib import Path
from typing import ClassVar

from rich.console import JustifyMethod
from rich.markdown import Markdown, TableDataElement

from rloo_cli.cli import answers
from rloo_cli.cli.verb_parser import parse_verb
from rloo_cli.config.pasted import refuse_unknown_name
from rloo_cli.utils import paths

HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
WIDTH = 100  # characters of a line on a terminal that is wider


class _FoldedCell(TableDataElement):
    """A cell whose long words go on in the next line: rich would cut the name of a key."""

    def __init__(self, justify: JustifyMethod):
        super().__init__(justify)
        self.content.overflow = "fold"


class _Page(Markdown):
    elements: ClassVar = Markdown.elements | {"td_open": _FoldedCell}


def run(args: list[str]) -> int:
    """The verb. Raises ConfigError for an unknown page or section."""
    options, pages = parse_verb("docs", args), paths.doc_pages()
    if not options.page:
        titles = {name: page_title(path) for name, path in pages.items()}
        lines = [f"{name:<18} {title}" for name, title in titles.items()]
        print(json.dumps(titles, indent=2) if options.json else "\n".join(lines))
        return 0
    name, _, section = options.page.removeprefix("docs/").partition("#")
    name = name.removesuffix(".md")
    if name not in pages:
        refuse_unknown_name("page", name, pages, "rloo docs NAME", "rloo docs")
    text = pages[name].read_text(encoding="utf-8")
    text = find_section(name, text, section) if section else text
    if options.json:
        print(json.dumps({"page": options.page, "text": text}, indent=2))
    elif sys.stdout.isatty():
        console = answers.answer_console(WIDTH)
        console.print(_Page(text, hyperlinks=False), width=min(console.width, WIDTH))
    else:
        print(text.rstrip())
    return 0


def page_title(path: Path) -> str:
    """The first heading of a page."""
    found = HEADING.search(path.read_text(encoding="utf-8"))
    return found[2] if found else path.stem


def find_section(page: str, text: str, anchor: str) -> str:
    """The section that has this anchor, as its heading or as an `<a id=...>` in it."""
    plain = CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)  # of equal length
    heads = [*HEADING.finditer(plain)]
    at = plain.find(f'id="{anchor}"')
    starts = [h for h in heads if heading_anchor(h[2]) == anchor or 0 <= h.start() < at]
    if not starts:
        names = [heading_anchor(h[2]) for h in heads]
        refuse_unknown_name("section", anchor, names, f"rloo docs {page}#NAME", f"rloo docs {page}")
    start = starts[-1]
    ends = (h.start() for h in heads if h.start() > start.start() and len(h[1]) <= len(start[1]))
    return text[start.start() : next(ends, len(text))]


def heading_anchor(heading: str) -> str:
    """What a link to a heading says behind its #, as GitHub and mkdocs make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
