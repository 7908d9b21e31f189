"""Attention over a shared row is dense attention under the mask that the row stands for.

Also who may not have it, that a model gets its own back, and the traps of shared rows.
"""

import json
from types import SimpleNamespace

import pytest
import torch
import transformers
from layout_cases import SEVERAL, gradients, laid, made, policy, worst
from policy_cases import each_alone, fresh
from torch.nn.functional import scaled_dot_product_attention as dense

from rloo_cli.data import packing, segments
from rloo_cli.policy import flash_kernels, shared_attention
from rloo_cli.policy.shared_attention import (
    SHARED_LAYOUT_ARGUMENT,
    CascadeAttention,
    SharedAttentionError,
)

H, G, D = 4, 2, 8
ROWS = {
    "several groups": SEVERAL,
    "one group": ((7, (5, 2, 3)),),
    "one completion": ((3, (6,)),),
    "equal lengths": ((4, (3, 3, 3)), (4, (3, 3, 3))),
    "completions of one token alone": ((5, (1, 1)), (2, (1,))),
    "a group of one token each between others": ((3, (2, 2)), (6, (1, 1)), (2, (3, 2))),
    "a prompt of one token": ((1, (4, 2)),),
}


def plan_of(lengths):
    return laid(made(lengths), "shared").shared_layout


def visible(lengths):
    """Which row sees which: of its own prompt or completion those before it, and its prompt."""
    of = [(i, -1) for i, (p, _) in enumerate(lengths) for _ in range(p)]
    of += [
        (i, k) for i, (_, c) in enumerate(lengths) for k, n in enumerate(c) for _ in range(n - 1)
    ]
    return torch.tensor(
        [
            [(a == b and s <= r) or (b == (a[0], -1) and a[1] >= 0) for s, b in enumerate(of)]
            for r, a in enumerate(of)
        ]
    )


def inputs(rows, dtype):
    draw = torch.Generator().manual_seed(2)
    shapes = [(rows, H, D), (rows, G, D), (rows, G, D), (rows, H, D)]
    found = [torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]
    return [t.requires_grad_() for t in found[:3]], found[3]


@pytest.mark.parametrize(("dtype", "exact"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("kernels", [flash_kernels._CpuKernels, flash_kernels._EagerKernels])
@pytest.mark.parametrize("name", ROWS)
def test_output_and_gradients_are_those_of_dense_attention_under_a_mask(
    monkeypatch, name, kernels, dtype, exact
):
    monkeypatch.setattr(shared_attention, "select_flash_kernels", lambda q: kernels)
    mask, scale = visible(ROWS[name]), 0.4
    (q, k, v), grad = inputs(len(mask), dtype)
    out = CascadeAttention.apply(q, k, v, plan_of(ROWS[name]), scale)
    found = [out, *torch.autograd.grad(out, (q, k, v), grad)]
    sides = [t.transpose(0, 1)[None] for t in (q, k, v)]
    whole = dense(*sides, attn_mask=mask, scale=scale, enable_gqa=True)[0].transpose(0, 1)
    expected = [whole, *torch.autograd.grad(whole, (q, k, v), grad)]
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype and float((a - b).detach().abs().max()) <= exact


def test_a_backward_pass_changes_nothing_that_another_would_read():
    (q, k, v), grad = inputs(len(visible(SEVERAL)), torch.float64)
    out = CascadeAttention.apply(q, k, v, plan_of(SEVERAL), 1.0)
    first = torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
    for a, b in zip(torch.autograd.grad(out, (q, k, v), grad), first, strict=True):
        assert torch.equal(a, b)


def called(plan, q=None, k=None, mask=None, **given):
    """The function as a layer calls it."""
    rows = 1 if plan is None else sum(plan.segment_lengths)
    q = torch.randn(1, H, rows, D) if q is None else q
    k = torch.randn(1, G, rows, D) if k is None else k
    given = (
        {"dropout": 0.0, "scaling": D**-0.5}
        | given
        | ({} if plan is None else {SHARED_LAYOUT_ARGUMENT: plan})
    )
    return shared_attention.shared_layout_attention(
        None, q, k, torch.randn(1, G, rows, D), mask, **given
    )


def test_a_layers_call_is_answered_and_counted():
    plan = plan_of(SEVERAL)
    out, weights = called(plan)
    assert out.shape == (1, sum(plan.segment_lengths), H, D) and weights is None
    called(plan, softcap=None, s_aux=None, sliding_window=None)
    assert plan.attention_calls == [2]


def test_the_scale_is_that_of_the_layer_or_the_usual_one():
    plan = plan_of(SEVERAL)
    q, k = (
        torch.randn(1, H, sum(plan.segment_lengths), D),
        torch.randn(1, G, sum(plan.segment_lengths), D),
    )

    def answer(**given):
        torch.manual_seed(0)
        return called(plan, q, k, **given)[0]

    assert torch.equal(answer(scaling=None), answer())
    assert not torch.allclose(answer(scaling=1.0), answer())


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"mask": torch.ones(1, 1, 1, 1)}, "attention_mask"),
        ({"dropout": 0.1}, "dropout"),
        ({"sliding_window": 19}, "sliding_window"),
        ({"softcap": 50.0}, "softcap"),
        ({"s_aux": torch.zeros(H)}, "s_aux"),
        ({"k": torch.randn(1, G, 56, 2 * D)}, "heads of unequal sizes"),
        ({"q": torch.randn(1, H, 3, D)}, "queries of shape"),
        ({"q": torch.randn(2, H, 56, D)}, "queries of shape"),
    ],
)
def test_what_shared_rows_do_not_have_is_refused(given, reason):
    plan = plan_of(SEVERAL)
    with pytest.raises(SharedAttentionError, match=reason):
        called(plan, **given)
    assert plan.attention_calls == [0]


