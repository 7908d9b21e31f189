"""Tools, environments and rollout functions of TRL's trainer, as agents of a recipe."""

import pytest
from assert_refused import assert_refused
from migrate_cases import Migrated

from rloo_cli.compat.migrate.convert import convert_to_recipe
from rloo_cli.compat.migrate.read import OldRun
from rloo_cli.utils.errors import ConfigError

pytestmark = pytest.mark.wide

SETTINGS = {
    "model_name_or_path": "m/m",
    "dataset_name": "org/data",
    "reward_funcs": "org/rm",
    "max_tool_calling_iterations": 3,
}


def recipe_of(**given) -> Migrated:
    """The recipe of a trainer with these settings beside SETTINGS; None leaves one of them out."""
    settings = {k: v for k, v in (SETTINGS | given).items() if v is not None}
    run = OldRun(settings, tool="trl", kind="grpo", setting_format="{}={}")
    found = Migrated(convert_to_recipe(run, "grpo", 1))
    found.said = " ".join(found.text.replace("#", "").split())
    return found


def test_tools_become_an_agent_and_iterations_are_one_turn_less(sentence):
    found = recipe_of(tools=["t.py:multiply", "my_tools:search"])
    assert found.groups["override /agent"] == "tools"
    assert found.recipe["agent"] == {"tools": ["t.py:multiply", "my_tools:search"], "max_turns": 4}
    assert "agent.max_episode_tokens" in found.said
    sentence(found.text.partition("# mind:")[2])


def test_the_reward_of_an_environment_stands_beside_the_others_with_weight_one():
    found = recipe_of(
        environment_factory={"environment": "t.py:Counter"}, environment_reward=True,
        reward_weights=[0.5], max_tool_calling_iterations=None,
    )  # fmt: skip
    assert found.groups["override /agent"] == "class"
    assert found.recipe["agent"]["environments"] == {"environment": "t.py:Counter"}
    assert found.keys["reward.rm.weight"] == 0.5
    assert found.groups["override /reward"] == ["environment"]
    assert "no limit" in found.said and "agent.max_turns" not in found.keys


def test_several_environments_keep_their_names_and_tools_beside_them_are_said(sentence):
    made = {"a": "t.py:Silent", "b": "my_tools:search"}
    found = recipe_of(environment_factory=made, tools=["t.py:multiply"])
    assert found.recipe["agent"]["environments"] == made
    assert "tools=t.py:multiply" in found.said
    sentence(found.text.partition("# mind:")[2])


def test_a_rollout_function_becomes_an_agent_and_what_differs_is_said(sentence):
    found = recipe_of(rollout_func="t.py:multiply")
    assert found.groups["override /agent"] == "rollout"
    assert found.recipe["agent"] == {"rollout": "t.py:multiply", "max_turns": 4}
    assert "sampler" in found.said and "agent.fields=[...]" in found.said
    sentence(found.text.partition("# mind:")[2])


def test_iterations_that_are_no_number_are_refused():
    with pytest.raises(ConfigError) as caught:
        recipe_of(tools=["t.py:multiply"], max_tool_calling_iterations="many")
    assert_refused(caught, 2, "max_tool_calling_iterations")


def test_old_names_on_the_command_line_are_answered():
    from rloo_cli.config.old_names import find_old_name

    keys = {"tools": "agent.tools", "environment_factory": "agent.environments"}
    for name, key in (keys | {"max_tool_calling_iterations": "agent.max_turns"}).items():
        assert find_old_name(name).new_key == key
