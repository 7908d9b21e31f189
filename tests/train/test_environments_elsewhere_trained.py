"""Training on the episodes of a server: two steps, and its death in the middle of an episode."""

import json
import math

import loop_cases
import pytest
import torch
from environment_servers import page_server_started

pytestmark = pytest.mark.process

WORDS = (
    "data.path=make:tiny_chat", "agent=http", "agent.max_turns=3", "agent.parser=hermes",
    "agent.max_observation_tokens=12", "reward=environment", "generation.max_completion_length=6",
    "train.prompts_per_step=3", "algorithm.num_generations=4", "data.eval_split=null",
)  # fmt: skip
# Half of the tokens end a turn: most answers are whole, and have a call.
ENDS = f"generation.stop_token_ids={[*range(10, 258, 2)]}".replace(" ", "")


def made(tmp_path, url):
    """A run in which every answer adds to the counter, by the number of its characters."""
    run = loop_cases.make(tmp_path, *WORDS, f"agent.url={url}", ENDS, rewards={})
    rules = run.generator.rules

    def add(text):
        call = {"name": "add", "arguments": {"by": min(len(text), 4)}}
        return rules.parser(f"<tool_call>{json.dumps(call)}</tool_call>")

    run.generator.rules = type(rules)(**vars(rules) | {"parser": add})
    return run


def test_two_steps_are_trained_and_a_server_killed_in_mid_episode_leaves_its_rows_out(tmp_path):
    with page_server_started(tmp_path) as (url, process):
        run = made(tmp_path, url)
        try:
            run.ledger.open(run.prompts, run.config, 0, 0)
            for _ in range(2):
                place = run.state.place
                moved, line, batch = loop_cases.step(run)
                assert float(moved.norm()) > 0 and math.isfinite(line["grad_norm"])
                run.ledger.step(batch, place, 1)  # a reset that says something is the same prompt
                assert line["agent/failures"] == 0 and line["agent/retokenised"] == 0
                assert line["agent/turns"] > 1 and len(set(batch.score.flatten().tolist())) > 2
            parse, heard = run.generator.rules.parser, []

            def kill_then_parse(text):
                heard.append(text)
                if len(heard) == 13:  # the first of the second turns
                    process.kill()
                    process.wait()
                return parse(text)

            rules = run.generator.rules
            run.generator.rules = type(rules)(**vars(rules) | {"parser": kill_then_parse})
            batch = loop_cases.sampled(run)
            rows = [row for group in batch.groups for row in group.rollouts]
            failed = torch.tensor([row.failed is not None for row in rows])
            assert failed.any() and any(len(row.turns) > 1 for row in rows)
            assert torch.equal(~failed, batch.scorable.flatten())
            assert all(url in row.failed for row in rows if row.failed)
            _, line, _ = loop_cases.step(run, batch)
            assert line["agent/failures"] == float(failed.double().mean())
        finally:
            run.generator.close()
