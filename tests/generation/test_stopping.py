"""When a completion ends, what is then said of it, and what its text is."""

import random

import pytest
import tokenizers
import transformers
from test_generation import (
    EOS,
    PAD,
    PROMPTS,
    SEEDS,
    config,
    generator,
    ids,
    model,
    sample,
    tokenizer,
)

from rloo_cli.generation.common import stop_rule
from rloo_cli.utils.errors import ConfigError, GenerationError

__all__ = ["model"]  # a fixture


def free_run(model):
    """A sample that no EOS ends, of 12 different ids that all show in the text."""
    for seed in range(100):
        [[r]] = sample(generator(model, ignore_eos=True), PROMPTS[:1], [[seed]])
        if len(set(r.completion_ids)) == 12 == len(r.text.split()):
            return r
    raise AssertionError("no such seed")


def test_stop_ids_are_the_union_of_all_places(model):
    model.config.eos_token_id, model.generation_config.eos_token_id = 7, [8, 9]
    assert stop_rule.stop_ids(tokenizer(), model, config(stop_token_ids=[4])) == {EOS, 7, 8, 9, 4}
    only = config(stop_token_ids=[4], ignore_eos=True)
    assert stop_rule.stop_ids(tokenizer(), model, only) == {4}


@pytest.mark.parametrize("at", [0, 3, 11])
def test_every_id_of_a_list_of_eos_ends_a_completion(model, at):
    free = free_run(model)
    model.generation_config.eos_token_id = [PAD, free.completion_ids[at]]
    [[r]] = sample(generator(model), PROMPTS[:1], [[free.seed]])
    assert r.completion_ids == free.completion_ids[: at + 1]
    assert r.terminated and r.finish_reason == "stop"
    assert r.text == " ".join(free.text.split()[:at])


def test_pad_equal_to_eos_confuses_nothing(model):
    expected = ids(sample(generator(model), PROMPTS, SEEDS))
    tokens = tokenizer(pad_token="<eos>")
    prompts = [[EOS, *PROMPTS[0]], [EOS, EOS], [EOS]]
    assert ids(sample(generator(model, tokens=tokens), PROMPTS, SEEDS)) == expected
    whole = ids(sample(generator(model, tokens=tokens), prompts, SEEDS))
    for prompt, seeds, group in zip(prompts, SEEDS, whole, strict=True):
        assert ids(sample(generator(model), [prompt], [seeds]))[0] == group


def test_a_stop_string_across_two_tokens_ends_it_and_is_cut_off(model):
    free = free_run(model)
    words = free.text.split()
    stop = words[3][-1] + " " + words[4]
    [[r]] = sample(generator(model, ignore_eos=True, stop=["no", stop]), PROMPTS[:1], [[free.seed]])
    assert r.completion_ids == free.completion_ids[:5] and len(r.behaviour_logp) == 5
    assert r.text == free.text[: free.text.index(stop)] and stop not in r.text
    assert (r.finish_reason, r.terminated) == ("stop", True)


def test_a_stop_string_that_ends_before_min_tokens_does_not_count(model):
    free = free_run(model)
    words = free.text.split()
    stops = [words[3], words[7] + " " + words[8]]
    source = generator(model, ignore_eos=True, stop=stops, min_tokens=4)
    [[r]] = sample(source, PROMPTS[:1], [[free.seed]])
    assert r.completion_ids == free.completion_ids[:9]
    assert r.text == free.text[: free.text.index(stops[1])]


def test_a_stop_string_that_cannot_be_found_is_refused(model):
    with pytest.raises(ConfigError, match=r"stop_token_ids=\[1\]"):
        generator(model, stop=["<eos>"])
    with pytest.raises(ValueError, match="at least 1 character"):  # the schema's
        generator(model, stop=[""])


def test_at_the_limit_a_completion_is_truncated_and_ignore_eos_samples_on(model):
    free = free_run(model)
    model.generation_config.eos_token_id = free.completion_ids[2]
    [[r]] = sample(generator(model, ignore_eos=True), PROMPTS[:1], [[free.seed]])
    assert r == free
    assert (r.finish_reason, r.terminated, len(r.completion_ids)) == ("length", False, 12)
    [[r]] = sample(generator(model, max_completion_length=2), PROMPTS[:1], [[free.seed]])
    assert (r.finish_reason, r.terminated, len(r.completion_ids)) == ("length", False, 2)
    rule = generator(model).stop_rule
    assert rule.terminated([5, EOS], "length")  # what an engine may say


def test_no_stop_id_is_sampled_before_min_tokens(model):
    stops = list(range(3, 30))
    [group] = sample(
        generator(model, stop_token_ids=stops, min_tokens=3), PROMPTS[:1], [list(range(50))]
    )
    assert not {i for r in group for i in r.completion_ids[:3]} & {EOS, *stops}
    assert min(len(r.completion_ids) for r in group) == 4


def test_the_tail_finds_a_stop_string_exactly_when_the_whole_text_has_it(model):
    # One token per byte, so that characters and stop strings span tokens, with special tokens
    # (which text leaves out) in between.
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    bpe = tokenizers.models.BPE({c: i for i, c in enumerate(letters)}, [])
    core = tokenizers.Tokenizer(bpe)
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    core.add_special_tokens(["<|x|>"])
    spell = transformers.PreTrainedTokenizerFast(tokenizer_object=core)
    special = spell.convert_tokens_to_ids("<|x|>")
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    rule = stop_rule.StopRule(
        spell, model, config(stop=["é🙂a", "bb\n"], max_completion_length=999)
    )
    draw, hits = random.Random(0), 0
    for _ in range(12):
        text = "".join(draw.choices("é🙂ab\n", k=60))
        ids = [i for b in spell.encode(text) for i in [b] + [special] * draw.choice([0, 0, 0, 30])]
        whole = [spell.decode(ids[:n], skip_special_tokens=True) for n in range(1, len(ids) + 1)]
        ends = [n for n, t in enumerate(whole, 1) if "é🙂a" in t or "bb\n" in t]
        found = [n for n in range(1, len(ids) + 1) if rule.finish_reason(ids[:n]) == "stop"]
        assert found[:1] == ends[:1]
        if ends:
            hits += 1
            kept = rule.text(ids[: ends[0]])
            assert text.startswith(kept) and text[len(kept) :].startswith(("é🙂a", "bb\n"))
    assert hits > 3


def test_rollouts_carry_seed_and_weight_version(model):
    source = generator(model)
    source.load(None, 17)
    assert [(r.seed, r.weight_version) for g in sample(source, PROMPTS, SEEDS) for r in g] == [
        (s, 17) for seeds in SEEDS for s in seeds
    ]
    with pytest.raises(AssertionError, match="3 groups, "):
        sample(source, PROMPTS, [[1]])


def test_a_prompt_without_room_is_refused_with_both_numbers(model):
    sample(generator(model, context=18), PROMPTS, SEEDS)
    with pytest.raises(GenerationError, match=r"6 prompt tokens \+ 12 = 18.* is 17"):
        sample(generator(model, context=17), PROMPTS, SEEDS)
    with pytest.raises(GenerationError, match="no tokens"):
        sample(generator(model), [[]], [[1]])
