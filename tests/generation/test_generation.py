"""The transformers backend: whom it agrees with, and what a sample depends on."""

import math
import subprocess
import sys

import pytest
import torch
import transformers
from generation_cases import (
    EOS,
    FAMILIES,
    PAD,
    PROMPTS,
    SEEDS,
    WORDS,
    config,
    generator,
    ids,
    make,
    processed,
    sample,
    tokenizer,
)
from transformers import cache_utils

from rloo_cli.config import registry
from rloo_cli.data.batch import Group
from rloo_cli.generation.hf import decode_batch, repeated_prefix, sampling
from rloo_cli.utils.errors import NumbersError

__all__ = ["PAD", "tokenizer"]  # asked for here by test_stopping

family = pytest.mark.parametrize("name", FAMILIES)
both = pytest.mark.parametrize("shared", ["auto", False])  # keys of a prompt kept once, or K times


@pytest.fixture
def model():
    found = make()
    found.config.eos_token_id = found.generation_config.eos_token_id = EOS
    yield found
    found.config.eos_token_id = found.generation_config.eos_token_id = EOS


def theirs(model, prompt, **kwargs):
    kwargs = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": [EOS]} | kwargs
    out = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **kwargs
    )
    return out[0, len(prompt) :].tolist()


@family
@both
def test_greedy_ids_equal_generate_of_each_prompt_alone(name, shared):
    ours = ids(sample(generator(make(name), shared_prompt=shared), PROMPTS, [[0]] * 3, greedy=True))
    assert ours == [[theirs(make(name), prompt)] for prompt in PROMPTS]


@both
@pytest.mark.parametrize("batch_tokens", [None, 40])
def test_each_group_is_told_of_once_and_whole_before_the_last_is_done(model, shared, batch_tokens):
    ours = [Group(i, {}, str(p), p) for i, p in enumerate(PROMPTS)]
    got: list[tuple[int, list[list[int]]]] = []

    def arrived(index):
        got.append((index, [r.completion_ids for r in ours[index].rollouts]))
        unfinished.append(sum(not g.rollouts for g in ours))

    unfinished: list[int] = []
    sampler = generator(model, shared_prompt=shared, batch_tokens=batch_tokens)
    sampler.generate(ours, SEEDS, arrived=arrived)
    assert sorted(got) == list(enumerate(ids([g.rollouts for g in ours])))
    assert [len(found) for _, found in sorted(got)] == [len(seeds) for seeds in SEEDS]
    assert unfinished == [2, 1, 0]


@pytest.mark.slow_but("auto-qwen3", "False-qwen3")
@family
@both
def test_a_completion_depends_on_its_prompt_and_seed_alone(name, shared):
    whole = ids(sample(generator(make(name), shared_prompt=shared), PROMPTS, SEEDS))
    for prompt, seeds, group in zip(PROMPTS, SEEDS, whole, strict=True):
        alone = [
            ids(sample(generator(make(name), shared_prompt=shared), [prompt], [[s]]))[0][0]
            for s in seeds
        ]
        assert group == alone
    for batch_tokens in (1, 40, 70):
        assert (
            ids(
                sample(
                    generator(make(name), shared_prompt=shared, batch_tokens=batch_tokens),
                    PROMPTS,
                    SEEDS,
                )
            )
            == whole
        )
    assert len({tuple(c) for group in whole for c in group}) == 9  # siblings differ


@family
@both
def test_behaviour_logp_is_the_log_softmax_of_a_fresh_forward(name, shared):
    rollouts = sample(generator(make(name), shared_prompt=shared, temperature=0.7), PROMPTS, SEEDS)
    for prompt, group in zip(PROMPTS, rollouts, strict=True):
        for r in group:
            logits = processed(make(name), prompt, r.completion_ids) / 0.7
            logp = logits.log_softmax(-1)[range(len(r.completion_ids)), r.completion_ids]
            assert torch.tensor(r.behaviour_logp).sub(logp).abs().max() < 1e-4


@both
def test_behaviour_logp_of_greedy_is_untempered_and_unfiltered(model, shared):
    source = generator(model, shared_prompt=shared, temperature=0.3, top_k=2)
    [[r]] = sample(source, PROMPTS[:1], [[0]], greedy=True)
    logits = processed(model, PROMPTS[0], r.completion_ids)
    logp = logits.log_softmax(-1)[range(len(r.completion_ids)), r.completion_ids]
    assert torch.tensor(r.behaviour_logp).sub(logp).abs().max() < 1e-4


