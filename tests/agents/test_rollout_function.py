"""Episodes that a function of the user's plays: what it is given, and what it may return."""

import numpy as np
import pytest
from agent_cases import write_file
from assert_refused import assert_refused
from rollout_cases import VOCABULARY, answers, function_generator, play_function

from rloo_cli.agents.rollout import Config, load_tools
from rloo_cli.data.rollout_values import dump_rollout, load_rollout
from rloo_cli.rewards.engine.arguments import CompletionTable, RewardContext
from rloo_cli.utils.errors import ConfigError, GenerationError, Stopped
from rloo_cli.utils.rng import turn_seed


def two_turns(prompts, sampler):
    """A conversation of two turns, and a word of the environment's after the second."""
    first = sampler.sample(sampler.prompt_ids)
    got = [sampler.new_ids(t, [{"role": "user", "content": "more<|im_end|>"}]) for t in first]
    begun = [p + t.ids + n for p, t, n in zip(sampler.prompt_ids, first, got, strict=True)]
    order = [*range(len(prompts))][::-1]
    second = sampler.sample([begun[i] for i in order], rows=order)[::-1]
    last = sampler.render("bye")
    triples = [*zip(first, got, second, strict=True)]
    return {
        "prompt_ids": sampler.prompt_ids,
        "completion_ids": [a.ids + n + b.ids + last for a, n, b in triples],
        "logprobs": [
            [*a.logprobs, *[9.0] * len(n), *b.logprobs, *[None] * len(last)] for a, n, b in triples
        ],
        "env_mask": [
            [*[1] * len(a.ids), *[0] * len(n), *[1] * len(b.ids), *[0] * len(last)]
            for a, n, b in triples
        ],
    }


def test_what_a_function_returns_becomes_turns_and_only_what_was_sampled_is_trained():
    given = []

    def play(prompts, sampler):
        given.extend(prompts)
        return two_turns(prompts, sampler)

    generator = function_generator(play, lambda text, seed: f"said {seed}")
    groups = play_function(generator, prompts=2, k=2)
    assert given == [[{"role": "user", "content": "go"}]] * 4
    decode = generator.rules.renderer.tokenizer.decode
    for group in groups:
        for row in group.rollouts:
            second = f"said {turn_seed(row.seed, 1)}"
            assert [t.text for t in row.turns] == [f"said {row.seed}", second]
            assert row.terminated and row.weight_version == 5 and row.failed is None
            (got,) = row.turns[1].observation
            assert "<|im_start|>user\nmore< |im_end|>" in got["content"]
            own = [i for i, m in zip(row.completion_ids, row.mask, strict=True) if m]
            assert decode(own) == f"said {row.seed}<|im_end|>{second}<|im_end|>"
            assert row.sampled_logp == [-0.5] * row.length
            assert row.completion_ids[-1] == generator.rules.renderer.tokenizer.eos_token_id
            assert row.episode_facts["turns"] == 2 and row.episode_facts["ended_by"] == "answer"


def test_every_turn_has_a_seed_of_its_own_and_siblings_share_their_prompt():
    generator = function_generator(two_turns, lambda text, seed: "the same")
    play_function(generator, prompts=2, k=2)
    first, second = [0, 1, 100, 101], [101, 100, 1, 0]
    assert generator.inner.seeds[:4] == first
    assert sorted(generator.inner.seeds[4:]) == sorted(turn_seed(s, 1) for s in second)
    assert [len(wave) for wave in generator.inner.asked] == [2, 2]


def test_a_row_may_be_returned_as_arrays_and_sampled_in_a_way_of_its_own():
    own = np.array([7, 8, 9])

    def play(prompts, sampler):
        zero = np.zeros(3)
        return {"prompt_ids": [np.array([1, 2])] * 2, "completion_ids": [own] * 2,
                "logprobs": [zero - 1] * 2, "tool_mask": np.array([[0, 1, 1]] * 2)}  # fmt: skip

    generator = function_generator(play)
    generator.version = 3
    (group,) = play_function(generator)
    assert group.prompt_ids == [1, 2] and [r.opening_ids for r in group.rollouts] == [[1, 2]] * 2
    for row in group.rollouts:
        assert row.completion_ids == [7, 8, 9] and row.mask == [0, 1, 1]
        assert not row.terminated and row.episode_facts["ended_by"] == "completion"
        assert row.weight_version == 3 and row.finish_reason == "length"


