"""A mistake in a user's own algorithm file is answered with that file's lines, exit 2."""

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from assert_refused import assert_refused
from fork_cases import Forked

from rloo_cli.config import registry
from rloo_cli.config.compose import compose_config
from rloo_cli.plugin import AdvantageInputs
from rloo_cli.utils.errors import ConfigError, NumbersError

HEAD = """import warnings
from dataclasses import replace
from rloo_cli.plugin import *
from rloo_cli.utils.errors import NumbersError
class Config(Switches):
    num_generations: int = key("Completions per prompt", ge=2)
class Mine(RLOO[Config]):
    '''One of the user's own.'''
"""
SCORE = torch.tensor([[1.0, 0.0, 2.0], [1.0, 1.0, 0.0]], dtype=torch.float64)


def algorithm(folder: Path, body: str, name: str = "mine.py") -> Any:
    (folder / name).write_text(HEAD + textwrap.indent(body, "    "))
    found = registry.algorithm_class(str(folder / name))
    return found(
        registry.config_class("algorithms", "rloo")(**compose_config().values["algorithm"])
    )


def advantages(folder: Path, body: str, name: str) -> Any:
    own = algorithm(folder, "def advantages(self, inputs):\n" + body, name)
    return own.advantages(AdvantageInputs(SCORE, None, SCORE == SCORE))


FOUND = "    found = super().advantages(inputs)\n"
WRONG = {
    "an exception": ("    return inputs.score / {}\n", ["TypeError"]),
    "a plain tensor": ("    return inputs.score\n", ["reward", "NoneType"]),
    "a float32": (
        FOUND + "    return replace(found, advantage=found.advantage.float())\n",
        ["advantage", "float32", "(2, 3)", "float64"],
    ),
    "a shape": (
        FOUND + "    return replace(found, reward=found.reward[0])\n",
        ["reward", "float64", "(3,)", "(2, 3)"],
    ),
    "no rows": (
        FOUND + "    return replace(found, usable=inputs.scorable.double())\n",
        ["usable", "float64", "bool"],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_hook_raises_or_returns_is_the_files_mistake(
    name: str, tmp_path: Path, sentence: Callable[..., None]
) -> None:
    body, said = WRONG[name]
    with pytest.raises(ConfigError) as refused:
        advantages(tmp_path, body, f"{name}.py")
    line = 10 if name == "an exception" else 9
    problem = assert_refused(
        refused, where=f"{tmp_path}/{name}.py:{line}", fix="correct advantages"
    )
    assert all(word in problem.why for word in said)
    assert "rloo_cli/" not in problem.why
    if name == "a float32":
        sentence(refused)


def test_every_tensor_hook_is_looked_at_and_a_right_one_passes(tmp_path: Path) -> None:
    right = algorithm(tmp_path, "def shape_scores(self, score, *rest): return score\n", "right.py")
    assert right.shape_scores(SCORE) is SCORE
    bad = {
        "combine_rewards": ("raw[0]", SCORE[None]), "shape_scores": ("None", SCORE),
        "loss": ("raw", SCORE), "value_loss": ("raw", SCORE),
    }  # fmt: skip
    for hook, (returned, given) in bad.items():
        body = f"def {hook}(self, raw, *rest): return {returned}\n"
        with pytest.raises(ConfigError) as refused:
            getattr(algorithm(tmp_path, body, f"{hook}.py"), hook)(given)
        assert_refused(refused, key=hook, fix=f"correct {hook}")
    with pytest.raises(ConfigError, match="rules"):
        algorithm(tmp_path, "def rules(self, run):\n    yield run.x\n", "gen.py").rules(None)


def test_a_refusal_of_ours_and_memory_that_runs_out_keep_their_codes(tmp_path: Path) -> None:
    own = algorithm(tmp_path, "def forward_plan(self, run): raise NumbersError('x')\n", "a.py")
    with pytest.raises(NumbersError):
        own.forward_plan(None)
    full = "def forward_plan(self, run): raise __import__('torch').OutOfMemoryError('x')\n"
    with pytest.raises(torch.OutOfMemoryError):
        algorithm(tmp_path, full, "b.py").forward_plan(None)


def test_one_class_of_the_file_is_the_algorithm_and_it_has_advantages(
    tmp_path: Path, sentence: Callable[..., None]
) -> None:
    own = algorithm(tmp_path, "", "plain.py")
    assert type(own).__name__ == "Mine" and type(own).loss is type(own).__mro__[1].loss
    with pytest.raises(ConfigError) as refused:
        _load(tmp_path, "class Other(RLOO[Config]): pass\n", "two.py")
    assert_refused(refused, key="Mine, Other")
    sentence(refused)
    with pytest.raises(ConfigError) as refused:
        _load(tmp_path, "", "open.py", HEAD.replace("RLOO[Config]", "Algorithm[Config]"))
    assert_refused(refused, key="advantages")
    sentence(refused)
    with pytest.raises(ConfigError, match="loss"):
        algorithm(tmp_path, "loss = 'clip'\n", "value.py")


def _load(folder: Path, more: str, name: str, head: str = HEAD) -> None:
    (folder / name).write_text(head + more)
    registry.algorithm_class(str(folder / name))


def test_a_run_whose_algorithm_fails_ends_with_2_and_the_files_line(forked: Forked) -> None:
    body = "    def shape_scores(self, score, *rest):\n        return score.float()\n"
    (forked.folder / "mine.py").write_text(HEAD + body)
    assert forked("train", "+recipe=smoke", "algorithm.name=mine.py") == 2
    said = forked.said()
    assert "mine.py:9" in said and "float32" in said
    assert "this is a bug" not in said and "Traceback" not in said
