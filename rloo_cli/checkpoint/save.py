"""Saving: checkpoints to resume from.

A checkpoint is a model folder as `from_pretrained` and vLLM load it, with what a restart needs in
`trainer/`. It bears its name only when it is complete: written to a temporary folder, every file
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
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rloo_cli.checkpoint import export, manifest, rollback, step_state
from rloo_cli.checkpoint.resume import written
from rloo_cli.config import check
from rloo_cli.distributed.world import is_lost
from rloo_cli.policy import lora
from rloo_cli.policy.model import size
from rloo_cli.reporting.update_metrics import Updates, together
from rloo_cli.run import Run
from rloo_cli.utils import rng
from rloo_cli.utils.errors import Problem, RunError, StorageError
from rloo_cli.utils.fault_injection import fault
from rloo_cli.utils.files import read_json, sync, update_json, write_text

PACKAGES = ("rloo-cli", "torch", "transformers", "safetensors")
RNG, ROLLOUTS = "rng", "rollouts"
REFERENCE = "reference"  # one that moves
VALUE = "value"


def save(run: Run, must: bool = False) -> Path | None:
    """Write a checkpoint of where the run stands; None where there is nothing new, or no room.

    All ranks save together: each writes its share of the optimizer, rank 0 the rest. A save that
    fails leaves what was there before. It is a warning and the run goes on, but with `must` it
    raises StorageError (exit 8).
    """
    place = run.place
    if run.saved is not None and place <= run.saved:
        return None
    target, began = run.folder / manifest.name(place), time.monotonic()
    try:
        if not run.world.first(lambda: target.exists() and manifest.problem(target) is None):
            _complete(run, place, target)
        run.world.first(lambda: _publish(run, target))
        run.saved = place
    except Exception as error:  # the writers in Rust raise no OSError when the disk is full
        if is_lost(error):
            raise
        failed = _failure(target, error)
        if must:
            raise failed from error
        run.log.note(f"warning: {failed.problems[0].what}: {failed.problems[0].why}")
        return None
    spent = round(time.monotonic() - began, 2)
    if run.world.is_main:
        update_json(run.folder / "run.json", checkpoint=target.name, save_seconds=spent)
    return target


def _publish(run: Run, target: Path) -> None:
    _point(run, target)
    _prune(run)


def _complete(run: Run, place: manifest.Place, target: Path) -> None:
    """Everything up to the rename that makes it a checkpoint."""
    whole = run.renames  # else the manifest alone marks it as complete
    temporary = target.with_name(f".tmp-{target.name}-a{run.attempt}") if whole else target

    def begin() -> None:
        _room(run)
        if target.exists():  # it was found damaged
            target.rename(rollback.aside(target, run.attempt))
        shutil.rmtree(temporary, ignore_errors=True)
        (temporary / "trainer").mkdir(parents=True)

    def end() -> None:
        for path in sorted(p for p in temporary.rglob("*") if p.is_file()):
            fault("ckpt.fsync")
            sync(path)
        _look(run, temporary)
        manifest.write(temporary, _facts(run, place))
        if whole:
            fault("ckpt.rename")
            temporary.rename(target)
        sync(run.folder)

    try:
        run.world.first(begin)
        state = _gather(run)
        run.world.each(lambda: _write(run, temporary, state))
        run.world.first(end)
    except BaseException:
        if run.world.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


@dataclass
class Gathered:
    """What takes all ranks to know, but the weights."""

    tensors: dict[str, Tensor]  # this rank's share of the optimizer
    optimizer: dict[str, Any]
    rng: rng.States  # this rank's
    updates: Updates | None  # of the step that is being done


def _gather(run: Run) -> Gathered:
    tensors, optimizer = run.optimizer.dump(run.world.rank, run.world.size)
    if run.cycle is None:
        return Gathered(tensors, optimizer, run.rng, None)
    return Gathered(tensors, optimizer, run.cycle.rng, together(run.cycle.safe, run.world))


def _write(run: Run, folder: Path, state: Gathered) -> None:
    """All files but the manifest; on another rank than the first, its share of them."""
    trainer, rank, size = folder / "trainer", run.world.rank, run.world.size
    parts: list[tuple[str, dict[str, Tensor]]] = [
        (optimizer_file(rank, size), state.tensors),
        (f"{RNG}-{rank}", state.rng.tensors),
    ]
    writers: list[Callable[[], Any]] = []
    if run.world.is_main and run.reference is not None and run.reference.moves:
        parts.append((REFERENCE, run.reference.state()))
    if run.world.is_main and run.critic is not None:
        parts.append((VALUE, run.critic.state()))
    if run.world.is_main:
        if run.cycle is not None:
            rollouts, plain = step_state.dump(run.cycle, state.updates)
            parts.append((ROLLOUTS, rollouts))
            # What a user's reward said of a row may be anything that samples/ can hold, NaN too.
            write_text(trainer / f"{ROLLOUTS}.json", json.dumps(plain, default=str) + "\n")
        text = json.dumps(_values(run, state), allow_nan=False)
        writers.append(lambda: write_text(trainer / "state.json", text + "\n"))
    else:
        text = json.dumps(state.rng.plain)
        writers.append(lambda: write_text(trainer / f"{RNG}-{rank}.json", text + "\n"))
    tables = [lambda n=n, t=t: _save(t, trainer / f"{n}.safetensors") for n, t in parts]
    write_model(run, folder)
    for write in (*tables, *writers):
        fault("ckpt.write")
        write()


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, path)
    sync(path)  # by who wrote it: another machine's sync would not reach it


def write_model(run: Run, folder: Path) -> None:
    """The model's own files. All ranks take part."""
    fault("ckpt.write")
    if run.engine.sharded:
        export.gathered(run.engine, run.policy, run.tokenizer, folder)
    elif run.world.is_main:
        export.whole(run.policy.model, run.tokenizer, folder)


