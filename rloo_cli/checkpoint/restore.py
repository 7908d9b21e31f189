"""A run put back to where a checkpoint stands, whatever engine and number of ranks wrote it."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from rloo_cli.checkpoint import manifest, resume, rollback, save, step_state
from rloo_cli.checkpoint.resume import Start
from rloo_cli.checkpoint.save import REFERENCE, RNG, ROLLOUTS, VALUE
from rloo_cli.config.schema import RunConfig, TrainConfig
from rloo_cli.data.prompts import Prompts
from rloo_cli.reporting.update_metrics import scalars_alone
from rloo_cli.run import Run, State
from rloo_cli.utils import paths, rng
from rloo_cli.utils.errors import ConfigError, DataError, Problem
from rloo_cli.utils.files import read_json, update_json, write_text


def restore(run: Run, checkpoint: Path) -> None:
    """Put everything but the weights (the model was loaded from the checkpoint) back.

    Of any number of ranks, and of any engine: optimizer state is stored per parameter. Raises
    ConfigError when the checkpoint does not fit the run.
    """
    values, trainer = manifest.state(checkpoint), checkpoint / "trainer"
    try:
        run.state = State(**values["state"])
        run.optimizer.restore(Tensors(trainer), values["optimizer"])
        _take_up(run.optimizer, run.config.train, values["config"]["train"])
        states = _states(run, checkpoint, values)
        if run.reference is not None and run.reference.moves:
            run.reference.restore(load_file(trainer / f"{REFERENCE}.safetensors"))
        if run.critic is not None:
            run.critic.restore(load_file(trainer / f"{VALUE}.safetensors"))
        if (trainer / f"{ROLLOUTS}.json").is_file():
            rollouts = load_file(trainer / f"{ROLLOUTS}.safetensors")
            plain = read_json(trainer / f"{ROLLOUTS}.json")
            run.cycle = step_state.load(rollouts, plain, run.prompts)
            run.cycle.rng = states
            if not run.world.is_main:  # they are summed over ranks
                run.cycle.updates = scalars_alone(run.cycle.updates)
                run.cycle.safe = run.cycle.updates.copy()
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


def _take_up(optimizer: Any, now: TrainConfig, before: Mapping[str, Any]) -> None:
    """What the config has otherwise than the checkpoint's run had (`before`, its section train)
    holds from here on. Without this a changed learning rate would be recorded, and not used.
    """
    inner, schedule = optimizer.inner, optimizer.schedule
    old = {"weight_decay": before.get("weight_decay"), **(before.get("optimizer_kwargs") or {})}
    new = {"weight_decay": now.weight_decay, **now.optimizer_kwargs}
    changed = {k: v for k, v in new.items() if old.get(k) != v}
    for group in inner.param_groups:
        group |= {k: tuple(v) if isinstance(v, list) else v for k, v in changed.items()}
    keys = ("learning_rate", "lr_scheduler", "warmup_steps", "lr_scheduler_kwargs")
    if all(before.get(key) == getattr(now, key) for key in keys):
        return
    shapes = getattr(schedule, "lr_lambdas", None)
    for number, group in enumerate(inner.param_groups):
        was, given = group["initial_lr"], before.get("learning_rate")
        rate = now.learning_rate if was == given or not given else was * now.learning_rate / given
        # A schedule of the user's own: what it made of the rate before.
        share = shapes[number](schedule.last_epoch) if shapes else group["lr"] / was if was else 1.0
        group |= {"initial_lr": rate, "lr": rate * share}
        if hasattr(schedule, "base_lrs"):
            schedule.base_lrs[number] = rate
    schedule._last_lr = [group["lr"] for group in inner.param_groups]


def _states(run: Run, checkpoint: Path, values: dict[str, Any]) -> rng.States:
    """This rank's random states; another number of ranks has new ones, of seed, step and rank."""
    rank, trainer = run.world.rank, checkpoint / "trainer"
    if len(list(trainer.glob(f"{RNG}-*.safetensors"))) != run.world.size:
        return rng.fresh(run.config.seed, run.state.step, rank)
    plain = read_json(trainer / f"{RNG}-{rank}.json") if rank else values["rng"]
    return rng.States(load_file(trainer / f"{RNG}-{rank}.safetensors"), plain)


class Tensors(Mapping[str, Tensor]):
    """The optimizer's tensors in a checkpoint, of however many ranks; read when they are asked
    for, one at a time. Raises OSError where a share is missing."""

    def __init__(self, trainer: Path):
        found = sorted(trainer.glob("optimizer-*-of-*.safetensors"))
        count = int(found[0].stem.rpartition("-")[2]) if found else 1
        if len(found) != count:
            raise FileNotFoundError(f"{len(found)} of {count} files of the optimizer are there")
        self.files = [safe_open(path, "pt") for path in found]
        self.of = {name: file for file in self.files for name in file.keys()}  # noqa: SIM118

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self.of[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.of)

    def __len__(self) -> int:
        return len(self.of)


def begin(run: Run, start: Start) -> None:
    """Everything fits: the folder is this attempt's, and stays, whatever happens from here on.

    Rank 0 brings it back; all ranks restore.
    """
    run.world.check_stop()
    run.renames = run.world.first(lambda: _folder(run, start))
    if start.checkpoint is not None:
        run.world.each(lambda: restore(run, Path(str(start.checkpoint))))
        came = paths.shown(start.checkpoint)
        run.log.note(f"goes on from {came}, step {run.state.step} of {run.steps}")
    if run.world.is_main:
        run.ledger.open(run.prompts, run.config, run.state.place, run.state.step)


def _folder(run: Run, start: Start) -> bool:
    """Bring the run's folder back to where it goes on; whether folders can be renamed there."""
    save.check_room(run)
    for note in rollback.take(start):
        run.log.note(note)
    renames = rollback.renames(start.folder, start.attempt)
    given = resume.config_file(start.folder, start.attempt)
    if given.is_file():
        write_text(start.folder / "config.yaml", given.read_text())
    update_json(
        start.folder / "run.json",
        state="training",
        began=start.attempt,
        fingerprint=run.prompts.fingerprint,
        prompts=len(run.prompts),
        checkpoint=start.checkpoint.name if start.checkpoint else None,
        came_from=str(start.checkpoint) if start.checkpoint else None,
        save_method="rename" if renames else "manifest",
        forward={
            **asdict(run.level),
            "rows": run.limits.rows,
            "old_logp": run.plan.separate or "the training forward's",
            "engine": run.config.distributed.engine,
            "ranks": run.world.size,
        },
    )
    return renames


def same_data(start: Start, prompts: Prompts, config: RunConfig) -> None:
    """Raises DataError when the data is not what the checkpoint's order was made of."""
    if start.checkpoint is None or config.resume_allow_changes:
        return
    state = manifest.state(start.checkpoint)
    before, limit = state["fingerprint"], state["config"]["data"]["max_prompt_length"]
    if before != prompts.fingerprint:
        why = f"{len(prompts)} prompts, fingerprint {prompts.fingerprint}; it was {before}"
        as_it_was = "the data as it was"
        if limit is not None and config.data.max_prompt_length is None:
            as_it_was = f"data.max_prompt_length={limit}, as it was, and {as_it_was}"
        raise DataError(
            Problem(
                "the data changed since the checkpoint: prompts would be skipped or repeated",
                f"data.path, {start.checkpoint}",
                why,
                f"{as_it_was}, or resume_allow_changes=true (it is recorded)",
            )
        )
