"""Rows of `gpu_proof.py` about training: phases, memory, switches, the optimizer. No vLLM."""

import json
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import gpu
import gpu_parts
import gpu_rows
import plan
import torch
from proof_kernels import Facts, passed, timed
from shapes import SHAPES

from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.train import memory_check
from rloo_cli.train.build import build_run
from rloo_cli.train.loop import run_training_loop
from rloo_cli.utils.errors import RunError


def phase(device: str, dtype: str, sizes: Facts) -> Facts:
    """A train phase in all its variants: gradients compared, then timed in turns."""
    shape = SHAPES[sizes["workload"]]
    shape = gpu.tiny(shape) if sizes["tiny"] else shape
    shape = replace(shape, prompts=sizes["prompts"] or shape.prompts)
    here = torch.device(device)
    peak = gpu.ceiling(here, 128 if sizes["tiny"] else 8192)
    names = [*gpu_parts.DEFAULT, *([] if sizes["tiny"] else ["shared_again"])]
    found = gpu.Bench(shape, names, here).run(sizes["rounds"])
    case = gpu_parts.case(shape, gpu.SEED)
    rows = gpu_rows.rows_of(shape, case, found, here, peak)
    ours = [row["s_train"] for row in rows if row["variant"] in ("shared", "shared_gc")]
    table = [
        {
            "variant": row["variant"], "ms": 1000 * row["s_train"],
            "least": 1000 * row["s_train_least"], "most": 1000 * row["s_train_most"],
            "MFU": row["mfu"],
            "MFU with recompute": row["mfu_with_recompute"],
            "roofline ms": 1000 * row["s_train"] * row["mfu"],
            "peak GB": None if row["peak_mb"] is None else row["peak_mb"] / 1024,
            "groups": row["micro_groups"], "gradient off": row["gradient_rel_diff"],
            **({"ratio": row["s_train"] / min(ours)} if row["tool"] == "trl" and ours else {}),
        } for row in rows
    ]  # fmt: skip
    brief = gpu_rows.brief(shape.name, rows)
    return {
        "verdict": passed(gpu_rows.equal(rows)), "dtype": rows[0]["dtype"] if rows else dtype,
        "tflops_in_a_product": peak / 1e12, "ratio_gc": brief["ratio_gc"],
        "ratio_nogc": brief["ratio_nogc"], "memory_ratio_nogc": brief["memory_ratio_nogc"],
        "left_out": ", ".join(set(names) - {row["variant"] for row in rows}) or None,
        "table": table,
    }  # fmt: skip


