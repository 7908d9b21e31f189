"""Recomputes a recorded step of a run, and reports where it differs.

The step's policy is an earlier checkpoint or the initial model, plus the updates of the recorded
steps since, which are repeated. The step's recorded completions are then scored by the run's own
rewards, and the run's own update (`train/step.py`) is applied. Everything is built in a temporary
folder; the run's folder is only read. Imports torch.
"""

import contextlib
import copy
import io
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from rloo_cli.checkpoint import manifest, resume
from rloo_cli.checkpoint.resume import ResumePlan
from rloo_cli.config import check
from rloo_cli.config.rules import LENGTH_FREE_SCHEDULES, RUN_LENGTH_KEYS
from rloo_cli.config.schema import GenerationConfig, RunConfig
from rloo_cli.data import rollout_files
from rloo_cli.data.rollout_record import RecordedStep, read_rollout_record, without_updates
from rloo_cli.inspection.replay_builder import ReplayBuilder, recorded_groups
from rloo_cli.inspection.step_differences import StepComparison, compare_steps
from rloo_cli.reporting.metrics_lines import read_training_lines
from rloo_cli.run import Run, StepProgress
from rloo_cli.train.advantages import update_algorithm_state
from rloo_cli.train.step import update_policy
from rloo_cli.utils import process_exit, rng
from rloo_cli.utils.errors import refuse
from rloo_cli.utils.files import JsonObject, read_json

PYTHON_PATH = "python:"  # of a reward that was a callable in the training process
# Relative and absolute: differences from other kernels, another number of ranks or a GPU.
TOLERANCES = {"float32": 1e-4}
HALF_TOLERANCE = 2e-2
COMPUTED_ON = ("device", "dtype", "ranks", "threads", "torch")


@dataclass(frozen=True)
class ReplayBase:
    """The starting point of a step's policy."""

    step: int  # finished steps there
    checkpoint: Path | None  # None = the initial model

    @property
    def name(self) -> str:
        """The checkpoint's name, or that of the initial model."""
        return "the first model" if self.checkpoint is None else self.checkpoint.name


@dataclass
class StepReplay:
    """The result of a recomputed step."""

    step: int
    base: str
    updated_before: list[int]  # steps whose updates were repeated to reach this one
    tolerance: float  # 0 = bit for bit
    comparison: StepComparison
    notes: list[str] = field(default_factory=list)

    @property
    def found(self) -> bool:
        """Whether anything differs."""
        return self.comparison.first is not None

    def to_json(self) -> JsonObject:
        """Its fields as plain values."""
        return asdict(self) | {"found": self.found}


def replay_bases(folder: Path) -> dict[int, ReplayBase]:
    """Recorded step -> where it can be computed from; other steps are omitted."""
    recorded = rollout_files.list_rollout_files(folder)
    bases = sorted(_base_candidates(folder), key=lambda base: base.step)
    found = {}
    for step in recorded:
        usable = [b for b in bases if b.step < step
                  and all(s in recorded for s in range(b.step + 1, step))]  # fmt: skip
        if usable:
            found[step] = usable[-1]
    return found


def _base_candidates(folder: Path) -> Iterator[ReplayBase]:
    yield ReplayBase(0, None)
    came_from = read_json(folder / "run.json").get("came_from")
    other = [Path(came_from)] if came_from else []
    for path in (*manifest.list_checkpoints(folder), *other):
        position = manifest.checkpoint_position(path)
        # A checkpoint inside a step includes some of its updates.
        if position is not None and position[1] < 0 and (path / manifest.MANIFEST_FILE).is_file():
            yield ReplayBase(position[0], path)


def check_recorded_steps(
    folder: Path,
    steps: Sequence[int],
    recorded: Collection[int],
    usable: Collection[int] = (),
) -> None:
    """Raises ConfigError if nothing or not all of `steps` is recorded, with the nearest of
    `usable`, or else of all recorded."""
    if not recorded:
        why = "logging.rollouts_every is 0 by default: nothing is recorded"
        fix = "logging.rollouts_every=1 in the next run"
        where = "--step" if steps else "command line"
        refuse(where, f"{folder} has no recorded rollouts", fix, why)
    for step in steps:
        if step not in recorded:
            why = f"recorded steps: {rollout_files.step_ranges(recorded)}"
            near = min(usable or recorded, key=lambda other: abs(other - step))
            refuse("--step", f"step {step} is not recorded", f"--step {near}", why)


