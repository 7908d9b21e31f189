"""Rows of `gpu_proof.py` about vLLM: beside the trainer, as a server, weights, tokens per second.

The criterion is the same everywhere: after each change of the weights, what was sampled has the
log-probabilities that the trainer computes, also after the engine has slept and no weights came.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_step
import proof_models
import torch
from proof_kernels import Facts, passed
from shapes import Shape

from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.config.schema import RunConfig
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

HERE = Path(__file__).resolve().parent
LONGEST = 64  # tokens of a prompt, in rows about weights
PART = 0.25  # of what a run's own guard lets pass, in rms nats per token
Prompts = list[list[int]]


class Pair:
    """A trainer's model and an engine that samples for it."""

    def __init__(self, model: Any, run: RunConfig, folder: Path, prompts: Prompts, server: bool):
        self.model, self.run, self.prompts = model, run, prompts
        self.said: list[str] = []
        make = build_server_generator if server else build_colocate_generator
        tokens = proof_models.tokenizer(folder)
        place = folder / str(run.name)
        place.mkdir(exist_ok=True)
        self.generator: VllmGenerator = make(model, tokens, run, 4096, place, self.said.append)
        self.policy, self.version = Policy(model, 1.0), 0

    def load(self) -> float:
        """Send the weights as a new version. -> seconds"""
        self.version += 1
        began = time.perf_counter()
        self.generator.load(self.policy, self.version)
        return time.perf_counter() - began

    def sample(self, number: int, k: int = 2) -> tuple[list[Group], float]:
        """K completions of each prompt, and the seconds that they took."""
        groups = [Group(i, {}, "", prompt) for i, prompt in enumerate(self.prompts)]
        seeds = [[number * 10**6 + i * k + j for j in range(k)] for i in range(len(groups))]
        began = time.perf_counter()
        self.generator.generate(groups, seeds)
        return groups, time.perf_counter() - began

    def gap(self, groups: list[Group]) -> tuple[float, float]:
        """Rms and largest difference of the log-probabilities of what was sampled."""
        micro = self.policy.pack(groups, whole_group_slices(groups, range(len(groups))))
        assert micro.behaviour_logp is not None
        apart = self.policy.frozen_logp(micro).logp - micro.behaviour_logp
        return float(apart.square().mean().sqrt()), float(apart.abs().max())

    def hold_freed_memory(self) -> None:
        """Let torch keep most of a GPU that the sleeping engine has left: it must be given back
        before the engine can wake up."""
        keys: Any = self.run.generation
        if (
            torch.cuda.is_available()
            and getattr(getattr(keys, "colocate", None), "sleep", "none") != "none"
        ):
            free, _ = torch.cuda.mem_get_info()
            torch.empty(int(0.9 * free), dtype=torch.uint8, device="cuda")

    @torch.no_grad()
    def change(self) -> None:
        """Move every weight that is trained by a tenth of its spread."""
        for weight in self.model.parameters():
            if weight.requires_grad:
                weight.add_(0.1 * torch.randn_like(weight) * weight.std().clamp(min=0.05))


def words(folder: Path, dtype: str, length: int, more: Sequence[str]) -> list[str]:
    """The command line of a run with an engine."""
    return [
        *proof_models.words_of(folder, length), f"model.dtype={dtype}",
        "generation.allow_untested=true", f"data.max_prompt_length={LONGEST}", *more,
    ]  # fmt: skip


