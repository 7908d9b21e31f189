"""slow_cases.txt names tests that there are, each once, and pytest takes them for slow."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LISTED = (ROOT / "tests/slow_cases.txt").read_text().splitlines()
LINES = [text for text in LISTED if text and not text.startswith("#")]


def test_slow_cases_are_tests_that_there_are() -> None:
    gone = []
    for line in LINES:
        file, _, rest = line.partition("::")
        path, name = ROOT / file, rest.partition("[")[0]
        if not path.is_file() or f"\ndef {name}(" not in path.read_text():
            gone.append(line)
    assert not gone and len(set(LINES)) == len(LINES)


def test_a_listed_case_is_slow(request: pytest.FixtureRequest) -> None:
    """Of what this session has collected: everything, in a whole run."""
    quick = [i.nodeid for i in request.session.items if not i.get_closest_marker("slow")]
    assert not set(LINES) & {name for node in quick for name in (node, node.partition("[")[0])}
