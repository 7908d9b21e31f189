"""Rows of `gpu_proof.py` about several GPUs: runs of `rloo train`, as a person starts them."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import proof_models
import torch
from proof_kernels import Facts, passed
from safetensors.torch import load_file

SHAPE, PROMPTS = "tiny", 32
APART = 1e-3  # relative, of two whole updates in float32


def trained(given: list[str], folder: Path, name: str) -> Path:
    """A whole run; its folder. Raises RuntimeError with what it said at last."""
    command = [sys.executable, "-m", "rloo_cli", "train", *given, f"name={name}"]
    ended = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=dict(os.environ)
    )
    if ended.returncode:
        said = (ended.stdout + ended.stderr)[-1200:]
        raise RuntimeError(f"rloo train {name}: exit {ended.returncode}: {said}")
    return folder / name


def steps(run: Path) -> list[Facts]:
    """The rows of its steps."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "step_time" in row]


def written(folder: Path, name: str, dtype: str, count: int, length: int = 16) -> list[str]:
    """A model and prompts in a folder, and the command line of a run on them."""
    model = proof_models.build(name, torch.device("cpu"), getattr(torch, dtype))
    shape = proof_models.shape_of(name)
    prompts = proof_models.prompts(shape, PROMPTS)
    proof_models.write(model, shape.vocabulary, folder, prompts)
    return [
        *proof_models.words_of(folder, length), f"model.dtype={dtype}", f"max_steps={count}",
        "train.prompts_per_step=5", "train.micro_batch_tokens=120", "algorithm.beta=0.05",
        "data.max_prompt_length=64", "checkpoint.every=0", "reward=[length_chars]",
        *(["distributed.threads=1"] if not torch.cuda.is_available() else []),
    ]  # fmt: skip


def same(device: str, dtype: str, sizes: Facts) -> Facts:
    """The update of several processes against that of one, by plain descent in float32."""
    plain = ["train.optimizer=torch.optim:SGD", "train.learning_rate=0.01"]
    spread = [*sizes["words"], f"distributed.num_processes={sizes['ranks']}"]
    with tempfile.TemporaryDirectory(prefix="rloo-proof-") as path:
        folder = Path(path)
        given = [*written(folder, SHAPE, dtype, sizes["steps"]), *plain]
        one = trained(given, folder, "one")
        several = trained([*given, *spread], folder, "several")
        begin = load_file(folder / "model" / "model.safetensors")
        found = [load_file(run / "final" / "model.safetensors") for run in (one, several)]
        seconds = [statistics.median(r["step_time"] for r in steps(run)) for run in (one, several)]
    moved = max(float((found[0][n] - begin[n]).abs().max()) for n in begin)
    if not moved:
        raise RuntimeError("the update of one process is nothing: there is nothing to compare")
    apart = max(distance(*(f[n] - begin[n] for f in found)) for n in begin)
    return {
        "verdict": passed(apart <= APART), "off": apart, "allowed": APART, "moved": moved,
        "s_step_one": seconds[0], "s_step_several": seconds[1], "ranks": sizes["ranks"],
    }  # fmt: skip


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Of two updates of a tensor, relative."""
    return float((other.double() - one.double()).norm() / one.double().norm().clamp(min=1e-12))


def engines(device: str, dtype: str, sizes: Facts) -> Facts:
    """An engine beside each process: what they sample has the trainer's log-probabilities."""
    with tempfile.TemporaryDirectory(prefix="rloo-proof-") as path:
        folder = Path(path)
        given = written(folder, "tiny", dtype, sizes["steps"])
        run = trained([
            *given, "generation=vllm_colocate", "generation.allow_untested=true", *sizes["words"],
            f"distributed.num_processes={sizes['ranks']}", "train.learning_rate=1e-3",
        ], folder, "beside")  # fmt: skip
        rows = steps(run)
        said = run / "logs" / "latest"
        logs = sorted(str(p.name) for p in said.glob("*")) if said.exists() else []
    worst = max(row["sampling/logp_diff_max"] for row in rows)
    limit = 0.5 if dtype == "bfloat16" else 1e-2
    right = all(row["sampling/missing_frac"] == 0 and row["staleness/max"] == 0 for row in rows)
    return {
        "verdict": passed(right and worst <= limit), "most_nats": worst, "allowed": limit,
        "ranks": sizes["ranks"], "steps": len(rows), "logs": " ".join(logs),
        "s_step": statistics.median(row["step_time"] for row in rows),
    }  # fmt: skip
