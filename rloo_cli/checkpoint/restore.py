"""A run put back to where a checkpoint stands, whatever engine and number of ranks wrote it."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from rloo_cli.checkpoint import manifest, resume, rollback, save, step_state
from rloo_cli.checkpoint.resume import ResumePlan
from rloo_cli.checkpoint.save import REFERENCE_FILE, RNG_FILE, ROLLOUTS_FILE, VALUE_FILE
from rloo_cli.config.schema import RunConfig, TrainConfig
from rloo_cli.data.prompts import Prompts
from rloo_cli.reporting.update_metrics import without_sums
from rloo_cli.run import Run, RunState
from rloo_cli.utils import paths, rng
from rloo_cli.utils.errors import ConfigError, DataError, Problem
from rloo_cli.utils.files import read_json, update_json, write_text


def restore_run(run: Run, checkpoint: Path) -> None:
    """Put everything but the weights (the model was loaded from the checkpoint) back.

    Of any number of ranks, and of any engine: optimizer state is stored per parameter. Raises
    ConfigError when the checkpoint does not fit the run.
    """
    values, trainer = manifest.read_trainer_state(checkpoint), checkpoint / "trainer"
    try:
        run.state = RunState(**values["state"])
        run.optimizer.restore(OptimizerTensors(trainer), values["optimizer"])
        _apply_config_changes(run.optimizer, run.config.train, values["config"]["train"])
        states = _rank_random_states(run, checkpoint, values)
        if run.reference is not None and run.reference.follows_policy:
            run.reference.restore(load_file(trainer / f"{REFERENCE_FILE}.safetensors"))
        if run.value_model is not None:
            run.value_model.restore(load_file(trainer / f"{VALUE_FILE}.safetensors"))
        if (trainer / f"{ROLLOUTS_FILE}.json").is_file():
            rollouts = load_file(trainer / f"{ROLLOUTS_FILE}.safetensors")
            plain = read_json(trainer / f"{ROLLOUTS_FILE}.json")
            run.step_progress = step_state.load_step(rollouts, plain, run.prompts)
            run.step_progress.rng = states
            if not run.world.is_main:  # they are summed over ranks
                run.step_progress.updates = without_sums(run.step_progress.updates)
                run.step_progress.marked_updates = run.step_progress.updates.copy()
        run.rng = states
        rng.restore_random_states(states)
        run.log.restore(values["log"])
        run.clock.started_at -= values["elapsed"]
    except (KeyError, ValueError, TypeError, RuntimeError, OSError, SafetensorError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(
            Problem(f"{checkpoint} cannot be restored", "resume", why, "an older checkpoint")
        ) from error
    run.saved_position = run.position


def _apply_config_changes(
    optimizer: Any, train_config: TrainConfig, saved_train_config: Mapping[str, Any]
) -> None:
    """What the config has otherwise than the checkpoint's run had (`before`, its section train)
    holds from here on. Without this a changed learning rate would be recorded, and not used.
    """
    inner, schedule = optimizer.inner, optimizer.schedule
    old = {
        "weight_decay": saved_train_config.get("weight_decay"),
        **(saved_train_config.get("optimizer_kwargs") or {}),
    }
    new = {"weight_decay": train_config.weight_decay, **train_config.optimizer_kwargs}
    changed = {k: v for k, v in new.items() if old.get(k) != v}
    for group in inner.param_groups:
        group |= {k: tuple(v) if isinstance(v, list) else v for k, v in changed.items()}
    keys = ("learning_rate", "lr_scheduler", "warmup_steps", "lr_scheduler_kwargs")
    if all(saved_train_config.get(key) == getattr(train_config, key) for key in keys):
        return
    shapes = getattr(schedule, "lr_lambdas", None)
    for number, group in enumerate(inner.param_groups):
        was, given = group["initial_lr"], saved_train_config.get("learning_rate")
        rate = (
            train_config.learning_rate
            if was == given or not given
            else was * train_config.learning_rate / given
        )
        # A schedule of the user's own: what it made of the rate before.
        share = shapes[number](schedule.last_epoch) if shapes else group["lr"] / was if was else 1.0
        group |= {"initial_lr": rate, "lr": rate * share}
        if hasattr(schedule, "base_lrs"):
            schedule.base_lrs[number] = rate
    schedule._last_lr = [group["lr"] for group in inner.param_groups]


def _rank_random_states(run: Run, checkpoint: Path, values: dict[str, Any]) -> rng.RandomStates:
    """This rank's random states; another number of ranks has new ones, of seed, step and rank."""
    rank, trainer = run.world.rank, checkpoint / "trainer"
    if len(list(trainer.glob(f"{RNG_FILE}-*.safetensors"))) != run.world.size:
        return rng.fresh_random_states(run.config.seed, run.state.step, rank)
    plain = read_json(trainer / f"{RNG_FILE}-{rank}.json") if rank else values["rng"]
    return rng.RandomStates(load_file(trainer / f"{RNG_FILE}-{rank}.safetensors"), plain)


