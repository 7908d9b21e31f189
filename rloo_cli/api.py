"""Training from Python: a recipe, and your own rewards.

    from rloo_cli.api import train

    def brevity(completions, **kwargs):
        return [-len(text) / 100 for text in completions]

    summary = train("smoke", rewards={"brevity": brevity}, overrides=["max_steps=5"])

The configuration is the command line's: a recipe and `key=value` overrides. The same worker runs,
in this process.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rloo_cli.config import check
from rloo_cli.config.compose import ComposedConfig, compose_config
from rloo_cli.config.schema import RunConfig
from rloo_cli.launch import launcher, preflight, rollout_server
from rloo_cli.reporting.events import Events
from rloo_cli.train.worker import run_training
from rloo_cli.utils import fault_injection, paths
from rloo_cli.utils.errors import ConfigError, Problem
from rloo_cli.utils.files import JsonObject, read_json, update_json

Reward = Callable[..., object]


def train(
    recipe: str | os.PathLike[str] | None = None,
    rewards: Mapping[str, Reward] | None = None,
    overrides: Iterable[str] = (),
    config_dirs: Iterable[str | Path] = (),
    replace_rewards: bool = True,
    events: Sequence[Events] = (),
) -> JsonObject:
    """Do a whole run in this process. -> the content of its summary.json, and its `folder`

    `recipe`: a shipped recipe's name or a YAML file. `rewards`: callables of the interface of
    docs/rewards.md, by name; they replace the recipe's rewards (with replace_rewards=False they are
    added), and their keys are set by overrides such as `reward.NAME.weight=0.5`. `events`: objects
    that are told of the run (`plugin.Events`). A run that is finished already is not repeated.

    Raises RunError (its `code` is the exit status the command would have had).
    """
    fault_injection.arm_faults()  # those of an earlier run in this process are disarmed, too
    arguments = [f"+recipe={recipe}"] if recipe is not None else []
    arguments += ["reward=[]"] if rewards and replace_rewards else []
    composed = compose_config([*arguments, *overrides], [*config_dirs])
    settings = check.check_config(_with(composed, rewards or {}))
    _in_one_process(settings)
    preflight.check_machine(settings)
    relative_folder = Path(settings.root, str(settings.name))
    folder = paths.absolute_path(relative_folder)  # a reward may change the current folder
    start = launcher.plan_attempt(settings)
    if not start.done:
        launcher.write_attempt_files(start, settings, composed)
        state = "failed"
        try:
            with rollout_server.background_server(folder, settings):
                run_training(settings, folder, rewards, start, events)
            state = "finished"
        finally:
            if (folder / "run.json").exists():  # else somebody took the folder away
                update_json(folder / "run.json", state=state)
    return read_json(folder / "summary.json") | {"folder": str(relative_folder)}


def _with(composed: ComposedConfig, rewards: Mapping[str, Reward]) -> ComposedConfig:
    """The config with an entry for each callable; overrides of its keys are kept."""
    entries = dict(composed.values.get("reward") or {})
    for name, code in rewards.items():
        if not name.isidentifier() or not callable(code):
            what = f"reward {name!r} is not a callable with a plain name"
            why = "a name is of letters, digits and _, and begins with no digit"
            if not callable(code):
                why = f"found a value of type {type(code).__name__}, a function was expected"
            raise ConfigError(Problem(what, "rewards", why, 'rewards={"NAME": FUNCTION}'))
        keys = entries.get(name) or {}
        entries[name] = {"type": "function", "path": f"python:{name}", "kwargs": {}} | keys
    return replace(composed, values=composed.values | {"reward": entries})


def _in_one_process(settings: RunConfig) -> None:
    """Raise ConfigError for a run of several processes."""
    if settings.distributed.engine == "single":
        return
    why = "a call from Python is one process, which cannot become several"
    fix = "the command: rloo train ..., or distributed=single"
    what = f"distributed.engine = {settings.distributed.engine}"
    raise ConfigError(Problem(what, "distributed.engine", why, fix))