@contextmanager
def beside(
    device: str, dtype: str, name: str, length: int, rows: int, *more: str
) -> Iterator[Pair]:
    """A pair whose engine is beside the trainer."""
    folder = Path(tempfile.mkdtemp(prefix="rloo-proof-engine-"))
    try:
        here = torch.device(device)
        model = proof_models.build(name, here, getattr(torch, dtype))
        shape = proof_models.shape_of(name)
        prompts = proof_models.prompts(shape, rows)
        proof_models.write(model, shape.vocabulary, folder, prompts)
        given = words(folder, dtype, length, ["generation=vllm_colocate", *more])
        run = check.check_config(compose_config(given))
        if run.model.lora is not None:
            lora.attach_adapter(model, run.model.lora, run.seed)
        pair = Pair(model, run, folder, prompts, server=False)
        try:
            yield pair
        finally:
            pair.generator.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def rounds(pair: Pair, updates: int) -> list[Facts]:
    """Change the weights, send them, sample twice: the second time nothing is sent."""
    found = []
    for update in range(updates):
        pair.change()
        pair.hold_freed_memory()
        sync = pair.load()
        for again in (False, True):
            groups, seconds = pair.sample(2 * update + again)
            rms, most = pair.gap(groups)
            tokens = sum(r.length for g in groups for r in g.rollouts)
            found.append({
                "update": update + 1, "weights": "slept over" if again else "sent",
                "rms nats": rms, "most nats": most, "s sync": None if again else sync,
                "s sampling": seconds, "tokens/s": tokens / seconds,
            })  # fmt: skip
    return found


def allowed(pair: Pair) -> float:
    """Rms nats per token that a row lets pass: less than a run would."""
    return PART * pair.generator.tolerance


def judged(found: list[Facts], dtype: str, pair: Pair) -> Facts:
    """The facts of `rounds`, with a verdict."""
    limit = allowed(pair)
    worst = max(row["rms nats"] for row in found)
    moved = pair.generator.metrics.get("vllm/synced_bytes", 0.0)
    syncs = [row["s sync"] for row in found if row["s sync"] is not None]
    return {
        "verdict": passed(worst <= limit), "rms_nats": worst, "allowed": limit,
        "most_nats": max(row["most nats"] for row in found), "s_first_sync": syncs[0],
        "s_sync": statistics.median(syncs[1:] or syncs), "synced_mb": moved / 2**20,
        "vllm": arguments.installed_vllm_version(), "table": found,
    }  # fmt: skip


def colocate(device: str, dtype: str, sizes: Facts) -> Facts:
    """An engine beside the trainer with these words of the config."""
    model, length, rows = sizes["model"], sizes["length"], sizes["rows"]
    with beside(device, dtype, model, length, rows, *sizes["words"]) as pair:
        return judged(rounds(pair, sizes["updates"]), dtype, pair)


def sync(device: str, dtype: str, sizes: Facts) -> Facts:
    """Seconds of an update's weights, and bytes per second, at one size."""
    share = "generation.colocate.gpu_memory_utilization=0.45"
    with beside(device, dtype, sizes["model"], 4, 2, share) as pair:
        seconds = []
        for _ in range(sizes["times"]):
            pair.change()
            seconds.append(pair.load())
        moved = pair.generator.metrics["vllm/synced_bytes"]
        rms, _ = pair.gap(pair.sample(1)[0])
        middle = statistics.median(seconds[1:])
        return {
            "verdict": passed(rms <= allowed(pair)),
            "model": sizes["model"], "gb": moved / 1e9, "s_first": seconds[0], "s_sync": middle,
            "gb_per_s": moved / middle / 1e9, "rms_nats": rms,
        }  # fmt: skip


