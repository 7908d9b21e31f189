"""`rloo verify-resume`: it finds a run exact, and finds out one that is not."""

import json
from pathlib import Path

import pytest
from assert_refused import assert_refused
from cli_cases import Rloo

from rloo_cli.cli import verify_resume
from rloo_cli.utils.errors import ConfigError

SHORT = ("+recipe=smoke", "train.prompts_per_step=2", "algorithm.num_generations=2")
CLOCK_REWARD = """
import time

def by_the_clock(completions, **kwargs):
    return [time.time() + i * time.time_ns() % 7 for i, _ in enumerate(completions)]
"""


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--inside-save",)])
def test_a_killed_run_ends_as_one_left_alone(rloo: Rloo, words: tuple[str, ...]) -> None:
    done = rloo.real("verify-resume", *SHORT, "--steps", "4", *words, "--json")
    assert done.code == 0, done.err
    got = json.loads(done.out)
    assert got["exact"] and got["folder"] is None and got["difference"]["steps_compared"] == 4
    assert not list((rloo.folder / "runs").glob("verify-resume-*"))


@pytest.mark.slow
def test_a_reward_that_depends_on_the_clock_is_found_out(rloo: Rloo) -> None:
    (rloo.folder / "rewards.py").write_text(CLOCK_REWARD)
    reward = ("reward=function", "reward.function.path=rewards.py:by_the_clock")
    done = rloo.real("verify-resume", *SHORT, *reward, "--steps", "4")
    assert done.code == 20
    assert "difference: step 1, reward function" in done.out
    assert "weights differ" in done.out and "kept: runs/verify-resume-" in done.out


def test_mistakes_are_refused_before_anything_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words, key in (
        ([], "recipe"),
        ([*SHORT, "--steps", "2"], "3 steps"),
        ([*SHORT, "--kill-in-step", "9"], "--kill-in-step"),
        ([*SHORT, "--stepps", "4"], "--steps"),
        ([*SHORT, "algorithm.betta=3"], "algorithm.beta"),
    ):
        with pytest.raises(ConfigError) as caught:
            verify_resume.run(words)
        assert_refused(caught, 2, key)
    assert not list(tmp_path.iterdir())
