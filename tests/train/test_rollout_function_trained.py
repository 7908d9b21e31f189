"""Training on episodes that a function of the user's plays, by a real model."""

import math

import loop_cases
import pytest
import torch
from agent_cases import write_file
from assert_refused import assert_refused
from episode_runs import ENDS
from rollout_cases import TWO_TURNS

from rloo_cli.utils.errors import ConfigError, DataError

WORDS = (
    "agent=rollout", "agent.max_turns=2", "agent.fields=[earned]", "data.eval_split=null",
    "generation.max_completion_length=6", "train.prompts_per_step=2",
    "algorithm.num_generations=3",
)  # fmt: skip
REWARD = "def earned_reward(completions, earned, **_):\n    return [float(e) for e in earned]\n"


def words_of(folder, text=TWO_TURNS):
    """The overrides of a run whose episodes are played by this text's function."""
    spec = f"{write_file(folder, text, 'mine.py')}:play"
    return (*WORDS, f"agent.rollout={spec}", ENDS)


def test_a_step_is_trained_and_sampled_again_alike_from_its_seeds(tmp_path):
    def earned(completions, earned, **_):
        assert all(isinstance(c, list) for c in completions)
        return [e + len(c[-1]["content"]) / 7 for c, e in zip(completions, earned, strict=True)]

    seen = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        run = loop_cases.make(tmp_path / name, *words_of(tmp_path), rewards={"earned": earned})
        try:
            if seen:
                batch = loop_cases.sampled(run)
            else:
                moved, line, batch = loop_cases.step(run)
                assert float(moved.norm()) > 0 and math.isfinite(line["grad_norm"])
                assert line["agent/retokenised"] == 0 and line["agent/turns"] > 1
                # What the sampler said of each token is what the trainer computes for the row.
                for group, k in ((g, k) for g in batch.groups for k in range(3)):
                    ours, row = group.old_logp[k], group.rollouts[k]
                    assert torch.allclose(ours, torch.tensor(row.sampled_logp), atol=1e-3)
            rows = [(g.prompt_ids, r) for g in batch.groups for r in g.rollouts]
            assert max(len(row.turns) for _, row in rows) == 2
            seen.append([(ids, row.completion_ids, row.mask) for ids, row in rows])
        finally:
            run.generator.close()
    assert seen[0] == seen[1]


ECHO = """
def play(prompts, sampler):
    turns = sampler.sample(sampler.prompt_ids)
    return {"prompt_ids": sampler.prompt_ids, "completion_ids": [t.ids for t in turns],
            "logprobs": [t.logprobs for t in turns]}
"""


def test_a_function_that_only_samples_trains_bit_for_bit_what_a_run_without_one_trains(tmp_path):
    own = [w for w in words_of(tmp_path, ECHO) if "fields" not in w]
    found = []
    for name, words in (("echo", own), ("plain", [w for w in own if not w.startswith("agent")])):
        (tmp_path / name).mkdir()
        run = loop_cases.make(tmp_path / name, *words, "train.prompts_per_step=4")
        try:
            steps = [loop_cases.step(run) for _ in range(2)]
        finally:
            run.generator.close()
        rows = [
            (group.prompt_ids, row.seed, row.completion_ids, row.sampled_logp, row.text)
            for _, _, batch in steps
            for group in batch.groups
            for row in group.rollouts
        ]
        lines = [loop_cases.timeless(line) for _, line, _ in steps]
        found.append((rows, torch.cat([moved for moved, _, _ in steps]), lines))
    (echo_rows, echo_moved, echo_lines), (rows, moved, lines) = found
    assert echo_rows == rows and torch.equal(echo_moved, moved) and float(moved.norm()) > 0
    for echo, plain in zip(echo_lines, lines, strict=True):
        assert {k: v for k, v in echo.items() if not k.startswith("agent/")} == plain


def test_a_field_that_no_key_names_is_a_column_that_is_missing(tmp_path):
    words = [w for w in words_of(tmp_path) if "fields" not in w]
    path = write_file(tmp_path, REWARD, "score.py")
    reward = ["reward=[]", f"+reward.r={{type: function, path: '{path}:earned_reward'}}"]
    with pytest.raises(DataError) as refused:
        loop_cases.make(tmp_path, *words, *reward, rewards={})
    assert_refused(refused, 4, "'earned'")
    words = [*words, "agent.fields=[answer]", "data.path=make:addition"]
    with pytest.raises(ConfigError) as refused:
        loop_cases.make(tmp_path, *words)
    assert_refused(refused, 2, "'answer'", where="agent.fields")
