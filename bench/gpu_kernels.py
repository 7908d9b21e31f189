"""Rows of `gpu.py` about kernels: each path against float64, the optimizer, and the device."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_models import (
    Facts,
    copy_bandwidth,
    data_sheet_flops,
    median_seconds,
    model_shape,
    product_flops,
    random_model,
    verdict_of,
)
from torch import Tensor

from rloo_cli.data.batch import Group, Rollout
from rloo_cli.data.packing import whole_group_slices
from rloo_cli.generation.hf.decode_batch import DecodeSequence
from rloo_cli.generation.hf.shared_prefix import SharedPrefix
from rloo_cli.policy import layouts
from rloo_cli.policy.fused_head import token_logp
from rloo_cli.policy.model import Policy
from rloo_cli.utils.device_waits import wait_for_device

ROOT = Path(__file__).resolve().parents[1]
# Relative errors: float32 may be this far off; half precision so many times as far as the model's
# own attention in the same dtype on single rows, plus a little.
EXACT, TIMES, PLUS = 1e-4, 1.5, 2e-3
SEED = 3


def relative_error(values: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Relative L2 distance of all tensors from the exact ones of the same shapes."""
    gap, size = 0.0, 0.0
    for a, b in zip(values, exact, strict=True):
        b = b.detach().double()
        gap += float((a.detach().double().to(b.device) - b).square().sum())
        size += float(b.square().sum())
    return (gap / max(size, 1e-300)) ** 0.5


def allowed_error(dtype: str, base: float) -> float:
    """The largest error that confirms a row; `base`: of the plain way in the same dtype."""
    return EXACT if dtype == "float32" else TIMES * base + PLUS


def measure_machine(device: str, dtype: str, sizes: Facts) -> Iterator[Facts]:
    """What a matrix product and a copy reach; every other row is read beside these."""
    here = torch.device(device)
    facts: Facts = {"verdict": "measured", "torch": torch.__version__}
    if here.type == "cuda":
        found = torch.cuda.get_device_properties(here)
        facts |= {"memory_gb": found.total_memory / 1e9, "sm": f"{found.major}.{found.minor}"}
    product = product_flops(here, sizes["size"])
    sheet = data_sheet_flops(here)
    yield facts | {
        "tflops_of_the_product": product / 1e12,
        "share_of_the_data_sheet": product / sheet if sheet else None,
        "gb_per_s": copy_bandwidth(here, sizes["copy_mb"]) / 1e9,
    }


def check_waits(device: str, dtype: str, sizes: Facts) -> Iterator[Facts]:
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
    yield {"verdict": "refuted" if stale["stale_with_wait"] else seen_without, **stale, "of": 10}


def compare_heads(device: str, dtype: str, sizes: Facts) -> Iterator[Facts]:
    """log p of targets and its gradients by the fused head, against log_softmax in float64.

    The first facts are the errors, then seconds are added way by way: logits kept, made again, in
    float32, and kept with each of `sizes["tiles"]`, the binary logarithm of a tile's logits.
    """
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

    def fused(keep: int, **more: Any) -> Callable[..., Tensor]:
        return lambda h, w: token_logp(h, w, target, keep_bytes=keep, **more)[0]

    exact = by(plain, torch.float64)
    ways = {"log_softmax": plain, "kept": fused(2**40), "made again": fused(0),
            "in float32": fused(2**40, float32=True)}  # fmt: skip
    ways |= {f"tiles of 2^{p}": fused(2**40, tile_logits=2**p) for p in sizes["tiles"]}
    off = {name: relative_error(by(way, kind), exact) for name, way in ways.items()}
    base = off.pop("log_softmax")
    allowed, flop, table = allowed_error(dtype, base), 6.0 * n * words * sizes["width"], []
    facts = {"verdict": verdict_of(max(off.values()) <= allowed), "off": max(off.values()),
             "off_log_softmax": base, "allowed": allowed}  # fmt: skip
    yield facts
    for name, way in ways.items():
        seconds = median_seconds(lambda way=way: by(way, kind), sizes["timed"])  # type: ignore[misc]
        table.append({"head": name, "ms": 1000 * seconds, "TFLOP/s": flop / seconds / 1e12,
                      "off": off.get(name, base),
                      "ratio": table[0]["ms"] / 1000 / seconds if table else None})  # fmt: skip
        yield facts | {"table": list(table)}


