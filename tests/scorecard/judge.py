"""Runs one row of the scorecard, step by step, and says in what it is not as promised.

Whatever the row says, each command must end with the code that it has there, print no traceback
and leave no process and no file in the folder for temporary files; a refusal (codes 2 to 5) must
say what, where, why and how to mend it, and one of the config or the machine (2, 3) takes less than
five seconds of CPU time.
"""

import contextlib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from scorecard_rows import ROOT, Row, Step

MARK = "RLOO_SCORECARD_ROW"  # in the environment of all that a row starts
PARTS = ("error: ", "\n  where ", "\n  why ", "\n  fix ")
REFUSAL_S = 5.0  # of CPU time: a neighbour does not make it longer
GRACE_S = 5.0  # for processes to be gone after the command has ended
NEVER = ("Traceback (most recent call last)", "this is a bug in rloo")
NO_TORCH = """
import sys

class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "datasets"):
            raise AssertionError(f"{name} was imported")

sys.meta_path.insert(0, Forbidden())
"""
PYTEST = ("-m", "pytest", "-q", "-rs", "--no-header", "-p", "no:cacheprovider", "-o", "addopts=")


@dataclass
class Outcome:
    """What a row came to."""

    id: str
    kept: bool | None = None  # None: it was not run here
    code: int | None = None  # of its last command
    said: str = ""  # the first line of its message, or why it was not run
    seconds: float = 0.0
    why: list[str] = field(default_factory=list)  # in what it is not as promised


@dataclass
class Ended:
    """One command that has ended."""

    code: int
    said: str
    err: str
    cpu_s: float


