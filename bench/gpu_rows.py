"""What `gpu.py` measured -> rows of results.jsonl, a table, and the line that sums it up."""

import platform
import statistics
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from gpu_parts import Case, Variant
from results import Row
from rich.console import Console
from rich.table import Table
from rows import commit
from shapes import Shape
from sides import BETA

from rloo_cli.data.bin_packing import ForwardCost as Cost
from rloo_cli.policy.memory import model_forward_cost

__all__ = ["brief", "model_forward_cost", "rows_of", "show"]

# Relative distance of gradients beyond which there is no ratio. bfloat16 rounds to .004, and a
# gradient is a small difference of large sums; float32 is where layouts are proved equal.
MATCH = {"float32": 1e-4, "bfloat16": 0.1}
# Where float32 is known: times as far from it as TRL, plus. bfloat16 weights round between layers
# too, autocast does not: 1.4 to 2 times as far on a CPU.
FARTHER = 2.0, 0.02


def work(cost: Cost, case: Case, variant: Variant) -> tuple[float, float, int]:
    """FLOP of one forward's body and of its head, and the rows it computes.

    A row of the head for each completion token; causal pairs, also where a kernel masks them.
    """
    rows, pairs, tokens = 0, 0.0, 0
    width = max(p for p, _ in case.lengths) + max(max(cs) for _, cs in case.lengths)
    for p, cs in case.lengths:
        tokens += sum(cs)
        inner = [c - 1 for c in cs]  # the last token predicts nothing
        if variant.layout == "padded":
            rows += width * len(cs)
            pairs += len(cs) * width**2 / 2
        elif variant.layout == "packed" or variant.alone:
            rows += sum(p + c for c in inner)
            pairs += sum((p + c) ** 2 / 2 for c in inner)
        else:
            rows += p + sum(inner)
            pairs += p**2 / 2 + sum(c * p + c**2 / 2 for c in inner)
    body = 2.0 * cost.layer_params * rows + 4.0 * cost.num_layers * cost.attention_width * pairs
    return body, 2.0 * cost.hidden_size * cost.vocab_size * tokens, rows


def done(
    cost: Cost, case: Case, variant: Variant, size: int, adapters: bool = False
) -> tuple[float, float, int]:
    """FLOP of a train phase, those of it that are recomputing on top, and rows of a forward.

    `adapters`: they alone are trained, so that backward is once and not twice.
    """
    body, head, rows = work(cost, case, variant)
    passes = (5 if variant.tool == "trl" else 4) - adapters  # (old,) reference, forward, backward
    tokens = [sum(cs) for _, cs in case.lengths]
    largest = max(sum(tokens[i : i + size]) for i in range(0, len(tokens), size))
    kept = largest * cost.vocab_size * 2 <= variant.keep
    again = (body if variant.gc else 0.0) + (0.0 if kept else head)
    return passes * (body + head), again, rows


def rows_of(
    shape: Shape, case: Case, found: dict[str, Any], device: torch.device, peak: float
) -> list[Row]:
    """One row for each variant that fits, and was timed."""
    when = time.strftime("%Y-%m-%dT%H:%M:%S")
    base = found["trl_nogc"].logp if "trl_nogc" in found else None
    return [
        surroundings(device, when)
        | {"workload": shape.name, "K": shape.k, "B": shape.batch, "beta": BETA}
        | row_of(each, case, base, device, peak)
        for each in found.values()
        if each.seconds
    ]


