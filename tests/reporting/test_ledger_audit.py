"""The proof that a ledger adds up (tests/support/ledger_audit.py) finds what does not."""

import json

import numpy as np
import pytest
from ledger_audit import audit_ledger
from ledger_cases import edit, ended, prompts, write

from rloo_cli.data import order
from rloo_cli.reporting import prompt_ledger
from rloo_cli.reporting.prompt_ledger import LEDGER_FILE, PROMPT_FATES

# Six prompts: epoch 0 is over with step 2, epoch 1 with step 4.
STEPS = [
    ["trained", "trained", "dropped"],
    ["trained", "resampled", "unscorable", "masked"],
    ["skipped", "skipped", "dropped"],
    ["trained"] * 4,
]


@pytest.fixture
def run(tmp_path):
    """The folder of a run that ended, whose ledger is right."""
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    return ended(write(folder, STEPS, prompts(6, [2, 5])))


def refused(folder, line=None):
    """What is wrong with a ledger."""
    with pytest.raises(AssertionError) as caught:
        audit_ledger(folder)
    said = str(caught.value).partition("\n")[0]
    assert line is None or f"{LEDGER_FILE}:{line}: " in said
    return said


def test_a_right_ledger_adds_up(run):
    assert audit_ledger(run).fates.total() == 14


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
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_ledger_that_does_not_add_up_is_refused_with_line_and_reason(run, name):
    how, line, key = WRONG[name]
    assert key in refused(edit(run, how), line)


QUIET = {  # edits that only the check finds
    "a fate was changed": (lambda rows: rows[4].update(dropped=rows[4].pop("trained")), 5),
    "updates were added": (change(1, updates=2), 2),
    "more were cut": (change(0, cut=1), 1),
    "a check was changed": (change(3, check="00000000"), 4),
}


@pytest.mark.parametrize("name", QUIET)
def test_an_edit_that_would_add_up_is_found_by_the_check(run, name):
    how, line = QUIET[name]
    assert "check" in refused(edit(run, how, seal=False), line)


def test_an_order_that_is_no_permutation_is_found_out(tmp_path, monkeypatch):
    """As if an epoch's order had a prompt twice: writer and reader would agree on it."""

    def careless(seed, epoch, fingerprint, n, block):
        return np.random.Generator(np.random.PCG64(5)).integers(0, n, n)

    monkeypatch.setattr(order, "permutation_block", careless)
    write(tmp_path, STEPS)
    assert "epoch 0 had" in refused(tmp_path, 3)


def test_the_last_step_removed_is_missed_by_the_runs_other_files(run):
    edit(run, lambda rows: rows.pop())
    assert "metrics.jsonl is at step 4" in refused(run)
    (run / "metrics.jsonl").write_text('{"step": 3}\n')
    assert "run.json" in refused(run)


@pytest.mark.parametrize("name", ["step", "place", "updates"])
def test_a_run_that_counted_otherwise_is_refused(run, name):
    ended(run, **{name: 99})
    assert f"{name}: run.json has 99" in refused(run)


def test_metrics_of_fewer_steps_are_refused_once_the_run_has_ended(run):
    (run / "metrics.jsonl").write_text('{"step": 3}\n{"step": 4, "rew')
    assert "metrics.jsonl is at step 3" in refused(run)
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(facts | {"state": "training"}))
    assert audit_ledger(run).steps == 4


def test_every_fate_is_defined_once_in_the_ledgers_own_words():
    for fate in PROMPT_FATES:
        assert f"\n    {fate:<10} " in (prompt_ledger.__doc__ or ""), fate
