"""What `rloo` does on a GPU, in one command; docs/results/gpu.md is made from what it measured.

    python bench/gpu.py                        every row that is not known yet, for 40 minutes
    python bench/gpu.py --rows machine 'head*' these rows, in this order
    python bench/gpu.py --set prompts=16       other sizes, where a row has them; values are JSON
    python bench/gpu.py --rehearse             every row on the CPU with tiny sizes; keeps nothing
    python bench/gpu.py --show                 lists the rows, and why some cannot run here
    python bench/gpu.py --make-page            only writes docs/results/gpu.md; --check compares it

The rows are data, in gpu_table.py. Each runs in a process of its own that appends its facts to
bench/gpu.jsonl (or --raw FILE) after every round, and is killed at its limit: a row that hangs or
crashes keeps its finished rounds and costs the other rows nothing. What it prints goes to a file of
the folder --keep. A row is known if a result is there for the same sizes, machine, versions of the
packages it needs, and digest of the files it measures; --again measures it anew.

Exit codes: 0 every row that ran did what it should; 1 one failed or was refuted; 2 wrong arguments;
3 there is no GPU.
"""

import argparse
import contextlib
import fnmatch
import hashlib
import importlib
import json
import os
import platform
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import gpu_page
from gpu_table import CannotRun, GpuRow

from rloo_cli.distributed.device_count import visible_gpus
from rloo_cli.generation.vllm.versions import installed_vllm_version, version_numbers

Result = dict[str, Any]
HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RAW, PAGE = HERE / "gpu.jsonl", ROOT / "docs" / "results/gpu.md"
NO_GPU = (
    "bench/gpu.py needs a GPU, and this machine has none; --rehearse tries every row on the CPU"
)
MARK = "RLOO_GPU_MARK"  # in the environment of all processes that a row starts
MINUTES = 40.0
LEAST_S = 1.0  # with less time left no row begins; a row that is cut keeps its rounds


@dataclass(frozen=True)
class Machine:
    """Where the rows run."""

    name: str
    gpus: int
    versions: dict[str, str]  # of packages that are installed
    rehearse: bool

    def missing(self, row: GpuRow) -> str:
        """Why a row cannot run here; "" = it can."""
        if not self.rehearse and self.gpus < row.gpus:
            return f"needs {row.gpus} GPUs"
        for name in row.packages:
            if name not in self.versions:
                return f"needs {name}, which is not installed"
        found = self.versions.get("vllm", "")
        if row.vllm and version_numbers(found or "0") < version_numbers(row.vllm):
            return f"needs vLLM {row.vllm} or later, this is {found or 'without vLLM'}"
        return ""

    def result_key(self, row: GpuRow, given: Result) -> Result:
        """What a result must agree with for the row to be known. `given`: sizes by --set."""
        names = ["torch", "transformers", *row.packages, *row.optional, *["vllm"] * bool(row.vllm)]
        sizes = row.sizes | (row.tiny if self.rehearse else {}) | row.changed_sizes(given)
        return {
            "row": row.name, "sizes": sizes, "machine": self.name, "rehearsed": self.rehearse,
            "versions": {n: self.versions[n] for n in names if n in self.versions},
            "code": code_digest(row.code),
        }  # fmt: skip


def code_digest(parts: Sequence[str]) -> str:
    """A digest of these files and folders of rloo_cli; "" for none."""
    paths = [ROOT / "rloo_cli" / part for part in parts]
    files = {file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])}
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12] if files else ""


