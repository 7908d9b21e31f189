"""Saving: checkpoints to resume from, and the trained model in `final/`.

A checkpoint is a model folder as `from_pretrained` and vLLM load it, with what a restart needs in
`trainer/`. It bears its name only when it is complete: written to a temporary folder, every file
fsynced, the manifest last, then one rename. Nothing is deleted before its successor is complete,
and nothing here is a pickle.
"""

import json
import shutil
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from rloo_cli import config, cycle, manifest, rewind, rng
from rloo_cli.errors import ConfigError, Problem, RunError, StorageError
from rloo_cli.faults import fault
from rloo_cli.files import read_json, sync, update_json, write_text
from rloo_cli.parts import Run, State
from rloo_cli.resume import written

PACKAGES = ("rloo-cli", "torch", "transformers", "safetensors")
OPTIMIZER, RNG, ROLLOUTS = "optimizer-1-of-1", "rng-0", "rollouts"


def save(run: Run, must: bool = False) -> Path | None:
    """Write a checkpoint of where the run stands; None where there is nothing new, or no room.

    A save that fails leaves what was there before. It is a warning and the run goes on, but with
    `must` it raises StorageError (exit 8).
    """
    place = run.place
    if run.saved is not None and place <= run.saved:
        return None
    target, began = run.folder / manifest.name(place), time.monotonic()
    try:
        if not (target.exists() and manifest.problem(target) is None):
            _room(run)
            _complete(run, place, target)
        _point(run, target)
        run.saved = place
        _prune(run)
    except Exception as error:  # the writers in Rust raise no OSError when the disk is full
        failed = _failure(target, error)
        if must:
            raise failed from error
        run.log.note(f"warning: {failed.problems[0].what}: {failed.problems[0].why}")
        return None
    spent = round(time.monotonic() - began, 2)
    update_json(run.folder / "run.json", checkpoint=target.name, save_seconds=spent)
    return target