def test_what_siblings_prompts_do_not_share_is_not_trained_on(sentence):
    def play(prompts, sampler):
        found = answers(prompts, sampler)
        return found | {"prompt_ids": [[1, 2, 3], [1, 2, 4]]}

    generator = function_generator(play)
    generator.inner.script = lambda text, seed: f"{seed}"
    with pytest.raises(GenerationError) as caught:
        play_function(generator)
    assert_refused(caught, 6, "row 0", where="agent.rollout", fix="sampler.sample")
    sentence(caught)
    (group,) = play_function(
        function_generator(
            lambda prompts, sampler: {
                "prompt_ids": [[1, 2, 3], [1, 2, 4]], "completion_ids": [[5], [6]],
                "logprobs": [[-1.0], [-1.0]],
            }
        )
    )  # fmt: skip
    assert group.prompt_ids == [1, 2]
    assert [r.completion_ids for r in group.rollouts] == [[3, 5], [4, 6]]
    assert [r.mask for r in group.rollouts] == [[0, 1], [0, 1]]


LP, IDS, MASK = "logprobs", "completion_ids", "env_mask"
WRONG = {
    "a list": lambda p, s: [1],
    "logprobs is missing": lambda p, s: {k: v for k, v in answers(p, s).items() if k != LP},
    "completion_ids has 1": lambda p, s: answers(p, s, **{IDS: [[5]]}),
    "logprobs[0] has 1": lambda p, s: answers(p, s, **{LP: [[-1.0], [-1.0]]}),
    "completion_ids[1]": lambda p, s: answers(p, s, **{IDS: [[5], []], LP: [[-1.0], []]}),
    f"entry 1 is {VOCABULARY}": lambda p, s: answers(
        p, s, **{IDS: [[5, VOCABULARY]] * 2, LP: [[-1.0, -1.0]] * 2}
    ),
    "prompt_ids[0]: entry 0": lambda p, s: answers(p, s, prompt_ids=[["a"], ["b"]]),
    "logprobs[1][0] is nan": lambda p, s: answers(
        p, s, **{IDS: [[5], [5]], LP: [[-1.0], [float("nan")]]}
    ),
    "logprobs[0][0] is 0.7": lambda p, s: answers(p, s, **{IDS: [[5], [5]], LP: [[0.7], [-1.0]]}),
    "logprobs[0][0] is not": lambda p, s: answers(
        p, s, **{IDS: [[5], [5]], LP: [[[-1.0]], [[-1.0]]]}
    ),
    "env_mask[0] has 1": lambda p, s: answers(p, s, **{MASK: [[1], [1]]}),
    "env_mask[0] has 2": lambda p, s: answers(p, s, **{MASK: [[2] * 6] * 2}),
    "env_mask[0] has no 1": lambda p, s: answers(p, s, **{MASK: [[0] * 6] * 2}),
    "env_mask and tool_mask": lambda p, s: answers(p, s, env_mask=[], tool_mask=[]),
    "agent.fields=[score]": lambda p, s: answers(p, s, score=[1.0, 2.0]),
}


@pytest.mark.parametrize("key", WRONG)
def test_what_is_wrong_with_what_a_function_returned_is_named(key, sentence):
    with pytest.raises(GenerationError) as caught:
        play_function(function_generator(WRONG[key]))
    problem = assert_refused(caught, 6, key, where="agent.rollout", fix="return {")
    assert problem.what.startswith("mine.py:play returned")
    sentence(problem.what)


