"""Seconds and memory of log-probabilities from hidden states: workload W3, forward and backward.

    python bench/head.py                                  V 131072, h 512, 768 rows, 3 rounds
    python bench/head.py --vocabulary 8192 --rounds 5

One thread, float32, CPU. Each run is a fresh process, and rounds go A B C A B C, so that nothing
is inherited and a slow minute falls on all alike. A process times one forward and backward after a
tiny one that is not counted; on a busy machine look at its CPU seconds. Its extra memory is the
process's peak less what was resident before the forward; the weight's gradient (V h 4 bytes) is in
it for all. Medians are shown.

TRL 1.16's chunked head is called as its RLOOTrainer calls it, with the entropy (`trl`), and without
(`trl_logp`), as ours is timed. The ratios of the last line are to the cheaper of the two; below 1
is better. `full` is log_softmax over all logits; `checkpointed` computes the logits of 64 rows at a
time, and again in backward. Each line is also appended to bench/results.jsonl.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rloo_cli import __version__
from rloo_cli.policy.fused_head import token_logp

RESULTS = Path(__file__).with_name("results.jsonl")
NAMES = {
    "full": "log_softmax over all logits",
    "checkpointed": "checkpointed chunks of 64 rows",
    "trl": "TRL 1.16 chunked, with entropy",
    "trl_logp": "TRL 1.16 chunked, without",
    "rloo": "rloo",
    "rloo_entropy": "rloo, with entropy",
    "rloo_kept": "rloo, logits kept",
}
Head = Callable[[Tensor, Tensor, Tensor], Tensor]


def full(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The textbook: all logits at once."""
    return (hidden @ weight.T).log_softmax(1).gather(1, target[:, None]).squeeze(1)


