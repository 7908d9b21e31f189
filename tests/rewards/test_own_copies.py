"""What a reward changes in its arguments changes nothing for others."""

import copy
from dataclasses import replace
from typing import Any

import pytest
from reward_cases import CHAT, STATE, group, reward, run, shipped

from rloo_cli.data.batch import Group, Rollout, Turn, copy_value
from rloo_cli.data.filters import filter_stream
from rloo_cli.data.mapping import map_dataset
from rloo_cli.rewards.engine.arguments import REWARD_KWARGS, RewardContext
from rloo_cli.rewards.engine.scoring import score_groups

MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "Say"}]}]
COLUMNS = {"gold": ["a", {"b": [1]}], "facts": {"c": {"d": 2}}, "name": "x"}
KWARGS = {"words": ["one"], "limits": {"most": [3]}}
HISTORY = [{"reward": 0.5}]


def spoil(value: Any) -> None:
    """Change everything that can be changed in place, at every depth."""
    if isinstance(value, list):
        for one in value:
            spoil(one)
        value.append("spoilt")
    elif isinstance(value, dict):
        for one in value.values():
            spoil(one)
        value["spoilt"] = True
    elif hasattr(value, "__dict__") and type(value).__name__ == "SimpleNamespace":
        spoil(value.__dict__)


def spoiler(completions: Any, prompts: Any, trainer_state: Any, **columns: Any) -> list[float]:
    count = len(completions)
    spoil(trainer_state.log_history)
    for name, value in columns.items():
        if not callable(value):
            assert name in {*REWARD_KWARGS, *COLUMNS, *KWARGS, "returned"}
            spoil(value)
    spoil(prompts)
    spoil(completions)
    return [0.0] * count


def episode_group() -> Group:
    """Two completions with everything that a reward can be given."""
    turns = [
        Turn([1], [2], [-1.0], "a", "stop", 0, calls=[{"name": "f", "arguments": {"x": [1]}}],
             observation=[{"role": "tool", "content": [{"type": "text", "text": "o"}]}])
    ]  # fmt: skip
    rollouts = [
        Rollout(
            [1, 2], "a", "stop", True, 0, 0, [-1.0, -2.0], turns=copy.deepcopy(turns),
            environment={"board": [[0]]}, columns={"returned": {"r": [1]}},
        )
        for _ in range(2)
    ]  # fmt: skip
    return Group(0, copy.deepcopy(COLUMNS), copy.deepcopy(MESSAGES), [1, 2], rollouts)


@pytest.mark.parametrize("scope", ["batch", "group", "row"])
def test_a_reward_that_changes_all_its_arguments_changes_nothing(scope: str) -> None:
    seen: list[str] = []

    def watcher(completions: Any, **columns: Any) -> list[float]:
        shown = {n: v for n, v in sorted(columns.items()) if not callable(v)}
        seen.append(repr((completions, shown)))
        return [1.0] * len(completions)

    first = episode_group()
    before, untouched = repr(first), repr(episode_group())
    state = replace(STATE, log_history=copy.deepcopy(HISTORY))
    context = RewardContext(conversational=True, trainer_state=state)
    score_groups([reward(watcher, "w")], [first], context)
    score_groups([reward(spoiler, "s", scope=scope), reward(watcher, "w")], [first], context)
    assert repr(first) == before == untouched
    assert state.log_history == HISTORY
    assert seen[1] == seen[0]


def test_a_list_among_the_kwargs_is_as_the_config_has_it_in_every_call() -> None:
    seen = []

    def score(completions: Any, words: Any, limits: Any) -> list[float]:
        seen.append(repr((words, limits)))
        spoil(words)
        spoil(limits)
        return [0.0] * len(completions)

    kwargs = copy.deepcopy(KWARGS)
    mine = replace(reward(score, scope="row"), fixed_arguments=kwargs)
    score_groups([mine], [group("a", "b")], CHAT)
    assert kwargs == KWARGS and seen == [repr((KWARGS["words"], KWARGS["limits"]))] * 2


def test_columns_handed_over_as_one_dict_are_copies_too() -> None:
    def score(completions: Any, columns: Any) -> list[float]:
        spoil(columns)
        return [0.0] * len(completions)

    one = group("a", **copy.deepcopy(COLUMNS))
    run(score, one)
    assert one.example == COLUMNS
    assert score_groups([shipped("contains", column="name")], [one], CHAT) is not None


def test_a_filter_and_a_map_change_no_row_but_what_the_map_returns(tmp_path: Any) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "row_of_all = {}\n"
        "def passes(row):\n    row['gold'].append(1)\n    return True\n"
        "def change(row):\n    row_of_all.update(row)\n    return row_of_all\n"
    )
    rows = [{"prompt": "a", "gold": ["x"]}, {"prompt": "b", "gold": ["y"]}]
    kept, _ = filter_stream(copy.deepcopy(rows), f"{path}:passes", 2)
    assert [row["gold"] for row in kept] == [["x"], ["y"]]
    assert map_dataset(kept, f"{path}:change")["prompt"][:] == ["a", "b"]


def test_a_copy_shares_nothing_that_can_be_changed() -> None:
    value = [[1, 2], {"a": (3, [4]), "b": bytearray(b"x")}, None, "text"]
    made = copy_value(value)
    assert made == value
    made[1]["a"][1].append(5)
    made[1]["b"][0] = 0
    made[0].append(3)
    assert value == [[1, 2], {"a": (3, [4]), "b": bytearray(b"x")}, None, "text"]
