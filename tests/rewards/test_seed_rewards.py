"""Reward functions as the documentation of TRL prints them, in a user's file, run by the tool."""

import json
from pathlib import Path

import pytest
from cli_cases import Rloo
from reward_cases import CHAT, PLAIN, STATE, group

from rloo_cli.config import check, compose
from rloo_cli.data.batch import Group
from rloo_cli.rewards.engine.build import build_reward
from rloo_cli.rewards.engine.scoring import Scores, score_groups

CODE = r"""
import asyncio
import re

# Example 1 and 1.1
def token_count(completions_ids, **kwargs):
    return [float(len(ids)) for ids in completions_ids]

def character_count(completions, **kwargs):
    return [float(len(completion)) for completion in completions]

# Example 2
def format_reward_func(completions, **kwargs):
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    completion_contents = [completion[0]["content"] for completion in completions]
    matches = [re.match(pattern, content) for content in completion_contents]
    return [1.0 if match else 0.0 for match in matches]

# Example 3
def boxed(completions, ground_truth, **kwargs):
    matches = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    contents = [match.group(1) if match else "" for match in matches]
    return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth)]

# Example 4; the printed coding function looks for the task "coding", the data say "code"
def math_reward_func(prompts, completions, task, **kwargs):
    rewards = []
    for prompt, completion, t in zip(prompts, completions, task):
        if t == "math":
            rewards.append(1.0 if "4" in completion else -1.0)
        else:
            rewards.append(None)
    return rewards

def coding_reward_func(prompts, completions, task, **kwargs):
    rewards = []
    for prompt, completion, t in zip(prompts, completions, task):
        if t == TASK:
            rewards.append(1.0 if "return" in completion else -1.0)
        else:
            rewards.append(None)
    return rewards

TASK = "code"

# Example 5
async def async_reward_func(prompts, completions, **kwargs):
    await asyncio.sleep(0.01)
    return [1.0 if completion else 0.0 for completion in completions]

# The quick start, and the 70B example
def reward_num_unique_letters(completions, **kwargs):
    completion_contents = [completion[0]["content"] for completion in completions]
    return [float(len(set(content))) for content in completion_contents]

def reward_num_unique_chars(completions, **kwargs):
    return [len(set(c)) for c in completions]

# The notes' two
def custom_reward(prompts, completions, **kwargs):
    return [len(c.split()) for c in completions]

def reward_func(prompts, completions, **kwargs):
    rewards = []
    for c in completions:
        length_score = min(len(c.split()) / 50, 1.0)
        unique_words = len(set(c.split()))
        diversity_score = unique_words / max(len(c.split()), 1)
        rewards.append(length_score + diversity_score)
    return rewards

# A curriculum: what `trainer_state` is for
def stricter(completions, trainer_state, **kwargs):
    return [1.0 if len(c) > 5 * trainer_state.global_step else 0.0 for c in completions]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(CODE)
    return path


def recipe(file: Path, names: list[str]) -> Path:
    """A user's recipe with these functions of the file."""
    lines = [f"  {n}: {{type: function, path: '{file}:{n}', kwargs: {{}}}}" for n in names]
    head = (
        "defaults: [{override /model: tiny}, {override /data: tiny}]\nname: mine\nmax_steps: 2\n"
        "generation: {max_completion_length: 8}\ntrain: {prompts_per_step: 4}\nreward:\n"
    )
    path = file.with_name("mine.yaml")
    path.write_text(head + "\n".join(lines) + "\n")
    return path


def scored(file: Path, names: list[str], groups: list[Group], chat: bool = False) -> Scores:
    """The step's scores by functions of the file, composed as the command line would."""
    words = [f"+recipe={recipe(file, names)}"]
    rewards = check.check_config(compose.compose_config(words)).rewards
    built = [build_reward(name, rewards[name]) for name in names]
    return score_groups(built, groups, CHAT if chat else PLAIN)


def one(file: Path, name: str, *groups: Group, chat: bool = False) -> list[float]:
    return scored(file, [name], [*groups], chat).raw.flatten().tolist()


def test_each_function_gives_what_its_documentation_says(file: Path) -> None:
    sky = group(" blue.", " in the sky.")
    sky.rollouts[0].completion_ids, sky.rollouts[1].completion_ids = [6303, 13], [304, 279, 1, 13]
    assert one(file, "token_count", sky) == [2.0, 4.0]
    assert one(file, "character_count", sky) == [6.0, 12.0]
    talk = group("<think>1 + 2 is 3.</think><answer>12</answer>", "So 8.")
    assert one(file, "format_reward_func", talk, chat=True) == [1.0, 0.0]
    solved = group(r" The solution is \boxed{2}.", ground_truth="2")
    wrong = group(r" The solution is \boxed{6}.", ground_truth="5")
    assert one(file, "boxed", solved, wrong) == [1.0, 0.0]
    assert one(file, "async_reward_func", group("text", "")) == [1.0, 0.0]
    letters = group("hello world", "aaa")
    assert one(file, "reward_num_unique_letters", letters, chat=True) == [8.0, 1.0]
    assert one(file, "reward_num_unique_chars", letters) == [8.0, 1.0]
    assert one(file, "custom_reward", group("a b a")) == [3.0]
    assert one(file, "reward_func", group("a b a", "one two three four")) == pytest.approx(
        [3 / 50 + 2 / 3, 4 / 50 + 1]
    )
    assert STATE.global_step == 3
    assert one(file, "stricter", group("x" * 15, "x" * 16)) == [0.0, 1.0]


TASKS = [group("4", task="math"), group("return 1", task="code"), group("5", task="math")]


def test_in_the_multi_task_example_each_row_is_scored_by_its_own_task(file: Path) -> None:
    scores = scored(file, ["math_reward_func", "coding_reward_func"], TASKS)
    assert [[v if v == v else None for v in row] for row in scores.raw.flatten(1).tolist()] == [
        [1.0, None, -1.0], [None, 1.0, None],
    ]  # fmt: skip
    assert not scores.warnings


def test_the_printed_mistake_of_the_multi_task_example_is_told_of(file: Path) -> None:
    file.write_text(CODE.replace('TASK = "code"', 'TASK = "coding"'))
    scores = scored(file, ["math_reward_func", "coding_reward_func"], TASKS)
    (warning,) = scores.warnings
    assert "1 of 3 rows" in warning and "'task': 'code'" in warning


def test_all_of_them_train_together_from_the_command_line(rloo: Rloo) -> None:
    (rloo.folder / "my_rewards.py").write_text(CODE)
    names = ["token_count", "boxed", "math_reward_func", "coding_reward_func", "async_reward_func",
             "reward_func", "stricter"]  # fmt: skip
    recipe(rloo.folder / "my_rewards.py", names)
    done = rloo("train", "+recipe=mine.yaml")
    assert done.code == 0, done.err
    lines = (rloo.folder / "runs/mine/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    steps = [row for row in rows if "step_time" in row]
    assert len(steps) == 2 and all(f"reward/{n}/mean" in steps[0] for n in ("token_count", "boxed"))
    assert steps[0]["reward/stricter/mean"] >= steps[1]["reward/stricter/mean"]
