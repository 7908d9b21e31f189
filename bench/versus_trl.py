"""One training step, `rloo` against TRL 1.16's RLOOTrainer: same model, prompts, K and settings.

    python bench/versus_trl.py --workload W1 --rounds 3
    python bench/versus_trl.py --workload W2-K4 --rounds 3 --untouched
    python bench/versus_trl.py --one trl_best --workload W1       one tool alone, JSON

On a CPU: one thread, float32, transformers samples in both. Every tool has a fresh process of its
own and they take turns, A B C A B C, one at work while the others wait. First all of them train
on the same recorded completions, from the same weights, with a reference that is not the policy,
and their whole gradients before clipping are compared (relative L2 distance): without a match
below 1e-4 there is no ratio, and the exit code is 1. Then one whole step that is not counted, then
the rounds: each a whole step of every tool (prompts, generate, score, reference, update, optimizer,
log line), and the train phase alone of every tool (TRL: old, reference and training passes and the
optimizer; `rloo`: the same without the old pass) on the recorded completions.

The columns:

    trl_default    TRL's defaults: gradient checkpointing, micro-batches of 8. Its head on the
                   completions' rows alone, which is what it does on a GPU: forced (`compact_head`)
    trl_best       the fastest settings found, by a search at the start of the run: checkpointing
                   off, head as above, and the batch in 1, 2 or 4 micro-batches, each for one step
                   that does not count and three that do; the median of the processor's seconds
                   decides (`--micro 16` skips the search).
                   Tried by hand: transformers' continuous batching, which took 13 s for W1's
                   completions where `generate` takes 2.5, and did not keep to their length.
                   Not tried: torch.compile; half precision, which a CPU has no use for here. Data
                   loading, logging every 10 steps and the rest are its defaults
    trl_untouched  TRL as it comes on a CPU, its head on every row (only with `--untouched`)
    rloo           this package with its default settings: the same objective, exactly

A ratio is TRL's seconds by `rloo`'s: of medians, and the smallest and largest of a round.
Peak memory is the most the whole process ever held (VmHWM: Python and torch, about 500 MB, and the
loaded weights included), so `peak_ratio`, `rloo` by TRL best, is nearer to 1 than that of the
tensors; the rows also say how much of it came after everything was loaded (`above_base_mb`).
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}

import results
import torch
import toys
from rows import MATCH, TOOLS, Measured, brief, rows_of, show
from shapes import ON_CPU, SHAPES
from sides import Orders

HERE, SEED = Path(__file__).resolve(), 1
Answer = dict[str, Any]


class Child:
    """One tool in a process of its own."""

    def __init__(self, tool: str, workload: str, folder: Path, micro: int):
        self.tool, self.micro = tool, micro
        self.errors = folder / f"{tool}-{micro}.txt"
        words = ["--one", tool, "--workload", workload, "--micro", str(micro)]
        self.process = subprocess.Popen(
            [sys.executable, str(HERE), *words, "--folder", str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors.open("w"), text=True,
        )  # fmt: skip
        self.ready = self.heard()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def heard(self) -> Answer:
        """Its next line; ends this program with what it said when it has died."""
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.tool} ended:\n{self.errors.read_text()[-3000:]}")
        return json.loads(line)

    def ask(self, do: str, **order: Any) -> Answer:
        """One order, and its answer."""
        print(json.dumps({"do": do, **order}), file=self.process.stdin, flush=True)
        return self.heard()


def search(workload: str, folder: Path, rounds: int = 3) -> dict[int, float]:
    """Seconds of a whole step of TRL without checkpointing, by the size of its micro-batches.

    The processor's: a choice between near equals should not hang on what else the machine does.
    """
    batch = SHAPES[workload].batch
    with ExitStack() as held:
        tried = [
            held.enter_context(Child("trl_best", workload, folder, batch // parts))
            for parts in (1, 2, 4)
        ]
        seconds: dict[int, list[float]] = {child.micro: [] for child in tried}
        for number in range(rounds + 1):
            for child in tried:
                spent = child.ask("step")["cpu"]
                seconds[child.micro] += [spent] if number else []
    return {micro: statistics.median(each) for micro, each in seconds.items()}


def apart(a: Path, b: Path) -> float:
    """Relative L2 distance of two whole gradients."""
    one, other = torch.load(a), torch.load(b)
    if one.keys() != other.keys():
        sys.exit(f"gradients of different parameters: {sorted(one.keys() ^ other.keys())[:5]}")
    gap = sum(float((one[n].double() - other[n].double()).square().sum()) for n in other)
    return (gap / sum(float(g.double().square().sum()) for g in other.values())) ** 0.5


def compared(children: list[Child], rows: list[Any], folder: Path) -> dict[str, float]:
    """How far TRL's gradients are from ours, by tool. All train once, from the same weights."""
    for child in children:
        child.ask("train", rows=rows, gradient=str(folder / f"{child.tool}.pt"))
    mine = folder / "rloo.pt"
    return {c.tool: apart(mine, folder / f"{c.tool}.pt") for c in children if c.tool != "rloo"}


