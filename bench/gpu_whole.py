"""Rows of `gpu.py` about whole steps of `rloo` and of TRL's own RLOOTrainer, A B A B.

Each turn is a process with nothing else on the GPU: a step that does not count, and a few that do.
TRL runs with gradient checkpointing, float32 weights and bfloat16 autocast; `trl_best` without
checkpointing, with bfloat16 weights, liger-kernel where it is installed, and a static cache where
transformers samples. Micro-batches hold up to `tokens` token positions in every tool, half as many
for TRL each time memory is full. With vLLM both tools give the engine the same share of the GPU and
the same settings.

    python bench/gpu_whole.py rloo FOLDER/spec.json     one turn; its steps go to FOLDER/steps.jsonl
"""

import contextlib
import functools
import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from gpu_models import (
    SEED,
    WHOLE_STEPS,
    Facts,
    copy_bandwidth,
    data_sheet_flops,
    draw_batch,
    draw_prompts,
    keep_file,
    model_keys,
    model_runner,
    product_flops,
    random_model,
    release_memory,
    scratch_folder,
    sized_shape,
    write_model,
)
from gpu_phase import phase_flops
from gpu_table import CannotRun
from shapes import Shape

from rloo_cli.data.bin_packing import ForwardCost
from rloo_cli.generation.vllm.versions import installed_vllm_version, version_numbers

HERE = Path(__file__).resolve().parent
TRL_TAKES = ((0, 22), (0, 31))  # versions of vLLM, by TRL 1.16's own check
FULL = 9  # exit code of a turn that ran out of memory


class MemoryIsFull(Exception):
    """A turn ran out of memory."""


def engine_settings(shape: Shape) -> Facts:
    """vLLM's compilation_config of both tools: no torch.compile, which takes half of an engine's
    start, and CUDA graphs for decoding up to the step's rows."""
    sizes = [8, 32, 128, 256, 512, *([1024] if shape.batch > 512 else [])]
    return {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}


def rloo_keys(spec: Facts, shape: Shape, folder: Path) -> list[str]:
    """The keys of `rloo`'s run on top of those of `side_rloo`."""
    keys = [*model_keys(folder), f"algorithm.beta={spec['beta']}",
            f"train.micro_batch_tokens={json.dumps(spec['tokens'])}"]  # fmt: skip
    if torch.cuda.is_available():
        keys.append("distributed.threads=null")
    if spec["sampler"] != "vllm":
        return [*keys, "generation=transformers"]
    settings = json.dumps(engine_settings(shape)).replace('"', "").replace(": ", ":")
    return [
        *keys, "generation=vllm_colocate", "generation.allow_untested=true",
        f"generation.colocate.gpu_memory_utilization={spec['share']}",
        f"+generation.colocate.extra.compilation_config={settings}",
    ]  # fmt: skip


def run_rloo_turn(spec: Facts, shape: Shape, folder: Path) -> Iterator[Facts]:
    """`rloo`'s steps, one by one, each with what the roofline needs."""
    import side_rloo  # lazy: TRL's turn is not to import it

    shutil.rmtree(folder / "rloo", ignore_errors=True)
    run = side_rloo.build(shape, folder, SEED, rloo_keys(spec, shape, folder))
    side, device = side_rloo.Side(run), run.policy.device
    small = spec["tiny"]
    known = {"cost": asdict(run.forward_limits.cost), "settings": str(run.layout_choice),
             "product": product_flops(device, 128 if small else 8192),
             "bandwidth": copy_bandwidth(device, 8 if small else 4096)}  # fmt: skip
    if spec["sampler"] == "vllm":
        known["runner"] = model_runner(run.config, run.policy.model)
    release_memory()
    try:
        while True:
            yield side.step() | known
    finally:
        run.generator.close()


class SomeSteps:
    """As many orders to step as are asked for; each answer is a finished step."""

    def __init__(self, count: int, write: Any):
        self.left, self.write = count, write

    def __call__(self) -> Facts | None:
        self.left -= 1
        return {"do": "step"} if self.left >= 0 else None

    def answer(self, **values: Any) -> None:
        """One step's answer."""
        self.write(values)


def link_with_tokenizer(folder: Path) -> None:
    """Model and tokenizer in one folder, where TRL's vLLM looks for both."""
    root = folder / "with_tokenizer"
    root.mkdir(exist_ok=True)
    for path in [*(folder / "model").iterdir(), *(folder / "tokenizer").iterdir()]:
        if not (root / path.name).exists():
            (root / path.name).symlink_to(path)


