"""`make nightly`: all that no single change waits for, in turn, with the time that each takes.

    python tests/house/nightly.py [--minutes 30] [TARGET ...]

    --minutes   of the soak and of the hunt
    TARGET      only these targets of the Makefile

Each target is run whatever became of the others; what it prints goes to nightly/TARGET.log. A line
for each: its name, its exit code, minutes, its last line. Exits with 1 where one has failed; an
audit whose database cannot be had (3) is told and is no failure.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "nightly"
TARGETS = ("test-all", "site", "scorecard", "mutants", "soak", "fuzz", "audit")
NO_DATABASE = 3  # of `make audit`; make's own code for it is 2


def run_target(target: str, minutes: float) -> tuple[int, str]:
    """Run one target. -> its exit code, 0 for an audit without a database, and its last line"""
    log = LOGS / f"{target}.log"
    with log.open("w") as out:
        # Within another make it would end with a line about folders.
        words = ["make", "--no-print-directory", target, f"MINUTES={minutes:g}"]
        code = subprocess.run(words, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT).returncode
    lines = [text for text in log.read_text(errors="replace").splitlines() if text.strip()]
    if target == "audit" and f"Error {NO_DATABASE}" in "".join(lines[-1:]):
        return 0, next((text for text in lines if "nothing was audited" in text), "")
    return code, (lines or [""])[-1]


def main() -> int:
    """Run the targets; 1 where one of them has failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, []])
    parser.add_argument("--minutes", type=float, default=30)
    args = parser.parse_args()
    LOGS.mkdir(exist_ok=True)
    failed = 0
    for target in args.targets or TARGETS:
        start = time.monotonic()
        code, last = run_target(target, args.minutes)
        failed += code != 0
        took = (time.monotonic() - start) / 60
        print(f"{target:<10} {code:>3} {took:6.1f} min  {last[:160]}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
