"""What is printed never ends a run: characters, full and closed consoles, escape sequences."""

import io
import json
import logging
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from fork_cases import Forked
from loop_cases import checked

from rloo_cli.data.cache import cached_folder
from rloo_cli.launch import preflight, topology
from rloo_cli.reporting import log
from rloo_cli.rewards.engine.arguments import RewardCallLog
from rloo_cli.utils import console, redact
from rloo_cli.utils.errors import MachineError, Problem, RewardError

PYTHON = (sys.executable, "-m", "rloo_cli")


def test_a_character_that_the_console_cannot_show_is_escaped() -> None:
    raw = io.BytesIO()
    shown = console.SafeStream(io.TextIOWrapper(raw, encoding="ascii"))
    print("é → \ud800", file=shown, flush=True)
    assert raw.getvalue() == b"\\xe9 \\u2192 \\ud800\n"


def test_a_console_that_is_full_or_closed_takes_everything_and_says_why() -> None:
    for how in ("full", "closed", "none"):
        inner = None if how == "none" else open("/dev/full", "w")  # noqa: SIM115
        shown = console.guard_stream(inner)
        if how == "closed":
            assert inner is not None
            with suppress(OSError):
                inner.close()
        print("x" * 100_000, file=shown, flush=True)
        print("more", file=shown, flush=True)
        shown.close()
        assert ("No space left" in str(shown.write_error)) == (how == "full")


@pytest.mark.process
def test_descriptors_and_streams_that_user_code_closed_come_back(tmp_path: Path) -> None:
    code = f"""
import io, os, sys
from rloo_cli.utils import console, redact
console.open_descriptors()
redact.redact_console()
os.close(1)
print("first", flush=True)
os.close(2)
sys.stdout = io.StringIO()
sys.stdout.close()
console.restore_streams()
os.write(2, b"second\\n")
sys.__stdout__.close()
print("third")
sys.stdout.close()
with open({str(tmp_path / "file")!r}, "w") as file:
    assert file.fileno() > 2
console.end_process(7)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (7, "first\nthird\n", "second\n")


def test_a_verb_goes_on_without_utf8_and_without_a_console() -> None:
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = " ".join([*PYTHON, "recipes"])
    cases = [
        (words, plain, 0),
        (words, {"PYTHONIOENCODING": "ascii"}, 0),
        (f"{words} > /dev/full", {}, 8),
        (f"{words} >&-", {}, 0),
        (f"{words} | head -1; exit ${{PIPESTATUS[0]}}", {}, 0),
    ]
    for line, env, code in cases:
        done = subprocess.run(
            ["bash", "-c", line], env=os.environ | env, capture_output=True, text=True
        )
        assert done.returncode == code, (line, done.stderr)
        assert "Traceback" not in done.stderr
        assert ("cannot write to stdout" in done.stderr) == (code == 8)


def test_what_processes_inherit(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, words: begun.append(words))
    monkeypatch.setenv("PYTHONOPTIMIZE", "2")
    monkeypatch.setenv("PYTHONUTF8", "0")
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8")
    console.prepare_environment()
    assert not begun and "PYTHONOPTIMIZE" not in os.environ
    assert os.environ["PYTHONUTF8"] == "1"
    assert os.environ["PYTHONIOENCODING"].endswith(":backslashreplace")
    monkeypatch.setenv("PYTHONUTF8", "0")
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")
    console.prepare_environment()
    console.prepare_environment()  # it has begun anew, and does not again
    assert begun == [[sys.executable, *sys.orig_argv[1:]]]


def test_escape_sequences_reach_neither_the_terminal_nor_a_log_file() -> None:
    text = "cannot score \x1b]0;PWNED\x07\x1b[2J\x9b31m\nsecond\tline\r\nthird"
    error = RewardError(Problem(text, text, text, text, text))
    record = logging.LogRecord("x", logging.ERROR, "x", 1, "%s", (text,), None)
    for shown in (error.render(), str(error), redact.RedactingFormatter().format(record)):
        assert not {c for c in shown if not c.isprintable()} - {"\n"}
        assert "second line\n" in shown and "PWNED" in shown
    assert "\x1b" not in error.render(as_json=True)


def test_half_a_surrogate_pair_of_a_reward_is_kept(tmp_path: Path) -> None:
    rows = [{"mine": "a\ud800b", "é": 1}]
    (tmp_path / "samples.jsonl").write_text(log.samples_to_jsonl(rows), encoding="utf-8")
    text = (tmp_path / "samples.jsonl").read_text(encoding="utf-8")
    assert json.loads(text) == rows[0] and "é" in text


def test_a_cache_that_cannot_be_made_is_the_machines_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RLOO_CACHE", raising=False)
    for variable in ("XDG_CACHE_HOME", "RLOO_CACHE"):
        monkeypatch.setenv(variable, "/proc/nope")
        with pytest.raises(MachineError, match="/proc/nope"):
            cached_folder("x", "x", lambda folder: None)
        with pytest.raises(MachineError, match="RLOO_CACHE=/a/folder") as refused:
            preflight.check_machine(checked((), ()))
        assert variable in refused.value.problems[-1].where


def test_a_rank_that_another_program_left_in_the_environment_makes_nobody_one_of_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "3")
    ranks = topology.find_topology(os.environ, checked((), ()))[0]
    assert topology.rank_process_specs(ranks, "", 0, None)[0].rank == 0


def test_a_run_goes_on_when_its_console_is_full(forked: Forked) -> None:
    (forked.folder / "out").symlink_to("/dev/full")
    codes = []
    with suppress(OSError):  # the fixture appends what the launcher said
        codes.append(forked("train", "+recipe=smoke", "max_steps=1"))
    facts = json.loads((forked.folder / "runs/smoke/run.json").read_text())
    assert (facts["state"], facts["code"]) == ("finished", 0)


REWARD = '''# -*- coding: latin-1 -*-
import os, sys, io
def close_everything(completions, log_metric, log_extra, **kwargs):
    """\xe9"""
    log_metric("mine\ud800", 1.0)
    log_extra("own", ["a\ud800"] * len(completions))
    os.close(1)
    os.close(2)
    sys.stdout = sys.stderr = io.StringIO()
    sys.stdout.close()
    return [float(len(c)) for c in completions]
'''


def test_a_reward_that_closes_the_console_costs_the_run_nothing_and_metrics_have_their_names(
    forked: Forked,
) -> None:
    text = REWARD.replace("\ud800", "\\ud800")
    (forked.folder / "mine.py").write_bytes(text.encode("latin-1"))
    words = ["reward=function", "reward.function.path=mine.py:close_everything"]
    assert forked("train", "+recipe=smoke", *words, "logging.trl_aliases=true") == 0
    said = forked.said()
    assert "final" in said and "step 2" in said
    run = forked.folder / "runs/smoke"
    names = {n for line in (run / "metrics.jsonl").open() for n in json.loads(line)}
    assert "mine\ud800" in names
    own = RewardCallLog(1)
    for name in names - {"mine\ud800"}:
        with pytest.raises(ValueError, match="call it 'my_"):
            own.log_metric(name, 1.0)
    sample = json.loads((run / "samples/step_000001.jsonl").read_text().splitlines()[0])
    assert sample["own"] == "a\ud800"
    for name in sample.keys() - {"own"}:
        with pytest.raises(ValueError, match="call it 'my_"):
            own.log_extra(name, [1])
