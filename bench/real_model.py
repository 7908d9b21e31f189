"""A real chat model trained on two CPU cores: runs, tables and samples of its page.

    python bench/real_model.py                     all stages; what was cut goes on
    python bench/real_model.py --stages rates      some: rates, lengths, arithmetic, constraints,
                                                   reasoning, algorithms, planned, plan
    python bench/real_model.py --page              only the page and its pictures, from the rows
    python bench/real_model.py --dry-run           only print the commands

Every number comes from the command line: `rloo sweep`, `rloo train`, `rloo compare`, `rloo plan`.
Runs lie in runs/real_model; a run that ends is a row of bench/real_model.jsonl with its held-out
curve, its seconds and some answers before and after, and is not done again.
"""

import argparse
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import results

HERE = Path(__file__).resolve().parents[1]
ROWS = Path(__file__).with_name("real_model.jsonl")
DOCS, ROOT = HERE / "docs", Path("runs/real_model")
BEGIN, END = "<!-- made: {} -->", "<!-- end: {} -->"
SHOWN = 6  # answers of a run that a row keeps, before and after
COLORS = ("#0b6e4f", "#c44536", "#7a6ff0", "#d98e04", "#2a7fbf", "#8a5a44")
Row = results.Row
SCORE = re.compile(r"eval_(?:(\w+)_)?reward$")  # of the held-out set, or of one of several
PART = re.compile(r"eval_reward/(\w+)/mean$")  # a reward of several
Words = tuple[str, ...]

# Stage -> its commands. Their runs lie in runs/real_model/STAGE.
STAGES: dict[str, list[Words]] = {
    "rates": [
        ("sweep", "+recipe=smollm2_arithmetic", "train.learning_rate=5e-6,1e-5,2e-5,4e-5"),
    ],
    "lengths": [
        ("sweep", "+recipe=smollm2_arithmetic", "generation.max_completion_length=8,32"),
    ],
    "arithmetic": [
        ("train", "+recipe=smollm2_arithmetic", f"seed={seed}", f"name=seed-{seed}")
        for seed in (1, 2, 3)
    ],
    "constraints": [("train", "+recipe=smollm2_constraints")],
    "reasoning": [("train", "+recipe=smollm2_reasoning")],
    "algorithms": [
        ("train", "-m", "+recipe=compare_smollm2", f"algorithm={name}", f"++seed={seed}")
        for seed in (1, 2)
        for name in ("rloo", "grpo", "reinforce", "ppo")
    ],
    # Short runs on an otherwise idle machine, for the figures that `rloo plan` is held against.
    "planned": [
        ("train", *words, "max_steps=6", "eval.at_start=false", f"name={name}")
        for name, words in {
            "arithmetic": ("+recipe=smollm2_arithmetic",),
            "arithmetic-32": ("+recipe=smollm2_arithmetic", "generation.max_completion_length=32"),
            "constraints": ("+recipe=smollm2_constraints",),
            "reasoning": ("+recipe=smollm2_reasoning",),
            "ppo": ("+recipe=smollm2_arithmetic", "algorithm=ppo"),
        }.items()
    ],
}  # fmt: skip
COMPARED = ("rates", "algorithms")  # stages whose runs `rloo compare` puts side by side


def command(stage: str, words: Words) -> Words:
    """The words as they are run."""
    return (*words, f"root={ROOT / stage}")


def do(stage: str, given: argparse.Namespace) -> None:
    """Run what a stage lacks, and keep a row of each run that has ended."""
    for words in STAGES[stage]:
        asked = command(stage, words)
        print(shlex.join(("rloo", *asked)), flush=True)
        if given.dry_run:
            continue
        ended = subprocess.run([sys.executable, "-m", "rloo_cli", *asked])
        keep_rows(stage)
        if ended.returncode:
            raise SystemExit(f"exit {ended.returncode}")
    if stage in COMPARED and not given.dry_run:
        compare(stage)


def compare(stage: str) -> None:
    """Keep what `rloo compare` says of a stage's runs, but for the keys that differ."""
    with tempfile.TemporaryDirectory() as out:
        words = ["compare", str(ROOT / stage), "--out", out]
        subprocess.run([sys.executable, "-m", "rloo_cli", *words], check=True, capture_output=True)
        text = (Path(out) / "table.md").read_text(encoding="utf-8")
    got = text.partition("Keys that differ")[0].strip()
    results.append([{"stage": f"{stage}-compared", "text": got}], ROWS)


def keep_rows(stage: str) -> None:
    """A row of each finished run of a stage that has none."""
    known = {row["name"] for row in rows_of(stage)}
    for about in sorted((ROOT / stage).glob("*/run.json"), key=lambda path: path.stat().st_mtime):
        state = json.loads(about.read_text())["state"]
        if state == "finished" and about.parent.name not in known:
            results.append([row_of(stage, about.parent)], ROWS)


