"""The documentation builds as a site; a link that leads nowhere is an error."""

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


def test_the_site_builds_with_its_links_checked_and_asks_for_nothing_elsewhere(
    tmp_path: Path,
) -> None:
    done = build(ROOT / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "<math" in (tmp_path / "site/algorithms/index.html").read_text()
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
