"""Loads a checkpoint into a Run, whatever parallel engine and number of ranks wrote it."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from rloo_cli.checkpoint import manifest, resume, rollback, save, step_state
from rloo_cli.checkpoint.resume import ResumePlan
from rloo_cli.checkpoint.save import (
    AHEAD_FILE,
    CARRY_FILE,
    REFERENCE_FILE,
    RNG_FILE,
    ROLLOUTS_FILE,
)
from rloo_cli.config.schema import RunConfig, TrainConfig
from rloo_cli.config.user_code import code_files, code_fingerprints
from rloo_cli.data import chat_templates
from rloo_cli.data.prompts import Prompts
from rloo_cli.distributed.optimizer import TrainingOptimizer
from rloo_cli.generation.common.batch_source import SourceState
from rloo_cli.reporting.update_metrics import without_sums
from rloo_cli.run import Run, RunState
from rloo_cli.utils import paths, rng
from rloo_cli.utils.errors import ConfigError, DataError, Problem, refuse
from rloo_cli.utils.files import JsonObject, read_json, update_json, write_text

PROMPT_CODE = ("data.map", "data.filter", "data.mixture.", "model.chat_template", "agent.")


def restore_run(run: Run, checkpoint: Path) -> None:
    """Restore everything but the weights: the models were already loaded from the checkpoint.

    Optimizer state is stored per parameter, so any number of ranks and any parallel engine may
    have written it. Raises ConfigError when the checkpoint does not fit the run.
    """
    values, trainer = manifest.read_trainer_state(checkpoint), checkpoint / "trainer"
    try:
        run.state = RunState(**values["state"])
        run.episodes_before = run.state.episodes
        run.optimizer.restore(OptimizerTensors(trainer), values["optimizer"])
        for part in run.optimizer.parts:
            _apply_config_changes(part, run.config.train, values["config"]["train"])
        states = _rank_random_states(run, checkpoint, values)
        if run.reference is not None and run.reference.follows_policy:
            run.reference.restore(load_file(trainer / f"{REFERENCE_FILE}.safetensors"))
        if (trainer / f"{ROLLOUTS_FILE}.json").is_file():
            rollouts = load_file(trainer / f"{ROLLOUTS_FILE}.safetensors")
            plain = read_json(trainer / f"{ROLLOUTS_FILE}.json")
            run.step_progress = step_state.load_step(rollouts, plain, run.prompts)
            run.step_progress.rng = states
            if not run.world.is_main:  # saved as sums over ranks: only rank 0 has them
                run.step_progress.updates = without_sums(run.step_progress.updates)
                run.step_progress.marked_updates = run.step_progress.updates.copy()
        next_step = run.state.step + (run.step_progress is not None)
        run.source.restore(_source_state(trainer, run.prompts), next_step)
        run.rng = states
        rng.restore_random_states(states)
        run.log.restore(values["log"])
        run.clock.started_at -= values["elapsed"]
    except (KeyError, ValueError, TypeError, RuntimeError, OSError, SafetensorError) as error:
        refuse("resume", f"{checkpoint} cannot be restored", "an older checkpoint", error)
    run.saved_position = run.position


def _source_state(trainer: Path, prompts: Prompts) -> SourceState:
    """The checkpoint's data of the batches after its current step."""
    state = SourceState()
    if (trainer / f"{CARRY_FILE}.json").is_file():
        state.group_tensors = load_file(trainer / f"{CARRY_FILE}.safetensors")
        state.groups = read_json(trainer / f"{CARRY_FILE}.json")
    if (trainer / f"{AHEAD_FILE}.json").is_file():
        drawn = load_file(trainer / f"{AHEAD_FILE}.safetensors")
        plain = read_json(trainer / f"{AHEAD_FILE}.json")
        state.batch = step_state.load_step(drawn, plain, prompts).batch
    return state


