"""The generator of episodes, around the generator that a run has built."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rloo_cli.agents.common.call_parsers import choose_parser
from rloo_cli.agents.common.episodes import EpisodeGenerator, EpisodeRules
from rloo_cli.agents.common.observations import ToolImages
from rloo_cli.agents.common.template_rules import build_renderer
from rloo_cli.agents.common.tool_set import ToolSet
from rloo_cli.agents.common.turn_rendering import TurnRenderer
from rloo_cli.config import registry
from rloo_cli.config.agent import (
    AgentConfig,
    EpisodeConfig,
    agent_config,
    completion_token_limit,
    sampled_token_limit,
)
from rloo_cli.config.prompt_limit import prompt_headroom
from rloo_cli.config.schema import GenerationConfig, ModelConfig, RunConfig
from rloo_cli.data.image_rules import why_no_tool_images
from rloo_cli.data.vocabulary import answer_budget_ids
from rloo_cli.generation import Generator
from rloo_cli.generation.common.forced_answers import ForcedAnswers
from rloo_cli.generation.common.stop_rule import stop_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rloo_cli.data.vision_processor import VisionProcessor


@dataclass(frozen=True)
class EpisodeSetup:
    """What every kind of episode generator is built from."""

    inner: Generator  # samples single turns
    model: ModelConfig
    generation: GenerationConfig
    tokenizer: "PreTrainedTokenizerBase"
    stop_ids: set[int]  # that end a turn
    context_tokens: int | None  # prompt and episode together; None = not known
    episode_tokens: int  # limit from the agent's keys, if the context length is unknown
    sampled_tokens: int  # limit of sampled tokens, over all turns
    note: Callable[[str], None]

    def build_renderer(self, asked: str) -> TurnRenderer:
        """The renderer that agent.renderer asks for. Raises ConfigError if it does not fit."""
        template_kwargs = self.generation.chat_template_kwargs
        path = str(self.model.path)
        return build_renderer(asked, path, template_kwargs, self.tokenizer, self.stop_ids)


def load_tool_set(agent: EpisodeConfig | None) -> ToolSet | None:
    """Descriptions of the agent's tools; None without an agent or if the agent brings its own.

    Raises ConfigError.
    """
    if agent is None:
        return None
    found: ToolSet | None = registry.registered_module("agents", agent.kind).load_tools(agent)
    return found


def load_episode_vision(
    run: RunConfig, tokenizer: "PreTrainedTokenizerBase"
) -> "VisionProcessor | None":
    """The image processor for the run's episodes; None if they cannot show images.

    Raises what `load_vision_processor` raises.
    """
    if agent_config(run) is None or why_no_tool_images(run) is not None:
        return None
    from rloo_cli.data.vision_processor import load_vision_processor  # lazy: it imports torch

    return load_vision_processor(run.model, tokenizer)


def build_generator(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    run: RunConfig,
    context_length: int | None,
    folder: Path,
    note: Callable[[str], None],
    tools: ToolSet | None,
    vision: "VisionProcessor | None",
) -> Generator:
    """The generator of the run's backend; with an agent, wrapped in a generator of episodes; with
    generation.answer_budget, in one that forces answers.

    `tools` and `vision` are what `load_tool_set` and `load_episode_vision` return. Raises
    ConfigError if the chat template does not support tools.
    """
    backend = registry.registered_module("generation", run.generation.backend)
    inner: Generator = registry.load_code(backend.IMPLEMENTATION)(
        model, tokenizer, run, context_length, folder, note
    )
    config = agent_config(run)
    if (budget := run.generation.answer_budget) is not None:  # without an agent (config.rules)
        return ForcedAnswers(inner, budget, tokenizer, answer_budget_ids(tokenizer, run.generation))
    if config is None:
        return inner
    length = run.generation.max_completion_length
    headroom = prompt_headroom(run.generation, context_length)
    context = None if headroom is None else headroom + length
    ends = stop_ids(tokenizer, model, run.generation)
    episode, sampled = (
        completion_token_limit(config, length, None),
        sampled_token_limit(config, length),
    )
    setup = EpisodeSetup(
        inner, run.model, run.generation, tokenizer, ends, context, episode, sampled, note
    )
    if not isinstance(config, AgentConfig):  # an agent that drives its own episodes
        module = registry.registered_module("agents", config.kind)
        driven: Generator = module.build_generator(config, setup)
        return driven
    assert tools is not None
    images = ToolImages(why_no_tool_images(run), run.data.max_pixels)
    turn_rewards = run.algorithm.turn_reward_kind
    return _build_episodes(config, setup, tools, vision, images, turn_rewards)


def _build_episodes(
    config: AgentConfig,
    setup: EpisodeSetup,
    tools: ToolSet,
    vision: "VisionProcessor | None",
    images: ToolImages,
    turn_rewards: str,
) -> EpisodeGenerator:
    """The generator of episodes whose tool calls the run makes. Raises ConfigError.

    `images`: whether model and config let tools answer with images.
    """
    renderer = setup.build_renderer(config.renderer)
    renderer.vision = vision
    for environment in tools.environments.values():
        renderer.check_template(environment.schemas)
    schemas = [s for e in tools.environments.values() for s in e.schemas]
    name, parser = choose_parser(config.parser, setup.tokenizer, schemas)
    names = ", ".join(n for e in tools.environments.values() for n in e.specs)
    setup.note(f"episodes of up to {config.max_turns} turns with {names}; calls are read as {name}")
    if images.why_not is None and not renderer.shows_images(schemas):
        why = "and the chat template shows no images in a message of role tool"
        images = replace(images, why_not=why)
    length, context = setup.generation.max_completion_length, setup.context_tokens
    rules = EpisodeRules(config, tools, renderer, parser, length, context, turn_rewards, images)
    return EpisodeGenerator(setup.inner, rules)
