"""Many commands that must be refused, each in an empty folder, all in one process without torch.

A process of their own for each of 200 commands would take minutes; one that may import neither
torch, transformers nor datasets shows that for all of them.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from assert_refused import assert_refused
from cli_cases import NO_TORCH, surroundings

SMOKE = "+recipe=smoke"
# A recipe of the user's own that is whole; cases add lines to it.
MINE = """defaults:
  - override /model: tiny
  - override /data: tiny
  - override /reward: unique_chars
max_steps: 2
"""
DRIVER = """
import contextlib, io, json, os, sys
from pathlib import Path
from rloo_cli.cli import main as cli

base, cases = Path(sys.argv[1]), json.load(sys.stdin)
before, answers = dict(os.environ), {}
for number, (name, case) in enumerate(cases.items()):
    folder = base / str(number)
    folder.mkdir()
    os.chdir(folder)
    for file, text in case["files"].items():
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(text, encoding="utf-8", newline="")
    given = sorted(str(p) for p in Path(".").rglob("*"))
    os.environ.update({k: v.replace("HERE", str(folder)) for k, v in case["env"].items()})
    sys.argv = ["rloo", *[w.replace("HERE", str(folder)) for w in case["words"]]]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code
    left = [p for p in sorted(str(p) for p in Path(".").rglob("*")) if p not in given]
    answers[name] = {
        "code": code, "out": out.getvalue(), "err": err.getvalue(), "left": left,
        "folder": str(folder),
    }
    for key in set(os.environ) - set(before):
        del os.environ[key]
    os.environ.update(before)
json.dump(answers, sys.__stdout__)
"""


@dataclass(frozen=True)
class Case:
    """A command, what is there when it runs, and what its refusal names: see `assert_refused`.

    `rule`: the plainest case of a rule, whose whole text stands in tests/sentences.txt.
    """

    words: Sequence[str]
    key: str = ""
    where: str = ""
    fix: str = ""
    code: int = 2
    files: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    rule: bool = False


@dataclass(frozen=True)
class Answer:
    """How a command ended."""

    code: int
    out: str
    err: str
    left: list[str]
    folder: str


def train(*words: str, **more: Any) -> Case:
    """`rloo train +recipe=smoke WORDS`, refused for its last word's key where none is given."""
    key = ("", *words)[-1].partition("=")[0].lstrip("+")
    return Case(["train", SMOKE, *words], **({"key": key} | more))


def recipe(text: str, key: str = "", **more: Any) -> Case:
    """`rloo train +recipe=my.yaml`, refused for what my.yaml says."""
    return Case(["train", "+recipe=my.yaml"], key, files={"my.yaml": text}, **more)


def ask(cases: Mapping[str, Case], folder: Path, opens_data: bool = False) -> dict[str, Answer]:
    """The answers to all of them, in one process that may not import torch or `datasets`.

    `opens_data`: it may, as a dry run imports `datasets`, which looks whether there is a torch.
    """
    (folder / "no_torch").mkdir()
    if not opens_data:
        (folder / "no_torch" / "sitecustomize.py").write_text(NO_TORCH)
    path = os.pathsep.join(
        [str(folder / "no_torch"), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    ended = subprocess.run(
        [sys.executable, "-P", "-c", DRIVER, str(folder)],
        input=json.dumps({name: asdict(case) for name, case in cases.items()}),
        env=surroundings(folder) | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr
    return {name: Answer(**answer) for name, answer in json.loads(ended.stdout).items()}


def is_clean(case: Case, answer: Answer, sentence: Callable[..., None]) -> None:
    """The code, no trace, no traceback, at once, and the reason that the case names."""
    assert answer.left == []
    assert "Traceback" not in answer.err and "this is a bug" not in answer.err
    assert answer.err.startswith("error: ") and answer.out == ""
    problem = assert_refused(answer, case.code, case.key, case.where, case.fix)
    assert problem.why
    if case.rule:
        sentence(answer.err.replace(answer.folder, "FOLDER"))