def checkpointed(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Chunks of rows, each computed again in backward."""
    parts = zip(hidden.split(64), target.split(64), strict=True)
    return torch.cat([checkpoint(full, h, weight, t, use_reentrant=False) for h, t in parts])


def trl(*outputs: str) -> Head:
    """TRL's function, with the constants of its trainers."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from trl.trainer import utils

    def head(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        chunk = utils._CHUNKED_LOGPROB_CHUNK_SIZE
        found = utils._ChunkedLogProbFunction.apply(
            hidden, weight, None, target, 1.0, chunk, None, 1.0, outputs
        )
        return found[0]

    return head


def ours(**words: Any) -> Head:
    return lambda hidden, weight, target: token_logp(hidden, weight, target, **words)[0]


def build(variant: str) -> Head:
    """The head of that name, imported before anything is measured."""
    if variant.startswith("trl"):
        return trl("log_probs", "entropy") if variant == "trl" else trl("log_probs")
    if variant.startswith("rloo"):
        words: dict[str, dict[str, Any]] = {
            "rloo_entropy": {"want_entropy": True},
            "rloo_kept": {"keep_bytes": 2**40},
        }
        return ours(**words.get(variant, {}))
    return {"full": full, "checkpointed": checkpointed}[variant]


def inputs(vocabulary: int, width: int, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden (N, h), weight (V, h), target (N,), and a gradient of logp (N,)."""
    torch.manual_seed(0)
    hidden = torch.randn(rows, width).requires_grad_()
    weight = torch.randn(vocabulary, width).mul_(2 * width**-0.5).requires_grad_()
    return hidden, weight, torch.randint(0, vocabulary, (rows,)), torch.randn(rows)


def backward(head: Head, given: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    (head(*given[:3]) * given[3]).sum().backward()


def megabytes(field: str) -> float:
    """This process's own memory: VmRSS now, VmHWM at most. (ru_maxrss starts at the parent's.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(field))


def child(variant: str, exact: Path, args: Any) -> dict[str, float]:
    """One run, in its own process: seconds, extra MB, and the error of the weight's gradient."""
    torch.set_num_threads(1)
    head, given = build(variant), inputs(args.vocabulary, args.hidden, args.rows)
    backward(head, inputs(64, 16, 8))
    before, began, worked = megabytes("VmRSS"), time.perf_counter(), time.process_time()
    backward(head, given)
    seconds, cpu = time.perf_counter() - began, time.process_time() - worked
    peak = megabytes("VmHWM")
    found = given[1].grad
    expected = torch.load(exact, mmap=True)
    assert found is not None
    return {
        "s": seconds,
        "s_cpu": cpu,
        "peak_mb": peak - before,
        "dw_rel_error": float((found - expected).norm() / expected.norm()),
    }


def exact_gradient(path: Path, args: Any) -> None:
    """The weight's gradient in float64, 8192 words at a time, into a file."""
    hidden, weight, target, g = (
        x.detach() for x in inputs(args.vocabulary, args.hidden, args.rows)
    )
    hidden, g = hidden.double(), g.double()
    lse = torch.cat([hidden @ w.double().T for w in weight.split(8192)], 1).logsumexp(1)
    parts = []
    for start in range(0, args.vocabulary, 8192):
        dz = -(hidden @ weight[start : start + 8192].double().T - lse[:, None]).exp()
        here = (target >= start) & (target < start + dz.shape[1])
        dz[here, target[here] - start] += 1
        parts.append((dz * g[:, None]).T @ hidden)
    torch.save(torch.cat(parts), path)


def run(variant: str, exact: Path, args: Any) -> dict[str, float]:
    """`child` in a process of its own."""
    words = [
        sys.executable, __file__, "--child", variant, "--exact", str(exact),
        "--vocabulary", str(args.vocabulary), "--hidden", str(args.hidden),
        "--rows", str(args.rows),
    ]  # fmt: skip
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def row(variant: str, runs: list[dict[str, float]], args: Any) -> dict[str, Any]:
    """One variant's line of results.jsonl."""
    seconds = [r["s"] for r in runs]
    tool = {"trl": "trl", "rloo": "rloo"}.get(variant.partition("_")[0], "torch")
    return {
        "tool": tool,
        "version": {"trl": "1.16.0", "rloo": __version__, "torch": torch.__version__}[tool],
        "workload": "W3-head",
        "variant": variant,
        "device": platform.machine(),
        "torch": torch.__version__,
        "dtype": "float32",
        "V": args.vocabulary,
        "h": args.hidden,
        "rows": args.rows,
        "threads": 1,
        "rounds": len(runs),
        "s": statistics.median(seconds),
        "s_least": min(seconds),
        "s_most": max(seconds),
        "s_cpu": statistics.median(r["s_cpu"] for r in runs),
        "peak_mb": statistics.median(r["peak_mb"] for r in runs),
        "dw_rel_error": max(r["dw_rel_error"] for r in runs),
        "loadavg": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
    }


def show(rows: list[dict[str, Any]]) -> None:
    """The table, and the line of ratios."""
    first = rows[0]
    title = f"V {first['V']}, h {first['h']}, {first['rows']} rows, float32, 1 thread"
    columns = ("head", "s", "least - most", "s CPU", "extra peak MB", "dW rel. error")
    table = Table(*columns, title=title)
    for r in rows:
        spread = f"{r['s_least']:.2f} - {r['s_most']:.2f}"
        table.add_row(
            NAMES[r["variant"]], f"{r['s']:.2f}", spread, f"{r['s_cpu']:.2f}",
            f"{r['peak_mb']:.0f}", f"{r['dw_rel_error']:.1e}",
        )  # fmt: skip
    Console(width=110).print(table)
    of = {r["variant"]: r for r in rows}
    theirs = min((of["trl"], of["trl_logp"]), key=lambda r: r["s"])
    ratios = {
        "workload": "W3",
        "ratio_trl": of["rloo"]["s"] / theirs["s"],
        "ratio_trl_cpu": of["rloo"]["s_cpu"] / min(of[v]["s_cpu"] for v in ("trl", "trl_logp")),
        "ratio_trl_kept": of["rloo_kept"]["s"] / theirs["s"],
        "ratio_full": of["rloo"]["s"] / of["full"]["s"],
        "peak_ratio_trl": of["rloo"]["peak_mb"]
        / min(of[v]["peak_mb"] for v in ("trl", "trl_logp")),
        "peak_ratio_full": of["rloo"]["peak_mb"] / of["full"]["peak_mb"],
    }
    print(json.dumps({k: v if isinstance(v, str) else round(v, 4) for k, v in ratios.items()}))


def main() -> None:
    """Measure, append, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--vocabulary", type=int, default=131072)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rows", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--child", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--exact", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.child, args.exact, args)))
        return
    with tempfile.TemporaryDirectory(prefix="rloo-bench-") as folder:
        exact = Path(folder) / "dw.pt"
        exact_gradient(exact, args)
        runs: dict[str, list[dict[str, float]]] = {variant: [] for variant in NAMES}
        for _ in range(args.rounds):
            for variant, found in runs.items():
                found.append(run(variant, exact, args))
    rows = [row(variant, found, args) for variant, found in runs.items()]
    with args.results.open("a") as file:
        file.writelines(json.dumps(r) + "\n" for r in rows)
    show(rows)


if __name__ == "__main__":
    main()