def unequal_groups(longest: int, words: int) -> list[Group]:
    """Groups of unequal lengths, with completions of one token and with one completion alone."""
    drawn = torch.Generator().manual_seed(SEED)
    some = (longest - 3, 1, longest // 2)
    lengths = [(longest, some), (7, (5, longest, 4)), (longest // 3, (9,)), (4, (1, 1))]

    def ids(count: int) -> list[int]:
        return torch.randint(2, words, (count,), generator=drawn).tolist()

    def rollout(count: int) -> Rollout:
        return Rollout(ids(count), "", "length", False, 0, 0)

    return [Group(i, {}, "", ids(p), [rollout(c) for c in cs]) for i, (p, cs) in enumerate(lengths)]


def compare_layout(device: str, dtype: str, sizes: Facts) -> Iterator[Facts]:
    """Log-probabilities and the whole gradient on rows of a layout, against single rows."""
    here, kind = torch.device(device), getattr(torch, dtype)
    shape = model_shape(sizes["model"])
    made = unequal_groups(sizes["longest"], shape.vocabulary)
    exact = single_rows(random_model(shape, here, torch.float64, seed=SEED), made)
    base = relative_error(single_rows(random_model(shape, here, kind, seed=SEED), made), exact)
    policy = Policy(random_model(shape, here, kind, seed=SEED), 1.0)
    level = layouts.choose_policy_layout(policy, sizes["layout"], 2 * sizes["longest"])
    add_gradients_in_float32(policy.model)
    micro = policy.pack(made, whole_group_slices(made, range(len(made))))
    logp = policy.logp(micro).logp
    weighted_sum(logp).backward()
    off = relative_error([logp, *(w.grad for w in policy.model.parameters())], exact)
    allowed = allowed_error(dtype, base)
    yield {"verdict": verdict_of(off <= allowed), "off": off, "off_single_rows": base,
           "allowed": allowed, "level": str(level)}  # fmt: skip


def single_rows(model: Any, made: Sequence[Group]) -> list[Tensor]:
    """Each completion in a row of its own by the model's own forward: log p (N,), gradients."""
    add_gradients_in_float32(model)
    device, found = next(model.parameters()).device, []
    for group in made:
        for rollout in group.rollouts:
            row = torch.tensor([group.prompt_ids + rollout.completion_ids], device=device)
            logits = model(input_ids=row, use_cache=False).logits[0, len(group.prompt_ids) - 1 : -1]
            logits = logits if logits.dtype is torch.float64 else logits.float()
            target = row[0, len(group.prompt_ids) :, None]
            found.append(logits.log_softmax(-1).gather(1, target).squeeze(1))
    logp = torch.cat(found)
    weighted_sum(logp).backward()
    return [logp.detach(), *(weight.grad for weight in model.parameters())]


def weighted_sum(logp: Tensor) -> Tensor:
    """A sum whose gradient is another one for each token. (N,) -> ()"""
    weights = torch.linspace(-1, 1, len(logp), device=logp.device, dtype=logp.dtype)
    return (logp * weights).sum()


def add_gradients_in_float32(model: Any) -> None:
    """Gradients of half-precision weights add up in float32, as the optimizer has it."""
    for weight in model.parameters():
        if weight.requires_grad and weight.dtype in (torch.bfloat16, torch.float16):
            weight.grad_dtype = torch.float32


def time_optimizer(device: str, dtype: str, sizes: Facts) -> Iterator[Facts]:
    """AdamW over masters of this size, in one kernel and in several."""
    here, facts = torch.device(device), {}
    count = sizes["size"] * sizes["tensors"]
    facts = {"verdict": "measured", "parameters": count}
    for name in ("fused", "foreach"):
        weights = [torch.zeros(sizes["size"], device=here, requires_grad=True)
                   for _ in range(sizes["tensors"])]  # fmt: skip
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        inner = torch.optim.AdamW(weights, lr=1e-5, **{name: True})
        inner.step()
        if here.type == "cuda":
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        seconds = median_seconds(inner.step, sizes["steps"])
        facts |= {f"ms_{name}": 1000 * seconds, f"ms_{name}_per_1b": 1e12 * seconds / count}
        if here.type == "cuda":
            facts[f"gb_on_top_{name}"] = (torch.cuda.max_memory_allocated() - before) / 1e9
        yield dict(facts)
        del inner, weights


def capture_decode(device: str, dtype: str, sizes: Facts) -> Iterator[Facts]:
    """One token of every completion by our own sampler: eager, and as one captured CUDA graph.

    The graph is that of one position: it says what capturing is worth, and nothing uses it yet.
    """
    here, kind = torch.device(device), getattr(torch, dtype)
    shape = model_shape(sizes["model"])
    prefix = SharedPrefix(random_model(shape, here, kind, seed=SEED).eval())
    drawn = torch.Generator().manual_seed(SEED)
    prompts = [torch.randint(2, shape.vocabulary, (sizes["prompt"],), generator=drawn).tolist()
               for _ in range(sizes["prompts"])]  # fmt: skip
    table, facts = [], {"verdict": "measured"}
    for k in sizes["completions"]:
        rows = [DecodeSequence(g, prompt, 0) for g, prompt in enumerate(prompts) for _ in range(k)]
        with torch.no_grad(), prefix.decoding_attention():
            row = time_decode(prefix, rows, sizes)
        table.append(
            {"rows": len(rows), "tokens/s eager": 1000 * len(rows) / row["ms eager"]} | row
        )
        if "off" in row:
            worst = max(line["off"] for line in table)
            facts |= {"verdict": verdict_of(worst <= EXACT), "off": worst, "allowed": EXACT}
        yield facts | {"table": list(table)}


def time_decode(prefix: SharedPrefix, rows: list[DecodeSequence], sizes: Facts) -> Facts:
    """Milliseconds of a token after `sizes["decoded"]` others; on a GPU captured as well."""
    decoded = sizes["decoded"]
    batch, _ = prefix.prefill(rows, decoded + 1)
    for end in range(batch.prompt_width + 1, batch.prompt_width + decoded + 1):
        batch.input_ids[:, end - 1] = end  # any ids do
        prefix.forward(batch, end)

    def decode() -> Tensor:
        batch.cache.num_decoded = decoded  # the same position again
        return prefix.forward(batch, batch.prompt_width + decoded + 1)

    facts: Facts = {"ms eager": 1000 * median_seconds(decode, sizes["timed"])}
    if batch.input_ids.is_cuda:
        exact = decode().clone()
        stream = torch.cuda.Stream()  # what kernels set up at first use is no part of a graph
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            decode()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = decode()
        facts["ms captured"] = 1000 * median_seconds(graph.replay, sizes["timed"])
        facts["tokens/s captured"] = 1000 * len(rows) / facts["ms captured"]
        facts["off"] = relative_error([captured], [exact])
    return facts


def run_marked_tests(device: str, dtype: str, sizes: Facts) -> Iterator[Facts]:
    """The tests with these marks, in the files that have the mark gpu. A CPU only collects them."""
    files = [p for p in sorted(ROOT.glob("tests/**/test_*.py")) if "mark.gpu" in p.read_text()]
    files = [p for p in files if ("mark.vllm" in p.read_text()) == ("and vllm" in sizes["marks"])]
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", sizes["marks"]]
    words += ["--collect-only"] if sizes["collect"] else ["-rfE"]
    said = subprocess.run([*words, *map(str, files)], cwd=ROOT, capture_output=True, text=True)
    print(said.stdout, said.stderr, flush=True)
    lines = (said.stdout + said.stderr).strip().splitlines()
    if sizes["collect"]:
        if said.returncode:
            raise RuntimeError(f"pytest cannot collect them: {lines[-1]}")
        count = sum(int(n) for n in re.findall(r": ([0-9]+)$", said.stdout, re.M))
        yield {"verdict": "measured", "said": f"{count} collected"}
        return
    failed = [line[:200] for line in lines if line.startswith(("FAILED", "ERROR"))]
    yield {"verdict": verdict_of(said.returncode == 0), "said": lines[-1] if lines else "",
           "table": [{"failed": line} for line in failed]}  # fmt: skip
