"""Rows of `gpu_proof.py`: whole steps of `rloo` and of TRL's RLOOTrainer, A B A B.

Each turn is a fresh process with nothing else on the GPU: a step that does not count, and a few
that do. TRL: bfloat16 autocast as it comes, no gradient checkpointing, the largest of a few
micro-batches that fits; where none does, with checkpointing. vLLM beside the trainer has the same
share of memory in both.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

import gpu
import gpu_parts
import gpu_rows
import gpu_step
from gpu_parts import VARIANTS
from proof_child import CannotRun
from proof_kernels import Facts
from proof_side import SEED
from shapes import SHAPES, Shape
from sides import BETA

from rloo_cli.data.bin_packing import ForwardCost as Cost
from rloo_cli.generation.vllm.versions import installed_vllm_version

HERE = Path(__file__).resolve().parent
TRL_PYTHON = "RLOO_TRL_PYTHON"
TRL_TAKES = ((0, 22), (0, 31))  # versions of vLLM, by TRL 1.16's own check
WITHOUT = {  # whole steps that transformers samples
    "W5": (replace(SHAPES["W5"], completion=(53, 53)), BETA),
    "W7": (replace(SHAPES["W7"], completion=(512, 512)), 0.0),
}
# Positions of a padded micro-batch of TRL's above which none was tried: without checkpointing, 16
# layers of 2048 keep about 2 MB for each.
POSITIONS = 20_000


class Full(Exception):
    """A turn ran out of memory."""


def turn(tool: str, spec: Facts, folder: Path) -> Facts:
    """One tool's turn. Raises Full, RuntimeError."""
    python = os.environ.get(TRL_PYTHON) if tool == "trl" else None
    path = folder / "spec.json"
    path.write_text(json.dumps(spec), encoding="utf-8")
    words = [python or sys.executable, str(HERE / "proof_side.py"), tool, str(path)]
    ended = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    if ended.returncode == 9 or "out of memory" in ended.stderr:
        raise Full(ended.stderr[-300:])
    if ended.returncode:
        lines = ended.stderr.strip().splitlines()
        said = next((line for line in reversed(lines) if "rror: " in line), "")
        tail = "\n".join(lines)[-3000:]
        raise RuntimeError(f"{tool}: exit {ended.returncode}: {said.strip()}\n{tail}")
    found: Facts = json.loads(ended.stdout.strip().splitlines()[-1])
    return found


def why_no_trl(sampler: str) -> str:
    """Why TRL's side cannot run; "" = it can."""
    if os.environ.get(TRL_PYTHON) or sampler != "vllm":
        return ""
    found = installed_vllm_version()
    known = tuple(int("".join(filter(str.isdigit, p)) or 0) for p in found.split(".")[:2])
    if TRL_TAKES[0] <= known <= TRL_TAKES[1]:
        return ""
    return (
        f"not with vLLM {found}: TRL takes 0.22 to 0.31; --trl-python names the Python of an"
        " environment with one of them"
    )


class Trl:
    """TRL's turns, with settings that fit."""

    def __init__(self, spec: Facts, shape: Shape):
        most = POSITIONS // (shape.prompt[1] + shape.completion[1])
        halves = [shape.batch >> i for i in range(12) if shape.batch % 2**i == 0]
        sizes = [size for size in halves if size <= most and size % shape.k == 0] or [shape.k]
        self.spec, self.tried = spec, [(s, False) for s in sizes[:3]] + [(sizes[0], True)]

    def turn(self, folder: Path) -> Facts:
        """The next turn; what does not fit is not tried again."""
        while self.tried:
            micro, checkpointing = self.tried[0]
            spec = self.spec | {"micro": micro, "checkpointing": checkpointing}
            try:
                return turn("trl", spec, folder)
            except Full:
                self.tried.pop(0)
        raise Full("TRL fits with none of its micro-batches")


