"""Resuming: from which checkpoint, and with which config.

Imports no torch. `plan_resume` only reads and refuses; `rollback.roll_back_folder` changes the
folder later, once the worker knows that data and rewards fit.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import yaml

from rloo_cli.checkpoint import manifest, run_folder
from rloo_cli.config import check, messages, synthetic
from rloo_cli.config.provenance import YAML_ERRORS
from rloo_cli.config.rules import LENGTH_FREE_SCHEDULES, RUN_LENGTH_KEYS, local_model_config
from rloo_cli.config.schema import RunConfig
from rloo_cli.utils import paths
from rloo_cli.utils.environment import environment_number
from rloo_cli.utils.errors import ConfigError, Problem, refuse
from rloo_cli.utils.files import JsonObject

# Keys that may change during a run: they affect results by rounding at most.
CHANGEABLE_KEYS = (
    "root", "name", "resume", "resume_allow_changes", "logging", "guards", "checkpoint", "eval",
    "target", "distributed", "data.eval_split", "train.micro_batch_size",
    "train.micro_batch_tokens",
    "train.layout", "train.old_logp", "train.forward_all", "train.keep_logits_gb",
    "train.no_grad_batch_size", "generation.transformers", "sft", "reward_model",
    "slurm",
)  # fmt: skip
CHANGEABLE_REWARD_KEYS = ("timeout_s", "retries", "batch_size")
ConfigChanges = dict[str, list[object]]  # key -> [before, now]


@dataclass(frozen=True)
class ResumePlan:
    """The checkpoint that an attempt resumes from, and the changes of the config."""

    folder: Path
    attempt: int = 1
    checkpoint: Path | None = None  # None: the run starts from the beginning
    done: str = ""  # why there is nothing to do; empty if there is
    notes: list[str] = field(default_factory=list)  # for the user
    changes: ConfigChanges = field(default_factory=dict)

    def to_json(self) -> str:
        """The plan as one line, which the launcher hands to a rank's process (`from_json`)."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> "ResumePlan":
        """Read what `to_json` wrote. Paths become absolute, for the whole run."""
        values = json.loads(text)
        checkpoint = values["checkpoint"]
        absolute = None if checkpoint is None else paths.absolute_path(Path(checkpoint))
        folder = paths.absolute_path(Path(values["folder"]))
        return cls(**values | {"folder": folder, "checkpoint": absolute})


def plan_resume(folder: Path, run: RunConfig) -> ResumePlan:
    """Decide where this attempt starts. Raises ConfigError (exit 2); changes nothing."""
    run_folder.check_folder_free(folder)
    metadata = run_folder.read_run_metadata(folder)
    mode, values = run.resume, check.dump_config(run)
    if mode == "never" and environment_number("SLURM_RESTART_COUNT", 0) > 0:
        mode = "auto"  # a requeued job
    attempt = int(metadata.get("attempt", 0)) + 1
    if mode not in ("auto", "never"):
        return _plan_from_path(folder, run, Path(mode).expanduser(), attempt)
    if not metadata:
        return ResumePlan(folder)
    if run_folder.is_untrained(folder, metadata):
        return ResumePlan(folder, attempt, notes=_restart_notes(folder, metadata))
    before = read_run_config(folder)
    if before is None:
        raise ConfigError(_folder_taken_problem(folder, None, values))
    same = metadata.get("hash") == check.config_hash(run)
    finished = metadata.get("state") == "finished"
    if finished and same and _is_same_length(before, values):
        why = f"{folder} is finished: nothing to do (name=... for another run of it)"
        return ResumePlan(folder, done=why)
    if mode == "never":
        if same:
            raise ConfigError(_unfinished_problem(folder, metadata))
        raise ConfigError(_folder_taken_problem(folder, before, values))
    check.check_other_version(folder / "config.yaml", before)
    checkpoint, notes = manifest.newest_checkpoint(folder)
    if checkpoint is None and metadata.get("came_from"):  # it resumed from another run's checkpoint
        checkpoint = Path(metadata["came_from"])
        if (wrong := manifest.checkpoint_problem(checkpoint)) is not None:
            fix = "restore that checkpoint completely, or start over: resume=never name=OTHER"
            refuse("resume", f"{checkpoint} cannot be used", fix, wrong)
    if checkpoint is None:
        notes = _notes_without_checkpoint(folder, metadata, notes)
    else:
        before = manifest.read_trainer_state(checkpoint)["config"]
    changes = config_differences(before, values)
    if not run.resume_allow_changes:
        _refuse_changes(changes, run.train.lr_scheduler)
    due = run.max_steps
    position = manifest.checkpoint_position(checkpoint) if checkpoint else None
    if finished and due is not None and position is not None and position[0] >= due:
        why = f"{folder} is at step {position[0]} of {due}: nothing to do"
        return ResumePlan(folder, done=why)
    return ResumePlan(folder, attempt, checkpoint, notes=notes, changes=changes)


