"""The nightly list runs every target, whatever became of the one before."""

import sys
from pathlib import Path

import nightly
import pytest

MAKEFILE = """
test-all:
\t@echo "1 failed"; exit 1
soak:
\t@echo soaked for $(MINUTES)
audit:
\t@echo "nothing was audited: no route"; exit 3
"""


def test_a_target_that_fails_ends_no_night_and_an_audit_without_a_database_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "Makefile").write_text(MAKEFILE)
    monkeypatch.setattr(nightly, "ROOT", tmp_path)
    monkeypatch.setattr(nightly, "LOGS", tmp_path / "nightly")
    monkeypatch.setattr(sys, "argv", ["nightly", "test-all", "soak", "audit", "--minutes", "2"])
    assert nightly.main() == 1
    failed, soak, audit = capsys.readouterr().out.splitlines()
    assert failed.split()[:2] == ["test-all", "2"]
    assert "soaked for 2" in soak
    assert audit.split()[:2] == ["audit", "0"] and "no route" in audit
    monkeypatch.setattr(sys, "argv", ["nightly", "soak", "audit"])
    assert nightly.main() == 0
