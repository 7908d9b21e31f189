"""Rows of `gpu.py` that are whole runs of `rloo train`: a real one, memory, switches, several GPUs.

`real_run` is the command line that a person types, unmodified: several seeds, the first one again,
and the first one killed in the middle and resumed.
"""

import filecmp
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import plan
import torch
from gpu_models import (
    Facts,
    draw_prompts,
    keep_file,
    model_shape,
    random_model,
    release_memory,
    scratch_folder,
    smoke_keys,
    verdict_of,
    write_model,
)
from safetensors.torch import load_file

from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.train import memory_check
from rloo_cli.train.build import build_run
from rloo_cli.train.loop import run_training_loop

WEIGHTS = Path("final", "model.safetensors")
KILLED = (137, 6)  # of a run whose process was killed: by itself, or told by its parent
APART = 1e-3  # relative, of two whole updates in float32


def metric_rows(run: Path) -> list[Facts]:
    """The lines of a run's metrics.jsonl."""
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def step_rows(run: Path) -> list[Facts]:
    """The lines of its training steps."""
    return [row for row in metric_rows(run) if "step_time" in row]


class TrainCommand:
    """One `rloo train` in a process of its own, and what it printed, in `folder`/NAME.txt."""

    def __init__(self, folder: Path, name: str, words: Sequence[str], **environment: str):
        self.run, self.said = folder / name, folder / f"{name}.txt"
        command = [sys.executable, "-m", "rloo_cli", "train", *words, f"name={name}"]
        self.command = " ".join(command[1:])
        with self.said.open("a") as out:
            self.process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=out,
                                            env=os.environ | environment)  # fmt: skip

    def finish(self) -> int:
        """Wait for its end; its output, metrics and picture are kept. -> exit code"""
        code, name = self.process.wait(), self.run.name
        print(f"exit code {code}: {self.command}", flush=True)
        for path in (self.said, *(self.run / n for n in ("metrics.jsonl", "run.json"))):
            keep_file(path, path.name if path is self.said else f"{name}-{path.name}")
        keep_file(self.run / "curves.png", f"{name}-curves.png")
        return code

    def finish_well(self) -> Path:
        """Wait for its end. -> its folder. Raises RuntimeError where it failed."""
        if code := self.finish():
            tail = self.said.read_text(errors="replace")[-1200:]
            raise RuntimeError(f"exit code {code}: {self.command}: {tail}")
        return self.run


def run_facts(name: str, run: Path) -> Facts:
    """Scores of a finished run before and after, and seconds a step."""
    rows = metric_rows(run)
    scores = [row["eval_reward"] for row in rows if "eval_reward" in row]
    seconds = [row["step_time"] for row in step_rows(run)]
    tokens = [row["perf/tokens_per_s"] for row in step_rows(run)]
    mfu = [row["perf/mfu"] for row in step_rows(run) if "perf/mfu" in row]
    return {"run": name, "score before": scores[0], "score after": scores[-1],
            "s per step": statistics.median(seconds), "steps": len(seconds),
            "tokens/s": statistics.median(tokens),
            "MFU": statistics.median(mfu) if mfu else None}  # fmt: skip


def real_run(device: str, dtype: str, sizes: Facts) -> Iterator[Facts]:
    """Seed 1 alone; then the other seeds, seed 1 again and a killed one, side by side.

    Facts after the first run and at the end. Confirmed where every run ends well and the killed
    one was killed and resumed; whether weights have equal bits is said, and is no criterion.
    """
    first, *others = sizes["seeds"]
    with scratch_folder() as folder:
        words = [f"+recipe={sizes['recipe']}", f"root={folder}", "logging.console=plain",
                 *sizes["words"]]  # fmt: skip
        one = TrainCommand(folder, f"seed-{first}", [*words, f"seed={first}"]).finish_well()
        table = [run_facts(f"seed {first}, alone", one)]
        facts = {"verdict": "measured", "recipe": sizes["recipe"]}
        yield facts | summarize_runs(table)
        beside = [TrainCommand(folder, f"seed-{s}", [*words, f"seed={s}"]) for s in others]
        again = TrainCommand(folder, "again", [*words, f"seed={first}"])
        cut = [*words, f"seed={first}", f"checkpoint.every={sizes['every']}"]
        fault = f"step@{sizes['kill_step']}=kill9"
        killed = TrainCommand(folder, "cut", cut, RLOO_ALLOW_FAULTS="1", RLOO_FAULTS=fault)
        code = killed.finish()
        resumed = TrainCommand(folder, "cut", cut)
        for seed, command in zip(others, beside, strict=True):
            table.append(run_facts(f"seed {seed}", command.finish_well()))
        for name, command in {"again": again, "killed and resumed": resumed}.items():
            run = command.finish_well()
            same = filecmp.cmp(one / WEIGHTS, run / WEIGHTS, shallow=False)
            bits = "equal bits" if same else "other bits"
            table.append(
                run_facts(f"seed {first}, {name}", run) | {f"weights of seed {first}": bits}
            )
            facts[name.replace(" ", "_")] = bits
        really = code in KILLED
        facts |= {"verdict": verdict_of(really), "exit_code_of_the_killed_run": code}
        yield facts | summarize_runs(table)


