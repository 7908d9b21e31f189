"""Every verb that reads a run, on every kind of run: the right answer, or one clear error.

Never a traceback, never exit code 1; with --json what stdout has can be parsed.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from assert_refused import assert_refused
from cli_cases import Ended
from fork_cases import Forked
from ledger_audit import audit_ledger
from seen_runs import DAMAGES, damaged_copy, make_real_runs, write_long_run

from rloo_cli.cli import compare, main
from rloo_cli.cli.verbs import VERBS as KNOWN_VERBS

pytestmark = pytest.mark.wide

VERBS = {
    "runs": ("runs", "."),
    "top": ("top", "RUN", "--once"),
    "report": ("report", "RUN", "--out", "out/page.html"),
    "doctor": ("doctor", "RUN"),
    "samples": ("samples", "RUN"),
    "held-out samples": ("samples", "RUN", "--eval", "--best"),
    "ledger": ("ledger", "RUN"),
    "compare": ("compare", "RUN", "../again", "--out", "out/comparison"),
    "first difference": ("compare", "RUN", "../again", "--first-difference"),
    "sync": ("sync", "RUN", "tensorboard"),
    "push": ("push", "RUN", "--dry-run"),
    "record": ("record", "RUN", "--out", "out/record"),
}
WHOLE = ("finished", "interrupted", "thrice", "long")
# What a verb ends with on a whole run: 0, but for these; 20: it looked for something and found it.
CODES = {"doctor": {0, 20}, "first difference": {0, 20}}
WHOLE_CODES: dict[tuple[str, str], int] = {
    ("push", "interrupted"): 2,  # it has no final/
    ("compare", "long"): 2,  # it was trained on other prompts
    ("record", "interrupted"): 2,  # it is not finished
    ("record", "long"): 2,  # its files were written by the test, without a summary of steps
}


@pytest.fixture(scope="module")
def runs(fast: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs, made once."""
    root = make_real_runs(Forked(fast, tmp_path_factory.mktemp("seen")))
    write_long_run(root / "finished", root / "long")
    (root / "empty").mkdir()
    for number, damage in enumerate(DAMAGES):
        damaged_copy(root / "finished", damage, root / f"damaged-{number}")
    return root


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Charts are drawn elsewhere (tests/reporting/test_curves.py): here they are files."""

    def draw(_: object, out: Path, *__: object) -> Path:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        Path(out).write_text("drawn")
        return Path(out)

    monkeypatch.setattr(compare.charts, "draw_comparison", draw)


Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], without_pictures: None
) -> Iterator[Say]:
    """`say(run, verb, *more)` -> exit code, stdout and stderr, as the command has them."""

    def call(run: Path, verb: str, *more: str) -> tuple[int, str, str]:
        monkeypatch.chdir(run)
        words = [str(run) if word == "RUN" else word for word in VERBS[verb]]
        capsys.readouterr()
        with main._errors_to_exit_code() as status:
            status.code = main.find_verb([*words, *more])()
        got = capsys.readouterr()
        shutil.rmtree(run / "out", ignore_errors=True)
        return status.code, got.out, got.err

    yield call


def check(code: int, out: str, err: str, what: object) -> None:
    """No traceback, no code of a bug; an error is one block with its cause."""
    assert "Traceback" not in out + err, (what, err)
    assert code in (0, 2, 4, 20), (what, code, err)
    if code in (2, 4):
        assert err.startswith("error: ") and len(err.splitlines()) <= 12, (what, err)
    else:
        assert out and "error" not in err, (what, err)


@pytest.mark.slow_but("top", "samples", "compare", "push")
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_answers_on_every_whole_run(verb: str, runs: Path, say: Say) -> None:
    if verb == "sync":
        pytest.importorskip("tensorboard", reason="pip install tensorboard")
    for name in WHOLE:
        for more in ((), ("--json",)):
            code, out, err = say(runs / name, verb, *more)
            check(code, out, err, (verb, name, more))
            wanted = {WHOLE_CODES.get((verb, name), 0)}
            assert code in CODES.get(verb, wanted), (verb, name, err)
            if more and code in (0, 20):
                json.loads(out)


@pytest.mark.slow_but("runs", "doctor", "ledger", "push")
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_says_one_clear_thing_about_a_damaged_run(verb: str, runs: Path, say: Say) -> None:
    if verb == "sync":
        pytest.importorskip("tensorboard", reason="pip install tensorboard")
    for number, damage in enumerate(DAMAGES):
        for more in ((), ("--json",)):
            code, out, err = say(runs / f"damaged-{number}", verb, *more)
            check(code, out, err, (verb, damage, more))
            if more and code in (0, 20):
                json.loads(out)


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "runs"])
def test_an_empty_folder_is_not_a_run(verb: str, runs: Path, say: Say) -> None:
    code, out, err = say(runs / "empty", verb)
    assert_refused(Ended(code, out, err), key="run.json")


def test_damage_is_named_where_it_is(runs: Path, say: Say) -> None:
    folders = {damage: runs / f"damaged-{number}" for number, damage in enumerate(DAMAGES)}
    for damage, verb, part in (
        ("junk among the metrics", "doctor", "metrics.jsonl:"),
        ("broken run.json", "doctor", "run.json"),
        ("run.json of other kinds", "doctor", "its plan "),
        ("no config", "doctor", "config.yaml"),
        ("junk in the samples", "doctor", "not a sample"),
        ("samples of other kinds", "samples", "its rewards "),
        ("ledger cut", "ledger", "cut off"),
        ("ledger cut", "doctor", "cut off"),
        ("broken run.json", "compare", "run.json"),
        ("metrics cut in a line", "report", "page.html"),
    ):
        _, out, err = say(folders[damage], verb)
        assert part in out + err, (damage, verb, out + err)


def test_three_attempts_are_one_run(runs: Path, say: Say) -> None:
    code, out, _ = say(runs / "thrice", "report", "--json")
    figures = json.loads(out)
    assert code == 0 and figures["facts"]["attempts"] == "3"
    assert "6 of 6 steps" in figures["verdict"]
    got = json.loads(say(runs / "thrice", "ledger", "--json")[1])
    assert got["steps"] == [1, 6]
    audit_ledger(runs / "thrice")
    interrupted = json.loads(say(runs / "interrupted", "top", "--json")[1])
    assert (interrupted["state"], interrupted["step"], interrupted["of_steps"]) == ("failed", 2, 4)


def test_the_list_has_a_line_for_every_run_whatever_it_holds(runs: Path, say: Say) -> None:
    listed = json.loads(say(runs, "runs", "--json")[1])
    states = {Path(run["run"]).name: run["state"] for run in listed}
    assert states["finished"] == states["thrice"] == states["long"] == "finished"
    assert states["interrupted"] == "failed"
    damages = {damage: f"damaged-{number}" for number, damage in enumerate(DAMAGES)}
    assert states[damages["broken run.json"]] == states[damages["run.json is a list"]] == "damaged"
    steps = {Path(run["run"]).name: run["step"] for run in listed}
    assert steps["long"] == 1000 and steps["thrice"] == 6


def test_the_report_of_a_thousand_steps_is_small_quick_and_equal_wherever_it_lies(
    runs: Path, say: Say, tmp_path: Path
) -> None:
    say(runs / "finished", "report")  # the script of the charts is bundled once
    start = time.monotonic()
    pages = []
    for folder in (runs / "long", shutil.copytree(runs / "long", tmp_path / "elsewhere/copy")):
        assert main.find_verb(["report", str(folder), "--out", str(tmp_path / "p.html")])() == 0
        pages.append((tmp_path / "p.html").read_bytes())
    assert time.monotonic() - start < 60  # five seconds are meant, for one (docs/inspect.md)
    assert pages[0] == pages[1] and len(pages[0]) < 3_000_000


def test_two_runs_of_one_config_end_with_what_made_them_part(runs: Path, say: Say) -> None:
    code, out, _ = say(runs / "finished", "compare")
    assert code == 0 and "the same config" in out
    assert "in 4 steps" in out.partition("first difference")[2]
    _, out, _ = say(runs / "thrice", "compare", "--anyway")
    assert "max_steps" in out.partition("first difference")[2]
    got = json.loads(say(runs / "finished", "compare", "--json")[1])
    assert got["first_difference"]["found"] is False


def test_every_verb_takes_json() -> None:
    assert not [name for name, verb in KNOWN_VERBS.items() if "--json" not in verb.flags]