def _restart_notes(folder: Path, run_metadata: JsonObject) -> list[str]:
    """A note that the last attempt trained nothing; empty if it never started."""
    if (last := run_metadata.get("began")) is None:
        return []
    return [
        f"{folder}: attempt {last} ended before its first update, so this one starts over;"
        f" its output is in logs/attempt_{last} and in files named *.attempt{last}.*"
    ]


def _notes_without_checkpoint(
    folder: Path, run_metadata: JsonObject, skipped: list[str]
) -> list[str]:
    """The notes for a run that has no checkpoint yet and therefore starts over.

    Raises ConfigError if it had one: trained weights are not discarded silently.
    """
    saved = run_metadata.get("checkpoint")
    whole = [p for p in manifest.list_checkpoints(folder) if (p / manifest.MANIFEST_FILE).exists()]
    if saved is None and not whole:
        return [*skipped, f"{folder} has no checkpoint yet: starting over"]
    lost = skipped or [f"{saved}, the last saved one, no longer exists"]
    what = f"{folder} cannot resume: none of its checkpoints is complete"
    fix = f"restore a complete one; or start over: mv {folder} {folder}.old, then the same command"
    refuse("resume", what, fix, "\n".join(lost))


def _plan_from_path(folder: Path, run: RunConfig, source: Path, attempt: int) -> ResumePlan:
    values = check.dump_config(run)
    if not source.exists():
        why = f"looked at {source.absolute()}"
        refuse("resume", f"resume={source} does not exist", "resume=auto", why)
    problem = manifest.checkpoint_problem(source)
    if problem is not None and not (source / manifest.MANIFEST_FILE).is_file():
        inside = manifest.list_checkpoints(source)
        fix = f"resume={inside[0]}" if inside else "resume=auto, or resume=RUN/checkpoint-STEP"
        refuse("resume", f"resume={source} is not a checkpoint", fix, problem)
    if problem is not None:
        what = f"resume={source} cannot be used"
        refuse("resume", what, "resume=auto", problem)
    before = manifest.read_trainer_state(source)["config"]
    check.check_other_version(source.parent / "config.yaml", before)
    _check_model_size(source, run.model.path)
    changes = config_differences(before, values)
    if not run.resume_allow_changes:
        _refuse_changes(changes, run.train.lr_scheduler)
    metadata = run_folder.read_run_metadata(folder)
    notes: list[str] = []
    same_run = folder.exists() and source.resolve().parent == folder.resolve()
    if metadata and not same_run:
        if not run_folder.is_untrained(folder, metadata):
            raise ConfigError(_folder_taken_problem(folder, read_run_config(folder), values))
        notes = _restart_notes(folder, metadata)
    return ResumePlan(folder, attempt, source.absolute(), notes=notes, changes=changes)


def config_differences(saved_config: JsonObject, values: JsonObject) -> ConfigChanges:
    """Keys whose values differ between two dumped configs: key -> [before, now].

    Keys of the run's folder are left out.
    """
    old = dict(messages.walk_values(saved_config))
    new = dict(messages.walk_values(values))
    leaves = [k for k in {**old, **new} if not isinstance(old.get(k, new.get(k)), dict)]
    of_folder = ("root", "name", "resume", "resume_allow_changes")
    differing = [k for k in leaves if old.get(k) != new.get(k) and k not in of_folder]
    return {k: [old.get(k), new.get(k)] for k in differing}


