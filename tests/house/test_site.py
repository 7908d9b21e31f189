"""The documentation builds as a site; a link that leads nowhere is an error."""

import html
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        not (find_spec("material") and find_spec("latex2mathml")),
        reason="pip install mkdocs-material latex2mathml",
    ),
]


def build(config: Path, site: Path) -> "subprocess.CompletedProcess[str]":
    words = ["-m", "mkdocs", "build", "--strict", "--config-file", str(config), "-d", str(site)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run([sys.executable, *words], text=True, capture_output=True, env=quiet)


def shown_text(page: Path) -> str:
    """What a browser shows of a page outside of code."""
    hidden = r"<(script|style|code|pre|annotation)\b.*?</\1>|<!--.*?-->|<[^>]*>"
    return html.unescape(re.sub(hidden, "", page.read_text(), flags=re.DOTALL))


def check_formulas(site: Path) -> None:
    """Every formula is drawn, and no name in angle brackets is taken for a tag."""
    fences = (ROOT / "docs/algorithms.md").read_text().count("```math\n")
    drawn = (site / "algorithms/index.html").read_text().count('display="block"')
    assert drawn == fences > 0
    for page in site.rglob("*.html"):
        assert not re.findall(r"\\(?:frac|sum|log|text|beta)|\$\$", shown_text(page)), page
    assert "<recipe>-<model>" in shown_text(site / "keys/index.html")


def test_the_site_builds_with_its_links_checked_and_asks_for_nothing_elsewhere(
    tmp_path: Path,
) -> None:
    done = build(ROOT / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 0, done.stderr[-3000:]
    check_formulas(tmp_path / "site")
    assert 'class="k"' in (tmp_path / "site/rewards/index.html").read_text()  # Python's keywords
    assert "num_generations" in (tmp_path / "site/search/search_index.json").read_text()
    fetched = re.compile(r"""<(?:script|link|img)[^>]*(?:src|href)=["']?(https?://[^"' >]+)""")
    for page in (tmp_path / "site").rglob("*.html"):
        text = page.read_text()
        away = [url for url in fetched.findall(text) if "canonical" not in url]
        assert not away, (page, away)


def test_a_link_that_leads_nowhere_ends_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("# A page\n\n[nowhere](other.md#part)\n")
    text = (ROOT / "mkdocs.yml").read_text()
    text = text.partition("nav:\n  - Start")[0].replace("hooks: [docs/.hooks/formulas.py]\n", "")
    (tmp_path / "mkdocs.yml").write_text(text)
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode and "other.md" in done.stderr
