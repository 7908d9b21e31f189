"""`make scorecard`: puts each promise to the test, and writes docs/results/scorecard.md.

    python tests/scorecard/run_scorecard.py [--only WORD ...] [--quick] [--anew] [--processes 2]

    --only WORD   only rows of this id (BC7: BC7a too), of this family, or with this in the promise
    --quick       without the rows marked slow
    --anew        forget what earlier runs have found

`rows.yaml` has the rows, `scorecard_rows.py` says what a row is. What a row came to is kept in
`.scorecard.jsonl`, under the row's text and the code it was run with: a run that is cut goes on
there, and only what changed is run again. The page is written where every row has an outcome of the
code as it is. Exit code 1 where a row is not as promised.
"""

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import scorecard_page
from judge import NO_TORCH, Attempt, Outcome
from scorecard_rows import ROOT, Row, Scorecard, number_of, read_scorecard

KEPT = ROOT / ".scorecard.jsonl"
CODE = ("rloo_cli", "conf", "recipes", "scripts", "tests/scorecard/judge.py")
PROGRAMS = {"bwrap": "bwrap", "gpu": "nvidia-smi", "slurm": "sbatch"}


def code_digest(names: Iterable[str]) -> str:
    """A digest of these files and folders of the checkout."""
    digest = hashlib.blake2b(digest_size=16)
    for name in names:
        path = ROOT / name
        for file in sorted(p for p in path.rglob("*") if p.is_file()) or [path]:
            if "__pycache__" not in file.parts:
                digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return digest.hexdigest()


def lacking(row: Row) -> str:
    """What of the row's needs this machine lacks; "" if nothing."""
    for need in row.get("needs", []):
        unpacked = need == "slurm" and (ROOT / ".venv" / "slurm").exists()
        beside = Path(sys.executable).with_name(PROGRAMS.get(need, need)).exists()
        if need == "unshare":
            there = subprocess.run(["unshare", "-rmn", "true"], capture_output=True).returncode == 0
        else:
            there = shutil.which(PROGRAMS[need]) if need in PROGRAMS else find_spec(need)
        if not (there or unpacked or beside):
            return f"this machine has no {need}"
    return ""


