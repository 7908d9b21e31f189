"""What a start costs with data of many rows, beside TRL: seconds, and memory of all processes.

    python bench/data.py [--rounds 3] [--files NAME ...]    A B A B; lines of bench/data.jsonl
    python bench/data.py --ranks        memory that data adds on one rank and on two, of ours
    python bench/data.py --rows N       ours alone, on a file of N short rows
    python bench/data.py --show         the table of what was measured last

Two steps with a tiny model, the same for both, on the same files, of Parquet or of JSON:

    small      20,000 short rows
    short      2,000,000 short rows
    wide       50,000 rows with a column of 20 kB that no reward reads
    json       2,000,000 short rows of JSON

"first" is the first start on a file: Arrow's files are made, and ours looks at all rows. "again" is
the median of the starts after it. Memory is the proportional set size (PSS) of the command's
processes together, at its highest; it is looked at ten times a second.
"""

import argparse
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import results

ROWS = Path(__file__).with_name("data.jsonl")
HERE = Path(__file__).resolve().parents[1]
FILES = {
    "small": (20_000, 0), "short": (2_000_000, 0), "wide": (50_000, 20_000), "json": (2_000_000, 0),
}  # rows, bytes of the wide column  # fmt: skip
LOOK_EVERY_S = 0.1
TRL = """
import sys
from datasets import load_dataset
from trl import RLOOConfig, RLOOTrainer

def unique_chars(completions, **_):
    return [len(set(text)) / max(1, len(text)) for text in completions]

kind = "json" if sys.argv[1].endswith("jsonl") else "parquet"
data = load_dataset(kind, data_files=sys.argv[1], split="train")
keys = dict(
    output_dir=sys.argv[3], max_steps=2, per_device_train_batch_size=16, num_generations=4,
    max_completion_length=16, save_strategy="no", report_to="none", use_cpu=True, logging_steps=1,
    gradient_checkpointing=False,
)
trainer = RLOOTrainer(
    model=sys.argv[2], reward_funcs=unique_chars, args=RLOOConfig(**keys), train_dataset=data
)
trainer.train()
"""