def test_a_call_without_a_plan_is_refused():
    with pytest.raises(SharedAttentionError, match="without a plan"):
        called(None)


def test_a_window_that_holds_every_row_is_no_window():
    plan = plan_of(SEVERAL)
    assert plan.max_seqlen == 9 + 19
    called(plan, sliding_window=28)
    with pytest.raises(SharedAttentionError, match="sliding_window"):
        called(plan, sliding_window=27)


def names(model):
    return [c._attn_implementation for c in shared_attention._configs(model)]


def test_a_model_gets_our_attention_and_its_own_back():
    model = fresh()
    before = names(model)
    shared_attention.uninstall_shared_attention(model)  # it has its own: nothing to do
    shared_attention.install_shared_attention(model)
    shared_attention.install_shared_attention(model)  # twice is once
    assert shared_attention.has_shared_attention(model) and set(names(model)) == {
        shared_attention.SHARED_ATTENTION_NAME
    }
    shared_attention.uninstall_shared_attention(model)
    assert names(model) == before and not shared_attention.has_shared_attention(model)


def test_its_own_attention_is_lent_and_ours_is_back_afterwards_even_after_a_failure():
    model = fresh()
    before = names(model)
    with shared_attention.native_attention(model):
        assert names(model) == before
    shared_attention.install_shared_attention(model)
    with shared_attention.native_attention(model):
        assert names(model) == before and shared_attention.has_shared_attention(model)
        model(torch.tensor([[5, 6, 7]]))
    assert set(names(model)) == {shared_attention.SHARED_ATTENTION_NAME}
    with pytest.raises(IndexError), shared_attention.native_attention(model):
        model(torch.tensor([[5, 6, 1000]]))
    assert set(names(model)) == {shared_attention.SHARED_ATTENTION_NAME}
    shared_attention.uninstall_shared_attention(model)
    assert names(model) == before


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_what_is_saved_does_not_tell_that_our_attention_was_there(tmp_path, kind):
    model = fresh()
    model.set_attn_implementation(kind)
    model.save_pretrained(tmp_path / "before")
    shared_attention.install_shared_attention(model)
    model.save_pretrained(tmp_path / "with")
    shared_attention.uninstall_shared_attention(model)
    model.save_pretrained(tmp_path / "after")
    first, *others = (
        json.loads((tmp_path / name / "config.json").read_text())
        for name in ("before", "with", "after")
    )
    assert others == [first, first] and names(model) == [kind] * len(names(model))


