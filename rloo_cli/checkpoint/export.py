"""Writes a model that `from_pretrained` and vLLM can load, whole or gathered unit by unit."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from rloo_cli.config.schema import ModelConfig
from rloo_cli.data.vision_processor import copy_processor_files
from rloo_cli.distributed import gather
from rloo_cli.distributed.engine import ParallelEngine
from rloo_cli.distributed.meta_load import attach_empty_adapters
from rloo_cli.distributed.world import World, cpu_world
from rloo_cli.policy import load, lora
from rloo_cli.policy.model import Policy
from rloo_cli.policy.vision import family_of_model
from rloo_cli.utils.errors import Problem, RunError, StorageError
from rloo_cli.utils.files import fsync_path

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MAX_WEIGHTS_FILE_BYTES = 5 * 10**9  # transformers splits files at the same size
WriteModel = Callable[[Path], None]


def write_model_folder(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", folder: Path
) -> None:
    """Write a model that this process has whole, or only the adapter, and its tokenizer."""
    if lora.has_adapter(model):
        lora.save_adapter(model, folder)
    else:
        _make_savable(model)
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if family_of_model(model) is not None:
        copy_processor_files(model.config._name_or_path, folder)


def write_merged_model(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", folder: Path
) -> None:
    """Write the whole model; an adapter is merged into it, and also written to `adapter`."""
    _make_savable(model)
    if lora.has_adapter(model):
        lora.save_adapter(model, folder / "adapter")
        model = lora.merged_model(model)
    write_model_folder(model, tokenizer, folder)


def write_gathered_model(
    engine: ParallelEngine, policy: Policy, tokenizer: "PreTrainedTokenizerBase", folder: Path
) -> None:
    """Write a sharded model: all ranks gather its weights, rank 0 writes them file by file.

    A disk error is raised on rank 0, after all ranks have gathered everything.
    """
    files = _WeightsFiles(folder) if engine.world.is_main else None
    for unit in gather.iter_gathered_weights(engine, policy.model):
        if files is not None:
            with torch.no_grad():
                named = revert_weight_conversion(policy.model, unit)
            files.add({n: t.to(policy.dtype) for n, t in named.items()})
    if files is None:
        return
    files.close()
    policy.model.config.save_pretrained(folder)
    if policy.model.can_generate():  # a reward model has no generation config
        _make_savable(policy.model)
        policy.model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_gathered_adapter(
    engine: ParallelEngine, policy: Policy, tokenizer: "PreTrainedTokenizerBase", folder: Path
) -> None:
    """Write the adapter of a sharded model: all ranks gather it, rank 0 writes it."""
    for tensors in gather.iter_gathered_adapter(engine, policy.model):
        if engine.world.is_main:
            lora.save_adapter(policy.model, folder, tensors)
            tokenizer.save_pretrained(folder)


def write_gathered_merged_model(
    engine: ParallelEngine,
    policy: Policy,
    tokenizer: "PreTrainedTokenizerBase",
    keys: ModelConfig,
    seed: int,
    folder: Path,
) -> None:
    """Write a sharded model with its adapter merged, and the adapter to `adapter`.

    All ranks gather the weights unit by unit; rank 0 collects them in CPU memory, where it had
    them when the model was loaded, and merges as a single process would.
    """
    whole: dict[str, Tensor] = {}
    for unit in gather.iter_gathered_weights(engine, policy.model):
        if engine.world.is_main:
            whole |= {name: tensor.to(gather.CPU, copy=True) for name, tensor in unit.items()}
    if not engine.world.is_main:
        return
    configs = (policy.model.config, policy.model.generation_config)
    shell = load.build_meta_model(keys, configs, engine.world.device)
    attach_empty_adapters(shell, keys, seed, second=False)
    named = dict(shell.named_parameters())
    buffers = {name: b.to(gather.CPU) for name, b in policy.model.named_buffers()}
    shell.load_state_dict({n: whole[n] for n in named}, assign=True, strict=False)
    for path, module in shell.named_modules():
        for name in module._buffers:
            if (known := buffers.get(f"{path}.{name}".lstrip("."))) is not None:
                module._buffers[name] = known
    shell.tie_weights()
    write_merged_model(shell, tokenizer, folder)


class _WeightsFiles:
    """Writes weights as they arrive, in files of at most MAX_WEIGHTS_FILE_BYTES.

    An error waits for `close`: the ranks must gather the other weights in any case.
    """

    def __init__(self, folder: Path):
        self.folder, self.error = folder, None
        self.pending_tensors: dict[str, Tensor] = {}
        self.tensor_names: list[list[str]] = []
        self.total_bytes = 0

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Buffer the next weights, and write the buffer once a file is full."""
        try:
            total = sum(t.nbytes for t in (*self.pending_tensors.values(), *tensors.values()))
            if self.pending_tensors and total > MAX_WEIGHTS_FILE_BYTES:
                self._write_file()
            self.pending_tensors |= {n: t.cpu().clone().contiguous() for n, t in tensors.items()}
        except Exception as error:  # the writers in Rust raise no OSError
            self.error = self.error or error  # type: ignore[assignment]
            self.pending_tensors = {}

    def close(self) -> None:
        """Write the last file, and an index if there are several. Raises what `add` stored."""
        if self.error is not None:
            raise self.error
        self._write_file()
        count = len(self.tensor_names)
        if count == 1:
            self._part_path(1).rename(self.folder / "model.safetensors")
            return
        files = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
        for n, name in enumerate(files, 1):
            self._part_path(n).rename(self.folder / name)
        where = {n: f for f, names in zip(files, self.tensor_names, strict=True) for n in names}
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": where}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))

    def _write_file(self) -> None:
        self.tensor_names.append(list(self.pending_tensors))
        self.total_bytes += sum(t.nbytes for t in self.pending_tensors.values())
        save_file(self.pending_tensors, self._part_path(len(self.tensor_names)), {"format": "pt"})
        self.pending_tensors = {}

    def _part_path(self, number: int) -> Path:
        return self.folder / f"part-{number}.safetensors"


