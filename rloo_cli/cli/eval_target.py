"""What `rloo eval` evaluates: a recipe's model, or a checkpoint with the config of its run.

RUN/config.yaml is read as data: safe YAML, no interpolation, the same strict check. The label of
the results names the model and, if there are overrides, their hash.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from rloo_cli.checkpoint import manifest
from rloo_cli.config import check, compose, hf_cache, judge
from rloo_cli.config.compose import ComposedConfig
from rloo_cli.config.provenance import (
    COMMAND_LINE,
    ConfigSources,
    broken_yaml_problem,
    read_user_yaml,
)
from rloo_cli.config.schema import DataConfig, RewardConfig, RunConfig
from rloo_cli.config.user_files import unknown_choice_problem
from rloo_cli.inspection import run_folders
from rloo_cli.utils import paths
from rloo_cli.utils.errors import ConfigError, Problem, refuse
from rloo_cli.utils.files import JsonObject, read_json

PlainConfig = JsonObject
USAGE = "rloo eval RUN, rloo eval RUN/checkpoint-N, or rloo eval +recipe=NAME model.path=..."
# A checkpoint has these in its own folder; the reference is not used.
CHECKPOINT_MODEL_KEYS = {
    "tokenizer": None,
    "chat_template": None,
    "ref_path": None,
    "ref_offload": False,
}


@dataclass(frozen=True)
class EvalTarget:
    """What to evaluate, and where the results go."""

    config: RunConfig
    output_dir: Path
    provenance: PlainConfig  # of its run: source, run, state, steps, prompts


# A recipe and a model.


def eval_target_of_recipe(arguments: list[str]) -> EvalTarget:
    """A recipe with these overrides, --config-dir among them. Raises ConfigError."""
    composed = compose.compose_config(arguments)
    settings = check.check_config(composed)
    _require_held_out_set(settings.held_out, settings.data.split)
    path = settings.model.path
    tail = re.sub(r"[^A-Za-z0-9._+-]", "-", Path(path.rpartition(":")[2]).name).lstrip("-._+")
    overrides = compose.split_config_dirs(arguments)[0]
    own = [
        w for w in overrides if w.lstrip("+").partition("=")[0] not in ("recipe", "root", "name")
    ]
    target = Path(settings.root, "eval", str(settings.name), _results_label(tail or "model", own))
    steps = settings.num_steps() or 0
    about: PlainConfig = {"source": path, "run": None, "state": {}, "steps": steps, "prompts": 0}
    return EvalTarget(settings, target, about)


# A run and its config.


def eval_target_of_run(run_path: str, overrides: list[str]) -> EvalTarget:
    """A run's folder or one of its models, with these overrides. Raises ConfigError."""
    overrides = compose.split_config_dirs(overrides)[0]  # a run's config chooses no groups
    checkpoint = _find_model_folder(run_path)
    folder = checkpoint.parent
    values = _read_run_config(folder / "config.yaml")
    check.check_other_version(folder / "config.yaml", values)
    if isinstance(values.get("model"), dict):
        values["model"] = _model_section(values["model"], checkpoint)
    values |= {"resume": "never"} if "resume" in values else {}
    chosen = [w for w in overrides if w.startswith("judge=")]
    _choose_judge(values, chosen)
    rewritten = compose.rewrite_overrides([w for w in overrides if w not in chosen])
    for given in rewritten:
        _apply_override(values, given)
    sources = ConfigSources(rewritten, [(folder / "config.yaml", "")])
    settings = check.check_config(ComposedConfig(values, sources))
    _require_held_out_set(settings.held_out, settings.data.split)
    _refuse_python_rewards(settings.rewards)
    target = folder / "eval" / _results_label(checkpoint.name, overrides)
    return EvalTarget(settings, target, _run_provenance(checkpoint))


def _model_section(section: PlainConfig, checkpoint: Path) -> PlainConfig:
    """The `model` section for one of a run's models: full weights, or an adapter on model.path."""
    if not (checkpoint / hf_cache.ADAPTER_CONFIG_FILE).is_file():
        whole = {"path": str(checkpoint), "revision": None, "lora": None, "quantization": None}
        return section | CHECKPOINT_MODEL_KEYS | whole
    keys = section.get("lora")
    adapter = keys | {"path": str(checkpoint)} if isinstance(keys, dict) else keys
    return section | CHECKPOINT_MODEL_KEYS | {"tokenizer": str(checkpoint), "lora": adapter}


def _choose_judge(values: PlainConfig, overrides: Sequence[str]) -> None:
    """Apply `judge=NAME`, the only group choice allowed when evaluating a run."""
    known = paths.group_choices([])["judge"]
    for word in overrides:
        name = word.partition("=")[2]
        if name not in ("", "null", *known):
            raise ConfigError(
                unknown_choice_problem("judge", name, known, f"{COMMAND_LINE}: {word}")
            )
        values["eval"]["judge"] = judge.shipped_judge(name) if name in known else None
    if overrides:  # defaults of all rewards, which a run's own entries already contain
        values["reward_defaults"] = yaml.safe_load((paths.CONF / "config.yaml").read_text())[
            "reward_defaults"
        ]


