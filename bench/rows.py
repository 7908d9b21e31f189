"""What `versus_trl.py` measured -> rows of results.jsonl, a table, and the line that sums it up."""

import os
import platform
import statistics
import subprocess
import time
from collections import defaultdict
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from ratios import crowded, ratio
from results import Row
from rich.console import Console
from rich.table import Table
from shapes import SHAPES, Shape
from sides import BETA

TOOLS = ("trl_default", "trl_best", "trl_untouched", "rloo")  # the order of a round
MATCH = 1e-4  # relative L2 distance of the gradients; 1e-6 is usual
NOTES = {
    "trl_default": "gradient checkpointing, micro-batches of 8, head on completion rows (forced)",
    "trl_best": "no gradient checkpointing, head on completion rows (forced)",
    "trl_untouched": "gradient checkpointing, micro-batches of 8, head on every row",
    "rloo": "package defaults",
}


@dataclass
class Measured:
    """Everything one run of the program found."""

    workload: str
    seed: int
    children: list[Any] = field(default_factory=list)
    searched: dict[int, float] = field(
        default_factory=dict
    )  # cpu seconds by micro-batch of TRL best
    lengths: list[tuple[int, int]] = field(default_factory=list)  # prompt, completion
    gradients: dict[str, float] = field(default_factory=dict)
    load: list[float] = field(default_factory=list)
    answers: dict[tuple[str, str], list[Row]] = field(default_factory=lambda: defaultdict(list))
    peak: dict[str, float] = field(default_factory=dict)
    peak_gflops: float = 0.0

    def add(self, tool: str, kind: str, answer: Row, number: int) -> None:
        """Keep an answer; of round 0 its peak memory alone."""
        self.peak[tool] = answer["peak"]
        if number:
            self.answers[tool, kind].append(answer)


def rows_of(found: Measured) -> list[Row]:
    """One row for each tool."""
    when = time.strftime("%Y-%m-%dT%H:%M:%S")
    return [row_of(found, child, when) for child in found.children]


def row_of(found: Measured, child: Any, when: str) -> Row:
    """One tool's line of results.jsonl."""
    shape, tool = SHAPES[found.workload], child.tool
    step, train = found.answers[tool, "step"], found.answers[tool, "train"]
    computed = round(statistics.median(a["computed"] for a in train))
    # On a crowded machine the wall's seconds say little: see `ratios.crowded`.
    clock = "cpu" if max(found.load) > (os.cpu_count() or 1) else "seconds"
    seconds, of_train = (statistics.median(a[clock] for a in each) for each in (step, train))
    passes = 4 + any("old_logp" in a["split"] for a in train)  # reference 1, forward 1, backward 2
    work = flops(shape, passes, child.ready["body"], computed, found.lengths)
    mfu = work / of_train / found.peak_gflops / 1e9
    return {
        **surroundings(tool, when),
        "workload": found.workload,
        "seed": found.seed,
        "level": child.ready["level"],
        "attention": child.ready["attention"],
        "K": shape.k,
        "B": shape.batch,
        "beta": BETA,
        "gc": tool in ("trl_default", "trl_untouched"),
        "micro_batch": child.micro if tool != "rloo" else None,
        "steps": len(step),
        "warmup": 1,
        **spread(step, "step"),
        **spread(train, "train"),
        "split": split(step),
        "train_split": split(train),
        "tokens": tokens(found.lengths) | {"computed": computed},
        "completions_per_s": shape.batch / seconds,
        "mfu": round(mfu, 4),
        "roofline": round(found.peak_gflops, 1),
        "peak_mb": round(found.peak[tool], 1),
        "base_mb": round(child.ready["base"], 1),
        "above_base_mb": round(found.peak[tool] - child.ready["base"], 1),
        "loadavg": max(found.load),
        "gradient_rel_diff": found.gradients.get(tool),
        "note": note(found, tool),
    }


def surroundings(tool: str, when: str) -> Row:
    """What was run, and on what."""
    return {
        "tool": "rloo" if tool == "rloo" else "trl",
        "version": version("rloo-cli"),
        "commit": commit(),
        "setting": "exact" if tool == "rloo" else tool.removeprefix("trl_"),
        "device": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "peer_version": version("trl"),
        "dtype": "float32",
        "date": when,  # the same in all rows of a run: it is what ties them together
    }


