"""`rloo sft` and `rloo reward-model`: the two trainings before RLOO, from the same recipe.

    rloo sft +recipe=NAME [key=value ...]            -> <root>/sft/<name>
    rloo reward-model +recipe=NAME [key=value ...]   -> <root>/reward_model/<name>

The folder is a model's, for `from_pretrained`, model.path or reward.NAME.path; `training/` in it
has the config, metrics.jsonl and a summary. It is there when it is whole, or not at all: what is
stopped begins anew.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from rloo_cli.cli.eval import temporary
from rloo_cli.config import check, compose, hf_cache, messages, supervised
from rloo_cli.config.schema import RunConfig
from rloo_cli.launch import preflight, processes
from rloo_cli.utils.errors import ConfigError, Problem, StorageError
from rloo_cli.utils.files import read_json, write_text

STOPPED = (75, 130)
VERBS = {"sft": "sft", "reward_model": "reward-model"}


def run(section: str, words: list[str]) -> int:
    """The verb of a section of the config; its exit code. Raises RunError."""
    verb = VERBS[section]
    flags = [w for w in compose.split_dirs(words)[0] if w.startswith("-")]
    if flags or not words:
        usage = f"rloo {verb} +recipe=NAME [key=value ...]"
        why = f"flags of {verb}: --config-dir DIR, --debug, --errors=json" if flags else ""
        what = f"{flags[0]} is not a flag of {verb}" if flags else f"rloo {verb} needs a recipe"
        raise ConfigError(Problem(what, "command line", why, usage))
    composed = compose.compose(words)
    settings = check.check(composed)
    wrong = list(supervised.problems(settings, section))
    if wrong:
        placed = [messages.placed(p, composed.sources) for p in wrong]
        raise ConfigError(*placed)
    with hf_cache.remembered(composed.words):
        preflight.check_training(settings, section)
        place = supervised.folder(settings, section)
        if _done(place, settings, section):
            print(f"{place} is there already: nothing to do (name=... for another)")
            return 0
        code = _train(place, settings, section)
    if code == 0:
        _say_end(place, settings, section, composed.words)
    return code


def _train(place: Path, settings: RunConfig, section: str) -> int:
    """Do it in a process of its own; its exit code."""
    try:
        with temporary(place) as folder:
            text = yaml.safe_dump(check.dump(settings), sort_keys=False)
            write_text(folder / "training" / "config.yaml", text)
            code = processes.run("train.supervised.worker", [str(folder), section])
            if code == 0:
                folder.rename(place)
    except OSError as error:
        raise StorageError(
            Problem("the model cannot be written", str(place), str(error))
        ) from error
    if code in STOPPED:
        print(f"stopped: nothing of it is kept, and the same command begins anew ({place})")
    return code


def _done(place: Path, settings: RunConfig, section: str) -> bool:
    """Whether this very training is there. Raises ConfigError where something else is."""
    if not place.exists():
        return False
    written = place / "training" / "config.yaml"
    before = yaml.safe_load(written.read_text()) if written.is_file() else None
    if isinstance(before, dict):
        before = check.as_first_written(before)
    now = check.as_first_written(check.dump(settings))
    parts = ("seed", "model", "data", section)
    if isinstance(before, dict) and all(before.get(p) == now[p] for p in parts):
        return True
    other = [p for p in parts if isinstance(before, dict) and before.get(p) != now[p]]
    why = f"it was trained with another {' and '.join(other)}" if other else "it is something else"
    fix = f"name=OTHER, or root=OTHER, or move it away: mv {place} {place}.old"
    raise ConfigError(Problem(f"{place} exists", "name", why, fix))


def _say_end(place: Path, settings: RunConfig, section: str, words: Sequence[str]) -> None:
    """What was reached, where the model is, and what to do with it."""
    words = [w for w in words if not w.lstrip("+").startswith(("sft.", "reward_model."))]
    summary: dict[str, Any] = read_json(place / "training" / "summary.json")
    for name, after in summary["after"].items():
        if name != "eval_rows":
            before = summary["before"][name]
            print(f"{name.replace('eval_', 'held-out '):<18} {before:.4g} -> {after:.4g}")
    if section == "sft":
        key = "model.path"
    else:
        kinds = [name for name, entry in settings.rewards.items() if entry.type == "model"]
        key = f"reward.{kinds[0]}.path" if kinds else "reward=model reward.model.path"
    print(f"model              {place}")
    print(f"next               {shlex.join(['rloo', 'train', *words])} {key}={place}")
