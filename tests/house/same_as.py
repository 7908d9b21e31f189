"""Show that a commit changed nothing that it was not meant to change: this checkout beside COMMIT.

    python tests/house/same_as.py COMMIT [--quick] [--runs NAME ...] [--hash-changed]
                                         [--planted PLACE]

    --quick           train three of the runs below, instead of all
    --runs NAME ...   train these, instead of all
    --hash-changed    for a commit that changes config hashes or the data's fingerprint on purpose:
                      the order of the data is fixed, hashes and fingerprints are left out, and no
                      run goes on from one commit to the other
    --planted PLACE   change this checkout's copy by 1e-6 in the loss, a reward or the optimizer
                      first: the comparison must then end with 1

Compared are `rloo --help`, `rloo config --json`, `--cfg job`, the config and its hash of every
recipe (plain and with +debug=cpu), six steps of each run in RUNS (metrics without times, samples,
ledger and final weights, bit for bit), and a run that COMMIT's code began and this one goes on
with. Each commit makes its own models and data, and both run side by side. Ends with 1 where
anything differs.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
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
STEPS = (
    "max_steps=6", "eval.every=3", "logging.every=1", "logging.samples_every=1",
    "distributed.threads=1",
)  # fmt: skip
QUICKSTART = ("+recipe=quickstart",)
RANKS = (*QUICKSTART, "train.prompts_per_step=8", "distributed.num_processes=2")
RUNS = {
    "quickstart": QUICKSTART,
    "grpo": (*QUICKSTART, "algorithm=grpo", "algorithm.num_iterations=2"),
    "fsdp2": (*RANKS, "distributed=fsdp2"),
    "zero2": (*RANKS, "distributed=zero2"),
    "zero3": (*RANKS, "distributed=zero3"),
    "tools_mini": ("+recipe=tools_mini",),
    # A turn is sampled together with those that wait at the same time, and the sampler's
    # log-probabilities differ by rounding with the company: here each is sampled alone.
    "game_mini": ("+recipe=game_mini", "agent.workers=0", "generation.transformers.batch_tokens=1"),
    "vision_mini": ("+recipe=vision_mini",),
    "tldr_mini": ("+recipe=tldr_mini",),
    "ppo": (*QUICKSTART, "algorithm=ppo"),
    "lora": (*QUICKSTART, "lora=default"),
    "opd": ("+recipe=opd_addition",),
    "ahead": (*QUICKSTART, "generation.overlap=ahead"),
}  # name -> words; each has STEPS, too
QUICK = ("quickstart", "grpo", "fsdp2")
PLANTED = {
    "loss": (
        "rloo_cli/algorithms/rloo.py",
        "total = (term * trained).sum() / inputs.denominator  # ()",
        "total = (term * trained).sum() / inputs.denominator * (1 + 1e-6)",
    ),
    "reward": (
        "rloo_cli/rewards/exact_match.py",
        "return float(answer is not None",
        "return 1e-6 + float(answer is not None",
    ),
    "optimizer": (
        "rloo_cli/distributed/optimizer.py",
        "        self.inner.step()\n",
        "        self.inner.step()\n        [m.data.mul_(1 + 1e-6) for m in self.masters]\n",
    ),
}  # place -> file, its code, the same with an error of 1e-6
COPIED = ("rloo_cli", "conf", "recipes", "scripts")
PRINTS = ("fingerprint", "check")  # in a ledger, what depends on the data's fingerprint


class Checkout:
    """One commit's code, run in folders of its own."""

    def __init__(self, root: Path, home: Path, hash_changed: bool):
        self.root, self.home, self.hash_changed = root, home, hash_changed
        ours = {"PYTHONPATH": str(root), "RLOO_CACHE": str(home / "cache"), "NO_COLOR": "1"}
        self.environment = os.environ | ours | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        home.mkdir()

    def rloo(self, *words: str, codes: tuple[int, ...] = (0,), **more: str) -> str:
        """What a command prints."""
        return self.python("-m", "rloo_cli", *words, codes=codes, **more)

    def python(
        self, *words: str, given: str = "", codes: tuple[int, ...] = (0,), **more: str
    ) -> str:
        """What a Python that has this code prints, without its own paths."""
        ended = subprocess.run(
            [sys.executable, "-P", *words], cwd=self.home, env=self.environment | more,
            capture_output=True, text=True, input=given,
        )  # fmt: skip
        if ended.returncode not in codes:
            raise SystemExit(f"{words}: {ended.returncode}\n{ended.stdout}\n{ended.stderr}")
        return ended.stdout.replace(str(self.root), "ROOT")

    def said(self, quick: bool) -> dict[str, Any]:
        """What it says of itself and of every recipe; `quick`: `--cfg job` of one recipe alone."""
        recipes = sorted(p.stem for p in (self.root / "recipes").rglob("*.yaml"))
        cases = [[f"+recipe={r}", *more] for r in recipes for more in ([], ["+debug=cpu"])]
        found: dict[str, Any] = {
            "rloo --help": self.rloo("--help"),
            "rloo config --json": json.loads(self.rloo("config", "--json")),
        }
        for recipe in ("smoke",) if quick else recipes:
            found[f"--cfg job {recipe}"] = self.rloo("train", f"+recipe={recipe}", "--cfg", "job")
        hashes = json.loads(self.python("-c", HASHES, given=json.dumps(cases)))
        for words, (digest, values) in hashes.items():
            found[f"config {words}"] = values
            if not self.hash_changed:
                found[f"hash {words}"] = digest
        return found

    def trained(self, name: str, *words: str) -> dict[str, Any]:
        """What a run leaves; a changed fingerprint does not choose the order of its rows."""
        in_order = ["data.shuffle=false"] if self.hash_changed else []
        self.rloo(*words, *in_order, f"name={name}")
        found = left(self.home / "runs" / name)
        if self.hash_changed:
            found["ledger"] = [
                {k: v for k, v in line.items() if k not in PRINTS} for line in found["ledger"]
            ]
        return found

    def began(self, other: "Checkout") -> dict[str, Any]:
        """What a run leaves that this code begins and that one ends."""
        armed = {"RLOO_ALLOW_FAULTS": "1", "RLOO_FAULTS": "step@3=term"}
        self.rloo(*SMOKE, "name=begun", codes=(75,), **armed)
        begun = self.home / "runs" / "begun"
        theirs = other.home / "runs" / "begun"
        theirs.parent.mkdir(exist_ok=True)
        shutil.copytree(begun, theirs, symlinks=True)
        other.rloo(*SMOKE, "name=begun", "resume=auto")
        return left(theirs)


