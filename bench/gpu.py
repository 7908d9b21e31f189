"""The train phase of W5, W6 and W7 on one GPU: TRL's order of work against `rloo`'s; W8 to W10.

    python bench/gpu.py                              W5, W7, W6 in 80 GB: 8 layers, and LoRA
    python bench/gpu.py --workloads W6               all of it, in float32 83 GB of weights alone
    python bench/gpu.py --workloads W5 --truth       also against a gradient in float32
    python bench/gpu.py --workloads W8               whole steps of `rloo` with vLLM (gpu_step.py)
    python bench/gpu.py --tiny                       the same program on a CPU, its shapes made tiny

    trl_gc         TRL's defaults: the batch padded once, K copies of a prompt, passes for old and
                   reference log-probabilities, float32 weights under bfloat16 autocast, gradient
                   checkpointing; its own fused head where TRL is installed
    trl_nogc       the same without checkpointing, which it does better with
    packed         `rloo`, prompts repeated, the model's own attention over documents; no old pass
    shared_gc      `rloo`, each prompt once, checkpointing, the head's logits made again
    shared         `rloo`, each prompt once, no checkpointing, up to 2 GB of logits kept
    shared_again, packed_varlen    on demand: no logits kept; our attention, prompts repeated

Random weights from configs, nothing is downloaded. The variants take turns, A B C D E A B .., each
with nothing else on the device; a turn is a phase that does not count and one that does, between
synchronisations. Micro-batches are of eight groups, or of the half as often as memory asks for it,
in each variant for itself. Peaks hold weights, masters, gradients and the reference, and no
optimizer: that is the same in both. Before the rounds every variant's log-probabilities and whole
gradient are compared with `trl_nogc`'s: without a match there is no ratio, and the exit code is 1.
In bfloat16 that says little alone: `--truth` sets all of them beside float32.

MFU is of work that was done: removed rows count nowhere, recomputing (checkpointing, logits) only
in the figure beside it. The ceiling is a bfloat16 matrix product, measured in the same run. Rows go
to bench/results.jsonl, but not those of --tiny.
"""

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import gpu_parts
import gpu_rows
import gpu_step
import results
import torch
from gpu_parts import DEFAULT, VARIANTS, Phase, Variant
from shapes import SHAPES, Shape
from torch import Tensor

PHASES, SEED, GROUPS = ("W5", "W7", "W6-8L", "W6-lora", "W6"), 1, 8
BASE, TRUTH = "trl_nogc", "fp32"
NEEDS = "bench/gpu.py needs a CUDA GPU, and torch sees none here; --tiny tries it on the CPU"


@dataclass
class Found:
    """What is known of one variant of a workload."""

    variant: Variant
    size: int = 0  # groups per micro-batch; 0 = not even one fits
    level: str = ""
    attention: str = ""
    seconds: list[float] = field(default_factory=list)
    peak: int = 0  # bytes, of a phase
    base: int = 0  # bytes, before it
    logp: Tensor | None = None  # (B,)
    gradient: dict[str, float] = field(default_factory=dict)  # distance to each base
    shape: Any = None  # schedule.Shape
    adapters: bool = False  # nothing else is trained


