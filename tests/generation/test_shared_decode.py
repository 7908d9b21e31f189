"""A prompt's keys kept once per group: equal to the plain way, taken only where that is seen."""

import itertools
import logging
import math
import statistics

import pytest
import torch
import transformers
from family_cases import GROUPED, PASSES
from generation_cases import PROMPTS, SEEDS, WORDS, config, generator, ids, sample

from rloo_cli.generation.hf import kv_cache, sampling
from rloo_cli.generation.hf.decode_batch import DecodeSequence
from rloo_cli.generation.hf.shared_prefix import SharedPrefix

MODELS = {name: config for name, config in PASSES.items() if name != "nemotron"}


def make(config):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture
def model():
    return make(PASSES["qwen3"]())


def spy(monkeypatch):
    """How often our attention is called."""
    calls, attend = [], kv_cache.SharedPrefixCache.attend
    monkeypatch.setattr(
        kv_cache.SharedPrefixCache, "attend", lambda *args: calls.append(args[1]) or attend(*args)
    )
    return calls


@pytest.mark.slow_but("llama", "qwen2", "gemma", "gpt_neox", "smollm3", "glm", "ernie4_5")
@pytest.mark.parametrize("name", MODELS)
def test_every_family_that_passes_samples_what_the_plain_way_samples(name, monkeypatch, caplog):
    calls = spy(monkeypatch)
    model = make(MODELS[name]())
    caplog.set_level(logging.INFO)
    ours = sample(generator(model), PROMPTS, SEEDS)
    assert not caplog.text and len(calls) > 12
    theirs = sample(generator(model, shared_prompt=False), PROMPTS, SEEDS)
    assert ids(ours) == ids(theirs)
    for one, other in zip(itertools.chain(*ours), itertools.chain(*theirs), strict=True):
        logp = torch.tensor(one.behaviour_logp) - torch.tensor(other.behaviour_logp)
        assert logp.abs().max() < 1e-4


@torch.no_grad()
def test_rows_and_groups_may_go_in_any_order_and_keys_grow(model):
    draw = torch.Generator().manual_seed(5)
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12], [13]]
    length = kv_cache.INITIAL_KV_POSITIONS + 8
    model.config.max_position_embeddings = 128
    rows = [DecodeSequence(g, prompts[g], 0) for g in (0, 0, 0, 1, 2, 2)]
    for row in rows:
        row.completion_ids = torch.randint(0, WORDS, (length,), generator=draw).tolist()
    going = {
        2: [0, 2, 3, 4, 5],
        5: [1, 2, 3, 4],
        9: [0, 1, 2],
        kv_cache.INITIAL_KV_POSITIONS + 3: [2],
    }
    way = SharedPrefix(model)
    with way.decoding_attention():
        state, logits = way.prefill(rows, length)
        for t in range(length):
            for row, line in zip(state.sequences, logits.log_softmax(-1), strict=True):
                row.logp.append(line[row.completion_ids[t]].item())
            state.input_ids[:, state.prompt_width + t] = torch.tensor(
                [row.completion_ids[t] for row in state.sequences]
            )
            if t in going:
                state.keep_sequences(going[t])
            if t < length - 1:
                logits = way.forward(state, state.prompt_width + t + 1)
    assert [len(row.logp) for row in rows] == [6, 3, 68, 68, length, 10]
    assert state.cache.layers[0].prompt_key.shape[:3] == (1, 2, 1)  # one group, cut to its prompt
    for row in rows:
        line = model(torch.tensor([row.prompt_ids + row.completion_ids])).logits[0].log_softmax(-1)
        logp = line[len(row.prompt_ids) - 1 : -1].gather(
            -1, torch.tensor(row.completion_ids)[:, None]
        )[:, 0]
        assert (torch.tensor(row.logp) - logp[: len(row.logp)]).abs().max() < 1e-4


