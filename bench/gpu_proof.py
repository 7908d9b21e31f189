"""What a first GPU has to show, in one command; docs/gpu.md is made from what it found.

    python bench/gpu_proof.py --minutes 40     all that is not known yet (make gpu-proof)
    python bench/gpu_proof.py --rows 'head*'   these rows alone; --again does them once more
    python bench/gpu_proof.py --short          what says most, small: a quarter of an hour
    python bench/gpu_proof.py --set rounds=1   other sizes than a row's own, where it has them
    python bench/gpu_proof.py --rehearse       every row on the CPU, tiny; keeps nothing
    python bench/gpu_proof.py --show           the rows, and why some of them cannot run here
    python bench/gpu_proof.py --make-page      only writes docs/gpu.md; --check compares it

Each row (proof_rows.py) runs in a process of its own and has a limit: one that runs out of memory,
crashes or hangs costs no other row anything. Results go to bench/gpu_proof.jsonl as they come, and
what is there for this machine, commit and these versions is not done again. A row that cannot run
says why and is no failure. `--trl-python` names the Python of another environment for TRL's side,
where TRL and the vLLM that it supports are installed.

Exit codes: 0 every row that ran did what it should; 1 one failed or was refuted; 3 there is no GPU.
"""

import argparse
import fnmatch
import hashlib
import importlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import proof_page
from proof_child import Child, Result, serve
from proof_rows import ProofRow

from rloo_cli.distributed.device_count import visible_gpus
from rloo_cli.generation.vllm.versions import installed_vllm_version

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

RAW, PAGE = HERE / "gpu_proof.jsonl", ROOT / "docs" / "gpu.md"
TRL_PYTHON = "RLOO_TRL_PYTHON"
NO_GPU = (
    "bench/gpu_proof.py needs a GPU, and this machine shows none;"
    " --rehearse tries every row on the CPU"
)
SHORT_ROW_S = 300  # of a row, with --short: an engine's first start alone took 98 on an H100
SHARE = 0.5  # of its limit: with less time left, a row is not begun


@dataclass(frozen=True)
class Place:
    """Where rows run: what there is of it, and how a result of it is known again."""

    machine: str
    gpus: int
    versions: dict[str, str]  # of packages that are there
    commit: str
    rehearse: bool
    changed: dict[str, Any] = field(default_factory=dict)  # sizes, by --set
    short: bool = False

    def key(self, row: ProofRow) -> Result:
        """What a result has to agree with for a row not to be done again."""
        names = ["torch", "transformers", *row.packages, *(["vllm"] if row.vllm else [])]
        if "trl" in row.packages:
            names.append("trl-python")
        versions = {n: self.versions[n] for n in names if n in self.versions}
        return {
            "row": row.name, "commit": self.commit, "machine": self.machine, "versions": versions,
            "rehearsed": self.rehearse, "changed": self.changes(row),
        }  # fmt: skip

    def changes(self, row: ProofRow) -> dict[str, Any]:
        """The sizes of a row that are others than its own."""
        return row.changes(self.changed, self.short and not self.rehearse)

    def limit(self, row: ProofRow) -> int:
        """The seconds that a row may take."""
        return min(row.seconds, SHORT_ROW_S) if self.short else row.seconds

    def missing(self, row: ProofRow) -> str:
        """Why a row cannot run here; "" = it can."""
        if not self.rehearse and self.gpus < row.gpus:
            return f"needs {row.gpus} GPUs"
        for name in row.packages:
            if name not in self.versions and not (name == "trl" and "trl-python" in self.versions):
                return f"needs {name}, which is not installed"
        if not row.vllm:
            return ""
        found = self.versions.get("vllm", "")
        if not found:
            return f"not with vLLM (none): it needs {row.vllm} or later"
        if numbers(found) < numbers(row.vllm):
            return f"not with vLLM {found}: {row.lacks or f'it needs {row.vllm} or later'}"
        return ""


def numbers(version: str) -> tuple[int, ...]:
    """Major and minor."""
    parts = version.split(".")[:2]
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in parts)


