"""`rloo ledger`: what became of every prompt of a run, added up."""

import json
from collections import Counter

import pytest
from assert_refused import assert_refused
from cli_cases import Rloo
from ledger_cases import ended, lines, prompts, write

from rloo_cli.cli import main
from rloo_cli.inspection.ledger_sums import read_ledger_sums
from rloo_cli.reporting.prompt_ledger import LEDGER_FILE
from rloo_cli.utils.errors import ConfigError, DataError

# Six prompts: epoch 0 is over with step 2, epoch 1 with step 4.
STEPS = [
    ["trained", "trained", "dropped"],
    ["trained", "resampled", "unscorable", "masked"],
    ["skipped", "skipped", "dropped"],
    ["trained"] * 4,
]
DRAWS = {"trained": 7, "dropped": 2, "resampled": 1, "unscorable": 1, "masked": 1, "skipped": 2}


@pytest.fixture
def run(tmp_path):
    """The folder of a run that ended, whose ledger is right."""
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    return ended(write(folder, STEPS, prompts(6, [2, 5])))


def test_what_a_right_ledger_adds_up_to_is_shown(run, capsys, sentence):
    assert main.find_verb(["ledger", str(run)])() == 0
    said = capsys.readouterr().out
    table = {line.split()[0]: line.split()[1:] for line in said.splitlines() if line}
    assert table["trained"] == ["7", "50.0%", "3", "2", "2"]
    assert table["resampled"] == ["1", "7.1%", "1", "0", "0"]
    sentence(said)


def test_as_json_it_is_plain_values(run, capsys):
    assert main.find_verb(["ledger", str(run), "--json"])() == 0
    found = json.loads(capsys.readouterr().out)
    assert found["draws"] == 14 and found["fates"] == DRAWS
    assert found["steps"] == [1, 4] and found["places"] == [0, 14]
    assert found["data_rows"] == 8 and found["filtered"] == 2
    assert [e["draws"] for e in found["epochs"]] == [6, 6, 2]
    added = sum((Counter(e["fates"]) for e in found["epochs"]), Counter())
    assert added == DRAWS
    trained = {
        row
        for line in lines(run)[1:]
        for p, row in enumerate(line["rows"], line["place"])
        if p in line.get("trained", [])
    }
    assert found["prompts_trained"] == len(trained)


def test_many_epochs_are_not_shown_beside_each_other(tmp_path, capsys):
    ended(write(tmp_path, [["trained"] * 6] * 7))
    assert main.find_verb(["ledger", str(tmp_path)])() == 0
    said = capsys.readouterr().out
    assert "epoch 0" not in said and "42 draws = trained 42" in said


def test_a_run_before_its_first_step_has_nothing_to_add_up(tmp_path, capsys):
    write(tmp_path, [])
    (tmp_path / "run.json").write_text('{"state": "training"}')
    assert main.find_verb(["ledger", str(tmp_path)])() == 0
    said = capsys.readouterr().out
    assert "no step yet" in said and said.endswith("\n0 draws\n")


@pytest.mark.parametrize("cut", [1, 20, 80])
def test_half_a_line_at_the_end_is_refused(run, cut):
    text = (run / LEDGER_FILE).read_bytes()
    (run / LEDGER_FILE).write_bytes(text[:-cut])
    with pytest.raises(DataError) as caught:
        read_ledger_sums(run)
    assert_refused(caught, 4, "last line", where=f"{LEDGER_FILE}:5")


@pytest.mark.parametrize(
    "junk",
    [
        "", "{", "[]", "null", "17", '{"step": 2}', '{"a": 1}', "\x00\xff",
        '{"step": 1, "place": 0, "check": ""}',
        '{"step": 1, "place": 0, "check": "", "rows": [1], "updates": "x", "trained": [[]]}',
    ],
)  # fmt: skip
def test_a_line_that_is_no_entry_is_refused(run, junk):
    text = (run / LEDGER_FILE).read_text().splitlines()
    text.insert(2, junk)
    (run / LEDGER_FILE).write_bytes("".join(f"{line}\n" for line in text).encode("latin-1"))
    with pytest.raises(DataError) as caught:
        read_ledger_sums(run)
    assert_refused(caught, 4, "a line of the ledger", where=f"{LEDGER_FILE}:3")


def test_an_empty_ledger_is_refused(run):
    (run / LEDGER_FILE).write_text("")
    with pytest.raises(DataError) as caught:
        read_ledger_sums(run)
    assert_refused(caught, 4, "empty")


def test_a_run_is_found_by_its_name_or_its_folder(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for word in ("mine", "runs/mine", "runs/mine/", str(run)):
        assert main.find_verb(["ledger", word])() == 0
        assert "14 draws" in capsys.readouterr().out


def test_what_is_missing_or_not_understood_is_answered(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def check(words, key, fix=""):
        with pytest.raises(ConfigError) as caught:
            main.find_verb(["ledger", *words])()
        assert_refused(caught, 2, key, fix=fix)

    check(["mien"], "known runs: mine", "rloo ledger mine")
    check([], "rloo ledger", "rloo ledger mine")
    check(["mine", "--jsn"], "--jsn", "--json")
    check(["mine", "other"], "other")
    (run / LEDGER_FILE).unlink()
    check(["mine"], LEDGER_FILE)
    monkeypatch.chdir("/")
    check(["mine"], "no run")


def test_the_command_needs_no_torch_and_exits_with_2_and_4(rloo_without_torch: Rloo):
    folder = rloo_without_torch.folder / "runs" / "mine"
    folder.mkdir(parents=True)
    ended(write(folder, STEPS))
    right = rloo_without_torch("ledger", "mine")
    assert right.code == 0 and "14 draws" in right.out, right.said
    assert rloo_without_torch("ledger", "nothing").code == 2
    with (folder / LEDGER_FILE).open("a") as file:
        file.write("{}\n")
    wrong = rloo_without_torch("ledger", "mine")
    assert_refused(wrong, 4, "ledger", where=f"{LEDGER_FILE}:6")
    assert not wrong.out
    assert json.loads(rloo_without_torch("ledger", "mine", "--errors=json").err)[0]["code"] == 4
