"""Random models, batches and run folders for the rows of `gpu.py`, and how a call is timed.

Nothing is downloaded: weights are random, the same for the same seed, and exact in bfloat16, so
that the gradients of two ways differ by their computation alone.
"""

import gc
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import toys
import yaml
from shapes import MATH, PYTHIA_1B, SHAPES, Shape
from sides import BETA
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, logging

from rloo_cli.config.schema import LoraConfig, RunConfig
from rloo_cli.data.batch import Group, Rollout
from rloo_cli.distributed.device_count import visible_gpus
from rloo_cli.distributed.device_peaks import find_peak_flops
from rloo_cli.generation.vllm import arguments
from rloo_cli.generation.vllm.versions import installed_vllm_version, is_old_vllm
from rloo_cli.policy import lora
from rloo_cli.utils import paths
from rloo_cli.utils.device_waits import wait_for_device

Facts = dict[str, Any]
SEED, FIRST_ID = 1, 2
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
KEEP_VARIABLE = "RLOO_GPU_KEEP"  # the folder of a row's files, from gpu.py
SMALL = {"architecture": "qwen3", "hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2,
         "head_dim": 32, "mlp": 128, "vocabulary": 512, "tied": True}  # fmt: skip
QWEN_7B = {"architecture": "qwen2", "hidden": 3584, "layers": 28, "heads": 28, "kv_heads": 4,
           "head_dim": 128, "mlp": 18944, "vocabulary": 152064, "tied": False}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "tiny": SMALL,
    "kernel": SMALL | {"hidden": 256, "layers": 4, "heads": 8, "head_dim": 64, "mlp": 512},
    "0.1B": SMALL | {"hidden": 768, "layers": 12, "heads": 12, "kv_heads": 4, "head_dim": 64,
                     "mlp": 2304, "vocabulary": 32768},
    "odd": SMALL | {"hidden": 256, "layers": 4, "vocabulary": 32771},  # padded on two GPUs
    "1B": PYTHIA_1B,
    "1.5B": MATH,
    "7B": QWEN_7B,
    "moe tiny": SMALL | {"architecture": "qwen3_moe"},
    "moe": SMALL | {"architecture": "qwen3_moe", "hidden": 512, "layers": 4, "heads": 8,
                    "kv_heads": 4, "head_dim": 64, "vocabulary": 8192},
}  # fmt: skip


# Workloads of whole steps: shape and beta. The length is forced: a random model never ends.
_TLDR = replace(SHAPES["W5"], completion=(53, 53))
WHOLE_STEPS = {
    "W5": (_TLDR, BETA),
    "W8": (replace(_TLDR, name="W8", prompts=128), BETA),
    "W10": (replace(SHAPES["W7"], name="W10", prompts=128, completion=(1000, 1000)), 0.0),
}


def verdict_of(good: bool) -> str:
    """The verdict of a row that has a criterion."""
    return "confirmed" if good else "refuted"


def median_seconds(work: Callable[[], object], times: int) -> float:
    """Median seconds of a call, the device's work included; the first call does not count."""
    seconds = []
    for number in range(times + 1):
        wait_for_device()
        began = time.perf_counter()
        work()
        wait_for_device()
        seconds += [time.perf_counter() - began] if number else []
    return statistics.median(seconds)


def product_flops(device: torch.device, size: int) -> float:
    """FLOP/s that a square matrix product reaches: bfloat16 on a GPU, float32 on a CPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a = torch.randn(size, size, device=device, dtype=dtype)
    return 2.0 * size**3 / median_seconds(lambda: a @ a, 20)


def copy_bandwidth(device: torch.device, megabytes: int) -> float:
    """Bytes per second that a copy on the device reads and writes."""
    one = torch.ones(megabytes * 2**20 // 4, device=device)
    other = torch.empty_like(one)
    return 2 * one.nbytes / median_seconds(lambda: other.copy_(one), 5)


def data_sheet_flops(device: torch.device) -> float | None:
    """The FLOP/s that the metric perf/mfu divides by; None on a CPU."""
    return find_peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def release_memory() -> None:
    """Return cached memory to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def tiny_shape(shape: Shape) -> Shape:
    """The workload at a size for a CPU: its architecture, its kinds of heads and of lengths."""
    forced = shape.completion[0] == shape.completion[1]
    span = (8, 8) if forced else (3, 6) if shape.completion[1] < 100 else (4, 16)
    return replace(
        shape, hidden=128, layers=2, heads=2, head_dim=64, mlp=128, vocabulary=512,
        kv_heads=1 if shape.kv_heads < shape.heads else 2, prompt=(6, 12), completion=span,
        prompts=4, k=min(shape.k, 4),
    )  # fmt: skip


def sized_shape(shape: Shape, sizes: Facts) -> Shape:
    """The workload with the prompts per step of `sizes`, or tiny."""
    shape = tiny_shape(shape) if sizes["tiny"] else shape
    return replace(shape, prompts=sizes["prompts"] or shape.prompts)


def model_shape(name: str) -> Shape:
    """One of MODELS as a workload of two short prompts."""
    return Shape(name, name, **MODELS[name], prompt=(8, 24), completion=(8, 8), k=2, prompts=2)


@dataclass
class SampledBatch:
    """A batch that was sampled and scored: P groups of K completions."""

    groups: list[Group]
    score: Tensor  # (P, K)

    @property
    def lengths(self) -> list[tuple[int, list[int]]]:
        """Tokens of each prompt, and of its completions."""
        return [(len(g.prompt_ids), [r.length for r in g.rollouts]) for g in self.groups]

    def first_groups(self, count: int) -> "SampledBatch":
        """The batch of the first groups alone."""
        return SampledBatch(self.groups[:count], self.score[:count])