def run_trl_turn(spec: Facts, shape: Shape, folder: Path, write: Any) -> None:
    """TRL's steps by its own RLOOTrainer."""
    import side_trl  # lazy: rloo's turn is not to import TRL

    best, with_vllm = spec["tool"] == "trl_best", spec["sampler"] == "vllm"
    more: Facts = {}
    if best and not with_vllm:
        more["cache_implementation"] = "static"
    if best and torch.cuda.is_available() and importlib.util.find_spec("liger_kernel"):
        more["use_liger_kernel"] = True
    settings = f"micro-batches of {spec['micro']} rows, "
    settings += "bfloat16 weights" if best else "gradient checkpointing"
    settings += "".join(f", {name}" for name in more)
    dtype = torch.bfloat16 if best else torch.float32
    link_with_tokenizer(folder)
    with contextlib.ExitStack() as stack:
        stack.enter_context(side_trl.compact_head(True))
        if with_vllm:
            from vllm import LLM  # lazy: only where vLLM samples

            engine = functools.partial(LLM, compilation_config=engine_settings(shape))
            stack.enter_context(mock.patch("trl.generation.vllm_generation.LLM", engine))
        trainer = side_trl.build(
            shape, folder, SEED, not best, spec["micro"], spec["beta"],
            spec["share"] if with_vllm else None, dtype, more,
        )  # fmt: skip
        orders: Any = SomeSteps(
            spec["steps"] + 1, lambda step: write(step | {"settings": settings})
        )
        trainer.add_callback(side_trl.Side(trainer, orders))
        with contextlib.suppress(side_trl.Done):
            trainer.train()