def spread(answers: list[Row], kind: str) -> Row:
    """Seconds by the wall and of the process: the median, and every round."""
    wall, cpu = [a["seconds"] for a in answers], [a["cpu"] for a in answers]
    return {
        f"s_{kind}": statistics.median(wall),
        f"cpu_s_{kind}": statistics.median(cpu),
        f"s_{kind}s": [round(s, 4) for s in wall],
        f"cpu_s_{kind}s": [round(s, 4) for s in cpu],
    }


def split(answers: list[Row]) -> dict[str, float]:
    """Median seconds of each phase."""
    names = sorted({name for a in answers for name in a["split"]})
    each = {n: statistics.median(a["split"].get(n, 0.0) for a in answers) for n in names}
    return {name: round(s, 4) for name, s in each.items() if s >= 5e-5}


def tokens(lengths: list[tuple[int, int]]) -> dict[str, int]:
    """Token positions of the recorded batch: padded to its longest, and real ones."""
    prompts, completions = zip(*lengths, strict=True)
    padded = len(lengths) * (max(prompts) + max(completions))
    return {"padded": padded, "real": sum(prompts) + sum(completions)}


def flops(
    shape: Shape, passes: int, parameters: int, computed: int, lengths: list[tuple[int, int]]
) -> float:
    """Of the train phase: forwards and backward on the rows computed, the head on completions.

    Recomputing (checkpointing, the head) is not counted, nor is attention between tokens.
    """
    head = shape.hidden * shape.vocabulary * sum(completion for _, completion in lengths)
    return passes * 2.0 * (parameters * computed + head)


def note(found: Measured, tool: str) -> str:
    """The setting in words."""
    if tool != "trl_best":
        return NOTES[tool]
    tried = ", ".join(f"{micro}: {s:.2f} s" for micro, s in sorted(found.searched.items()))
    micro = next(child.micro for child in found.children if child.tool == tool)
    how = f"search, processor's seconds per step by micro-batch: {tried}" if tried else "no search"
    return f"{NOTES[tool]}, micro-batches of {micro}; {how}"


def commit() -> str | None:
    """The revision of this repository, and whether the package has been changed since."""
    here = Path(__file__).resolve().parents[1]
    asked = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        said = subprocess.run(asked, cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return said.stdout.strip()


def brief(rows: list[Row]) -> Row:
    """The line that sums a run up: ratios of seconds are TRL's by ours, of memory ours by TRL's."""
    by = {row["setting"]: row for row in rows}
    ours, best = by["exact"], by["best"]
    return {
        "workload": ours["workload"],
        "ratio_default": round(ratio(by["default"], ours, "step")[0], 3),
        "ratio_best": round(ratio(best, ours, "step")[0], 3),
        "train_ratio_default": round(ratio(by["default"], ours, "train")[0], 3),
        "train_ratio_best": round(ratio(best, ours, "train")[0], 3),
        "peak_ratio": round(ours["peak_mb"] / best["peak_mb"], 3),
        "gradient_rel_diff": max(row["gradient_rel_diff"] or 0.0 for row in rows),
    }


def show(rows: list[Row]) -> None:
    """The table."""
    table = Table("tool", "s/step", "cpu s", "ratio", "s/train", "cpu s", "ratio", "peak MB",
                  "above base", "computed")  # fmt: skip
    ours = next(row for row in rows if row["tool"] == "rloo")
    for row in rows:
        cells = [row["tool"] if row is ours else f"TRL {row['setting']}"]
        for kind in ("step", "train"):
            middle, low, high = ratio(row, ours, kind)
            cells += [f"{row[f's_{kind}']:.2f}", f"{row[f'cpu_s_{kind}']:.2f}"]
            cells.append("" if row is ours else f"{middle:.2f} ({low:.2f}-{high:.2f})")
        cells += [f"{row['peak_mb']:.0f}", f"{row['above_base_mb']:.0f}"]
        table.add_row(*cells, str(row["tokens"]["computed"]))
    console = Console(width=120)
    console.print(table)
    for row in rows:
        console.print(f"{row['tool']} {row['setting']}: {row['split']}", highlight=False)
    if crowded(ours):
        console.print(f"load average {ours['loadavg']:.1f} on {ours['cores']} cores: wall seconds"
                      " say little, read the processor's")  # fmt: skip
