"""Going on where a run stopped: from which checkpoint, and with which config.

Imports no torch. `plan` only looks and refuses; `rewind` changes the folder, later, once the
worker knows that data and rewards fit.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rloo_cli.checkpoint import manifest, run_folder
from rloo_cli.config import check, messages, synthetic
from rloo_cli.config.rules import local_model_config
from rloo_cli.config.schema import RunConfig
from rloo_cli.utils import paths
from rloo_cli.utils.environment import environment_number
from rloo_cli.utils.errors import ConfigError, Problem

RUN_LENGTH_KEYS = ("max_steps", "total_episodes", "train.epochs")
# What may change in the middle of a run: none of it changes what is computed, but for rounding.
CHANGEABLE_KEYS = (
    "root", "name", "resume", "resume_allow_changes", "logging", "checkpoint", "eval",
    "distributed", "data.eval_split", "train.micro_batch_size", "train.micro_batch_tokens",
    "train.layout", "train.old_logp", "train.forward_all", "train.keep_logits_gb",
    "train.no_grad_batch_size", "generation.transformers", "sft", "reward_model",
    "slurm",
)  # fmt: skip
CHANGEABLE_REWARD_KEYS = ("timeout_s", "retries", "batch_size")
LENGTH_FREE_SCHEDULES = (
    "constant",
    "constant_with_warmup",
)  # schedules that do not know the run's end


@dataclass(frozen=True)
class ResumePlan:
    """How an attempt at a run begins."""

    folder: Path
    attempt: int = 1
    checkpoint: Path | None = None  # None: at the very beginning
    done: str = ""  # why there is nothing to do
    notes: list[str] = field(default_factory=list)
    changes: dict[str, list[Any]] = field(default_factory=dict)  # key -> [before, now]

    def to_json(self) -> str:
        """One line that a rank's process is given (`from_json`)."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> "ResumePlan":
        """What `to_json` said, with the paths as they are to be kept for the whole run."""
        values = json.loads(text)
        came = values["checkpoint"]
        folder = paths.absolute_path(Path(values["folder"]))
        checkpoint = None if came is None else paths.absolute_path(Path(came))
        return cls(**values | {"folder": folder, "checkpoint": checkpoint})


def plan_resume(folder: Path, run: RunConfig) -> ResumePlan:
    """Decide where this attempt begins. Raises ConfigError (exit 2); changes nothing."""
    run_folder.check_folder_free(folder)
    facts = run_folder.read_run_metadata(folder)
    mode = run.resume
    if mode == "never" and environment_number("SLURM_RESTART_COUNT", 0) > 0:
        mode = "auto"  # a requeued job
    attempt = int(facts.get("attempt", 0)) + 1
    if mode not in ("auto", "never"):
        return _plan_from_path(folder, run, Path(mode).expanduser(), attempt)
    if not facts:
        return ResumePlan(folder)
    if run_folder.is_untrained(folder, facts):
        return ResumePlan(folder, attempt, notes=_restart_notes(folder, facts))
    before = read_run_config(folder)
    if before is None:
        raise ConfigError(_folder_taken_problem(folder, None, run))
    same = facts.get("hash") == check.config_hash(run)
    if facts.get("state") == "finished" and same and _is_same_length(before, run):
        why = f"{folder} is finished: nothing to do (name=... for another run of it)"
        return ResumePlan(folder, done=why)
    if mode == "never":
        raise ConfigError(
            _unfinished_problem(folder, facts)
            if same
            else _folder_taken_problem(folder, before, run)
        )
    checkpoint, passed = manifest.newest_checkpoint(folder)
    if checkpoint is None and facts.get("came_from"):  # another run's, and none of its own since
        checkpoint = Path(facts["came_from"])
        if (wrong := manifest.checkpoint_problem(checkpoint)) is not None:
            raise ConfigError(Problem(f"{checkpoint} cannot be used", "resume", wrong))
    if checkpoint is None:
        passed = _notes_without_checkpoint(folder, facts, passed)
    else:
        before = manifest.read_trainer_state(checkpoint)["config"]
    changes = config_differences(before, run)
    _refuse_changes(changes, run)
    due = run.max_steps
    at = manifest.checkpoint_position(checkpoint) if checkpoint else None
    if facts.get("state") == "finished" and due is not None and at is not None and at[0] >= due:
        why = f"{folder} is at step {at[0]} of {due}: nothing to do"
        return ResumePlan(folder, done=why)
    return ResumePlan(folder, attempt, checkpoint, notes=passed, changes=changes)


