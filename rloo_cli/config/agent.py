"""Common keys of every kind of `agent`, and the lengths that follow from them.

A kind of agent is a file of rloo_cli/agents with its own `Config`; `agent: null` is one answer to
each prompt.
"""

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Annotated, Literal, cast

from pydantic import Field

from rloo_cli.config import registry
from rloo_cli.config.old_names import find_old_name
from rloo_cli.config.pasted import guess_name, unknown_name_problem
from rloo_cli.config.schema import (
    DataConfig,
    DistributedConfig,
    Frozen,
    GenerationConfig,
    Positive,
    RewardConfig,
    RunConfig,
    key,
)
from rloo_cli.utils.errors import Problem, value_problem
from rloo_cli.utils.files import JsonObject

VLLM_PREFIX = "vllm:"  # of agent.parser: a parser of vLLM's
VllmParser = Annotated[str, Field(pattern=r"^vllm:[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
RENDERERS, RENDERERS_PREFIX = "renderers", "renderers:"  # of agent.renderer
RendererName = Annotated[
    str, Field(pattern=r"^(difference|renderers(:[A-Za-z0-9][A-Za-z0-9._-]*)?)$", max_length=100)
]
TEMPLATE_TOKENS = 64  # for what a chat template puts around an observation


class EpisodeConfig(Frozen):
    """Keys of every kind; a kind adds its own."""

    kind: str = key("Kind of agent: a file of rloo_cli/agents")
    max_turns: Positive = key("Most sampled turns per episode (TRL's iterations of calls + 1)")
    max_episode_tokens: Positive | None = key(
        "Most tokens of an episode, including tool output; null = what the context allows"
    )
    renderer: RendererName = key(
        "Ids between two turns: difference = from the chat template with and without the new"
        " messages; renderers = by the rules of the package renderers for model.path;"
        " renderers:NAME = by the rules NAME"
    )

    def code_specs(self) -> dict[str, str]:
        """Key -> `file.py:name` of the user code that runs."""
        return {}

    def scores_episodes(self) -> bool:
        """Whether an episode can have its own reward (`reward=environment`)."""
        return False

    def opens_prompts(self) -> bool:
        """Whether an environment can provide the whole first turn."""
        return False

    def reward_columns(self) -> list[str]:
        """Columns that rewards get in addition to the data set's, a value per episode."""
        return []


class ParsedConfig(EpisodeConfig):
    """Keys of kinds whose turns are parsed for calls."""

    parser: (
        Literal["auto", "hermes", "llama3_json", "mistral", "pythonic", "response"] | VllmParser
    ) = key(
        "Format of calls: hermes (Qwen), llama3_json, mistral, pythonic; response = the"
        " tokenizer's own parse_response; vllm:NAME = vLLM's parser NAME; auto = by the chat"
        " template"
    )


class AgentConfig(ParsedConfig):
    """Keys of kinds whose calls the run makes; an agent behind the proxy makes its own."""

    max_tool_s: float = key("Timeout of a call in seconds; its process is killed", gt=0, le=1e6)
    max_observation_tokens: Positive = key(
        "Most tokens of tool output between two turns; the rest is cut off"
    )
    on_tool_error: Literal["tell", "mask"] = key(
        "After a tool error: tell the model, or exclude the row from baseline and loss"
    )
    on_bad_call: Literal["tell", "end"] = key(
        "After an unparsable call or an unknown tool: tell the model, or end the episode"
    )

    def kept_processes(self) -> int:
        """Processes kept ready for calls; 0 = none."""
        return 0


class ProcessAgentConfig(AgentConfig):
    """Keys of kinds whose tools run in processes of this machine."""

    workers: int = key(
        "Processes kept ready for function calls (an environment has its own process);"
        " 0 = threads of this process, which a timeout cannot kill",
        ge=0,
        le=1024,
    )

    def kept_processes(self) -> int:
        """Processes kept ready for calls; 0 = threads of this process."""
        return self.workers


def agent_config(run: RunConfig) -> EpisodeConfig | None:
    """The agent's keys, or None for one answer to each prompt."""
    return cast("EpisodeConfig | None", run.agent)


def agent_package_problems(agent: EpisodeConfig | None) -> Iterator[Problem]:
    """Packages that an agent's keys need and `pip install rloo-cli` does not install."""
    parser = str(getattr(agent, "parser", ""))
    if parser.startswith(VLLM_PREFIX) and find_spec("vllm") is None:
        fix = "pip install 'rloo-cli[vllm]', or agent.parser=auto"
        what = f"agent.parser = {parser} needs vLLM"
        yield Problem(what, "agent.parser", "vllm is not installed", fix)
    renderer = str(getattr(agent, "renderer", ""))
    if renderer.startswith(RENDERERS) and find_spec("renderers") is None:
        what = f"agent.renderer = {renderer} needs a package of that name"
        fix = "pip install 'rloo-cli[renderers]', or agent.renderer=difference"
        yield Problem(what, "agent.renderer", "renderers is not installed", fix)


def sampled_token_limit(agent: EpisodeConfig | None, length: int) -> int:
    """The most tokens that the policy samples for one completion, over all its turns.

    `length`: generation.max_completion_length, of one turn.
    """
    if agent is None:
        return length
    most = agent.max_turns * length
    return min(most, agent.max_episode_tokens or most)


def completion_token_limit(agent: EpisodeConfig | None, length: int, room: int | None) -> int:
    """The most tokens of one completion, with the output of tools and environments.

    `length`: generation.max_completion_length, of one turn. `room`: what the context leaves beside
    the prompt; None = unknown. Output of an agent behind the proxy is only limited by the context,
    or else counts as much as its turns.
    """
    if agent is None:
        return length
    limits = [*filter(None, [agent.max_episode_tokens, room])]
    if isinstance(agent, AgentConfig):
        between = agent.max_observation_tokens + TEMPLATE_TOKENS
        limits.append(agent.max_turns * (length + between))
    return max(length, min(limits, default=2 * agent.max_turns * (length + TEMPLATE_TOKENS)))


def observation_token_limit(agent: EpisodeConfig | None, length: int) -> int:
    """The most tokens of tool output between two turns.

    `length`: generation.max_completion_length. Output of an agent behind the proxy has no limit; it
    counts as much as a turn.
    """
    return agent.max_observation_tokens if isinstance(agent, AgentConfig) else length


def agent_section(values: JsonObject) -> type[Frozen]:
    """The schema of these plain values of `agent`."""
    agent = values.get("agent")
    kind = agent.get("kind") if isinstance(agent, dict) else None
    names = registry.registry_names("agents")
    known = isinstance(kind, str) and kind in names  # it may also be a list or a mapping
    return registry.config_class("agents", str(kind)) if known else EpisodeConfig


def unknown_agent_problems(values: JsonObject) -> Iterator[Problem]:
    """Problems found before the schema can be built."""
    agent = values.get("agent")
    if not isinstance(agent, dict):
        return
    kind, names = agent.get("kind"), registry.registry_names("agents")
    if kind is None:
        name = f"agent.{next(iter(agent), 'kind')}"
        why = "agent=null means one answer per prompt; +debug=cpu drops the agent"
        fix = f"add agent=NAME, one of: {', '.join(names)}"
        yield Problem(f"{name} is set without an agent", name, why, fix)
    elif not isinstance(kind, str) or kind not in names:
        gone = find_old_name(f"agent={kind}")
        fix = gone.fix if gone is not None else f"agent={guess_name(str(kind), names)}"
        yield unknown_name_problem("agent.kind", kind, "agent", names, fix)


def agent_reward_problems(
    agent: EpisodeConfig | None, rewards: Mapping[str, RewardConfig]
) -> Iterator[Problem]:
    """A reward from an environment, without an environment."""
    asked = [name for name, entry in rewards.items() if entry.type == "environment"]
    if asked and (agent is None or not agent.scores_episodes()):
        what = f"reward.{asked[0]} needs an environment"
        why = f"agent.kind = {agent.kind}" if agent is not None else "agent is null"
        fix = "agent=class or agent=proxy, which can have one"
        yield Problem(what, f"reward.{asked[0]}.type", why, fix)


def agent_problems(
    agent: EpisodeConfig | None, generation: GenerationConfig, distributed: DistributedConfig
) -> Iterator[Problem]:
    """Problems of an agent whose keys are each valid by themselves."""
    if agent is None:
        return
    yield from _rank_problems(distributed, agent)
    least, most = generation.max_completion_length, agent.max_episode_tokens
    if most is not None and most < least:
        why = f"one turn can have {least} tokens (generation.max_completion_length)"
        yield value_problem("agent.max_episode_tokens", most, "is under one turn", 8 * least, why)
    if generation.ignore_eos:
        why = "a turn without an EOS is cut off and ends the episode"
        what = "limits an episode to one turn"
        yield value_problem("generation.ignore_eos", "true", what, "false", why)


def prompt_problems(
    agent: EpisodeConfig | None, data: DataConfig, held_out: Mapping[str, DataConfig]
) -> Iterator[Problem]:
    """Data without prompts, and no environment that provides them."""
    splits = [data, *data.mixture_sources.values(), *held_out.values()]
    if all(split.prompt_column is not None for split in splits):
        return
    if agent is None or not agent.opens_prompts():
        what = "data.prompt_column is null, and no environment provides prompts"
        why = f"agent.kind = {agent.kind}" if agent is not None else "agent is null"
        fix = "data.prompt_column=COLUMN, or agent=class"
        yield Problem(what, "data.prompt_column", why, fix)


def _rank_problems(config: DistributedConfig, agent: EpisodeConfig) -> Iterator[Problem]:
    """Problems of an agent if several ranks sample, each its share of the prompts."""
    local = config.num_processes or (1 if config.engine == "single" else 2)  # null: one per GPU
    ranks = local * config.num_nodes
    if ranks == 1:
        return
    if (port := getattr(agent, "port", 0)) and local > 1:
        why = "each process has its own proxy, and only one can listen on a port"
        yield value_problem("agent.port", port, "does not go with several processes", 0, why)
    if hasattr(agent, "command") and agent.command is None:
        what = f"does not go with {ranks if config.num_processes else 'several'} ranks"
        why = "each rank has its own proxy, and external agents know only one address"
        yield value_problem("agent.command", "null", what, "'python agent.py'", why)
    name, seconds = _longest_pause(agent)
    if seconds >= config.timeout_s:
        what = f"{name} is not less than distributed.timeout_s = {config.timeout_s:g}"
        why = "other ranks wait that long for a slow episode, then give up"
        yield Problem(what, name.partition(" ")[0], why, f"distributed.timeout_s={2 * seconds:g}")


def _longest_pause(agent: EpisodeConfig) -> tuple[str, float]:
    """The most seconds of an episode outside the sampler, with the keys that set them."""
    if isinstance(agent, AgentConfig):
        seconds = agent.max_turns * agent.max_tool_s
        return f"agent.max_tool_s = {agent.max_tool_s:g} times {agent.max_turns} turns", seconds
    seconds = float(getattr(agent, "max_seconds", 0.0))
    return f"agent.max_seconds = {seconds:g}", seconds
