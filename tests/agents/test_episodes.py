"""Episodes: turns, limits, seeds, several environments, and what an episode's end says."""

import time

import pytest
from agent_cases import (
    asked_groups,
    call_text,
    class_agent,
    episode_generator,
    play,
    tools_agent,
    write_file,
)
from assert_refused import assert_refused

from rloo_cli.agents import tools
from rloo_cli.agents.common.tool_set import load_environments
from rloo_cli.reporting.log import sample_record
from rloo_cli.rewards.engine.arguments import RESERVED_SAMPLE_FIELDS
from rloo_cli.utils.errors import ConfigError, DataError
from rloo_cli.utils.rng import turn_seed

MULTIPLY = "rloo_cli.data.synthetic.tool_tasks:multiply"
GAME = "rloo_cli.data.synthetic.tool_tasks:GuessingGame"
# As TRL's documentation prints such classes: state in reset, typed methods, a reward of its own.
COUNTER = '''
import random


class Counter:
    def reset(self, **kwargs) -> str | None:
        self.count = 0
        self.drawn = random.random()
        return f" You begin with {kwargs.get('start', 0)}."

    def increment(self, by: int) -> int:
        """
        Increments the counter.

        Args:
            by: How much is added.

        Returns:
            The counter.
        """
        self.count += by
        return self.count

    def get_reward(self) -> float:
        return float(self.count)


class Echo:
    def reset(self, **kwargs) -> None:
        self.said = []

    async def echo(self, message: str) -> str:
        """
        Says it again.

        Args:
            message: What is said.
        """
        self.said.append(message)
        return message
'''


def ended(group):
    return [row.episode_facts["ended_by"] for row in group.rollouts]


def calls_until(word, call):
    return lambda text, seed: "the end" if word in text else call


@pytest.mark.process
def test_a_call_is_answered_and_the_episode_goes_on():
    generator = episode_generator(
        tools_agent([MULTIPLY]), calls_until("12", call_text("multiply", a=3, b=4))
    )
    (group,) = play(generator)
    (row,) = group.rollouts
    assert ended(group) == ["answer"] and row.terminated and row.text == "the end"
    assert [len(t.calls) for t in row.turns] == [1, 0] and row.episode_facts["calls"] == 1
    assert row.mask.count(0) == len(row.turns[1].prompt_ids) > 0
    assert row.length == sum(len(t.sampled_ids) for t in row.turns)


def test_every_turn_has_a_seed_of_its_own_that_depends_on_nothing_else():
    script = calls_until("12", call_text("multiply", a=3, b=4))
    generator = episode_generator(tools_agent([MULTIPLY], workers=0), script)
    groups = play(generator, {}, {}, k=2)
    assert generator.inner.seeds == [0, 1, 100, 101, *(turn_seed(s, 1) for s in (0, 1, 100, 101))]
    assert len({*generator.inner.seeds}) == 8
    assert [len(wave) for wave in generator.inner.asked] == [2, 4]  # a prompt once for its group
    assert [r.seed for g in groups for r in g.rollouts] == [0, 1, 100, 101]


@pytest.mark.parametrize(
    ("keys", "said", "why"),
    [
        ({"max_turns": 2}, call_text("multiply", a=3, b=4), "turns"),
        ({}, "words without an end...", "completion"),
        ({"max_episode_tokens": 90}, call_text("multiply", a=3, b=4), "tokens"),
        ({"on_bad_call": "end"}, call_text("divide", a=3), "bad_call"),
        ({"on_bad_call": "end"}, "<tool_call>{</tool_call>", "bad_call"),
    ],
)
def test_a_limit_ends_the_episode_and_says_which(keys, said, why):
    generator = episode_generator(tools_agent([MULTIPLY], workers=0, **keys), lambda *_: said)
    (group,) = play(generator)
    assert ended(group) == [why] and group.rollouts[0].failed is None
    assert group.rollouts[0].mask[-1] == 1  # an episode ends with what was sampled


def test_a_context_that_is_full_ends_the_episode():
    config = tools_agent([MULTIPLY], workers=0)
    said = call_text("multiply", a=3, b=4)
    length = len(asked_groups(episode_generator(config, lambda *_: said), {})[0].prompt_ids)
    (group,) = play(episode_generator(config, lambda *_: said, context=length + 100))
    assert ended(group) == ["context"]


@pytest.mark.parametrize(
    ("said", "got"),
    [
        (call_text("divide", a=3), "there is no tool 'divide'; there are: multiply"),
        (call_text("multiply", a=3), "multiply needs the argument b"),
        (call_text("multiply", a=3, b=4, c=5), "multiply has no argument 'c'"),
        (call_text("multiply", a=3, b="four"), "'b' of multiply is not of type integer"),
        (call_text("multiply", a=True, b=4), "'a' of multiply is not of type integer"),
        ('<tool_call>{"name": "multiply", "arguments": 3}</tool_call>', "are not an object"),
        ("<tool_call>multiply 3 by 4</tool_call>", "a call is not JSON"),
    ],
)
def test_a_bad_call_is_told_to_the_model(said, got):
    config = tools_agent([MULTIPLY], workers=0, max_observation_tokens=200)
    generator = episode_generator(config, calls_until(got, said))
    (group,) = play(generator)
    assert ended(group) == ["answer"] and group.rollouts[0].episode_facts["bad_calls"] == 1
    assert got in group.rollouts[0].turns[1].observation[0]["content"]


