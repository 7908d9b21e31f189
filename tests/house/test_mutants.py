"""tests/house/mutants.py: a test that hangs costs its own limit, and no other test its result."""

from pathlib import Path

import mutants
import pytest


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
