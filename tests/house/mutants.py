"""`make mutants`: each guard is taken out of a copy of the package, and its test must then fail.

    python tests/house/mutants.py [--changed] [--anew] [--minutes N] [--processes 2] [WORD ...]

    WORD        only guards whose line has one of these words
    --changed   only guards whose file or test differs from the commit MUTANTS_SINCE (HEAD~1)
    --anew      forget what a run that was cut has found; else it goes on there, for each guard
                whose test's file did not change, if the package and the helpers did not
    --minutes   begin no other guard after so many minutes

`mutants.yaml` has the list: the guard in words, the file, the code with and without it, the test.
A line ends in "fails without it", "STILL PASSES without it", "is skipped here", "fails with it,
too" or "the code is not there any more". Each test is run with the guard, too, once: first many
together, by file, and alone where it did not pass so. All of them are forks of a process that has
imported what the package needs, but not the package.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
COPIED = ("rloo_cli", "conf", "recipes", "scripts", "docs")
CUT = ROOT / ".mutants.json"  # what a run has found so far; removed when it is whole
LIMIT_S = 600.0  # of one test: a guard may be against something that never ends
TOGETHER_LIMIT_S = 7200.0  # of all tests with their guards, which run in one process
FAILS = "fails without it"
Mutant = dict[str, Any]


def warm() -> None:
    """Import what most tests need, except the package and what imports it."""
    os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    import datasets  # noqa: F401
    import deepspeed  # noqa: F401
    import hydra  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import transformers  # noqa: F401
    from transformers.models.qwen3 import modeling_qwen3  # noqa: F401

    torch.set_num_threads(1)
    assert "rloo_cli" not in sys.modules


class Outcomes:
    """A plugin of pytest: a line for each part of a test that ended, so that a crash loses none."""

    def __init__(self, path: Path):
        self.file = path.open("w", buffering=1)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Write the name, and how it ended."""
        self.file.write(f"{report.nodeid}\t{report.when}\t{report.outcome}\n")


def _is_case(name: str, test: str) -> bool:
    return name == test or name.startswith(f"{test}[")


