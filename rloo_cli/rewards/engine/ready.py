"""Builds the rewards of a config, and calls their hooks that load models.

A reward file with something to load defines `ready(code, setup)`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rloo_cli.config import registry
from rloo_cli.config.schema import RewardConfig
from rloo_cli.rewards.engine import worker_calls
from rloo_cli.rewards.engine.build import Reward, RewardFunction, build_reward, reward_from_callable

if TYPE_CHECKING:  # these import torch
    import torch
    from transformers import PreTrainedTokenizerBase

    from rloo_cli.data.prompts import Prompts


class RewardScorer(Protocol):
    """A loaded reward model (`policy.reward_scores.RewardModelScorer`)."""

    device: "torch.device"

    @property
    def dtype(self) -> "torch.dtype": ...
    @property
    def max_positions(self) -> int | None: ...
    def choose_layout(self, max_length: int | None) -> str: ...
    def score(self, sequences: list[list[int]], group_of_sequence: list[int]) -> list[float]: ...


class RewardLoader(Protocol):
    """The functions of `policy.reward_load`, which imports torch."""

    def load_reward_tokenizer(self, key: str, config: Any) -> "PreTrainedTokenizerBase": ...
    def load_reward_model(
        self, key: str, config: Any, tokenizer: "PreTrainedTokenizerBase", device: "torch.device"
    ) -> RewardScorer: ...


@dataclass(frozen=True)
class RewardSetup:
    """The parts of the run that a reward can use while it loads."""

    tokenizer: "PreTrainedTokenizerBase"  # the policy's
    splits: "list[Prompts]"  # the training split, if there is one, comes first
    max_tokens: int  # the most tokens of a prompt and a completion
    device: "torch.device"  # the policy's
    log_note: Callable[[str], None]  # writes a line to the log
    reward_load: RewardLoader


def run_ready_hooks(
    rewards: Iterable[Reward],
    tokenizer: "PreTrainedTokenizerBase",
    prompts_by_set: "Mapping[str, Prompts] | Mapping[str | None, Prompts]",  # by the split's name
    max_completion_length: int,
    device: "torch.device",
    log_note: Callable[[str], None],
    reward_load: RewardLoader,
) -> None:
    """Call the `ready` hook of every reward that has one.

    `max_completion_length` is in tokens. Raises MachineError, ConfigError; no weights of the
    policy are loaded yet.
    """
    splits = [prompts for prompts in prompts_by_set.values() if len(prompts)]
    longest = max((prompts.max_length for prompts in splits), default=0) + max_completion_length
    setup = RewardSetup(tokenizer, splits, longest, device, log_note, reward_load)
    for reward in rewards:
        module = registry.registered_module("rewards", reward.config.type)
        if hasattr(module, "ready"):
            module.ready(reward.code, setup)


def build_rewards(
    entries: Mapping[str, RewardConfig], functions: Mapping[str, RewardFunction]
) -> list[Reward]:
    """Build a config's rewards; `functions` are those given as Python callables, by name.

    Raises ConfigError, MachineError.
    """
    rewards = [
        reward_from_callable(name, functions[name], entry)
        if name in functions
        else build_reward(name, entry)
        for name, entry in entries.items()
    ]
    worker_calls.start_reward_workers(rewards)
    return rewards