def look(args: argparse.Namespace) -> Place:
    """This machine, without a GPU of it being touched."""
    versions = {}
    for name in ("torch", "transformers", "trl", "peft", "deepspeed"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if found := installed_vllm_version():
        versions["vllm"] = found
    if args.trl_python:
        versions["trl-python"] = ask_versions(args.trl_python)
    there = [] if args.rehearse else visible_gpus()
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    if there:
        machine = f"{len(there)} x {gpu_name()}"
    return Place(machine, len(there), versions, commit(), args.rehearse, dict(args.set), args.short)


def ask_versions(python: str) -> str:
    """What another environment has of TRL and vLLM."""
    code = (
        "from importlib import metadata as m\n"
        "for n in ('trl', 'vllm', 'torch'):\n"
        "    try: print(n, m.version(n), end=' ')\n"
        "    except m.PackageNotFoundError: pass"
    )
    said = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return said.stdout.strip() or "unknown"


def gpu_name() -> str:
    """As nvidia-smi has it."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return "GPU"
    query = [tool, "--query-gpu=name", "--format=csv,noheader"]
    said = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
    return said[0].strip() if said else "GPU"


def commit() -> str:
    """The revision, if nothing that a row runs was changed since; else a digest of all of that."""
    asked = ["git", "status", "--porcelain", "--", "rloo_cli", "bench/*.py", "conf", "recipes"]
    try:
        changed = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True)
        said = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT,
                              capture_output=True, text=True, check=True)  # fmt: skip
        if not changed.stdout.strip():
            return said.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        pass
    digest = hashlib.sha256()
    files = [*ROOT.glob("rloo_cli/**/*.py"), *ROOT.glob("bench/*.py"), *ROOT.glob("conf/**/*.yaml")]
    for path in sorted(files):
        digest.update(path.read_bytes())
    return f"files-{digest.hexdigest()[:12]}"


def read(path: Path) -> list[Result]:
    """All results; a last line that was cut off is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def append(path: Path, result: Result) -> None:
    """One line, on the disk before this returns."""
    text = path.read_bytes() if path.exists() else b""
    with path.open("a", encoding="utf-8") as file:
        if text and not text.endswith(b"\n"):  # of a run that was cut off
            file.write("\n")
        file.write(json.dumps(result) + "\n")
        file.flush()
        os.fsync(file.fileno())


def is_known(known: Sequence[Result], key: Result) -> bool:
    """Whether a result of the same row, machine, commit and versions is there."""
    return any(all(found.get(n) == v for n, v in key.items()) for found in known)


class Proof:
    """One start of the command."""

    def __init__(self, place: Place, args: argparse.Namespace):
        self.place, self.args = place, args
        usual = 12.0 if args.short else 40.0
        self.ends = time.monotonic() + 60 * (usual if args.minutes is None else args.minutes)
        self.known, self.new = read(args.raw), []
        self.left: list[str] = []  # rows there was no time for
        self.folder = Path(tempfile.mkdtemp(prefix="rloo-proof-"))

    def run(self, rows: Sequence[ProofRow]) -> None:
        """All rows that are to be done."""
        wanted = []
        for row in rows:
            key, why = self.place.key(row), self.place.missing(row)
            if why:
                self.keep(row, {"status": "cannot", "why": why, "seconds": 0.0})
            elif not self.args.again and is_known(self.known, key):
                print(f"{row.name}: is known already", flush=True)
            else:
                wanted.append(row)
        try:
            if self.args.together:
                self.together(wanted)
            else:
                for row in wanted:
                    self.alone(row)
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def seconds_left(self) -> float:
        """Until the minutes are over."""
        return self.ends - time.monotonic()

    def alone(self, row: ProofRow) -> None:
        """A row in a process of its own. What the minutes cut off is not kept."""
        left, limit = self.seconds_left(), self.place.limit(row)
        if left < SHARE * limit:
            self.left.append(row.name)
            return
        folder = self.folder / f"row-{len(self.new)}"
        child = Child(self.args.listing, [row.name], self.place, folder)
        try:
            found = child.result(0, min(limit, left))
            if found is None and left < limit:
                self.left.append(row.name)
                print(f"{row.name}: the minutes were over before it was", flush=True)
                return
            self.keep(row, found or hung(limit, child))
        finally:
            child.end()
            shutil.rmtree(folder, ignore_errors=True)

    def together(self, rows: Sequence[ProofRow]) -> None:
        """Rows in one process, for tests: Python and torch are loaded once."""
        if not rows:
            return
        names = [row.name for row in rows]
        child = Child(self.args.listing, names, self.place, self.folder / "all")
        try:
            for number, row in enumerate(rows):
                limit = self.place.limit(row)
                found = child.result(number, min(limit, self.seconds_left()))
                self.keep(row, found or hung(limit, child))
                if found is None or child.process.poll() is not None:
                    return
        finally:
            child.end()

    def keep(self, row: ProofRow, found: Result) -> None:
        """A result to the file and to the screen."""
        key = self.place.key(row)
        if row.refusal and found["status"] not in ("done", "cannot"):
            found = found | {"verdict": "stays refused"}
        result = key | found | {"date": time.strftime("%Y-%m-%dT%H:%M:%S")}
        self.new.append(result)
        if found["status"] != "cannot" or not is_known(self.known, key | found):
            append(self.args.raw, result)
        told = found.get("verdict") or found["status"]
        why = f": {found['why']}" if found.get("why") else f" in {found['seconds']} s"
        half = self.place.rehearse and found["status"] == "done" and row.rehearsal
        print(f"{row.name}: {told}{why}{f' ({half})' if half else ''}", flush=True)
        if self.place.rehearse and found["status"] not in ("done", "cannot"):
            print(found.get("tail", ""), flush=True)


def hung(limit: int, child: Child) -> Result:
    """The result of a row that did not end."""
    why = f"had not ended after {limit} s"
    return {"status": "hung", "why": why, "tail": child.tail(), "seconds": float(limit)}


def is_bad(result: Result) -> bool:
    """Whether a result is a failure. Tiny shapes in a rehearsal refute nothing; what is refused
    until it works may fail on a GPU."""
    if result.get("verdict") == "stays refused" and not result["rehearsed"]:
        return False
    if result["status"] == "done":
        return result["verdict"] == "refuted" and not result["rehearsed"]
    return result["status"] != "cannot"


def setting(word: str) -> tuple[str, Any]:
    """KEY=VALUE of the command line; the value is JSON."""
    name, _, value = word.partition("=")
    return name, json.loads(value)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, help="no row goes on after them; 40")
    parser.add_argument("--rows", nargs="+", default=["*"], help="names, or patterns of them")
    parser.add_argument("--set", type=setting, nargs="+", default=[], metavar="KEY=VALUE",
                        help="sizes, where a row has them, e.g. rounds=1")  # fmt: skip
    parser.add_argument("--short", action="store_true",
                        help="what says most, small, in order; --minutes is 12")  # fmt: skip
    parser.add_argument("--again", action="store_true", help="also what is known already")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny shapes")
    parser.add_argument("--quick", action="store_true", help="only rows whose rehearsal is short")
    parser.add_argument("--together", action="store_true", help="one process for all rows")
    parser.add_argument("--show", action="store_true", help="list the rows, run none")
    parser.add_argument("--make-page", action="store_true", help="only write the page")
    parser.add_argument("--check", action="store_true", help="exit 1 where the page differs")
    parser.add_argument("--raw", type=Path, help="where results go")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--trl-python", default=os.environ.get(TRL_PYTHON, ""),
                        help="Python of an environment for TRL's side")  # fmt: skip
    parser.add_argument("--listing", default="proof_rows", help=argparse.SUPPRESS)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def show(rows: Sequence[ProofRow], place: Place) -> None:
    """A line for each row."""
    for row in rows:
        print(f"{row.name:<34} {place.missing(row) or row.does}")


