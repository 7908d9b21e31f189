"""Every family lands on the fastest layout that gives its own numbers, and no gate can go."""

import contextlib

import pytest
import torch
import transformers
from assert_refused import assert_refused
from family_cases import GROUPED, HEADS, OPT, PASSES, REFUSED, TWO, T
from layout_cases import gradients, laid, made, worst
from policy_cases import SHORT, each_alone, fresh

from rloo_cli.data.packing import LAYOUTS
from rloo_cli.policy import layouts, load, shared_attention
from rloo_cli.policy.model import Policy
from rloo_cli.policy.shared_attention import SHARED_LAYOUT_ARGUMENT, SharedAttentionError
from rloo_cli.utils.errors import ConfigError

OWN = ["mistral", "mixtral", "phi3", "qwen2", "gemma2", "gemma3", "olmo3", "cohere2", "exaone4"]
OWN += ["stablelm", "gptj", "gpt_neo"]
ONLY_PADDED = REFUSED.keys() - set(OWN)
FOUND = {f"plain {name}": (PASSES[name], "shared") for name in PASSES if name != "nemotron"}
FOUND |= {"nemotron": (PASSES["nemotron"], "packed")}
FOUND |= {name: (REFUSED[name][0], "packed") for name in OWN}
FOUND |= {name: (REFUSED[name][0], "padded") for name in sorted(ONLY_PADDED)}


def build(config, dropout=False, spread=0.3):
    """A random model with weights large enough to tell right from wrong."""
    torch.manual_seed(0)
    config.initializer_range = spread
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    if not dropout:
        load.zero_dropout(model)
    return model


def settled(model, wanted="auto", longest=64, temperature=1.0):
    """A policy of this model at the level that was found, and what is said of it."""
    found = Policy(model, temperature)
    return found, str(layouts.choose_policy_layout(found, wanted, longest))


def wrong_by(policy, layout):
    """Largest distance of a log-probability from the row alone."""
    chosen = made(((5, (4, 1, 2)), (2, (1, 3))))
    with torch.no_grad(), shared_attention.native_attention(policy.model):
        policy.model.eval()
        truth = each_alone(policy.model, chosen, policy.temperature)[0]
    found = policy.frozen_logp(laid(chosen, layout)).logp.double()
    return float((found - truth).abs().max())


def without_static(monkeypatch):
    monkeypatch.setattr(layouts, "why_not_shared", lambda *_: None)


def without_comparison(monkeypatch):
    def counted(self, layout):
        self.layout_values(layout)

    monkeypatch.setattr(layouts.LayoutProbe, "mismatch_reason", counted)


def test_every_family_that_can_be_read_is_here():
    assert {name.split()[-1] for name in FOUND} == PASSES.keys() | REFUSED.keys()
    assert [layout for _, layout in FOUND.values()].count("shared") == 20


@pytest.mark.slow_but(
    "plain llama",
    "plain qwen2",
    "plain gemma",
    "plain olmo2",
    "plain opt",
    "plain cohere",
    "plain starcoder2",
    "mistral",
    "gemma2",
    "cohere2",
    "gptj",
    "bloom",
    "gpt_oss",
    "mamba",
    "mpt",
    "rwkv",
)
@pytest.mark.parametrize("name", FOUND)
def test_a_family_lands_on_its_level_and_is_right_there(name):
    config, layout = FOUND[name]
    policy, line = settled(build(config()))
    assert policy.layout == layout and line.startswith(layout)
    assert (
        shared_attention.has_shared_attention(policy.model) is (layout == "shared")
        and policy.model.training
    )
    assert wrong_by(policy, layout) <= 5e-4


def test_without_the_static_gate_the_attention_itself_refuses_what_it_cannot_do(monkeypatch):
    without_static(monkeypatch)
    for name, asked in {
        "mistral": "sliding_window",
        "gemma2": "softcap",
        "gpt_oss": "s_aux",
    }.items():
        _, line = settled(build(REFUSED[name][0]()))
        assert "SharedAttentionError: " in line and asked in line
    _, line = settled(build(REFUSED["stablelm"][0]()))
    assert "called without a plan" in line


