"""What a run knows before its weights load, told to the rewards that prepare themselves.

A reward file that has something to load brings `ready(code, surroundings)`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rloo_cli.config import registry
from rloo_cli.config.schema import RunConfig
from rloo_cli.rewards.engine import process_pool
from rloo_cli.rewards.engine.build import Reward, build, from_callable

if TYPE_CHECKING:  # it imports torch
    from rloo_cli.data.prompts import Prompts


@dataclass(frozen=True)
class Surroundings:
    """What rewards can know of the run they are in."""

    tokenizer: Any  # the policy's
    splits: "list[Prompts]"  # the training split, where there is one, first
    longest: int  # the most tokens of a prompt and a completion
    device: Any  # torch's, of the policy
    note: Callable[[str], None]  # a line of the log
    load: Any  # `policy.reward_load`, which imports torch: for rewards that are models


def ready(
    rewards: Iterable[Reward],
    tokenizer: Any,
    prepared: "Mapping[Any, Prompts]",  # by the split's name
    most: int,
    device: Any,
    note: Callable[[str], None],
    load: Any,
) -> None:
    """Make every reward ready that has to be. `most`: tokens of a completion.
    `load`: how a model that scores is loaded (`policy.reward_load`).

    Raises MachineError, ConfigError; no weights of the policy are loaded yet.
    """
    splits = [prompts for prompts in prepared.values() if len(prompts)]
    longest = max((prompts.longest for prompts in splits), default=0) + most
    around = Surroundings(tokenizer, splits, longest, device, note, load)
    for reward in rewards:
        module = registry.module("rewards", reward.config.type)
        if hasattr(module, "ready"):
            module.ready(reward.code, around)


def rewards_of(config: RunConfig, functions: Mapping[str, Callable[..., Any]]) -> list[Reward]:
    """The rewards of a config; `functions` are those given as Python callables, by name.

    Raises ConfigError, MachineError.
    """
    rewards = [
        from_callable(name, functions[name], entry) if name in functions else build(name, entry)
        for name, entry in config.rewards.items()
    ]
    process_pool.start(rewards)
    return rewards
