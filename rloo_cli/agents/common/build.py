"""The generator of episodes, around the generator that a run has built."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from rloo_cli.agents.common.call_parsers import choose_parser
from rloo_cli.agents.common.episodes import EpisodeGenerator, EpisodeRules
from rloo_cli.agents.common.tool_set import ToolSet
from rloo_cli.agents.common.turn_rendering import TurnRenderer
from rloo_cli.config import registry
from rloo_cli.config.agent import agent_config
from rloo_cli.config.prompt_limit import prompt_headroom
from rloo_cli.config.schema import RunConfig
from rloo_cli.generation import Generator

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tool_set(run: RunConfig) -> ToolSet | None:
    """The descriptions of the run's tools; None without an agent. Raises ConfigError."""
    config = agent_config(run)
    if config is None:
        return None
    found: ToolSet = registry.registered_module("agents", config.kind).load_tools(config)
    return found


def wrap_generator(
    inner: Generator,
    run: RunConfig,
    tools: ToolSet | None,
    tokenizer: "PreTrainedTokenizerBase",
    stop_ids: set[int],
    context_length: int | None,
    note: Callable[[str], None],
) -> Generator:
    """A generator of episodes around `inner`; `inner` itself without an agent.

    `stop_ids` end a turn. Raises ConfigError for a chat template that tools cannot be used with.
    """
    config = agent_config(run)
    if config is None or tools is None:
        return inner
    renderer = TurnRenderer(tokenizer, run.generation.chat_template_kwargs, stop_ids)
    for environment in tools.environments.values():
        renderer.check_template(environment.schemas)
    name, parser = choose_parser(config.parser, tokenizer)
    names = ", ".join(n for e in tools.environments.values() for n in e.specs)
    note(f"episodes of up to {config.max_turns} turns with {names}; calls are read as {name}")
    length = run.generation.max_completion_length
    headroom = prompt_headroom(run, context_length)
    context = None if headroom is None else headroom + length
    turn_rewards = getattr(run.algorithm, "turn_rewards", "sum")  # an algorithm of the user's own
    rules = EpisodeRules(config, tools, renderer, parser, length, context, turn_rewards)
    return EpisodeGenerator(inner, rules)