class Results:
    """Outcomes, kept in a file as they come."""

    def __init__(self, scorecard: Scorecard, anew: bool):
        self.scorecard, self.code = scorecard, code_digest(CODE)
        self.support = code_digest(["tests/support", "tests/conftest.py"])
        self.found: dict[str, Outcome] = {}
        if anew:
            KEPT.unlink(missing_ok=True)
        keys = {self._key(row): row.id for row in scorecard.rows}
        for line in KEPT.read_text().splitlines() if KEPT.exists() else []:
            values = json.loads(line)
            if (row_id := keys.get(values.pop("key"))) is not None:
                self.found[row_id] = Outcome(**values)

    def _key(self, row: Row) -> str:
        """Of all that its outcome depends on: its text, the code, and the files of its tests."""
        given = self.scorecard.given.get(row.get("given"))
        files = [node.partition("::")[0] for node in row.tests]
        tests = [self.support, code_digest(files)] if files else []
        text = json.dumps([row.raw, given and given.raw, self.code, *tests], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def keep(self, row: Row, outcome: Outcome) -> None:
        """Print a line, and keep it."""
        self.found[row.id] = outcome
        with KEPT.open("a") as file:
            file.write(json.dumps({"key": self._key(row)} | asdict(outcome)) + "\n")
        print(shown(row, outcome), flush=True)


def shown(row: Row, outcome: Outcome) -> str:
    """The line of a row."""
    state = {True: "as promised", False: "NOT AS PROMISED", None: "not run here"}[outcome.kept]
    text = "; ".join(outcome.why) if outcome.why else outcome.said
    return f"{row.id:<6} {state:<15} {outcome.seconds:6.1f} s  {row.promise}: {text}"


class Runner:
    """Runs rows in folders of a temporary folder, some side by side."""

    def __init__(self, scorecard: Scorecard, base: Path, processes: int):
        self.scorecard, self.base, self.processes = scorecard, base, processes
        (base / "no_torch").mkdir()
        (base / "no_torch" / "sitecustomize.py").write_text(NO_TORCH)

    def prepare(self, rows: Iterable[Row]) -> None:
        """Make the folders that rows begin with."""
        names = sorted({row.get("given") for row in rows if row.get("given")})
        for row, outcome in self.run([self.scorecard.given[name] for name in names]):
            if not outcome.kept:
                raise SystemExit(f"{row.id} cannot be prepared: {'; '.join(outcome.why)}")

    def run(self, rows: list[Row]) -> Iterable[tuple[Row, Outcome]]:
        """Each row and its outcome, as they end."""
        waiting, going = list(rows), list[Attempt]()
        try:
            while waiting or going:
                while waiting and len(going) < self.processes:
                    going.append(self._begin(waiting.pop(0)))
                for attempt in list(going):
                    if (outcome := attempt.poll()) is not None:
                        going.remove(attempt)
                        yield attempt.row, outcome
                        self._clear(attempt.row)
                time.sleep(0.02)
        finally:
            for attempt in going:
                attempt.end()

    def _begin(self, row: Row) -> Attempt:
        family = self.scorecard.families.get(row.family, {}) if row in self.scorecard.rows else {}
        no_torch = family.get("no_torch", False) and "torch" not in row.get("free", [])
        given = self.base / f"given-{row.get('given')}" if row.get("given") else None
        return Attempt(row, self.base, no_torch and not row.tests, given)

    def _clear(self, row: Row) -> None:
        """Take its folders away, but for those that others begin with."""
        for path in self.base.glob(f"{row.id}*"):
            if re.fullmatch(rf"{re.escape(row.id)}(\..*)?", path.name) and row.family:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()


def chosen_rows(rows: list[Row], only: list[str], quick: bool) -> list[Row]:
    """The rows that are asked for, those that take longest first."""
    found = [row for row in rows if not (quick and row.get("slow"))]
    if only:
        found = [
            row for row in found
            if any(w in (row.id, number_of(row.id), row.family) or w in row.promise for w in only)
        ]  # fmt: skip
    return sorted(found, key=lambda row: not row.get("slow"))


def main() -> int:
    """Run what has no outcome yet, print the tally, write the page; 1 where a row is red."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--anew", action="store_true")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    scorecard = read_scorecard()
    results = Results(scorecard, given.anew)
    chosen = chosen_rows(scorecard.rows, given.only, given.quick)
    waiting = [row for row in chosen if row.id not in results.found]
    if len(waiting) < len(chosen):
        print(f"{len(chosen) - len(waiting)} of {len(chosen)} are known already")
    for row in list(waiting):
        if lack := lacking(row):
            waiting.remove(row)
            results.keep(row, Outcome(row.id, None, said=lack))
    with tempfile.TemporaryDirectory(prefix="sc-") as folder:
        runner = Runner(scorecard, Path(folder), given.processes)
        runner.prepare(waiting)
        for row, outcome in runner.run(waiting):
            results.keep(row, outcome)
    found = [results.found[row.id] for row in chosen]
    for row, outcome in zip(chosen, found, strict=True):
        if outcome.kept is False:
            print(shown(row, outcome))
    if all(row.id in results.found for row in scorecard.rows):
        scorecard_page.write_page(scorecard, results.found)
        print(f"{scorecard_page.PAGE.relative_to(ROOT)} is written")
    run = [outcome for outcome in found if outcome.kept is not None]
    missing = f", {len(found) - len(run)} not run here" if len(run) < len(found) else ""
    print(f"scorecard: {sum(bool(o.kept) for o in run)} of {len(run)} rows as promised{missing}")
    return int(any(outcome.kept is False for outcome in run))


if __name__ == "__main__":
    sys.exit(main())