@pytest.mark.parametrize("name", ["qwen3", "gpt_neox", "gpt2"])
@pytest.mark.parametrize("fused", [True, False])
def test_gradient_checkpointing_at_shared_rows_changes_no_gradient(name, fused):
    found = []
    for checkpointed in (False, True):
        ours = policy(name, "shared", fused, checkpointed)
        micro = laid(made(), "shared")
        ours.logp(micro).logp.sum().backward()
        assert micro.shared_layout.attention_calls == [
            4 if checkpointed else 2
        ]  # each layer again, with its plan
        found.append(gradients(ours.model))
    assert worst(found[1], found[0]) <= 1e-6


def wrong_by(ours, micro, chosen):
    """Largest distance of a log-probability from the row alone."""
    with torch.no_grad(), shared_attention.native_attention(ours.model):
        truth = each_alone(ours.model, chosen, ours.temperature)[0]
    return float((ours.frozen_logp(micro).logp.double() - truth).abs().max())


@pytest.mark.parametrize("name", ["qwen3", "gpt_neox", "gpt2"])
def test_shared_rows_under_a_stock_attention_would_be_wrong_without_a_word(name):
    chosen, ours = made(), policy(name, "shared")
    assert wrong_by(ours, laid(chosen, "shared"), chosen) <= 1e-4
    shared_attention.uninstall_shared_attention(ours.model)
    assert wrong_by(ours, laid(chosen, "shared"), chosen) > 0.1


@pytest.mark.parametrize("name", ["qwen3", "gpt_neox", "gpt2"])
def test_a_model_with_our_attention_answers_no_rows_without_a_plan(name):
    ours = policy(name, "shared")
    for layout in ("packed", "padded"):
        with pytest.raises(SharedAttentionError, match="without a plan"):
            ours.frozen_logp(laid(made(), layout))
    with pytest.raises(SharedAttentionError, match="without a plan"):
        ours.model(torch.tensor([[5, 6, 7]]))


def test_a_cache_would_hide_the_documents_of_a_packed_row_and_is_never_asked_for(monkeypatch):
    chosen, ours = made(), policy("qwen3", "packed")
    micro, seen = laid(chosen, "packed"), []
    assert wrong_by(ours, micro, chosen) <= 1e-4
    given = type(ours.logprob_module)._forward_inputs
    for layout in ("shared", "packed", "padded"):
        seen.append(given(ours.logprob_module, laid(chosen, layout))["use_cache"])
    assert seen == [False] * 3
    monkeypatch.setattr(
        type(ours.logprob_module),
        "_forward_inputs",
        lambda self, micro: given(self, micro) | {"use_cache": True},
    )
    assert wrong_by(ours, micro, chosen) > 0.1


@pytest.mark.parametrize("checkpointed", [False, True])
def test_keys_with_gradient_in_a_cache_would_be_lost_where_activations_are_recomputed(checkpointed):
    # The other way to compute a prompt once: right without checkpointing, and dropped with it.
    ours, chosen = policy("qwen3", "padded", False, checkpointed), made()[:1]
    ours.model.train()
    prompt, completion = chosen[0].prompt_ids, chosen[0].rollouts[0].completion_ids
    cache = transformers.DynamicCache()
    before = ours.model(torch.tensor([prompt]), past_key_values=cache, use_cache=True).logits
    places = torch.arange(len(prompt), len(prompt) + len(completion))[None]
    after = ours.model(
        torch.tensor([completion]), past_key_values=cache, use_cache=True, position_ids=places
    ).logits
    logits = torch.cat([before[0, -1:], after[0, :-1]])
    truth = each_alone(ours.model.eval(), chosen, 1.0)[0][: len(completion)]
    found = segments.target_logprobs(logits, torch.tensor(completion), 1.0)
    assert (float((found - truth).detach().abs().max()) > 0.1) is checkpointed
    inputs = [
        ours.logprob_module._forward_inputs(laid(chosen, layout)) for layout in packing.LAYOUTS
    ]
    assert not any("past_key_values" in given for given in inputs)


def test_configs_are_found_once_each():
    model = fresh()
    assert shared_attention._configs(model) == [model.config]
    assert shared_attention._configs(SimpleNamespace(modules=lambda: [model, model])) == [
        model.config
    ]