def _apply_config_changes(
    optimizer: TrainingOptimizer, train_config: TrainConfig, saved_train_config: JsonObject
) -> None:
    """Apply the values that differ from `saved_train_config`, the checkpoint's section `train`.

    Otherwise a changed learning rate would be recorded, but not used.
    """
    inner, schedule = optimizer.inner, optimizer.schedule
    old = dict(saved_train_config.get("optimizer_kwargs") or {})
    old = {"weight_decay": saved_train_config.get("weight_decay")} | old
    new = {"weight_decay": train_config.weight_decay, **train_config.optimizer_kwargs}
    changed = {k: v for k, v in new.items() if old.get(k) != v}
    for group in inner.param_groups:
        group |= {k: tuple(v) if isinstance(v, list) else v for k, v in changed.items()}
    keys = ("learning_rate", "lr_scheduler", "warmup_steps", "lr_scheduler_kwargs")
    if all(saved_train_config.get(key) == getattr(train_config, key) for key in keys):
        return
    lambdas = getattr(schedule, "lr_lambdas", None)
    before = saved_train_config.get("learning_rate")
    for i, group in enumerate(inner.param_groups):
        rate, old_rate = train_config.learning_rate, group["initial_lr"]
        if before and old_rate != before:  # a group with a rate of its own keeps its proportion
            rate = old_rate * rate / before
        # A user's own schedule has no lambdas: use its factor at this point.
        old_factor = group["lr"] / old_rate if old_rate else 1.0
        factor = lambdas[i](schedule.last_epoch) if lambdas else old_factor
        group |= {"initial_lr": rate, "lr": rate * factor}
        if hasattr(schedule, "base_lrs"):
            schedule.base_lrs[i] = rate
    schedule._last_lr = [group["lr"] for group in inner.param_groups]


def _rank_random_states(run: Run, checkpoint: Path, values: JsonObject) -> rng.RandomStates:
    """This rank's random states; fresh ones if another number of ranks saved the checkpoint."""
    rank, trainer = run.world.rank, checkpoint / "trainer"
    if len(list(trainer.glob(f"{RNG_FILE}-*.safetensors"))) != run.world.size:
        return rng.fresh_random_states(run.config.seed, run.state.step, rank)
    plain = read_json(trainer / f"{RNG_FILE}-{rank}.json") if rank else values["rng"]
    return rng.RandomStates(load_file(trainer / f"{RNG_FILE}-{rank}.safetensors"), plain)


class OptimizerTensors(Mapping[str, Tensor]):
    """The optimizer's tensors in a checkpoint of any number of ranks, each read on access.

    Raises OSError where a rank's file is missing.
    """

    def __init__(self, trainer_folder: Path):
        files = sorted(trainer_folder.glob("optimizer-*-of-*.safetensors"))
        count = int(files[0].stem.rpartition("-")[2]) if files else 1
        if len(files) != count:
            raise FileNotFoundError(f"{len(files)} of {count} files of the optimizer were found")
        self.files = [safe_open(path, "pt") for path in files]
        self.file_of_tensor = {name: file for file in self.files for name in file.keys()}  # noqa: SIM118

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self.file_of_tensor[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.file_of_tensor)

    def __len__(self) -> int:
        return len(self.file_of_tensor)


def start_attempt(run: Run, resume_plan: ResumePlan) -> None:
    """Take over the run folder, once all checks have passed, and load the plan's checkpoint.

    Rank 0 rolls the folder back; all ranks restore.
    """
    run.world.check_stop()
    run.has_atomic_rename = run.world.run_on_rank0(lambda: _prepare_run_folder(run, resume_plan))
    if (checkpoint := resume_plan.checkpoint) is not None:
        run.world.run_on_all_ranks(lambda: restore_run(run, checkpoint))
        shown = paths.path_as_typed(checkpoint)
        run.log.note(f"resumes from {shown}, step {run.state.step} of {run.num_steps}")
    if run.world.is_main:
        k = run.config.algorithm.num_generations
        run.ledger.open(run.prompts, k, run.state.place, run.state.step)