class OptimizerTensors(Mapping[str, Tensor]):
    """The optimizer's tensors in a checkpoint, of however many ranks; read when they are asked
    for, one at a time. Raises OSError where a share is missing."""

    def __init__(self, trainer_folder: Path):
        found = sorted(trainer_folder.glob("optimizer-*-of-*.safetensors"))
        count = int(found[0].stem.rpartition("-")[2]) if found else 1
        if len(found) != count:
            raise FileNotFoundError(f"{len(found)} of {count} files of the optimizer are there")
        self.files = [safe_open(path, "pt") for path in found]
        self.file_of_tensor = {name: file for file in self.files for name in file.keys()}  # noqa: SIM118

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self.file_of_tensor[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.file_of_tensor)

    def __len__(self) -> int:
        return len(self.file_of_tensor)


def start_attempt(run: Run, resume_plan: ResumePlan) -> None:
    """Everything fits: the folder is this attempt's, and stays, whatever happens from here on.

    Rank 0 brings it back; all ranks restore.
    """
    run.world.check_stop()
    run.has_atomic_rename = run.world.run_on_rank0(lambda: _prepare_run_folder(run, resume_plan))
    if resume_plan.checkpoint is not None:
        run.world.run_on_all_ranks(lambda: restore_run(run, Path(str(resume_plan.checkpoint))))
        came = paths.path_as_typed(resume_plan.checkpoint)
        run.log.note(f"goes on from {came}, step {run.state.step} of {run.num_steps}")
    if run.world.is_main:
        run.ledger.open(run.prompts, run.config, run.state.place, run.state.step)


def _prepare_run_folder(run: Run, resume_plan: ResumePlan) -> bool:
    """Bring the run's folder back to where it goes on; whether folders can be renamed there."""
    save.check_checkpoint_space(run)
    for note in rollback.roll_back_folder(resume_plan):
        run.log.note(note)
    renames = rollback.can_rename_folders(resume_plan.folder, resume_plan.attempt)
    given = resume.attempt_config_path(resume_plan.folder, resume_plan.attempt)
    if given.is_file():
        write_text(resume_plan.folder / "config.yaml", given.read_text())
    update_json(
        resume_plan.folder / "run.json",
        state="training",
        began=resume_plan.attempt,
        fingerprint=run.prompts.fingerprint,
        prompts=len(run.prompts),
        checkpoint=resume_plan.checkpoint.name if resume_plan.checkpoint else None,
        came_from=str(resume_plan.checkpoint) if resume_plan.checkpoint else None,
        save_method="rename" if renames else "manifest",
        forward={
            **asdict(run.layout_choice),
            "rows": run.forward_limits.tokens,
            "old_logp": run.forward_plan.separate or "the training forward's",
            "engine": run.config.distributed.engine,
            "ranks": run.world.size,
        },
    )
    return renames


def check_same_data(resume_plan: ResumePlan, prompts: Prompts, config: RunConfig) -> None:
    """Raises DataError when the data is not what the checkpoint's order was made of."""
    if resume_plan.checkpoint is None or config.resume_allow_changes:
        return
    state = manifest.read_trainer_state(resume_plan.checkpoint)
    before, limit = state["fingerprint"], state["config"]["data"]["max_prompt_length"]
    if before != prompts.fingerprint:
        why = f"{len(prompts)} prompts, fingerprint {prompts.fingerprint}; it was {before}"
        as_it_was = "the data as it was"
        if limit is not None and config.data.max_prompt_length is None:
            as_it_was = f"data.max_prompt_length={limit}, as it was, and {as_it_was}"
        raise DataError(
            Problem(
                "the data changed since the checkpoint: prompts would be skipped or repeated",
                f"data.path, {resume_plan.checkpoint}",
                why,
                f"{as_it_was}, or resume_allow_changes=true (it is recorded)",
            )
        )
