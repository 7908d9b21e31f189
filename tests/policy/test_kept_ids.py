"""Log-probabilities over the ids that a sampler kept, against fp64 row by row."""

import layout_cases
import pytest
import torch
from layout_cases import gradients, laid, made, worst
from policy_cases import WORDS, fresh
from torch.utils._python_dispatch import TorchDispatchMode

from rloo_cli.data.packing import KeptIds
from rloo_cli.data.sampling_mask import SamplingMask
from rloo_cli.policy import masked_head
from rloo_cli.policy.masked_head import KeptLogits

TEMPERATURE = 0.7


def masked(groups, most=9, seed=3):
    """The groups, each of whose tokens was chosen from a few ids: some of one, itself."""
    draw = torch.Generator().manual_seed(seed)
    for rollout in (r for group in groups for r in group.rollouts):
        kept = []
        for token in rollout.completion_ids:
            count = int(torch.randint(most, (1,), generator=draw))
            others = torch.randperm(WORDS, generator=draw).tolist()[:count]
            kept.append(sorted({token, *others}))
        rollout.sampling_mask = SamplingMask.from_lists(kept)
    return groups


def by_rows(model, groups, temperature):
    """logp and entropy of every token, a row at a time: softmax over its own ids. -> (N,), (N,)"""
    logps, entropies = [], []
    for group in groups:
        for rollout in group.rollouts:
            ids = torch.tensor([group.prompt_ids + rollout.completion_ids])
            logits = model(input_ids=ids).logits[0, len(group.prompt_ids) - 1 : -1]
            start = 0
            for at, token in enumerate(rollout.completion_ids):
                end = start + rollout.sampling_mask.counts[at]
                kept = rollout.sampling_mask.ids[start:end].tolist()
                logp = (logits[at, kept] / temperature).log_softmax(-1)
                logps.append(logp[kept.index(token)])
                entropies.append(-(logp.exp() * logp).sum())
                start = end
    return torch.stack(logps), torch.stack(entropies)


def in_float64(name):
    """A family's model in float64, and the groups with masks."""
    return fresh(name).double().eval(), masked(made())


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
def test_log_probabilities_over_the_kept_ids_have_the_rows_values_and_gradients(layout, fused):
    model, groups = in_float64("qwen3")
    expected, entropy = by_rows(model, groups, TEMPERATURE)
    weights = torch.linspace(-1, 1, len(expected))
    (expected * weights.double()).sum().backward()
    right = gradients(model)

    policy = layout_cases.policy("qwen3", layout, fused, temperature=TEMPERATURE)
    found = policy.logp(laid(groups, layout), want_entropy=True)
    (found.logp * weights).sum().backward()
    assert (found.logp - expected).abs().max() < 1e-5
    assert (found.entropy - entropy).abs().max() < 1e-5 and not found.entropy.requires_grad
    assert worst(gradients(policy.model), right) < 1e-4


def test_a_model_with_a_bias_and_a_scale_has_them_over_the_kept_ids_too():
    model, groups = in_float64("gpt_neox")
    for each in (model, other := fresh("gpt_neox")):
        head = each.get_output_embeddings()
        head.bias = torch.nn.Parameter(torch.linspace(-2, 2, WORDS).to(head.weight.dtype))
    for scale in (1.0, 0.5):
        model.zero_grad()
        expected, _ = by_rows(model, groups, TEMPERATURE / scale)
        expected.square().sum().backward()
        policy = layout_cases.policy("gpt_neox", "padded", model=other, temperature=TEMPERATURE)
        policy.logprob_module.logit_scale = scale
        other.zero_grad()
        found = policy.logp(laid(groups, "padded")).logp
        found.square().sum().backward()
        assert (found - expected).abs().max() < 1e-5
        assert worst(gradients(other), gradients(model)) < 1e-4


def test_a_cap_on_the_logits_is_kept_with_the_models_own_head():
    model, groups = in_float64("gemma2")
    expected, _ = by_rows(model, groups, TEMPERATURE)
    policy = layout_cases.policy("gemma2", "padded", fused=False, temperature=TEMPERATURE)
    assert (policy.frozen_logp(laid(groups, "padded")).logp - expected).abs().max() < 1e-5


def test_the_kls_own_temperature_is_over_the_kept_ids_too():
    model, groups = in_float64("qwen3")
    expected, _ = by_rows(model, groups, 1.0)
    policy = layout_cases.policy("qwen3", "padded", temperature=TEMPERATURE)
    policy.kl_temperature = 1.0
    found = policy.frozen_logp(laid(groups, "padded")).kl_logp
    assert (found - expected).abs().max() < 1e-5


