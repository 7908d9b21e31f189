"""A step of episodes has the gradient of TRL 1.16.0's GRPOTrainer with the same tool.

TRL parses the turns, calls the tool, renders what it answers and goes on by itself; only what is
sampled is given to it, turn by turn. Its sequences, its mask of the model's own tokens, its
advantages, its loss and its gradient are then compared with ours.
"""

from unittest import mock

import pytest
import torch
from agent_cases import call_text, write_file
from loop_cases import PLAIN, digits
from trl_cases import both, gaps

from rloo_cli.agents.common.call_parsers import parse_hermes
from rloo_cli.agents.common.turn_rendering import call_message
from rloo_cli.data.batch import Rollout
from rloo_cli.generation import GeneratorBase

pytestmark = pytest.mark.trl

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] or '' }}"
    "{% for call in m['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>"
    "{% endfor %}<eos>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOL = '''
def look(at: int) -> str:
    """Looks at something.

    Args:
        at: Its number.
    """
    return "nothing " * (at % 4) + str(at * at)
'''
WORDS = (
    *PLAIN, "data.path=make:tiny_chat", "agent=tools", "agent.max_turns=3", "agent.parser=hermes",
    "agent.max_observation_tokens=64", "agent.workers=0", "generation.max_completion_length=80",
    "train.prompts_per_step=4", "algorithm.num_generations=4", "train.micro_batch_size=8",
)  # fmt: skip


class Talker(GeneratorBase):
    """A sampler whose turns depend on the seed alone: calls, and answers of some lengths."""

    tolerance = 0.0

    def __init__(self, tokenizer):
        self.tokenizer, self.metrics = tokenizer, {}

    def load(self, policy, version):
        pass

    def close(self):
        pass

    def generate(self, groups, seeds, arrived, **options):
        for i, (group, own) in enumerate(zip(groups, seeds, strict=True)):
            group.rollouts = [self.say(seed) for seed in own]
            arrived(i)

    def say(self, seed):
        text = call_text("look", at=seed % 1000) if seed % 3 else "so " * (1 + seed % 5)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return Rollout([*ids, self.tokenizer.eos_token_id], text, "stop", True, seed, 0)


def read_by_trl(tokenizer, ids, **_):
    """What our parser makes of a turn, in the form that TRL's loop takes."""
    calls = parse_hermes(tokenizer.decode(ids)).calls
    return {
        "role": "assistant", "content": "",
        **({"tool_calls": [call_message(i, c) for i, c in enumerate(calls)]} if calls else {}),
    }  # fmt: skip


@pytest.mark.slow_but("words0")
@pytest.mark.parametrize(
    "words",
    [
        ("algorithm=grpo", "algorithm.loss_type=dapo", "algorithm.num_iterations=2",
         "train.learning_rate=0.1"),
        ("algorithm=grpo", "algorithm.loss_type=grpo", "algorithm.beta=0.3"),
    ],
)  # fmt: skip
def test_a_step_of_episodes_is_that_of_trl_with_the_same_tool(tmp_path, words):
    spec = f"{write_file(tmp_path, TOOL)}:look"
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    given = (f"agent.tools=['{spec}']", f"model.chat_template={tmp_path / 'chat.jinja'}")
    space = {}
    exec(TOOL, space)
    with mock.patch("trl.trainer.grpo_trainer.parse_response", read_by_trl):
        ours, theirs = both(
            tmp_path, *WORDS, *given, *words, rewards={"digits": digits}, trainer="GRPO",
            tools=[space["look"]], inner=Talker, max_completion_length=2000,
            max_tool_calling_iterations=2,
        )  # fmt: skip
    rows = [r for g in ours.batch.groups for r in g.rollouts]
    assert {len(row.turns) for row in rows} == {1, 2, 3}
    scored = theirs.scored[-1]
    for i, row in enumerate(rows):
        kept = scored["completion_mask"][i] > 0
        assert scored["completion_ids"][i][kept].tolist() == row.completion_ids
        assert scored["tool_mask"][i][kept].tolist() == row.mask
    torch.testing.assert_close(
        theirs.advantages(ours.batch), ours.batch.advantage, atol=1e-5, rtol=0
    )
    assert max(gaps(ours, theirs)[:1]) < 1e-5 and max(gaps(ours, theirs)) < 1e-4
    if len(ours.gradients) == 1:  # GRPOTrainer divides each micro-batch's loss by their number
        assert sum(theirs.parts) == pytest.approx(ours.row["loss"], abs=1e-5)
