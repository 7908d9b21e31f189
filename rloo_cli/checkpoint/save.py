"""Saving: checkpoints to resume from.

A checkpoint is a model folder that `from_pretrained` and vLLM can load, with the resume state in
`trainer/`. It gets its name only when it is complete: written to a temporary folder, every file
fsynced, the manifest last, then one rename. Nothing is deleted before its successor is complete,
and nothing here is a pickle.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from math import prod
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import OutOfMemoryError, Tensor

from rloo_cli.checkpoint import export, manifest, rollback, step_state
from rloo_cli.checkpoint.resume import read_run_config
from rloo_cli.config import check
from rloo_cli.data import chat_templates
from rloo_cli.distributed import gather
from rloo_cli.distributed.gather import CPU
from rloo_cli.distributed.world import is_rank_lost
from rloo_cli.policy import lora
from rloo_cli.policy.model import weight_shape
from rloo_cli.reporting.update_metrics import UpdateMetrics, sum_over_ranks
from rloo_cli.run import Run, StepProgress
from rloo_cli.utils import rng
from rloo_cli.utils.errors import Problem, RunError, StorageError
from rloo_cli.utils.fault_injection import trigger_fault
from rloo_cli.utils.files import JsonObject, fsync_path, read_json, update_json, write_text

VERSIONED_PACKAGES = ("rloo-cli", "torch", "transformers", "safetensors")
RNG_FILE, ROLLOUTS_FILE = "rng", "rollouts"
AHEAD_FILE = "ahead"  # the batch sampled ahead of the training
CARRY_FILE = "carry"  # unfinished groups that span steps
REFERENCE_FILE = "reference"  # only if the reference follows the policy
VALUE_FILE = "value"


def save_checkpoint(run: Run, raise_on_failure: bool = False) -> Path | None:
    """Write a checkpoint and return its folder; None if nothing is new or the save failed.

    All ranks save together: each writes its optimizer share, rank 0 writes the rest. A failed
    save leaves older checkpoints intact. It is logged as a warning and the run continues; with
    `raise_on_failure` it raises StorageError (exit 8).
    """
    position = run.position
    if run.saved_position is not None and position <= run.saved_position:
        return None
    target, began = run.folder / manifest.checkpoint_name(position), time.monotonic()
    try:
        if not run.world.run_on_rank0(
            lambda: target.exists() and manifest.checkpoint_problem(target) is None
        ):
            _write_checkpoint(run, position, target)
        run.world.run_on_rank0(lambda: _publish_checkpoint(run, target))
        run.saved_position = position
    except Exception as error:  # the writers in Rust raise no OSError when the disk is full
        full = isinstance(error, OutOfMemoryError)  # then the next step would not fit either
        if is_rank_lost(error) or (full and not raise_on_failure):
            raise
        failed = _save_error(target, error)
        if raise_on_failure:
            raise failed from error
        run.log.note(f"warning: {failed.problems[0].what}: {failed.problems[0].why}")
        return None
    spent = round(time.monotonic() - began, 2)
    if run.world.is_main:
        update_json(run.folder / "run.json", checkpoint=target.name, save_seconds=spent)
        run.log.events.send("on_save", run.state.step, target)
    return target


def _publish_checkpoint(run: Run, target: Path) -> None:
    _write_latest(run, target)
    try:
        _prune_checkpoints(run)
    except OSError as error:  # the new checkpoint is complete
        run.log.note(f"warning: an older checkpoint was not removed: {error}")


def _write_checkpoint(run: Run, position: manifest.CheckpointPosition, target: Path) -> None:
    """Write every file, the manifest last, and rename the folder to its name."""
    whole = run.has_atomic_rename  # else only the manifest marks it as complete
    temporary = target.with_name(f".tmp-{target.name}-a{run.attempt}") if whole else target

    def begin() -> None:
        _check_save_space(run)
        if target.exists():  # a damaged one
            target.rename(rollback.superseded_path(target, run.attempt))
        shutil.rmtree(temporary, ignore_errors=True)
        (temporary / "trainer").mkdir(parents=True)

    def end() -> None:
        for path in sorted(p for p in temporary.rglob("*") if p.is_file()):
            trigger_fault("ckpt.fsync")
            fsync_path(path)
        _check_written_weights(run, temporary)
        manifest.write_manifest(temporary, _manifest_metadata(run, position))
        if whole:
            trigger_fault("ckpt.rename")
            temporary.rename(target)
        fsync_path(run.folder)

    try:
        run.world.run_on_rank0(begin)
        state = _collect_state(run)
        run.world.run_on_all_ranks(lambda: _write_files(run, temporary, state))
        run.world.run_on_rank0(end)
    except BaseException:
        if run.world.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


@dataclass
class CollectedState:
    """State that the ranks collect together before any file is written, without the weights."""

    optimizer_tensors: dict[str, Tensor]  # this rank's share of the optimizer
    optimizer_metadata: JsonObject
    rng: rng.RandomStates  # this rank's
    update_metrics: UpdateMetrics | None  # of the unfinished step, summed over ranks
    value_tensors: dict[str, Tensor]  # of the value model; {} on ranks other than 0


def _collect_state(run: Run) -> CollectedState:
    tensors, optimizer = run.optimizer.dump(run.world.rank, run.world.size)
    value_tensors = _gather_value_model(run)
    if (step := run.step_progress) is None:
        return CollectedState(tensors, optimizer, run.rng, None, value_tensors)
    update_metrics = sum_over_ranks(step.marked_updates, run.world)
    return CollectedState(tensors, optimizer, step.rng, update_metrics, value_tensors)


def _gather_value_model(run: Run) -> dict[str, Tensor]:
    """The weights of the value model, whole, on rank 0: where they are sharded, in CPU memory."""
    if run.value_model is None:
        return {}
    if not run.engine.sharded:
        return run.value_model.state() if run.world.is_main else {}
    found: dict[str, Tensor] = {}
    for unit in gather.iter_gathered_weights(run.engine, run.value_model.model):
        if run.world.is_main:
            found |= {name: t.to(CPU, run.value_model.dtype, copy=True) for name, t in unit.items()
                      if not name.startswith("score.")}  # fmt: skip
            found |= {name: t.to(CPU, torch.float32, copy=True) for name, t in unit.items()
                      if name.startswith("score.")}  # fmt: skip
    return found


def _write_files(run: Run, folder: Path, state: CollectedState) -> None:
    """Write all files but the manifest; a rank other than 0 writes its share of them."""
    trainer, rank, size = folder / "trainer", run.world.rank, run.world.size
    parts: list[tuple[str, dict[str, Tensor]]] = [
        (optimizer_file_name(rank, size), state.optimizer_tensors),
        (f"{RNG_FILE}-{rank}", state.rng.tensors),
    ]
    writers: list[Callable[[], None]] = []
    if run.world.is_main and run.reference is not None and run.reference.follows_policy:
        parts.append((REFERENCE_FILE, run.reference.state()))
    if state.value_tensors:
        parts.append((VALUE_FILE, state.value_tensors))
    if run.world.is_main:
        if run.step_progress is not None:
            rollouts, plain = step_state.dump_step(run.step_progress, state.update_metrics)
            parts.append((ROLLOUTS_FILE, rollouts))
            # A user's reward may log any value beside a completion, NaN too.
            write_text(trainer / f"{ROLLOUTS_FILE}.json", json.dumps(plain, default=str) + "\n")
        sampled = run.source.state()
        if sampled.groups is not None:
            parts.append((CARRY_FILE, sampled.group_tensors))
            write_text(trainer / f"{CARRY_FILE}.json", json.dumps(sampled.groups) + "\n")
        if sampled.batch is not None:
            drawn, plain = step_state.dump_step(StepProgress(sampled.batch))
            parts.append((AHEAD_FILE, drawn))
            write_text(trainer / f"{AHEAD_FILE}.json", json.dumps(plain, default=str) + "\n")
        text = json.dumps(_trainer_state(run, state), allow_nan=False)
        writers.append(lambda: write_text(trainer / "state.json", text + "\n"))
    else:
        text = json.dumps(state.rng.plain)
        writers.append(lambda: write_text(trainer / f"{RNG_FILE}-{rank}.json", text + "\n"))
    tables = [lambda n=n, t=t: _save_tensors(t, trainer / f"{n}.safetensors") for n, t in parts]
    write_model(run, folder)
    for write in (*tables, *writers):
        trigger_fault("ckpt.write")
        write()


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, path)
    fsync_path(path)  # by the rank that wrote it: it may be another machine


def write_model(run: Run, folder: Path) -> None:
    """Write the model's own files into a checkpoint. All ranks take part."""
    trigger_fault("ckpt.write")
    if run.engine.sharded and lora.has_adapter(run.policy.model):
        export.write_gathered_adapter(run.engine, run.policy, run.tokenizer, folder)
    elif run.engine.sharded:
        export.write_gathered_model(run.engine, run.policy, run.tokenizer, folder)
    elif run.world.is_main:
        export.write_model_folder(run.policy.model, run.tokenizer, folder)


