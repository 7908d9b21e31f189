"""mutants.yaml names code and tests that exist; a test that hangs costs no other its result."""

from pathlib import Path

import mutants
import pytest
import yaml
from suite_marks import COLLECTED

ROOT = Path(__file__).parents[2]
MUTANTS = yaml.safe_load((ROOT / "tests/house/mutants.yaml").read_text())


def test_the_code_of_a_guard_is_there_once() -> None:
    found = {m["guard"]: (ROOT / m["file"]).read_text().count(m["with"]) for m in MUTANTS}
    assert len(found) == len(MUTANTS) and {g: n for g, n in found.items() if n != 1} == {}


def test_the_test_of_a_guard_is_there(request: pytest.FixtureRequest) -> None:
    """By its whole name, in files that this session has collected whole."""
    if any("::" in word for word in request.config.args):
        pytest.skip("only some tests of a file were collected")
    names = request.config.stash[COLLECTED]
    files = {name.partition("::")[0] for name in names}
    names = names | {name.partition("[")[0] for name in names} | files
    tests = {mutant["test"] for mutant in MUTANTS}
    assert {test for test in tests if test.partition("::")[0] in files} <= names


@pytest.mark.process
def test_a_test_that_hangs_with_all_guards_is_killed_at_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = tmp_path / "test_hangs.py"
    hangs.write_text(
        "import time\ndef test_first(): pass\n"
        "def test_hangs():\n    while True: time.sleep(1)\ndef test_last(): pass\n"
    )
    monkeypatch.setattr(mutants, "COPIED", ())
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "LIMIT_S", 10.0)
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "copy").mkdir()
    slot = mutants.Slot(tmp_path / "copy")
    tests = [f"test_hangs.py::test_{name}" for name in ("first", "hangs", "last")]
    slot.start_together(tests)
    assert slot.wait_together(tests) == tests[:1]  # the last is then run alone