class Slot:
    """A copy of the package, and the test that runs with it."""

    def __init__(self, folder: Path):
        self.copy = folder
        for name in COPIED:
            shutil.copytree(ROOT / name, folder / name)
        self.mutant: Mutant | None = None
        self.text: str | None = None  # of the file as it was, while the guard is out
        self.pid, self.since = 0, 0.0
        self.guarded = True  # the test that runs has the guard
        self.written = 0  # times that a file was written

    @property
    def file(self) -> Path:
        """The file of its mutant."""
        assert self.mutant
        return self.copy / self.mutant["file"]

    def start(self, mutant: Mutant, guarded: bool) -> bool:
        """Run the mutant's test, with the guard or without it; False where it is not there."""
        self.mutant, self.guarded = mutant, guarded
        text = self.file.read_text()
        if text.count(mutant["with"]) != 1:
            return False
        if not guarded:
            self.text = text
            self._write(text.replace(mutant["with"], mutant["without"]))
        self.since = time.monotonic()
        self.pid = os.fork()
        if not self.pid:
            self._test(["-x", str(ROOT / mutant["test"])], Outcomes(self.copy / "outcomes"))
        return True

    def start_together(self, tests: list[str]) -> None:
        """Run these tests in one process, with all guards; `wait_together` says which passed."""
        self.since = time.monotonic()
        self.pid = os.fork()
        if not self.pid:
            self._test([str(ROOT / test) for test in tests], Outcomes(self.copy / "outcomes"))

    def was_skipped(self) -> bool:
        """Whether nothing of the last test was called: what it needs is not installed."""
        return "\tcall\tpassed" not in (self.copy / "outcomes").read_text()

    def wait_together(self, tests: list[str]) -> list[str]:
        """Which of them passed, once they have ended, or their process has.

        One that does not end within LIMIT_S is killed; it and those after it are run alone later.
        """
        outcomes = self.copy / "outcomes"
        while not (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            last = outcomes.stat().st_mtime if outcomes.exists() else time.time()
            if time.time() - last > LIMIT_S or time.monotonic() - self.since > TOGETHER_LIMIT_S:
                os.killpg(self.pid, signal.SIGKILL)
                ended = os.waitpid(self.pid, 0)
                break
            time.sleep(0.1)
        status = ended[1]
        self.pid = 0
        lines = outcomes.read_text().splitlines() if outcomes.exists() else []
        parts = [tuple(line.split("\t")) for line in lines if line.count("\t") == 2]
        failed = {name for name, _, outcome in parts if outcome == "failed"}
        if os.waitstatus_to_exitcode(status) not in (0, 1):  # it crashed or hung in the last one
            failed |= {name for name, _, _ in parts[-1:]}
        ran = {name for name, when, outcome in parts if when == "call" or outcome == "skipped"}
        return [
            test for test in tests
            if any(_is_case(name, test) for name in ran)
            and not any(_is_case(name, test) for name in failed)
        ]  # fmt: skip

    def _write(self, text: str) -> None:
        """Write its file, at a second of its own: Python takes compiled code by size and second."""
        self.file.write_text(text)
        self.written += 1
        os.utime(self.file, (self.written, self.written))

    def _test(self, words: list[str], *plugins: object) -> None:
        """Be that process."""
        os.setsid()
        out = os.open(self.copy / "out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(self.copy)  # what `python -c` imports from first
        os.environ["PYTHONPATH"] = str(self.copy)
        sys.path[0] = str(self.copy)  # in place of the script's folder
        code = 3
        try:
            import pytest

            config = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
            code = int(pytest.main(["-p", "no:cacheprovider", *config, *words], plugins))
        finally:
            os._exit(code)

    def ended(self) -> int | None:
        """The exit code of its test, once it has ended; the guard is back then."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if not pid and time.monotonic() - self.since < LIMIT_S:
            return None
        if not pid:
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            status = 1 << 8
        if self.text is not None:
            self._write(self.text)
            self.text = None
        self.pid = 0
        code = os.waitstatus_to_exitcode(status)
        if code > 1:  # below 0: it crashed
            said = (self.copy / "out").read_text(errors="replace")[-2000:]
            raise SystemExit(f"{self.mutant}: pytest ended with {code}\n{said}")
        return code


class Table:
    """What was found of each guard, kept in a file until the table is whole."""

    def __init__(self, mutants: list[Mutant], anew: bool):
        self.state = _state()
        self.found: dict[str, str] = {}  # by the whole mutant: one that is mended is run again
        self.passes: dict[str, bool] = {}  # test -> whether it passes with all guards in place
        self.began = time.monotonic()  # less what a run that was cut took
        if CUT.exists() and not anew:
            cut = json.loads(CUT.read_text())
            if cut["state"] == self.state:
                self.found, self.passes = cut["found"], cut["passes"]
                self.began -= 60 * cut["minutes"]
        self.mutants = mutants
        self.waiting = [m for m in mutants if _key(m) not in self.found]
        self.limit = float("inf")  # minutes

    def say(self, mutant: Mutant, found: str) -> None:
        """Print a line, and keep it."""
        self.found[_key(mutant)] = found
        print(f"{mutant['guard']:<72}  {mutant['test']}  {found}", flush=True)
        self.keep()

    def keep(self) -> None:
        """Write down what is known."""
        held = {"state": self.state, "found": self.found, "passes": self.passes,
                "minutes": self.minutes()}  # fmt: skip
        CUT.write_text(json.dumps(held))

    def minutes(self) -> float:
        """How long this took, with what a run that was cut took."""
        return (time.monotonic() - self.began) / 60

    def run_together(self, slots: list[Slot]) -> None:
        """Run the tests that are not known yet with all guards, those of a file in one process."""
        unknown = sorted({m["test"] for m in self.waiting if _test(m) not in self.passes})
        files = sorted({test.partition("::")[0] for test in unknown})
        parts = [[t for t in unknown if files.index(t.partition("::")[0]) % len(slots) == n]
                 for n in range(len(slots))]  # fmt: skip
        pairs = [(slot, tests) for slot, tests in zip(slots, parts, strict=True) if tests]
        for slot, tests in pairs:
            slot.start_together(tests)
        for slot, tests in pairs:
            self.passes |= {_test({"test": t}): True for t in slot.wait_together(tests)}
        print(f"{len(self.passes)} tests pass with all guards", flush=True)
        self.keep()

    def run(self, slots: list[Slot]) -> None:
        """Until nothing waits."""
        while (todo := self.waiting and self.minutes() < self.limit) or any(s.pid for s in slots):
            for slot in slots:
                if not slot.pid and todo and self.waiting:
                    self._begin(slot, self.waiting.pop(0))
                elif slot.pid and (code := slot.ended()) is not None:
                    self._next(slot, code == 0)
            time.sleep(0.02)

    def _begin(self, slot: Slot, mutant: Mutant) -> None:
        passes = self.passes.get(_test(mutant))
        if passes is False:
            self.say(mutant, "fails with it, too")
        elif not slot.start(mutant, guarded=passes is None):
            self.say(mutant, "the code is not there any more")

    def _next(self, slot: Slot, passed: bool) -> None:
        mutant = slot.mutant
        assert mutant
        if not slot.guarded:
            said = "is skipped here" if passed and slot.was_skipped() else "STILL PASSES without it"
            self.say(mutant, said if passed else FAILS)
        else:
            self.passes[_test(mutant)] = passed
            self._begin(slot, mutant)


def _key(mutant: Mutant) -> str:
    return json.dumps(mutant, sort_keys=True) + _digest([_file_of(mutant["test"])])


def _test(mutant: Mutant) -> str:
    return f"{mutant['test']} {_digest([_file_of(mutant['test'])])}"


def _file_of(test: str) -> Path:
    return ROOT / test.partition("::")[0]


def _state() -> str:
    """A digest of all that every result depends on."""
    folders = [ROOT / name for name in (*COPIED, "tests/support") if name != "docs"]
    files = [p for folder in folders for p in sorted(folder.rglob("*")) if p.is_file()]
    files = [p for p in files if "__pycache__" not in p.parts]
    return _digest([*files, ROOT / "tests/conftest.py"])


def _digest(files: list[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        digest.update(str(path).encode() + (path.read_bytes() if path.is_file() else b""))
    return digest.hexdigest()


def _changed() -> set[str]:
    """Files that differ from the commit MUTANTS_SINCE; none where there is no such commit."""
    since = os.environ.get("MUTANTS_SINCE", "HEAD~1")
    words = ["git", "diff", "--name-only", since]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if said.returncode:
        print(f"no guard is looked at, for there is no commit {since}")
    return set(said.stdout.split())


def main() -> int:
    """Print the table; 1 where a line is not as it should be."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--changed", action="store_true")
    parser.add_argument("--anew", action="store_true")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("words", nargs="*")
    given = parser.parse_args()
    mutants = yaml.safe_load(Path(__file__).with_name("mutants.yaml").read_text())
    if given.words:
        mutants = [m for m in mutants if any(w in str(m) for w in given.words)]
    if given.changed:
        files = _changed()
        mutants = [m for m in mutants if files & {m["file"], m["test"].partition("::")[0]}]
    table = Table(mutants, given.anew)
    table.limit = table.minutes() + given.minutes
    if len(table.waiting) < len(mutants):
        print(f"{len(mutants) - len(table.waiting)} of {len(mutants)} are known already")
    if table.waiting:
        run_all(table, given.processes)
    known = [table.found[_key(m)] for m in mutants if _key(m) in table.found]
    bad = sum(found != FAILS for found in known)
    left, minutes = len(table.waiting), table.minutes()
    print(f"{len(mutants)} guards, {left} of them not looked at, {minutes:.0f} minutes")
    print(f"{bad} without a test that fails")
    if not (given.words or given.changed or table.waiting):
        CUT.unlink(missing_ok=True)
    return int(bad > 0)


def run_all(table: Table, processes: int) -> None:
    """Find out about all guards that wait."""
    warm()
    with tempfile.TemporaryDirectory() as folder:
        slots = [Slot(Path(folder) / str(n)) for n in range(processes)]
        table.run_together(slots)
        table.run(slots)


if __name__ == "__main__":
    sys.exit(main())
