"""Episodes that a function of the user's plays: what it is given, and what it may return."""

import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest
from agent_cases import write_file
from rollout_cases import VOCABULARY, answers, function_generator, play_function

from rloo_cli.agents.rollout import Config, load_tools
from rloo_cli.data.rollout_values import dump_rollout, load_rollout
from rloo_cli.rewards.engine.arguments import CompletionTable, RewardContext
from rloo_cli.utils.errors import ConfigError, GenerationError, Stopped
from rloo_cli.utils.rng import turn_seed


def two_turns(prompts, sampler):
    """A conversation of two turns, and a word of the environment's after the second."""
    first = sampler.sample(sampler.prompt_ids)
    told = [sampler.new_ids(t, [{"role": "user", "content": "more<|im_end|>"}]) for t in first]
    begun = [p + t.ids + n for p, t, n in zip(sampler.prompt_ids, first, told, strict=True)]
    order = [*range(len(prompts))][::-1]
    second = sampler.sample([begun[i] for i in order], rows=order)[::-1]
    last = sampler.render("bye")
    triples = [*zip(first, told, second, strict=True)]
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
            (told,) = row.turns[1].observation
            assert "<|im_start|>user\nmore< |im_end|>" in told["content"]
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


def test_what_siblings_prompts_do_not_share_is_not_trained_on():
    def play(prompts, sampler):
        found = answers(prompts, sampler)
        return found | {"prompt_ids": [[1, 2, 3], [1, 2, 4]]}

    generator = function_generator(play)
    generator.inner.script = lambda text, seed: f"{seed}"
    with pytest.raises(GenerationError, match="sampled after other ids than those that stand"):
        play_function(generator)
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
    "it is a list, not a dict": lambda p, s: [1],
    "there is no logprobs; it has prompt_ids, completion_ids": lambda p, s: {
        k: v for k, v in answers(p, s).items() if k != LP
    },
    "completion_ids has 1 entries for 2 prompts": lambda p, s: answers(p, s, **{IDS: [[5]]}),
    r"logprobs\[0\] has 1 entries for 6 completion_ids": lambda p, s: answers(
        p, s, **{LP: [[-1.0], [-1.0]]}
    ),
    r"completion_ids\[1\] is empty": lambda p, s: answers(
        p, s, **{IDS: [[5], []], LP: [[-1.0], []]}
    ),
    rf"completion_ids\[0\]: entry 1 is {VOCABULARY}, and the vocabulary has ids 0 to": (
        lambda p, s: answers(p, s, **{IDS: [[5, VOCABULARY]] * 2, LP: [[-1.0, -1.0]] * 2})
    ),
    r"prompt_ids\[0\]: entry 0 is not an id: 'a'": lambda p, s: answers(
        p, s, prompt_ids=[["a"], ["b"]]
    ),
    r"logprobs\[1\]\[0\] is nan; a log-probability is finite and at most 0": lambda p, s: answers(
        p, s, **{IDS: [[5], [5]], LP: [[-1.0], [float("nan")]]}
    ),
    r"logprobs\[0\]\[0\] is 0.7": lambda p, s: answers(
        p, s, **{IDS: [[5], [5]], LP: [[0.7], [-1.0]]}
    ),
    r"logprobs\[0\]\[0\] is not a number: \[-1.0\]": lambda p, s: answers(
        p, s, **{IDS: [[5], [5]], LP: [[[-1.0]], [[-1.0]]]}
    ),
    r"env_mask\[0\] has 1 entries for 6 completion_ids": lambda p, s: answers(
        p, s, **{MASK: [[1], [1]]}
    ),
    r"env_mask\[0\] has 2; 1 = the policy's own token": lambda p, s: answers(
        p, s, **{MASK: [[2] * 6] * 2}
    ),
    r"env_mask\[0\] has no 1: nothing in this row was sampled": lambda p, s: answers(
        p, s, **{MASK: [[0] * 6] * 2}
    ),
    "both env_mask and tool_mask": lambda p, s: answers(p, s, env_mask=[], tool_mask=[]),
    r"agent.fields does not name score: agent.fields=\[score\]": lambda p, s: answers(
        p, s, score=[1.0, 2.0]
    ),
}


@pytest.mark.parametrize("why", WRONG)
def test_what_is_wrong_with_what_a_function_returned_is_named(why):
    with pytest.raises(GenerationError, match=f"mine.py:play returned something else: .*{why}"):
        play_function(function_generator(WRONG[why]))


@pytest.mark.parametrize(
    ("play", "keys", "why"),
    [
        (two_turns, {"max_turns": 1}, "tokens of the policy's|has 2 turns, more than"),
        (two_turns, {"max_tokens": 10}, "tokens after its prompt, more than 10"),
        (two_turns, {"context": 30}, "tokens after its prompt, more than"),
        (lambda p, s: s.sample([[1]]), {}, "1 lists of ids for 2 rows"),
        (lambda p, s: s.sample([[1]], rows=[2]), {}, "there is no row 2"),
        (lambda p, s: s.sample([[1], [1]], rows=[1, 1]), {}, "row 1 is asked for twice"),
        (lambda p, s: s.sample([[1], []]), {}, "there are no ids to go on from"),
        (lambda p, s: s.sample([[1], [-1]]), {}, "entry 0 is -1"),
        (lambda p, s: 1 / 0, {}, "(?s)mine.py:play raised an error.*ZeroDivisionError"),
        (lambda p, s: exec("raise SystemExit(3)"), {}, "(?s)raised an error.*SystemExit: 3"),
        (lambda p, s: answers(p, s, a=[1, 2]), {"fields": ("a", "b")}, "there is no b, which"),
        (lambda p, s: answers(p, s, a=[1]), {"fields": ("a",)}, "a has 1 entries for 2 prompts"),
        (lambda p, s: answers(p, s, a={1}), {"fields": ("a",)}, "a cannot be recorded"),
    ],
)
def test_a_function_that_goes_wrong_stops_the_run_and_is_named(play, keys, why):
    with pytest.raises(GenerationError, match=why):
        play_function(function_generator(play, **keys))


def test_a_function_that_needs_a_main_thread_stops_the_run_though_it_catches_the_error():
    def play(prompts, sampler):
        with suppress(ValueError):
            signal.alarm(5)
        return two_turns(prompts, sampler)

    with ThreadPoolExecutor(1) as sampler_thread:
        played = sampler_thread.submit(play_function, function_generator(play))
        with pytest.raises(GenerationError) as refused:
            played.result()
    assert refused.value.problems[0].fix == "generation.overlap=none"


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
    ("name", "fields", "why"),
    [
        ("play", ["logprobs"], "agent.fields names 'logprobs'"),
        ("play", ["environments"], "agent.fields names 'environments'"),
        ("plai", [], "has no 'plai'"),
        ("NUMBER", [], "is not callable"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_before_weights_load(tmp_path, name, fields, why):
    path = write_file(tmp_path, "NUMBER = 1\ndef play(prompts, sampler):\n    return {}\n")
    config = Config(
        kind="rollout", rollout=f"{path}:{name}", fields=fields, max_turns=2,
        max_episode_tokens=None, renderer="difference",
    )  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        load_tools(config)
    (problem,) = caught.value.problems
    assert why in f"{problem.what} {problem.why} {problem.fix}"