def find_machine(rehearse: bool) -> Machine:
    """This machine; no GPU of it is touched."""
    versions = {}
    for name in ("torch", "transformers", "trl", "liger-kernel", "peft", "deepspeed"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    if found := installed_vllm_version():
        versions["vllm"] = found
    there = [] if rehearse else visible_gpus()
    name = f"{len(there)} x {gpu_name()}" if there else f"{platform.machine()}, CPU"
    return Machine(name, len(there), versions, rehearse)


def gpu_name() -> str:
    """The GPU's name by nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    said = subprocess.run(query, capture_output=True, text=True) if shutil.which(query[0]) else None
    return said.stdout.splitlines()[0].strip() if said and said.stdout else "GPU"


def git_commit() -> str | None:
    """The revision, marked where the package was changed since; None without git."""
    asked = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    with contextlib.suppress(OSError):
        said = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True)
        return said.stdout.strip() or None
    return None


def read_results(path: Path) -> list[Result]:
    """All results of a file; a line that was cut off is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def append_result(path: Path, result: Result) -> None:
    """One line, on the disk before this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_bytes()[-1:] if path.exists() else b""
    with path.open("a", encoding="utf-8") as file:
        if text and text != b"\n":  # the line before was cut off
            file.write("\n")
        file.write(json.dumps(result, default=str) + "\n")
        file.flush()
        os.fsync(file.fileno())


def is_known(results: Sequence[Result], key: Result) -> bool:
    """Whether a whole result with this key is there."""
    return any(
        found["status"] == "done" and all(found.get(n) == v for n, v in key.items())
        for found in results
    )


class RowProcess:
    """A row in a process of its own, and the end of all that it started."""

    def __init__(self, spec: Result, output: Path, rehearse: bool):
        self.mark, self.output, self.began = secrets.token_hex(8), output, time.monotonic()
        output.parent.mkdir(parents=True, exist_ok=True)
        environment = os.environ | row_environment(rehearse)
        environment |= {MARK: self.mark, "RLOO_GPU_KEEP": str(output.resolve().with_suffix(""))}
        words = [sys.executable, str(HERE / "gpu.py"), "--child", json.dumps(spec)]
        with output.open("a") as out:
            self.process = subprocess.Popen(
                words, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.PIPE,
                env=environment, start_new_session=True,
            )  # fmt: skip

    def wait(self, limit: float) -> str:
        """Wait for its end. -> how it ended: "" = with exit code 0"""
        try:
            code = self.process.wait(limit)
        except subprocess.TimeoutExpired:
            return "hung"
        return "" if code == 0 else f"exit code {code}" if code > 0 else signal.Signals(-code).name

    def end(self) -> None:
        """End it with all that it started, also what has left its session."""
        end_marked(self.mark)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()

    def tail(self) -> str:
        """The end of what it printed."""
        return self.output.read_text(encoding="utf-8", errors="replace")[-3000:]


def end_marked(mark: str) -> None:
    """Kill every other process that has the mark in its environment."""
    wanted = f"{MARK}={mark}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in path.read_bytes().split(b"\0") and int(path.parent.name) != os.getpid():
                os.kill(int(path.parent.name), signal.SIGKILL)


def end_with_runner() -> None:
    """End this process and all that it started once its runner is gone."""
    with contextlib.suppress(OSError):
        while os.read(0, 1):
            pass
    end_marked(os.environ[MARK])
    os.killpg(os.getpid(), signal.SIGKILL)


def row_environment(rehearse: bool) -> dict[str, str]:
    """The environment of a row: no network, and no GPU where it rehearses."""
    found = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CI": "1"}
    # TRL sets it to ERROR where it is not set: the log of an engine that failed would be empty.
    found["VLLM_LOGGING_LEVEL"] = os.environ.get("VLLM_LOGGING_LEVEL", "INFO")
    path = [str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")]
    found["PYTHONPATH"] = os.pathsep.join(part for part in path if part)
    found["PYTHONUNBUFFERED"] = "1"
    if rehearse:
        found |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return found


def measure_row(spec: Result) -> None:
    """The child: call the row's function, and append its facts to the raw file as they come."""
    threading.Thread(target=end_with_runner, daemon=True).start()
    result, raw, began = dict(spec["key"]), Path(spec["raw"]), time.monotonic()

    def write(**more: Any) -> None:
        seconds = round(time.monotonic() - began, 2)
        result.update(more, seconds=seconds, date=time.strftime("%Y-%m-%dT%H:%M:%S"))
        append_result(raw, result)

    module, _, function = spec["work"].partition(":")
    try:
        work = getattr(importlib.import_module(module), function)
        for number, facts in enumerate(work(spec["device"], spec["dtype"], result["sizes"]), 1):
            kept = {name: value for name, value in facts.items() if name != "verdict"}
            write(status="part", rounds=number, verdict=facts["verdict"], facts=kept)
        write(status="done")
    except CannotRun as why:
        write(status="cannot", why=str(why))
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        said = str(error).strip().partition("\n")[0][:400]
        write(status="failed", why=f"{type(error).__name__}: {said}")


class Runner:
    """One start of the command."""

    def __init__(self, machine: Machine, args: argparse.Namespace, scratch: Path):
        self.machine, self.given, self.table = machine, dict(args.set), args.table
        self.again, self.page, self.commit = args.again, args.page, git_commit()
        self.raw = args.raw or (scratch / "raw.jsonl" if machine.rehearse else RAW)
        self.keep = args.keep or scratch / "output"
        usual = float("inf") if machine.rehearse else MINUTES
        self.ends = time.monotonic() + 60 * (usual if args.minutes is None else args.minutes)
        self.done = 0
        self.bad: list[str] = []
        self.no_time: list[str] = []
        self.rehearsed: dict[str, str] = {}  # a row's work on a CPU -> its name

    def run(self, row: GpuRow) -> None:
        """Measure a row, unless it cannot run, is known, or there is no time."""
        key, why = self.machine.result_key(row, self.given), self.machine.missing(row)
        left = self.ends - time.monotonic()
        work = json.dumps([row.work, key["sizes"], self.dtype_of(row)])
        if why:
            print(f"{row.name}: cannot run: {why}", flush=True)
        elif self.machine.rehearse and work in self.rehearsed:
            print(f"{row.name}: on a CPU it is {self.rehearsed[work]}", flush=True)
        elif not self.again and is_known(read_results(self.raw), key):
            print(f"{row.name}: is known already", flush=True)
        elif left < LEAST_S:
            self.no_time.append(row.name)
        else:
            self.rehearsed[work] = row.name
            self.measure(row, key | {"commit": self.commit}, left)

    def dtype_of(self, row: GpuRow) -> str:
        """A row's dtype; vLLM and several processes are float32 on a CPU."""
        return "float32" if self.machine.rehearse and (row.vllm or row.gpus > 1) else row.dtype

    def measure(self, row: GpuRow, key: Result, left: float) -> None:
        """Run a row to its end or its limit; its last result is whole in every case."""
        cpu = self.machine.rehearse
        spec = {"key": key, "raw": str(self.raw), "work": row.work, "dtype": self.dtype_of(row),
                "device": "cpu" if cpu else "cuda"}  # fmt: skip
        before, limit = len(read_results(self.raw)), min(row.seconds, left)
        name = re.sub(r"[^\w.]+", "-", row.name)
        process = RowProcess(spec, self.keep / f"{name}.txt", cpu)
        try:
            ended = process.wait(limit)
        finally:
            process.end()
        mine = [found for found in read_results(self.raw)[before:] if found["row"] == row.name]
        result = mine[-1] if mine else key
        if result.get("status") in (None, "part"):
            result = result | self.unfinished(ended, limit, limit < row.seconds, process.began)
            append_result(self.raw, result)
        self.report(row, result, process)

    def unfinished(self, ended: str, limit: float, cut: bool, began: float) -> Result:
        """The status of a row that did not end by itself."""
        seconds = round(time.monotonic() - began, 2)
        found = {"seconds": seconds, "date": time.strftime("%Y-%m-%dT%H:%M:%S")}
        if ended != "hung":
            return found | {"status": "crashed", "why": ended or "no result"}
        status = "cut" if cut else "hung"
        why = "the minutes were over" if cut else f"had not ended after {limit:.0f} s"
        return found | {"status": status, "why": why}

    def report(self, row: GpuRow, result: Result, process: RowProcess) -> None:
        """Say how a row ended, and count it."""
        status, verdict = result["status"], result.get("verdict")
        failed = status in ("failed", "hung", "crashed") or verdict == "refuted"
        self.done += status == "done"
        if status == "cut":
            self.no_time.append(row.name)
        if failed and (self.machine.rehearse or not row.refusal):
            self.bad.append(row.name)
        got = verdict if status == "done" else status
        why = f": {result['why']}" if result.get("why") else ""
        rounds = f", {result['rounds']} rounds" if result.get("rounds", 1) > 1 else ""
        half = self.machine.rehearse and status == "done" and row.rehearsal
        print(f"{row.name}: {got}{why} in {result['seconds']} s{rounds}"
              f"{f' ({half})' if half else ''}", flush=True)  # fmt: skip
        if failed:
            print(process.tail(), flush=True)
        self.write_page()

    def write_page(self) -> None:
        """Write the page anew; a rehearsal does only where it was told a file."""
        if self.page or not self.machine.rehearse:
            listed = importlib.import_module(self.table).ROWS
            text = gpu_page.render_page(listed, read_results(self.raw))
            (self.page or PAGE).write_text(text, encoding="utf-8")

    def sum_up(self) -> int:
        """Say what was done. -> exit code"""
        if self.no_time:
            print(f"no time for {len(self.no_time)} rows: {', '.join(self.no_time)}; start again")
        names = f": {', '.join(self.bad)}" if self.bad else ""
        print(f"{self.done} rows ran, {len(self.bad)} failed or were refuted{names}")
        return int(bool(self.bad))


def parse_setting(word: str) -> tuple[str, Any]:
    """KEY=VALUE of the command line; the value is JSON."""
    name, _, value = word.partition("=")
    return name, json.loads(value)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", nargs="+", default=["*"], help="names, or patterns of them")
    parser.add_argument("--set", type=parse_setting, nargs="+", default=[], metavar="KEY=VALUE",
                        help="sizes, where a row has them, e.g. rounds=1")  # fmt: skip
    parser.add_argument("--minutes", type=float, help="stop after them; 40, without end on a CPU")
    parser.add_argument("--again", action="store_true", help="measure known rows anew")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny sizes")
    parser.add_argument("--show", action="store_true", help="list the rows")
    parser.add_argument("--make-page", action="store_true", help="only write the page")
    parser.add_argument("--check", action="store_true", help="exit with 1 if the page differs")
    parser.add_argument("--raw", type=Path, help="file of the results; bench/gpu.jsonl")
    parser.add_argument("--page", type=Path, help="file of the page; docs/results/gpu.md")
    parser.add_argument("--keep", type=Path, help="folder for what the rows print and leave")
    parser.add_argument("--table", default="gpu_table", help=argparse.SUPPRESS)
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.listed = importlib.import_module(args.table).ROWS
    args.chosen = []
    for pattern in args.rows:
        matching = [row for row in args.listed if fnmatch.fnmatch(row.name, pattern)]
        args.chosen += [row for row in matching if row not in args.chosen]
        if not matching:
            parser.error(f"--rows: not a row: {pattern!r}; --show lists them")
    for name, _ in args.set:
        if not any(name in row.sizes for row in args.chosen):
            parser.error(f"--set: none of these rows has the size {name!r}")
    return args


def handle_page(args: argparse.Namespace) -> int:
    """Write the page, or compare it with what the results make. -> exit code"""
    path = args.page or PAGE
    made = gpu_page.render_page(args.listed, read_results(args.raw or RAW))
    if not args.check:
        path.write_text(made, encoding="utf-8")
    elif not path.exists() or path.read_text(encoding="utf-8") != made:
        print(f"{path} is not what its results make: python bench/gpu.py --make-page")
        return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command. -> exit code"""
    args = parse_arguments(argv)
    if args.child is not None:
        measure_row(args.child)
        return 0
    if args.make_page or args.check:
        return handle_page(args)
    machine = find_machine(args.rehearse)
    if args.show:
        for row in args.chosen:
            print(f"{row.name:<30} {row.seconds:>4} s  {machine.missing(row) or row.does}")
        return 0
    if not machine.gpus and not args.rehearse:
        print(NO_GPU, file=sys.stderr)
        return 3
    # What a time limit or Ctrl-C ends here ends with all that it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="rloo-gpu-") as scratch:
        runner = Runner(machine, args, Path(scratch))
        for row in args.chosen:
            runner.run(row)
        return runner.sum_up()


if __name__ == "__main__":
    sys.exit(main())
