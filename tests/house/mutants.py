"""`make mutants`: each guard is taken out of a copy of the package, and its test must then fail.

    python tests/house/mutants.py [WORD ...]     only guards whose line has one of these words

`mutants.yaml` has the list: the guard in words, the file, the code with and without it, the test.
A line ends in "fails without it", "STILL PASSES without it" or "the code is not there any more".
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
COPIED = ("rloo_cli", "conf", "recipes", "scripts")


def run(copy: Path, tests: list[str]) -> bool:
    """Whether these tests pass with the package that lies in `copy`."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    # -P: the package of the current folder would come before the copy.
    command = [sys.executable, "-P", "-m", "pytest", "-x", "-p", "no:cacheprovider", *tests]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if ended.returncode not in (0, 1):
        raise SystemExit(f"{tests}: pytest ended with {ended.returncode}\n{ended.stdout[-2000:]}")
    return ended.returncode == 0


def without(copy: Path, mutant: dict[str, Any]) -> str:
    """Take one guard out, run its test, put the guard back; the last column of the line."""
    path = copy / mutant["file"]
    text = path.read_text()
    if text.count(mutant["with"]) != 1:
        return "the code is not there any more"
    path.write_text(text.replace(mutant["with"], mutant["without"]))
    try:
        passes = run(copy, [mutant["test"]])
    finally:
        path.write_text(text)
    return "STILL PASSES without it" if passes else "fails without it"


def main() -> int:
    """Print the table; 1 where a line is not as it should be."""
    words = sys.argv[1:]
    mutants = yaml.safe_load(Path(__file__).with_name("mutants.yaml").read_text())
    mutants = [m for m in mutants if not words or any(w in str(m) for w in words)]
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            shutil.copytree(ROOT / name, copy / name)
        if not run(copy, sorted({m["test"] for m in mutants})):
            raise SystemExit("the tests do not pass with the guards in place")
        for mutant in mutants:
            found = without(copy, mutant)
            bad += found != "fails without it"
            print(f"{mutant['guard']:<72}  {mutant['test']}  {found}", flush=True)
    print(f"{len(mutants)} guards, {bad} without a test that fails")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