def main() -> int:
    """One turn, in this process. Exit code 9 = out of memory."""
    tool, path = sys.argv[1], Path(sys.argv[2])
    spec = json.loads(path.read_text(encoding="utf-8")) | {"tool": tool}
    given = spec["shape"]
    shape = Shape(**given | {n: tuple(given[n]) for n in ("prompt", "completion")})

    def write(step: Facts) -> None:
        step["peak_gb"] = (
            torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None
        )
        with (path.parent / "steps.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(step) + "\n")

    try:
        if tool == "rloo":
            steps = run_rloo_turn(spec, shape, path.parent)
            for _ in range(spec["steps"] + 1):
                write(next(steps))
            steps.close()  # type: ignore[attr-defined]
        else:
            run_trl_turn(spec, shape, path.parent, write)
    except torch.OutOfMemoryError as error:
        print(error, flush=True)
        return FULL
    return 0


def take_turn(tool: str, spec: Facts, folder: Path) -> list[Facts]:
    """One tool's steps but the first. What it prints is this process's output.

    Raises MemoryIsFull, and RuntimeError with the exit code.
    """
    path, steps = folder / "spec.json", folder / "steps.jsonl"
    path.write_text(json.dumps(spec), encoding="utf-8")
    steps.unlink(missing_ok=True)
    print(f"turn of {tool}", flush=True)
    words = [sys.executable, str(HERE / "gpu_whole.py"), tool, str(path)]
    ended = subprocess.run(words, cwd=folder)
    for log in folder.glob("rloo/**/engine.log"):
        keep_file(log, "engine.log")
    found = [json.loads(line) for line in steps.read_text().splitlines()] if steps.exists() else []
    if ended.returncode == FULL:
        raise MemoryIsFull(tool)
    if ended.returncode or len(found) <= 1:
        raise RuntimeError(f"{tool}: exit code {ended.returncode}, its output is above")
    return found[1:]


def why_without_trl(sampler: str) -> str:
    """Why TRL cannot take part here; "" = it can."""
    if importlib.util.find_spec("trl") is None:
        return "TRL is not installed"
    found = installed_vllm_version()
    if sampler == "vllm" and not TRL_TAKES[0] <= version_numbers(found)[:2] <= TRL_TAKES[1]:
        return f"TRL takes vLLM 0.22 to 0.31, this is {found}"
    return ""


class TrlTurns:
    """TRL's turns in one setting, with the largest micro-batch that fits."""

    def __init__(self, tool: str, spec: Facts, shape: Shape):
        longest = shape.prompt[1] + shape.completion[1]
        halves = [shape.batch >> i for i in range(12) if shape.batch % 2**i == 0]
        self.tool, self.spec = tool, spec
        self.sizes = [size for size in halves if size * longest <= spec["tokens"]] or halves[-1:]

    def take_turn(self, folder: Path) -> list[Facts]:
        """The next turn; a size that does not fit is not tried again."""
        while self.sizes:
            try:
                return take_turn(self.tool, self.spec | {"micro": self.sizes[0]}, folder)
            except MemoryIsFull:
                self.sizes.pop(0)
        raise CannotRun(f"{self.tool} does not fit")


def whole_step(device: str, dtype: str, sizes: Facts) -> Iterator[Facts]:
    """Whole steps of the tools in `sizes["tools"]`, in turns; facts after each tool's turn."""
    shape, beta = WHOLE_STEPS[sizes["workload"]]
    shape = sized_shape(shape, sizes)
    spec = {"shape": asdict(shape), "beta": beta, **sizes}
    found: dict[str, list[Facts]] = {tool: [] for tool in sizes["tools"]}
    without = why_without_trl(sizes["sampler"])
    missing = {tool: without for tool in found if without and tool != "rloo"}
    theirs = {t: TrlTurns(t, spec, shape) for t in found if t != "rloo"}
    with scratch_folder() as folder:
        here = torch.device(device)
        model = random_model(shape, here, torch.bfloat16 if device == "cuda" else torch.float32)
        write_model(model, folder, draw_prompts(shape, 4 * shape.prompts))
        del model
        release_memory()  # the turns need it all
        for _ in range(sizes["turns"]):
            for tool in found:
                if tool in missing:
                    continue
                try:
                    mine = theirs.get(tool)
                    found[tool] += mine.take_turn(folder) if mine else take_turn(tool, spec, folder)
                except (CannotRun, RuntimeError) as error:
                    if tool == "rloo":
                        raise
                    missing[tool] = str(error)
                yield step_facts(shape, beta, found, missing, here)


def step_facts(
    shape: Shape, beta: float, found: dict[str, list[Facts]], missing: Facts, device: torch.device
) -> Facts:
    """The facts of all turns so far. MFU and roofline are of the same work for every tool."""
    ours, sheet = found["rloo"], data_sheet_flops(device)
    flop, floor = step_work(shape, beta, ForwardCost(**ours[0]["cost"]), ours[0])
    middle = {t: statistics.median(s["seconds"] for s in each) for t, each in found.items() if each}
    table = [
        {
            "tool": tool, "s per step": middle[tool], "least": min(s["seconds"] for s in each),
            "most": max(s["seconds"] for s in each), "steps": len(each),
            "MFU": flop / middle[tool] / sheet if sheet else None,
            "of the product": flop / middle[tool] / ours[0]["product"],
            "completions/s": shape.batch / middle[tool], "peak GB": each[-1]["peak_gb"],
            "ratio": None if tool == "rloo" else middle[tool] / middle["rloo"],
            "settings": each[-1]["settings"],
            "split": ", ".join(f"{n} {s:.2f}" for n, s in each[-1]["split"].items() if s >= 0.005),
        } for tool, each in found.items() if each
    ]  # fmt: skip
    return {
        "verdict": "measured", "completions": shape.batch, "s_step": middle["rloo"],
        "roofline_s": floor, "s_step_trl": middle.get("trl"),
        "ratio_trl": middle["trl"] / middle["rloo"] if "trl" in middle else None,
        "ratio_trl_best": middle["trl_best"] / middle["rloo"] if "trl_best" in middle else None,
        "tflops_of_the_product": ours[0]["product"] / 1e12, "runner": ours[0].get("runner"),
        **{f"without_{tool}": why for tool, why in missing.items()}, "table": table,
    }  # fmt: skip


def step_work(shape: Shape, beta: float, cost: ForwardCost, rates: Facts) -> tuple[float, float]:
    """FLOP that a step needs, and the seconds that they and the memory's traffic take at least.

    Training: each prompt once, no old pass. Sampling: prompts once, then all rows of the step in
    each of the completion's steps, in half precision; whichever takes longer, reading or computing.
    """
    batch = draw_batch(shape)
    training = phase_flops(cost, batch, "shared", fewer_passes=int(not beta))
    prompts = sum(p for p, _ in batch.lengths)
    tokens = sum(sum(cs) for _, cs in batch.lengths)
    weights = 2.0 * (cost.layer_params + cost.hidden_size * cost.vocab_size)  # bytes
    row = 4.0 * cost.num_layers * shape.kv_heads * shape.head_dim  # bytes of keys and values
    kept = row * (prompts * shape.k / shape.batch + shape.completion[1] / 2) * shape.batch
    prefill, decode = 2.0 * cost.layer_params * prompts, weights * tokens
    reading = shape.completion[1] * (weights + kept) / rates["bandwidth"]
    sampling = max(reading, decode / rates["product"])
    flop = training + prefill + decode
    return flop, (training + prefill) / rates["product"] + sampling


if __name__ == "__main__":
    sys.exit(main())
