"""How many completions a forward pass without gradient takes: the automatic size against others.

    python bench/no_grad.py [--workload W1] [--rounds 5]     appends to bench/no_grad.jsonl

A step's old and reference log-probabilities of the same completions, once with
`train.no_grad_batch_size=null`, where passes are as large as `train.micro_batch_tokens` allows, and
once for each fixed number. Rounds go A B C D A B C D after one that is not counted; medians are
shown, and how far log-probabilities are from those of the automatic size.
"""

import argparse
import copy
import json
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import results
import side_rloo
import torch
import toys
from shapes import ON_CPU, SHAPES

from rloo_cli.run import StepProgress
from rloo_cli.train.step import compute_old_logprobs

ROWS = Path(__file__).with_name("no_grad.jsonl")


def measure(workload: str, rounds: int) -> list[dict[str, object]]:
    """A row for each size."""
    shape = SHAPES[workload]
    sizes = [None, *sorted({shape.k, 2 * shape.k, shape.batch})]
    with tempfile.TemporaryDirectory() as folder:
        toys.write(shape, Path(folder), 0)
        run = side_rloo.build(shape, Path(folder), 0)
        batch = run.rollouts.next_batch(0, 0, run.state.seen_by_rewards(run))
        seconds: dict[int | None, list[float]] = {size: [] for size in sizes}
        first: list[torch.Tensor] = []
        apart = 0.0
        for number in range(rounds + 1):
            for size in sizes:
                run.forward_limits = replace(run.forward_limits, no_grad_completions=size)
                scored = copy.deepcopy(batch)
                began = time.perf_counter()
                compute_old_logprobs(run, StepProgress(scored))
                took = time.perf_counter() - began
                found = [logp for group in scored.groups for logp in group.old_logp or []]
                first = first or found
                gaps = [float((a - b).abs().max()) for a, b in zip(first, found, strict=True)]
                apart = max(apart, *gaps)
                if number:
                    seconds[size].append(took)
        run.generator.close()
    base = statistics.median(seconds[None])
    return [
        {"bench": "no_grad", "workload": workload, "size": size, "seconds": statistics.median(s),
         "rounds": rounds, "of_automatic": statistics.median(s) / base, "logp_apart": apart}
        for size, s in seconds.items()
    ]  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workload", choices=ON_CPU, default="W1")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    found = measure(args.workload, args.rounds)
    results.append(found, ROWS)
    for row in found:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