def row_of(stage: str, folder: Path) -> Row:
    """What is kept of a finished run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "step_time" in line]
    about = json.loads((folder / "run.json").read_text())
    train_s = sum(line["step_time"] for line in steps)
    return {
        "stage": stage, "name": folder.name, "words": overrides(folder),
        "steps": len(steps), "train_s": train_s, "step_s": statistics.median(
            line["step_time"] for line in steps),
        "phases": {
            name.removeprefix("time/"): statistics.median(line[name] for line in steps)
            for name in steps[-1] if name.startswith("time/")
        },
        "memory": about.get("memory", {}), "lengths": lengths(steps),
        "curve": curve(lines),
        "rewards": [[line["step"], line["reward"]] for line in steps],
        "answers": answers(folder),
        "machine": machine(),
    }  # fmt: skip


def lengths(steps: Sequence[Row]) -> dict[str, float]:
    """Mean tokens of a run's prompts and completions."""
    completion = statistics.fmean(line["completions/mean_length"] for line in steps)
    both = steps[-1]["num_tokens"] / steps[-1]["episode"]
    return {"prompt": both - completion, "completion": completion}


def overrides(folder: Path) -> list[str]:
    """What the command line changed, without where the run lies."""
    lines = (folder / "overrides.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith(("root=", "#"))]


def curve(lines: Sequence[Row]) -> list[Row]:
    """Step, seconds of training until then, and the held-out means of each evaluation."""
    points, seconds = [], 0.0
    for line in lines:
        seconds += line.get("step_time", 0.0)
        whole = {m[1] or "score": value for name, value in line.items() if (m := SCORE.match(name))}
        parts = {m[1]: value for name, value in line.items() if (m := PART.match(name))}
        if whole:
            mean = {"score": statistics.fmean(whole.values())}
            points.append({"step": line["step"], "seconds": seconds} | mean | whole | parts)
    return points


def answers(folder: Path) -> list[Row]:
    """Held-out prompts with the first and the last evaluation's greedy answers, evenly drawn."""
    files = sorted((folder / "samples").glob("eval_*.jsonl"))
    prefixes = sorted({f.stem.rpartition("_")[0] for f in files})
    shown = []
    for prefix in prefixes:
        own = [f for f in files if f.stem.rpartition("_")[0] == prefix]
        first, last = (
            [json.loads(line) for line in f.read_text().splitlines()] for f in (own[0], own[-1])
        )
        count = min(SHOWN if len(prefixes) == 1 else 2, len(first))
        for i in (len(first) * n // count for n in range(count)):
            shown.append({
                "prompt": first[i]["prompt"], "before": first[i]["completion"],
                "score_before": first[i]["score"], "after": last[i]["completion"],
                "score_after": last[i]["score"],
            })  # fmt: skip
    return shown


def machine() -> str:
    """What this ran on."""
    return f"{os.cpu_count()} CPU cores, {platform.machine()}, Python {platform.python_version()}"


def rows_of(stage: str) -> list[Row]:
    """The rows of a stage, in the order in which they were made."""
    return [row for row in results.read(ROWS) if row["stage"] == stage]


# Plans.


def plan_all() -> None:
    """A row of each short run: what `rloo plan` says of its memory and its step."""
    known = {row["of"] for row in rows_of("plan")}
    for row in rows_of("planned"):
        if row["name"] in known:
            continue
        means = {name: str(round(mean)) for name, mean in row["lengths"].items()}
        words = ["plan", *row["words"], "--gpu", "cpu", "--json"]
        words += ["--prompt-tokens", means["prompt"], "--completion-tokens", means["completion"]]
        print(shlex.join(("rloo", *words)), flush=True)
        got = subprocess.run(
            [sys.executable, "-m", "rloo_cli", *words], check=True, stdout=subprocess.PIPE
        )
        plan = json.loads(got.stdout)
        results.append([{
            "stage": "plan", "of": row["name"], "words": words, "step_s": row["step_s"],
            "planned_step_s": plan["step_seconds"], "parts": plan["step_parts_seconds"],
            "phases": row["phases"], "memory": row["memory"], "device": plan["device"]["source"],
            "planned_bytes": plan["need_bytes"],
        }], ROWS)  # fmt: skip


def plan_table(rows: Sequence[Row]) -> list[str]:
    """One line a run: predicted and measured."""
    lines = [
        "| run | s/step measured | planned | ratio | GiB measured | planned | off |"
        " told at the start |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        took, planned = row["step_s"], row["planned_step_s"]
        held, got = row["memory"]["measured_bytes"], row["memory"]["predicted_bytes"]
        said = row["planned_bytes"]
        cells = [row["of"], f"{took:.1f}", f"{planned:.1f}", f"{planned / took:.2f}"]
        cells += [f"{held / 2**30:.2f}", f"{said / 2**30:.2f}", f"{said / held - 1:+.0%}"]
        cells.append(f"{got / 2**30:.2f} ({got / held - 1:+.0%})")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


# The page.


def page() -> None:
    """Write what stands between the marks of docs/results/real_model.md, and the pictures."""
    path = DOCS / "results/real_model.md"
    text = path.read_text(encoding="utf-8")
    for stage in (*STAGES, "plan"):
        rows = rows_of(stage)
        begin, end = BEGIN.format(stage), END.format(stage)
        if not rows or begin not in text:
            continue
        if stage == "plan":
            made = "\n".join(plan_table(rows))
        else:
            draw(stage, rows)
            compared = [
                line for row in rows_of(f"{stage}-compared")[-1:] for line in ("", row["text"])
            ]
            made = "\n".join([*pictures(stage), *table(stage, rows), *compared, *samples(rows[-1])])
        head, tail = text[: text.index(begin) + len(begin)], text[text.index(end) :]
        text = f"{head}\n\n{made}\n\n{tail}"
    path.write_text(text, encoding="utf-8")
    print(path)


def pictures(stage: str) -> list[str]:
    return [f"![held-out score by step](../real_model_{stage}.svg)", ""]


def table(stage: str, rows: Sequence[Row]) -> list[str]:
    """One line a run: how its held-out scores began and ended."""
    parts = [name for name in rows[0]["curve"][0] if name not in ("step", "seconds")]
    parts = parts if len(parts) > 2 else parts[:1]  # of one reward, only the score
    lines = [
        f"| run | steps | minutes of training | s/step | GiB | {' | '.join(parts)} |",
        f"|---|---|---|---|---|{'---|' * len(parts)}",
    ]
    for row in rows:
        first, last = row["curve"][0], row["curve"][-1]
        cells = [f"{first.get(p, 0.0):.3f} → {last.get(p, 0.0):.3f}" for p in parts]
        lines.append(
            f"| {label(row)} | {row['steps']} | {row['train_s'] / 60:.1f} | {row['step_s']:.1f} |"
            f" {row['memory'].get('measured_bytes', 0) / 2**30:.1f} | {' | '.join(cells)} |"
        )
    commands = [shlex.join(("rloo", *command(stage, words))) for words in STAGES[stage]]
    if stage in COMPARED:
        commands.append(f"rloo compare '{ROOT / stage}/*'")
    return [*lines, "", f"{rows[-1]['machine']}.", "", "```", *commands, "```"]


def label(row: Row) -> str:
    """A run by what the command line changed."""
    changed = [w for w in row["words"] if not w.startswith(("+recipe=", "name=", "generation="))]
    return ", ".join(w.lstrip("+").rpartition(".")[2] for w in changed) or "the recipe"


def samples(row: Row) -> list[str]:
    """Held-out prompts of a run with the answers before and after."""
    lines = ["", f"Held-out prompts of the last run ({label(row)}), evenly drawn:", ""]
    lines += ["| prompt | before | after |", "|---|---|---|"]
    for shown in row["answers"]:
        cells = (shown["prompt"], shown["before"], shown["after"])
        before, after = (f" ({shown[f'score_{when}']:g})" for when in ("before", "after"))
        texts = [cell_text(text) for text in cells]
        lines.append(f"| {texts[0]} | {texts[1]}{before} | {texts[2]}{after} |")
    return lines


def cell_text(text: str | list[Row]) -> str:
    """Text, or the last message of a conversation, in a cell of a table, shortened."""
    text = text if isinstance(text, str) else str(text[-1]["content"])
    flat = " ⏎ ".join(line.strip() for line in text.strip().splitlines() if line.strip())
    flat = flat if len(flat) <= 300 else f"{flat[:300]} …"
    return flat.replace("|", "\\|").replace("<", "&lt;")


def draw(stage: str, rows: Sequence[Row]) -> None:
    """Held-out scores by step, a line a run."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = stage
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.2, 3.8), layout="constrained")
    for row, color in zip(rows, COLORS * len(rows), strict=False):
        xs, ys = ([point[name] for point in row["curve"]] for name in ("step", "score"))
        axes.plot(xs, ys, color=color, linewidth=2, marker="o", markersize=3, label=label(row))
    axes.set_xlabel("step of 64 completions")
    axes.set_ylabel("held-out score, greedy")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(DOCS / f"real_model_{stage}.svg", metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    stages = [*STAGES, "plan"]
    parser.add_argument("--stages", nargs="+", default=stages, choices=stages)
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--dry-run", action="store_true", help="only print the commands")
    given: Any = parser.parse_args()
    for stage in [] if given.page else given.stages:
        if stage in STAGES:
            do(stage, given)
        elif not given.dry_run:
            plan_all()
    if not given.dry_run:
        page()


if __name__ == "__main__":
    main()