def rows(count: int, wide: int) -> Iterator[dict[str, str]]:
    """Sums, with a column of `wide` bytes if it is not 0."""
    draw = random.Random(count + wide)
    for _ in range(count):
        a, b = draw.randrange(1000), draw.randrange(1000)
        row = {"prompt": f"What is {a} + {b}? Write the number alone:", "answer": str(a + b)}
        row["source"] = f"sums-{draw.randrange(8)}"
        if wide:
            row["solution"] = " ".join(f"{draw.randrange(10**8):08d}" for _ in range(wide // 9))
        yield row


def write_rows(path: Path, count: int, wide: int = 0) -> None:
    """A file of such rows, by its ending."""
    given = rows(count, wide)
    if path.suffix == ".jsonl":
        with path.open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in given)
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer = None
    while part := list(itertools.islice(given, 10_000)):
        table = pa.Table.from_pylist(part)
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    assert writer is not None
    writer.close()


def tree(root: int) -> Iterator[int]:
    """A process and its descendants that live."""
    yield root
    try:
        for task in Path(f"/proc/{root}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from tree(int(child))
    except OSError:
        return


def pss_mb(root: int) -> float:
    """The proportional set size of a process and its descendants."""
    total = 0
    for process in tree(root):
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
    return total / 1024


def run(words: Sequence[str], folder: Path, tool: str) -> dict[str, float]:
    """Run a command to its end. -> wall, processor's seconds, peak MB"""
    env = os.environ | {
        "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1",
        "RLOO_CACHE": str(folder / "rloo"), "HF_HOME": str(folder / tool),
        "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # else every start compiles what the last one did
    shutil.rmtree(folder / "runs", ignore_errors=True)
    said, start, peak = folder / "said.txt", time.monotonic(), 0.0
    with said.open("w") as out:
        process = subprocess.Popen(words, cwd=folder, env=env, stdout=out, stderr=out)
        while True:
            pid, status, used = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            peak = max(peak, pss_mb(process.pid))
            time.sleep(LOOK_EVERY_S)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{words}: {process.returncode}\n{said.read_text()[-3000:]}")
    seconds = time.monotonic() - start
    return {"s": round(seconds, 2), "cpu_s": round(used.ru_utime + used.ru_stime, 2),
            "mb": round(peak)}  # fmt: skip


def command(tool: str, data: Path, folder: Path, *more: str) -> list[str]:
    """Two steps of a tool on a file."""
    if tool == "trl":
        model = next((folder / "rloo").glob("tiny-*"))
        return [sys.executable, "-c", TRL, str(data), str(model), str(folder / "out")]
    words = ("train", "+recipe=smoke", "reward=[unique_chars]", f"data.path={data}",
             "data.name=null", "data.split=train", "data.eval_split=null", "logging.console=plain",
             "distributed.threads=1")  # fmt: skip
    return [sys.executable, "-P", "-m", "rloo_cli", *words, *more]


def surroundings() -> dict[str, Any]:
    """What was measured where."""
    asked = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    said = subprocess.run(asked, cwd=HERE, capture_output=True, text=True)
    return {"date": time.strftime("%Y-%m-%dT%H:%M:%S"), "commit": said.stdout.strip(),
            "cores": os.cpu_count()}  # fmt: skip


def beside_trl(names: Sequence[str], rounds: int, folder: Path) -> list[dict[str, Any]]:
    """Both tools on each file, in turns."""
    found, where = [], surroundings()
    for name in names:
        data = folder / f"{name}.{'jsonl' if name == 'json' else 'parquet'}"
        write_rows(data, *FILES[name])
        starts: dict[str, list[dict[str, float]]] = {"rloo": [], "trl": []}
        for number in range(rounds + 1):
            for tool, measured in starts.items():
                measured.append(run(command(tool, data, folder), folder, tool))
                print(f"{name} {tool} start {number + 1}: {measured[-1]}", flush=True)
        for tool, (first, *again) in starts.items():
            middle = {k: statistics.median(one[k] for one in again) for k in first}
            found.append(where | {"file": name, "rows": FILES[name][0], "tool": tool,
                                  "bytes": data.stat().st_size, "first": first, "again": middle,
                                  "starts": again})  # fmt: skip
        data.unlink()
    return found


def on_ranks(rounds: int, folder: Path) -> list[dict[str, Any]]:
    """The memory that data adds: with 2,000,000 rows, and with 20, on one rank and on two."""
    found, where = [], surroundings()
    for name, (count, wide) in {"few": (20, 0), "short": FILES["short"]}.items():
        data = folder / f"{name}.parquet"
        write_rows(data, count, wide)
        for ranks in (1, 2):
            more = (f"distributed.num_processes={ranks}", "distributed=zero2")
            run(command("rloo", data, folder, *more), folder, "rloo")
            again = [
                run(command("rloo", data, folder, *more), folder, "rloo") for _ in range(rounds)
            ]
            middle = {k: statistics.median(one[k] for one in again) for k in again[0]}
            print(f"{name} on {ranks}: {middle}", flush=True)
            found.append(where | {"file": name, "rows": count, "ranks": ranks, "again": middle,
                                  "starts": again})  # fmt: skip
    added = [found[2 + i]["again"]["mb"] - found[i]["again"]["mb"] for i in (0, 1)]
    print(f"data add {added[0]:.0f} MB on one rank, {added[1]:.0f} on two")
    return found


def show() -> None:
    """The last rows of each file and tool."""
    latest = {(r["file"], r.get("tool"), r.get("ranks")): r for r in results.read(ROWS)}
    for (name, tool, ranks), row in latest.items():
        label = f"{name:<6} {tool or f'{ranks} rank' + 's' * (ranks > 1):<8}"
        parts = [f"{k} {row[k]['s']:.1f} s, cpu {row[k]['cpu_s']:.1f} s, {row[k]['mb']:.0f} MB"
                 for k in ("first", "again") if k in row]  # fmt: skip
        print(f"{label} {'; '.join(parts)}")


def main() -> None:
    """Measure, and keep it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--files", nargs="+", choices=[*FILES], default=[*FILES])
    parser.add_argument("--ranks", action="store_true")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--show", action="store_true")
    given = parser.parse_args()
    if given.show:
        show()
        return
    folder = Path(tempfile.mkdtemp(prefix="bench-data-"))
    try:
        warm = folder / "warm.parquet"  # makes the model, and byte code
        write_rows(warm, 20)
        run(command("rloo", warm, folder), folder, "rloo")
        if given.rows:
            write_rows(folder / "many.parquet", given.rows)
            for _ in range(2):
                print(run(command("rloo", folder / "many.parquet", folder), folder, "rloo"))
            return
        found = on_ranks(given.rounds, folder) if given.ranks else beside_trl(
            given.files, given.rounds, folder)  # fmt: skip
        results.append(found, ROWS)
        show()
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
