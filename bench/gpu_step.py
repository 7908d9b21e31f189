"""Whole steps of `rloo` with vLLM on the trainer's own GPU: W8, W9 and W10 of the design's table.

No reward model: the score is `sides.digits`, cheap and different for siblings, so a step's `reward`
says nothing. Completions have a forced length, since a random model never ends one. `gpu.py` is the
command; beside TRL's own trainer they run in `gpu_proof.py`.
"""

import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import gpu_parts
import results
import torch
import toys
from gpu_rows import surroundings
from results import Row
from rich.console import Console
from rich.table import Table
from shapes import SHAPES, Shape
from sides import BETA, LONG, digits

from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.launch import rollout_server
from rloo_cli.run import Run, StepProgress
from rloo_cli.train.between_steps import log_step
from rloo_cli.train.build import build_run
from rloo_cli.train.step import update_policy

_TLDR = {"completion": (53, 53), "device": "cuda"}
STEPS = {  # shape, and beta
    "W8": (replace(SHAPES["W5"], name="W8", title="TL;DR 1B, whole step, K = 4", prompts=128,
                   **_TLDR), BETA),
    "W9": (replace(SHAPES["W5"], name="W9", title="TL;DR 1B, whole step, K = 2", prompts=256, k=2,
                   **_TLDR), BETA),
    "W10": (replace(SHAPES["W7"], name="W10", title="math 1.5B, whole step", prompts=128,
                    completion=(1000, 1000)), 0.0),
}  # fmt: skip


