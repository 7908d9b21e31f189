"""`rloo plan` of runs with an agent: turns, what tools say, and what both take."""

import json
from typing import Any

import pytest
from plan_cases import GPU, SMALL, case, checked

from rloo_cli.cli import plan as verb
from rloo_cli.planning import duration, peak_memory
from rloo_cli.planning.plan_inputs import PlanInputs, collect_plan_inputs
from rloo_cli.planning.vllm_memory import estimate_engine_memory
from rloo_cli.utils.errors import ConfigError

TOOLS = (
    "agent=tools", "agent.tools=[rloo_cli.data.synthetic.tool_tasks:multiply]", "data.chat=true",
    "agent.max_turns=4", "agent.max_observation_tokens=36", "generation.max_completion_length=25",
)  # fmt: skip
BETWEEN = 36 + 64  # with what a chat template puts around it
WIDE = SMALL | {"max_position_embeddings": 4096}


def episodes(*words: str, **more: Any) -> PlanInputs:
    return case(*TOOLS, *words, values=WIDE, **more)


def test_an_episode_has_its_turns_and_what_tools_say_between_them() -> None:
    found = episodes()
    assert (found.max_turns, found.max_sampled_tokens) == (4, 4 * 25)
    assert found.max_completion_tokens == 4 * (25 + BETWEEN)
    assert episodes("agent.max_episode_tokens=120").max_completion_tokens == 120
    assert case(*TOOLS, values=SMALL).max_completion_tokens == 256 - 20  # what the context leaves
    alone = case("generation.max_completion_length=25", values=WIDE)
    assert (alone.max_turns, alone.max_completion_tokens, alone.max_sampled_tokens) == (1, 25, 25)


def test_a_forward_holds_whole_episodes_and_the_head_what_was_sampled() -> None:
    found = episodes("train.micro_batch_size=4", "algorithm.num_generations=4")
    forward = peak_memory.estimate_peak_memory(found).forward
    assert forward.tokens == 20 + 4 * 4 * (25 + BETWEEN) == found.group_tokens
    assert forward.completion_tokens == 4 * 4 * 25


def test_the_cache_of_a_sampler_holds_the_whole_episode_of_each() -> None:
    words = ("train.prompts_per_step=2", "algorithm.num_generations=4")
    found = episodes(*words)
    rollout = peak_memory.estimate_peak_memory(found).phases["rollout"]
    token = found.model.kv_bytes(found.bytes_per_weight)
    whole = 2 * 4 * (20 + 4 * (25 + BETWEEN))
    assert rollout["KV cache"] == pytest.approx(token * whole)
    engine = estimate_engine_memory(episodes(*words, "generation=vllm_colocate"))
    assert engine is not None and engine.least_kv_bytes == token * (20 + 4 * (25 + BETWEEN))


def test_mean_lengths_are_half_of_the_limits_or_what_was_said() -> None:
    found = episodes()
    half = duration.mean_token_lengths(found, None, None)
    assert (half.turns, half.sampled, half.completion) == (2, 25, 25 + 18)
    got = duration.mean_token_lengths(found, 10, 60, 3, 20)
    assert (got.prompt, got.turns, got.sampled, got.completion) == (10, 3, 60, 100)
    short = episodes("agent.max_episode_tokens=70")
    most = duration.mean_token_lengths(short, 10, 60, 3, 20)
    assert most.completion == 70  # an episode is not longer than its limit


def test_later_turns_are_read_whole_by_what_keeps_no_cache() -> None:
    words = ("train.prompts_per_step=2", "algorithm.num_generations=4")
    means = duration.MeanLengths(prompt=10, completion=90, sampled=60, turns=3)
    # Turn 2 reads 10 + 30, turn 3 reads 10 + 60, of 8 episodes; a group's prompt is read once.
    assert duration.prefilled_tokens(episodes(*words), means) == 2 * 10 + 8 * (40 + 70)
    cached = episodes(*words, "generation=vllm_colocate")
    assert cached.run.generation.colocate.enable_prefix_caching  # type: ignore[attr-defined]
    assert duration.prefilled_tokens(cached, means) == 2 * 10 + 8 * 30
    one = duration.MeanLengths(prompt=10, completion=60, sampled=60)
    assert duration.prefilled_tokens(case(*words), one) == 2 * 10


def test_the_plan_says_how_long_episodes_are_taken_to_be(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["+recipe=tools_mini", "--gpu=80GiB", "--json"]
    assert verb.run(words) == 0
    half = json.loads(capsys.readouterr().out)
    assert (
        verb.run([*words, "--turns", "2", "--completion-tokens", "14", "--observation-tokens", "4"])
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["mean_lengths"] | {"prompt": 0} == {
        "prompt": 0, "completion": 18, "sampled": 14, "turns": 2,
    }  # fmt: skip
    said = " ".join(found["assumed"])
    for number in ("3 turns", "10 sampled tokens", "2 turns: 14 sampled", "4 read"):
        assert number in said
    assert "--turns N" not in said and "--turns N" in " ".join(half["assumed"])
    assert found["tokens_per_step"] > half["tokens_per_step"]


@pytest.mark.parametrize("flag", ["--turns=2", "--observation-tokens=2"])
def test_flags_of_episodes_are_refused_for_single_answers(flag: str) -> None:
    with pytest.raises(ConfigError, match="need an agent"):
        verb.run(["+recipe=smoke", "--gpu=80GiB", flag])
    with pytest.raises(ConfigError, match="--turns MEAN"):
        verb.run(["+recipe=smoke", "--gpu=80GiB", "--turns=0.5"])


def test_a_context_that_holds_no_longest_prompt_and_episode_is_shared_by_both() -> None:
    words = (*TOOLS, "data.max_prompt_length=null")
    found = collect_plan_inputs(checked(*words), GPU)
    assert found.model.context_length == 2048
    assert (found.max_prompt_tokens, found.max_completion_tokens) == (2048 - 500, 500)
    long = collect_plan_inputs(checked(*words, "agent.max_turns=40"), GPU)
    assert (long.max_prompt_tokens, long.max_completion_tokens) == (1024, 1024)
