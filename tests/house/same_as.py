"""Whether a move changed anything: what this checkout says and does, beside another commit.

    python tests/house/same_as.py COMMIT

Compared are `rloo --help`, `rloo config --json`, `--cfg job`, the config and its hash of every
recipe (plain and with +debug=cpu), a smoke run's metrics (times apart), samples, ledger and
weights, and a run that COMMIT's code began and this one goes on with. For commits that move code;
an issue that adds keys has differences to show. Ends with 1 where anything differs.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HASHES = """
import importlib, json, sys
from rloo_cli import config as check
try:
    composing = importlib.import_module("rloo_cli.config.compose")
    check = importlib.import_module("rloo_cli.config.check")
except ModuleNotFoundError:  # before there were rooms
    composing = importlib.import_module("rloo_cli.compose")

def named(module, *names):  # the first one that this commit has
    return next(getattr(module, name) for name in names if hasattr(module, name))

compose = named(composing, "compose_config", "compose")
checked = named(check, "check_config", "check")
dump = named(check, "dump_config", "dump")
found = {}
for words in json.load(sys.stdin):
    run = checked(compose(words))
    found[" ".join(words)] = [check.config_hash(run), dump(run)]
print(json.dumps(found, sort_keys=True, default=str))
"""
SMOKE = ("train", "+recipe=smoke", "max_steps=4", "checkpoint.every=1", "eval.every=2")
TIMES = ("time", "seconds", "per_s", "memory", "mfu", "utilization", "date", "wait_frac")


class Checkout:
    """One commit's code, run in folders of its own."""

    def __init__(self, root: Path, place: Path):
        self.root, self.place = root, place
        ours = {"PYTHONPATH": str(root), "RLOO_CACHE": str(place.parent / "cache"), "NO_COLOR": "1"}
        self.environment = os.environ | ours | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        place.mkdir()

    def rloo(self, *words: str, codes: tuple[int, ...] = (0,), **more: str) -> str:
        """What a command prints."""
        return self.python("-m", "rloo_cli", *words, codes=codes, **more)

    def python(
        self, *words: str, given: str = "", codes: tuple[int, ...] = (0,), **more: str
    ) -> str:
        """What a Python that has this code prints, without its own paths."""
        ended = subprocess.run(
            [sys.executable, "-P", *words], cwd=self.place, env=self.environment | more,
            capture_output=True, text=True, input=given,
        )  # fmt: skip
        if ended.returncode not in codes:
            raise SystemExit(f"{words}: {ended.returncode}\n{ended.stdout}\n{ended.stderr}")
        return ended.stdout.replace(str(self.root), "ROOT")

    def said(self) -> dict[str, Any]:
        """What it says of itself and of every recipe."""
        recipes = sorted(p.stem for p in (self.root / "recipes").rglob("*.yaml"))
        cases = [[f"+recipe={r}", *more] for r in recipes for more in ([], ["+debug=cpu"])]
        found: dict[str, Any] = {
            "rloo --help": self.rloo("--help"),
            "rloo config --json": json.loads(self.rloo("config", "--json")),
        }
        for case in cases:
            found[f"--cfg job {' '.join(case)}"] = self.rloo("train", *case, "--cfg", "job")
        hashes = json.loads(self.python("-c", HASHES, given=json.dumps(cases)))
        for words, (digest, values) in hashes.items():
            found[f"hash {words}"], found[f"config {words}"] = digest, values
        return found

    def trained(self) -> dict[str, Any]:
        """What a smoke run leaves."""
        self.rloo(*SMOKE, "name=whole")
        return left(self.place / "runs" / "whole")

    def began(self, other: "Checkout") -> dict[str, Any]:
        """What a run leaves that this code begins and that one ends."""
        armed = {"RLOO_ALLOW_FAULTS": "1", "RLOO_FAULTS": "step@3=term"}
        self.rloo(*SMOKE, "name=begun", codes=(75,), **armed)
        begun = self.place / "runs" / "begun"
        theirs = other.place / "runs" / "begun"
        theirs.parent.mkdir(exist_ok=True)
        shutil.copytree(begun, theirs, symlinks=True)
        other.rloo(*SMOKE, "name=begun", "resume=auto")
        return left(theirs)


def left(run: Path) -> dict[str, Any]:
    """The numbers and texts of a run, without its times."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found: dict[str, Any] = {
        "metrics": [{k: v for k, v in row.items() if not _is_time(k)} for row in lines],
        "samples": {p.name: p.read_text() for p in sorted((run / "samples").rglob("*.jsonl"))},
        "ledger": [_plain(line) for line in (run / "ledger.jsonl").read_text().splitlines()],
    }
    for path in sorted((run / "final").rglob("*.safetensors")):
        found[f"weights {path.name}"] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def _is_time(name: str) -> bool:
    return name == "eps" or any(word in name for word in TIMES)


def _plain(line: str) -> dict[str, Any]:
    return {k: v for k, v in json.loads(line).items() if not _is_time(k) and k != "attempt"}


def compare(what: str, before: dict[str, Any], now: dict[str, Any]) -> int:
    """Print what differs; how many entries do."""
    names = sorted({*before, *now})
    wrong = [name for name in names if before.get(name) != now.get(name)]
    print(f"{what}: {len(names)} compared, {len(wrong)} differ")
    for name in wrong:
        print(f"  {name}")
        if isinstance(before.get(name), dict) and isinstance(now.get(name), dict):
            inner = {*before[name], *now[name]}
            keys = sorted(k for k in inner if before[name].get(k) != now[name].get(k))
            print(f"    {', '.join(map(str, keys))}")
        elif name == "metrics":
            rows = zip(before[name], now[name], strict=False)
            keys = {k for a, b in rows for k in {*a, *b} if a.get(k) != b.get(k)}
            print(f"    {', '.join(sorted(keys))}")
    return len(wrong)


def main() -> int:
    """Compare; 1 where anything differs."""
    (commit,) = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run(
            [*git, "add", "--quiet", "--detach", str(place / "code"), commit], check=True
        )
        try:
            before = Checkout(place / "code", place / "before")
            now = Checkout(ROOT, place / "now")
            wrong = compare("what is said", before.said(), now.said())
            whole = before.trained()
            wrong += compare("a smoke run", whole, now.trained())
            wrong += compare("begun before, ended now", whole, before.began(now))
        finally:
            subprocess.run([*git, "remove", "--force", str(place / "code")], check=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