def write_final_model(run: Run, folder: Path) -> None:
    """Write the trained model, with an adapter merged, for use elsewhere. All ranks take part."""
    if run.engine.sharded and lora.has_adapter(run.policy.model):
        export.write_gathered_merged_model(
            run.engine, run.policy, run.tokenizer, run.config.model, run.config.seed, folder
        )
    elif run.engine.sharded:
        export.write_gathered_model(run.engine, run.policy, run.tokenizer, folder)
    elif run.world.is_main:
        export.write_merged_model(run.policy.model, run.tokenizer, folder)


def _trainer_state(run: Run, state: CollectedState) -> JsonObject:
    """The content of trainer/state.json."""
    return {
        "state": run.state.dump(),
        # As the user wrote it: `auto` may resolve differently on another machine.
        "config": read_run_config(run.folder) or check.dump_config(run.config),
        "fingerprint": run.prompts.fingerprint,
        # As of the start of this attempt, when its code was imported.
        "code_files": read_json(run.folder / "run.json").get("code_files", {}),
        "template_clock": chat_templates.template_clock(),
        "teacher": None if run.teacher is None else run.teacher.model,
        "steps": run.num_steps,
        "optimizer": state.optimizer_metadata,
        "rng": state.rng.plain,
        "journals": rollback.journal_lengths(run.folder),
        "log": run.log.dump(),
        "elapsed": run.clock.elapsed(),
    }