def draw_batch(shape: Shape) -> SampledBatch:
    """The batch of a workload: lengths, ids and scores from the seed."""
    drawn = torch.Generator().manual_seed(SEED)

    def ids(span: tuple[int, int]) -> list[int]:
        size = int(torch.randint(span[0], span[1] + 1, (), generator=drawn))
        return torch.randint(FIRST_ID, shape.vocabulary, (size,), generator=drawn).tolist()

    def rollout() -> Rollout:
        return Rollout(ids(shape.completion), "", "length", False, 0, 0)

    groups = [
        Group(i, {}, "", ids(shape.prompt), [rollout() for _ in range(shape.k)])
        for i in range(shape.prompts)
    ]
    return SampledBatch(groups, torch.randn(shape.prompts, shape.k, generator=drawn))


def draw_prompts(shape: Shape, count: int) -> list[list[int]]:
    """Random prompts' ids, of random lengths."""
    return [group.prompt_ids for group in draw_batch(replace(shape, prompts=count, k=1)).groups]


def model_config(shape: Shape) -> Any:
    """The model's config of transformers."""
    more: Facts = {}
    if shape.architecture != "gpt_neox":
        more = {"num_key_value_heads": shape.kv_heads}
    if shape.architecture.startswith("qwen3"):
        more["head_dim"] = shape.head_dim
    if shape.architecture == "qwen3_moe":
        more |= {"moe_intermediate_size": shape.mlp, "num_experts": 4, "num_experts_per_tok": 2,
                 "norm_topk_prob": True}  # fmt: skip
    return AutoConfig.for_model(
        shape.architecture, vocab_size=shape.vocabulary, hidden_size=shape.hidden,
        intermediate_size=shape.mlp, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, max_position_embeddings=4096,
        tie_word_embeddings=shape.tied, bos_token_id=None, eos_token_id=1, pad_token_id=0, **more,
    )  # fmt: skip


@torch.no_grad()
def random_model(
    shape: Shape, device: torch.device, dtype: torch.dtype, noise: float = 0.0, seed: int = SEED
) -> Any:
    """A model with random weights. `noise`: added to them, times their mean size."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(model_config(shape), dtype=torch.float32)
    for weight in model.parameters():  # and no buffer: rotary frequencies stay float32
        if noise:
            weight.add_(torch.randn_like(weight), alpha=noise * float(weight.abs().mean()))
        weight.data = weight.bfloat16().to(dtype)
    return model


def attach_random_adapter(model: Any, shape: Shape) -> LoraConfig:
    """Attach adapters that change the model's output; they alone are trained."""
    values = yaml.safe_load((paths.CONF / "lora" / "default.yaml").read_text())
    keys = LoraConfig(**values | {"r": shape.lora, "alpha": 2.0 * shape.lora})
    lora.attach_adapter(model, keys, SEED)
    torch.manual_seed(SEED)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(0.01 * torch.randn(weight.shape).to(weight))
    return keys


def word_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """One word per id, as `toys.tokenizer`, and the last id for every unknown word: a server is
    asked about texts of its own."""
    words = {"<pad>": toys.PAD, "<eos>": toys.EOS}
    words |= {f"t{i}": i for i in range(toys.FIRST, size - 1)} | {"<unk>": size - 1}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def write_model(model: Any, folder: Path, prompts: Sequence[Sequence[int]]) -> None:
    """Model, tokenizer and prompts to a folder. The tokenizer has a folder of its own: beside a
    Qwen2 model, transformers would read it as Qwen2's."""
    logging.disable_progress_bar()
    model.save_pretrained(folder / "model")
    word_tokenizer(model.config.vocab_size).save_pretrained(folder / "tokenizer")
    lines = [{"prompt": " ".join(f"t{i}" for i in ids)} for ids in prompts]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def model_keys(folder: Path) -> list[str]:
    """The keys of a run on what `write_model` wrote."""
    return [
        f"model.path={folder / 'model'}", f"model.tokenizer={folder / 'tokenizer'}",
        f"data.path={folder / 'prompts.jsonl'}", f"root={folder}", "generation.ignore_eos=true",
        "logging.console=plain",
    ]  # fmt: skip


def smoke_keys(folder: Path, length: int, dtype: str) -> list[str]:
    """A whole command line of a run on them, whose completions have `length` tokens."""
    return [
        "+recipe=smoke", *model_keys(folder), "data.eval_split=null", "name=run",
        f"generation.max_completion_length={length}", "logging.samples=0",
        "train.forward_all=true", f"model.dtype={dtype}", "data.max_prompt_length=64",
    ]  # fmt: skip


def keep_file(path: Path, name: str) -> None:
    """Copy a file to the row's folder under `--keep`, if there is one."""
    if (folder := os.environ.get(KEEP_VARIABLE)) and path.exists():
        Path(folder).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, Path(folder) / name)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder that is removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="rloo-gpu-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def model_runner(run: RunConfig, model: Any) -> str:
    """Which of vLLM's model runners an engine of this run uses: ours to say, or vLLM's rule."""
    environment = arguments.engine_environment(run.model, run.generation)
    asked = environment.get(RUNNER, os.environ.get(RUNNER))
    if asked is not None:
        return "V2" if asked == "1" else "V1"
    if is_old_vllm(installed_vllm_version()):  # 0.22: by the architecture
        return "V2" if model.config.model_type == "qwen3" else "V1"
    return "V2" if visible_gpus() else "V1"  # 0.32: V2 needs Triton