def _restart_notes(folder: Path, run_metadata: dict[str, Any]) -> list[str]:
    """What is said of a name that is free again; nothing where its run never began."""
    if run_metadata.get("began") is None:
        return []
    last = run_metadata["began"]
    return [
        f"{folder}: attempt {last} ended before its first update, so this one begins anew;"
        f" what it left is in logs/attempt_{last} and in files named *.attempt{last}.*"
    ]


def _notes_without_checkpoint(
    folder: Path, run_metadata: dict[str, Any], skipped: list[str]
) -> list[str]:
    """What is said of a run that goes on and has no checkpoint yet: it begins anew.

    Raises ConfigError where it had one: what was trained is not thrown away unasked.
    """
    saved = run_metadata.get("checkpoint")
    whole = [p for p in manifest.list_checkpoints(folder) if (p / manifest.MANIFEST_FILE).exists()]
    if saved is None and not whole:
        return [*skipped, f"{folder} has no checkpoint yet: it begins anew"]
    lost = skipped or [f"{saved}, the last one that was saved, is not there any more"]
    raise ConfigError(
        Problem(
            f"{folder} cannot go on: none of its checkpoints is whole",
            "resume",
            "\n".join(lost),
            f"put a whole one back; or begin anew: mv {folder} {folder}.old, then the same command",
        )
    )


def _plan_from_path(folder: Path, run: RunConfig, source: Path, attempt: int) -> ResumePlan:
    where = f"looked at {source.absolute()}"
    if not source.exists():
        raise ConfigError(
            Problem(f"resume={source} does not exist", "resume", where, "resume=auto")
        )
    why = manifest.checkpoint_problem(source)
    if why is not None and not (source / manifest.MANIFEST_FILE).is_file():
        close = manifest.list_checkpoints(source)
        fix = f"resume={close[0]}" if close else "resume=auto, or resume=RUN/checkpoint-STEP"
        raise ConfigError(Problem(f"resume={source} is not a checkpoint", "resume", why, fix))
    if why is not None:
        raise ConfigError(Problem(f"resume={source} cannot be used", "resume", why, "resume=auto"))
    before = manifest.read_trainer_state(source)["config"]
    _check_model_size(source, run)
    changes = config_differences(before, run)
    _refuse_changes(changes, run)
    facts = run_folder.read_run_metadata(folder)
    own = folder.exists() and source.resolve().parent == folder.resolve()
    if not facts or own:
        return ResumePlan(folder, attempt, source.absolute(), changes=changes)
    if not run_folder.is_untrained(folder, facts):
        raise ConfigError(_folder_taken_problem(folder, read_run_config(folder), run))
    return ResumePlan(
        folder, attempt, source.absolute(), notes=_restart_notes(folder, facts), changes=changes
    )


def config_differences(saved_config: dict[str, Any], run: RunConfig) -> dict[str, list[Any]]:
    """Keys whose values differ: key -> [before, now]; where a run is kept is no difference, nor a
    key that `before` did not have yet and that says "as before".
    """
    was, now = (
        check.first_version_values(saved_config),
        check.first_version_values(check.dump_config(run)),
    )
    old, new = dict(messages.walk_values(was)), dict(messages.walk_values(now))
    leaves = [k for k in {**old, **new} if not isinstance(old.get(k, new.get(k)), dict)]
    ours = ("root", "name", "resume", "resume_allow_changes")
    return {
        k: [old.get(k), new.get(k)] for k in leaves if old.get(k) != new.get(k) and k not in ours
    }