def _prepare_run_folder(run: Run, resume_plan: ResumePlan) -> bool:
    """Roll the run folder back to the plan's checkpoint. Returns whether it can rename folders.

    The config of this attempt becomes the run's, and run.json records that it trains.
    """
    save.check_checkpoint_space(run)
    for note in rollback.roll_back_folder(resume_plan):
        run.log.note(note)
    folder, attempt, checkpoint = resume_plan.folder, resume_plan.attempt, resume_plan.checkpoint
    renames = rollback.can_rename_folders(folder, attempt)
    config_path = resume.attempt_config_path(folder, attempt)
    if config_path.is_file():
        write_text(folder / "config.yaml", config_path.read_text())
    update_json(
        folder / "run.json",
        state="training",
        began=attempt,
        fingerprint=run.prompts.fingerprint,
        code_files=code_fingerprints(code_files(run.config)),
        template_clock=chat_templates.template_clock(),
        teacher=None if run.teacher is None else run.teacher.model,
        prompts=len(run.prompts),
        checkpoint=checkpoint.name if checkpoint else None,
        came_from=str(checkpoint) if checkpoint else None,
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


def template_clock_of(resume_plan: ResumePlan) -> str:
    """The time that chat templates see in this attempt: the start of the run."""
    checkpoint = resume_plan.checkpoint
    if checkpoint is None:
        return chat_templates.local_time()
    return str(manifest.read_trainer_state(checkpoint)["template_clock"])


def check_same_data(
    resume_plan: ResumePlan, prompts: Prompts, specs: Mapping[str, str], allowed: bool, writes: bool
) -> None:
    """Raises DataError if the prompts are not those that the checkpoint was trained on.

    `specs`: the user's code, key -> `file.py:name`. `allowed`: run.json records it instead.
    """
    if resume_plan.checkpoint is None:
        return
    before = manifest.read_trainer_state(resume_plan.checkpoint)["fingerprint"]
    if before == prompts.fingerprint:
        return
    if allowed and writes:
        file, change = resume_plan.folder / "run.json", [before, prompts.fingerprint]
        entry = {"attempt": resume_plan.attempt, "data (fingerprint)": change}
        update_json(file, changes=[*read_json(file).get("changes", []), entry])
    elif not allowed:
        what = "the data has changed since the checkpoint: prompts would be skipped or repeated"
        why = f"{len(prompts)} prompts, fingerprint {prompts.fingerprint}; it was {before}"
        fix = "restore the data, or resume_allow_changes=true (this is recorded)"
        codes = [f"{k}={s}" for k, s in specs.items() if k.startswith(PROMPT_CODE)]
        if codes:  # check_same_code has found their files unchanged
            why += f"\n{', '.join(codes)}: rows that depend on time, environment or chance"
            why += " differ each time"
            fix = f"{' and '.join(codes)} must return the same rows each time, or {fix}"
        refuse(f"data.path, {resume_plan.checkpoint}", what, fix, why, error=DataError)


def check_same_code(resume_plan: ResumePlan, config: RunConfig) -> list[str]:
    """Lines about user files that have changed since the checkpoint.

    They are rewards, algorithms, maps, filters, tools, optimizers, schedulers, callbacks and chat
    templates.

    Raises ConfigError with them, unless `resume_allow_changes`.
    """
    if resume_plan.checkpoint is None:
        return []
    state = manifest.read_trainer_state(resume_plan.checkpoint)
    before: dict[str, str] = state["code_files"]
    files, problems = code_files(config), []
    for key, digest in code_fingerprints(files).items():
        if before.get(key, digest) == digest:
            continue
        spec = files[key]
        name = spec if Path(spec).is_file() else spec.rpartition(":")[0]
        what = f"{name} changed since the checkpoint: it would not be the same run"
        why = f"{key} = {spec}: sha256 {digest}; it was {before[key]}"
        fix = "restore the file, or resume_allow_changes=true (this is recorded)"
        problems.append(Problem(what, f"{key}, {resume_plan.checkpoint}", why, fix))
    if problems and not config.resume_allow_changes:
        raise ConfigError(*problems)
    return [f"changed since the checkpoint: {problem.why}" for problem in problems]


def check_same_teacher(resume_plan: ResumePlan, model: str) -> None:
    """Raises ConfigError if a server's teacher has another name than at the checkpoint."""
    if resume_plan.checkpoint is None:
        return
    before = manifest.read_trainer_state(resume_plan.checkpoint).get("teacher") or model
    if before != model:
        what = f"the teacher was {before} at the checkpoint, and is {model} now"
        where = f"algorithm.teacher.base_url, {resume_plan.checkpoint}"
        fix = "serve the earlier teacher, or resume_allow_changes=true (this is recorded)"
        refuse(where, what, fix, "a different teacher changes the training")
