"""`rloo ledger`: a ledger that adds up is counted, and one that does not is refused, with why."""

import json
from collections import Counter

import numpy as np
import pytest
from assert_refused import assert_refused
from cli_cases import Rloo
from ledger_cases import edit, ended, lines, prompts, write

from rloo_cli.cli import main
from rloo_cli.data import order
from rloo_cli.inspection.ledger_audit import audit_ledger
from rloo_cli.reporting import prompt_ledger
from rloo_cli.reporting.prompt_ledger import LEDGER_FILE, PROMPT_FATES
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


def refused(folder):
    with pytest.raises(DataError) as caught:
        audit_ledger(folder)
    return caught.value


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
    assert found["conserved"] is True and found["draws"] == 14 and found["fates"] == DRAWS
    assert found["steps"] == [1, 4] and found["places"] == [0, 14] and found["notes"] == []
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
    write(tmp_path, [["trained"] * 6] * 7)
    (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n')
    assert main.find_verb(["ledger", str(tmp_path)])() == 0
    said = capsys.readouterr().out
    assert "epoch 0" not in said and "42 draws = trained 42" in said


def test_a_run_before_its_first_step_has_nothing_to_conserve(tmp_path, capsys):
    write(tmp_path, [])
    (tmp_path / "run.json").write_text('{"state": "training"}')
    assert main.find_verb(["ledger", str(tmp_path)])() == 0
    said = capsys.readouterr().out
    assert "no step yet" in said and "conserved: 0 draws\n" in said


def change(index, **fields):
    return lambda rows: rows[index].update(fields)


def first_twice(rows):
    rows[1]["rows"][1] = rows[1]["rows"][0]


def swapped(rows):
    rows[1]["rows"][:2] = rows[1]["rows"][1::-1]


WRONG = {  # what was done to it, the line that is named, a value that is told
    "a step is missing": (lambda rows: rows.pop(2), 3, "step 3"),
    "a step is there twice": (lambda rows: rows.insert(3, dict(rows[2])), 4, "step 2"),
    "steps are swapped": (lambda rows: rows.insert(1, rows.pop(2)), 2, "step 0"),
    "the header is missing": (lambda rows: rows.pop(0), 1, "header"),
    "the header is there twice": (lambda rows: rows.insert(2, dict(rows[0])), 3, "header"),
    "places are left out": (
        change(2, place=4, trained=[4], resampled=[5], unscorable=[6], masked=[7]), 3, "place 4",
    ),
    "places are repeated": (change(2, place=2), 3, "place 2"),
    "a draw has no fate": (change(1, trained=[0]), 2, "no fate"),
    "a draw has two fates": (change(1, skipped=[1]), 2, "trained and skipped"),
    "a fate twice": (change(1, trained=[0, 1, 1]), 2, "trained and trained"),
    "a draw of another step": (change(1, trained=[0, 1, 3]), 2, "draw 3"),
    "a row is another": (change(1, rows=[0, 1, 3]), 2, "epoch 0"),
    "a row is there twice": (first_twice, 2, "epoch 0"),
    "rows are swapped": (swapped, 2, "epoch 0"),
    "a row is missing": (lambda rows: rows[1]["rows"].pop(), 2, "2 rows"),
    "no draws": (change(1, draws=0, rows=[]), 2, "0 draws"),
    "another epoch": (change(3, epochs=[1, 2]), 4, "[1, 2]"),
    "trained without an update": (change(1, updates=0), 2, "no update"),
    "another seed": (change(0, seed=4), 2, "epoch 0"),
    "another data set": (change(0, fingerprint="x"), 2, "epoch 0"),
    "another row filtered": (change(0, filtered=[2, 6]), 2, "epoch 0"),
    "more rows than there are": (change(0, data_rows=9), 1, "9"),
    "filtered out of range": (change(0, filtered=[2, 9]), 1, "rows of 8"),
    "filtered twice": (change(0, filtered=[2, 2]), 1, "rows of 8"),
    "a newer format": (change(0, ledger=2), 1, "format 1"),
    "a field too many": (change(2, forgotten=[3]), 3, "'forgotten'"),
    "a field too few": (lambda rows: rows[2].pop("updates"), 3, "'updates'"),
    "half a place": (change(2, draws=4.0), 3, "draws"),
    "true for a number": (change(2, trained=[True]), 3, "trained"),
    "a text for numbers": (change(2, rows="abcd"), 3, "rows"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_ledger_that_does_not_add_up_is_refused_with_line_and_reason(run, name, sentence):
    how, line, key = WRONG[name]
    problem = assert_refused(refused(edit(run, how)), 4, key, where=f"{run / LEDGER_FILE}:{line}")
    if key != "epoch 0":  # its rows are those of numpy's generator
        sentence(problem.why)


QUIET = {  # edits that only the check finds
    "a fate was changed": (lambda rows: rows[4].update(dropped=rows[4].pop("trained")), 5),
    "updates were added": (change(1, updates=2), 2),
    "more were cut": (change(0, cut=1), 1),
    "a check was changed": (change(3, check="00000000"), 4),
}


@pytest.mark.parametrize("name", QUIET)
def test_an_edit_that_would_add_up_is_found_by_the_check(run, name):
    how, line = QUIET[name]
    error = refused(edit(run, how, seal=False))
    assert_refused(error, 4, "check", where=f"{run / LEDGER_FILE}:{line}")


@pytest.mark.parametrize("cut", [1, 20, 80])
def test_half_a_line_at_the_end_is_refused(run, cut):
    text = (run / LEDGER_FILE).read_bytes()
    (run / LEDGER_FILE).write_bytes(text[:-cut])
    assert_refused(refused(run), 4, "last line", where=f"{LEDGER_FILE}:5")


@pytest.mark.parametrize(
    "junk", ["", "{", "[]", "null", "17", '{"step": 2}', '{"a": 1}', "\x00\xff"]
)
def test_a_line_that_is_no_entry_is_refused(run, junk):
    text = (run / LEDGER_FILE).read_text().splitlines()
    text.insert(2, junk)
    (run / LEDGER_FILE).write_bytes("".join(f"{line}\n" for line in text).encode("latin-1"))
    assert_refused(refused(run), 4, "entry", where=f"{LEDGER_FILE}:3")


def test_an_empty_ledger_is_refused(run):
    (run / LEDGER_FILE).write_text("")
    assert_refused(refused(run), 4, "empty")


def test_an_order_that_is_no_permutation_is_found_out(tmp_path, monkeypatch):
    """As if an epoch's order had a prompt twice: writer and reader would agree on it."""

    def careless(seed, epoch, fingerprint, n, block):
        return np.random.Generator(np.random.PCG64(5)).integers(0, n, n)

    monkeypatch.setattr(order, "permutation_block", careless)
    write(tmp_path, STEPS)
    assert_refused(refused(tmp_path), 4, "epoch 0 had", where=f"{LEDGER_FILE}:3")


# What the run's other files say.


def test_the_last_step_removed_is_missed_by_the_runs_other_files(run, sentence):
    edit(run, lambda rows: rows.pop())
    for file in ("run.json", "metrics.jsonl"):
        error = refused(run)
        assert_refused(error, 4, file)
        assert_refused(error, 4, "step 3")
        sentence(error)
        (run / file).unlink()


@pytest.mark.parametrize("name", ["step", "place", "updates"])
def test_a_run_that_counted_otherwise_is_refused(run, name):
    ended(run, **{name: 99})
    assert "run.json" in assert_refused(refused(run), 4, f"{name} 99").render()


def test_metrics_of_fewer_steps_are_refused_once_the_run_has_ended(run):
    (run / "metrics.jsonl").write_text('{"step": 3}\n{"step": 4, "rew')
    assert_refused(refused(run), 4, "metrics.jsonl at step 3")
    (run / "metrics.jsonl").unlink()
    assert_refused(refused(run), 4, "metrics.jsonl at step 0")


def test_a_ledger_of_other_data_than_the_runs_is_refused(run, sentence):
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(facts | {"fingerprint": "other"}))
    error = refused(run)
    assert_refused(error, 4, "other")
    sentence(error)


@pytest.mark.parametrize("state", ["training", "starting"])
def test_a_run_that_goes_on_or_was_killed_is_not_compared_with_older_counts(run, state, capsys):
    ended(run, step=2, place=7)
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(facts | {"state": state}))
    (run / "metrics.jsonl").write_text('{"step": 2}\n')
    assert main.find_verb(["ledger", str(run)])() == 0
    said = capsys.readouterr().out
    assert "14 draws" in said and "not compared" in said


def test_an_attempt_that_failed_before_it_began_left_no_counts_to_compare_with(run):
    """Attempt 2 was killed with -9, attempt 3 refused: the counts are attempt 1's."""
    facts = json.loads((ended(run, step=2, place=7) / "run.json").read_text())
    facts |= {"state": "failed", "attempt": 3}
    (run / "run.json").write_text(json.dumps(facts | {"began": 2}))
    assert audit_ledger(run)[1]
    (run / "run.json").write_text(json.dumps(facts | {"began": 3}))
    assert_refused(refused(run), 4, "progress at step 2")


def test_a_line_of_metrics_that_is_none_is_named(run):
    (run / "metrics.jsonl").write_text('{"step": 3}\nhello\n')
    assert_refused(refused(run), 4, where=f"{run / 'metrics.jsonl'}:2")


# The command.


def test_a_run_is_found_by_its_name_or_its_folder(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for word in ("mine", "runs/mine", "runs/mine/", str(run)):
        assert main.find_verb(["ledger", word])() == 0
        assert "conserved: 14 draws" in capsys.readouterr().out


def test_what_is_missing_or_not_understood_is_answered(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def check(words, key, fix=""):
        with pytest.raises(ConfigError) as caught:
            main.find_verb(["ledger", *words])()
        assert_refused(caught, 2, key, fix=fix)

    check(["mien"], "runs here: mine", "rloo ledger mine")
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
    edit(folder, lambda rows: rows.pop(2))
    wrong = rloo_without_torch("ledger", "mine")
    assert_refused(wrong, 4, "step 3", where=f"{LEDGER_FILE}:3")
    assert not wrong.out
    assert json.loads(rloo_without_torch("ledger", "mine", "--errors=json").err)[0]["code"] == 4


def test_every_fate_is_defined_once_in_the_ledgers_own_words():
    for fate in PROMPT_FATES:
        assert f"\n    {fate:<10} " in (prompt_ledger.__doc__ or ""), fate