@both
def test_each_prompt_is_prefilled_once_and_finished_rows_leave_the_batch(
    model, monkeypatch, shared
):
    shapes = []
    forward = model.forward

    def spy(**kwargs):
        shapes.append(tuple(kwargs["input_ids"].shape))
        return forward(**kwargs)

    source = generator(model, shared_prompt=shared)
    sample(source, PROMPTS, SEEDS)  # the first time compares numbers
    monkeypatch.setattr(model, "forward", spy)
    lengths = [r.length for g in sample(source, PROMPTS, SEEDS) for r in g]
    assert shapes[0] == ((1, 10) if shared else (3, 6))  # packed, or padded
    assert shapes[1][1] == 1 and min(lengths) < max(lengths)
    assert shapes[1][0] == 9 and shapes[-1][0] < 9


def test_a_cache_that_cannot_be_repeated_is_said_once(caplog):
    source = generator(make("lfm2"))
    sample(source, PROMPTS, SEEDS)
    sample(source, PROMPTS, SEEDS)
    assert caplog.text.count("cannot be repeated") == 1
    both = cache_utils.DynamicCache()
    both.layers = [cache_utils.LinearAttentionAndFullAttentionLayer()]
    assert not repeated_prefix.can_select_sequences(
        both
    )  # it would repeat keys and values, not the other state


def test_batches_stay_under_batch_tokens_and_siblings_together():
    made = [decode_batch.DecodeSequence(i, [5] * n, 0) for i, n in enumerate([1, 6, 3, 3])]
    for most, lengths in (
        (36, [[6, 3], [3, 1]]),
        (35, [[6], [3, 3], [1]]),
        (1, [[6], [3], [3], [1]]),
    ):
        batches = decode_batch.split_decode_batches(made, config(), most)
        assert [[len(row.prompt_ids) for row in batch] for batch in batches] == lengths