def _complete(run: Run, place: manifest.Place, target: Path) -> None:
    """Everything up to the rename that makes it a checkpoint."""
    if target.exists():  # it was found damaged
        target.rename(rewind.aside(target, run.attempt))
    whole = run.renames  # else the manifest alone marks it as complete
    temporary = target.with_name(f".tmp-{target.name}-a{run.attempt}") if whole else target
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        _write(run, temporary)
        for path in sorted(p for p in temporary.rglob("*") if p.is_file()):
            fault("ckpt.fsync")
            sync(path)
        _look(run, temporary)
        manifest.write(temporary, _facts(run, place))
        if whole:
            fault("ckpt.rename")
            temporary.rename(target)
        sync(run.folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write(run: Run, folder: Path) -> None:
    """All files but the manifest."""
    trainer = folder / "trainer"
    trainer.mkdir(parents=True)
    tensors, optimizer = run.optimizer.dump()
    states = run.rng if run.cycle is None else run.cycle.rng
    values: dict[str, Any] = {
        "state": run.state.dump(),
        # As it was given: what `auto` came to in this run is not asked again on another machine.
        "config": written(run.folder) or config.dump(run.config),
        "fingerprint": run.prompts.fingerprint,
        "steps": run.steps,
        "optimizer": optimizer,
        "rng": states.plain,
        "journals": rewind.lengths(run.folder),
        "log": run.log.dump(),
        "elapsed": run.clock.elapsed(),
    }
    parts: list[tuple[str, dict[str, Tensor]]] = [(OPTIMIZER, tensors), (RNG, states.tensors)]
    if run.cycle is not None:
        rollouts, plain = cycle.dump(run.cycle)
        parts.append((ROLLOUTS, rollouts))
        # What a user's reward said of a row may be anything that samples/ can hold, NaN too.
        write_text(trainer / f"{ROLLOUTS}.json", json.dumps(plain, default=str) + "\n")
    writers: list[Callable[[], Any]] = [
        lambda: _write_model(run.policy.model, run.tokenizer, folder),
        *[lambda n=n, t=t: save_file(t, trainer / f"{n}.safetensors") for n, t in parts],
        lambda: write_text(trainer / "state.json", json.dumps(values, allow_nan=False) + "\n"),
    ]
    for write in writers:
        fault("ckpt.write")
        write()


def _write_model(model: Any, tokenizer: Any, folder: Path) -> None:
    _savable(model.generation_config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _look(run: Run, folder: Path) -> None:
    """Open the weights' headers again: nothing may be missing or of size 0."""
    found = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  (it is no mapping)
                shape = file.get_slice(name).get_shape()
                size = 1
                for side in shape:
                    size *= side
                if not size:
                    raise StorageError(f"{path.name} holds {name} with shape {shape}")
                found += size
    # A tied head is one parameter; fused or split tensors have as many elements as before.
    wanted = sum(p.numel() for p in run.policy.model.parameters())
    if found < wanted:
        raise StorageError(f"the written weights have {found} elements, the model has {wanted}")


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
    """Remove the oldest complete checkpoints; keep_last of them stay."""
    for old in manifest.checkpoints(run.folder)[run.config.checkpoint.keep_last :]:
        fault("ckpt.prune")
        trash = old.with_name(f".trash-{old.name}-a{run.attempt}")
        shutil.rmtree(trash, ignore_errors=True)
        old.rename(trash)
        sync(run.folder)
        fault("ckpt.prune")
        shutil.rmtree(trash)


def estimate(run: Run) -> int:
    """Bytes of one checkpoint: weights, and float32 masters and two moments where trained."""
    weights = sum(p.numel() * p.element_size() for p in run.policy.model.parameters())
    masters = run.optimizer.masters
    own = sum(
        m.numel() * 4 for m, w in zip(masters, run.optimizer.weights, strict=True) if m is not w
    )
    return weights + own + 2 * sum(4 * m.numel() for m in masters)


def check_room(run: Run) -> None:
    """Before training: room for every checkpoint that is kept, one more, and the final model.

    Raises MachineError (exit 3), or warns, as checkpoint.on_low_disk says.
    """
    settings, size = run.config.checkpoint, estimate(run)
    rewind.check_room(run.folder, (settings.keep_last + 1) * size, settings, run.log.note)


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


def restore(run: Run, checkpoint: Path) -> None:
    """Put everything but the weights (the model was loaded from the checkpoint) back.

    Raises ConfigError when the checkpoint does not fit the run.
    """
    values, trainer = manifest.state(checkpoint), checkpoint / "trainer"
    try:
        run.state = State(**values["state"])
        tensors = load_file(trainer / f"{OPTIMIZER}.safetensors")
        run.optimizer.restore(tensors, values["optimizer"])
        states = rng.States(load_file(trainer / f"{RNG}.safetensors"), values["rng"])
        if (trainer / f"{ROLLOUTS}.json").is_file():
            rollouts = load_file(trainer / f"{ROLLOUTS}.safetensors")
            plain = read_json(trainer / f"{ROLLOUTS}.json")
            run.cycle = cycle.load(rollouts, plain, run.prompts)
            run.cycle.rng = states
        run.rng = states
        rng.put(states)
        run.log.restore(values["log"])
        run.clock.began -= values["elapsed"]
    except (KeyError, ValueError, TypeError, RuntimeError, OSError, SafetensorError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(
            Problem(f"{checkpoint} cannot be restored", "resume", why, "an older checkpoint")
        ) from error
    run.saved = run.place


def save_final(model: Any, tokenizer: Any, folder: Path, attempt: int = 1) -> Path:
    """Write weights, tokenizer, chat template and generation config to `folder`/final.

    The folder gets its name only when it is complete. Raises StorageError (exit 8).
    """
    final, temporary = folder / "final", folder / f".tmp-final-a{attempt}"
    trash = folder / f".trash-final-a{attempt}"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        _write_model(model, tokenizer, temporary)
        for path in temporary.rglob("*"):
            sync(path)
        sync(temporary)
        if final.exists():  # of an earlier end, before the run was made longer
            shutil.rmtree(trash, ignore_errors=True)
            final.rename(trash)
        temporary.rename(final)
        sync(folder)
    except RunError:  # a signal, not the disk
        raise
    except Exception as error:  # the writers in Rust raise no OSError when the disk is full
        why = f"{error}; free: {shutil.disk_usage(folder).free / 1e9:.1f} GB"
        raise StorageError(Problem(f"the final save failed: {final}", str(folder), why)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(trash, ignore_errors=True)
    return final


def _savable(config: Any) -> None:
    """Some published models' sampling flags load without `do_sample`, but do not save without."""
    try:
        config.validate(strict=True)
    except ValueError:
        config.do_sample = True
