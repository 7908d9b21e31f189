"""Makes docs/results/speed.md from bench/results.jsonl: each figure is a row there.

    python bench/speed_page.py            writes the page
    python bench/speed_page.py --check    exits with 1 where the page is not what would be written

Of each workload on each device the latest run is shown, all of its rows: also those where `rloo`
loses, marked. Workloads for a GPU are on docs/results/gpu.md. No torch is imported.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import results
from ratios import crowded, ratio
from results import Row
from shapes import SHAPES, Shape

PAGE = Path(__file__).resolve().parents[1] / "docs" / "results/speed.md"
LOSES = "**`rloo` loses**"
NAMES = {"default": "TRL default", "best": "TRL best found", "untouched": "TRL untouched"}
HEAD = """\
# Speed

<!-- Made by `python bench/speed_page.py` from bench/results.jsonl: change those, not this page. -->

Seconds and memory of a training step by `rloo` and by TRL's RLOOTrainer, on a CPU. Both get the
same model, prompts, lengths, K, temperature, beta, learning rate and clipping, on the same machine.
The models are small and random, so the figures say nothing about scores. The benchmark reports a
ratio only if both tools compute the same gradient on the same completions.

How it is measured:

- Run `python bench/versus_trl.py --workload W1 --rounds 3` (also `W2-K4`, `W2-K2`; `--untouched`).
  It uses one thread and float32. Each tool has its own process, and they take turns. A step before
  the first round is not counted.
- **TRL default** has gradient checkpointing. **TRL best found** has none, and the fastest of three
  micro-batch sizes. Both compute the head on the completions' rows alone, as TRL does on a GPU.
  **TRL untouched** is TRL as it runs on a CPU.
- The train phase starts when completions are scored: old and reference log-probabilities, forward,
  backward, optimizer. It is measured on identical completions.
- Seconds are medians over the rounds, with minimum and maximum. A ratio is TRL's seconds divided by
  those of `rloo`. On a busy machine seconds are CPU time, else wall time.
- Memory is the peak of the whole process, and the part of it above the memory after loading.
- Rows that `rloo` loses are kept and marked.
"""


def page(rows: Sequence[Row]) -> str:
    """The whole page."""
    parts = [HEAD]
    for shape in SHAPES.values():
        parts.append(f"## {shape.name}: {shape.title}\n\n{shape}.\n")
        found = latest(shape, rows)
        if shape.device == "cuda":
            parts.append("On a GPU: [docs/results/gpu.md](gpu.md).\n")
        elif not found:
            parts.append("Not yet run.\n")
        parts += [section(run) for run in found]
    parts.append(sampling([row for row in rows if row["workload"] == "rollout"]))
    return "\n".join(parts)


def latest(shape: Shape, rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of the last run of a workload on each device."""
    mine = [row for row in rows if row["workload"] == shape.name]
    dates = {row["device"]: row["date"] for row in mine}
    return [[row for row in mine if (row["device"], row["date"]) == run] for run in dates.items()]


def section(run: list[Row]) -> str:
    """One run: its table, and what else is known of it."""
    ours = next(row for row in run if row["tool"] == "rloo")
    clock = "cpu_s" if crowded(ours) else "s"
    title = (
        "| | s per step | ratio | s per train phase | ratio | peak MB | of it on top |\n"
        "|---|---|---|---|---|---|---|"
    )
    theirs = sorted(
        (row for row in run if row is not ours), key=lambda r: [*NAMES].index(r["setting"])
    )
    lines = [title, *(line(row, ours, clock) for row in theirs), line(ours, ours, clock)]
    return "\n".join(lines) + "\n\n" + "\n".join(facts(run, ours)) + "\n"


def line(row: Row, ours: Row, clock: str) -> str:
    """One tool's line of a run's table."""
    cells = ["`rloo`" if row is ours else NAMES[row["setting"]]]
    for kind in ("step", "train"):
        each = row[f"{clock}_{kind}s"]
        cells.append(f"{row[f'{clock}_{kind}']:.2f} ({min(each):.2f} - {max(each):.2f})")
        cells.append("" if row is ours else compared(*ratio(row, ours, kind, clock)))
    peak = f"{row['peak_mb']:.0f}"
    if row["peak_mb"] < ours["peak_mb"]:
        peak += f" {LOSES}"
    return "| " + " | ".join([*cells, peak, f"{row['above_base_mb']:.0f}"]) + " |"


