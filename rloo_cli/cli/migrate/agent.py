"""Writes the tools and environments of an old run of TRL, or says what to write.

`tools` and `environment_factory` are code in the training script; the recipe names it as
file.py:name. `rollout_func` is carried over where this version has an agent for it.
"""

from rloo_cli.cli.migrate.batch import take_number
from rloo_cli.cli.migrate.recipe import Recipe
from rloo_cli.config import registry

NO_LIMIT = (
    "TRL sets no limit to the turns without max_tool_calling_iterations; here it is agent.max_turns"
)
LENGTH_OF_ALL = (
    "TRL's max_completion_length was of the whole conversation, tools included; here it is of a"
    " turn: generation.max_completion_length for one, agent.max_episode_tokens for all of them"
)
ROLLOUT_AGENT = "rollout"  # the kind that plays a function of the user's; its key has that name
ROLLOUT_FUNCTION = (
    "rollout_func is not carried over: make what it plays tools (agent=tools) or an environment"
    " (agent=class), docs/agents.md"
)


def write_agent(recipe: Recipe) -> None:
    """Write the agent that an old run's tools, environments or rollout function make."""
    tools, environments = recipe.take("tools"), recipe.take("environment_factory")
    rollout = recipe.take("rollout_func")
    iterations = take_number(recipe, "max_tool_calling_iterations", None)
    if rollout is not None:
        _write_rollout_function(recipe, str(rollout))
    elif environments is not None:
        recipe.groups["agent"] = ("class", "environment_factory")
        recipe.put("agent.environments", environments, "environment_factory")
        if tools:
            names = ", ".join(map(str, tools))
            what = "an environment's tools are its methods here: make these methods of it"
            recipe.notes.append(f"tools={names}: {what}")
    elif tools:
        recipe.groups["agent"] = ("tools", "tools")
        recipe.put("agent.tools", tools, "tools")
    if "agent" not in recipe.groups:
        if iterations is not None:
            text = recipe.original_text("max_tool_calling_iterations")
            recipe.dropped.append(f"{text}: there are no tools in this recipe")
        return
    if iterations is None:
        recipe.notes.append(NO_LIMIT)
    else:
        text = recipe.original_text("max_tool_calling_iterations")
        why = f"{text} + 1: the last turn is counted, too"
        recipe.put("agent.max_turns", int(iterations) + 1, why)
    recipe.notes.append(LENGTH_OF_ALL)


def _write_rollout_function(recipe: Recipe, spec: str) -> None:
    if ROLLOUT_AGENT not in registry.registry_names("agents"):
        recipe.notes.append(f"{ROLLOUT_FUNCTION} ({spec})")
        return
    recipe.groups["agent"] = (ROLLOUT_AGENT, "rollout_func")
    recipe.put(f"agent.{ROLLOUT_AGENT}", spec, "rollout_func")
    what = "what it takes and returns may differ from TRL's: docs/agents.md"
    recipe.notes.append(f"{spec}: {what}")
