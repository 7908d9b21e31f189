"""`rloo runs`: every folder of a run has its line, whatever state it is in."""

import json
import os
import socket
from pathlib import Path

import pytest
from assert_refused import assert_refused
from compare_cases import write

from rloo_cli.cli import runs as runs_verb
from rloo_cli.inspection.run_list import list_runs
from rloo_cli.inspection.run_record import inspect_run_folder
from rloo_cli.utils.errors import ConfigError


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def change_metadata(folder: Path, **values: object) -> None:
    path = folder / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_runs_of_a_folder_are_listed_the_one_written_last_first() -> None:
    first = write(Path("runs"), "first", scores=(0.0, 0.25))
    second = write(Path("runs/compare"), "second", state="failed", steps=3)
    for path in (first / "run.json", first / "metrics.jsonl"):
        os.utime(path, (1, 1))
    found = list_runs(Path("runs"))
    assert [(Path(r.run).name, r.state, r.step, r.score) for r in found] == [
        ("second", "failed", 3, 0.5),
        ("first", "finished", 4, 0.25),
    ]
    assert found[0].code == 7 and found[0].size_bytes > 1000
    assert second.name == "second"


def test_a_run_whose_process_is_gone_is_killed() -> None:
    folder = write(Path("runs"), "gone", state="training")
    change_metadata(folder, host=socket.gethostname(), pid=os.getpid(), pid_started="0", code=None)
    (run,) = list_runs(Path("runs"))
    assert run.state == "killed" == inspect_run_folder(folder).state
    change_metadata(folder, host="another machine")
    assert list_runs(Path("runs"))[0].state == "training"


def test_a_damaged_folder_has_its_line_and_the_others_too() -> None:
    write(Path("runs"), "whole")
    for name, text in (("cut", '{"state": "trai'), ("list", "[]"), ("numbers", '{"progress": 3}')):
        folder = write(Path("runs"), name)
        (folder / "run.json").write_text(text)
        (folder / "metrics.jsonl").write_text("not JSON\n[1]\n{}\n")
    states = {Path(run.run).name: run.state for run in list_runs(Path("runs"))}
    assert states == {
        "whole": "finished", "cut": "damaged", "list": "damaged", "numbers": "unknown",
    }  # fmt: skip


def test_the_verb_prints_a_table_or_json(capsys: pytest.CaptureFixture[str], sentence) -> None:
    assert runs_verb.run([]) == 0
    assert "rloo train +recipe=quickstart" in capsys.readouterr().out
    write(Path("runs/compare"), "one")
    assert runs_verb.run([]) == 0
    words = capsys.readouterr().out.split()
    assert {"compare/one", "finished", "4"} <= {*words}
    assert runs_verb.run(["runs/compare", "--json"]) == 0
    (got,) = json.loads(capsys.readouterr().out)
    assert (got["run"], got["metric"], got["score"]) == ("runs/compare/one", "eval_reward", 1.0)
    with pytest.raises(ConfigError) as caught:
        runs_verb.run(["runs/other"])
    assert_refused(caught, 2, "runs/other")
    sentence(caught)


def test_a_damaged_folder_is_read_as_far_as_it_can_be() -> None:
    folder = write(Path("runs"), "hurt")
    assert inspect_run_folder(folder).problems == []
    (folder / "config.yaml").write_text("name: [")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('nothing\n{"step": 9')
    record = inspect_run_folder(folder)
    assert record.config == {} and record.last_step == 4 and len(record.eval_metrics) == 3
    assert [Path(text.partition(":")[0]).name for text in record.problems] == [
        "config.yaml",
        "metrics.jsonl",
    ]
    empty = Path("empty")
    empty.mkdir()
    assert len(inspect_run_folder(empty).problems) == 2
