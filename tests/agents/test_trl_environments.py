"""Environments and tools written by TRL's rules for them run here as they are.

The rules: no argument to __init__, reset(**kwargs) that returns a text or None, public methods as
tools, get_reward or attributes that a reward function reads, an exception where a game is over.
"""

import pytest
from agent_cases import call_text, class_agent, episode_generator, play, tools_agent, write_file

pytestmark = pytest.mark.process

ENVIRONMENTS = '''
LIMIT = 20  # taken from around the class, as TRL advises for addresses


class CounterEnv:
    def __init__(self):
        self.count = -1

    def reset(self, **kwargs) -> str | None:
        self.count = 0
        return None

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.count += step
        return self.count


class CalculatorEnv:
    def reset(self, start: float = 0.0, **kwargs) -> str:
        self.memory, self.log = float(start), []
        return f" The display shows {self.memory:g}."

    @property
    def broken(self):
        raise RuntimeError("a property is not a tool and is not looked at")

    def _note(self, text):
        self.log.append(text)

    def apply(self, operator: str, operands: list[float], rounded: bool = False) -> dict:
        """
        Apply an operator to the memory and some numbers.

        Args:
            operator: One of + and *.
            operands: The numbers.
            rounded: Whether to round the result.

        Returns:
            The memory.
        """
        for number in operands:
            if operator == "+":
                self.memory += number
            elif operator == "*":
                self.memory *= number
            else:
                raise ValueError(f"Unknown operator {operator}")
        self._note(operator)
        self.memory = round(self.memory) if rounded else self.memory
        return {"memory": self.memory}

    def get_reward(self) -> float:
        return self.memory / 10


class GuessEnv:
    def __init__(self):
        self.reward = 0.0

    def reset(self, **kwargs) -> str:
        self.secret, self.reward, self.over = kwargs["secret"], 0.0, False
        return f"A number below {LIMIT}."

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: The guessed number.

        Returns:
            Feedback.
        """
        if self.over:
            raise ValueError("Game over.")
        self.over = number == self.secret
        self.reward = float(self.over)
        return "Right!" if self.over else "Too low." if number < self.secret else "Too high."
'''
TOOL = '''
def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product of the two integers.
    """
    return a * b
'''


def saying(*turns):
    """A model that says these one after the other: the next is found by what it was told."""

    def script(text: str, seed: int) -> str:
        done = [i for i, (got, _) in enumerate(turns) if got in text]
        return turns[done[-1]][1]

    return script


def seen(rollout):
    return [m["content"] for turn in rollout.turns for m in turn.observation]


def test_a_counter_has_its_state_at_the_end_for_a_reward_function(tmp_path):
    path = write_file(tmp_path, ENVIRONMENTS)
    by_two, by_three = (call_text("increment", step=step) for step in (2, 3))
    script = saying(("", by_two), ("2\n</tool", by_three), ("5\n</tool", "It is 5."))
    generator = episode_generator(class_agent({"counter": f"{path}:CounterEnv"}), script)
    (group,) = play(generator, k=2)
    for rollout in group.rollouts:
        assert seen(rollout) == ["2", "5"] and rollout.environment == {"count": 5}
        assert rollout.environment_reward is None and rollout.failed is None


def test_a_calculator_opens_with_its_row_and_scores_itself(tmp_path):
    path = write_file(tmp_path, ENVIRONMENTS)
    script = saying(
        ("shows 4", call_text("apply", operator="+", operands=[1, 2.5])),
        ("7.5}", call_text("apply", operator="/", operands=[2])),
        ("Unknown operator /", call_text("apply", operator="*", operands=[2], rounded=True)),
        ("15}", "15"),
    )  # fmt: skip
    config = class_agent({"calc": f"{path}:CalculatorEnv"}, max_turns=5)
    generator = episode_generator(config, script)
    (schema,) = generator.rules.tools.schemas_of({})
    assert schema["function"]["name"] == "apply"
    assert schema["function"]["parameters"]["required"] == ["operator", "operands"]
    (group,) = play(generator, {"start": 4})
    (rollout,) = group.rollouts
    assert seen(rollout) == [
        "{'memory': 7.5}", '{"error": "ValueError: Unknown operator /"}', "{'memory': 15}",
    ]  # fmt: skip
    assert rollout.environment_reward == 1.5 and rollout.episode_facts["errors"] == 1


