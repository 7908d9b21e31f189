"""Rewards as the tests call them: a group of texts, a reward, what it gave or how it failed."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from rloo_cli.config import registry
from rloo_cli.config.schema import RewardConfig
from rloo_cli.data.batch import Group, Rollout
from rloo_cli.rewards.engine.arguments import RewardContext, TrainerState
from rloo_cli.rewards.engine.build import build_reward, reward_from_callable
from rloo_cli.rewards.engine.scoring import RewardFailed, Scores, score_groups
from rloo_cli.rewards.function import Config as FunctionConfig

CONF = Path(__file__).parents[2] / "conf/reward"
COMMON: dict[str, Any] = {
    "type": "function",
    "weight": 1.0,
    "timeout_s": 20.0,
    "retries": 0,
    "on_error": "raise",
    "max_error_rate": 0.2,
    "nan_is_none": False,
    "scope": "batch",
    "only": {},
    "workers": 0,
    "cache": False,
}
STATE = TrainerState(3, 7, 10, 0.5, 96, 1000, 1.0)
PLAIN = RewardContext(conversational=False, trainer_state=STATE)
CHAT = RewardContext(conversational=True, trainer_state=STATE)


def group(*texts: str, prompt: Any = "Say", **row: Any) -> Group:
    rollouts = [Rollout([len(t), 9], t, "stop", True, 0, 0, [-1.0, -2.0]) for t in texts]
    return Group(41, row, prompt, [1, 2], rollouts)


def reward(fn: Any, name: str = "mine", **keys: Any) -> Any:
    return reward_from_callable(name, fn, RewardConfig(**(COMMON | keys)))


def run(fn: Any, *groups: Group, context: RewardContext = PLAIN, **keys: Any) -> Scores:
    return score_groups([reward(fn, **keys)], groups or [group("a", "b")], context)


def values(fn: Any, *groups: Group, **keys: Any) -> list[float | None]:
    flat = run(fn, *groups, **keys).raw.flatten().tolist()
    return [None if math.isnan(x) else x for x in flat]


def failure(fn: Any, *groups: Group, **keys: Any) -> RewardFailed:
    with pytest.raises(RewardFailed) as caught:
        run(fn, *groups, **keys)
    assert caught.value.code == 5
    json.dumps(caught.value.detail)
    return caught.value


def function(path: Any, name: str = "function", **kwargs: Any) -> Any:
    """The reward `function` with this path, as a config names it."""
    return build_reward(name, FunctionConfig(**COMMON, path=str(path), kwargs=kwargs))


def shipped(name: str, **keys: Any) -> Any:
    """A shipped reward as its YAML has it, `keys` on top."""
    values = yaml.safe_load((CONF / f"{name}.yaml").read_text())[name]
    return build_reward(name, registry.config_class("rewards", name)(**(COMMON | values | keys)))
