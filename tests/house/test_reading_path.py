"""The reading path of docs/house.md: nine files, in order, that a stranger reads in an evening."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_LINES = 2600
STOPS = [
    "train/loop.py",
    "data/batch.py",
    "algorithms/rloo.py",
    "train/step.py",
    "train/advantages.py",
    "data/packing.py",
    "policy/model.py",
    "generation/common/rollouts.py",
    "generation/hf/generator.py",
]


def listed_files() -> list[str]:
    """The files that the page's numbered list names, in its order."""
    page = (ROOT / "docs" / "house.md").read_text()
    section = page.partition("## The reading path")[2].partition("\n## ")[0]
    return re.findall(r"^\d+\. `rloo_cli/([^`]+)`", section, re.M)


def test_the_page_lists_the_reading_path_in_its_order() -> None:
    assert listed_files() == STOPS


def test_the_reading_path_has_at_most_2600_lines() -> None:
    lines = {name: len((ROOT / "rloo_cli" / name).read_text().splitlines()) for name in STOPS}
    assert sum(lines.values()) <= MAX_LINES, lines


def test_the_formula_is_whole_in_its_file() -> None:
    """`algorithms/rloo.py` takes no arithmetic from `algorithms/common/`."""
    text = (ROOT / "rloo_cli" / "algorithms" / "rloo.py").read_text()
    assert re.search(r"\.sum\(", text), "the baseline is a sum over the siblings"
    assert re.search(r"\bexp\(", text), "the ratio is an exponential"
    assert re.search(r"\bclamp\(", text), "the ratio is clipped"