def measure(name: str, rounds: int, tiny: bool, seed: int) -> None:
    """Time whole steps: table, row, last line. Says so where there is no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        print(f"{name}: vLLM cannot be imported here, left out", flush=True)
        return
    shape, beta = STEPS[name]
    shape = smaller(shape) if tiny else shape
    with (
        tempfile.TemporaryDirectory(prefix="rloo-gpu-") as place,
        started(shape, beta, Path(place), seed, tiny) as run,
    ):
        step(run)  # does not count
        seconds = [step(run)["step"] for _ in range(rounds)]
        with waiting(run):
            split = step(run)
            split.pop("step")
        row = row_of(shape, beta, seconds, split, run)
    show(shape, row)
    if not tiny:
        results.append([row])
    said = {"workload": name, "s_step": round(row["s_step"], 4), "split": row["split"]}
    print(json.dumps(said), flush=True)


def smaller(shape: Shape) -> Shape:
    """The workload for a CPU."""
    return replace(
        shape, hidden=128, layers=2, heads=2, head_dim=64, mlp=256, vocabulary=512,
        kv_heads=2 if shape.kv_heads == shape.heads else 1, prompt=(6, 12), completion=(8, 8),
        prompts=4, k=2,
    )  # fmt: skip


def write(shape: Shape, folder: Path, seed: int, tiny: bool) -> None:
    """Model, tokenizer and prompts, as `toys.write`: that knows no qwen2 and no long rows."""
    dtype = torch.float32 if tiny else torch.bfloat16
    model = gpu_parts.build(shape, torch.device("cpu" if tiny else "cuda"), dtype, seed, 0.0)
    model.save_pretrained(folder / "model")
    # in a folder of its own: beside a Qwen2, transformers would read it as Qwen2's
    toys.tokenizer(shape.vocabulary).save_pretrained(folder / "tokenizer")
    groups = gpu_parts.case(replace(shape, prompts=4 * shape.prompts, k=1), seed).groups
    lines = [{"prompt": " ".join(f"t{i}" for i in group.prompt_ids)} for group in groups]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@contextmanager
def started(
    shape: Shape,
    beta: float,
    folder: Path,
    seed: int,
    tiny: bool,
    sampler: str = "vllm_colocate",
    *more: str,
) -> Iterator[Run]:
    """A run in `folder`, its engine loaded with the first weights; `more`: of its config.

    A model that is in `folder` already is taken.
    """
    if not (folder / "model").exists():
        write(shape, folder, seed, tiny)
    place = folder / f"rloo-{len(list(folder.glob('rloo-*'))) + 1}"
    words = [
        f"generation={sampler}", *(["generation.allow_untested=true"] * ("vllm" in sampler)),
        "generation.ignore_eos=true", "data.shuffle=false",
        "logging.console=plain", "reward=[]", f"max_steps={LONG}",
        "+reward.digits={type: function, path: 'python:digits', kwargs: {}}",
        f"model.path={folder / 'model'}", f"model.tokenizer={folder / 'tokenizer'}",
        f"data.path={folder / 'prompts.jsonl'}",
        f"root={folder}", f"name={place.name}", f"seed={seed}", f"algorithm.beta={beta}",
        f"algorithm.num_generations={shape.k}", f"train.prompts_per_step={shape.prompts}",
        f"generation.max_completion_length={shape.completion[1]}", *more,
    ]  # fmt: skip
    checked = check.check_config(compose_config(words))
    place.mkdir()
    with rollout_server.background_server(place, checked):
        run = build_run(checked, place, {"digits": digits})
        run.log.display = None
        try:
            run.generator.load(run.policy, run.state.updates)
            yield run
        finally:
            run.generator.close()


def step(run: Run) -> dict[str, float]:
    """A whole step as in `loop.train`. -> seconds of it, by phase"""
    state, gpu = run.state, run.policy.device.type == "cuda"
    run.clock.lap()
    began = time.perf_counter()
    cycle = StepProgress(
        run.rollouts.next_batch(state.step, state.place, state.seen_by_rewards(run))
    )
    update_policy(run, cycle)
    with run.clock.phase("sync"):
        run.generator.load(run.policy, state.updates)
    run.ledger.step(cycle.batch, state.place, cycle.updates.num_updates, cycle.batch.updated)
    state.advance(cycle.batch)
    split = dict(run.clock.seconds)
    log_step(run, cycle.batch, cycle.updates)
    if gpu:
        torch.cuda.synchronize()
    return split | {"step": time.perf_counter() - began}


@contextmanager
def waiting(run: Run) -> Iterator[None]:
    """Every phase waits for the GPU at its end, so that seconds count where they were spent."""
    plain = run.clock.phase

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        with plain(name):
            yield
            if run.policy.device.type == "cuda":
                torch.cuda.synchronize()

    run.clock.phase = phase  # type: ignore[method-assign]
    try:
        yield
    finally:
        run.clock.phase = plain  # type: ignore[method-assign]


def row_of(
    shape: Shape, beta: float, seconds: list[float], split: dict[str, float], run: Run
) -> Row:
    """The line of results.jsonl."""
    middle = statistics.median(seconds)
    gpu = run.policy.device.type == "cuda"
    return surroundings(run.policy.device, time.strftime("%Y-%m-%dT%H:%M:%S")) | {
        "workload": shape.name, "tool": "rloo", "setting": "exact", "variant": "step",
        "K": shape.k, "B": shape.batch, "beta": beta, "rounds": len(seconds),
        "level": str(run.layout_choice), "s_step": middle, "s_step_least": min(seconds),
        "s_step_most": max(seconds), "s_steps": [round(s, 4) for s in seconds],
        "split": {name: round(s, 4) for name, s in split.items()},
        "completions_per_s": shape.batch / middle,
        "peak_mb": round(torch.cuda.max_memory_allocated() / 2**20, 1) if gpu else None,
        "note": "no reward model; peak without the engine's process; split of one more step, whose"
        " phases wait for the GPU",
    }  # fmt: skip


def show(shape: Shape, row: Row) -> None:
    """The table."""
    table = Table("phase", "seconds")
    for name, seconds in row["split"].items():
        table.add_row(name, f"{seconds:.3f}")
    table.add_row("steps", f"{row['s_step']:.3f} ({row['s_step_least']:.3f} -"
                          f" {row['s_step_most']:.3f})")  # fmt: skip
    console = Console(width=110)
    console.print(f"{shape.name} {shape.title}: {shape}", highlight=False)
    console.print(table)