def write_final(run: Run, folder: Path) -> None:
    """The trained model as others use it. All ranks take part."""
    if run.engine.sharded:
        export.gathered(run.engine, run.policy, run.tokenizer, folder)
    elif run.world.is_main:
        export.final(run.policy.model, run.tokenizer, folder)


def _values(run: Run, state: Gathered) -> dict[str, Any]:
    """What state.json says."""
    return {
        "state": run.state.dump(),
        # As it was given: what `auto` came to in this run is not asked again on another machine.
        "config": written(run.folder) or check.dump(run.config),
        "fingerprint": run.prompts.fingerprint,
        "steps": run.steps,
        "optimizer": state.optimizer,
        "rng": state.rng.plain,
        "journals": rollback.lengths(run.folder),
        "log": run.log.dump(),
        "elapsed": run.clock.elapsed(),
    }


def _look(run: Run, folder: Path) -> None:
    """Open the weights' headers again: nothing may be missing or of size 0."""
    # A tied head is one parameter; fused or split tensors have as many elements as before.
    _there(folder.glob("*.safetensors"), lora.kept(run.policy.model), "the model")
    if run.critic is not None:
        own = folder / "trainer" / f"{VALUE}.safetensors"
        _there([own], run.critic.model.parameters(), "the value model")


def _there(paths: Iterable[Path], parameters: Iterable[Tensor], name: str) -> None:
    found, wanted = 0, sum(prod(size(p)) for p in parameters)
    for path in paths:
        with safe_open(path, "pt") as file:
            for tensor in file.keys():  # noqa: SIM118  (it is no mapping)
                shape = file.get_slice(tensor).get_shape()
                if not (count := prod(shape)):
                    raise StorageError(f"{path.name} holds {tensor} with shape {shape}")
                found += count
    if found < wanted:
        raise StorageError(f"the written weights have {found} elements, {name} has {wanted}")


def _facts(run: Run, place: manifest.Place) -> dict[str, Any]:
    return {
        "step": place[0],
        "updates": run.state.updates,
        "prompts_consumed": run.state.place,
        "world_size": run.world.size,
        "attempt": run.attempt,
        "versions": {name: metadata.version(name) for name in PACKAGES},
        "config_hash": read_json(run.folder / "run.json").get("hash"),
        "fingerprint": run.prompts.fingerprint,
    }


def _point(run: Run, target: Path) -> None:
    """`latest`: a small text file, because links do not survive every copy."""
    fault("ckpt.latest")
    write_text(run.folder / "latest", target.name + "\n")
    sync(run.folder)


def _prune(run: Run) -> None:
    """Remove the oldest complete checkpoints; keep_last of them stay.

    A folder without our manifest, or a link to one, is not ours to remove, nor counted.
    """
    found = manifest.checkpoints(run.folder)
    whole = [p for p in found if not p.is_symlink() and (p / manifest.FILE).is_file()]
    for old in whole[run.config.checkpoint.keep_last :]:
        fault("ckpt.prune")
        trash = old.with_name(f".trash-{old.name}-a{run.attempt}")
        shutil.rmtree(trash, ignore_errors=True)
        old.rename(trash)
        sync(run.folder)
        fault("ckpt.prune")
        shutil.rmtree(trash)


def estimate(run: Run) -> int:
    """Bytes of one checkpoint: weights, and float32 masters and two moments where trained."""
    kept = lora.kept(run.policy.model)
    own = run.policy.dtype.itemsize  # shards may be held in another dtype than they are saved in
    weights = sum(prod(size(p)) * (4 if lora.on(run.policy.model) else own) for p in kept)
    weights += 0 if run.critic is None else sum(p.nbytes for p in run.critic.model.parameters())
    return weights + run.optimizer.masters_bytes + 2 * 4 * run.optimizer.count


def check_room(run: Run) -> None:
    """Before training: room for every checkpoint that is kept, one more, and the final model.

    Raises MachineError (exit 3), or warns, as checkpoint.on_low_disk says.
    """
    settings, size = run.config.checkpoint, estimate(run)
    rollback.check_room(run.folder, (settings.keep_last + 1) * size, settings, run.log.note)


def _room(run: Run) -> None:
    need, free = estimate(run), shutil.disk_usage(run.folder).free
    if free < need:
        raise StorageError(f"it needs about {need / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free")


def _failure(target: Path, error: Exception) -> StorageError:
    text = error.problems[0].what if isinstance(error, RunError) else str(error)
    free = f"free: {shutil.disk_usage(target.parent).free / 1e9:.3g} GB"
    last = read_json(target.parent / "run.json").get("checkpoint", "none")
    why = f"{text or type(error).__name__}; {free}; the last checkpoint is {last}"
    return StorageError(Problem(f"{target.name} was not saved", str(target.parent), why))


def optimizer_file(rank: int, size: int) -> str:
    """The name of one rank's share of the optimizer, without its ending."""
    return f"optimizer-{rank + 1}-of-{size}"
