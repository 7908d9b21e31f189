"""Forced answers (generation.answer_budget): what is sampled, and what the text between it is."""

import math
from functools import partial

import pytest
from generation_cases import (
    EOS,
    PROMPTS,
    SEEDS,
    config,
    generator,
    ids,
    make,
    processed,
    sample,
    tokenizer,
)

from rloo_cli.config.schema import AnswerBudget
from rloo_cli.data.batch import Group
from rloo_cli.data.vocabulary import answer_budget_ids
from rloo_cli.generation.common.forced_answers import ForcedAnswers
from rloo_cli.utils.errors import ConfigError

TEXT = [20, 21]  # the ids of the text
AT, TOKENS = 5, 3
both = pytest.mark.parametrize("shared", ["auto", False])  # keys of a prompt kept once, or K times


@pytest.fixture
def model():
    """One whose completions end about half of the time before the budget."""
    found = make()
    ends = [EOS, *range(3, 40, 8)]
    found.config.eos_token_id = found.generation_config.eos_token_id = ends
    yield found
    found.config.eos_token_id = found.generation_config.eos_token_id = EOS


def forced(model, shared="auto", at=AT, tokens=TOKENS, **changes):
    budget = AnswerBudget(at=at, text="any", tokens=tokens)
    return ForcedAnswers(generator(model, shared_prompt=shared, **changes), budget,
                         tokenizer(), TEXT)  # fmt: skip


def drawn(source, prompts=PROMPTS, seeds=SEEDS, **how):
    return [(p, r) for p, group in zip(prompts, sample(source, prompts, seeds, **how), strict=True)
            for r in group]  # fmt: skip


@both
def test_a_completion_that_ends_in_time_is_the_same_to_the_last_bit(model, shared):
    plain = drawn(generator(model, shared_prompt=shared))
    budget = drawn(forced(model, shared))
    in_time = [r.terminated and r.length <= AT for _, r in plain]
    assert any(in_time) and not all(in_time)
    for ended, (_, was), (_, found) in zip(in_time, plain, budget, strict=True):
        assert found.has_forced_answer is not ended
        assert found.completion_ids[:AT] == was.completion_ids[:AT]
        assert found.behaviour_logp[:AT] == was.behaviour_logp[:AT]
        if ended:
            assert found == was


@both
def test_text_and_answer_follow_at_the_budget_and_never_exceed_it(model, shared):
    rows = [r for _, r in drawn(forced(model, shared)) if r.has_forced_answer]
    assert {r.terminated for r in rows} == {True, False}  # answers, too, end or are cut
    for r in rows:
        answer = len(r.completion_ids) - AT - len(TEXT)
        assert 1 <= answer <= TOKENS and r.length == AT + answer
        assert r.completion_ids[AT : AT + len(TEXT)] == TEXT
        assert r.mask == [1] * AT + [0] * len(TEXT) + [1] * answer
        assert [math.isnan(x) for x in r.behaviour_logp] == [not m for m in r.mask]
        assert r.terminated or answer == TOKENS
        assert r.turns is None and r.finish_reason == ("stop" if r.terminated else "length")
    assert max(len(r.completion_ids) for r in rows) == AT + len(TEXT) + TOKENS


@both
def test_the_answer_is_sampled_after_the_text(model, shared):
    for prompt, r in drawn(forced(model, shared)):
        logp = processed(model, prompt, r.completion_ids).log_softmax(-1)
        for place, (token, told) in enumerate(zip(r.completion_ids, r.behaviour_logp, strict=True)):
            assert math.isnan(told) or abs(float(logp[place, token]) - told) < 1e-4


def test_greedy_answers_are_the_likeliest_after_the_text(model):
    for prompt, r in drawn(forced(model), seeds=[[0]] * 3, greedy=True):
        likeliest = processed(model, prompt, r.completion_ids).argmax(-1).tolist()
        own = r.mask or [1] * len(r.completion_ids)
        assert [i for i, m in zip(likeliest, own, strict=True) if m] == r.sampled_ids


def test_a_forced_answer_depends_on_its_prompt_and_seed_alone(model):
    whole = ids(sample(forced(model), PROMPTS, SEEDS))
    for prompt, seeds, group in zip(PROMPTS, SEEDS, whole, strict=True):
        for seed, found in zip(seeds, group, strict=True):
            assert ids(sample(forced(model), [prompt], [[seed]])) == [[found]]


def test_each_group_arrives_once_and_whole(model):
    ours, heard = [Group(i, {}, "", p) for i, p in enumerate(PROMPTS)], []

    def arrived(index):
        heard.append((index, [len(r.completion_ids) for r in ours[index].rollouts]))

    forced(model).generate(ours, SEEDS, arrived=arrived)
    lengths = [[len(r.completion_ids) for r in g.rollouts] for g in ours]
    assert sorted(heard) == list(enumerate(lengths))
    assert [*map(len, lengths)] == [*map(len, SEEDS)]
    assert all(g.max_tokens is None and g.prompt_ids in PROMPTS for g in ours)


def test_an_answer_fits_where_its_completion_fits(model):
    longest = max(map(len, PROMPTS)) + 12  # of prompt and completion
    rows = drawn(forced(model, at=7, context=longest))
    assert max(len(r.completion_ids) for _, r in rows) == 12


def test_a_stop_string_ends_an_answer_and_may_be_in_the_text(model):
    source = forced(model, stop=["w20", "w12"])
    rows = [r for _, r in drawn(source, seeds=[[*range(40)]] * 3) if r.has_forced_answer]
    decode, cut = partial(tokenizer().decode, skip_special_tokens=True), 0
    for r in rows:
        head, tail = r.completion_ids[: AT + len(TEXT)], r.completion_ids[AT + len(TEXT) :]
        assert r.text.startswith(decode(head))
        assert 20 not in tail[:-1] and 12 not in tail[:-1]  # it ended there
        if tail[-1] in (20, 12):
            cut += 1
            assert r.text == decode(r.completion_ids)[: -len(f"w{tail[-1]}")]
    assert cut


def test_sampling_masks_are_those_of_the_sampled_tokens(model):
    source = forced(model, top_p=0.6, return_sampling_mask=True)
    for _, r in drawn(source):
        assert len(r.sampling_mask) == r.length
        r.sampling_mask.check_tokens(r.sampled_ids, 1024)


def test_a_budget_that_exceeds_the_completion_length_is_refused_by_the_texts_ids(sentence):
    def ids_of(most):
        budget = AnswerBudget(at=5, text="w20", tokens=3)
        return answer_budget_ids(
            tokenizer(), config(answer_budget=budget, max_completion_length=most)
        )

    assert ids_of(9) == [20]
    assert answer_budget_ids(tokenizer(), config()) == []
    with pytest.raises(ConfigError) as caught:
        ids_of(8)
    assert caught.value.code == 2
    sentence(caught)