def _check_written_weights(run: Run, folder: Path) -> None:
    """Read the headers of the written weights again: nothing may be missing or of size 0."""
    # A tied head is one parameter; fused or split tensors have as many elements as before.
    tensors = lora.tensors_to_save(run.policy.model)
    _check_elements(folder.glob("*.safetensors"), tensors, "the model")
    if run.value_model is not None:
        own = folder / "trainer" / f"{VALUE_FILE}.safetensors"
        _check_elements([own], run.value_model.model.parameters(), "the value model")


def _check_elements(paths: Iterable[Path], parameters: Iterable[Tensor], name: str) -> None:
    found, wanted = 0, sum(prod(weight_shape(p)) for p in parameters)
    for path in paths:
        with safe_open(path, "pt") as file:
            for tensor in file.keys():  # noqa: SIM118  (it is not a mapping)
                shape = file.get_slice(tensor).get_shape()
                if not (count := prod(shape)):
                    raise StorageError(f"{path.name} has {tensor} with shape {shape}")
                found += count
    if found < wanted:
        raise StorageError(f"the written weights have {found} elements, {name} has {wanted}")


def _manifest_metadata(run: Run, position: manifest.CheckpointPosition) -> JsonObject:
    return {
        "step": position[0],
        "updates": run.state.updates,
        "prompts_consumed": run.state.place,
        "world_size": run.world.size,
        "attempt": run.attempt,
        "versions": {name: metadata.version(name) for name in VERSIONED_PACKAGES},
        "config_hash": read_json(run.folder / "run.json").get("hash"),
        "fingerprint": run.prompts.fingerprint,
    }