def whole(device: str, dtype: str, sizes: Facts) -> Facts:
    """Whole steps of both tools in turns."""
    without = sizes["sampler"] != "vllm"
    shape, beta = (WITHOUT if without else gpu_step.STEPS)[sizes["workload"]]
    shape = gpu_step.smaller(shape) if sizes["tiny"] else shape
    shape = replace(shape, prompts=sizes["prompts"] or shape.prompts)
    spec = {"shape": asdict(shape), "beta": beta, "tiny": sizes["tiny"], "steps": sizes["steps"],
            "sampler": sizes["sampler"]}  # fmt: skip
    missing, found = why_no_trl(sizes["sampler"]), {"rloo": [], "trl": []}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rloo-proof-") as place:
        folder = Path(place)
        gpu_step.write(shape, folder, SEED, sizes["tiny"])
        gpu.clear()  # the turns need it all
        theirs = Trl(spec, shape)
        for number in range(sizes["turns"]):
            if number and time.monotonic() - began > sizes["enough_s"]:
                break  # what there is is kept: the row's own limit would lose it
            found["rloo"].append(turn("rloo", spec, folder))
            if not missing:
                try:
                    found["trl"].append(theirs.turn(folder))
                except (Full, RuntimeError) as error:
                    missing = str(error).strip()[-1500:]
    if not found["rloo"]:
        raise CannotRun(missing)
    return told(shape, beta, found, missing)


def told(shape: Shape, beta: float, found: dict[str, list[Facts]], missing: str) -> Facts:
    """The facts of all turns. MFU and roofline are of the same work for both tools."""
    first = found["rloo"][0]
    flop, floor = work(shape, beta, Cost(**first["cost"]), first)
    seconds = {t: [s for each in turns for s in each["seconds"]] for t, turns in found.items()}
    middle = {tool: statistics.median(each) for tool, each in seconds.items() if each}
    table = [
        {
            "tool": tool, "s per step": middle[tool], "least": min(seconds[tool]),
            "most": max(seconds[tool]), "MFU": flop / middle[tool] / first["peak_flops"],
            "completions/s": shape.batch / middle[tool], "peak GB": turns[-1]["peak_gb"],
            "settings": turns[-1]["settings"],
            "split": ", ".join(f"{n} {s:.2f}" for n, s in turns[-1]["split"].items()),
            **({"ratio": middle["trl"] / middle["rloo"]} if tool == "trl" else {}),
        } for tool, turns in found.items() if turns
    ]  # fmt: skip
    both = "trl" in middle
    return {
        "verdict": "measured", "completions": shape.batch, "turns": len(found["rloo"]),
        "s_step": middle["rloo"], "roofline_s": floor,
        "s_step_trl": middle.get("trl"),
        "ratio": middle["trl"] / middle["rloo"] if both else None, "trl": missing or None,
        "tflops_in_a_product": first["peak_flops"] / 1e12, "gb_per_s": first["bandwidth"] / 1e9,
        "table": table,
    }  # fmt: skip


def work(shape: Shape, beta: float, cost: Cost, rates: Facts) -> tuple[float, float]:
    """FLOP that a step needs, and the seconds that they and the memory's traffic take at least.

    Training: each prompt once, no old pass. Sampling: prompts once, then all rows of the step in
    each of the completion's steps, in half precision; whichever takes longer, reading or computing.
    """
    case = gpu_parts.case(shape, SEED)
    passes = 4 if beta else 3
    training = gpu_rows.done(cost, case, VARIANTS["shared"], shape.prompts)[0] * passes / 4
    prompts = sum(p for p, _ in case.lengths)
    tokens = sum(sum(cs) for _, cs in case.lengths)
    read = 2.0 * (cost.layer_params + cost.hidden_size * cost.vocab_size)  # bytes of weights
    row = 4.0 * cost.num_layers * shape.kv_heads * shape.head_dim  # bytes of keys and values
    kept = row * (prompts * shape.k / shape.batch + shape.completion[1] / 2) * shape.batch
    prefill, decode = 2.0 * cost.layer_params * prompts, read * tokens
    steps = shape.completion[1]
    sampling = max(steps * (read + kept) / rates["bandwidth"], decode / rates["peak_flops"])
    flop = training + prefill + decode
    return flop, (training + prefill) / rates["peak_flops"] + sampling