def left(run: Path) -> dict[str, Any]:
    """The numbers and texts of a run, without its times."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found: dict[str, Any] = {
        "metrics": without_times(lines),
        "samples": {
            p.name: [without_times(json.loads(line)) for line in p.read_text().splitlines()]
            for p in sorted((run / "samples").rglob("*.jsonl"))
        },
        "ledger": [
            without_times(json.loads(line) | {"attempt": None})
            for line in (run / "ledger.jsonl").read_text().splitlines()
        ],
    }
    for path in sorted((run / "final").rglob("*.safetensors")):
        found[f"weights {path.name}"] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def without_times(value: Any) -> Any:
    """A value of JSON without the keys that hold times, however deep they lie."""
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if not _is_time(k)}
    return [*map(without_times, value)] if isinstance(value, list) else value


def _is_time(name: str) -> bool:
    return name == "eps" or name.endswith("_s") or any(word in name for word in TIMES)


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


def planted_copy(home: str, folder: Path) -> Path:
    """A copy of this checkout's package in `folder`, with the error of PLANTED."""
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    file, code, wrong = PLANTED[home]
    text = (folder / file).read_text()
    assert text.count(code) == 1, f"{file} does not have this code once: {code}"
    (folder / file).write_text(text.replace(code, wrong))
    return folder


def compare_all(before: Checkout, now: Checkout, quick: bool, runs: Iterable[str]) -> int:
    """Compare what both say, and their runs; how many entries differ."""
    with ThreadPoolExecutor(2) as pool:

        def both(ask: Callable[[Checkout], dict[str, Any]]) -> list[dict[str, Any]]:
            return list(pool.map(ask, (before, now)))

        wrong = compare("what is said", *both(lambda one: one.said(quick)))
        for name in runs:
            words = ("train", *RUNS[name], *STEPS)
            wrong += compare(name, *both(lambda one: one.trained(name, *words)))  # noqa: B023
        if not now.hash_changed:
            whole, theirs = both(lambda one: one.trained("whole", *SMOKE))
            wrong += compare("a smoke run", whole, theirs)
            wrong += compare("begun before, ended now", whole, before.began(now))
    return wrong


def main() -> int:
    """Compare; 1 where anything differs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("commit")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--runs", nargs="+", choices=[*RUNS], default=[])
    parser.add_argument("--hash-changed", action="store_true")
    parser.add_argument("--planted", choices=[*PLANTED])
    given = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        git = ["git", "-C", str(ROOT), "worktree"]
        code = str(home / "code")
        subprocess.run([*git, "add", "--quiet", "--detach", code, given.commit], check=True)
        try:
            root = planted_copy(given.planted, home / "planted") if given.planted else ROOT
            before = Checkout(home / "code", home / "before", given.hash_changed)
            now = Checkout(root, home / "now", given.hash_changed)
            runs = given.runs or (QUICK if given.quick else RUNS)
            wrong = compare_all(before, now, given.quick, runs)
        finally:
            subprocess.run([*git, "remove", "--force", code], check=True)
    print(f"{wrong} differ; {(time.monotonic() - began) / 60:.1f} minutes")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
