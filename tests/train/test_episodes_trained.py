"""Training on episodes: what a step computes, saves and leaves out."""

import math

import loop_cases
import torch
from agent_cases import write_file

from rloo_cli.checkpoint.step_state import dump_step, load_step
from rloo_cli.run import StepProgress
from rloo_cli.train.advantages import prepare_advantages

TOOL = '''
import random


class World:
    def reset(self, draw_of=0, **row):
        self.number = random.random()
        return f" {self.number:.3f}"

    def look(self) -> str:
        """Looks around."""
        if self.number < 0.25:
            raise SystemExit
        return f"{self.number}"

    def get_reward(self) -> float:
        if self.number > 0.75:
            raise ValueError("nothing to say")
        return self.number
'''
# Every answer of the random model ends soon, and is a call in one of a few ways, or none.
WORDS = (
    "data.path=make:tiny_chat", "agent=class", "agent.max_turns=3", "agent.parser=hermes",
    "agent.max_observation_tokens=12", "reward=environment", "generation.max_completion_length=6",
    "train.prompts_per_step=3", "algorithm.num_generations=4", "data.eval_split=null",
)  # fmt: skip


def made(tmp_path, monkeypatch, *words):
    """A run in which every answer calls the tool, whatever it says."""
    path = write_file(tmp_path, TOOL)
    run = loop_cases.make(
        tmp_path, *WORDS, f"agent.environments={{world: '{path}:World'}}", loop_cases.ENDS, *words,
        rewards={},
    )  # fmt: skip
    rules = run.generator.rules

    def look(text):
        found = rules.parser('<tool_call>{"name": "look", "arguments": {}}</tool_call>')
        return found

    run.generator.rules = type(rules)(**vars(rules) | {"parser": look})
    return run


def test_a_step_of_episodes_is_trained_saved_and_read_again(tmp_path, monkeypatch):
    run = made(tmp_path, monkeypatch)
    try:
        batch = loop_cases.sampled(run)
        rows = [r for g in batch.groups for r in g.rollouts]
        failed = torch.tensor([[r.failed is not None for r in g.rollouts] for g in batch.groups])
        assert failed.any() and not failed.all()
        assert torch.equal(~failed, batch.scorable) and torch.equal(failed, batch.masked)
        assert any(len(r.turns) > 1 for r in rows)
        assert {
            g.prompt_ids == run.prompts.groups_at(g.prompt_offset, 1)[0].prompt_ids
            for g in batch.groups
        } == {False}  # reset has put something into each
        progress = StepProgress(batch)
        prepare_advantages(run, batch, progress.updates)
        progress.mark_position()
        tensors, plain = dump_step(progress)
        again = load_step(tensors, plain, run.prompts).batch
        for group, other in zip(batch.groups, again.groups, strict=True):
            assert group.prompt_ids == other.prompt_ids
            for row, read in zip(group.rollouts, other.rollouts, strict=True):
                assert row.turns == read.turns or any(map(math.isnan, row.behaviour_logp))
                assert [t.sampled_ids for t in row.turns] == [t.sampled_ids for t in read.turns]
                assert [t.prompt_ids for t in row.turns] == [t.prompt_ids for t in read.turns]
                assert row.mask == read.mask and row.failed == read.failed
                assert row.episode_facts == read.episode_facts
        moved, line, _ = loop_cases.step(run, batch)
        assert float(moved.norm()) > 0 and math.isfinite(line["grad_norm"])
        assert line["agent/failures"] == float(failed.double().mean())
        assert line["agent/retokenised"] == 0 and line["agent/turns"] > 1
        assert line["completions/mean_length"] == sum(r.length for r in rows) / len(rows)
    finally:
        run.generator.close()
