"""Training on episodes: what a step computes, saves and leaves out."""

import math

import loop_cases
import pytest
import torch
from agent_cases import call_text, class_agent, episode_generator, play, write_file
from assert_refused import assert_refused

from rloo_cli.checkpoint.step_state import dump_step, load_step
from rloo_cli.run import StepProgress
from rloo_cli.train.advantages import prepare_advantages
from rloo_cli.utils.errors import ConfigError, DataError

pytestmark = pytest.mark.process

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


def made(tmp_path, *words, text=TOOL):
    """A run in which every answer calls the tool, whatever it says."""
    path = write_file(tmp_path, text)
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


def test_a_step_of_episodes_is_trained_saved_and_read_again(tmp_path):
    run = made(tmp_path)
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


OPENS = '''
class World:
    def reset(self, seed, **row):
        self.seed, self.row = seed, row
        return [{"type": "text", "text": f"Room {row['room']}: "}, {"type": "text", "text": "go"}]

    def look(self) -> str:
        """Looks around."""
        return "nothing"

    def get_reward(self) -> float:
        return self.seed % 10 / 10
'''


def test_rows_without_a_prompt_are_trained_with_what_reset_says(tmp_path):
    """TRL's rows whose prompt is the environment's: no column of them, data.prompt_column=null."""
    rows = write_file(tmp_path, "".join(f'{{"room": {n}}}\n' for n in range(6)), "rows.jsonl")
    asked = (f"data.path={rows}", "data.split=train", "data.prompt_column=null")
    run = made(tmp_path, *asked, text=OPENS)
    try:
        moved, line, batch = loop_cases.step(run)
        assert float(moved.norm()) > 0 and line["agent/failures"] == 0
        for group in batch.groups:
            room = group.example["room"]
            assert f"Room {room}: go" in run.tokenizer.decode(group.prompt_ids)
            assert {r.environment["row"]["room"] for r in group.rollouts} == {room}
            assert all("prompt" not in r.environment["row"] for r in group.rollouts)
    finally:
        run.generator.close()
    given = write_file(tmp_path, '{"prompt": "x"}\n', "given.jsonl")
    with pytest.raises(DataError, match=r"or 'data.columns="):
        made(tmp_path, *asked, f"data.path={given}", text=OPENS)
    with pytest.raises(ConfigError) as refused:
        loop_cases.checked((), ("data.prompt_column=null",))
    assert_refused(refused, 2, where="data.prompt_column", fix="agent=class")


EARNING = '''
import random


class World:
    def reset(self, **row):
        self.earned = []

    def look(self) -> str:
        """Looks around."""
        return "nothing"

    def get_turn_reward(self) -> float:
        self.earned.append(random.random())
        return self.earned[-1]

    def get_reward(self) -> float:
        return 10.0
'''
CREDIT = ("algorithm.turn_rewards=credit", "algorithm.policy_loss=reinforce", "algorithm.beta=0.0")


def credit_by_hand(rows, weight):
    """Each turn's return to go less the mean of the siblings', by the words of the definition."""
    earned = [[weight * (turn.reward or 0.0) for turn in row.turns] for row in rows]
    to_go = [[weight * 10.0 + sum(e[t:]) for t in range(len(e))] for e in earned]
    found = []
    for i, own in enumerate(to_go):
        others = [g for j, g in enumerate(to_go) if j != i]
        for t, value in enumerate(own):
            same = [g[t] for g in others if len(g) > t] or [g[-1] for g in others]
            found.append([value - sum(same) / len(same)] * len(rows[i].turns[t].sampled_ids))
    return torch.tensor([a for part in found for a in part])


def test_a_turns_tokens_are_trained_with_what_is_earned_from_that_turn_on(tmp_path):
    run = made(tmp_path, *CREDIT, "reward.environment.weight=0.5", text=EARNING)
    try:
        batch = loop_cases.sampled(run)
        rows = [r for g in batch.groups for r in g.rollouts]
        assert len({len(row.turns) for row in rows}) > 1
        for row in rows:
            earned = [turn.reward for turn in row.turns if turn.reward is not None]
            assert row.environment["earned"] == earned
            assert len(earned) == row.episode_facts["calls"]
            assert row.environment_reward == 10.0 + sum(earned)
        assert batch.score.flatten().tolist() == [0.5 * row.environment_reward for row in rows]
        moved, line, _ = loop_cases.step(run, batch)
        for group in batch.groups:
            wanted = credit_by_hand(group.rollouts, 0.5)
            torch.testing.assert_close(torch.cat(group.advantage), wanted, rtol=0, atol=1e-5)
        assert float(moved.norm()) > 0 and math.isfinite(line["loss"])
    finally:
        run.generator.close()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("raise ValueError('no idea')", "get_turn_reward: ValueError: no idea"),
        ("return float('inf')", "get_turn_reward: it is inf, not a finite number"),
    ],
)
def test_a_turn_reward_that_fails_leaves_the_row_out_and_is_never_a_zero(tmp_path, body, why):
    path = write_file(tmp_path, EARNING.replace("return self.earned[-1]", body))
    config = class_agent({"world": f"{path}:World"}, max_turns=2)
    generator = episode_generator(config, lambda *_: call_text("look"))
    (group,) = play(generator)
    assert group.rollouts[0].failed == why and group.rollouts[0].environment_reward is None


def test_a_turn_may_earn_nothing_and_an_answer_is_not_asked_for(tmp_path):
    path = write_file(tmp_path, EARNING.replace("return self.earned[-1]", "return None"))
    config = class_agent({"world": f"{path}:World"}, max_turns=3)
    said = iter([call_text("look"), call_text("other"), "the end"])
    (group,) = play(episode_generator(config, lambda *_: next(said)))
    (row,) = group.rollouts
    assert [turn.reward for turn in row.turns] == [None, None, None]
    assert len(row.environment["earned"]) == 1 and row.environment_reward == 10.0


def test_turns_of_an_episode_keep_their_sampling_masks_and_its_step_is_exact(tmp_path):
    words = ("generation.top_p=0.5", "generation.return_sampling_mask=true")
    run = made(tmp_path, *words, "algorithm.correction.mode=truncate")
    try:
        run.generator.load(run.policy, run.state.updates)
        batch = loop_cases.sampled(run)
        again = load_step(*dump_step(StepProgress(batch)), run.prompts).batch
        _, row, _ = loop_cases.step(run, batch)
    finally:
        run.generator.close()
    rows = [r for g in batch.groups for r in g.rollouts if r.failed is None]
    assert any(len(r.turns) > 1 for r in rows)
    assert all(len(r.sampling_mask) == r.length for r in rows)
    assert row["sampling/importance_sampling_ratio/max"] == pytest.approx(1.0, abs=1e-4)
    assert row["sampling/importance_sampling_ratio/min"] == pytest.approx(1.0, abs=1e-4)
    found = [r for g in again.groups for r in g.rollouts if r.failed is None]
    assert [r.sampling_mask for r in found] == [r.sampling_mask for r in rows]
    assert [[t.sampling_mask for t in r.turns] for r in found] == [
        [t.sampling_mask for t in r.turns] for r in rows
    ]