def _find_model_folder(run_path: str) -> Path:
    """The model's folder: the named one, or a run's `final`, else its newest checkpoint."""
    path = next((p for p in (Path(run_path), run_folders.RUNS_ROOT / run_path) if p.is_dir()), None)
    if path is None:  # refused there, with the names of existing runs
        path = run_folders.find_run_folder(run_path, "eval")
    if all((path / name).is_file() for name in ("run.json", "config.yaml")):
        if (path / "final" / "config.json").is_file():
            return path / "final"
        newest, passed = manifest.newest_checkpoint(path)
        for note in passed:
            print(note)
        if newest is None:
            why = "found no final model and no complete checkpoint"
            fix = "train it to a checkpoint or to its end first, with resume=auto"
            refuse("command line", f"{path} has no model to evaluate", fix, why)
        return newest
    is_saved = path.name == "final" or manifest.checkpoint_position(path) is not None
    if not is_saved or not (path.parent / "config.yaml").is_file():
        why = "it is neither a run's folder, nor final or checkpoint-N in a run's folder"
        fix = f"rloo eval +recipe=NAME model.path={path}" if is_saved or _is_model(path) else USAGE
        refuse("command line", f"{path} does not belong to a run", fix, why)
    why_not = manifest.checkpoint_problem(path) if path.name != "final" else None
    if why_not is not None:
        fix = f"rloo eval {path.parent}, for its final model or newest complete checkpoint"
        refuse("command line", f"{path} cannot be evaluated", fix, why_not)
    return path


def _is_model(path: Path) -> bool:
    return (path / "config.json").is_file()


def _read_run_config(path: Path) -> PlainConfig:
    """A run's config as plain values. Raises ConfigError for anything else."""
    read_user_yaml(path)
    try:
        values = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(broken_yaml_problem(path, error)) from None
    what, fix = f"{path} is not the config of a run", "name a run that `rloo runs` lists"
    if not isinstance(values, dict) or any(not isinstance(key, str) for key in values):
        refuse(str(path), what, fix, "expected keys with values")
    for key in ("algorithm", "generation", "data", "reward", "eval", "model"):
        if not isinstance(values.get(key), dict):
            refuse(key, what, fix, f"no {key}")
    return values


def _apply_override(values: PlainConfig, override_text: str) -> None:
    """Apply one override, as Hydra reads it, to plain values. Raises ConfigError."""
    where = f"{COMMAND_LINE}: {override_text.lstrip('+')}"
    try:
        override = OverridesParser.create().parse_override(override_text)
    except HydraException as error:
        raise ConfigError(compose.hydra_problem(error, [override_text])) from None
    *sections, leaf = override.key_or_group.split(".")
    if override.key_or_group in paths.group_choices([]) or override.is_sweep_override():
        why = "a run is evaluated with its own config; you can change single keys and judge="
        fix = "one KEY=VALUE, such as eval.num_generations=8"
        refuse(where, f"{override_text.lstrip('+')} is not a single key=value", fix, why)
    if override.key_or_group == "model.path":
        why = "a run is evaluated with its saved model; use a recipe for another model"
        fix = "rloo eval +recipe=NAME model.path=..."
        refuse(where, "model.path cannot be changed", fix, why)
    for section in sections:
        inner = values.setdefault(section, {})
        if not isinstance(inner, dict):
            why = f"{section} is not a section"
            fix = f"omit {override.key_or_group}; rloo config lists all keys"
            refuse(where, f"{override.key_or_group} is not a key", fix, why)
        values = inner
    if override.is_delete():
        values.pop(leaf, None)
    else:
        values[leaf] = _merged_value(values.get(leaf), override.value())


def _merged_value(old: object, new: object) -> object:
    """Merge as Hydra does: mappings are merged, every other value replaces the old one."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return old | {key: _merged_value(old.get(key), value) for key, value in new.items()}


def _refuse_python_rewards(rewards: Mapping[str, RewardConfig]) -> None:
    gone = [n for n, e in rewards.items() if getattr(e, "path", "").startswith("python:")]
    if gone:
        why = "the run was started from Python, with a function of that process"
        problems = [
            Problem(
                f"reward {n} was not found", f"reward.{n}.path", why,
                f"reward.{n}.path=file.py:{n}",
            )
            for n in gone
        ]  # fmt: skip
        raise ConfigError(*problems)


def _run_provenance(checkpoint: Path) -> PlainConfig:
    """The run's state, on which rewards may depend. Raises ConfigError if it is unknown."""
    folder = checkpoint.parent
    facts = read_json(folder / "run.json")
    if manifest.checkpoint_position(checkpoint):
        saved = manifest.read_trainer_state(checkpoint)
        state, steps = saved.get("state"), saved.get("steps")
    else:
        state, steps = facts.get("progress"), facts.get("plan", {}).get("max_steps")
        ended = read_json(folder / "summary.json")
        if isinstance(state, dict) and ended and ended["steps"] != state.get("step"):
            # The run was extended since, and has not reached its new end.
            state, steps = {"step": ended["steps"], "updates": ended["updates"]}, ended["steps"]
    if not isinstance(state, dict) or not isinstance(steps, int):
        where, why = str(folder / "run.json"), "expected progress and plan.max_steps"
        fix = f"rloo eval +recipe=NAME model.path={checkpoint}"
        refuse(where, f"the step of {checkpoint} is unknown", fix, why)
    prompts = facts.get("prompts", 0)
    return {"source": str(checkpoint), "run": str(folder), "state": state, "steps": steps,
            "prompts": prompts, "template_clock": facts.get("template_clock")}  # fmt: skip


def _results_label(model: str, overrides: Sequence[str]) -> str:
    """The model's name and, if there are overrides, a hash of them."""
    if not overrides:
        return model
    return f"{model}-{hashlib.sha256(chr(10).join(sorted(overrides)).encode()).hexdigest()[:6]}"


def _require_held_out_set(held_out: Mapping[str, DataConfig], split: str) -> None:
    if not held_out:
        refuse(
            "data.eval_split, eval.sets",
            "no held-out data to evaluate on",
            f"data.eval_split=test, or data.eval_split={split} for the training data",
            "data.eval_split is null and eval.sets is empty",
        )
