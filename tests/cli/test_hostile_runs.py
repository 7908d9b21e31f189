"""A run that somebody else made, each of whose texts wants to command the terminal: every verb.

What reads a run's files cleans what it shows; what other code prints is disarmed by the stream that
all of it goes through.
"""

import io
import json
import sys
from pathlib import Path

import pytest
import yaml
from compare_cases import write

from rloo_cli.cli import compare, main
from rloo_cli.cli.answers import answer_console
from rloo_cli.utils import console, redact

# A title, the clipboard, a cleared screen, an 8-bit sequence, markup of rich, a turned-round text.
NASTY = "x\x1b]0;PWNED\x07\x1b]52;c;cHduZWQ=\x1b\\\x1b[2J\x1b[31m\x9b31m[/][link=file:///]y\u202ez"
FILE_NAME = NASTY.replace("/", "|").replace("=", "-")
VERBS = {
    "runs": ("runs", "."),
    "top": ("top", "RUN", "--once"),
    "report": ("report", "RUN"),
    "doctor": ("doctor", "RUN"),
    "samples": ("samples", "RUN", "--worst"),
    "held-out samples": ("samples", "RUN", "--eval", "--best"),
    "ledger": ("ledger", "RUN"),
    "compare": ("compare", "runs"),
    "first difference": ("compare", "runs/[12]*", "--first-difference"),
    "push": ("push", "RUN", "--dry-run"),
    "a run that is not there": ("samples", NASTY),
}
CODES = {"doctor": 20, "ledger": 4, "first difference": 20, "a run that is not there": 2}


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The first of three runs whose files are hostile, below the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare.charts, "draw_comparison", lambda _, out, *__: out)
    for seed in (1, 2, 3):
        folder = write(Path("runs"), f"{seed}{FILE_NAME}", seed=seed, state="finished")
        config = yaml.safe_load((folder / "config.yaml").read_text())
        config |= {"reward": {NASTY: {"type": NASTY, "weight": 1.0}}, "seed": seed}
        config["algorithm"] |= {"name": f"{seed}{NASTY}", "beta": NASTY}
        config["name"] = NASTY
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        about = json.loads((folder / "run.json").read_text())
        about |= {"plan": {"max_steps": 4, "model": NASTY, "algorithm": NASTY, "name": NASTY}}
        about |= {"ended": {"why": NASTY}, "changes": [{"attempt": 1, NASTY: [NASTY, NASTY]}]}
        about |= {"recipe": NASTY}
        (folder / "run.json").write_text(json.dumps(about))
        metrics = folder / "metrics.jsonl"
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        lines = [line | {f"rewards/{NASTY}/mean": 1.0, f"eval_{NASTY}": 1.0} for line in lines]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        metrics.write_text(text + f"{NASTY}\n")
        sample = {
            "draw": 0, "k": 0, "prompt": NASTY, "completion": NASTY, "score": 1.0,
            "rewards": {NASTY: 1.0}, "finish_reason": NASTY, "row": {NASTY: NASTY}, NASTY: NASTY,
            "set": NASTY, "prompt_length": 4, "completion_length": 3,
        }  # fmt: skip
        (folder / "samples").mkdir()
        for name in ("step_000004", "eval_000004"):
            (folder / f"samples/{name}.jsonl").write_text(json.dumps(sample) + "\n")
        (folder / "overrides.txt").write_text(f"+recipe={NASTY}\n")
        (folder / "env.json").write_text(json.dumps({"python": NASTY, "packages": {NASTY: NASTY}}))
        (folder / "ledger.jsonl").write_text(f'{{"ledger": "{NASTY}"}}\n')
        (folder / "final").mkdir()
        (folder / "final" / "config.json").write_text("{}")
        (folder / "final" / FILE_NAME).write_text("")
    return Path("runs", f"1{FILE_NAME}")


@pytest.mark.parametrize("verb", VERBS)
def test_no_text_of_a_run_commands_the_terminal(
    verb: str, hostile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(hostile) if word == "RUN" else word for word in VERBS[verb]]
    with main._errors_to_exit_code() as status:
        status.code = main.find_verb(words)()
    got = capsys.readouterr()
    assert status.code == CODES.get(verb, 0) and "Traceback" not in got.err, got.err
    shown = got.out + got.err
    assert shown.strip() and not {c for c in shown if not c.isprintable()} - {"\n", "\xa0"}, shown


def test_what_other_code_prints_draws_and_commands_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = "\x1b[1;31mred\x1b[0m\r\x1b[2K\x1b[1A\x1b[?25lx\x1b[?25h\t\n"
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stdout", terminal)
    with redact.redacted_console():
        print(drawn, end="")
        assert terminal.getvalue() == drawn
        print(NASTY)
        sys.stdout.writelines([NASTY])
        print("\x1b", end="")  # a sequence that comes in two parts is none
        print("]0;PWNED\x07")
    shown = terminal.getvalue()[len(drawn) :]
    assert "PWNED" in shown and "\x1b]" not in shown and "\x1b[2J" not in shown
    assert not {"\x07", "\x9b"} & {*shown}


def test_brackets_are_no_markup_where_a_verb_answers(capsys: pytest.CaptureFixture[str]) -> None:
    answer_console(80).print("[bold]a[/bold] :smile: [/]")
    assert capsys.readouterr().out == "[bold]a[/bold] :smile: [/]\n"


def test_a_table_of_a_comparison_has_no_command_in_any_part(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cells = [[f"{NASTY}{i}{j}" for j in range(2)] for i in range(2)]
    answer_console(400).print(compare.tables.terminal_table(iter(cells), NASTY))
    shown = capsys.readouterr().out
    assert shown.count("PWNED") == 5 and not {c for c in shown if not c.isprintable()} - {"\n"}


def test_a_text_without_commands_is_left_as_it_is() -> None:
    text = "Grüße\t漢\r\n\x1b[32mfine\x1b[0m"
    assert console.disarm_commands(text) == text