def find_replay_base(folder: Path, step: int) -> ReplayBase:
    """The starting point of a recorded step. Raises ConfigError, which names the steps that can be
    replayed, and DataError for a damaged record."""
    recorded, bases = rollout_files.list_rollout_files(folder), replay_bases(folder)
    able = rollout_files.step_ranges(bases)
    check_recorded_steps(folder, [step], recorded, bases)
    near = min(bases or recorded, key=lambda other: abs(other - step))
    base = bases.get(step)
    if base is None:
        what = f"step {step} cannot be recomputed"
        why = "no earlier checkpoint has every following step recorded;"
        why += f" steps that can be replayed: {able}"
        fix = f"--step {near}" if bases else "logging.rollouts_every=1 in the next run"
        refuse("--step", what, fix, why)
    if base.checkpoint and (wrong := manifest.checkpoint_problem(base.checkpoint)) is not None:
        others = [s for s, b in bases.items() if b.checkpoint != base.checkpoint]
        fix = "logging.rollouts_every=1 in the next run"
        if others:
            fix = f"--step {min(others, key=lambda other: abs(other - step))}"
        refuse("--step", f"{base.checkpoint} cannot be used", fix, wrong)
    return base


def replay_step(
    folder: Path,
    step: int,
    tolerance: float | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> StepReplay:
    """Recompute a recorded step of the run in `folder`, and compare.

    `tolerance`: None = 0 (bit for bit) if the same device, dtype, number of ranks and torch
    computed the run on a CPU, else a tolerance for rounding. Raises RunError.
    """
    base, record = find_replay_base(folder, step), read_rollout_record(folder, step)
    earlier = list(range(base.step + 1, step))
    settings = read_attempt_config(folder, record)
    for other in earlier:
        _check_same_config(folder, settings, other, step, base)
    notes = _column_notes(record)
    callables = [n for n, e in settings.rewards.items()
                 if getattr(e, "path", "").startswith(PYTHON_PATH)]  # fmt: skip
    stand_ins = {name: RecordedScores(record, name) for name in callables}
    if callables:
        names = ", ".join(callables)
        notes.append(f"{names}: a Python callable, now gone; the recorded scores are used")
    with tempfile.TemporaryDirectory(prefix="rloo-replay-") as root:
        on_progress(f"building the run at {base.name}")
        run = _build_at(Path(root), check.dump_config(settings), record, base, stand_ins)
        for other in earlier:
            on_progress(f"repeating the updates of step {other}")
            _train_recorded_step(run, read_rollout_record(folder, other))
        on_progress(f"recomputing step {step}")
        run.log.training_lines = read_training_lines(folder / "metrics.jsonl", run.state.step)
        state = run.state
        groups = recorded_groups(run, record)
        batch = run.rollouts.recorded_batch(record.batch, groups, state.seen_by_rewards(run))
        progress = StepProgress(batch)
        update_policy(run, progress)
        here = _computed_here(run)
        changed = [n for n in COMPUTED_ON if here[n] != record.head["computed_on"].get(n)]
        if tolerance is None:
            tolerance = _default_tolerance(here, changed)
        if changed:
            text = _changes_text(record, here, changed)
            notes.append(f"the run was computed in another environment: {text}")
        comparison = compare_steps(record, batch, progress.updates, run, tolerance)
    return StepReplay(step, base.name, earlier, tolerance, comparison, notes)


def _column_notes(record: RecordedStep) -> list[str]:
    if not (lost := record.lost_columns):
        return []
    return [f"columns that the record only holds as text: {', '.join(lost)}"]


def _changes_text(record: RecordedStep, here: JsonObject, changed: list[str]) -> str:
    then = record.head["computed_on"]
    return ", ".join(f"{name} {then.get(name)} → {here[name]}" for name in changed)


def _default_tolerance(here: JsonObject, changed: list[str]) -> float:
    if not changed and here["device"] == "cpu":
        return 0.0
    return TOLERANCES.get(here["dtype"], HALF_TOLERANCE)


def _computed_here(run: Run) -> JsonObject:
    return {
        "device": run.world.device.type,
        "dtype": str(run.policy.dtype).removeprefix("torch."),
        "ranks": run.world.size,
        "threads": torch.get_num_threads(),
        "torch": metadata.version("torch"),
    }


def read_attempt_config(folder: Path, record: RecordedStep) -> RunConfig:
    """The config that a step was trained with, ignoring later changes."""
    path = resume.attempt_config_path(folder, int(record.head["attempt"]))
    return check.read_resolved_config(path if path.is_file() else folder / "config.yaml")


def _check_same_config(
    folder: Path, settings: RunConfig, other: int, step: int, base: ReplayBase
) -> None:
    """Raises ConfigError if an earlier step was trained with different keys than this one."""
    before = check.dump_config(read_attempt_config(folder, read_rollout_record(folder, other)))
    differing = resume.config_differences(before, check.dump_config(settings))
    changed = [key for key in differing if _weights_depend_on(key, settings.train.lr_scheduler)]
    if changed:
        what = f"step {step} cannot be computed from {base.name}"
        why = f"step {other} in between was trained with other values of {', '.join(changed)}"
        refuse("--step", what, f"--step {base.step + 1}", why)


def _weights_depend_on(key: str, lr_scheduler: str) -> bool:
    """Whether the trained weights depend on a key.

    The engine that sampled, and its start options, are reflected in recorded log-probabilities.
    """
    free: tuple[str, ...] = (*check.KEYS_NOT_HASHED, "data.eval_split")
    if lr_scheduler not in LENGTH_FREE_SCHEDULES:
        free = tuple(name for name in free if name not in RUN_LENGTH_KEYS)
    if any(key == name or key.startswith(f"{name}.") for name in free):
        return False
    section, _, rest = key.partition(".")
    of_every_backend = rest.partition(".")[0] in GenerationConfig.model_fields
    return section != "generation" or (of_every_backend and rest != "backend")


class RecordedScores:
    """Returns the recorded scores of a step's completions, for a reward that cannot be called."""

    def __init__(self, record: RecordedStep, name: str):
        raw = record.batch.raw[record.batch.names.index(name)].reshape(-1).tolist()
        self.scores = [None if value != value else value for value in raw]

    def __call__(self, completions: list[Any]) -> list[float | None]:
        return self.scores


def _build_at(
    root: Path,
    values: JsonObject,
    record: RecordedStep,
    base: ReplayBase,
    stand_ins: Mapping[str, RecordedScores],
) -> Run:
    """The run as of the save of `base`, built in `root`, without a sampler.

    `values`: of the step's config.
    """
    config = check.resolve_config(_replay_config(root, values, record, stand_ins))
    target = root / str(config.name)
    target.mkdir()
    process_exit.silence_libraries()
    rng.seed_generators(config.seed)  # as a worker does, so that new heads are equal
    with contextlib.redirect_stdout(io.StringIO()):
        plan = ResumePlan(target, checkpoint=base.checkpoint)
        run = ReplayBuilder(config, plan, record).build_all(dict(stand_ins))
    run.log.display = None
    if run.config.train.micro_batch_tokens is None:  # it was chosen by free memory then
        run.forward_limits = replace(run.forward_limits, **record.head["limits"])
    return run


def _replay_config(
    root: Path,
    values: JsonObject,
    record: RecordedStep,
    stand_ins: Mapping[str, RecordedScores],
) -> RunConfig:
    """The run's config for one process, without sampling, evaluation, saving and trackers."""
    values, computed_on = copy.deepcopy(values), record.head["computed_on"]
    values |= {"root": str(root), "resume": "never", "max_steps": record.head["num_steps"]}
    values |= {"total_episodes": None}
    values["train"] |= {"epochs": None}
    values["data"] |= {"eval_split": None}
    values["eval"] |= {"sets": {}, "judge": None}
    values["checkpoint"] |= {"on_low_disk": "warn"}
    values["logging"] |= {"trackers": [], "rollouts_every": 0, "console": "plain"}
    values["distributed"] |= {
        "engine": "single", "num_processes": 1, "num_nodes": 1, "offload": "none", "rdzv": None,
        "threads": computed_on["threads"],
    }  # fmt: skip
    if values["model"]["dtype"] == "auto":
        values["model"]["dtype"] = computed_on["dtype"]
    for name in stand_ins:  # one call gets all completions, in order
        values["reward"][name] |= {"scope": "batch", "workers": 0, "cache": False, "only": {}}
    return check.build_run_config(values)


def _train_recorded_step(run: Run, record: RecordedStep) -> None:
    """Repeat the updates of a recorded step, with its recorded scores."""
    batch = without_updates(record.batch)
    for group in batch.groups:  # a record has ids but no pixels, which are in the run's data
        if run.prompts.media:
            group.media = run.prompts.groups_at(group.prompt_offset, 1)[0].media
    run.step_progress = StepProgress(batch)
    update_policy(run, run.step_progress)
    run.state.advance(batch)
    update_algorithm_state(run, batch)
    run.step_progress = None