@pytest.mark.parametrize(
    ("play", "keys", "key", "where"),
    [
        (two_turns, {"max_turns": 1}, "agent.max_turns = 1", "agent.rollout"),
        (two_turns, {"max_tokens": 10}, "more than 10", "agent.rollout"),
        (two_turns, {"context": 30}, "agent.max_episode_tokens", "agent.rollout"),
        (lambda p, s: s.sample([[1]]), {}, "1 lists", "sampler.sample"),
        (lambda p, s: s.sample([[1]], rows=[2]), {}, "row 2", "sampler.sample"),
        (lambda p, s: s.sample([[1], [1]], rows=[1, 1]), {}, "row 1", "sampler.sample"),
        (lambda p, s: s.sample([[1], []]), {}, "no ids", "sampler.sample"),
        (lambda p, s: s.sample([[1], [-1]]), {}, "entry 0 is -1", "sampler.sample"),
        (lambda p, s: 1 / 0, {}, "ZeroDivisionError", "agent.rollout"),
        (lambda p, s: exec("raise SystemExit(3)"), {}, "SystemExit: 3", "agent.rollout"),
        (lambda p, s: answers(p, s, a=[1, 2]), {"fields": ("a", "b")}, "b is", "agent.rollout"),
        (lambda p, s: answers(p, s, a=[1]), {"fields": ("a",)}, "a has 1", "agent.rollout"),
        (lambda p, s: answers(p, s, a={1}), {"fields": ("a",)}, "recorded", "agent.rollout"),
    ],
)
def test_a_function_that_goes_wrong_stops_the_run_and_is_named(play, keys, key, where, sentence):
    with pytest.raises(GenerationError) as caught:
        play_function(function_generator(play, **keys))
    assert_refused(caught, 6, key)
    assert_refused(caught, 6, where)
    if where == "sampler.sample":
        sentence(caught)


def test_a_stop_of_the_run_is_not_the_functions_error():
    def play(prompts, sampler):
        raise Stopped("a signal")

    with pytest.raises(Stopped):
        play_function(function_generator(play))


def test_there_is_room_until_turns_tokens_or_the_context_are_used_up():
    seen = {}

    def play(prompts, sampler):
        ids = sampler.prompt_ids[0]
        seen["begin"] = sampler.has_room(0, ids)
        found = answers(prompts, sampler)
        whole = ids + found["completion_ids"][0]
        seen["begun"], seen["tokens"] = len(ids), len(whole) - len(ids)
        seen["turns"] = sampler.has_room(0, whole)
        return found

    play_function(function_generator(play))
    assert seen["turns"]
    full = {"max_turns": 1}, {"max_tokens": 66}, {"context": seen["begun"] + 66}
    for keys in full:
        play_function(function_generator(play, **keys))
        assert seen["begin"] and not seen["turns"], keys
    assert seen["tokens"] == 6


def test_fields_are_columns_of_rewards_and_are_recorded():
    generator = function_generator(
        lambda p, s: answers(p, s, earned=np.array([0.5, 2.0]), step="one"),
        fields=("earned", "step"),
    )
    (group,) = play_function(generator)
    table = CompletionTable([group], RewardContext(True, None), 2)
    names = frozenset({"earned", "answer", "columns", "step"})
    arguments, _ = table.call_arguments([0, 1], names, {})
    wanted = {"earned": [0.5, 2.0], "answer": ["0", "0"], "step": ["one", "one"]}
    assert arguments == wanted | {"columns": wanted}
    assert table.call_arguments([1], None, {})[0]["earned"] == [2.0]
    row = group.rollouts[1]
    again = load_rollout(row.completion_ids, row.behaviour_logp, dump_rollout(row))
    assert again == row and again.columns == {"earned": 2.0, "step": "one"}


@pytest.mark.parametrize(
    ("name", "fields", "key", "fix"),
    [
        ("play", ["logprobs"], "agent.fields", "my_logprobs"),
        ("play", ["environments"], "agent.fields", "my_environments"),
        ("plai", [], "'plai'", "play"),
        ("NUMBER", [], "tools.py:NUMBER", "agent.rollout="),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_before_weights_load(
    tmp_path, name, fields, key, fix
):
    path = write_file(tmp_path, "NUMBER = 1\ndef play(prompts, sampler):\n    return {}\n")
    config = Config(
        kind="rollout", rollout=f"{path}:{name}", fields=fields, max_turns=2,
        max_episode_tokens=None, renderer="difference",
    )  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        load_tools(config)
    assert_refused(caught, 2, key, where="agent.", fix=fix)