@contextmanager
def written(setting: plan.Setting, model: Facts) -> Iterator[Path]:
    """A folder with a configuration's random model and prompts; `model` changes its sizes."""
    folder = Path(tempfile.mkdtemp(prefix="rloo-proof-run-"))
    kind = plan.MODELS[setting.model]["model_type"]
    given = {n: v for n, v in model.items() if kind == "qwen3" or n not in plan.ONLY_QWEN}
    changed = {name: values | given for name, values in plan.MODELS.items()}
    try:
        with mock.patch.dict(plan.MODELS, changed):
            plan.make(setting, folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def done(words: list[str], folder: Path) -> tuple[Any, float]:
    """A whole run in this process; the run, and the bytes that were held before it."""
    settings = check.check_config(compose_config(words))
    place = folder / str(settings.name)
    place.mkdir()
    before = memory_check.reset_peak_memory()
    run = build_run(settings, place)
    try:
        run_training_loop(run)
    finally:
        run.log.close()
        run.generator.close()
    return run, before


def memory(device: str, dtype: str, sizes: Facts) -> Facts:
    """Peak memory of two steps, as the run itself measures and predicts it."""
    plain = plan.SETTINGS[sizes["setting"]]
    setting = plan.Setting(plain.says, plain.model, plain.words, sizes["prompt"])
    with written(setting, sizes["model"]) as folder:
        words = [*plan.words(setting, folder), *sizes["words"]]
        given = [] if any("model.dtype" in w for w in words) else [f"model.dtype={dtype}"]
        try:
            run, before = done([*words, *given], folder)
        except RunError as error:
            raise RuntimeError(str(error.render())) from error
        told = memory_check.compare_peak_memory(run, before)
    if not told and device == "cpu":  # a rehearsal's few bytes fit into what rows before gave back
        return {"verdict": "measured", "why": "less was held at most than when it began"}
    if not told:
        raise RuntimeError("the system does not tell what was held at most")
    off = told["predicted_bytes"] / told["measured_bytes"] - 1
    within = sizes["within"]
    return {
        "verdict": "measured" if within is None else passed(abs(off) <= within),
        "measured_gb": told["measured_bytes"] / 1e9,
        "predicted_gb": told["predicted_bytes"] / 1e9,
        "off": off,
        "allowed": within,
        "phase": told["predicted_phase"],
        "level": str(run.layout_choice),
    }


def switch(device: str, dtype: str, sizes: Facts) -> Facts:
    """Seconds per step with a word of the command line and without it, A B A B."""
    setting = plan.Setting("", "qwen3", (), 64 if sizes["steps"] > 1 else 8)
    length = f"generation.max_completion_length={sizes['length']}"
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    with written(setting, sizes["model"]) as folder:
        for number in range(4):
            name = ("without", "with")[number % 2]
            words = [
                *plan.words(setting, folder), *sizes["base"], length, f"model.dtype={dtype}",
                "train.micro_batch_tokens=null",
                f"max_steps={sizes['steps'] + 1}", f"train.prompts_per_step={sizes['prompts']}",
                f"name=run-{number}", *([sizes["word"]] if name == "with" else []),
            ]  # fmt: skip
            run, _ = done(words, folder)
            lines = (folder / f"run-{number}" / "metrics.jsonl").read_text().splitlines()
            rows = [row for row in map(json.loads, lines) if "step_time" in row]
            seconds[name] += [update_seconds(row) for row in rows[1:]]  # the first one compiles
            level = str(run.layout_choice)
            del run  # before the next one plans its memory
            gpu.clear()
    middle = {name: statistics.median(each) for name, each in seconds.items()}
    return {
        "verdict": "measured", "word": sizes["word"], "s_without": middle["without"],
        "s_with": middle["with"], "times_as_fast": middle["without"] / middle["with"],
        "level": level,
    }  # fmt: skip


def update_seconds(row: Facts) -> float:
    """Of a step, without sampling."""
    return sum(
        v for n, v in row.items() if n in ("time/update", "time/optimizer", "time/reference")
    )


def offloaded(device: str, dtype: str, sizes: Facts) -> Facts:
    """AdamW in the CPU's memory, as `distributed.offload` has it, and copies there and back."""
    here, seconds = torch.device(device), {}
    for name in ("fused", "default"):
        weights = [torch.zeros(sizes["size"], requires_grad=True) for _ in range(sizes["tensors"])]
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        inner = torch.optim.AdamW(weights, lr=1e-5, fused=True if name == "fused" else None)
        inner.step()
        seconds[name] = timed(inner.step, sizes["steps"])
        del inner, weights
    there = torch.zeros(sizes["size"], device=here)
    rates = {}
    for name in ("pinned", "pageable") if here.type == "cuda" else ():
        near = torch.zeros(sizes["size"], pin_memory=name == "pinned")
        rates[f"gb_per_s_to_cpu_{name}"] = near.nbytes / 1e9 / timed(
            lambda near=near: near.copy_(there, non_blocking=True), sizes["steps"])  # fmt: skip
        rates[f"gb_per_s_to_gpu_{name}"] = near.nbytes / 1e9 / timed(
            lambda near=near: there.copy_(near, non_blocking=True), sizes["steps"])  # fmt: skip
    count = sizes["size"] * sizes["tensors"]
    return {
        "verdict": "measured", "parameters": count, "threads": torch.get_num_threads(),
        "s_fused": seconds["fused"], "s_default": seconds["default"],
        "times_as_fast": seconds["default"] / seconds["fused"], **rates,
    }  # fmt: skip


def optimizer(device: str, dtype: str, sizes: Facts) -> Facts:
    """AdamW over masters of this size, in one kernel and in several."""
    here, seconds, peaks = torch.device(device), {}, {}
    for name in ("fused", "foreach"):
        weights = [torch.zeros(sizes["size"], device=here, requires_grad=True)
                   for _ in range(sizes["tensors"])]  # fmt: skip
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        inner = torch.optim.AdamW(weights, lr=1e-5, **{name: True})
        inner.step()
        if here.type == "cuda":
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        seconds[name] = timed(inner.step, sizes["steps"])
        if here.type == "cuda":
            peaks[f"gb_on_top_{name}"] = (torch.cuda.max_memory_allocated() - before) / 1e9
        del inner, weights
    count = sizes["size"] * sizes["tensors"]
    return {
        "verdict": "measured", "parameters": count, "ms_fused": 1000 * seconds["fused"],
        "ms_foreach": 1000 * seconds["foreach"], **peaks,
        "gb_per_s_fused": 7 * 4 * count / seconds["fused"] / 1e9,
    }  # fmt: skip
