"""TL;DR in miniature, believed: three seeds, three betas, the judge, and docs/results/tldr_mini.md.

    python bench/tldr_mini.py [--seeds 1 2 3] [--betas 0.1 0.05 0.002] [--steps 100 100 300]

Every number comes from the command line: `rloo train +recipe=tldr_mini` and `rloo eval` with the
hidden rule as judge, on the 500 posts of the test split, greedily. Runs lie in
runs/tldr_mini_bench; those that are finished are not done again. `--page` only writes the page from
them and runs nothing.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
ROOT = Path("runs/tldr_mini_bench")
PAGE = HERE / "docs" / "results/tldr_mini.md"
JUDGED = ["judge=tldr_mini", "data.eval_split=test", "eval.max_samples=500"]
AGAINST = "eval.judge.against=make:tldr_sft"
PROXY, GOLD, KL = "reward/tldr_mini_rm/mean", "reward/tldr_mini_gold/mean", "objective/kl"
AROUND = 5  # steps on either side that a row of the curve is the mean of


def rloo(*words: str) -> str:
    """What the command prints. Raises CalledProcessError."""
    done = subprocess.run(
        [sys.executable, "-m", "rloo_cli", *words], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"rloo {' '.join(words)}: exit {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout


def name(beta: float, seed: int) -> str:
    return f"beta-{beta:g}-seed-{seed}"


def one(beta: float, seed: int, steps: int) -> None:
    """Train one run and judge it, unless that is done."""
    folder = ROOT / name(beta, seed)
    if (folder / "took.json").is_file():
        return
    begun = time.perf_counter()
    words = [f"seed={seed}", f"algorithm.beta={beta}", f"max_steps={steps}", f"name={folder.name}"]
    rloo("train", "+recipe=tldr_mini", f"root={ROOT}", *words, "logging.samples=0", "resume=auto")
    seconds = time.perf_counter() - begun
    rloo("eval", str(folder), *JUDGED)
    rloo("eval", str(folder), *JUDGED, AGAINST)
    (folder / "took.json").write_text(json.dumps({"train_s": seconds}))


def verdict(folder: Path, against: str) -> dict[str, Any]:
    """The judge's result against `reference` or a model."""
    for path in folder.glob("eval/*/judge.json"):
        got = json.loads(path.read_text())
        if got["keys"]["against"] == against:
            return next(iter(got["sets"].values()))  # type: ignore[no-any-return]
    raise SystemExit(f"{folder} was not judged against {against}")


def curve(folder: Path) -> dict[int, dict[str, float]]:
    """Step -> the three numbers, means over the steps around it."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "step_time" in row]
    return {
        row["step"]: {
            key: statistics.fmean(
                other[key] for other in steps if abs(other["step"] - row["step"]) <= AROUND
            )
            for key in (PROXY, GOLD, KL)
        }
        for row in steps
    }


def share(got: dict[str, Any]) -> str:
    return f"{100 * got['rate']:.1f} % ({100 * got['low']:.1f} to {100 * got['high']:.1f})"


def spread(values: list[float]) -> str:
    """Mean, and the standard deviation over seeds."""
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    return f"{statistics.fmean(values):.2f} ± {deviation:.2f}"


def page(betas: list[float], seeds: list[int], steps: list[int]) -> str:
    """The whole of docs/results/tldr_mini.md."""
    sft = verdict(ROOT / "sft", "reference")
    lines = [
        "# TL;DR in miniature",
        "",
        "`python bench/tldr_mini.py` trains a supervised model, a reward model and RLOO policies",
        "on two CPU cores. The posts, the references and the hidden rule that judges summaries are",
        "synthetic (`make:tldr`): the figures show that the pipeline works, not how good summaries",
        "are.",
        "",
        "## The judge",
        "",
        "Share of 500 held-out posts for which the hidden rule prefers the model's greedy summary.",
        "A tie counts one half. Brackets have the 95 % interval over posts.",
        "",
        "| model | against the reference | against the supervised model |",
        "|---|---|---|",
        f"| supervised (`make:tldr_sft`) | {share(sft)} | – |",
    ]
    for beta in betas:
        for seed in seeds:
            folder = ROOT / name(beta, seed)
            both = share(verdict(folder, "reference")), share(verdict(folder, "make:tldr_sft"))
            lines.append(f"| RLOO, beta {beta:g}, seed {seed} | {both[0]} | {both[1]} |")
    lines += ["", "```", "rloo train +recipe=tldr_mini", "rloo eval tldr_mini judge=tldr_mini"]
    lines += ["rloo eval tldr_mini judge=tldr_mini eval.judge.against=make:tldr_sft", "```", ""]
    lines += [
        "## Over-optimization",
        "",
        f"Means over {len(seeds)} seeds ± their standard deviation, over the steps within {AROUND}",
        "of the step. The policy trains on the reward model's score; the hidden rule is only",
        "logged (a reward of weight 0). KL is per completion, in nats.",
    ]
    for beta, last in zip(betas, steps, strict=True):
        curves = [curve(ROOT / name(beta, seed)) for seed in seeds]
        lines += ["", f"### beta {beta:g}, {last} steps", ""]
        lines += ["| step | reward model's score | hidden rule | KL |", "|---|---|---|---|"]
        marks = [1, *(s for s in (10, 25, 50, 100, 150, 200, 250, 300) if s <= last)]
        for step in marks:
            cells = [spread([c[step][key] for c in curves]) for key in (PROXY, GOLD, KL)]
            lines.append(f"| {step} | {' | '.join(cells)} |")
    took = [json.loads((ROOT / name(b, s) / "took.json").read_text()) for b in betas for s in seeds]
    per = ", ".join(f"{t['train_s']:.0f}" for t in took)
    lines += ["", f"Seconds per run of RLOO, two runs at a time: {per}.", ""]
    return "\n".join(lines)


def main() -> None:
    """Do what is missing, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--betas", type=float, nargs="+", default=[0.1, 0.05, 0.002])
    parser.add_argument("--steps", type=int, nargs="+", default=[100, 100, 300])
    parser.add_argument("--page", action="store_true", help="only write the page")
    given = parser.parse_args()
    if not given.page:
        if not (ROOT / "sft" / "eval").is_dir():
            rloo("eval", "+recipe=tldr_mini", "name=sft", f"root={ROOT}", *JUDGED)
            found = next((ROOT / "eval" / "sft").iterdir())
            (ROOT / "sft" / "eval").mkdir(parents=True)
            found.rename(ROOT / "sft" / "eval" / found.name)
        pairs = zip(given.betas, given.steps, strict=True)
        jobs = [(beta, seed, steps) for beta, steps in pairs for seed in given.seeds]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda job: one(*job), sorted(jobs, key=lambda job: -job[2])))
    PAGE.write_text(page(given.betas, given.seeds, given.steps))
    print(PAGE.read_text())


if __name__ == "__main__":
    main()
