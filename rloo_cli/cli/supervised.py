"""`rloo sft` and `rloo reward-model`: supervised training before RLOO, from the same recipe.

    rloo sft +recipe=NAME [key=value ...]            -> <root>/sft/<name>
    rloo reward-model +recipe=NAME [key=value ...]   -> <root>/reward_model/<name>

The folder holds a model for `from_pretrained`, model.path or reward.NAME.path; its subfolder
`training/` has the config, metrics.jsonl and a summary. It appears when it is complete: a stopped
training starts over.
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import yaml

from rloo_cli.cli import answers
from rloo_cli.cli.eval import temporary_output_dir
from rloo_cli.cli.verb_parser import parse_verb
from rloo_cli.config import check, compose, hf_cache, messages, supervised
from rloo_cli.config.provenance import YAML_ERRORS, ConfigSources
from rloo_cli.config.schema import DistributedConfig, RewardConfig
from rloo_cli.config.supervised import SupervisedTraining
from rloo_cli.launch import local_ranks, preflight, processes
from rloo_cli.utils.errors import ConfigError, Problem, StorageError, refuse
from rloo_cli.utils.files import JsonObject, read_json, write_text

STOPPED_CODES = (75, 130)
VERBS = {"sft": "sft", "reward_model": "reward-model"}


def run(section: str, args: list[str]) -> int:
    """The verb of a section of the config; its exit code. Raises RunError."""
    verb = VERBS[section]
    options = parse_verb(verb, args)
    composed = compose.compose_config(options.overrides)
    settings = check.check_config(composed, needs_reward=False)
    training = supervised.supervised_training(settings, section)
    _refuse(supervised.training_problems(training), composed.sources)
    folder, values = training.folder, check.dump_config(settings)
    with answers.json_answer(options.json) as answer:
        with hf_cache.recorded_command(composed.user_overrides):
            local_ranks.check_not_a_rank(verb)
            ranks = local_ranks.count_local_ranks(settings)
            _refuse(
                supervised.spread_problems(training, settings.distributed.engine, ranks),
                composed.sources,
            )
            preflight.check_supervised_machine(settings, section, ranks)
            is_there = _is_trained(folder, values, section)
            code = (
                0
                if is_there
                else _train_in_subprocess(training, values, settings.distributed, ranks)
            )
        if is_there:
            print(f"{folder} already exists: nothing to do (name=... for another)")
        elif code == 0:
            _print_results(training, settings.rewards, composed.user_overrides)
        summary = read_json(folder / "training" / "summary.json") if code == 0 else {}
        answer |= {"model": str(folder), "code": code, "summary": summary}
    return code


def _refuse(problems: Iterable[Problem], sources: ConfigSources) -> None:
    """Raise ConfigError for problems, with the locations that set their keys."""
    if placed := [messages.locate_problem(p, sources) for p in problems]:
        raise ConfigError(*placed)


def _train_in_subprocess(
    training: SupervisedTraining, values: JsonObject, distributed: DistributedConfig, ranks: int
) -> int:
    """Train in this many separate processes. -> their exit code. `values`: of the config."""
    output_dir = training.folder
    try:
        with temporary_output_dir(output_dir) as folder:
            text = yaml.safe_dump(values, sort_keys=False)
            write_text(folder / "training" / "config.yaml", text)
            with local_ranks.local_rank_specs(distributed, ranks) as (starts, watch):
                arguments = [str(folder), training.section]
                worker = "train.supervised.worker"
                code = processes.run_processes(worker, arguments, watch, starts)
            if code == 0:
                folder.rename(output_dir)
    except OSError as error:
        fix = "free some space, or set root to a writable folder; then run this again"
        refuse(str(output_dir), "the model cannot be written", fix, str(error), error=StorageError)
    if code in STOPPED_CODES:
        print(f"stopped: nothing is kept; the same command starts over ({output_dir})")
    return code


def _is_trained(output_dir: Path, now: JsonObject, section: str) -> bool:
    """Whether this training is already there. Raises ConfigError if something else is.

    `now`: the config's values.
    """
    if not output_dir.exists():
        return False
    written = output_dir / "training" / "config.yaml"
    try:
        before = yaml.safe_load(written.read_text()) if written.is_file() else None
    except YAML_ERRORS:
        before = None  # a damaged file is not this training's
    parts = ("seed", "model", "data", section)
    if isinstance(before, dict) and all(before.get(p) == now[p] for p in parts):
        return True
    other = [p for p in parts if isinstance(before, dict) and before.get(p) != now[p]]
    why = f"it was trained with another {' and '.join(other)}" if other else "not a trained model"
    fix = f"name=OTHER, or root=OTHER, or move it away: mv {output_dir} {output_dir}.old"
    refuse("name", f"{output_dir} exists", fix, why)


def _print_results(
    training: SupervisedTraining, rewards: Mapping[str, RewardConfig], overrides: Sequence[str]
) -> None:
    """The result, the model's folder, and the next command."""
    output_dir = training.folder
    overrides = [w for w in overrides if not w.lstrip("+").startswith(("sft.", "reward_model."))]
    summary: JsonObject = read_json(output_dir / "training" / "summary.json")
    for name in ("loss", "accuracy", "margin"):
        if (after := summary["after"].get(f"eval_{name}")) is not None:
            before = summary["before"][f"eval_{name}"]
            print(f"{'held-out ' + name:<18} {before:.4g} -> {after:.4g}")
    if training.section == "sft":
        key = "model.path"
    else:
        kinds = [name for name, entry in rewards.items() if entry.type == "model"]
        key = f"reward.{kinds[0]}.path" if kinds else "reward=model reward.model.path"
    print(f"model              {output_dir}")
    print(f"next               {shlex.join(['rloo', 'train', *overrides])} {key}={output_dir}")