def test_a_prompt_that_is_kept_once_counts_once():
    def lengths(most, once):
        made = [decode_batch.DecodeSequence(i // 4, [5] * 100, 0) for i in range(12)]
        limit = config(max_completion_length=10)
        return [len(b) for b in decode_batch.split_decode_batches(made, limit, most, once)]

    assert lengths(3 * 140, True) == [12] and lengths(3 * 140 - 1, True) == [8, 4]
    assert lengths(3 * 140, False) == [3, 3, 3, 3] and lengths(12 * 110, False) == [12]
    # 512 rows of TL;DR: what two batches held fits into one
    made = [decode_batch.DecodeSequence(i // 4, [5] * 512, 0) for i in range(512)]
    most, limit = 300 * (512 + 53), config(max_completion_length=53)
    for once, count in ((True, 1), (False, 2)):
        assert len([*decode_batch.split_decode_batches(made, limit, most, once)]) == count


@pytest.mark.parametrize(
    ("shared", "sizes"), [("auto", [7, 2]), (False, [6, 3])], ids=["once", "once for each"]
)
def test_batches_hold_what_the_cache_that_is_used_holds(model, monkeypatch, shared, sizes):
    source, held = generator(model, shared_prompt=shared, batch_tokens=108), []
    decode = source._decode

    def spy(prefix, batch, *rest):
        held.append(len(batch))
        return decode(prefix, batch, *rest)

    monkeypatch.setattr(source, "_decode", spy)
    whole = ids(sample(generator(model, shared_prompt=shared), PROMPTS, SEEDS))
    assert ids(sample(source, PROMPTS, SEEDS)) == whole and held == sizes


@both
def test_equal_batches_and_seeds_give_exactly_equal_numbers(model, shared):
    first, second = (
        sample(generator(model, shared_prompt=shared, stop=["w9"]), PROMPTS, SEEDS)
        for _ in range(2)
    )
    assert first == second


@both
def test_generate_leaves_torchs_generator_and_training_flags_as_they_were(model, shared):
    state = torch.get_rng_state()
    model.train()
    model.model.norm.eval()
    model.gradient_checkpointing_enable()
    try:
        ours = ids(sample(generator(model, shared_prompt=shared), PROMPTS, SEEDS))
        assert model.training and model.model.layers[0].training and not model.model.norm.training
    finally:
        model.gradient_checkpointing_disable()
        model.eval()
    assert torch.equal(state, torch.get_rng_state())
    assert ours == ids(sample(generator(model, shared_prompt=shared), PROMPTS, SEEDS))


@both
def test_top_k_1_is_greedy(model, shared):
    greedy = ids(sample(generator(model, shared_prompt=shared), PROMPTS, [[0]] * 3, greedy=True))
    assert (
        ids(
            sample(
                generator(model, shared_prompt=shared, top_k=1, temperature=2.0), PROMPTS, [[3]] * 3
            )
        )
        == greedy
    )


@pytest.mark.parametrize(
    ("changes", "warper"),
    [
        ({"top_k": 5}, transformers.TopKLogitsWarper(5)),
        ({"top_p": 0.6}, transformers.TopPLogitsWarper(0.6)),
        ({"min_p": 0.2}, transformers.MinPLogitsWarper(0.2)),
        (  # the nucleus is of the five likeliest, as in transformers and vLLM
            {"top_k": 5, "top_p": 0.7},
            transformers.LogitsProcessorList(
                [transformers.TopKLogitsWarper(5), transformers.TopPLogitsWarper(0.7)]
            ),
        ),
    ],
)
@both
def test_filters_sample_their_support_and_its_probabilities(model, changes, warper, shared):
    source = generator(
        model, shared_prompt=shared, max_completion_length=1, temperature=1.5, **changes
    )
    [group] = sample(source, PROMPTS[:1], [list(range(500))])
    scores = warper(None, processed(model, PROMPTS[0], [0]).float() / 1.5).log_softmax(-1)[0]
    support = set(scores.isfinite().nonzero().flatten().tolist())
    assert {r.completion_ids[0] for r in group} == support and len(support) < WORDS
    assert all(abs(r.behaviour_logp[0] - scores[r.completion_ids[0]]) < 1e-4 for r in group)


@both
def test_frequencies_of_one_step_are_the_softmax(model, shared):
    [group] = sample(
        generator(model, shared_prompt=shared, max_completion_length=1),
        PROMPTS[:1],
        [list(range(4000))],
    )
    counts = torch.bincount(torch.tensor([r.completion_ids[0] for r in group]), minlength=WORDS)
    expected = processed(model, PROMPTS[0], [0]).softmax(-1)[0] * 4000
    chi2 = ((counts - expected) ** 2 / expected).sum()
    assert chi2 < WORDS - 1 + 4 * math.sqrt(2 * (WORDS - 1))


def test_the_inverse_cdf_never_picks_a_banned_token_and_ties_go_low():
    scores = torch.tensor([[-math.inf, 0.0, 0.0, -math.inf]])
    last = torch.tensor([math.nextafter(1.0, 0.0)], dtype=torch.float64)
    assert sampling.sample_tokens(scores, torch.zeros(1, dtype=torch.float64))[0].item() == 1
    assert sampling.sample_tokens(scores, last)[0].item() == 2
    assert sampling.sample_tokens(scores, None)[0].item() == 1


@pytest.mark.slow_but("auto-qwen3", "auto-mistral", "False-llama", "False-lfm2")
@family
@both
def test_repetition_penalty_is_generates_and_blind_to_padding(name, shared):
    source = generator(make(name), shared_prompt=shared, repetition_penalty=1.7)
    ours = ids(sample(source, PROMPTS, [[0, 1]] * 3, greedy=True))
    for prompt, group in zip(PROMPTS, ours, strict=True):
        assert group == [theirs(make(name), prompt, repetition_penalty=1.7)] * 2
    assert ours != ids(
        sample(generator(make(name), shared_prompt=shared), PROMPTS, [[0, 1]] * 3, greedy=True)
    )


def test_padding_is_not_penalised(model):
    # With 0 as padding, id 0 would be penalized in the shorter row, whose own prompt has no 0.
    state = decode_batch.DecodeBatch.from_sequences(
        [decode_batch.DecodeSequence(0, [5, 6, 7], 0), decode_batch.DecodeSequence(1, [8], 0)],
        2,
        "cpu",
    )
    logits = torch.ones(2, WORDS)
    process = sampling.logits_processors(config(repetition_penalty=2.0), {EOS}, 3, greedy=True)
    assert (process(state.input_ids[:, :3], logits)[1] < 1).nonzero().flatten().tolist() == [8]


@both
def test_logits_that_are_not_finite_stop_the_run(model, monkeypatch, shared):
    monkeypatch.setattr(
        model.lm_head, "forward", lambda x: torch.full((*x.shape[:-1], WORDS), math.nan)
    )
    for greedy in (False, True):
        with pytest.raises(NumbersError, match="not finite"):
            sample(generator(model, shared_prompt=shared), PROMPTS, SEEDS, greedy)


@pytest.mark.process
def test_the_registry_reads_the_config_without_torch():
    assert registry.load_code(
        registry.registered_module("generation", "transformers").IMPLEMENTATION
    )
    code = (
        "import sys; from rloo_cli.config import registry; registry.config_class('generation', "
        "'transformers'); print({'torch', 'transformers'} & set(sys.modules)); "
        "assert list(registry.registry_names('generation')) == "
        "['transformers', 'vllm_colocate', 'vllm_server']"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"
