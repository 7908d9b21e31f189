"""The examples in the docstrings of the shipped rewards are what these rewards say."""

import doctest
import importlib
import pkgutil

import pytest

from rloo_cli import rewards

MODULES = [m.name for m in pkgutil.iter_modules(rewards.__path__) if not m.ispkg]
# Of these an example would need a server, a sandbox, a package, a model or a function of one's own.
WITHOUT = {
    "accuracy", "code_tests", "cosine_length", "environment", "function", "http", "ifeval", "judge",
    "model", "reasoning_accuracy", "reasoning_gym",
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_a_rewards_example_is_what_it_says(name: str) -> None:
    found = doctest.testmod(importlib.import_module(f"rloo_cli.rewards.{name}"))
    assert found.failed == 0 and (found.attempted > 0) == (name not in WITHOUT)