def test_without_the_attentions_own_refusal_a_window_is_found_by_comparison(monkeypatch):
    without_static(monkeypatch)
    inner = shared_attention.shared_layout_attention

    def careless(*given, sliding_window=None, **named):
        return inner(*given, **named)

    monkeypatch.setitem(
        transformers.AttentionInterface._global_mapping,
        shared_attention.SHARED_ATTENTION_NAME,
        careless,
    )
    policy, line = settled(build(REFUSED["mistral"][0]()))
    assert policy.layout == "packed" and "not shared: log-probabilities" in line
    without_comparison(monkeypatch)
    policy, _ = settled(build(REFUSED["mistral"][0]()))
    assert policy.layout == "shared" and wrong_by(policy, "shared") > 0.1


@pytest.mark.parametrize(("dropout", "layout"), [(True, "packed"), (False, "shared")])
def test_dropout_which_no_probe_sees_is_found_by_reading(monkeypatch, dropout, layout):
    policy, line = settled(build(T.GPT2Config(**SHORT), dropout))
    assert policy.layout == layout and ("dropout of 0.1" in line) is dropout
    without_static(monkeypatch)
    assert settled(build(T.GPT2Config(**SHORT), dropout))[0].layout == "shared"


def test_a_window_longer_than_the_probe_is_found_by_reading_and_never_passed_over(monkeypatch):
    def mistral():
        return build(T.MistralConfig(**GROUPED, sliding_window=20))

    assert settled(mistral(), longest=20)[0].layout == "shared"
    policy, line = settled(mistral(), longest=21)
    assert policy.layout == "packed" and "a sliding window of 20" in line
    without_static(monkeypatch)
    policy, _ = settled(mistral(), longest=21)
    assert policy.layout == "shared"  # and then a row that is too long is an error, not wrong
    policy.frozen_logp(laid(made(((9, (12, 3)),)), "shared"))
    with pytest.raises(SharedAttentionError, match="sliding_window"):
        policy.frozen_logp(laid(made(((9, (13, 3)),)), "shared"))


@pytest.mark.parametrize("counted", [False, True])
def test_a_layer_that_does_not_ask_our_attention_is_counted_even_where_no_number_shows_it(counted):
    model = build(PASSES["llama"]())

    def silent(hidden_states, **given):  # as a layer does that starts with weights of 0
        if counted and SHARED_LAYOUT_ARGUMENT in given:
            given[SHARED_LAYOUT_ARGUMENT].attention_calls[0] += 1
        return torch.zeros_like(hidden_states), None

    model.model.layers[1].self_attn.forward = silent
    policy, line = settled(model)
    assert policy.layout == ("shared" if counted else "packed")
    assert ("1 times in 2 " in line) is not counted


def test_a_state_beside_the_attention_is_found_by_comparison(monkeypatch):
    def falcon():
        return build(REFUSED["falcon_h1"][0]())

    without_static(monkeypatch)  # our attention is asked in every layer, and with its plan
    policy, line = settled(falcon())
    assert policy.layout == "padded" and "not shared: log-probabilities" in line
    without_comparison(monkeypatch)
    policy, _ = settled(falcon())
    assert policy.layout == "shared" and wrong_by(policy, "shared") > 0.1


@pytest.mark.parametrize("name", ["opt", "falcon"])
def test_a_wrong_layout_that_is_asked_for_is_refused_with_the_reason(monkeypatch, name):
    config = PASSES["opt"] if name == "opt" else REFUSED["falcon"][0]
    with pytest.raises(ConfigError) as caught:
        settled(build(config()), "packed")
    problem = assert_refused(caught, 2, "train.layout = packed", fix="train.layout=auto")
    assert "log-probabilities are off" in problem.render()
    without_comparison(monkeypatch)
    policy, _ = settled(build(config()), "packed")
    assert policy.layout == "packed" and wrong_by(policy, "packed") > 0.1