def test_an_entropy_bonus_has_the_gradient_of_the_entropy_over_the_kept_ids():
    model, groups = in_float64("qwen3")
    _, entropy = by_rows(model, groups, TEMPERATURE)
    entropy.sum().backward()
    policy = layout_cases.policy("qwen3", "padded", fused=False, temperature=TEMPERATURE)
    policy.logprob_module.entropy_grad = True
    policy.logp(laid(groups, "padded")).entropy.sum().backward()
    assert worst(gradients(policy.model), gradients(model)) < 1e-4


def test_a_token_that_had_no_other_id_has_log_probability_0_and_no_gradient():
    groups = made()
    for rollout in (r for group in groups for r in group.rollouts):
        rollout.sampling_mask = SamplingMask.from_lists([i] for i in rollout.completion_ids)
    policy = layout_cases.policy("qwen3", "padded")
    found = policy.logp(laid(groups, "padded")).logp
    found.sum().backward()
    assert torch.equal(found, torch.zeros_like(found))
    assert all(not g.any() for g in gradients(policy.model).values())


def test_logits_of_kept_ids_have_exact_gradients_in_blocks_of_any_size(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(5, 8, generator=draw), torch.randn(11, 8, generator=draw)
    bias, token = torch.randn(11, generator=draw), torch.tensor([0, 0, 0, 1, 2, 2, 3, 4, 4])
    ids, g = torch.tensor([3, 0, 10, 3, 5, 3, 9, 1, 2]), torch.randn(9, generator=draw)
    target = torch.tensor([0, 3, 4, 6, 7])
    for block in (1, 24, 1000):
        monkeypatch.setattr(masked_head, "BLOCK_NUMBERS", block)
        ours = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
        KeptLogits.apply(*ours, KeptIds(ids, token, target)).backward(g)
        theirs = [t.clone().double().requires_grad_() for t in (hidden, weight, bias)]
        ((theirs[0][token] * theirs[1][ids]).sum(-1) + theirs[2][ids]).backward(g.double())
        for one, other in zip(ours, theirs, strict=True):
            assert (one.grad - other.grad).abs().max() < 1e-5


class Operations(TorchDispatchMode):
    """The names of the operations that are run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_no_pass_waits_to_know_how_many_ids_there_are():
    hidden, weight = (torch.ones(n, 8).requires_grad_() for n in (3, 11))
    kept = KeptIds(torch.tensor([3, 0, 3, 9]), torch.tensor([0, 0, 1, 2]), torch.tensor([0, 2, 3]))
    assert kept.used.tolist() == [0, 3, 9] and kept.used_index.tolist() == [1, 0, 1, 2]
    with Operations() as seen:
        KeptLogits.apply(hidden, weight, None, kept).sum().backward()
    waiting = {"_unique2", "unique_dim", "unique_consecutive", "nonzero", "_local_scalar_dense"}
    assert "index_add_" in seen.names and not seen.names & waiting


def test_half_precision_weights_get_a_gradient_that_is_rounded_once():
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 8, generator=draw).bfloat16().requires_grad_()
    weight = torch.randn(3, 8, generator=draw).bfloat16().requires_grad_()
    token, ids = torch.arange(300), torch.zeros(300, dtype=torch.long)
    kept = KeptIds(ids, token, token)
    KeptLogits.apply(hidden, weight, None, kept).backward(torch.full((300,), 0.37))
    exact = (hidden.detach().double() * 0.37).sum(0)
    assert (weight.grad[0].double() - exact).abs().max() <= exact.abs().max() * 2**-8
    assert not weight.grad[1:].any()


def test_a_token_outside_of_its_own_mask_is_refused():
    groups = masked(made())
    rollout = groups[1].rollouts[2]
    wrong = [[(token + 1) % WORDS] for token in rollout.completion_ids]
    rollout.sampling_mask = SamplingMask.from_lists(wrong)
    with pytest.raises(AssertionError, match="own sampling mask"):
        laid(groups, "padded")


def test_a_completion_without_a_mask_among_others_that_have_one_is_refused():
    groups = masked(made())
    groups[2].rollouts[0].sampling_mask = None
    with pytest.raises(AssertionError, match="no sampling mask"):
        laid(groups, "padded")


def test_an_episode_that_failed_before_its_first_token_needs_no_mask():
    groups = masked(made())
    groups[2].rollouts[0].sampling_mask, groups[2].rollouts[0].failed = None, "reset failed"
    policy = layout_cases.policy("qwen3", "padded")
    assert bool(policy.frozen_logp(laid(groups, "padded")).logp.isfinite().all())