def measure(args: argparse.Namespace) -> Measured:
    """All tools, in turns. Ends the program where a gradient is another."""
    shape, found = SHAPES[args.workload], Measured(args.workload, SEED)
    tools = [t for t in TOOLS if t != "trl_untouched" or args.untouched]
    with tempfile.TemporaryDirectory(prefix="rloo-bench-") as root, ExitStack() as held:
        folder = Path(root)
        toys.write(shape, folder, SEED)
        found.peak_gflops = peak_gflops()
        best = args.micro or shape.batch
        if not args.micro:
            found.searched = search(args.workload, folder)
            best = min(found.searched, key=found.searched.__getitem__)
        for tool in tools:
            micro = best if tool == "trl_best" else 8
            child = held.enter_context(Child(tool, args.workload, folder, micro))
            found.children.append(child)
        rloo = next(child for child in found.children if child.tool == "rloo")
        rows = rloo.ask("record")["rows"]
        found.lengths = [(len(prompt), len(completion)) for prompt, completion in rows]
        low, high = shape.prompt
        assert all(low <= prompt <= high for prompt, _ in found.lengths), "prompts of other lengths"
        found.gradients = compared(found.children, rows, folder)
        print("gradients apart from rloo's:", found.gradients, file=sys.stderr)
        if not all(gap < MATCH for gap in found.gradients.values()):
            sys.exit(f"no gradient match below {MATCH}: {found.gradients}; so no ratio")
        for number in range(args.rounds + 1):
            found.load.append(os.getloadavg()[0])
            for child in found.children:
                found.add(child.tool, "step", child.ask("step"), number)
            for child in found.children if number else ():
                got = child.ask("train", rows=rows, gradient=None)
                found.add(child.tool, "train", got, number)
    return found


def peak_gflops() -> float:
    """What this core does at most: a product of matrices that fit its caches, in float32.

    By the process's own clock, which others on the machine disturb less.
    """
    torch.set_num_threads(1)
    a, b, best = torch.randn(1024, 1024), torch.randn(1024, 1024), 0.0
    for _ in range(8):
        began = time.process_time()
        torch.mm(a, b)
        best = max(best, 2 * 1024**3 / (time.process_time() - began) / 1e9)
    return best


def one(args: argparse.Namespace) -> None:
    """A tool's process: obey, in the folder of the program that started it."""
    orders = Orders()
    torch.set_num_threads(1)
    shape, micro = SHAPES[args.workload], args.micro or 8
    if args.tool == "rloo":
        import side_rloo

        side_rloo.serve(shape, args.folder, SEED, orders)
        return
    import side_trl

    side_trl.serve(shape, args.folder, SEED, orders, args.tool.removeprefix("trl_"), micro)


def alone(args: argparse.Namespace) -> None:
    """One tool without the others, in a fresh process: its seconds, memory and GFLOP, as JSON."""
    shape = SHAPES[args.workload]
    with tempfile.TemporaryDirectory(prefix="rloo-bench-") as root:
        toys.write(shape, Path(root), SEED)
        micro = args.micro or (shape.batch if args.tool == "trl_best" else 8)
        with Child(args.tool, args.workload, Path(root), micro) as child:
            steps = [child.ask("step", count=not number) for number in range(args.rounds + 1)]
            gflop = steps[0]["gflop"]  # of the step that is not timed
            said = {"tool": args.tool, **child.ready, "gflop": gflop, "steps": steps[1:]}
            print(json.dumps(said))


def main() -> None:
    """Measure, print, append."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workload", choices=ON_CPU, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--untouched", action="store_true", help="TRL's head on every row as well")
    parser.add_argument("--micro", type=int, help="TRL best's micro-batch; default: search")
    parser.add_argument("--one", dest="tool", choices=TOOLS, help="only this tool, as JSON")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--dry", action="store_true", help="append nothing to results.jsonl")
    args = parser.parse_args()
    if args.folder is not None:
        return one(args)
    if args.tool is not None:
        return alone(args)
    if platform.system() != "Linux":
        sys.exit("peak memory is read from /proc: Linux only")
    found = measure(args)
    rows = rows_of(found)
    if not args.dry:
        results.append(rows)
    show(rows)
    print(json.dumps(brief(rows)))


if __name__ == "__main__":
    main()