class Bench:
    """One workload: its batch, its variants, what they took."""

    def __init__(self, shape: Shape, names: Sequence[str], device: torch.device):
        self.shape, self.device = shape, device
        self.case = gpu_parts.case(shape, SEED)
        self.found = {name: Found(VARIANTS[name], adapters=shape.lora > 0) for name in names}
        self.bases: dict[str, dict[str, Tensor]] = {}  # gradients, on the CPU in float32

    def run(self, rounds: int) -> dict[str, Found]:
        """Compare, then time in turns."""
        first = [name for name in (TRUTH, BASE) if name in self.found]
        for name in first + [name for name in self.found if name not in first]:
            self.compare(self.found[name])
        self.bases.clear()
        for _ in range(rounds):
            for name, found in self.found.items():
                if found.size and name != TRUTH:
                    self.turn(found)
        return self.found

    def turn(self, found: Found) -> None:
        """Time a phase. Where what fitted once does not now: half of it, and anew."""
        try:
            return self.time(found)
        except torch.OutOfMemoryError:
            found.size, found.peak = found.size // 2, 0
            found.seconds.clear()
        if found.size:
            self.turn(found)

    def build(self, found: Found) -> Phase:
        """A variant's models, alone on the device."""
        clear()
        return gpu_parts.phase(found.variant, self.shape, self.case, self.device, SEED)

    def compare(self, found: Found) -> None:
        """Find how many groups fit; log-probabilities, and how far off the gradient is."""
        phase = self.build(found)
        found.size = min(GROUPS, self.shape.prompts)
        while found.size:
            try:
                found.logp = phase.run(found.size).float().cpu()
                break
            except torch.OutOfMemoryError:
                found.size //= 2
            zero(phase.model)  # outside: the error holds on to what did not fit
            clear()
        if not found.size:
            return
        found.level, found.shape = phase.level, gpu_rows.model_forward_cost(phase.model)
        found.attention = phase.model.config._attn_implementation
        gradient = {n: w.grad for n, w in phase.model.named_parameters() if w.grad is not None}
        for base, known in self.bases.items():
            found.gradient[base] = distance(gradient, known)
        if found.variant.name in (BASE, TRUTH):
            self.bases[found.variant.name] = {n: g.float().cpu() for n, g in gradient.items()}

    def time(self, found: Found) -> None:
        """One phase that does not count and one that does."""
        phase = self.build(found)
        phase.run(found.size)
        zero(phase.model)
        gpu = self.device.type == "cuda"
        if gpu:
            torch.cuda.synchronize()
            found.base = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        phase.run(found.size)
        if gpu:
            torch.cuda.synchronize()
        found.seconds.append(time.perf_counter() - began)
        found.peak = max(found.peak, torch.cuda.max_memory_allocated() if gpu else 0)


def clear() -> None:
    """Give the device's memory back."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def zero(model: Any) -> None:
    """Forget the gradients."""
    for weight in model.parameters():
        weight.grad = None


def distance(gradient: dict[str, Tensor], base: dict[str, Tensor]) -> float:
    """Relative L2 distance of whole gradients."""
    if gradient.keys() != base.keys():
        raise RuntimeError(f"gradients of other weights: {sorted(gradient.keys() ^ base.keys())}")
    apart, size = 0.0, 0.0
    for name, known in base.items():
        known = known.to(gradient[name].device)
        apart += float((gradient[name].float() - known).double().square().sum())
        size += float(known.double().square().sum())
    return (apart / size) ** 0.5


def ceiling(device: torch.device, size: int) -> float:
    """FLOP/s of a matrix product, the best of some: bfloat16 on a GPU, float32 on a CPU."""
    gpu = device.type == "cuda"
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if gpu else torch.float32)
    best = float("inf")
    for _ in range(10):
        a @ a
        if gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(5):
            a @ a
        if gpu:
            torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - began) / 5)
    return 2.0 * size**3 / best


def tiny(shape: Shape) -> Shape:
    """The workload with its model's and its batch's kinds, in a size for a CPU."""
    c = (3, 6) if shape.completion[1] < 100 else (4, 16)
    return replace(
        shape, hidden=64, layers=2, heads=4, kv_heads=2 if shape.kv_heads < shape.heads else 4,
        head_dim=16, mlp=128, vocabulary=512, prompt=(6, 12), completion=c, prompts=GROUPS + 2,
    )  # fmt: skip


def measure(name: str, args: argparse.Namespace, device: torch.device) -> int:
    """One workload's train phase: table, rows, last line. -> 1 where gradients differ"""
    shape = tiny(SHAPES[name]) if args.tiny else SHAPES[name]
    names = list(args.variants) + [TRUTH] * args.truth
    peak = ceiling(device, 256 if args.tiny else 8192)
    found = Bench(shape, names, device).run(args.rounds)
    rows = gpu_rows.rows_of(shape, gpu_parts.case(shape, SEED), found, device, peak)
    gpu_rows.show(shape, rows)
    if not args.tiny:
        results.append(rows)
    said = gpu_rows.brief(name, rows)
    print(json.dumps(said), flush=True)
    return int(not gpu_rows.equal(rows))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--workloads", nargs="+", default=list(PHASES[:-1]), choices=[*PHASES, *gpu_step.STEPS]
    )
    parser.add_argument("--variants", nargs="+", default=DEFAULT, choices=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--truth", action="store_true", help="also a gradient in float32")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, on a CPU too")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, append. -> exit code"""
    args = parse(argv)
    gpu = torch.cuda.is_available()
    if not gpu and not args.tiny:
        print(NEEDS, file=sys.stderr)
        return 2
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    worst = 0
    for name in args.workloads:
        if name in PHASES:
            worst = max(worst, measure(name, args, device))
        else:
            clear()
            gpu_step.measure(name, args.rounds, args.tiny, SEED)
    return worst


if __name__ == "__main__":
    sys.exit(main())
