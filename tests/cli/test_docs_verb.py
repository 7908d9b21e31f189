"""`rloo docs`: pages are listed and printed; sections are found; names in errors lead to a page."""

import json
import re
import sys
from pathlib import Path

import pytest
from assert_refused import assert_refused

from rloo_cli.cli import docs, main
from rloo_cli.reporting.health.rules import HEALTH_RULES
from rloo_cli.utils import paths
from rloo_cli.utils.errors import ConfigError

Capture = pytest.CaptureFixture[str]


def print_docs(capsys: Capture, *words: str) -> str:
    assert main.find_verb(["docs", *words])() == 0
    return capsys.readouterr().out


def test_every_page_is_listed_and_printed_as_it_is(capsys: Capture) -> None:
    listed = print_docs(capsys).splitlines()
    assert [line.split()[0] for line in listed] == [*paths.doc_pages()]
    assert "results/speed" in paths.doc_pages()
    for name, path in paths.doc_pages().items():
        assert print_docs(capsys, name) == path.read_text().rstrip() + "\n"
    assert print_docs(capsys, "docs/rewards.md") == print_docs(capsys, "rewards")
    assert json.loads(print_docs(capsys, "--json"))["rewards"] == "Rewards"
    assert json.loads(print_docs(capsys, "start", "--json"))["text"].startswith("# ")


def test_a_terminal_gets_a_drawn_page_whose_names_are_whole(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    said = print_docs(capsys, "inspect#guards")
    assert ("──" in said or "━━" in said) and "|---" not in said and "…" not in said
    assert "<!--" not in print_docs(capsys, "metrics")


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("reward", "rloo docs rewards"),
        ("zzz", "rloo docs"),
        ("inspect#guard", "rloo docs inspect#guards"),
        ("../README", "rloo docs"),
    ],
)
def test_what_is_not_there_is_answered_with_the_nearest(word: str, fix: str) -> None:
    with pytest.raises(ConfigError) as refused:
        main.find_verb(["docs", word])()
    assert_refused(refused, code=2, fix=fix)


PAGE = """# One

## A `key`, twice

text

```
# no heading
```

### Below

<a id="row"></a>row

## Last
"""


@pytest.mark.parametrize(
    ("anchor", "first", "last"),
    [
        ("a-key-twice", "## A `key`, twice", '<a id="row"></a>row'),
        ("row", "### Below", '<a id="row"></a>row'),
        ("last", "## Last", "## Last"),
        ("one", "# One", "## Last"),
    ],
)
def test_a_section_ends_at_the_next_heading_of_its_level(
    anchor: str, first: str, last: str
) -> None:
    lines = docs.find_section("page", PAGE, anchor).strip().splitlines()
    assert (lines[0], lines[-1]) == (first, last)


def test_a_heading_in_code_is_none() -> None:
    with pytest.raises(ConfigError):
        docs.find_section("page", PAGE, "no-heading")


def test_pages_that_errors_and_findings_name_are_there(capsys: Capture) -> None:
    named = set()
    for path in paths.PACKAGE.rglob("*.py"):
        named |= set(re.findall(r'"rloo docs ([a-z][\w/]*(?:#[\w-]+)?)"', path.read_text()))
    assert named >= {"algorithms", "migrate", "inspect#guards"}
    titles = [rule.title for rule in HEALTH_RULES.values() if rule.found]
    named |= {f"inspect#{title.lower().replace(' ', '-')}" for title in titles}
    for page in named:
        assert print_docs(capsys, page)


def test_the_pages_lie_where_a_wheel_has_them() -> None:
    mapped = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '"docs" = "rloo_cli/_yaml/docs"' in mapped
    assert paths.DOCS == paths.ROOT / "docs"
