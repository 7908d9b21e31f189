"""What much at once and very large files take: seconds and memory, and whether it grows in line.

    python bench/load.py [--rows WORD ...]     those rows (all), and lines of bench/load.jsonl
    python bench/load.py --page  the table of docs/results/endurance.md, from those lines

Each row is a command as a user gives it, at three sizes, the largest as the page tells it; `growth`
is how seconds grow from the second size to the third, by the share that sizes do: 1 is in line, 10
would be its square for sizes that are ten times as large. Memory is the largest process's.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import results

ROWS = Path(__file__).with_name("load.jsonl")
HERE = Path(__file__).resolve().parents[1]
PAGE, BEGIN, END = HERE / "docs/results/endurance.md", "<!-- made: load -->", "<!-- end: load -->"
RLOO = (sys.executable, "-P", "-m", "rloo_cli")
SMOKE = ("train", "+recipe=smoke", "logging.console=plain", "distributed.threads=1")


@dataclass(frozen=True)
class Cost:
    """What a command took."""

    seconds: float
    gib: float  # of the largest process


def rloo(folder: Path, *words: str, codes: Sequence[int] = (0,)) -> Cost:
    """Run a command and wait for it. Raises RuntimeError for another exit code."""
    env = os.environ | {
        "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1",
    }  # fmt: skip
    said = folder / f"said-{time.monotonic_ns()}"
    start = time.monotonic()
    with said.open("w") as out:
        process = subprocess.Popen([*RLOO, *words], cwd=folder, env=env, stdout=out, stderr=out)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = code = os.waitstatus_to_exitcode(status)
    seconds = time.monotonic() - start
    if code not in codes:
        raise RuntimeError(f"rloo {' '.join(words)}: {code}\n{said.read_text()[-3000:]}")
    said.unlink()
    return Cost(seconds, used.ru_maxrss / 2**20)


def all_of(costs: Sequence[Cost], seconds: float) -> Cost:
    """Of commands beside or behind each other."""
    return Cost(seconds, max(cost.gib for cost in costs))


def beside(folder: Path, count: int, words: Callable[[int], tuple[str, ...]]) -> Cost:
    """So many commands, all started at once."""
    start = time.monotonic()
    with ThreadPoolExecutor(count) as pool:
        costs = list(pool.map(lambda number: rloo(folder, *words(number)), range(count)))
    return all_of(costs, time.monotonic() - start)


def runs_at_once(folder: Path, count: int) -> Cost:
    """So many runs, in one folder."""
    return beside(folder, count, lambda number: (*SMOKE, f"name=run-{number}"))


def runs_in_turn(folder: Path, count: int) -> Cost:
    """So many runs, each started when the one before it has ended."""
    start = time.monotonic()
    costs = [rloo(folder, *SMOKE, f"name=run-{number}") for number in range(count)]
    return all_of(costs, time.monotonic() - start)


def plans_at_once(folder: Path, count: int) -> Cost:
    """So many dry runs of one config."""
    return beside(folder, count, lambda _: ("train", "+recipe=smoke", "--dry-run"))


def completions(folder: Path, count: int) -> Cost:
    """One step of so many completions, eight of a prompt."""
    prompts = count // 8
    words = (f"train.prompts_per_step={prompts}", "algorithm.num_generations=8", "max_steps=1")
    return rloo(folder, *SMOKE, *write_prompts(folder, max(64, prompts)), *words)


def data_rows(folder: Path, count: int) -> Cost:
    """A run of two steps on so many prompts."""
    return rloo(folder, *SMOKE, *write_prompts(folder, count), "max_steps=2")


def write_prompts(folder: Path, count: int) -> tuple[str, ...]:
    """A file of so many prompts. -> the overrides that name it"""
    with (folder / "rows.jsonl").open("w") as file:
        file.writelines(f'{{"prompt": "say {number}"}}\n' for number in range(count))
    return ("data.path=rows.jsonl", "data.eval_split=null")


def ledger_lines(folder: Path, count: int) -> Cost:
    """`rloo ledger` of so many steps."""
    return rloo(long_run(folder, count), "ledger", ".", "--json")


def metrics_lines(verb: str) -> Callable[[Path, int], Cost]:
    """A verb that reads so many lines of metrics."""
    words = {
        "top": ("top", ".", "--once"), "report": ("report", ".", "--out", "page.html"),
        "compare": ("compare", ".", "../twin", "--out", "comparison"),
    }[verb]  # fmt: skip

    def read(folder: Path, count: int) -> Cost:
        run = long_run(folder, count)
        if verb == "compare":
            subprocess.run(["cp", "-r", run, run.parent / "twin"], check=True)
        return rloo(run, *words)

    return read


def long_run(folder: Path, steps: int) -> Path:
    """A run of so many steps, of a real one's files (tests/support/seen_runs.py).

    Made in another process: what a process holds when it starts one counts as that one's peak.
    """
    words = ("max_steps=4", "eval.every=2", "eval.max_samples=4", "name=short")
    rloo(folder, *SMOKE, *words)
    code = "import sys; from pathlib import Path; from seen_runs import write_long_run; "
    code += "write_long_run(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))"
    given = [str(folder / "runs/short"), str(folder / "runs/long"), str(steps)]
    path = os.pathsep.join([str(HERE), str(HERE / "tests/support")])
    env = os.environ | {"PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", code, *given], env=env, check=True)
    return folder / "runs/long"


def checkpoints(folder: Path, count: int) -> Cost:
    """A run that saves and prunes after each of so many steps."""
    return rloo(folder, *SMOKE, f"max_steps={count}", "checkpoint.every=1")


MANY = (10_000, 100_000, 1_000_000)
Row = tuple[str, Callable[[Path, int], Cost], tuple[int, ...]]
LOADS: dict[str, Row] = {
    "runs at once": ("runs started at once", runs_at_once, (1, 3, 12)),
    "runs in turn": ("runs one after another", runs_in_turn, (1, 10, 100)),
    "plans at once": ("`--dry-run` at once", plans_at_once, (1, 10, 100)),
    "completions": ("completions in a step", completions, (160, 1_600, 10_000)),
    "data": ("rows of data, two steps", data_rows, (50_000, 500_000, 5_000_000)),
    "ledger": ("lines of a ledger, `rloo ledger`", ledger_lines, MANY),
    "checkpoints": ("checkpoints saved and pruned", checkpoints, (10, 100, 1_000)),
    **{
        verb: (f"lines of metrics, `rloo {verb}`", metrics_lines(verb), MANY)
        for verb in ("top", "report", "compare")
    },
}  # fmt: skip


def measure(name: str, most: int) -> None:
    """All sizes of a row, into the file, as they come."""
    _, load, sizes = LOADS[name]
    for size in sizes[:most]:
        with tempfile.TemporaryDirectory() as folder:
            cost = load(Path(folder), size)
        row = {"row": name, "size": size, "seconds": cost.seconds, "gib": cost.gib}
        print(json.dumps(row), flush=True)
        results.append([row], ROWS)


def table() -> str:
    """The newest figures of every row."""
    found = {(row["row"], row["size"]): row for row in results.read(ROWS)}
    lines = ["| what | how many | seconds | memory | growth |", "|---|---|---|---|---|"]
    for name, (what, _, sizes) in LOADS.items():
        rows = [found[name, size] for size in sizes if (name, size) in found]
        if not rows:
            continue
        growth = "-"
        if len(rows) == len(sizes):
            ratio = rows[-1]["seconds"] / rows[-2]["seconds"]
            growth = f"{ratio / (sizes[-1] / sizes[-2]):.2f}"
        cells = (
            what,
            " / ".join(f"{row['size']:,}" for row in rows),
            " / ".join(f"{row['seconds']:.{0 if row['seconds'] > 9.95 else 1}f}" for row in rows),
            " / ".join(
                f"{row['gib']:.{max(0, 1 - math.floor(math.log10(row['gib'])))}f}" for row in rows
            )
            + " GiB",
            growth,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure what is asked for, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", nargs="+", choices=list(LOADS), default=list(LOADS))
    parser.add_argument("--sizes", type=int, default=3, help="the first so many sizes")
    parser.add_argument("--page", action="store_true")
    args = parser.parse_args()
    if not args.page:
        for name in args.rows:
            measure(name, args.sizes)
        print(table())
        return
    text = PAGE.read_text(encoding="utf-8")
    head, tail = text.partition(BEGIN)[0], text.partition(END)[2]
    PAGE.write_text(f"{head}{BEGIN}\n\n{table()}\n\n{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
