"""Rows of `gpu.py` about vLLM: beside the trainer, as a server, weight sync, tokens per second.

The criterion is the same everywhere: after each change of the weights, what was sampled has the
log-probabilities that the trainer computes, also after the engine has slept and no weights came.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import side_rloo
import torch
from gpu_models import (
    RUNNER,
    SEED,
    WHOLE_STEPS,
    Facts,
    draw_prompts,
    keep_file,
    model_runner,
    model_shape,
    random_model,
    scratch_folder,
    sized_shape,
    smoke_keys,
    verdict_of,
    write_model,
)
from gpu_whole import rloo_keys
from transformers import AutoTokenizer

from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.config.schema import GenerationConfig, ModelConfig, RunConfig
from rloo_cli.data.batch import Group
from rloo_cli.data.packing import whole_group_slices
from rloo_cli.distributed.device_count import visible_gpus
from rloo_cli.generation.vllm import arguments, server_file
from rloo_cli.generation.vllm.generator import (
    VllmGenerator,
    build_colocate_generator,
    build_server_generator,
)
from rloo_cli.policy import lora
from rloo_cli.policy.model import Policy

PART = 0.25  # of what a run's own guard lets pass, in rms nats per token
Prompts = list[list[int]]


class TrainerAndEngine:
    """A trainer's model and an engine that samples for it."""

    def __init__(self, model: Any, run: RunConfig, folder: Path, prompts: Prompts, server: bool):
        self.model, self.run, self.prompts = model, run, prompts
        make = build_server_generator if server else build_colocate_generator
        tokens = AutoTokenizer.from_pretrained(folder / "tokenizer")
        self.root = folder / str(run.name)
        self.root.mkdir(exist_ok=True)
        self.generator: VllmGenerator = make(model, tokens, run, 4096, self.root, print)
        self.policy, self.version = Policy(model, 1.0), 0

    def send_weights(self) -> float:
        """Send the weights as a new version. -> seconds"""
        self.version += 1
        began = time.perf_counter()
        self.generator.load(self.policy, self.version)
        return time.perf_counter() - began

    def sample(self, number: int) -> tuple[list[Group], float]:
        """Two completions of each prompt, and the seconds that they took."""
        groups, seeds = seeded_groups(self.prompts, number, 2)
        began = time.perf_counter()
        self.generator.generate(groups, seeds)
        return groups, time.perf_counter() - began

    def logp_gap(self, groups: list[Group]) -> tuple[float, float]:
        """Rms and largest difference of the log-probabilities of what was sampled."""
        micro = self.policy.pack(groups, whole_group_slices(groups, range(len(groups))))
        assert micro.behaviour_logp is not None
        apart = self.policy.frozen_logp(micro).logp - micro.behaviour_logp
        return float(apart.square().mean().sqrt()), float(apart.abs().max())

    def fill_memory(self) -> None:
        """Let torch keep most of a GPU that the sleeping engine has left: it must be given back
        before the engine can wake up."""
        keys: Any = getattr(self.run.generation, "colocate", None)
        if torch.cuda.is_available() and getattr(keys, "sleep", "none") != "none":
            free, _ = torch.cuda.mem_get_info()
            torch.empty(int(0.9 * free), dtype=torch.uint8, device="cuda")

    @torch.no_grad()
    def move_weights(self) -> None:
        """Move every weight that is trained by a tenth of its spread."""
        for weight in self.model.parameters():
            if weight.requires_grad:
                weight.add_(0.1 * torch.randn_like(weight) * weight.std().clamp(min=0.05))

    def compare_rounds(self, updates: int) -> Iterator[Facts]:
        """Change the weights, send them, sample twice: the second time nothing is sent."""
        table, allowed = [], PART * self.generator.tolerance
        for update in range(updates):
            self.move_weights()
            self.fill_memory()
            sync = self.send_weights()
            for again in (False, True):
                groups, seconds = self.sample(2 * update + again)
                rms, most = self.logp_gap(groups)
                tokens = sum(r.length for g in groups for r in g.rollouts)
                table.append({
                    "update": update + 1, "weights": "not sent again" if again else "sent",
                    "rms nats": rms, "most nats": most, "s sync": None if again else sync,
                    "s sampling": seconds, "tokens/s": tokens / seconds,
                })  # fmt: skip
            worst = max(row["rms nats"] for row in table)
            syncs = [row["s sync"] for row in table if row["s sync"] is not None]
            middle = statistics.median(syncs[1:] or syncs)
            moved = self.generator.metrics.get("vllm/synced_bytes", 0.0)
            yield {
                "verdict": verdict_of(worst <= allowed), "rms_nats": worst, "allowed": allowed,
                "most_nats": max(row["most nats"] for row in table), "s_first_sync": syncs[0],
                "s_sync": middle, "synced_mb": moved / 2**20, "gb_per_s": moved / middle / 1e9,
                "runner": model_runner(self.run, self.model), "table": list(table),
            }  # fmt: skip

    def close(self) -> None:
        """End the engine; its log is kept."""
        self.generator.close()
        for log in self.root.glob("**/engine.log"):
            keep_file(log, "engine.log")


def seeded_groups(prompts: Prompts, number: int, k: int) -> tuple[list[Group], list[list[int]]]:
    """Groups without completions yet, and K seeds for each."""
    groups = [Group(i, {}, "", prompt) for i, prompt in enumerate(prompts)]
    return groups, [[number * 10**6 + i * k + j for j in range(k)] for i in range(len(groups))]