def surroundings(device: torch.device, when: str) -> Row:
    """On what, and with what."""
    gpu = device.type == "cuda"
    try:
        peer = version("trl")
    except PackageNotFoundError:
        peer = None
    return {
        "version": version("rloo-cli"),
        "commit": commit(),
        "device": torch.cuda.get_device_name(device) if gpu else platform.machine(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "peer_version": peer,
        "dtype": "bfloat16" if gpu else "float32",
        "date": when,
    }


def row_of(
    found: Any, case: Case, base: torch.Tensor | None, device: torch.device, peak: float
) -> Row:
    """One variant's figures."""
    variant, seconds = found.variant, found.seconds
    middle = statistics.median(seconds)
    flop, again, rows = done(found.shape, case, variant, found.size, found.adapters)
    apart = None if base is None else (found.logp - base).abs()
    gpu = device.type == "cuda"
    return {
        "tool": variant.tool,
        "setting": "exact" if variant.tool == "rloo" else variant.name.removeprefix("trl_"),
        "variant": variant.name,
        "level": found.level,
        "attention": found.attention,
        "gc": variant.gc,
        "micro_groups": found.size,
        "rounds": len(seconds),
        "s_train": middle,
        "s_train_least": min(seconds),
        "s_train_most": max(seconds),
        "s_trains": [round(s, 5) for s in seconds],
        "peak_mb": round(found.peak / 2**20, 1) if gpu else None,
        "base_mb": round(found.base / 2**20, 1) if gpu else None,
        "mfu": round(flop / middle / peak, 4),
        "mfu_with_recompute": round((flop + again) / middle / peak, 4),
        "roofline": round(peak / 1e9, 1),  # GFLOP/s
        "tokens": {"computed": rows, "real": sum(p * len(cs) + sum(cs) for p, cs in case.lengths)},
        "logp_diff": None if apart is None else float(apart.mean()),
        "logp_diff_most": None if apart is None else float(apart.max()),
        "gradient_rel_diff": found.gradient.get("trl_nogc"),
        "gradient_rel_fp32": found.gradient.get("fp32"),
        "note": variant.note,
    }


def equal(rows: list[Row]) -> bool:
    """Whether all variants have the same gradient, as far as their precision can tell."""
    exact = {row["variant"]: row["gradient_rel_fp32"] for row in rows}
    if exact.get("trl_nogc") is not None:
        most = FARTHER[0] * exact["trl_nogc"] + FARTHER[1]
        return all(gap is not None and gap <= most for gap in exact.values())
    gaps = [row["gradient_rel_diff"] for row in rows if row["variant"] != "trl_nogc"]
    return bool(gaps) and all(g is not None and g <= MATCH[rows[0]["dtype"]] for g in gaps)


def brief(workload: str, rows: list[Row]) -> Row:
    """The last line. Ratios are TRL's seconds by those of `rloo`'s fastest shared variant; null
    where a variant is missing, and where gradients do not match.
    """
    by = {row["variant"]: row for row in rows}
    ours = min(
        (row for row in rows if row["variant"] in ("shared", "shared_gc")),
        key=lambda row: row["s_train"], default=None,
    )  # fmt: skip
    gaps = [row["gradient_rel_diff"] for row in rows if row["gradient_rel_diff"] is not None]
    same = equal(rows)

    def ratio(name: str, value: str) -> float | None:
        if not same or ours is None or name not in by or by[name][value] is None:
            return None
        return round(by[name][value] / ours[value], 3)

    return {
        "workload": workload,
        "ratio_gc": ratio("trl_gc", "s_train"),
        "ratio_nogc": ratio("trl_nogc", "s_train"),
        "memory_ratio_gc": ratio("trl_gc", "peak_mb"),
        "memory_ratio_nogc": ratio("trl_nogc", "peak_mb"),
        "ours": None if ours is None else ours["variant"],
        "ms": None if ours is None else round(1000 * ours["s_train"], 2),
        "mfu": None if ours is None else ours["mfu"],
        "gradient_rel_diff": max(gaps, default=None),
        "gradient_rel_fp32": {r["variant"]: r["gradient_rel_fp32"] for r in rows}
        if any(row["gradient_rel_fp32"] is not None for row in rows)
        else None,
    }


def show(shape: Shape, rows: list[Row]) -> None:
    """The table."""
    table = Table("variant", "ms", "least - most", "peak GB", "MFU", "with recompute", "rows",
                  "groups", "logp off", "gradient off", "from float32")  # fmt: skip
    for row in rows:
        peak = "-" if row["peak_mb"] is None else f"{row['peak_mb'] / 1024:.1f}"
        gaps = [row[name] for name in ("logp_diff", "gradient_rel_diff", "gradient_rel_fp32")]
        table.add_row(
            row["variant"], f"{1000 * row['s_train']:.1f}",
            f"{1000 * row['s_train_least']:.1f} - {1000 * row['s_train_most']:.1f}", peak,
            f"{row['mfu']:.1%}", f"{row['mfu_with_recompute']:.1%}",
            str(row["tokens"]["computed"]), str(row["micro_groups"]),
            *("-" if gap is None else f"{gap:.1e}" for gap in gaps),
        )  # fmt: skip
    console = Console(width=132)
    console.print(f"{shape.name} {shape.title}: {shape}", highlight=False)
    console.print(table)
    if rows:
        some = rows[0]
        console.print(f"{some['device']}, torch {some['torch']}, {some['roofline'] / 1000:.1f}"
                      " TFLOP/s in a matrix product", highlight=False)  # fmt: skip
