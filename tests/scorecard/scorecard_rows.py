"""The rows of the scorecard as rows.yaml has them: read, checked, and shown as command lines.

A row is one promise and how it is put to the test: commands in a folder of its own (`run`), or
tests of the suite (`test`) for faults that no single command shows. Keys of a row:

    id, promise        BC1 or BC1b; the promise in words
    run                a command, or a list of steps: each a command or a mapping with these keys
      run, code          the command line; the exit code (0)
      says, never        texts that are in what it printed; texts that are not
      env, files         variables; files that are written before it (HERE is the row's folder)
      send               [[text, signal], ...]: once it has printed the text, it gets the signal
                         (the launcher alone; `group:TERM` for its whole process group)
    code, says, never, send   of the last step
    env, files, given  of the whole row; `given`: a prepared folder of `given` that it begins with
    leaves             `nothing`: the last step changed no file (so it is for codes 2 to 4, unless
                       the row says `anything`)
    absent, present    paths that are not there, or are there, afterwards
    free               what the row does not have to hold: `torch` (it may be imported), `parts`
                       (of an error), `seconds` (of CPU time that a refusal may take)
    limit              seconds of the whole row
    test               node ids of tests that must pass
    slow               left out by --quick
    needs              what the machine must have: vllm, slurm, bwrap, gpu, deepspeed ...
    input              the fault in words, where the command does not show it
    keeps              numbers of the promises it shows, in place of its family's
"""

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
REFUSALS = (2, 3, 4)  # exit codes of what is refused before a run begins
SHOWN_VARIABLES = ("RLOO_ALLOW_FAULTS", "RLOO_FAULTS", "RANK", "PATH")  # with a command
STEP_KEYS = {"run", "code", "says", "never", "env", "files", "send"}
ROW_KEYS = STEP_KEYS | {
    "id", "promise", "given", "leaves", "absent", "present", "free", "limit", "test", "slow",
    "needs", "input", "keeps",
}  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One command of a row and what it must come to."""

    words: list[str]
    code: int = 0
    says: list[str] = field(default_factory=list)
    never: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    send: list[list[str]] = field(default_factory=list)

    def shown(self) -> str:
        """The command line as somebody would type it."""
        return shlex.join(self.words)


@dataclass(frozen=True)
class Row:
    """One promise and how it is put to the test."""

    id: str
    promise: str
    steps: list[Step]
    raw: dict[str, Any]  # as it stands in the file

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key of the file."""
        return self.raw.get(key, default)

    @property
    def family(self) -> str:
        """The letters of its id."""
        return family_of(self.id)

    @property
    def tests(self) -> list[str]:
        """Node ids of its tests, where it is not of commands."""
        given = self.raw.get("test", [])
        return [given] if isinstance(given, str) else given

    @property
    def limit(self) -> float:
        """Seconds after which it is ended."""
        return float(self.raw.get("limit", 900 if self.tests else 180))

    @property
    def changes_nothing(self) -> bool:
        """Whether its last step must leave every file as it was."""
        refused = not self.tests and self.steps[-1].code in REFUSALS
        return self.raw.get("leaves", "nothing" if refused else "anything") == "nothing"

    def environment(self, step: Step) -> dict[str, str]:
        """The variables of one of its commands; faults are allowed unless the row says no."""
        given = {name: str(value) for name, value in (self.get("env", {}) | step.env).items()}
        return ({"RLOO_ALLOW_FAULTS": "1"} if "RLOO_FAULTS" in given else {}) | given

    def shown(self) -> str:
        """Its commands, or its fault in words and then these, for the page; in backticks."""
        parts = [f"{self.raw['input']}"] if "input" in self.raw else []
        for step in self.steps:
            env = self.environment(step)
            named = [f'{k}="{env[k]}"' for k in SHOWN_VARIABLES if k in env]
            parts.append("`" + " ".join([*named, step.shown()]) + "`")
            parts += [f"then {signal} once it says “{said}”" for said, signal in step.send]
        parts += [f"`python -m pytest {node}`" for node in self.tests]
        return "; ".join(parts)


def family_of(row_id: str) -> str:
    """BC12b -> BC; "" of what has no letters."""
    return re.match(r"[A-Z]*", row_id)[0]  # type: ignore[index]


def number_of(row_id: str) -> str:
    """BC12b -> BC12: the number that the promise has."""
    return re.match(r"[A-Z]*\d*", row_id)[0]  # type: ignore[index]


@dataclass(frozen=True)
class Scorecard:
    """The whole file."""

    promises: dict[int, list[str]]  # number -> its name, and what it means
    families: dict[str, dict[str, Any]]
    given: dict[str, Row]  # name -> what prepares that folder
    rows: list[Row]


def read_scorecard(path: Path = HERE / "rows.yaml") -> Scorecard:
    """Read the file. Raises ValueError for a row that is not as the head of this file says."""
    values = yaml.safe_load(path.read_text())
    given = {n: _row({"id": f"given-{n}", "promise": n} | v) for n, v in values["given"].items()}
    rows = [_row(value) for value in values["rows"]]
    for row in rows:
        if row.family not in values["families"]:
            raise ValueError(f"{row.id}: there is no family {row.family}")
        if row.get("given") not in (None, *given):
            raise ValueError(f"{row.id}: nothing prepares {row.get('given')!r}")
    return Scorecard(values["promises"], values["families"], given, rows)


def _row(value: dict[str, Any]) -> Row:
    if unknown := value.keys() - ROW_KEYS:
        raise ValueError(f"{value.get('id')}: {sorted(unknown)} are not keys of a row")
    if ("run" in value) == ("test" in value):
        raise ValueError(f"{value['id']}: it has either `run` or `test`")
    steps = [_step(s, value["id"]) for s in _listed(value.get("run", []))]
    if steps:
        last = {k: value[k] for k in ("code", "says", "never", "send") if k in value}
        steps[-1] = Step(**(vars(steps[-1]) | last))
    return Row(value["id"], value["promise"], steps, value)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _step(value: Any, row_id: str) -> Step:
    given = {"run": value} if isinstance(value, str) else dict(value)
    if unknown := given.keys() - STEP_KEYS:
        raise ValueError(f"{row_id}: {sorted(unknown)} are not keys of a step")
    return Step(words=shlex.split(given.pop("run")), **given)


def missing_tests(node: str) -> str:
    """Why there is no such test, read from its file and not by collecting it; "" where it is."""
    file, _, rest = node.partition("::")
    name, _, case = rest.partition("[")
    path = ROOT / file
    if not path.is_file():
        return f"there is no {file}"
    text = path.read_text()
    if name and not re.search(rf"^(async )?def {re.escape(name)}\(", text, re.MULTILINE):
        return f"{file} has no {name}"
    head = text.partition(f"def {name}(")[0].rpartition("\n\n\n")[2] if name else ""
    if case and "parametrize" not in head and "params=" not in text:
        return f"{name} has no cases"
    return ""