def _write_latest(run: Run, target: Path) -> None:
    """Write the checkpoint's name to `latest`: a text file, as links do not survive every copy."""
    trigger_fault("ckpt.latest")
    write_text(run.folder / "latest", target.name + "\n")
    fsync_path(run.folder)


def _prune_checkpoints(run: Run) -> None:
    """Remove the oldest complete checkpoints, so that `keep_last` remain.

    A link, or a folder without our manifest, is neither removed nor counted.
    """
    remove_trash(run)
    found = manifest.list_checkpoints(run.folder)
    whole = [p for p in found if not p.is_symlink() and (p / manifest.MANIFEST_FILE).is_file()]
    for old in whole[run.config.checkpoint.keep_last :]:
        trigger_fault("ckpt.prune")
        trash = old.with_name(f".trash-{old.name}-a{run.attempt}")
        old.rename(trash)
        fsync_path(run.folder)
        trigger_fault("ckpt.prune")
        shutil.rmtree(trash)


def remove_trash(run: Run) -> None:
    """Remove the checkpoints that this attempt could not prune completely, if it now can."""
    for trash in run.folder.glob(f".trash-checkpoint-*-a{run.attempt}"):
        shutil.rmtree(trash, ignore_errors=True)


def estimated_checkpoint_bytes(run: Run) -> int:
    """Bytes of one checkpoint: the weights, their float32 masters and the optimizer's moments."""
    model = run.policy.model
    # Shards may have another dtype than the saved weights.
    itemsize = 4 if lora.has_adapter(model) else run.policy.dtype.itemsize
    weights = sum(prod(weight_shape(p)) for p in lora.tensors_to_save(model)) * itemsize
    if run.value_model is not None:
        weights += run.value_model.num_parameters * run.value_model.dtype.itemsize
    return weights + run.optimizer.masters_bytes + 2 * 4 * run.optimizer.num_trained_parameters


def check_checkpoint_space(run: Run) -> None:
    """Check before training that the disk has space for `keep_last` checkpoints and one more.

    Raises MachineError (exit 3), or warns, as checkpoint.on_low_disk says.
    """
    settings, size = run.config.checkpoint, estimated_checkpoint_bytes(run)
    rollback.check_disk_space(run.folder, (settings.keep_last + 1) * size, settings, run.log.note)


def _check_save_space(run: Run) -> None:
    need, free = estimated_checkpoint_bytes(run), shutil.disk_usage(run.folder).free
    if free < need:
        raise StorageError(f"it needs about {need / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free")


def _save_error(target: Path, error: Exception) -> StorageError:
    message = error.problems[0].what if isinstance(error, RunError) else str(error)
    free = f"free: {shutil.disk_usage(target.parent).free / 1e9:.3g} GB"
    last = read_json(target.parent / "run.json").get("checkpoint")
    kept = f"the last checkpoint is {last}" if last else "no checkpoint exists yet"
    why = f"{message or type(error).__name__}; {free}; {kept}"
    fix = "make that folder writable, with space on its disk, then resume=auto"
    return StorageError(Problem(f"{target.name} was not saved", str(target.parent), why, fix))


def optimizer_file_name(rank: int, world_size: int) -> str:
    """The name of the file with one rank's share of the optimizer, without its suffix."""
    return f"optimizer-{rank + 1}-of-{world_size}"