@pytest.mark.process
def test_environments_keep_their_state_open_the_prompt_and_say_the_reward(tmp_path):
    path = write_file(tmp_path, COUNTER)
    config = class_agent({"counter": f"{path}:Counter"}, max_turns=3)
    generator = episode_generator(config, lambda *_: call_text("increment", by=2))
    (group,) = play(generator, {"start": 5}, k=2)
    tokenizer = generator.rules.renderer.tokenizer
    assert "begin with 5." in tokenizer.decode(group.prompt_ids)
    assert group.rollouts[0].opening_ids == group.prompt_ids
    assert [row.environment_reward for row in group.rollouts] == [4.0, 4.0]
    assert [row.environment["count"] for row in group.rollouts] == [4, 4]
    drawn = [row.environment["drawn"] for row in group.rollouts]
    (again,) = play(episode_generator(config, generator.inner.script), {"start": 5}, k=2)
    assert drawn == [row.environment["drawn"] for row in again.rollouts]  # seeded by counter
    assert drawn[0] != drawn[1]


@pytest.mark.process
def test_openings_that_differ_share_what_they_begin_with(tmp_path):
    text = COUNTER.replace("kwargs.get('start', 0)", "random.randint(0, 10**9)")
    config = class_agent({"counter": f"{write_file(tmp_path, text)}:Counter"}, max_turns=1)
    generator = episode_generator(config, lambda *_: "no")
    (group,) = play(generator, {}, k=3)
    decode = generator.rules.renderer.tokenizer.decode
    for row, (prompt,) in zip(group.rollouts, zip(generator.inner.asked[0]), strict=True):
        assert group.prompt_ids + row.completion_ids == prompt + row.turns[0].sampled_ids
        assert row.mask[0] == 0 and "You begin with" in decode(prompt)


@pytest.mark.process
def test_the_row_chooses_among_environments(tmp_path, sentence):
    path = write_file(tmp_path, COUNTER)
    config = class_agent({"counter": f"{path}:Counter", "echo": f"{path}:Echo"}, max_turns=2)

    def script(text, seed):
        return call_text("echo", message="hello") if '"echo"' in text else "none"

    generator = episode_generator(config, script)
    groups = play(generator, {"environment": "echo"}, {"environment": "counter"})
    # Of two turns the last one's call is not made.
    assert groups[0].rollouts[0].environment == {"said": ["hello"]}
    assert groups[0].rollouts[0].environment_reward is None
    assert groups[1].rollouts[0].environment_reward == 0.0
    with pytest.raises(DataError) as caught:
        asked_groups(generator, {"environment": "other"})
    assert_refused(caught, 4, "'other'", where="agent.environments", fix="counter, echo")
    sentence(caught)


@pytest.mark.process
def test_an_environment_says_that_it_is_over():
    generator = episode_generator(
        class_agent({"game": GAME}, max_turns=3),
        lambda text, seed: call_text("guess", number=7 + seed),
    )
    (group,) = play(generator, {"secret": 8}, k=2)
    assert ended(group) == ["turns", "done"]
    assert [row.environment_reward for row in group.rollouts] == [0.0, 1.0]


@pytest.mark.process
def test_a_slow_tool_delays_its_own_episode_alone(tmp_path):
    text = '''
import time


def nap(seconds: float) -> str:
    """Sleeps.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "awake"
'''
    config = tools_agent([f"{write_file(tmp_path, text)}:nap"], workers=1, max_turns=4)

    def script(text, seed):
        return call_text("nap", seconds=2.0 if seed == 0 and "awake" not in text else 0.0)

    generator = episode_generator(config, script)
    groups, done = asked_groups(generator, {}, {}), []
    began = time.monotonic()
    generator.generate(groups, [[0], [1]], arrived=lambda i: done.append((i, time.monotonic())))
    generator.close()
    assert [i for i, _ in done] == [1, 0]
    assert done[0][1] - began < 2.0  # the quick one had all its turns meanwhile
    assert [len(g.rollouts[0].turns) for g in groups] == [4, 4]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("def tool(a, b):\n    '''Adds.\n\n    Args:\n        a: One.\n        b: Two.\n    '''\n",
         "missing a type hint"),
        ("def tool(a: int) -> int:\n    return a\n", "docstring"),
        ("def tool(a: int) -> int:\n    '''Adds.'''\n    return a\n", "a"),
        ("tool = 3\n", "is not callable"),
        ("def other(): ...\n", "has no 'tool'"),
    ],
)  # fmt: skip
def test_a_function_without_types_or_a_docstring_is_refused_by_name(tmp_path, text, why):
    spec = f"{write_file(tmp_path, text)}:tool"
    with pytest.raises(ConfigError, match=why) as caught:
        tools.load_tools(tools_agent([spec]))
    assert spec in str(caught.value) or "tool" in str(caught.value)


def test_a_class_without_reset_or_tools_is_refused(tmp_path):
    path = write_file(tmp_path, "class A: ...\nclass B:\n    def reset(self, **row): ...\n")
    for name, why in (("A", "has no method reset"), ("B", "has no tool")):
        with pytest.raises(ConfigError, match=why):
            load_environments({"x": f"{path}:{name}"})


def test_no_reward_may_log_a_column_that_samples_of_episodes_have():
    generator = episode_generator(tools_agent([MULTIPLY]), lambda *_: "the end")
    (group,) = play(generator)
    record = sample_record(group, 0)
    assert {"turns", "episode", "failed"} <= {*record} <= RESERVED_SAMPLE_FIELDS