def rollout(device: str, dtype: str, sizes: Facts) -> Facts:
    """Tokens per second of a step's sampling, by our engine and by vLLM's LLM alone."""
    shape, beta = gpu_step.STEPS[sizes["workload"]]
    shape = gpu_step.smaller(shape) if sizes["tiny"] else shape
    shape = replace(shape, prompts=sizes["prompts"] or shape.prompts)
    ids = proof_models.prompts(shape, shape.prompts)
    seconds, given = [], {}
    with (
        tempfile.TemporaryDirectory(prefix="rloo-proof-") as place,
        gpu_step.started(shape, beta, Path(place), proof_models.SEED, sizes["tiny"]) as run,
    ):
        groups = [Group(i, {}, "", prompt) for i, prompt in enumerate(ids)]
        for number in range(sizes["rounds"] + 1):
            seeds = [[number * 10**6 + i * shape.k + j for j in range(shape.k)]
                     for i in range(len(ids))]  # fmt: skip
            began = time.perf_counter()
            run.generator.generate(groups, seeds)
            seconds += [time.perf_counter() - began] if number else []
        keys: Any = run.config.generation
        given = arguments.build_engine_arguments(run.config, keys.colocate, run.config.seed)
        run.generator.close()
        alone = of_vllm(given, ids, shape, sizes["rounds"], arguments.engine_environment(
            run.config, keys.colocate), Path(place))  # fmt: skip
    tokens = shape.batch * shape.completion[1]
    ours, theirs = (tokens / statistics.median(each) for each in (seconds, alone))
    return {
        "verdict": "measured", "tokens_per_s": ours, "tokens_per_s_vllm_alone": theirs,
        "share_of_vllm_alone": ours / theirs, "rows": shape.batch, "length": shape.completion[1],
        "vllm": arguments.installed_vllm_version(),
    }  # fmt: skip


def of_vllm(
    given: Facts, ids: Prompts, shape: Shape, times: int, more: dict[str, str], folder: Path
) -> list[float]:
    """Seconds of the same completions by vLLM alone, in a process of its own."""
    plain = {n: v for n, v in given.items() if n not in ("weight_transfer_config", "logprobs_mode")}
    asked = {"arguments": plain, "prompts": ids, "k": shape.k, "length": shape.completion[1],
             "rounds": times}  # fmt: skip
    path = folder / "alone.json"
    path.write_text(json.dumps(asked), encoding="utf-8")
    ended = subprocess.run([sys.executable, str(HERE / "vllm_alone.py"), str(path)], text=True,
                           capture_output=True, env=os.environ | more)  # fmt: skip
    if ended.returncode:
        raise RuntimeError(f"vLLM alone: exit {ended.returncode}: {ended.stderr[-1200:]}")
    found: list[float] = json.loads(ended.stdout.strip().splitlines()[-1])
    return found


@contextmanager
def serving(given: list[str], place: Path, devices: Sequence[str]) -> Iterator[None]:
    """`rloo vllm-serve` of a run on these GPUs, until it answers."""
    environment = dict(os.environ)
    if devices:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    with (place.parent / "serve.txt").open("w") as out:
        process = subprocess.Popen([sys.executable, "-m", "rloo_cli", "vllm-serve", *given],
                                   stdout=out, stderr=subprocess.STDOUT, env=environment,
                                   cwd=place.parent)  # fmt: skip
    try:
        while server_file.running_server(place) is None:
            if process.poll() is not None:
                said = (place.parent / "serve.txt").read_text()[-1200:]
                raise RuntimeError(f"rloo vllm-serve ended: {said}")
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def server(device: str, dtype: str, sizes: Facts) -> Facts:
    """A server of its own: on the next GPUs, or by gloo on the trainer's."""
    there = visible_gpus()
    with tempfile.TemporaryDirectory(prefix="rloo-proof-") as path:
        folder, name = Path(path), sizes["model"]
        model = proof_models.build(name, torch.device(device), getattr(torch, dtype))
        shape = proof_models.shape_of(name)
        prompts = proof_models.prompts(shape, sizes["rows"])
        proof_models.write(model, shape.vocabulary, folder, prompts)
        own = sizes["transfer"] == "nccl"
        given = words(folder, dtype, sizes["length"], [
            "generation=vllm_server", f"generation.server.transfer={sizes['transfer']}",
            f"generation.server.tensor_parallel_size={sizes['tp']}",
            f"generation.server.api_processes={sizes['api']}",
            f"generation.server.gpu_memory_utilization={0.8 if own else 0.3}",
        ])  # fmt: skip
        run = check.check_config(compose_config(given))
        devices = there[1 : 1 + sizes["tp"]] if own else there[:1]
        with serving(given, folder / str(run.name), devices):
            pair = Pair(model, run, folder, prompts, server=True)
            try:
                return judged(rounds(pair, sizes["updates"]), dtype, pair)
            finally:
                pair.generator.close()
