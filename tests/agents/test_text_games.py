"""Games of TextWorld as environments, and the chat template with tools that comes with them."""

import importlib.util

import pytest
from agent_cases import call_text, chat_tokenizer, class_agent, episode_generator, play
from assert_refused import assert_refused

from rloo_cli.agents import class_
from rloo_cli.agents.common import call_parsers
from rloo_cli.agents.common.turn_rendering import TurnRenderer
from rloo_cli.config import synthetic
from rloo_cli.data.synthetic import text_games
from rloo_cli.utils.errors import MachineError

GAME = "rloo_cli.data.synthetic.text_games:TextWorldGame"
AGENT = {"max_tool_s": 120.0, "max_observation_tokens": 2000, "max_turns": 6, "workers": 0}


def test_a_game_without_its_package_is_refused_with_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MachineError) as caught:
        class_.preflight(class_agent({"game": GAME}))
    assert_refused(caught, 3, "textworld", "agent.environments.game", fix="rloo-cli[textworld]")


def test_held_out_games_are_others():
    rows = {split: text_games.text_game_examples(split) for split in ("train", "test")}
    seeds = {split: {row["game"] for row in rows[split]} for split in rows}
    assert len(seeds["train"]) == 24 and len(seeds["test"]) == 8
    assert not seeds["train"] & seeds["test"]


def test_our_chat_template_shows_tools_calls_and_what_they_answer():
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = synthetic.template_path("make:chatml_tools").read_text()
    assert call_parsers.choose_parser("auto", tokenizer)[0] == "hermes"
    schema = {"type": "function", "function": {"name": "act", "description": "Acts.",
              "parameters": {"type": "object", "properties": {}}}}  # fmt: skip
    renderer = TurnRenderer(tokenizer, {}, {tokenizer.eos_token_id})
    renderer.check_template([schema])
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "go"}]
    text = tokenizer.apply_chat_template(messages, tools=[schema], tokenize=False)
    assert '"name": "act"' in text and text.count("Be kind.") == 1 and text.count("system") == 1
    plain = tokenizer.apply_chat_template(messages[1:], tokenize=False, add_generation_prompt=True)
    assert plain == "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.slow
def test_a_real_game_is_played_to_its_end(tmp_path, monkeypatch):
    pytest.importorskip("textworld", reason="textworld is not installed (the extra textworld)")
    monkeypatch.setenv("RLOO_CACHE", str(tmp_path))
    solution = iter(["dance", "take cloak from display", "go north", "go south", "drop cloak"])
    generator = episode_generator(
        class_agent({"game": GAME}, **AGENT), lambda *_: call_text("act", command=next(solution))
    )
    (group,) = play(generator, {"game": 0})
    (row,) = group.rollouts
    got = [turn.observation[0]["content"] for turn in row.turns[1:]]
    assert "not a verb I recognise" in got[0] and "=-" not in got[0]
    assert "Commands: " in got[0] and "take cloak" in got[0]
    assert row.episode_facts["ended_by"] == "done" and row.environment["won"] is True
    assert row.environment_reward == 1.0 and row.environment["moves"] == 5
