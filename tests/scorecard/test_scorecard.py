"""docs/results/scorecard.md has the rows of rows.yaml and no others, and what they name is there.

None of it runs a row: that is `make scorecard`.
"""

import json
import re
import sys
import time
from pathlib import Path

import judge
import pytest
import run_scorecard
import scorecard_page
import scorecard_rows
from scorecard_rows import Row, Step

pytestmark = pytest.mark.process

CARD = scorecard_rows.read_scorecard()
# How many of each family were promised first; the other families came later.
PROMISED = {"BC": 22, "BR": 12, "BD": 7, "BM": 7, "FK": 4, "FS": 7, "FV": 4, "FX": 6}
made = pytest.mark.skipif(
    not scorecard_page.PAGE.exists(), reason="make scorecard has not been run to its end yet"
)
LINE = re.compile(r"^\| ([A-Z]{2}\d+[a-z]?) \| (.*?) \| ", re.MULTILINE)


def test_every_promise_has_a_row_and_every_row_a_name_of_its_own() -> None:
    ids = [row.id for row in CARD.rows]
    assert len(ids) == len({*ids})
    wanted = {f"{family}{n}" for family, last in PROMISED.items() for n in range(1, last + 1)}
    assert not wanted - {scorecard_rows.number_of(row_id) for row_id in ids}


@made
def test_the_page_has_these_rows_in_this_order() -> None:
    found = LINE.findall(scorecard_page.PAGE.read_text())
    ordered = [row for family in CARD.families for row in CARD.rows if row.family == family]
    assert found == [(row.id, scorecard_page.escaped(row.promise)) for row in ordered], (
        "make scorecard"
    )


@made
def test_the_page_shows_each_rows_commands_with_the_variables_that_they_need() -> None:
    text = scorecard_page.PAGE.read_text()
    lines = {LINE.match(line)[1]: line for line in text.splitlines() if LINE.match(line)}
    shown = {row.id: f" | {scorecard_page.cell(row.shown())} | " for row in CARD.rows}
    assert not [row for row, cell in shown.items() if cell not in lines[row]], "make scorecard"
    broken = [r.shown() for r in CARD.rows for s in r.steps if "RLOO_FAULTS" in r.environment(s)]
    assert broken and all('RLOO_ALLOW_FAULTS="' in shown for shown in broken)


@made
def test_the_pages_tally_is_that_of_its_rows() -> None:
    text = scorecard_page.PAGE.read_text()
    lines = [line for line in text.splitlines() if LINE.match(line)]
    missing = sum("| not run here: " in line for line in lines)
    red = sum("**not as promised**" in line for line in lines)
    assert f"**{len(lines) - missing - red} of {len(lines) - missing} rows" in text


@pytest.mark.parametrize("row", [row for row in CARD.rows if row.tests], ids=lambda row: row.id)
def test_the_tests_of_a_row_are_there(row: Row) -> None:
    assert not [why for node in row.tests if (why := scorecard_rows.missing_tests(node))]


def test_every_row_shows_promises_that_there_are() -> None:
    shown = {n for row in CARD.rows for n in scorecard_page.promises_of(row, CARD)}
    assert shown == set(CARD.promises)


# What must be seen of a row, whatever it says itself.


def run_row(folder: Path, program: str, no_torch: bool = False, **keys: object) -> judge.Outcome:
    """The outcome of a row whose command is this Python program."""
    value = {"id": "ZZ1", "promise": "it is so", "limit": 20, **keys}
    step = Step(["python", "-c", program], **{k: keys[k] for k in ("code", "says") if k in keys})
    (folder / "no_torch").mkdir(exist_ok=True)
    (folder / "no_torch" / "sitecustomize.py").write_text(judge.NO_TORCH)
    attempt = judge.Attempt(Row("ZZ1", "it is so", [step], value), folder, no_torch)
    while (outcome := attempt.poll()) is None:
        time.sleep(0.02)
    return outcome


def test_a_row_that_does_as_it_says_is_kept(tmp_path: Path) -> None:
    found = run_row(tmp_path, "print('done so')", says=["done"], present=[], absent=["runs"])
    assert found.kept and found.code == 0 and found.said == "done so" and not found.why


BROKEN = {
    "another code": ("import sys; sys.exit(1)", {}, "exit code 1 and not 0"),
    "no word": ("print('x')", {"says": ["done"]}, "does not say 'done'"),
    "a traceback": ("1 / 0", {"code": 1}, "it says 'Traceback"),
    "a temporary file": ("import tempfile; tempfile.mkstemp()", {}, "in the temporary folder"),
    "a changed folder": ("open('x', 'w')", {"leaves": "nothing"}, "it made or changed x"),
    "a file that is there": ("open('x', 'w')", {"absent": ["x"]}, "x is there"),
    "a file that is not": ("print()", {"present": ["x"]}, "x is not there"),
    "no end": ("import time; time.sleep(60)", {"limit": 1}, "did not end within 1 s"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_row_is_red_for(name: str, tmp_path: Path) -> None:
    program, keys, why = BROKEN[name]
    found = run_row(tmp_path, program, **keys)
    assert found.kept is False and any(why in text for text in found.why), found


def test_a_process_that_outlives_its_row_is_seen_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge, "GRACE_S", 0.2)
    away = "import subprocess; subprocess.Popen(['setsid', 'sleep', '77'])"
    found = run_row(tmp_path, away)
    assert found.kept is False and "left: sleep 77" in found.why[0]
    until = time.monotonic() + 20  # a process that was killed is there until it is told so
    while (left := judge.marked(f"ZZ1-{judge.os.getpid()}")) and time.monotonic() < until:
        time.sleep(0.05)
    assert not left


def test_torch_can_be_forbidden_to_a_row(tmp_path: Path) -> None:
    found = run_row(tmp_path, "import torch", no_torch=True, code=1)
    assert any("Traceback" in text for text in found.why)


@pytest.mark.slow
def test_a_skipped_test_is_not_run_and_a_failed_one_is_red(tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(
        "import pytest\n\ndef test_skipped():\n    pytest.skip('no such thing here')\n\n"
        "def test_passed(): ...\n\ndef test_failed():\n    assert 0\n"
    )
    for number, (name, kept, said) in enumerate(
        [("skipped", None, "no such thing here"), ("passed", True, "1 passed"),
         ("failed", False, "1 failed")]
    ):  # fmt: skip
        folder = tmp_path / str(number)
        folder.mkdir()
        row = Row("ZZ1", "p", [], {"id": "ZZ1", "promise": "p", "test": f"{file}::test_{name}"})
        attempt = judge.Attempt(row, folder, False)
        while (found := attempt.poll()) is None:
            time.sleep(0.02)
        assert found.kept is kept and found.said.startswith(said), found


def test_a_row_that_changed_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_scorecard, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(run_scorecard, "code_digest", lambda _: "code")
    first = run_scorecard.Results(CARD, anew=False)
    row = CARD.rows[0]
    first.keep(row, judge.Outcome(row.id, True, 2, "error: x", 1.0))
    assert run_scorecard.Results(CARD, anew=False).found[row.id].said == "error: x"
    monkeypatch.setattr(run_scorecard, "code_digest", lambda _: "other code")
    assert not run_scorecard.Results(CARD, anew=False).found
    assert json.loads((tmp_path / "kept").read_text())["id"] == row.id


@made
def test_no_path_of_this_machine_is_on_the_page() -> None:
    text = scorecard_page.PAGE.read_text()
    assert (
        sys.prefix not in text and str(Path.home() / "x")[:-1] not in text and "/tmp/" not in text
    )