def main(argv: Sequence[str] | None = None) -> int:
    """The command. -> exit code"""
    args = parse(argv)
    if args.child is not None:
        serve(args.listing, args.rows, args.rehearse, args.child, dict(args.set), args.short)
        return 0
    listing = importlib.import_module(args.listing)
    listed = listing.ROWS
    if args.make_page or args.check:
        return page(listed, args)
    rows = [row for row in listed if any(fnmatch.fnmatch(row.name, p) for p in args.rows)]
    rows = [row for row in rows if row.quick or not args.quick]
    if args.short:
        order = list(listing.SHORT)
        rows = sorted((r for r in rows if r.name in order), key=lambda r: order.index(r.name))
    if args.trl_python:
        os.environ[TRL_PYTHON] = args.trl_python
    place = look(args)
    if args.show:
        show(rows, place)
        return 0
    if not place.gpus and not args.rehearse:
        print(NO_GPU, file=sys.stderr)
        return 3
    with tempfile.TemporaryDirectory(prefix="rloo-rehearsal-") as nowhere:
        kept = args.raw is not None or not args.rehearse
        args.raw = args.raw or (RAW if kept else Path(nowhere, "raw.jsonl"))
        proof = Proof(place, args)
        # Also where a time limit ends this program: what it started ends with it.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        try:
            proof.run(rows)
        finally:
            if not args.rehearse:
                args.page.write_text(proof_page.page(listed, read(args.raw)), encoding="utf-8")
    return report(proof)


def report(proof: Proof) -> int:
    """What came of it, in a few lines. -> exit code"""
    if proof.left:
        print(f"no time for {len(proof.left)} rows: {', '.join(proof.left)}; start it again")
    bad = [result["row"] for result in proof.new if is_bad(result)]
    if not proof.place.rehearse:
        print(f"written: {proof.args.page}")
    done = sum(result["status"] == "done" for result in proof.new)
    print(f"{done} rows ran, {len(bad)} failed or were refuted{': ' * bool(bad)}{', '.join(bad)}")
    return int(bool(bad))


def page(rows: Sequence[ProofRow], args: argparse.Namespace) -> int:
    """Write the page, or say whether it is what the results make. -> exit code"""
    made = proof_page.page(rows, read(args.raw or RAW))
    if not args.check:
        args.page.write_text(made, encoding="utf-8")
        return 0
    if args.page.exists() and args.page.read_text(encoding="utf-8") == made:
        return 0
    print("docs/gpu.md is not what its results make: python bench/gpu_proof.py --make-page")
    return 1


if __name__ == "__main__":
    sys.exit(main())