@pytest.mark.parametrize("gate", ["read", "run"])
def test_shared_rows_asked_for_in_vain_leave_the_model_its_own_attention(monkeypatch, gate):
    if gate == "run":
        without_static(monkeypatch)
    model = build(REFUSED["gemma2"][0]())
    before = [c._attn_implementation for c in shared_attention._configs(model)]
    with pytest.raises(ConfigError) as caught:
        settled(model, "shared")
    assert "train.layout=auto" in str(caught.value) and model.training
    assert ("a sliding window of 5" if gate == "read" else "SharedAttentionError") in str(
        caught.value
    )
    assert not shared_attention.has_shared_attention(model)
    assert [c._attn_implementation for c in shared_attention._configs(model)] == before
    model(torch.tensor([[5, 6, 7]]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_that_is_asked_for_is_the_one_that_is_used(layout):
    policy, line = settled(build(PASSES["qwen3"]()), layout)
    assert policy.layout == layout and line == f"{layout}, head fused"
    assert shared_attention.has_shared_attention(policy.model) is (layout == "shared")


def test_a_model_that_takes_no_positions_is_not_packed():
    model = build(PASSES["llama"]())
    forward = model.forward
    model.forward = lambda input_ids, attention_mask=None, use_cache=False: forward(
        input_ids, attention_mask, use_cache=use_cache
    )
    policy, line = settled(model)
    assert policy.layout == "padded" and "does not accept positions" in line


def test_a_model_that_is_wrong_even_in_padded_rows_is_no_model_for_us():
    model = build(PASSES["llama"]())
    inner, calls = model.forward, iter(range(1000))

    def drifting(**given):  # another answer each time
        out = inner(**given)
        out.logits = out.logits * (1 + 0.1 * next(calls))
        return out

    model.forward = drifting
    with pytest.raises(ConfigError, match="another model"):
        settled(model)


@pytest.mark.parametrize(
    ("exact", "usual", "gaps", "right"),
    [
        (True, 0.0, [9e-4, 0.0], True),
        (True, 0.0, [1.1e-3, 0.0], False),  # the worst completion counts
        (True, 0.0, [float("nan"), 0.0], False),
        (False, 0.0, [0.04, 0.0], True),  # in half precision, their mean
        (False, 0.0, [0.042, 0.0], False),
        (False, 0.1, [0.16, 0.179], True),  # 1.5 times what padding shows, and .02
        (False, 0.1, [0.16, 0.19], False),
        (False, 0.1, [float("nan"), 0.0], False),
    ],
)
def test_how_far_off_is_too_far(exact, usual, gaps, right):
    probe = layouts.LayoutProbe.__new__(layouts.LayoutProbe)
    probe.expected, probe.is_float32, probe.kernel_noise = (
        torch.full((2,), -50.0).double(),
        exact,
        usual,
    )
    probe.layout_values = lambda layout: probe.expected + torch.tensor(gaps).double()
    assert (probe.mismatch_reason("shared") is None) is right


@pytest.mark.parametrize("name", ["qwen3", "gpt_neox", "falcon"])
def test_half_precision_is_compared_by_what_padding_shows(name):
    config = PASSES[name] if name in PASSES else REFUSED[name][0]
    spread = 0.3 if name == "falcon" else 0.05  # what is right must not be lost in the rounding
    policy, line = settled(build(config(), spread=spread).to(torch.bfloat16))
    assert policy.layout == ("padded" if name == "falcon" else "shared")
    assert ("not packed: log-probabilities" in line) is (name == "falcon")


def test_the_probe_has_unequal_completions_and_one_of_a_single_token():
    groups = layouts.probe_groups(Policy(fresh(), 1.0))
    lengths = [[len(r.completion_ids) for r in g.rollouts] for g in groups]
    assert [len(set(own)) for own in lengths] == [3, 3] and 1 in lengths[0]
    assert len({len(g.prompt_ids) for g in groups}) == 2


SCALED = {
    "granite": lambda: T.GraniteConfig(**GROUPED, logits_scaling=4.0),
    "cohere": lambda: T.CohereConfig(**GROUPED, logit_scale=0.25),
    "cohere2": lambda: T.Cohere2Config(**GROUPED, sliding_window=5, logit_scale=0.25, **TWO),
    "phi": lambda: T.PhiConfig(**GROUPED),  # a bias
    "qwen3": lambda: T.Qwen3Config(**HEADS | {"tie_word_embeddings": True}),
}


@pytest.mark.parametrize("name", SCALED)
def test_a_fused_head_says_what_the_models_own_says(name):
    policy, line = settled(build(SCALED[name]()), temperature=0.7)
    scaled = name in ("granite", "cohere", "cohere2")
    assert policy.logprob_module.use_fused_head and "head fused" in line
    assert policy.logprob_module.logit_scale == (0.25 if scaled else 1.0)
    found = []
    for fused in (True, False):
        policy.logprob_module.use_fused_head = fused
        policy.model.zero_grad()
        got = policy.logp(laid(made(), policy.layout), want_entropy=True)
        got.logp.sum().backward()
        found.append((got, gradients(policy.model)))
    (ours, mine), (theirs, expected) = found
    torch.testing.assert_close(ours.logp, theirs.logp, rtol=0, atol=2e-5)
    torch.testing.assert_close(ours.entropy, theirs.entropy, rtol=0, atol=2e-5)
    assert worst(mine, expected) <= 1e-5


def test_a_head_that_does_more_to_its_logits_stays_the_models_own(monkeypatch):
    policy, line = settled(build(REFUSED["gemma2"][0]()))
    assert not policy.logprob_module.use_fused_head
    assert line.startswith("packed, head model (") and "window of 5;" in line
    assert line.endswith("head: soft-capped logits)")
    model = build(PASSES["llama"]())
    inner = model.forward

    def twice(**given):
        out = inner(**given)
        out.logits = 2 * out.logits  # which no config tells
        return out

    model.forward = twice
    policy, line = settled(model)
    assert policy.layout == "shared" and not policy.logprob_module.use_fused_head
    assert "fused head: log-probabilities" in line


def test_an_output_embedding_of_another_class_stays_the_models_own():
    class Halved(torch.nn.Linear):
        def forward(self, hidden):
            return super().forward(hidden) / 2

    model = build(T.OPTConfig(**OPT))
    own = model.lm_head
    model.lm_head = Halved(own.in_features, own.out_features, bias=False)
    policy, line = settled(model)
    assert not policy.logprob_module.use_fused_head and "is a Halved" in line


def logits_rounded(monkeypatch):
    """The truth by the model's own head, whose logits are rounded to bfloat16."""
    monkeypatch.setattr(layouts, "_float32_head", lambda model: contextlib.nullcontext())


@pytest.mark.parametrize("rounded", [False, True])
def test_the_fused_head_is_not_refused_for_what_rounded_logits_would_show(monkeypatch, rounded):
    """Over a large vocabulary logits are tens, and rounded in steps of an eighth and more. Layers
    that add nothing give every kernel the same bits: then only the head's rounding is left."""
    if rounded:
        logits_rounded(monkeypatch)
    config = T.Qwen3Config(**HEADS | {"vocab_size": 4096, "tie_word_embeddings": True})
    torch.manual_seed(0)
    config.initializer_range = 0.05
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.model.norm.weight.fill_(100.0)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    policy, line = settled(model.to(torch.bfloat16).train())
    assert policy.logprob_module.use_fused_head is not rounded
    assert ("fused head: log-probabilities" in line) is rounded
