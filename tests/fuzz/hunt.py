"""`make fuzz MINUTES=30`: the tests of this folder again and again, on other cases each time.

    python tests/fuzz/hunt.py --minutes 30 [--cases 300] [WORD ...]
    python tests/fuzz/hunt.py --page  the table of docs/results/endurance.md, from bench/fuzz.jsonl

    WORD     only tests whose name has one of these words

Rounds go over all targets until the time is over; a target's cases, seconds and finds are printed
and kept as a line of bench/fuzz.jsonl. A find is printed with its smallest case as hypothesis found
it; it belongs at its test as `@example`, with what was mended. Where atheris is installed the
targets of `guided.py` are hunted, too, GUIDED_S seconds a round. Exits with 1 after a find.
"""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "bench/fuzz.jsonl"
PAGE, BEGIN, END = ROOT / "docs/results/endurance.md", "<!-- made: fuzz -->", "<!-- end: fuzz -->"
GUIDED, GUIDED_S = ("calls", "command", "settings", "yaml", "json"), 20


def targets(words: list[str]) -> list[str]:
    """The node ids of the tests, those of one file beside each other."""
    found = []
    for path in sorted(Path(__file__).parent.glob("test_fuzz_*.py")):
        given = re.compile(r"^@given\(.*?^def (test_\w+)", re.MULTILINE | re.DOTALL)
        for name in given.findall(path.read_text()):
            if not words or any(word in name for word in words):
                found.append(f"{path.relative_to(ROOT)}::{name}")
    return found


def guided_targets(words: list[str]) -> list[str]:
    """Those of guided.py, where atheris is installed."""
    names = [f"guided::test_any_{name}_text" for name in GUIDED]
    found = importlib.util.find_spec("atheris") is not None
    return [name for name in names if found and (not words or any(w in name for w in words))]


def hunt_guided(node: str, seed: int) -> tuple[int, float, str]:
    """As `hunt`, of a target of guided.py."""
    target = node.removeprefix("guided::test_any_").removesuffix("_text")
    flags = [f"-max_total_time={GUIDED_S}", f"-seed={seed % 2**32}", "-print_final_stats=1"]
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        ended = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("guided.py")), target, *flags],
            cwd=ROOT, env=os.environ | {"TMPDIR": folder}, capture_output=True, text=True,
            errors="replace",
        )  # fmt: skip
        tried = re.search(r"number_of_executed_units: (\d+)", ended.stderr)
        said = ended.stderr[-6000:] if ended.returncode else ""
        return int(tried[1]) if tried else 0, time.monotonic() - start, said


def hunt(node: str, cases: int, seed: int) -> tuple[int, float, str]:
    """One round of a target: cases tried, seconds, and what was found, "" for nothing."""
    if node.startswith("guided::"):
        return hunt_guided(node, seed)
    with tempfile.TemporaryDirectory() as folder:
        counted = Path(folder) / "counted"
        env = os.environ | {"RLOO_FUZZ_CASES": str(cases), "RLOO_FUZZ_COUNTED": str(counted)}
        start = time.monotonic()
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "--tb=short", "-p", "no:cacheprovider",
             "--durations=0", f"--basetemp={folder}/base", f"--hypothesis-seed={seed}", node],
            cwd=ROOT, env=env, capture_output=True, text=True, errors="replace",
        )  # fmt: skip
        tried = counted.stat().st_size if counted.exists() else 0
        again = f"RLOO_FUZZ_CASES={cases} python -m pytest --hypothesis-seed={seed} {node}"
        said = f"{ended.stdout[-12_000:]}{ended.stderr[-1000:]}\nagain: {again}"
        said = said if ended.returncode else ""
        return tried, time.monotonic() - start, said


def write_page() -> None:
    """All rounds together: cases, finds and seconds of each target; finds of the last row apart."""
    rows = [json.loads(text) for text in ROWS.read_text().splitlines()]
    lines = ["| target | cases | found and mended | seconds |", "|---|---|---|---|"]
    for node in [*targets([]), *(f"guided::test_any_{name}_text" for name in GUIDED)]:
        own = [row["targets"][node] for row in rows if node in row["targets"]]
        name = node.partition("::")[2].removeprefix("test_").replace("_", " ")
        cases, found, seconds = (
            (sum(column) for column in zip(*own, strict=True)) if own else (0, 0, 0)
        )
        lines.append(f"| {name} | {cases:,.0f} | {found:.0f} | {seconds:,.0f} |")
    last = rows[-1]
    lines.append(
        f"\nThe last hunt: {last['minutes']:g} minutes, {last['cases']:,.0f} cases, "
        f"{last['found']:.0f} found."
    )
    head, _, rest = PAGE.read_text().partition(BEGIN)
    table = "\n".join(lines)
    PAGE.write_text(f"{head}{BEGIN}\n\n{table}\n\n{END}{rest.partition(END)[2]}")


def main() -> int:
    """Hunt until the time is over, and print what was tried and found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--cases", type=int, default=300, help="of a target in a round")
    parser.add_argument("--page", action="store_true", help="only write the table")
    args = parser.parse_args()
    if args.page:
        write_page()
        return 0
    end, start = time.monotonic() + 60 * args.minutes, time.time()
    nodes = targets(args.words) + guided_targets(args.words)
    tried, seconds, finds = (dict.fromkeys(nodes, 0.0) for _ in range(3))
    turn = 0
    while time.monotonic() < end and nodes:
        node = nodes[turn % len(nodes)]
        cases, spent, said = hunt(node, args.cases, int(start) + turn)
        turn, tried[node], seconds[node] = turn + 1, tried[node] + cases, seconds[node] + spent
        print(f"{node}: {cases} cases in {spent:.0f} s{' FOUND' if said else ''}", flush=True)
        if said:
            finds[node] += 1
            print(said, flush=True)
    print("\n| target | cases | found | seconds |\n|---|---|---|---|")
    for node in nodes:
        name = node.partition("::")[2].removeprefix("test_").replace("_", " ")
        print(f"| {name} | {tried[node]:.0f} | {finds[node]:.0f} | {seconds[node]:.0f} |")
    row = {
        "minutes": args.minutes, "cases": sum(tried.values()), "found": sum(finds.values()),
        "targets": {node: [tried[node], finds[node], round(seconds[node])] for node in nodes},
    }  # fmt: skip
    with ROWS.open("a") as file:
        file.write(json.dumps(row) + "\n")
    return 1 if row["found"] else 0


if __name__ == "__main__":
    sys.exit(main())