def _refuse_changes(changes: dict[str, list[Any]], run: RunConfig) -> None:
    """Raises ConfigError for a change that would make it another experiment."""
    if run.resume_allow_changes:
        return
    constant = run.train.lr_scheduler in LENGTH_FREE_SCHEDULES
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
        schedule = f"; train.lr_scheduler={run.train.lr_scheduler} depends on the run's length"
        why = "it would not be the same run" + (schedule if {*wrong} & {*RUN_LENGTH_KEYS} else "")
        raise ConfigError(
            Problem(
                "the config is not that of the checkpoint",
                wrong[0],
                "\n".join([f"{why}:", *lines[:10], *_and_more(lines)]),
                "take the change back, or resume_allow_changes=true (it is recorded)",
            )
        )


def _and_more(lines: list[str]) -> list[str]:
    return [f"... and {len(lines) - 10} more"] if len(lines) > 10 else []


def _check_model_size(checkpoint: Path, run: RunConfig) -> None:
    """Raises ConfigError when the config's model is another than the checkpoint's."""
    path = run.model.path
    if path.startswith(synthetic.MAKE_PREFIX):
        found = sorted(paths.cache_folder().glob(f"{path.removeprefix(synthetic.MAKE_PREFIX)}-*"))
        path = str(found[0]) if len(found) == 1 else path
    ours, theirs = local_model_config(path), local_model_config(str(checkpoint))
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size")
    other = [k for k in sizes if k in ours and k in theirs and ours[k] != theirs[k]]
    if other:
        facts = ", ".join(f"{k} {theirs[k]} there, {ours[k]} in {run.model.path}" for k in other)
        raise ConfigError(
            Problem(f"resume={checkpoint} holds a model of another size", "model.path", facts)
        )


def read_run_config(folder: Path) -> dict[str, Any] | None:
    """The config of the run in this folder; None where there is none."""
    path = folder / "config.yaml"
    try:
        values = yaml.safe_load(path.read_text()) if path.is_file() else None
    except yaml.YAMLError:
        values = None
    return values if isinstance(values, dict) else None


def _is_same_length(saved_config: dict[str, Any], run: RunConfig) -> bool:
    lengths = (
        saved_config.get("max_steps"),
        saved_config.get("total_episodes"),
        saved_config["train"]["epochs"],
    )
    return lengths == (run.max_steps, run.total_episodes, run.train.epochs)


def _unfinished_problem(folder: Path, run_metadata: dict[str, Any]) -> Problem:
    step, last = (
        run_metadata.get("progress", {}).get("step", "?"),
        run_metadata.get("checkpoint", "none yet"),
    )
    state = run_metadata.get("state")
    why = f"state {state}, at step {step}, last checkpoint: {last}"
    if state == "finished":
        why = f"it is finished at step {step}, with another length"
    choices = f"resume=auto, or name=OTHER, or move it away: mv {folder} {folder}.old"
    return Problem(f"{folder} is a run of this config", "resume", why, choices)


def _folder_taken_problem(
    folder: Path, saved_config: dict[str, Any] | None, run: RunConfig
) -> Problem:
    changes = config_differences(saved_config, run) if saved_config else {}
    lines = [f"{k}: {old!r} -> {new!r}" for k, (old, new) in changes.items()]
    shown = "\n".join(["it is another config:", *lines[:10], *_and_more(lines)])
    choices = f"name=OTHER, or root=OTHER, or move it away: mv {folder} {folder}.old"
    unread = "it is a run whose config.yaml is missing or cannot be read"
    return Problem(f"{folder} exists", "name", shown if saved_config else unread, choices)


def attempt_config_path(folder: Path, attempt: int) -> Path:
    """Where the config of one attempt lies; it becomes the run's when the attempt begins."""
    return folder / "logs" / f"attempt_{attempt}" / "config.yaml"


def describe_changes(changes: dict[str, list[Any]]) -> list[str]:
    """Lines that say what changed."""
    return [f"{k}: {json.dumps(a)} -> {json.dumps(b)}" for k, (a, b) in changes.items()]