def save_final(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    folder: Path,
    attempt: int = 1,
    world: World | None = None,
    write_model: WriteModel | None = None,
) -> Path:
    """Write weights, tokenizer, chat template and generation config to `folder`/final.

    `write_model` writes the files, instead of `write_merged_model`; all ranks of `world` take
    part. The folder gets its name only when it is complete. Raises StorageError (exit 8).
    """
    named, temporary = folder / "final", folder / f".tmp-final-a{attempt}"
    trash = folder / f".trash-final-a{attempt}"
    world = world or cpu_world()
    write = write_model or (lambda to: write_merged_model(model, tokenizer, to))

    def begin() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()

    def end() -> None:
        for path in temporary.rglob("*"):
            fsync_path(path)
        fsync_path(temporary)
        if named.exists():  # the run had ended before it was extended
            shutil.rmtree(trash, ignore_errors=True)
            named.rename(trash)
        temporary.rename(named)
        fsync_path(folder)

    try:
        world.run_on_rank0(begin)
        world.run_on_all_ranks(lambda: write(temporary))
        world.run_on_rank0(end)
    except RunError:  # a signal, not the disk
        raise
    except Exception as error:  # the writers in Rust raise no OSError when the disk is full
        why = f"{error}; free: {shutil.disk_usage(folder).free / 1e9:.1f} GB"
        fix = "make that folder writable, with space on its disk, then resume=auto"
        what = f"the final save failed: {named}"
        raise StorageError(Problem(what, str(folder), why, fix)) from error
    finally:
        if world.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.rmtree(trash, ignore_errors=True)
    return named


def _make_savable(model: "PreTrainedModel") -> None:
    """Set `do_sample` if a generation config cannot be saved without: some published ones lack it.

    A reward model has no such config.
    """
    if not model.can_generate():
        return
    try:
        model.generation_config.validate(strict=True)
    except ValueError:
        model.generation_config.do_sample = True