def summarize_runs(table: list[Facts]) -> Facts:
    """The table of all runs so far, and the span of their scores."""
    before, after = ([row[f"score {when}"] for row in table] for when in ("before", "after"))
    return {"score_before": min(before), "score_after_least": min(after),
            "score_after_most": max(after), "s_step_alone": table[0]["s per step"],
            "table": list(table)}  # fmt: skip


@contextmanager
def planned_model(setting: plan.Setting, model: Facts) -> Iterator[Path]:
    """A folder with the random model and prompts of a configuration; `model` changes its sizes."""
    kind = plan.MODELS[setting.model]["model_type"]
    given = {n: v for n, v in model.items() if kind == "qwen3" or n not in plan.ONLY_QWEN}
    changed = {name: values | given for name, values in plan.MODELS.items()}
    with scratch_folder() as folder:
        with mock.patch.dict(plan.MODELS, changed):
            plan.make(setting, folder)
        yield folder


def train_here(words: list[str], folder: Path) -> tuple[Any, float]:
    """A whole run in this process. -> the run, and the bytes that were held before it"""
    settings = check.resolve_config(check.check_config(compose_config(words)))
    root = folder / str(settings.name)
    root.mkdir()
    before = memory_check.reset_peak_memory()
    run = build_run(settings, root)
    try:
        run_training_loop(run)
    finally:
        run.log.close()
        run.generator.close()
    return run, before


def compare_memory(device: str, dtype: str, sizes: Facts) -> Iterator[Facts]:
    """Peak memory of two steps, as the run itself measures and predicts it."""
    plain = plan.SETTINGS[sizes["setting"]]
    setting = plan.Setting(plain.says, plain.model, plain.words, sizes["prompt"])
    with planned_model(setting, sizes["model"]) as folder:
        words = [*plan.words(setting, folder), *sizes["words"]]
        given = [] if any("model.dtype" in w for w in words) else [f"model.dtype={dtype}"]
        run, before = train_here([*words, *given], folder)
        got = memory_check.compare_peak_memory(run, before)
    if not got and device == "cpu":  # a rehearsal's few bytes fit into what was given back
        yield {"verdict": "measured", "note": "less was held at most than when it began"}
        return
    if not got:
        raise RuntimeError("the system does not tell what was held at most")
    off, within = got["predicted_bytes"] / got["measured_bytes"] - 1, sizes["within"]
    yield {
        "verdict": "measured" if within is None else verdict_of(abs(off) <= within),
        "measured_gb": got["measured_bytes"] / 1e9,
        "predicted_gb": got["predicted_bytes"] / 1e9, "off": off, "allowed": within,
        "phase": got["predicted_phase"], "level": str(run.layout_choice),
    }  # fmt: skip


