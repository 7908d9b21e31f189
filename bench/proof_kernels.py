"""Rows of `gpu_proof.py` about kernels: each path against float64, and what the device reaches."""

import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gpu
import gpu_parts
import torch
from proof_models import shape_of
from torch import Tensor

from rloo_cli.data.batch import Group, Rollout
from rloo_cli.data.packing import whole_group_slices
from rloo_cli.policy import layouts
from rloo_cli.policy.fused_head import token_logp
from rloo_cli.policy.model import Policy
from rloo_cli.utils.device_waits import wait_for_device

Facts = dict[str, Any]
ROOT = Path(__file__).resolve().parents[1]
# Relative errors: float32 may be this far off; half precision so many times as far as the model's
# own attention in the same dtype on rows alone, plus a little.
EXACT, TIMES, PLUS = 1e-4, 1.5, 2e-3
SEED = 3


def passed(good: bool) -> str:
    """The verdict of a criterion."""
    return "confirmed" if good else "refuted"


def far(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Relative L2 distance of what was found from what is exact."""
    gap, size = 0.0, 0.0
    for a, b in zip(found, exact, strict=True):
        b = b.detach().double()
        gap += float((a.detach().double().to(b.device) - b).square().sum())
        size += float(b.square().sum())
    return (gap / max(size, 1e-300)) ** 0.5


def timed(work: Callable[[], object], times: int) -> float:
    """Median seconds of a call, the device's work included; a first call does not count."""
    seconds = []
    for number in range(times + 1):
        wait_for_device()
        began = time.perf_counter()
        work()
        wait_for_device()
        seconds += [time.perf_counter() - began] if number else []
    return statistics.median(seconds)


def bandwidth(device: torch.device, megabytes: int) -> float:
    """Bytes per second that a copy reads and writes."""
    one = torch.ones(megabytes * 2**20 // 4, device=device)
    other = torch.empty_like(one)
    return 2 * one.nbytes / timed(lambda: other.copy_(one), 5)


def machine(device: str, dtype: str, sizes: Facts) -> Facts:
    """What everything else is measured by."""
    here = torch.device(device)
    facts: Facts = {"verdict": "measured", "torch": torch.__version__}
    if here.type == "cuda":
        found = torch.cuda.get_device_properties(here)
        facts |= {"memory_gb": found.total_memory / 1e9, "sm": f"{found.major}.{found.minor}"}
    return facts | {
        "tflops": gpu.ceiling(here, sizes["size"]) / 1e12,
        "gb_per_s": bandwidth(here, sizes["copy_mb"]) / 1e9,
    }


def order(device: str, dtype: str, sizes: Facts) -> Facts:
    """Weights that kernels still write, read on another stream: with our wait, and without."""
    here, kind = torch.device(device), getattr(torch, dtype)
    work = torch.randn(sizes["size"], sizes["size"], device=here, dtype=kind)
    weight = torch.zeros(1024, device=here)
    stale = {"stale_without_wait": 0, "stale_with_wait": 0}
    for number in range(1, 11):
        for name in stale:
            for _ in range(sizes["queued"]):
                work @ work
            weight.fill_(number)
            if name == "stale_with_wait":
                wait_for_device()
            if here.type == "cuda":
                with torch.cuda.stream(torch.cuda.Stream()):
                    seen = weight.clone().cpu()
            else:
                seen = weight.clone()
            stale[name] += int(bool((seen != number).any()))
            wait_for_device()
            weight.zero_()
    seen_without = "measured" if not stale["stale_without_wait"] else "confirmed"
    return {"verdict": "refuted" if stale["stale_with_wait"] else seen_without, **stale, "of": 10}


def head(device: str, dtype: str, sizes: Facts) -> Facts:
    """log p of targets and its gradients by the fused head, against log_softmax in float64."""
    here, kind = torch.device(device), getattr(torch, dtype)
    torch.manual_seed(SEED)
    n, words = sizes["rows"], sizes["words"]
    hidden = torch.randn(n, sizes["width"], device=here).to(kind)
    weight = (torch.randn(words, sizes["width"], device=here) * 0.05).to(kind)
    target, g = torch.randint(words, (n,), device=here), torch.randn(n, device=here)

    def by(compute: Callable[..., Tensor], to: torch.dtype) -> list[Tensor]:
        given = [t.detach().to(to).requires_grad_() for t in (hidden, weight)]
        logp = compute(*given)
        return [logp, *torch.autograd.grad(logp, given, g.to(logp.dtype))]

    def plain(hidden: Tensor, weight: Tensor) -> Tensor:
        logits = hidden @ weight.T
        logits = logits if logits.dtype is torch.float64 else logits.float()
        return logits.log_softmax(1).gather(1, target[:, None]).squeeze(1)

    def fused(keep: int, full: bool = False) -> Callable[..., Tensor]:
        return lambda h, w: token_logp(h, w, target, keep_bytes=keep, float32=full)[0]

    exact = by(plain, torch.float64)
    base = far(by(plain, kind), exact)
    ways = {"kept": fused(2**40), "made again": fused(0), "in float32": fused(2**40, True)}
    off = {name: far(by(way, kind), exact) for name, way in ways.items()}
    seconds = {name: timed(lambda way=way: by(way, kind), sizes["timed"])  # type: ignore[misc]
               for name, way in {"log_softmax": plain, **ways}.items()}  # fmt: skip
    most = EXACT if dtype == "float32" else TIMES * base + PLUS
    flop = 6.0 * n * words * sizes["width"]
    return {
        "verdict": passed(max(off.values()) <= most), "off": max(off.values()),
        "off_log_softmax": base, "allowed": most,
        "table": [
            {"head": name, "ms": 1000 * s, "TFLOP/s": flop / s / 1e12,
             "off": {"log_softmax": base, **off}[name],
             **({} if name == "log_softmax" else {"ratio": seconds["log_softmax"] / s})}
            for name, s in seconds.items()
        ],
    }  # fmt: skip


def groups(longest: int, words: int) -> list[Group]:
    """Groups of unequal lengths, with completions of one token and with one completion alone."""
    drawn = torch.Generator().manual_seed(SEED)
    some = (longest - 3, 1, longest // 2)
    lengths = [(longest, some), (7, (5, longest, 4)), (longest // 3, (9,)), (4, (1, 1))]

    def ids(count: int) -> list[int]:
        return torch.randint(2, words, (count,), generator=drawn).tolist()

    def rollout(count: int) -> Rollout:
        return Rollout(ids(count), "", "length", False, 0, 0)

    return [Group(i, {}, "", ids(p), [rollout(c) for c in cs]) for i, (p, cs) in enumerate(lengths)]


def layout(device: str, dtype: str, sizes: Facts) -> Facts:
    """Log-probabilities and the whole gradient on rows of a layout, against single rows."""
    here, kind = torch.device(device), getattr(torch, dtype)
    shape = shape_of(sizes["model"])
    made = groups(sizes["longest"], shape.vocabulary)
    exact = alone(gpu_parts.build(shape, here, torch.float64, SEED, 0.0), made)
    base = far(alone(gpu_parts.build(shape, here, kind, SEED, 0.0), made), exact)
    policy = Policy(gpu_parts.build(shape, here, kind, SEED, 0.0), 1.0)
    level = layouts.choose_policy_layout(policy, sizes["layout"], 2 * sizes["longest"])
    in_float32(policy.model)
    micro = policy.pack(made, whole_group_slices(made, range(len(made))))
    logp = policy.logp(micro).logp
    weighted(logp).backward()
    off = far([logp, *gradients(policy.model)], exact)
    most = EXACT if dtype == "float32" else TIMES * base + PLUS
    return {"verdict": passed(off <= most), "off": off, "off_single_rows": base, "allowed": most,
            "level": str(level)}  # fmt: skip


def alone(model: Any, made: Sequence[Group]) -> list[Tensor]:
    """What a model's own forward says of each completion in a row of its own: logp, gradients."""
    in_float32(model)
    device, found = next(model.parameters()).device, []
    for group in made:
        for rollout in group.rollouts:
            row = torch.tensor([group.prompt_ids + rollout.completion_ids], device=device)
            logits = model(input_ids=row, use_cache=False).logits[0, len(group.prompt_ids) - 1 : -1]
            logits = logits if logits.dtype is torch.float64 else logits.float()
            target = row[0, len(group.prompt_ids) :, None]
            found.append(logits.log_softmax(-1).gather(1, target).squeeze(1))
    logp = torch.cat(found)
    weighted(logp).backward()
    return [logp.detach(), *gradients(model)]


def weighted(logp: Tensor) -> Tensor:
    """A sum whose gradient is another one for each token. (N,) -> ()"""
    weights = torch.linspace(-1, 1, len(logp), device=logp.device, dtype=logp.dtype)
    return (logp * weights).sum()


def in_float32(model: Any) -> None:
    """Gradients of half-precision weights add up in float32, as the optimizer has it."""
    for weight in model.parameters():
        if weight.dtype in (torch.bfloat16, torch.float16):
            weight.grad_dtype = torch.float32


def gradients(model: Any) -> list[Tensor]:
    """Of every weight."""
    return [weight.grad for weight in model.parameters()]


def marked(device: str, dtype: str, sizes: Facts) -> Facts:
    """The tests with these marks, in the files that have the mark gpu."""
    files = [p for p in sorted(ROOT.glob("tests/**/test_*.py")) if "mark.gpu" in p.read_text()]
    files = [p for p in files if ("mark.vllm" in p.read_text()) == ("and vllm" in sizes["marks"])]
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", sizes["marks"]]
    words += ["--collect-only"] if sizes["collect"] else ["-rfE"]
    said = subprocess.run([*words, *map(str, files)], cwd=ROOT, capture_output=True, text=True)
    lines = (said.stdout + said.stderr).strip().splitlines()
    last = lines[-1] if lines else ""
    if sizes["collect"] and not said.returncode:
        last = f"{sum(int(n) for n in re.findall(r': ([0-9]+)$', said.stdout, re.M))} collected"
    failed = [line[:200] for line in lines if line.startswith(("FAILED", "ERROR"))]
    verdict = "measured" if sizes["collect"] else passed(said.returncode == 0)
    if sizes["collect"] and said.returncode:
        raise RuntimeError(f"pytest cannot collect them: {last}")
    return {"verdict": verdict, "said": last, "table": [{"failed": line} for line in failed]}