def _refuse_changes(changes: ConfigChanges, lr_scheduler: str) -> None:
    """Raises ConfigError for a change that would make it a different experiment."""
    constant = lr_scheduler in LENGTH_FREE_SCHEDULES
    wrong = [
        k
        for k in changes
        if not (
            any(k == f or k.startswith(f"{f}.") for f in CHANGEABLE_KEYS)
            or (k.startswith("reward.") and k.rpartition(".")[2] in CHANGEABLE_REWARD_KEYS)
            or (k in RUN_LENGTH_KEYS and constant)
            or check.is_engine_placement_key(k)
        )
    ]
    if wrong:
        lines = [f"{k}: {changes[k][0]!r} -> {changes[k][1]!r}" for k in wrong]
        schedule = f"; train.lr_scheduler={lr_scheduler} depends on the run's length"
        why = "it would not be the same run" + (schedule if {*wrong} & {*RUN_LENGTH_KEYS} else "")
        why = "\n".join([f"{why}:", *lines[:10], *_and_more(lines)])
        fix = "undo the change, or resume_allow_changes=true (this is recorded)"
        refuse(wrong[0], "the config differs from the checkpoint's", fix, why)


def _and_more(lines: list[str]) -> list[str]:
    return [f"... and {len(lines) - 10} more"] if len(lines) > 10 else []


def _check_model_size(checkpoint: Path, model_path: str) -> None:
    """Raises ConfigError if the config's model has other sizes than the checkpoint's."""
    path = model_path
    if path.startswith(synthetic.MAKE_PREFIX):
        made = sorted(paths.cache_folder().glob(f"{path.removeprefix(synthetic.MAKE_PREFIX)}-*"))
        path = str(made[0]) if len(made) == 1 else path
    ours, theirs = local_model_config(path), local_model_config(str(checkpoint))
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size")
    other = [k for k in sizes if k in ours and k in theirs and ours[k] != theirs[k]]
    if other:
        what = f"resume={checkpoint} has a model of another size"
        why = ", ".join(f"{k} {theirs[k]} there, {ours[k]} in {model_path}" for k in other)
        saved = (read_run_config(checkpoint.parent) or {}).get("model") or {}
        fix = f"model.path={saved.get('path', 'a model of that size')}, or resume=null"
        refuse("model.path", what, fix, why)


def read_run_config(folder: Path) -> JsonObject | None:
    """The config of the run in this folder; None if it is missing or unreadable."""
    path = folder / "config.yaml"
    try:
        values = yaml.safe_load(path.read_text()) if path.is_file() else None
    except YAML_ERRORS:
        values = None
    return values if isinstance(values, dict) else None


def _is_same_length(one: JsonObject, other: JsonObject) -> bool:
    same = all(one.get(key) == other.get(key) for key in ("max_steps", "total_episodes"))
    same = same and one.get("target", other.get("target")) == other.get("target")
    return same and bool(one["train"]["epochs"] == other["train"]["epochs"])


def _unfinished_problem(folder: Path, run_metadata: JsonObject) -> Problem:
    step = run_metadata.get("progress", {}).get("step", "?")
    last = run_metadata.get("checkpoint", "none yet")
    state = run_metadata.get("state")
    why = f"state {state}, at step {step}, last checkpoint: {last}"
    if state == "finished":
        why = f"it finished at step {step}, with another length"
    choices = f"resume=auto, or name=OTHER, or move it away: mv {folder} {folder}.old"
    return Problem(f"{folder} is a run of this config", "resume", why, choices)


def _folder_taken_problem(
    folder: Path, saved_config: JsonObject | None, values: JsonObject
) -> Problem:
    changes = config_differences(saved_config, values) if saved_config else {}
    lines = [f"{k}: {old!r} -> {new!r}" for k, (old, new) in changes.items()]
    shown = "\n".join(["the config differs:", *lines[:10], *_and_more(lines)])
    choices = f"name=OTHER, or root=OTHER, or move it away: mv {folder} {folder}.old"
    unread = "its config.yaml is missing or cannot be read"
    return Problem(f"{folder} exists", "name", shown if saved_config else unread, choices)


def attempt_config_path(folder: Path, attempt: int) -> Path:
    """The path of one attempt's config; it becomes the run's config when the attempt begins."""
    return folder / "logs" / f"attempt_{attempt}" / "config.yaml"


def describe_changes(changes: ConfigChanges) -> list[str]:
    """A line for each key that changed, with its value before and now."""
    return [f"{k}: {json.dumps(a)} -> {json.dumps(b)}" for k, (a, b) in changes.items()]
