"""The generator of episodes, around the generator that a run has built."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from rloo_cli.agents.common.call_parsers import choose_parser
from rloo_cli.agents.common.episodes import EpisodeGenerator, EpisodeRules
from rloo_cli.agents.common.observations import ToolImages
from rloo_cli.agents.common.tool_set import ToolSet
from rloo_cli.agents.common.turn_rendering import TurnRenderer
from rloo_cli.agents.common.written_rules import build_renderer
from rloo_cli.config import registry
from rloo_cli.config.agent import AgentConfig, agent_config
from rloo_cli.config.prompt_limit import prompt_headroom
from rloo_cli.config.schema import RunConfig
from rloo_cli.data.image_rules import why_no_tool_images
from rloo_cli.generation import Generator
from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rloo_cli.data.vision_processor import VisionProcessor


def load_tool_set(run: RunConfig) -> ToolSet | None:
    """The descriptions of the run's tools; None without an agent, and for one that has its own.

    Raises ConfigError.
    """
    config = agent_config(run)
    if config is None:
        return None
    found: ToolSet | None = registry.registered_module("agents", config.kind).load_tools(config)
    return found


def load_episode_vision(
    run: RunConfig, tokenizer: "PreTrainedTokenizerBase"
) -> "VisionProcessor | None":
    """The processor of images that the run's episodes may be shown; None where they cannot be.

    Raises what `load_vision_processor` raises.
    """
    if agent_config(run) is None or why_no_tool_images(run) is not None:
        return None
    from rloo_cli.data.vision_processor import load_vision_processor  # lazy: it imports torch

    return load_vision_processor(run.model, tokenizer)


def wrap_generator(
    inner: Generator,
    run: RunConfig,
    tools: ToolSet | None,
    tokenizer: "PreTrainedTokenizerBase",
    stop_ids: set[int],
    context_length: int | None,
    note: Callable[[str], None],
    vision: "VisionProcessor | None" = None,
) -> Generator:
    """A generator of episodes around `inner`; `inner` itself without an agent.

    `stop_ids` end a turn; `vision` is `load_episode_vision`'s. Raises ConfigError for a chat
    template that tools cannot be used with.
    """
    config = agent_config(run)
    if config is None:
        return inner
    module = registry.registered_module("agents", config.kind)
    if not isinstance(config, AgentConfig):  # an agent that drives its episodes itself
        driven: Generator = module.build_generator(
            inner, run, tokenizer, stop_ids, context_length, note
        )
        return driven
    assert tools is not None
    renderer = build_renderer(run, tokenizer, stop_ids)
    renderer.vision = vision
    for environment in tools.environments.values():
        renderer.check_template(environment.schemas)
    schemas = [s for e in tools.environments.values() for s in e.schemas]
    name, parser = choose_parser(config.parser, tokenizer, schemas)
    names = ", ".join(n for e in tools.environments.values() for n in e.specs)
    note(f"episodes of up to {config.max_turns} turns with {names}; calls are read as {name}")
    length = run.generation.max_completion_length
    headroom = prompt_headroom(run, context_length)
    context = None if headroom is None else headroom + length
    turn_rewards = run.algorithm.turn_reward_kind
    images = _tool_images(run, renderer, schemas)
    rules = EpisodeRules(config, tools, renderer, parser, length, context, turn_rewards, images)
    return EpisodeGenerator(inner, rules)


def _tool_images(run: RunConfig, renderer: TurnRenderer, schemas: list[JsonObject]) -> ToolImages:
    """Whether tools may answer with images."""
    why = why_no_tool_images(run)
    if why is None and not renderer.shows_images(schemas):
        why = "and the chat template shows no images in a message of role tool"
    return ToolImages(why, run.data.max_pixels)
