"""A config -> a `Run`: every part built once, in the order in which mistakes are cheapest.

Data and rewards are looked at before any weights load.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rloo_cli.checkpoint.restore import begin, same_data
from rloo_cli.checkpoint.resume import Start
from rloo_cli.config import rules_lora, rules_model, rules_paths, synthetic
from rloo_cli.config.schema import RunConfig
from rloo_cli.config.user_code import code_notes
from rloo_cli.data import splits, vocabulary
from rloo_cli.data.prompts import Prompts
from rloo_cli.data.synthetic.cache import heard
from rloo_cli.distributed.world import join
from rloo_cli.evaluation.judges import judge as judging
from rloo_cli.policy import load, reward_load
from rloo_cli.reporting.display import Display
from rloo_cli.reporting.log import Log
from rloo_cli.rewards.engine.columns import check_splits
from rloo_cli.rewards.engine.ready import ready, rewards_of
from rloo_cli.run import Run
from rloo_cli.train.build_model import with_model
from rloo_cli.utils import paths
from rloo_cli.utils.errors import DataError, Problem
from rloo_cli.utils.files import read_json


def make(
    config: RunConfig,
    folder: Path,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    start: Start | None = None,
) -> Run:
    """Build every part of a run. `functions`: rewards given as Python callables, by name.

    `start`: where it goes on; its folder is brought back to there once data and rewards fit.
    Raises RunError: DataError (4) and ConfigError (2) before any weights load.
    """
    start = start or Start(folder)
    world = join(config)
    log = Log(
        folder, config.logging.every, config.logging.samples_every, config.logging.trl_aliases
    )
    log.writes, log.same = world.is_main, lambda row: dict(world.say(row))
    if world.is_main:
        shown = plan(config, folder)
        log.display = Display(shown, config.logging.console, config.logging.samples)
    log.phase("loading data")
    opened = splits.load(config)
    rewards = rewards_of(config, functions or {})
    for note in [*code_notes(config), *rules_model.notes(config)]:
        log.note(note)
    check_splits(config, opened, rewards)
    for path in rules_paths.made_models(config):
        log.phase(f"finding or making {path} in {paths.cache()}")
        with heard(log.progress):
            world.first(lambda path=path: synthetic.folder(path))  # type: ignore[misc]
    log.phase("loading the tokenizer")
    tokenizer = load.tokenizer(config.model)
    context = load.context_length(config.model)
    prepared = splits.tokenised(config, opened, tokenizer, context)
    told = splits.all_notes(config, prepared, context)
    told += splits.shown_prompt(prompts := prepared[None], tokenizer)
    for note in [*_check_tokens(config, tokenizer, prepared), *told]:
        log.note(note)
    steps = count_steps(config, len(prompts))  # raises before any weights load
    held = {name: found for name, found in prepared.items() if name is not None}
    judge = judging.make(config, held, tokenizer, training=True)
    same_data(start, prompts, config)
    log.phase("making rewards ready")
    length = config.generation.max_completion_length
    own = [judge.reward] if judge is not None and judge.reward is not None else []
    ready([*rewards, *own], tokenizer, prepared, length, world.device, log.note, reward_load)
    run = with_model(config, start, world, log, tokenizer, context, prepared, rewards, steps)
    run.judge = judge
    begin(run, start)
    return run


def _check_tokens(
    config: RunConfig, tokenizer: Any, prepared: Mapping[str | None, Prompts]
) -> list[str]:
    """Tokenizer, data, model and reference speak of the same tokens; notes. Raises ConfigError."""
    used = rules_lora.has_reference(config)
    reference = load.reference_tokenizer(config.model) if used else None
    if reference is not None:
        vocabulary.check_reference(tokenizer, reference)
    return vocabulary.check_prompt_ids(tokenizer, load.vocabulary_size(config.model), prepared)


def plan(config: RunConfig, folder: Path) -> dict[str, Any]:
    """The lines at the head of the panel."""
    a = config.algorithm
    beta = f" · beta {a.beta}" if hasattr(a, "beta") else ""
    return {
        "name": config.name,
        "model": config.model.path,
        "algorithm": f"{a.name} K={a.num_generations} · P={config.train.prompts_per_step}{beta}",
        "max_steps": config.max_steps,
        "folder": str(paths.shown(folder)),
        "recipe": read_json(folder / "run.json").get("recipe"),
    }


def count_steps(config: RunConfig, prompts: int) -> int:
    """Rollout batches to do. Raises DataError when a step needs more prompts than there are."""
    wanted = config.train.prompts_per_step
    if prompts < wanted:
        raise DataError(
            Problem(
                f"{prompts} prompts are fewer than one step needs",
                "train.prompts_per_step",
                f"it asks for {wanted} different prompts per step",
                f"train.prompts_per_step={prompts}",
            )
        )
    if config.max_steps is not None:
        return config.max_steps
    if config.total_episodes is not None:
        return math.ceil(config.total_episodes / config.episodes_per_step)
    assert config.train.epochs is not None
    return math.ceil(config.train.epochs * prompts / wanted)