def test_a_game_that_is_over_says_so_by_an_exception(tmp_path):
    path = write_file(tmp_path, ENVIRONMENTS)
    nine, twelve = (call_text("guess", number=number) for number in (9, 12))
    script = saying(
        ("below 20", nine), ("Too low", twelve), ("Right!", twelve), ("Game over", "done")
    )
    generator = episode_generator(class_agent({"guess": f"{path}:GuessEnv"}), script)
    (group,) = play(generator, {"secret": 12})
    (rollout,) = group.rollouts
    assert seen(rollout)[:2] == ["Too low.", "Right!"] and "Game over." in seen(rollout)[2]
    assert rollout.environment["reward"] == 1.0 and rollout.episode_facts["ended_by"] == "answer"


def test_of_several_each_row_has_the_one_that_its_column_names(tmp_path):
    path = write_file(tmp_path, ENVIRONMENTS)
    made = {"counter": f"{path}:CounterEnv", "guess": f"{path}:GuessEnv"}
    generator = episode_generator(class_agent(made), saying(("", "words")))
    groups = play(generator, {"environment": "guess", "secret": 3}, {"environment": "counter"})
    assert [sorted(g.rollouts[0].environment) for g in groups] == [
        ["over", "reward", "secret"], ["count"],
    ]  # fmt: skip
    for group, own, other in zip(
        groups, ("guess", "increment"), ("increment", "guess"), strict=True
    ):
        shown = generator.rules.renderer.tokenizer.decode(group.prompt_ids)
        assert f'"{own}"' in shown and f'"{other}"' not in shown


def test_a_reset_may_return_parts_and_be_all_of_the_first_turn(tmp_path):
    """As TRL has it for rows without a prompt: a user's message without a word is what it opens."""
    opening = """
class Opens:
    def reset(self, **row):
        self.row = sorted(row)
        if row["n"] == 2:
            return [{"type": "image", "image": "?"}]
        return [{"type": "text", "text": "Your "}, {"type": "text", "text": f"task {row['n']}"}]

    def look(self) -> list:
        \"\"\"Looks around.\"\"\"
        return [{"type": "text", "text": "a "}, {"type": "text", "text": "door"}]
"""
    path = write_file(tmp_path, opening)
    script = saying(("", call_text("look")), ("a door\n</tool", "a door"))
    generator = episode_generator(class_agent({"opens": f"{path}:Opens"}), script)
    groups = play(generator, *({"prompt": "", "n": n} for n in (1, 2)), {"prompt": "go", "n": 3})
    first, image, third = (group.rollouts[0] for group in groups)
    decode = generator.rules.renderer.tokenizer.decode
    assert "<|im_start|>user\nYour task 1<|im_end|>" in decode(groups[0].prompt_ids)
    assert first.environment["row"] == ["n"] and third.environment["row"] == ["n", "prompt"]
    assert "user\ngoYour task 3<|im_end|>" in decode(groups[2].prompt_ids)
    assert seen(first) == ["a door"] and first.failed is None
    assert "image" in image.failed and "only text" in image.failed


@pytest.mark.parametrize("workers", [0, 1])
def test_the_example_of_a_tool_multiplies(tmp_path, workers):
    path = write_file(tmp_path, TOOL)
    script = saying(("", call_text("multiply", a=6, b=7)), ("42\n</tool", "42"))
    generator = episode_generator(tools_agent([f"{path}:multiply"], workers=workers), script)
    (group,) = play(generator, k=2)
    assert [seen(r) for r in group.rollouts] == [["42"], ["42"]]
    assert [r.text for r in group.rollouts] == ["42", "42"]