def compared(middle: float, low: float, high: float) -> str:
    """A ratio with its range; marked where `rloo` is the slower one."""
    return f"{middle:.2f}x ({low:.2f} - {high:.2f})" + (f" {LOSES}" if middle < 1 else "")


def facts(run: list[Row], ours: Row) -> list[str]:
    """What the table has no room for."""
    apart = max(row["gradient_rel_diff"] or 0.0 for row in run)
    clock = "the processor's seconds" if crowded(ours) else "seconds by the wall"
    lines = [
        f"- {ours['date'][:10]}, {ours['device']}, {ours['threads']} thread, {ours['dtype']};"
        f" {len(ours['s_steps'])} rounds; load average {ours['loadavg']:.1f} on"
        f" {ours['cores']} cores, so {clock}; rloo {ours['version']} at {ours['commit']}, TRL"
        f" {ours['peer_version']}, transformers {ours['transformers']}, torch {ours['torch']}.",
        f"- Whole gradients differ by {apart:.1e} (relative L2 distance, before clipping).",
        f"- `rloo`'s rows are {ours['level']}, attention {ours['attention']}. Token positions of"
        f" the recorded batch: {ours['tokens']['real']} real,"
        f" {ours['tokens']['padded']} padded; each training forward computes"
        f" {ours['tokens']['computed']} in `rloo`,"
        f" {max(row['tokens']['computed'] for row in run if row is not ours)} in TRL.",
    ]
    for row in run:
        name = "`rloo`" if row is ours else NAMES[row["setting"]]
        phases = ", ".join(f"{n} {s:.2f}" for n, s in row["split"].items() if s >= 0.005)
        lines.append(
            f"- {name}: {row['note']}. Seconds of a step by the wall: {phases}."
            f" {row['completions_per_s']:.1f} completions/s; the train phase reaches"
            f" {row['mfu']:.0%} of the core's {row['roofline']:.0f} GFLOP/s."
        )
    return lines


def sampling(rows: Sequence[Row]) -> str:
    """The rows of `bench/rollout.py`: the latest of each sampler, model and device."""
    title = (
        "## Sampling alone\n\n`python bench/rollout.py`: who samples how fast, on the same prompts"
        " and model. Seconds per batch are medians, with the least and the most; weights are sent"
        " to vLLM's engine after every update.\n"
    )
    if not rows:
        return f"{title}\nNot yet run.\n"
    last = {(r["device"], r["parameters"], r["backend"]): r for r in rows}
    lines = [
        title,
        "| device, parameters | sampler | s per batch | completions/s | tokens/s | s per sync | |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in last.values():
        name = "TRL, transformers" if row["tool"] == "trl" else f"`rloo` {row['backend']}"
        theirs = last.get((row["device"], row["parameters"], "trl"), row)
        slower = row["s_batch"] > theirs["s_batch"]
        sync = "" if row["s_sync"] is None else f"{row['s_sync']:.2f}"
        cells = [
            f"{row['device']}, {row['parameters'] / 1e6:.1f} M",
            name,
            f"{row['s_batch']:.2f} ({row['s_batch_least']:.2f} - {row['s_batch_most']:.2f})",
            f"{row['completions_per_s']:.1f}",
            f"{row['tokens_per_s']:.0f}",
            sync,
            LOSES if slower else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    some = next(iter(last.values()))
    lines.append(
        f"\n{some['B']} completions of {some['length']} tokens per batch, K = {some['K']},"
        f" {some['threads']} thread, vLLM {some['vllm']}, {some['date']}."
    )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page, or say whether it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 where it differs"
    )
    args = parser.parse_args()
    made = page(results.read())
    if not args.check:
        PAGE.write_text(made, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != made:
        sys.exit(
            "docs/results/speed.md is not made from bench/results.jsonl: python bench/speed_page.py"
        )


if __name__ == "__main__":
    main()
