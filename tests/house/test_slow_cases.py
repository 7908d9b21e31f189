"""slow_cases.txt and mutants.yaml name tests and code that there are; the first are marked slow."""

from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
LISTED = (ROOT / "tests/slow_cases.txt").read_text().splitlines()
LINES = [text for text in LISTED if text and not text.startswith("#")]
MUTANTS = yaml.safe_load((ROOT / "tests/house/mutants.yaml").read_text())


def test_slow_cases_are_tests_that_there_are() -> None:
    gone = []
    for line in LINES:
        file, _, rest = line.partition("::")
        path, name = ROOT / file, rest.partition("[")[0]
        if not path.is_file() or f"\ndef {name}(" not in path.read_text():
            gone.append(line)
    assert not gone and len(set(LINES)) == len(LINES)


def test_a_case_that_is_listed_is_one_that_was_collected(request: pytest.FixtureRequest) -> None:
    """In files that this session has collected whole: all, in a whole run."""
    if any("::" in word for word in request.config.args):
        pytest.skip("only some tests of a file were collected")
    conftest = request.config.pluginmanager.get_plugin(str(ROOT / "tests/conftest.py"))
    names = request.config.stash[conftest.COLLECTED]
    files = {name.partition("::")[0] for name in names}
    names = names | {name.partition("[")[0] for name in names} | files
    listed = [*LINES, *(mutant["test"] for mutant in MUTANTS)]
    assert [one for one in listed if one.partition("::")[0] in files and one not in names] == []


def test_a_listed_case_is_slow(request: pytest.FixtureRequest) -> None:
    """Of what this session has collected: everything, in a whole run."""
    quick = [i.nodeid for i in request.session.items if not i.get_closest_marker("slow")]
    assert not set(LINES) & {name for node in quick for name in (node, node.partition("[")[0])}


def test_the_code_of_a_guard_is_there_once() -> None:
    """`make mutants` takes an hour to come to the one where it is not."""
    found = {m["guard"]: (ROOT / m["file"]).read_text().count(m["with"]) for m in MUTANTS}
    assert len(found) == len(MUTANTS) and {g: n for g, n in found.items() if n != 1} == {}
