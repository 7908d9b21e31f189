"""TRL's tools, environments and rollout functions, as agents of a recipe."""

from pathlib import Path

import pytest
from assert_refused import assert_refused

from rloo_cli.cli.migrate import run
from rloo_cli.utils.errors import ConfigError

pytestmark = pytest.mark.wide

SCRIPT = '''
from datasets import load_dataset
from my_tools import search as find
from trl import GRPOConfig, GRPOTrainer

def multiply(a: int, b: int) -> int:
    """Multiplies."""
    return a * b

class Scored:
    def get_reward(self):
        return 1.0

class Counter(Scored):
    def reset(self, **kwargs):
        self.count = 0

class Silent:
    def reset(self, **kwargs):
        pass

rows = load_dataset("org/data", split="train")
mine = [multiply, find]
GRPOTrainer(model="m/m", args=GRPOConfig({config}), train_dataset=rows, {trainer})
'''


@pytest.fixture
def script(migrate):
    def call(trainer: str, config: str = "max_tool_calling_iterations=3", composes: bool = True):
        text = SCRIPT.replace("{config}", config).replace("{trainer}", trainer)
        Path("t.py").write_text(text)
        found = migrate("--world-size", "1", "t.py", composes=composes)
        found.said = " ".join(found.text.replace("#", "").split())
        return found

    return call


def test_tools_become_an_agent_and_iterations_are_one_turn_less(script, sentence):
    found = script("reward_funcs='org/rm', tools=mine")
    assert found.groups["override /agent"] == "tools"
    assert found.recipe["agent"] == {"tools": ["t.py:multiply", "my_tools:search"], "max_turns": 4}
    assert "multiply" in found.said and "agent.max_episode_tokens" in found.said
    sentence(found.text.partition("# mind:")[2])


def test_a_tool_without_a_name_is_said_and_left_out(script):
    found = script("reward_funcs='org/rm', tools=[find, lambda x: x, make()]")
    assert found.recipe["agent"]["tools"] == ["my_tools:search"]
    assert "tools: lambda x: x" in found.said and "tools: make()" in found.said


def test_an_environment_that_scores_itself_is_its_reward(script):
    found = script("environment_factory=Counter")
    assert found.groups["override /agent"] == "class"
    assert found.groups["override /reward"] == ["environment"]
    assert found.recipe["agent"]["environments"] == {"environment": "t.py:Counter"}
    assert "no reward" not in found.said


def test_the_reward_of_an_environment_stands_beside_the_others_with_weight_one(script):
    config = "reward_weights=[0.5]"
    found = script("reward_funcs='org/rm', environment_factory=Counter", config)
    assert found.keys["reward.rm.weight"] == 0.5
    assert found.groups["override /reward"] == ["environment"]
    assert "no limit" in found.said and "agent.max_turns" not in found.keys


def test_several_environments_keep_their_names_and_tools_beside_them_are_said(script, sentence):
    made = "environment_factory={'a': Silent, 'b': find, 'c': lambda: Silent()}, tools=[multiply]"
    found = script(f"reward_funcs='org/rm', {made}")
    assert found.recipe["agent"]["environments"] == {"a": "t.py:Silent", "b": "my_tools:search"}
    for part in ("environment_factory: lambda: Silent()", "reward=environment", "tools: multiply"):
        assert part in found.said
    sentence(found.text.partition("# mind:")[2])


def test_rows_that_an_environment_made_itself_are_asked_for(script, capsys):
    assert "its own rows" not in script("environment_factory=Counter").said
    Path("u.py").write_text(Path("t.py").read_text().replace("train_dataset=rows,", ""))
    capsys.readouterr()
    assert run(["--world-size", "1", "u.py"]) == 0
    assert "its own rows" in capsys.readouterr().out


def test_a_rollout_function_becomes_an_agent_and_what_differs_is_said(script, sentence):
    found = script("reward_funcs='org/rm', rollout_func=multiply")
    assert found.groups["override /agent"] == "rollout"
    assert found.recipe["agent"] == {"rollout": "t.py:multiply", "max_turns": 4}
    assert "sampler" in found.said and "agent.fields=[...]" in found.said
    sentence(found.text.partition("# mind:")[2])


def test_iterations_that_are_no_number_are_refused(script):
    with pytest.raises(ConfigError) as caught:
        script("reward_funcs='org/rm', tools=mine", "max_tool_calling_iterations='many'")
    assert_refused(caught, 2, "max_tool_calling_iterations")


def test_old_names_on_the_command_line_are_answered(migrate):
    from rloo_cli.config.old_names import find_old_name

    keys = {"tools": "agent.tools", "environment_factory": "agent.environments"}
    for name, key in (keys | {"max_tool_calling_iterations": "agent.max_turns"}).items():
        assert find_old_name(name).new_key == key
