"""`make soak MINUTES=10`: runs that are killed, stopped, starved and sent back in time.

    python tests/soak/soak.py --minutes 10 [--seed 1] [KIND ...]
    python tests/soak/soak.py --page  the table of docs/results/endurance.md, from bench/soak.jsonl

    KIND    smoke, agents, ranks, ahead, vllm; all in turn where none is named

Each run is made once undisturbed. Its twin is disturbed in each of its attempts, at a random
moment and in a random way, and goes on with resume=auto until it ends. It must then be what the
undisturbed one is: bit for bit with the transformers backend, the same prompts and learning rates
with vLLM. Its ledger must add up, and nothing may be left: no process, and with it no open port, no
temporary file, no shared memory. A line for each attempt; the table of all; a row in
bench/soak.jsonl. Exits with 1 where something was not so.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests/support"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from cli_cases import PYTHON, children, surroundings  # noqa: E402  (after the path)
from ledger_audit import audit_ledger  # noqa: E402
from resume_cases import differing, left, temporaries, untimed  # noqa: E402

from rloo_cli.utils.errors import RunError  # noqa: E402

ROWS = ROOT / "bench/soak.jsonl"
PAGE, BEGIN, END = ROOT / "docs/results/endurance.md", "<!-- made: soak -->", "<!-- end: soak -->"
MARK = "RLOO_SOAK"  # in the environment of every process of a soak
SMOKE = (
    "train", "+recipe=smoke", "logging.console=plain", "distributed.threads=1", "logging.samples=2",
    "logging.samples_every=20",
)  # fmt: skip
LONG = (*SMOKE, "max_steps=250", "checkpoint.every=10")
KINDS = {
    "smoke": LONG,
    "agents": (
        "train", "+recipe=tools_mini", "name=smoke", "max_steps=16", "checkpoint.every=2",
        "eval.every=12", "eval.max_samples=16", "train.prompts_per_step=4",
        "logging.console=plain", "distributed.threads=1",
    ),
    "ranks": (*LONG, "distributed=ddp", "distributed.num_processes=2", "max_steps=120"),
    "ahead": (*LONG, "generation.overlap=ahead"),
    "vllm": (*SMOKE, "generation=vllm_server", "max_steps=120", "checkpoint.every=10"),
}  # fmt: skip
RANDOM_TIMES = """
import os, random, time
_real, _jump, _draw = time.time, [0.0, 0.0], random.Random()  # the run's own is left alone
def _time():
    if time.monotonic() > _jump[0]:
        _jump[0] = time.monotonic() + _draw.uniform(0.2, 2)
        _jump[1] = _draw.choice([0.0, 3600.0, -3600.0, 86400.0 * 365])
    return _real() + _jump[1]
if os.environ.get("RLOO_SOAK_CLOCK"):
    time.time = _time
"""
# What is done, and the exit codes that a run may have then (0: it had ended before).
SIGNALS = {
    "SIGKILL of the launcher": {-9, 0},
    "SIGKILL of a process of it": {6, 0},
    "SIGKILL of all at once": {-9, 0},
    "SIGTERM": {75, 0},
    "SIGINT": {75, 0},
    "SIGTERM of a process of it": {75, 6, 0},
    "SIGSTOP for three seconds": {0, 75},
}
FAULTS = {
    "a full disk in a save": "ckpt.{part}@{n}=enospc",
    "a delay at fsync": "ckpt.fsync@{n}=hang:2",
    "SIGKILL in a save": "ckpt.{part}@{n}=kill9",
    "SIGKILL in an update": "grad@{n}=kill9",
    "SIGTERM while sampling": "gen.request@{n}=term",
}
FAULT_CODES = {0, 6, 8, 75}
SAVE_PARTS = ("write", "fsync", "manifest", "rename", "latest", "prune")


@dataclass
class Soak:
    """What happened to one kind of run."""

    kind: str
    done: Counter[str] = field(default_factory=Counter)  # disturbances
    attempts: int = 0
    resumed: int = 0
    runs: int = 0
    wrong: list[str] = field(default_factory=list)


def marked(mark: str) -> list[int]:
    """Processes that have this mark in their environment, zombies left out."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            alive = (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
            if alive and f"{MARK}={mark}\0".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def shared_memory() -> set[str]:
    """Names of pieces of shared memory that no living process has mapped: what others on this
    machine use at the same time is theirs."""
    if not Path("/dev/shm").exists():
        return set()
    used = set()
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            used |= set(re.findall(r"/dev/shm/(\S+)", path.read_text(errors="replace")))
    return {path.name for path in Path("/dev/shm").iterdir()} - used