@contextmanager
def engine_beside(device: str, dtype: str, sizes: Facts, words: Sequence[str]) -> Iterator[Any]:
    """A model on the device and an engine beside the trainer, with these keys of the config."""
    with scratch_folder() as folder:
        shape = model_shape(sizes["model"])
        model = random_model(shape, torch.device(device), getattr(torch, dtype))
        prompts = draw_prompts(shape, sizes["rows"])
        write_model(model, folder, prompts)
        given = [*smoke_keys(folder, sizes["length"], dtype), "generation=vllm_colocate",
                 "generation.allow_untested=true", *words]  # fmt: skip
        run = check.check_config(compose_config(given))
        if run.model.lora is not None:
            lora.attach_adapter(model, run.model.lora, run.seed)
        pair = TrainerAndEngine(model, run, folder, prompts, server=False)
        try:
            yield pair
        finally:
            pair.close()


def compare_colocated(device: str, dtype: str, sizes: Facts) -> Iterator[Facts]:
    """An engine beside the trainer with these words of the config; facts after each update."""
    with engine_beside(device, dtype, sizes, sizes["words"]) as pair:
        yield from pair.compare_rounds(sizes["updates"])


def time_rollouts(device: str, dtype: str, sizes: Facts) -> Iterator[Facts]:
    """Completion tokens per second of a step's sampling, by each of vLLM's model runners."""
    shape, beta = WHOLE_STEPS[sizes["workload"]]
    shape, table = sized_shape(shape, sizes), []
    spec = {"beta": beta, "tokens": None, "sampler": "vllm", "share": sizes["share"]}
    prompts = draw_prompts(shape, shape.prompts)
    tokens = shape.batch * shape.completion[1]
    for runner in sizes["runners"]:
        with scratch_folder() as folder, forced_runner(runner):
            model = random_model(shape, torch.device(device), getattr(torch, dtype))
            write_model(model, folder, prompts)
            del model
            began = time.perf_counter()
            run = side_rloo.build(shape, folder, SEED, rloo_keys(spec, shape, folder))
            start, seconds = time.perf_counter() - began, []
            try:
                for number in range(sizes["rounds"] + 1):
                    groups, seeds = seeded_groups(prompts, number, shape.k)
                    began = time.perf_counter()
                    run.generator.generate(groups, seeds)
                    seconds.append(time.perf_counter() - began)
            finally:
                run.generator.close()
                for log in folder.glob("rloo/**/engine.log"):
                    keep_file(log, f"engine-{runner}.log")
        middle = statistics.median(seconds[1:])
        table.append({"runner": runner, "s": middle, "tokens/s": tokens / middle,
                      "s start": start,
                      "ratio": table[0]["s"] / middle if table else None})  # fmt: skip
        yield {
            "verdict": "measured", "rows": shape.batch, "length": shape.completion[1],
            "tokens_per_s": max(row["tokens/s"] for row in table),
            "runner": ", ".join(row["runner"] for row in table), "table": list(table),
        }  # fmt: skip


@contextmanager
def forced_runner(runner: str) -> Iterator[None]:
    """Engines start with this model runner of vLLM, whatever the package would choose."""
    plain = arguments.engine_environment

    def environment(model: ModelConfig, generation: GenerationConfig) -> dict[str, str]:
        return plain(model, generation) | {RUNNER: str(int(runner == "V2"))}

    with mock.patch.object(arguments, "engine_environment", environment):
        yield


@contextmanager
def running_server(given: list[str], root: Path, devices: Sequence[str]) -> Iterator[None]:
    """`rloo vllm-serve` of a run on these GPUs, from when it answers."""
    environment = dict(os.environ)
    if devices:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    process = subprocess.Popen([sys.executable, "-m", "rloo_cli", "vllm-serve", *given],
                               env=environment, cwd=root.parent)  # fmt: skip
    try:
        while server_file.running_server(root) is None:
            if process.poll() is not None:
                raise RuntimeError(f"rloo vllm-serve: exit code {process.returncode}")
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def compare_server(device: str, dtype: str, sizes: Facts) -> Iterator[Facts]:
    """A server of its own: on the next GPUs, or by gloo on the trainer's."""
    there, own = visible_gpus(), sizes["transfer"] == "nccl"
    with scratch_folder() as folder:
        shape = model_shape(sizes["model"])
        model = random_model(shape, torch.device(device), getattr(torch, dtype))
        prompts = draw_prompts(shape, sizes["rows"])
        write_model(model, folder, prompts)
        section = "generation.server."
        given = [
            *smoke_keys(folder, sizes["length"], dtype), "generation=vllm_server",
            "generation.allow_untested=true", f"{section}transfer={sizes['transfer']}",
            f"{section}tensor_parallel_size={sizes['tp']}",
            f"{section}api_server_count={sizes['api']}",
            f"{section}gpu_memory_utilization={0.8 if own else 0.3}",
        ]  # fmt: skip
        run = check.check_config(compose_config(given))
        devices = there[1 : 1 + sizes["tp"]] if own else there[:1]
        with running_server(given, folder / str(run.name), devices):
            pair = TrainerAndEngine(model, run, folder, prompts, server=True)
            try:
                yield from pair.compare_rounds(sizes["updates"])
            finally:
                pair.close()