def compare_switch(device: str, dtype: str, sizes: Facts) -> Iterator[Facts]:
    """Seconds of an update without a word of the command line and with it, A B A B."""
    setting = plan.Setting("", "qwen3", (), 64 if sizes["steps"] > 1 else 8)
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    facts: Facts = {"verdict": "measured", "word": sizes["word"]}
    with planned_model(setting, sizes["model"]) as folder:
        for number in range(2 * sizes["rounds"]):
            name = ("without", "with")[number % 2]
            words = [
                *plan.words(setting, folder), *sizes["base"], f"model.dtype={dtype}",
                f"generation.max_completion_length={sizes['length']}",
                "train.micro_batch_tokens=null",
                f"max_steps={sizes['steps'] + 1}", f"train.prompts_per_step={sizes['prompts']}",
                f"name=run-{number}", *([sizes["word"]] if name == "with" else []),
            ]  # fmt: skip
            run, _ = train_here(words, folder)
            rows = step_rows(folder / f"run-{number}")
            seconds[name] += [update_seconds(row) for row in rows[1:]]  # the first one compiles
            facts["level"] = str(run.layout_choice)
            facts[f"tokens_{name}"] = run.forward_limits.tokens
            del run  # before the next one plans its memory
            release_memory()
            middle = {n: statistics.median(each) for n, each in seconds.items() if each}
            facts |= {f"s_{n}": s for n, s in middle.items()}
            if len(middle) == 2:
                yield facts | {"times_as_fast": middle["without"] / middle["with"]}


def update_seconds(row: Facts) -> float:
    """The seconds of a step without sampling and scoring."""
    return sum(row.get(f"time/{name}", 0.0) for name in ("update", "optimizer", "reference"))


def rank_words(folder: Path, dtype: str, count: int) -> list[str]:
    """A model and prompts in a folder, and the command line of a run on them."""
    shape = model_shape("tiny")
    model = random_model(shape, torch.device("cpu"), getattr(torch, dtype))
    write_model(model, folder, draw_prompts(shape, 32))
    return [
        *smoke_keys(folder, 16, dtype), f"max_steps={count}", "train.prompts_per_step=5",
        "train.micro_batch_tokens=120", "algorithm.beta=0.05", "checkpoint.every=0",
        "reward=[length_chars]",
        *(["distributed.threads=1"] if not torch.cuda.is_available() else []),
    ]  # fmt: skip


def compare_ranks(device: str, dtype: str, sizes: Facts) -> Iterator[Facts]:
    """The update of several processes against that of one, by plain descent in float32."""
    spread = [*sizes["words"], f"distributed.num_processes={sizes['ranks']}"]
    with scratch_folder() as folder:
        given = [word for word in rank_words(folder, dtype, sizes["steps"]) if word != "name=run"]
        given += ["train.optimizer=torch.optim:SGD", "train.learning_rate=0.01"]
        one = TrainCommand(folder, "one", given).finish_well()
        several = TrainCommand(folder, "several", [*given, *spread]).finish_well()
        begin = load_file(folder / "model" / "model.safetensors")
        found = [load_file(run / WEIGHTS) for run in (one, several)]
        seconds = [statistics.median(r["step_time"] for r in step_rows(run))
                   for run in (one, several)]  # fmt: skip
    moved = max(float((found[0][n] - begin[n]).abs().max()) for n in begin)
    if not moved:
        raise RuntimeError("the update of one process is nothing: there is nothing to compare")
    apart = 0.0
    for name, start in begin.items():
        a, b = (f[name].double() - start.double() for f in found)
        apart = max(apart, float((b - a).norm() / a.norm().clamp(min=1e-12)))
    yield {
        "verdict": verdict_of(apart <= APART), "off": apart, "allowed": APART, "moved": moved,
        "s_step_one": seconds[0], "s_step_several": seconds[1], "ranks": sizes["ranks"],
    }  # fmt: skip


def compare_rank_engines(device: str, dtype: str, sizes: Facts) -> Iterator[Facts]:
    """An engine beside each process: what they sample has the trainer's log-probabilities."""
    with scratch_folder() as folder:
        given = [word for word in rank_words(folder, dtype, sizes["steps"]) if word != "name=run"]
        given += ["generation=vllm_colocate", "generation.allow_untested=true", *sizes["words"],
                  f"distributed.num_processes={sizes['ranks']}",
                  "train.learning_rate=1e-3"]  # fmt: skip
        rows = step_rows(TrainCommand(folder, "beside", given).finish_well())
    worst, allowed = max(row["sampling/logp_diff_max"] for row in rows), 1e-2
    allowed = 0.5 if dtype == "bfloat16" else allowed
    right = all(row["sampling/missing_frac"] == 0 and row["staleness/max"] == 0 for row in rows)
    yield {
        "verdict": verdict_of(right and worst <= allowed), "most_nats": worst, "allowed": allowed,
        "ranks": sizes["ranks"], "steps": len(rows),
        "s_step": statistics.median(row["step_time"] for row in rows),
    }  # fmt: skip