@torch.no_grad()
def test_a_prompts_keys_are_kept_once_and_a_slot_is_free_of_charge_when_all_are_taken(model):
    way = SharedPrefix(model)
    rows = [DecodeSequence(g, PROMPTS[g], 0) for g in (0, 0, 1, 1, 2, 2)]
    with way.decoding_attention():
        state, _ = way.prefill(rows, 4)
    assert state.cache.layers[0].prompt_key.shape == (3, 2, 6, 8)
    assert state.cache.layers[0].key.shape == (3, 2, 2, 4, 8)
    assert state.cache.sequence_of_slot is None
    state.keep_sequences([0, 2, 3, 4])
    assert (
        state.cache.sequence_of_slot.tolist() == [0, 0, 1, 2, 3, 3]
        and state.cache.slots_per_group == 2
    )
    state.keep_sequences([0, 2])
    assert (
        state.cache.sequence_of_slot is None
        and state.cache.slots_per_group == 1
        and state.cache.prompt_lengths == [6, 1]
    )


def test_the_models_own_attention_is_back_afterwards_whatever_happens(model, monkeypatch):
    before = model.config._attn_implementation
    sample(generator(model), PROMPTS, SEEDS)
    assert model.config._attn_implementation == before != kv_cache.DECODE_ATTENTION_NAME
    source = generator(model)
    sample(source, PROMPTS, SEEDS)

    def fails(_):
        assert model.config._attn_implementation == kv_cache.DECODE_ATTENTION_NAME
        raise ZeroDivisionError

    monkeypatch.setattr(model.lm_head, "forward", fails)
    with pytest.raises(ZeroDivisionError):
        sample(source, PROMPTS, SEEDS)
    assert model.config._attn_implementation == before


def test_it_is_turned_off_by_its_key(model, monkeypatch):
    calls = spy(monkeypatch)
    sample(generator(model, shared_prompt=False), PROMPTS, SEEDS)
    assert not calls
    sample(generator(model), PROMPTS, SEEDS)
    assert calls


def refusal(model, caplog):
    """Sample twice; the one line that says why not."""
    caplog.clear()
    caplog.set_level(logging.INFO)
    source = generator(model)
    ours = [ids(sample(source, PROMPTS, SEEDS)) for _ in range(2)]
    assert ours == [ids(sample(generator(model, shared_prompt=False), PROMPTS, SEEDS))] * 2
    [line] = caplog.messages
    return line


def test_a_model_that_never_asks_our_attention_falls_back_and_says_so_once(caplog):
    model = make(PASSES["nemotron"]())
    before = model.config._attn_implementation
    assert "layers do not pass" in refusal(model, caplog)
    assert model.config._attn_implementation == before


def test_a_window_shorter_than_the_rows_falls_back(caplog):
    model = make(transformers.MistralConfig(**GROUPED, sliding_window=17))
    assert "sliding window of 17" in refusal(model, caplog)  # a prompt of 6, and 12 tokens
    caplog.clear()
    model.config.sliding_window = 18
    sample(generator(model), PROMPTS, SEEDS)
    assert not caplog.messages


def test_a_wrong_number_of_calls_falls_back(model, caplog, monkeypatch):
    monkeypatch.setattr(model.config, "num_hidden_layers", 3)
    assert "2 calls of our" in refusal(model, caplog)


def test_a_layer_out_of_turn_is_refused():
    x = torch.ones(1, 1, 1, 1)
    with pytest.raises(kv_cache.SharedPrefixError, match=r"layer 1 .* number 0"):
        kv_cache.SharedPrefixCache([1], [1], 1, x.device).attend(1, x, x, x, 1.0)


def test_numbers_that_differ_fall_back(model, caplog, monkeypatch):
    token = kv_cache.SharedPrefixCache._attend_decode
    monkeypatch.setattr(
        kv_cache.SharedPrefixCache, "_attend_decode", lambda *args: 1.05 * token(*args)
    )
    assert "log-probabilities differ by" in refusal(model, caplog)
    monkeypatch.setattr(
        kv_cache.SharedPrefixCache, "_attend_decode", lambda *args: math.nan * token(*args)
    )
    assert "differ by nan" in refusal(model, caplog)


