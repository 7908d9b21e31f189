"""The race: one real model, one task, one clock; `rloo`, TRL's RLOOTrainer and its GRPOTrainer.

    python bench/race.py --search                TRL's fastest size of a forward, two steps each
    python bench/race.py --proof                 the first update's gradient, of `rloo` and TRL
    python bench/race.py [--minutes 12] [--seeds 1 2 3]
    python bench/race.py --page  docs/results/race.md and its picture, from what is there

SmolLM2-135M-Instruct on `recipes/smollm2_arithmetic.yaml`: the same weights, prompts in the same
order, reward, completions a step, learning rate and schedule; both cores, float32. One process at
a time, in turn: rloo, TRL RLOO, TRL GRPO, each stopped after the same minutes of training. Held-out
scores are taken outside the clock, by one function for all. Every finished run is a line of
bench/race.jsonl and is not done again.
"""

import argparse
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
SIDE = Path(__file__).with_name("race_side.py")
RESULTS = Path(__file__).with_name("race.jsonl")
PAGE, PICTURE = HERE / "docs" / "results/race.md", HERE / "docs" / "race.svg"
TOOLS = {"rloo": "rloo", "trl_rloo": "TRL RLOOTrainer", "trl_grpo": "TRL GRPOTrainer"}
COLORS = {"rloo": "#0b6e4f", "trl_rloo": "#c44536", "trl_grpo": "#7a6ff0"}
MATCH = 1e-4  # relative distance of two gradients in float32
SHARE = 0.8  # of the best score of all
Row = dict[str, Any]


def write_data(folder: Path, seed: int) -> None:
    """The training problems in this seed's order, again and again, and the held-out ones."""
    from rloo_cli.data.synthetic.chat_tasks import arithmetic_examples

    train = arithmetic_examples("train")
    random.Random(seed).shuffle(train)
    for name, rows in (("prompts", train), ("held_out", arithmetic_examples("test"))):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)


