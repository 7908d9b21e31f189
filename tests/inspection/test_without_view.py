"""Without the extra `view`: verbs that show something say how to get it, and a run goes on."""

import sys
from pathlib import Path

import pytest
from assert_refused import assert_refused
from compare_cases import write

from rloo_cli.cli import compare, report, top
from rloo_cli.reporting.curves import CurveDrawer
from rloo_cli.utils.errors import MachineError

INSTALL = "pip install 'rloo-cli[view]'"


@pytest.fixture(autouse=True)
def bare_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs in a new folder, and none of the packages of `view`."""
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        write(Path("runs"), name)
    for module in ("altair", "vl_convert", "textual"):
        monkeypatch.setitem(sys.modules, module, None)
    for module in [m for m in sys.modules if m.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def test_a_report_and_the_live_screen_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MachineError) as caught:
        report.run(["one"])
    assert_refused(caught, 3, "this machine", fix=INSTALL)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    with pytest.raises(MachineError) as caught:
        top.run(["one"])
    assert_refused(caught, 3, "this machine", fix=INSTALL)


def test_a_comparison_has_its_tables_and_one_line_says_that_there_is_no_picture(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert compare.run(["one", "two", "--out", "out"]) == 0
    assert Path("out/table.md").exists() and not Path("out/curves.png").exists()
    assert INSTALL in capsys.readouterr().err


def test_a_run_says_once_that_its_curves_are_not_drawn() -> None:
    notes: list[str] = []
    drawer = CurveDrawer(Path("runs/one"))
    for lines in (5, 6):
        drawer.draw_curves(lines, notes.append)
    assert len(notes) == 1 and INSTALL in notes[0]
