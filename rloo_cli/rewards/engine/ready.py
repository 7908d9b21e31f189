"""What a run knows before its weights load, told to the rewards that prepare themselves.

A reward file that has something to load brings `ready(code, surroundings)`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rloo_cli.config import registry
from rloo_cli.config.schema import RunConfig
from rloo_cli.rewards.engine import process_pool
from rloo_cli.rewards.engine.build import Reward, build_reward, reward_from_callable

if TYPE_CHECKING:  # it imports torch
    from rloo_cli.data.prompts import Prompts


@dataclass(frozen=True)
class RewardSetup:
    """What rewards can know of the run they are in."""

    tokenizer: Any  # the policy's
    splits: "list[Prompts]"  # the training split, where there is one, first
    max_tokens: int  # the most tokens of a prompt and a completion
    device: Any  # torch's, of the policy
    log_note: Callable[[str], None]  # a line of the log
    reward_load: Any  # `policy.reward_load`, which imports torch: for rewards that are models


def run_ready_hooks(
    rewards: Iterable[Reward],
    tokenizer: Any,
    prompts_by_set: "Mapping[Any, Prompts]",  # by the split's name
    max_completion_length: int,
    device: Any,
    log_note: Callable[[str], None],
    reward_load: Any,
) -> None:
    """Make every reward ready that has to be. `most`: tokens of a completion.
    `load`: how a model that scores is loaded (`policy.reward_load`).

    Raises MachineError, ConfigError; no weights of the policy are loaded yet.
    """
    splits = [prompts for prompts in prompts_by_set.values() if len(prompts)]
    longest = max((prompts.max_length for prompts in splits), default=0) + max_completion_length
    around = RewardSetup(tokenizer, splits, longest, device, log_note, reward_load)
    for reward in rewards:
        module = registry.registered_module("rewards", reward.config.type)
        if hasattr(module, "ready"):
            module.ready(reward.code, around)


def build_rewards(config: RunConfig, functions: Mapping[str, Callable[..., Any]]) -> list[Reward]:
    """The rewards of a config; `functions` are those given as Python callables, by name.

    Raises ConfigError, MachineError.
    """
    rewards = [
        reward_from_callable(name, functions[name], entry)
        if name in functions
        else build_reward(name, entry)
        for name, entry in config.rewards.items()
    ]
    process_pool.start_reward_workers(rewards)
    return rewards