def test_numbers_are_compared_once(model, monkeypatch):
    source, seen = generator(model), []
    compare = source.shared_prefix._compare_with_plain
    monkeypatch.setattr(
        source.shared_prefix, "_compare_with_plain", lambda rows: seen.append(0) or compare(rows)
    )
    for _ in range(3):
        sample(source, PROMPTS, SEEDS)
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"prefix_cache": None}, "do not pass arguments on"),
        ({"attention_mask": torch.ones(1)}, "its own mask"),
        ({"softcap": 5.0}, "softcap"),
        ({"s_aux": torch.ones(1)}, "s_aux"),
        ({"dropout": 0.1}, "dropout"),
    ],
)
def test_our_attention_refuses_what_it_does_not_do(arguments, reason):
    x = torch.ones(1, 1, 1, 1)
    arguments = {
        "attention_mask": None,
        "prefix_cache": kv_cache.SharedPrefixCache([1], [1], 1, x.device),
    } | arguments
    with pytest.raises(kv_cache.SharedPrefixError, match=reason):
        kv_cache.shared_prefix_attention(None, x, x, x, **arguments)


def test_in_bfloat16_it_is_taken_and_near(model, monkeypatch):
    calls = spy(monkeypatch)
    model = model.to(torch.bfloat16)
    [group, *_] = sample(generator(model), PROMPTS, SEEDS)
    assert len(calls) > 20
    off = []
    for r in group:
        with torch.no_grad():
            logits = model(torch.tensor([PROMPTS[0] + r.completion_ids])).logits[0].float()
        logp = logits.log_softmax(-1)[len(PROMPTS[0]) - 1 : -1]
        logp = logp[range(r.length), r.completion_ids]
        off += (torch.tensor(r.behaviour_logp) - logp).abs().tolist()
    assert statistics.mean(off) < 0.05


def inverse_cdf(scores, uniform):
    """The textbook, in float64."""
    cdf = scores.double().softmax(-1).cumsum(-1)
    return torch.searchsorted(cdf, (uniform * cdf[:, -1])[:, None], right=True).squeeze(-1)


@pytest.mark.parametrize("words", [1, 2, 63, 64, 65, 128, 1000])
def test_picking_by_blocks_is_the_inverse_cdf(words):
    draw = torch.Generator().manual_seed(words)
    scores = torch.randn(300, words, generator=draw) * 4
    scores[::2] = scores[::2].masked_fill(torch.rand(150, words, generator=draw) < 0.5, -math.inf)
    scores[:, words // 2] = 1.0  # never all banned
    uniform = torch.rand(300, dtype=torch.float64, generator=draw)
    tokens, logp = sampling.sample_tokens(scores, uniform)
    assert torch.equal(tokens, inverse_cdf(scores, uniform))
    expected = scores.double().log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
    assert (logp - expected).abs().max() < 1e-6


@pytest.mark.parametrize("words", [sampling.CDF_BLOCK, sampling.CDF_BLOCK - 24])
def test_the_last_rounding_of_a_block_picks_none_that_is_banned_or_beyond(words):
    draw = torch.Generator().manual_seed(0)
    scores = torch.randn(4000, words, generator=draw) * 10  # so that float64 has to round
    scores[:, 0] = -math.inf
    scores[::2, -3:] = -math.inf
    last = torch.full((4000,), math.nextafter(1.0, 0.0), dtype=torch.float64)
    tokens, logp = sampling.sample_tokens(scores, last)
    assert (tokens < words).all() and logp.isfinite().all()


def test_a_large_vocabulary_does_not_blur_log_probabilities():
    scores = torch.full((1, 151_936), -2.3)
    scores[0, 0] = 0.0  # float32 adds the many small ones to it: off by 9e-5
    expected = scores.double().log_softmax(-1)[0, 0]
    assert abs(sampling.sample_tokens(scores, None)[1] - expected) < 5e-6


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("greedy", [True, False])
def test_scores_that_are_not_finite_show_in_the_log_probability_of_their_row_alone(bad, greedy):
    scores = torch.zeros(2, 100)
    scores[1, 70] = bad
    uniform = None if greedy else torch.tensor([0.5, 0.999], dtype=torch.float64)
    tokens, logp = sampling.sample_tokens(scores, uniform)
    assert logp.isfinite().tolist() == [True, False] and (tokens < 100).all()
    assert not sampling.sample_tokens(torch.full((1, 3), -math.inf), None)[1].isfinite().all()


def test_the_key_says_auto_or_false():
    assert config().transformers.shared_prompt == "auto"
    assert config(shared_prompt=False).transformers.shared_prompt is False
    with pytest.raises(ValueError, match="shared_prompt"):
        config(shared_prompt=True)
