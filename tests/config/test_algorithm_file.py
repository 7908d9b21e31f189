"""A mistake in a user's own algorithm file is answered with that file's lines, exit 2."""

from pathlib import Path

import pytest
import torch
from fork_cases import Forked

from rloo_cli.config import registry
from rloo_cli.config.compose import compose
from rloo_cli.utils.errors import ConfigError, NumbersError

HEAD = """import warnings
from dataclasses import replace
from rloo_cli.algorithms import rloo
from rloo_cli.algorithms.common.rules import Switches
from rloo_cli.utils.errors import NumbersError
from rloo_cli.config.schema import key
class Config(Switches):
    num_generations: int = key("Completions per prompt", ge=2)
"""
SCORE = torch.tensor([[1.0, 0.0, 2.0], [1.0, 1.0, 0.0]], dtype=torch.float64)


def algorithm(folder: Path, body: str, name: str = "mine.py"):  # type: ignore[no-untyped-def]
    (folder / name).write_text(HEAD + body)
    return registry.algorithm(str(folder / name))


def advantages(folder: Path, body: str, name: str):  # type: ignore[no-untyped-def]
    config = registry.algorithm("rloo").Config(**compose().values["algorithm"])
    head = "def advantages(score, kl, scorable, config, known=None):\n"
    return algorithm(folder, head + body, name).advantages(SCORE, None, SCORE == SCORE, config)


FOUND = "    found = rloo.advantages(score, kl, scorable, config, known)\n"
WRONG = {
    "an exception": ("    return score / {}\n", "TypeError: unsupported operand"),
    "a plain tensor": ("    return score\n", "reward: it is NoneType None"),
    "a float32": (
        FOUND + "    return replace(found, advantage=found.advantage.float())\n",
        "advantage: it is float32, shape (2, 3)\nexpected: float64, shape (2, 3)",
    ),
    "a shape": (
        FOUND + "    return replace(found, reward=found.reward[0])\n",
        "reward: it is float64, shape (3,)\nexpected: float64, shape (2, 3)",
    ),
    "no rows": (
        FOUND + "    return replace(found, usable=scorable.double())\n",
        "usable: it is float64, shape (2, 3)\nexpected: bool, shape (2, 3)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_hook_raises_or_returns_is_the_files_mistake(name: str, tmp_path: Path) -> None:
    body, said = WRONG[name]
    with pytest.raises(ConfigError) as refused:
        advantages(tmp_path, body, f"{name}.py")
    problem = refused.value.problems[0]
    assert problem.what.startswith(f"advantages of the algorithm {tmp_path}/{name}.py ")
    line = 10 if name == "an exception" else 9
    assert problem.where == f"{tmp_path}/{name}.py:{line}"
    assert said in problem.why and problem.fix == "correct advantages"
    assert "rloo_cli/" not in problem.why


def test_every_tensor_hook_is_looked_at_and_a_right_one_passes(tmp_path: Path) -> None:
    right = algorithm(tmp_path, "def shape(score, *rest): return score\n", "right.py")
    assert right.shape(SCORE) is SCORE
    rows = SCORE == SCORE
    bad = {
        "combine": ("raw[0]", SCORE[None]), "truncation": ("raw", rows), "shape": ("None", SCORE),
        "usable": ("raw.double()", rows), "forwarded": ("raw", SCORE), "loss": ("raw", SCORE),
    }  # fmt: skip
    for hook, (returned, given) in bad.items():
        body = f"def {hook}(raw, *rest): return {returned}\n"
        with pytest.raises(ConfigError, match=f"{hook} of the algorithm"):
            getattr(algorithm(tmp_path, body, f"{hook}.py"), hook)(given)
    with pytest.raises(ConfigError, match="problems of the algorithm"):
        algorithm(tmp_path, "def problems(run):\n    yield run.x\n", "gen.py").problems(None)


def test_a_refusal_of_ours_and_memory_that_runs_out_keep_their_codes(tmp_path: Path) -> None:
    own = algorithm(tmp_path, "def early(config): raise NumbersError('x')\n", "a.py")
    with pytest.raises(NumbersError):
        own.early(None)
    text = "import torch\ndef early(config): raise torch.OutOfMemoryError('x')\n"
    with pytest.raises(torch.OutOfMemoryError):
        algorithm(tmp_path, text, "b.py").early(None)


def test_an_import_does_not_replace_a_hook(tmp_path: Path) -> None:
    base = registry.algorithm("rloo")
    own = algorithm(tmp_path, "", "imports.py")  # its head imports the module `warnings`
    assert own.warnings is base.warnings and own.loss is base.loss
    same = algorithm(
        tmp_path, "from rloo_cli.algorithms.common.advantage import usable\n", "same.py"
    )
    assert same.usable is base.usable
    with pytest.raises(ConfigError, match=r"it comes from statistics; only functions that the"):
        algorithm(tmp_path, "from statistics import mean as combine\n", "other.py")
    with pytest.raises(ConfigError, match="is not a function"):
        algorithm(tmp_path, "loss = 'clip'\n", "value.py")


def test_a_run_whose_algorithm_fails_ends_with_2_and_the_files_line(forked: Forked) -> None:
    body = "def shape(score, *rest):\n    return score.float()\n"
    (forked.folder / "mine.py").write_text(HEAD + body)
    assert forked("train", "+recipe=smoke", "algorithm.name=mine.py") == 2
    said = forked.said()
    assert "mine.py:9" in said and "it is float32, shape (4, " in said
    assert "this is a bug" not in said and "Traceback" not in said
