"""Seconds of `rloo`'s step before and after a change, in turns.

    python bench/versus_before.py --before ../older-checkout --workload W1 --rounds 8
    python bench/versus_before.py --before . --words train.compile=true     a setting, in turns

Each checkout has a process of its own, with the same weights and rows; they take turns, A B A B,
and one works while the other waits. First both train once from the same weights, and their
gradients are compared. Then per round one whole step each and one train phase each (see
versus_trl.py); medians, every round, the median of the rounds' ratios and each process's peak
memory are shown.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import toys
from shapes import ON_CPU, SHAPES
from sides import WORDS_VARIABLE
from versus_trl import SEED, Child, apart

HERE = Path(__file__).resolve().parent.parent


class Version(Child):
    """`rloo` of one checkout, in a process of its own."""

    def __init__(self, label: str, checkout: Path, workload: str, folder: Path, words: str):
        self.tool, self.micro = label, 8
        self.errors = folder / "errors.txt"
        command = [str(checkout / "bench/versus_trl.py"), "--one", "rloo", "--workload", workload]
        self.process = subprocess.Popen(
            [sys.executable, *command, "--micro", "8", "--folder", str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors.open("w"), text=True,
            env=os.environ | {"PYTHONPATH": str(checkout), WORDS_VARIABLE: words},
        )  # fmt: skip
        self.ready = self.heard()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, required=True, help="a checkout of an older commit")
    parser.add_argument("--workload", choices=ON_CPU, default="W1")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--words", default="", help="keys that only this checkout's run has")
    args = parser.parse_args()
    checkouts = {"before": args.before.resolve(), "now": HERE}
    with tempfile.TemporaryDirectory(prefix="rloo-bench-") as root, ExitStack() as held:
        versions = {}
        for label, checkout in checkouts.items():
            folder = Path(root, label)
            folder.mkdir()
            toys.write(SHAPES[args.workload], folder, SEED)
            words = args.words if label == "now" else ""
            version = Version(label, checkout, args.workload, folder, words)
            versions[label] = held.enter_context(version)
        rows = versions["before"].ask("record")["rows"]
        versions["now"].ask("record")
        for label, version in versions.items():
            version.ask("train", rows=rows, gradient=str(Path(root, f"{label}.pt")))
        gap = apart(Path(root, "before.pt"), Path(root, "now.pt"))
        print(f"gradients apart: {gap:.2e}")
        seconds = measure(versions, rows, args.rounds)
    for what, each in seconds.items():
        ratios = [b / a for a, b in zip(each["before"], each["now"], strict=True)]
        for label, spent in each.items():
            rounds = " ".join(f"{s:.2f}" for s in spent)
            print(f"{what:<6} {label:<7} {statistics.median(spent):.3f} s   {rounds}")
        print(f"{what:<6} now/before, median of rounds: {statistics.median(ratios):.3f}")


def measure(
    versions: dict[str, Version], rows: list[object], rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Seconds of the processor by kind of work, version and round; the first is not counted."""
    seconds = {what: {label: [] for label in versions} for what in ("step", "train")}
    for number in range(rounds + 1):
        for label, version in versions.items():
            orders = {"step": {}, "train": {"rows": rows, "gradient": None}}
            for what, order in orders.items():
                got = version.ask(what, **order)
                if number:
                    seconds[what][label].append(got["cpu"])
    peaks = {
        label: v.ask("train", rows=rows, gradient=None)["peak"] for label, v in versions.items()
    }
    print("peak MB:", ", ".join(f"{label} {peak:.0f}" for label, peak in peaks.items()))
    return seconds


if __name__ == "__main__":
    main()
