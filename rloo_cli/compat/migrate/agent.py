"""Writes the tools and environments of an old run of TRL, or says what to write.

`tools` and `environment_factory` are code in the training script; the recipe names it as
file.py:name. So it does with `rollout_func`, which has another second argument here.
"""

from rloo_cli.compat.migrate.batch import take_number
from rloo_cli.compat.migrate.recipe import Recipe

NO_LIMIT = (
    "TRL sets no limit to the turns without max_tool_calling_iterations; here it is agent.max_turns"
)
LENGTH_OF_ALL = (
    "TRL's max_completion_length was of the whole conversation, tools included; here it is of a"
    " turn: generation.max_completion_length for one, agent.max_episode_tokens for all of them"
)
ROLLOUT_FUNCTION = (
    "its second argument is a sampler here, not the trainer: sampler.sample(ids) in place of what"
    " it generated with; and agent.fields=[...] names what it returns for rewards (docs/agents.md)"
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
    recipe.groups["agent"] = ("rollout", "rollout_func")
    recipe.put("agent.rollout", spec, "rollout_func")
    recipe.notes.append(f"{spec}: {ROLLOUT_FUNCTION}")