def side(tool: str, folder: Path, *words: str) -> Row:
    """What a side's process prints. Raises SystemExit with the end of its errors."""
    command = [sys.executable, str(SIDE), tool, "--folder", str(folder), *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{tool} ended with {done.returncode}")
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


def results() -> list[Row]:
    """What has been run."""
    return [json.loads(x) for x in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def keep(row: Row) -> None:
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")


def fastest_micro() -> int | None:
    """TRL's completions a forward that the search found; None = all of a step."""
    searched = [row for row in results() if row["kind"] == "search"]
    return min(searched, key=lambda row: row["s_per_step"])["micro"] if searched else None


def search() -> None:
    """Time of TRL's step by how many completions a forward has."""
    for micro in (64, 32, 16, 8):
        with tempfile.TemporaryDirectory(prefix="rloo-race-") as root:
            write_data(Path(root), 1)
            found = side("trl_rloo", Path(root), "--seconds", "60", "--micro", str(micro))
        last = found["curve"][-1]
        keep({"kind": "search", "micro": micro, "s_per_step": last["seconds"] / last["steps"]})


def prove() -> None:
    """The relative distance of the first update's gradients. Raises SystemExit above MATCH."""
    import torch

    with tempfile.TemporaryDirectory(prefix="rloo-race-") as root:
        folder = Path(root)
        write_data(folder, 1)
        for tool in ("rloo", "trl_rloo"):
            found = side(tool, folder, "--proof", str(folder / f"{tool}.pt"))
        ours, theirs = (torch.load(folder / f"{tool}.pt") for tool in ("rloo", "trl_rloo"))
    names = ours.keys() & theirs.keys()
    gap = sum(float((ours[n].double() - theirs[n].double()).square().sum()) for n in names)
    size = sum(float(theirs[n].double().square().sum()) for n in names)
    distance = (gap / size) ** 0.5
    keep({"kind": "proof", "distance": distance, "norm": size**0.5} | found)
    print(f"gradients apart: {distance:.2e}, norm {size**0.5:.4g}, {len(names)} tensors")
    if ours.keys() != theirs.keys() or not distance < MATCH:
        raise SystemExit("the gradients are not the same")


def race(seeds: list[int], minutes: float) -> None:
    """All that has not been run yet, in turn."""
    done = {(r["tool"], r["seed"], r["minutes"]) for r in results() if r["kind"] == "race"}
    for seed in seeds:
        for tool in TOOLS:
            if (tool, seed, minutes) in done:
                continue
            with tempfile.TemporaryDirectory(prefix="rloo-race-") as root:
                write_data(Path(root), seed)
                words = ["--seed", str(seed), "--seconds", str(60 * minutes)]
                micro = fastest_micro()
                words += ["--micro", str(micro)] if micro and tool != "rloo" else []
                found = side(tool, Path(root), *words)
            keep({"kind": "race", "minutes": minutes} | found)
            last = found["curve"][-1]
            print(f"{tool} seed {seed}: {last['steps']} steps, score {last['score']:.3f}")


def reached(curve: list[dict[str, float]], score: float) -> float | None:
    """Seconds of training after which the held-out score was first this high, interpolated."""
    for before, after in itertools.pairwise(curve):
        if after["score"] >= score > before["score"]:
            part = (score - before["score"]) / (after["score"] - before["score"])
            return before["seconds"] + part * (after["seconds"] - before["seconds"])
    return curve[0]["seconds"] if curve[0]["score"] >= score else None


def page() -> None:
    """docs/results/race.md between its marks, and the picture."""
    rows = [row for row in results() if row["kind"] == "race"]
    draw(rows)
    begin, end = "<!-- table -->", "<!-- end of table -->"
    text = PAGE.read_text()
    table = "\n".join(table_lines(rows))
    head, tail = text[: text.index(begin) + len(begin)], text[text.index(end) :]
    PAGE.write_text(f"{head}\n\n{table}\n\n{tail}")


def share_text(score: float) -> str:
    """A share of the held-out problems, with its 95 % interval."""
    from rloo_cli.data.synthetic.chat_tasks import arithmetic_examples
    from rloo_cli.reporting.statistics import share_limits

    low, high = share_limits(len(arithmetic_examples("test")), score, score * (1 - score))
    return f"{score:.3f} ({low:.3f} to {high:.3f})"


def table_lines(rows: list[Row]) -> list[str]:
    """One line a run, then what share of the time rloo needed."""
    best = max(point["score"] for row in rows for point in row["curve"])
    lines = [
        "| seed | tool | steps | s/step | score at the start |"
        " at the end (95 % interval) |"
        f" min to {SHARE:.0%} of the best ({SHARE * best:.2f}) | peak GB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (row["seed"], [*TOOLS].index(row["tool"]))):
        first, last = row["curve"][0], row["curve"][-1]
        when = reached(row["curve"], SHARE * best)
        lines.append(
            f"| {row['seed']} | {TOOLS[row['tool']]} | {last['steps']:.0f} |"
            f" {last['seconds'] / last['steps']:.1f} | {first['score']:.3f} |"
            f" {share_text(last['score'])} |"
            f" {'never' if when is None else f'{when / 60:.1f}'} | {row['peak_mb'] / 1024:.1f} |"
        )
    for tool in ("trl_rloo", "trl_grpo"):
        shares = [share for row in rows if row["tool"] == tool if (share := _share(rows, row))]
        if shares:
            each = ", ".join(f"{share:.0%}" for share in shares)
            lines += [
                "",
                f"`rloo` has the score that {TOOLS[tool]} has at the end after **"
                f"{statistics.median(shares):.0%}** of the time (by seed: {each}).",
            ]
    lines += ["", *split_lines(rows)]
    return lines


def _share(rows: list[Row], other: Row) -> float | None:
    """The share of its time after which rloo has the last score of another tool's run."""
    ours = [r for r in rows if r["tool"] == "rloo" and r["seed"] == other["seed"]]
    last = other["curve"][-1]
    when = reached(ours[0]["curve"], last["score"]) if ours else None
    return None if when is None else when / last["seconds"]


def split_lines(rows: list[Row]) -> list[str]:
    """Seconds a step by phase, the median over seeds."""
    lines = ["| tool | seconds a step, by phase |", "|---|---|"]
    for tool, name in TOOLS.items():
        own = [row for row in rows if row["tool"] == tool]
        phases = dict.fromkeys(p for row in own for p in row["split"])
        got = []
        for phase in phases:
            each = [r["split"].get(phase, 0.0) / r["curve"][-1]["steps"] for r in own]
            got.append(f"{phase} {statistics.median(each):.2f}")
        if own:
            lines.append(f"| {name} | {', '.join(got)} |")
    return lines


def draw(rows: list[Row]) -> None:
    """Held-out score by minutes of training: thin lines are seeds, the thick one their median."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "race"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.2, 4.2), layout="constrained")
    for tool, name in TOOLS.items():
        curves = [row["curve"] for row in rows if row["tool"] == tool]
        for curve in curves:
            xs, ys = [p["seconds"] / 60 for p in curve], [p["score"] for p in curve]
            axes.plot(xs, ys, color=COLORS[tool], alpha=0.35, linewidth=1)
        if curves:
            count = min(map(len, curves))
            xs = [statistics.median(c[i]["seconds"] / 60 for c in curves) for i in range(count)]
            ys = [statistics.median(c[i]["score"] for c in curves) for i in range(count)]
            axes.plot(xs, ys, color=COLORS[tool], linewidth=2.5, label=name)
    axes.set_xlabel("minutes of training, two CPU cores")
    axes.set_ylabel("share of held-out problems answered right")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--proof", action="store_true")
    parser.add_argument("--page", action="store_true")
    args = parser.parse_args()
    if args.search:
        search()
    elif args.proof:
        prove()
    elif args.page:
        page()
    else:
        race(args.seeds, args.minutes)


if __name__ == "__main__":
    main()