class Attempt:
    """A row that is being run in `base`/ID: `poll` it until it gives an outcome."""

    def __init__(self, row: Row, base: Path, no_torch: bool, given: Path | None = None):
        self.row, self.base = row, base
        self.folder, self.temporary = base / row.id, base / f"{row.id}.t"
        self.temporary.mkdir()
        if given is None:
            self.folder.mkdir()
        else:
            shutil.copytree(given, self.folder, symlinks=True)
        write_files(self.folder, row.get("files", {}))
        self.site = base / "no_torch" if no_torch else None
        self.mark = f"{row.id}-{os.getpid()}"
        self.began, self.deadline = time.monotonic(), time.monotonic() + row.limit
        self.left_to_run = list(row.steps)
        if row.tests:
            words = [*PYTEST, f"--basetemp={base / row.id}.p", *row.tests]
            self.left_to_run = [Step(["python", *words])]
        self.why: list[str] = []
        self.before: dict[str, str] = {}
        self.outcome = Outcome(row.id)
        self._begin()

    def poll(self) -> Outcome | None:
        """Its outcome, once all of its commands have ended."""
        self._send()
        pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
        if not pid:
            if time.monotonic() < self.deadline:
                return None
            self._end_all()
            self.why.append(f"it did not end within {self.row.limit:.0f} s: {self.step.shown()}")
            return self._outcome(None)
        self.process.returncode = os.waitstatus_to_exitcode(status)
        self.files[0].close()
        self.files[1].close()
        out, err = (p.read_text(errors="replace") for p in self.paths)
        cpu_s = usage.ru_utime + usage.ru_stime
        ended = Ended(self.process.returncode, out + err, err, cpu_s)
        if self.row.tests:
            return self._outcome_of_tests(ended)
        self._judge_step(ended)
        if self.left_to_run and not self.why:
            self._begin()
            return None
        return self._outcome(ended)

    def end(self) -> None:
        """End it before its time."""
        self._end_all()

    def _begin(self) -> None:
        """Start the next command."""
        self.step = self.left_to_run.pop(0)
        write_files(self.folder, self.step.files)
        if not self.left_to_run and self.row.changes_nothing:
            self.before = snapshot(self.folder)
        self.unsent = [list(pair) for pair in self.step.send]
        self.paths = [self.base / f"{self.row.id}.{name}" for name in ("out", "err")]
        self.files = [path.open("w") for path in self.paths]
        self.process = subprocess.Popen(
            [program(self.step.words[0]), *self.step.words[1:]],
            cwd=ROOT if self.row.tests else self.folder,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=self.files[0],
            stderr=self.files[1],
            start_new_session=True,
        )

    def _environment(self) -> dict[str, str]:
        """No network, nobody's cache but the scorecard's, one thread, no colours."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("RLOO_", "HYDRA_"))}
        path = [str(ROOT), *filter(None, [env.get("PYTHONPATH")])]
        env |= {
            "RLOO_CACHE": str(self.base / "cache"), "HF_HUB_OFFLINE": "1", "NO_COLOR": "1",
            "OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary), MARK: self.mark,
        }  # fmt: skip
        # rloo sets it for its own processes; pytest runs some of them in its own.
        if self.row.tests:
            env["TORCHINDUCTOR_CACHE_DIR"] = str(self.base / "cache" / "inductor")
        given = self.row.environment(self.step)
        env |= {k: v.replace("HERE", str(self.folder)) for k, v in given.items()}
        if "PYTHONPATH" in given:
            path.insert(0, env["PYTHONPATH"])
        elif self.site:
            path.insert(0, str(self.site))
        return env | {"PYTHONPATH": os.pathsep.join(path)}

    def _send(self) -> None:
        """Signals that are due: each waits for its text, and half a second for the one before."""
        said = "".join(p.read_text(errors="replace") for p in self.paths) if self.unsent else ""
        while self.unsent and self.unsent[0][0] in said:
            where, _, name = self.unsent.pop(0)[1].rpartition(":")
            number = signal.Signals[f"SIG{name}"]
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if where == "group" else os.kill)(self.process.pid, number)
            time.sleep(0.5)

    def _judge_step(self, ended: Ended) -> None:
        """Note what of a step is not as promised."""
        step, text = self.step, ended.said
        if ended.code != step.code:
            said = first_line(text, "")
            self.why.append(f"exit code {ended.code} and not {step.code}: {said}")
        said_all = [part.replace("HERE", str(self.folder)) for part in step.says]
        self.why += [f"it does not say {part!r}" for part in said_all if part not in text]
        self.why += [f"it says {part!r}" for part in (*NEVER, *step.never) if part in text]
        free, is_rloo = self.row.get("free", []), step.words[0] == "rloo"
        json_errors = any(word.startswith("--errors") for word in step.words)
        if is_rloo and step.code in (2, 3, 4, 5) and "parts" not in free and not json_errors:
            self.why += [f"no {p.strip()} in its error" for p in PARTS if p not in "\n" + text]
        if is_rloo and step.code in (2, 3) and "seconds" not in free and ended.cpu_s > REFUSAL_S:
            self.why.append(f"it took {ended.cpu_s:.1f} s of CPU time to refuse")

    def _outcome_of_tests(self, ended: Ended) -> Outcome:
        """Of a row that is tests of the suite; one that was skipped has not been run."""
        skipped = re.findall(r"^SKIPPED \[\d+\] [^:]+(?::\d+)?: (.*)$", ended.said, re.MULTILINE)
        passed = re.search(r"\d+ passed", ended.said)
        if ended.code == 0 and skipped:
            self._end_all()
            return self._finish(Outcome(self.row.id, None, said=skipped[0]))
        if ended.code or not passed:
            failed = re.findall(r"^(?:E   |FAILED|ERROR).*$", ended.said, re.MULTILINE)
            self.why.append(f"pytest ended with {ended.code}: {(failed or [''])[0][:300]}")
        found = self._outcome(ended)
        found.said = passed[0] if passed else found.said
        return found

    def _outcome(self, ended: Ended | None) -> Outcome:
        """The end of a row: nothing may be left of it."""
        until = time.monotonic() + GRACE_S
        while (running := marked(self.mark)) and time.monotonic() < until:
            time.sleep(0.05)
        self.why += [f"a process is left: {name}" for name in running.values()]
        self._end_all()
        left = [str(p.relative_to(self.temporary)) for p in self.temporary.rglob("*")]
        self.why += [f"left in the temporary folder: {name}" for name in sorted(left)[:3]]
        if self.row.changes_nothing and not self.left_to_run:
            after = snapshot(self.folder)
            changed = [k for k in {**self.before, **after} if self.before.get(k) != after.get(k)]
            self.why += [f"it made or changed {name}" for name in sorted(changed)[:3]]
        for name in self.row.get("absent", []):
            self.why += [f"{name} is there"] if [*self.folder.glob(name)] else []
        for name in self.row.get("present", []):
            self.why += [] if [*self.folder.glob(name)] else [f"{name} is not there"]
        last = self.step.says[0] if self.step.says else ""
        said = first_line(ended.said, last.replace("HERE", str(self.folder))) if ended else ""
        code = ended.code if ended else None
        return self._finish(Outcome(self.row.id, not self.why, code, said, why=self.why))

    def _finish(self, outcome: Outcome) -> Outcome:
        outcome.seconds = round(time.monotonic() - self.began, 1)
        outcome.said = self._plain(outcome.said)
        outcome.why = [self._plain(text) for text in outcome.why]
        return outcome

    def _plain(self, text: str) -> str:
        """Without paths of this machine."""
        for path, name in ((self.folder, "HERE"), (self.base, "TMP"), (ROOT, "CHECKOUT")):
            text = text.replace(str(path), name)
        text = text.replace(sys.prefix, ".venv").replace(str(Path.home()), "~")
        return text if len(text) <= 300 else text[:299] + "…"

    def _end_all(self) -> None:
        """Kill what is left of it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for pid in marked(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.process.pid, 0)
        for file in self.files:
            file.close()


def write_files(folder: Path, files: dict[str, str]) -> None:
    """Write text files; HERE in a text is the folder."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("HERE", str(folder)), encoding="utf-8", newline="")


def program(name: str) -> str:
    """`rloo` and `python` are those of this Python."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if name in ("rloo", "python") and beside.exists() else name


def first_line(text: str, wanted: str) -> str:
    """The line that says how it ended: the first error, else the one that was promised."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    promised = [line for line in lines if wanted and wanted.splitlines()[0] in line]
    return next(iter([*errors, *promised, *lines[-1:]]), "")


def snapshot(folder: Path) -> dict[str, str]:
    """path -> a digest, of all that lies in a folder; Python's own copies apart."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if "__pycache__" not in path.parts:
            text = path.read_bytes() if path.is_file() else b""
            found[str(path.relative_to(folder))] = hashlib.blake2b(text).hexdigest()
    return found


def marked(mark: str) -> dict[int, str]:
    """pid -> command line of every process that has the mark and has not ended."""
    found, wanted = {}, f"{MARK}={mark}\0".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes() + b"\0":
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                name = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                found |= {} if state == "Z" else {int(entry.name): name[:80]}
    return found