@contextlib.contextmanager
def started(words: tuple[str, ...], folder: Path, env: dict[str, str]) -> Iterator[Any]:
    """The command, running; its output goes to `folder`/out."""
    with (folder / "out").open("a") as out:
        process = subprocess.Popen(
            [*PYTHON, *words], cwd=folder, env=env, stdout=out, stderr=out, start_new_session=True
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def send(number: int, *pids: int) -> None:
    """A signal to those of them that still are there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def is_of_a_tool(pid: int) -> bool:
    """Whether a process runs tools: one that is killed has failed its call, which is an answer
    (tests/agents/test_misbehaving_tools.py), and its run is another one then."""
    with contextlib.suppress(OSError):
        return b"rloo_cli.agents" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def disturb(what: str, process: Any, draw: random.Random) -> None:
    """Do what is named to a running command."""
    others = [pid for pid in children(process.pid) if not is_of_a_tool(pid)]
    one = draw.choice(others) if others else process.pid
    if what == "SIGKILL of the launcher":
        send(signal.SIGKILL, process.pid)
    elif what == "SIGKILL of a process of it" and others:
        send(signal.SIGKILL, one)
    elif what == "SIGKILL of all at once":
        send(signal.SIGKILL, process.pid, *others)
    elif what == "SIGTERM":
        send(signal.SIGTERM, process.pid)
    elif what == "SIGINT":
        send(signal.SIGINT, process.pid)
    elif what == "SIGTERM of a process of it" and others:
        send(signal.SIGTERM, one)
    elif what == "SIGSTOP for three seconds":
        send(signal.SIGSTOP, one)
        time.sleep(3)
        send(signal.SIGCONT, one)


def attempt(soak: Soak, folder: Path, env: dict[str, str], draw: random.Random, end: float) -> bool:
    """One attempt of the disturbed run; whether it is finished."""
    what = draw.choice([*SIGNALS, *FAULTS]) if time.monotonic() < end else "nothing"
    codes, env = SIGNALS.get(what, FAULT_CODES), dict(env)
    if what in FAULTS:
        part, n = draw.choice(SAVE_PARTS), draw.randrange(1, 12)
        env |= {"RLOO_FAULTS": FAULTS[what].format(part=part, n=n), "RLOO_ALLOW_FAULTS": "1"}
    if what == "nothing":
        codes = {0}
    if draw.random() < 0.3:
        env["RLOO_SOAK_CLOCK"], what = "1", f"{what}, clock jumps"
    start, said = time.monotonic(), folder / "out"
    said.unlink(missing_ok=True)
    with started((*KINDS[soak.kind], "resume=auto"), folder, env) as process:
        moment = time.monotonic() + draw.uniform(3.0, 45.0 if soak.kind == "vllm" else 22.0)
        while time.monotonic() < moment and process.poll() is None:
            time.sleep(0.02)
        happens = what.partition(",")[0] in SIGNALS and process.poll() is None
        if happens:
            disturb(what.partition(",")[0], process, draw)
        try:
            code = process.wait(300)
        except subprocess.TimeoutExpired:
            code = None
    text = said.read_text(errors="replace")
    if not happens and what.partition(",")[0] in SIGNALS:
        what, codes = "nothing in time", {0}
    soak.attempts, soak.done[what.partition(",")[0]] = soak.attempts + 1, soak.done[what] + 1
    if "clock" in what:
        soak.done["clock jumps"] += 1
    soak.resumed += "resum" in text
    print(f"  {soak.kind}: {what} -> {code}, {time.monotonic() - start:.0f} s", flush=True)
    if code not in codes or "Traceback" in text:
        soak.wrong.append(f"{soak.kind}: {what} ended with {code}: {text[-1500:]}")
    return code == 0


def ended_as(kind: str, run: Path, whole: Path) -> list[str]:
    """What differs between a disturbed run that ended and the undisturbed one."""
    one, other = left(run), left(whole)
    if kind == "agents":
        one, other = without_tool_times(one), without_tool_times(other)
    if kind != "vllm":
        return differing(one, other)

    def plan(run: Path) -> list[Any]:
        lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
        drawn = [(x["step"], x["place"], x.get("rows")) for x in lines]
        rates = [(m["step"], m.get("learning_rate")) for m in map(untimed, metrics(run))]
        return [drawn, rates]

    return [] if plan(run) == plan(whole) else ["prompts or learning rates"]


def without_tool_times(found: dict[str, Any]) -> dict[str, Any]:
    """What a run left, but for its tools' seconds, and how far the sampler's log-probabilities are
    from the trainer's (1e-7): how long a tool takes decides which turns are sampled together, and
    with them the last bits of these. What was sampled and trained is what it was."""
    dropped = ("agent/tool_s", "eval_agent/tool_s")
    rows = [
        {k: v for k, v in row.items() if k not in dropped and not k.startswith("sampling/")}
        for row in found["metrics"]
    ]
    samples = {}
    for name, text in found["samples"].items():
        lines = [json.loads(line) for line in text.splitlines()]
        for line in lines:
            line.get("episode", {}).pop("tool_s", None)
        samples[name] = lines
    return found | {"metrics": rows, "samples": samples}


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def steps_wrong(run: Path) -> str:
    """Which steps have no line of metrics, or two."""
    steps = [line["step"] for line in metrics(run) if "step_time" in line]
    return "" if steps == list(range(1, len(steps) + 1)) else f"steps are {steps}"


def leftovers(mark: str, temporary: Path, shared: set[str]) -> list[str]:
    """What ended runs left: processes (within 15 s), temporary files, shared memory."""
    end = time.monotonic() + 15
    while (marked(mark) or shared_memory() - shared) and time.monotonic() < end:
        time.sleep(0.2)
    found = [f"process {pid}" for pid in marked(mark)]
    found += [f"temporary file {path.name}" for path in temporary.iterdir()]
    return [*found, *(f"shared memory {name}" for name in shared_memory() - shared)]


def check_ended(soak: Soak, folder: Path, whole: Path) -> None:
    """Look at a disturbed run that has ended."""
    run = folder / "runs/smoke"
    soak.runs += 1
    found = [f"differs in {name}" for name in ended_as(soak.kind, run, whole)]
    found += [f"left {name}" for name in temporaries(run)] + [
        wrong for wrong in [steps_wrong(run)] if wrong
    ]
    try:
        audit_ledger(run)
    except (AssertionError, RunError) as error:
        found.append(f"the ledger does not add up: {error}")
    if found:
        kept = Path(tempfile.mkdtemp(prefix="rloo-soak-"))
        shutil.copytree(run, kept / "disturbed")
        shutil.copytree(whole, kept / "whole")
        print(f"  both runs are kept in {kept}", flush=True)
    soak.wrong += [f"{soak.kind}: {one}" for one in found]


def soak_kind(soak: Soak, base: Path, seconds: float, draw: random.Random) -> None:
    """Disturb runs of one kind for so long; the last is left to end."""
    temporary, site = base / "tmp", base / "site"
    for folder in (temporary, site):
        folder.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(RANDOM_TIMES)
    mark = f"{os.getpid()}-{soak.kind}"
    env = surroundings(base) | {MARK: mark, "TMPDIR": str(temporary)}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    shared, whole = shared_memory(), base / f"{soak.kind}-whole"
    whole.mkdir()
    with started(KINDS[soak.kind], whole, env) as process:
        assert process.wait(900) == 0, (whole / "out").read_text()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        folder = base / f"{soak.kind}-{soak.runs}"
        folder.mkdir()
        while not attempt(soak, folder, env, draw, end):
            pass
        check_ended(soak, folder, whole / "runs/smoke")
    soak.wrong += [f"{soak.kind} left: {one}" for one in leftovers(mark, temporary, shared)]
    send(signal.SIGKILL, *marked(mark))


def table(rows: list[dict[str, Any]]) -> str:
    """Soaks as a table, kind by kind."""
    heads = ("seed", "minutes", "run", "ended", "attempts", "resumed", "disturbances",
             "steps lost", "wrong")  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        for kind, (runs, attempts, resumed, done, wrong) in row["kinds"].items():
            got = ", ".join(f"{n} x {what}" for what, n in sorted(done.items()))
            lost = sum("steps are" in one or "ledger" in one for one in wrong)
            cells = (kind, runs, attempts, resumed, got, lost, len(wrong))
            lines.append(f"| {row['seed']} | {row['minutes']} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def write_page() -> None:
    """The last three soaks into the page."""
    rows = [json.loads(text) for text in ROWS.read_text().splitlines()[-3:]]
    head, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n\n{table(rows)}\n\n{END}{rest.partition(END)[2]}")


def main() -> int:
    """Soak each kind for its share of the time, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--page", action="store_true", help="only write the table")
    args = parser.parse_args()
    if args.page:
        write_page()
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what runs is killed on the way out
    kinds, draw = args.kinds or list(KINDS), random.Random(args.seed)
    soaks = []
    print(f"seed {args.seed}", flush=True)
    for kind in kinds:
        soaks.append(soak := Soak(kind))
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as base:
            soak_kind(soak, Path(base), 60 * args.minutes / len(kinds), draw)
    for soak in soaks:
        for wrong in soak.wrong:
            print(f"\nWRONG {wrong}")
    row = {
        "minutes": args.minutes, "seed": args.seed, "wrong": sum(len(s.wrong) for s in soaks),
        "kinds": {s.kind: [s.runs, s.attempts, s.resumed, dict(s.done), s.wrong] for s in soaks},
    }  # fmt: skip
    print(table([row]))
    with ROWS.open("a") as file:
        file.write(json.dumps(row) + "\n")
    return 1 if row["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
