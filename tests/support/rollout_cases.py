"""Functions that play episodes, and runs that they play in."""

from collections.abc import Callable
from typing import Any

from agent_cases import ScriptedSampler, chat_tokenizer

from rloo_cli.agents.common.turn_rendering import TurnRenderer
from rloo_cli.agents.rollout_function.generator import FunctionGenerator
from rloo_cli.agents.rollout_function.turn_sampler import FunctionRules
from rloo_cli.config.schema import GenerationConfig
from rloo_cli.data.batch import Group
from rloo_cli.data.render import render_prompt

VOCABULARY = 300
# As a user writes it: two turns, with a word of the environment's between them, and its own reward.
TWO_TURNS = """
def play(prompts, sampler):
    first = sampler.sample(sampler.prompt_ids)
    rows = [
        {"prompt_ids": ids, "completion_ids": list(t.ids), "logprobs": list(t.logprobs),
         "env_mask": [1] * len(t.ids), "earned": float(len(t.ids))}
        for ids, t in zip(sampler.prompt_ids, first)
    ]
    going = [i for i, t in enumerate(first) if t.finish_reason == "stop"]
    told = {}
    for i in going:
        told[i] = sampler.render("and then? ")
    whole = {i: rows[i]["prompt_ids"] + rows[i]["completion_ids"] + told[i] for i in going}
    going = [i for i in going if sampler.has_room(i, whole[i])]
    for i, t in zip(going, sampler.sample([whole[i] for i in going], rows=going) if going else []):
        rows[i]["completion_ids"] += told[i] + list(t.ids)
        rows[i]["logprobs"] += [0.0] * len(told[i]) + list(t.logprobs)
        rows[i]["env_mask"] += [0] * len(told[i]) + [1] * len(t.ids)
    return {name: [row[name] for row in rows] for name in rows[0]}
"""


def function_generator(
    function: Callable[..., object], script: Callable[[str, int], str] = lambda text, seed: "hello",
    context: int | None = None, max_turns: int = 3, max_tokens: int | None = None,
    fields: tuple[str, ...] = (),
) -> FunctionGenerator:  # fmt: skip
    """Episodes that a function plays, sampled by a script."""
    tokenizer = chat_tokenizer()
    stop = {tokenizer.eos_token_id}
    generation = GenerationConfig.model_construct(max_completion_length=64, chat_template_kwargs={})
    rules = FunctionRules(
        renderer=TurnRenderer(tokenizer, {}, stop), generation=generation, max_turns=max_turns,
        max_episode_tokens=max_tokens, context_length=context, max_sampled_tokens=64 * max_turns,
        vocab_size=VOCABULARY, stop_ids=stop, fields=fields,
    )  # fmt: skip
    sampler: Any = ScriptedSampler(tokenizer, script, version=5)
    return FunctionGenerator(sampler, rules, function, "mine.py:play")


def play_function(generator: FunctionGenerator, prompts: int = 1, k: int = 2) -> list[Group]:
    """Episodes of that many prompts, K each."""
    prompt = [{"role": "user", "content": "go"}]
    ids = render_prompt(prompt, generator.rules.renderer.tokenizer, {})
    groups = [Group(i, {"answer": str(i)}, prompt, list(ids)) for i in range(prompts)]
    generator.generate(groups, [[100 * i + j for j in range(k)] for i in range(prompts)])
    return groups


def answers(prompts: Any, sampler: Any, **more: Any) -> dict[str, Any]:
    """What a function returns that asks for one answer each, with `more` of its fields."""
    turns = sampler.sample(sampler.prompt_ids)
    found = {
        "prompt_ids": sampler.prompt_ids,
        "completion_ids": [t.ids for t in turns],
        "logprobs": [t.logprobs for t in turns],
    }
    return found | more
