"""The two tools, each in a process of its own that takes one step when it is told to.

A side is built on the folder that `toys.write` made and then obeys orders, one JSON object a line:

    {"do": "record"}                       `rloo` only: sample one batch, and say its token ids
    {"do": "train", "gradient": null}      the train phase on those ids; a path: save its gradient
    {"do": "step", "count": true}          a whole step, from prompts to the optimizer's; counted,
                                           it also says how many GFLOP its products took

Each is answered with seconds by the wall and of this process, a split of them, the token positions
that the training forwards computed, and the peak memory so far. Only one side works at a time.
Policies start a little away from their references, by the same noise in both tools: otherwise the
KL is 0 and the gradients would agree without it.
"""

import json
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

BETA, RATE, CLIP, NOISE, LONG = 0.05, 1e-5, 1.0, 0.01, 10_000  # LONG: steps that never come
WORDS_VARIABLE = "RLOO_BENCH_WORDS"  # keys for the run of `rloo`, from versus_before.py
Order = dict[str, Any]
Answer = dict[str, Any]


def digits(completion_ids: Any, **_: Any) -> list[float]:
    """The score: cheap, and different for siblings."""
    return [sum((7 * i + 3) % 11 for i in ids) / 10 for ids in completion_ids]


def memory(what: str) -> float:
    """VmHWM (peak) or VmRSS (now) of this process in MB. ru_maxrss would also be its parent's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no {what} on this system")


class Orders:
    """Orders from stdin, answers to what was stdout; whatever else is printed goes to stderr."""

    def __init__(self) -> None:
        self.out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def __call__(self) -> Order | None:
        """The next one; None = no more."""
        line = sys.stdin.readline()
        return json.loads(line) if line.strip() else None

    def answer(self, **values: Any) -> None:
        """One line back."""
        print(json.dumps(values), file=self.out, flush=True)


class Rows:
    """Counts the token positions that forwards with gradient embed."""

    def __init__(self, model: Any):
        self.seen = 0
        model.get_input_embeddings().register_forward_hook(self._add)

    def _add(self, module: Any, args: Any, out: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            self.seen += out.shape[:-1].numel()

    def take(self) -> int:
        """Since the last call."""
        seen, self.seen = self.seen, 0
        return seen


def attention_flop(
    q: Any, k: Any, v: Any, dropout: float = 0.0, causal: bool = False, **_: Any
) -> int:
    """Two products of torch's CPU attention, of (B, H, S, D) and (B, H, T, D); half if causal."""
    return 4 * q[0] * q[1] * q[2] * k[2] * q[3] // (2 if causal else 1)


def attention_backward_flop(
    grad: Any, q: Any, k: Any, v: Any, out: Any, sums: Any, dropout: float, causal: bool, **_: Any
) -> int:
    """Five products: the scores once more, and the gradients of values, scores, q and k."""
    return attention_flop(q, k, v, dropout, causal) * 5 // 2


for name, formula in (("", attention_flop), ("_backward", attention_backward_flop)):
    kernel = getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{name}")
    register_flop_formula(kernel)(formula)


class Watch:
    """Wall and processor seconds since `start`, with what a GPU was asked to do."""

    counter: FlopCounterMode | None = None

    def start(self, count: bool = False) -> None:
        """From here. `count`: the floating-point operations of products, too, which takes time."""
        wait()
        self.counting = ExitStack()
        self.counter = FlopCounterMode(display=False) if count else None
        if self.counter is not None:
            self.counting.enter_context(self.counter)
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        """To here; the first reading ends the count."""
        wait()
        wall, cpu = time.perf_counter() - self.wall, time.process_time() - self.cpu
        self.counting.close()
        counted = {} if self.counter is None else {"gflop": self.counter.get_total_flops() / 1e9}
        return {"seconds": wall, "cpu": cpu, **counted}


def wait() -> None:
    """Until a GPU has done what was asked of it."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


@torch.no_grad()
def disturb(model: Any) -> None:
    """The noise between policy and reference: the same draws for the same parameters."""
    drawn = torch.Generator().manual_seed(7)
    for weight in model.parameters():
        weight += (NOISE * torch.randn(weight.shape, generator=drawn)).to(weight)


def keep_gradient(model: Any, path: str) -> None:
    """Save the gradient as it stands, before clipping. Nothing is copied: memory is measured."""
    found = {n: w.grad for n, w in model.named_parameters() if w.grad is not None}
    torch.save(found, path)


def body(model: Any) -> int:
    """Parameters without embeddings and head."""
    outer = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    return sum(w.numel() for w in model.parameters() if id(w) not in outer)
