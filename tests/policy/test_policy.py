"""Log-probabilities of completions: equal to the textbook's, whatever the family and the layout."""

import pytest
import torch
from assert_refused import assert_refused
from policy_cases import FAMILIES, alone, each_alone, fresh, groups, make, packed

from rloo_cli.data.vocabulary import check_vocabulary_sizes
from rloo_cli.policy import load
from rloo_cli.policy.model import Policy
from rloo_cli.policy.reference import Reference
from rloo_cli.utils.errors import ConfigError

family = pytest.mark.parametrize("name", FAMILIES)


def close(a, b, tolerance=1e-5):
    torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=tolerance)


@family
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_equal_those_of_each_row_alone(name, temperature):
    chosen = groups()
    with torch.no_grad():
        found = Policy(make(name), temperature).logp(packed(chosen, [0, 1, 2]), want_entropy=True)
        logp, entropy = each_alone(make(name), chosen, temperature)
    assert found.logp.dtype == torch.float32 and found.kl_logp is None
    close(found.logp, logp)
    close(found.entropy, entropy)


@family
def test_a_gradient_equals_the_sum_of_those_of_each_row_alone(name):
    model, chosen = fresh(name), groups()
    load.zero_dropout(model)
    model.train()
    micro = packed(chosen, [0, 1, 2])
    weight = torch.linspace(-1, 1, len(micro.target))
    (Policy(model, 0.7).logp(micro).logp * weight).sum().backward()
    together = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    start = 0
    for row in ((g, r) for g in chosen for r in g.rollouts):
        logp, _ = alone(model, row[0].prompt_ids, row[1].completion_ids, 0.7)
        (logp * weight[start : start + len(logp)]).sum().backward()
        start += len(logp)
    largest = max(float(p.grad.norm()) for p in model.parameters() if p.grad is not None)
    for n, p in model.named_parameters():
        if p.grad is not None:
            scale = max(float(p.grad.norm()), 1e-2 * largest)
            assert float((together[n] - p.grad).norm()) <= 2e-5 * scale, n


@family
def test_the_head_runs_on_the_rows_that_predict_a_completion_token_alone(name):
    policy, seen, micro = Policy(fresh(name), 1.0), [], packed(groups(), [0, 1, 2])
    policy.logprob_module.head.register_forward_hook(
        lambda head, given, out: seen.append(given[0].shape)
    )
    policy.logp(micro)
    assert [s[:-1].numel() for s in seen] == [len(micro.target)]
    assert len(micro.target) == 3 + 1 + 8 + 1 + 2 + 4


def test_the_head_is_left_as_it_was_found():
    model = make()
    with torch.no_grad():
        before = model(torch.tensor([[5, 6, 7]])).logits
        Policy(model, 1.0).logp(packed(groups(), [0]))
        assert torch.equal(model(torch.tensor([[5, 6, 7]])).logits, before)
    assert not model.get_output_embeddings()._forward_pre_hooks


def test_the_head_is_left_as_it_was_found_after_a_failure():
    model = fresh()
    micro = packed(groups(), [0])
    micro.input_ids = micro.input_ids + 1000  # no such word
    with pytest.raises(IndexError):
        Policy(model, 1.0).logp(micro)
    assert not model.get_output_embeddings()._forward_pre_hooks


def test_positions_are_passed_to_whom_takes_them_and_to_no_other():
    model, seen, micro = fresh("gpt2"), [], packed(groups(), [0, 1])
    forward = model.forward

    def with_positions(input_ids, attention_mask, use_cache, position_ids):
        seen.append(position_ids)
        return forward(input_ids, attention_mask=attention_mask, position_ids=position_ids)

    def without(input_ids, attention_mask, use_cache):
        return forward(input_ids, attention_mask=attention_mask)

    model.forward = with_positions
    first = Policy(model, 1.0).frozen_logp(micro).logp
    model.forward = without
    close(Policy(model, 1.0).frozen_logp(micro).logp, first, 1e-6)
    assert len(seen) == 1 and torch.equal(seen[0], micro.position_ids)


def test_a_single_completion_of_a_single_token():
    chosen = [groups()[0]]
    chosen[0].rollouts = chosen[0].rollouts[1:]
    with torch.no_grad():
        found = Policy(make(), 1.0).logp(packed(chosen, [0]), want_entropy=True)
        logp, entropy = each_alone(make(), chosen, 1.0)
    assert found.logp.shape == found.entropy.shape == (1,)
    close(found.logp, logp)
    close(found.entropy, entropy)


def test_the_numbers_do_not_depend_on_who_shares_the_pass():
    chosen, policy = groups(), Policy(make(), 1.0)
    with torch.no_grad():
        whole = policy.logp(packed(chosen, [0, 1, 2])).logp
        parts = [policy.logp(packed(chosen, [i])).logp for i in range(3)]
        close(torch.cat(parts), whole, 4e-6)  # four times the last digit of a sum of about 8
        turned = policy.logp(packed(chosen, [2, 0, 1])).logp
    close(turned, torch.cat([parts[2], parts[0], parts[1]]), 4e-6)


def test_entropy_is_between_zero_and_that_of_the_uniform():
    with torch.no_grad():
        cold = Policy(make(), 0.05).logp(packed(groups(), [0, 1]), want_entropy=True).entropy
        hot = Policy(make(), 1e4).logp(packed(groups(), [0, 1]), want_entropy=True).entropy
    assert float(cold.min()) >= 0 and float(cold.mean()) < 0.2
    close(hot, torch.full_like(hot, 40).log(), 1e-4)


def test_entropy_is_asked_for_and_has_no_gradient():
    policy, micro = Policy(fresh(), 1.0), packed(groups(), [0])
    assert policy.logp(micro).entropy is None
    found = policy.logp(micro, want_entropy=True)
    assert found.logp.requires_grad and not found.entropy.requires_grad


def test_the_temperature_of_the_kl_is_its_own():
    policy, chosen = Policy(make(), 0.7, kl_temperature=1.0), groups()
    with torch.no_grad():
        found = policy.logp(packed(chosen, [0, 1, 2]))
        close(found.logp, each_alone(make(), chosen, 0.7)[0])
        close(found.kl_logp, each_alone(make(), chosen, 1.0)[0])
        assert torch.equal(
            Reference(make(), 1.0).logp(packed(chosen, [0, 1, 2])).logp, found.kl_logp
        )
    assert Policy(make(), 0.7, 0.7).logp(packed(chosen, [0])).kl_logp is None


@pytest.mark.parametrize("training", [True, False])
def test_frozen_log_probabilities_leave_the_model_as_it_was(training):
    model = fresh().train(training)
    found = Policy(model, 0.7, 1.0).frozen_logp(packed(groups(), [0]))
    assert model.training is training
    assert all(m.training is training for m in model.modules())
    assert not found.logp.requires_grad and not found.kl_logp.requires_grad


def test_frozen_log_probabilities_leave_the_model_as_it_was_after_a_failure():
    model, micro = fresh().train(), packed(groups(), [0])
    micro.input_ids = micro.input_ids + 1000
    with pytest.raises(IndexError):
        Policy(model, 1.0).frozen_logp(micro)
    assert model.training


def test_frozen_log_probabilities_are_without_dropout():
    model = fresh("gpt2", resid_pdrop=0.5, attn_pdrop=0.5, embd_pdrop=0.5).train()
    policy, micro = Policy(model, 1.0), packed(groups(), [0, 1])
    assert torch.equal(policy.frozen_logp(micro).logp, policy.frozen_logp(micro).logp)
    assert not torch.equal(policy.logp(micro).logp, policy.logp(micro).logp)


def test_a_reference_is_frozen():
    model = fresh("gpt2", resid_pdrop=0.5).train()
    frozen = Reference(model, 0.7)
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    assert not frozen.logp(packed(groups(), [0])).logp.requires_grad
    assert frozen.temperature == frozen.kl_temperature == 0.7


DROPPING = {
    "qwen3": {"attention_dropout": 0.5},
    "gpt_neox": {"attention_dropout": 0.5, "hidden_dropout": 0.5},
    "gpt2": {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5},
    "bloom": {"attention_dropout": 0.5, "hidden_dropout": 0.5},  # numbers of the layers' own
    "falcon": {"attention_dropout": 0.5, "hidden_dropout": 0.5},  # the config's, in each forward
    "opt": {"attention_dropout": 0.5, "dropout": 0.5, "layerdrop": 0.5},
}


@pytest.mark.parametrize("name", DROPPING)
def test_without_dropout_training_equals_evaluation(name):
    model, micro = fresh(name, **DROPPING[name]).train(), packed(groups(), [0, 1, 2])
    policy = Policy(model, 1.0)
    with torch.no_grad():
        calm = policy.frozen_logp(micro).logp
        assert float((policy.logp(micro).logp - calm).abs().max()) > 1e-2
        load.zero_dropout(model)
        close(policy.logp(micro).logp, calm, 1e-6)


def test_gradient_checkpointing_changes_no_gradient():
    gradients = []
    for checkpointed in (False, True):
        model = fresh().train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        Policy(model, 1.0).logp(packed(groups(), [0, 1])).logp.sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_half_precision_weights_give_log_probabilities_in_float32():
    model = fresh().to(torch.bfloat16)
    with torch.no_grad():
        found = Policy(model, 1.0).logp(packed(groups(), [0, 1, 2]), want_entropy=True)
        exact = Policy(make(), 1.0).logp(packed(groups(), [0, 1, 2])).logp
    assert found.logp.dtype == found.entropy.dtype == torch.float32
    close(found.logp, exact, 0.3)
    assert len(found.logp.unique()) > 10  # bfloat16 would round most of them together


@pytest.mark.parametrize("name", ["qwen3", "gpt_neox", "gpt2"])
def test_a_head_in_float32_multiplies_what_bfloat16_rounded_no_further(name):
    model = fresh(name).to(torch.bfloat16)
    micro = packed(groups(), [0, 1, 2])
    before = Policy(model, 1.0).logprob_module.logits(micro)
    seen = []
    head = model.get_output_embeddings()
    load.compute_head_in_float32(model)
    with torch.no_grad():
        handle = head.register_forward_hook(lambda m, args, out: seen.append((args[0], out)))
        after = Policy(model, 1.0).logprob_module.logits(micro)
        handle.remove()
    hidden, out = seen[0]
    bias = 0 if head.bias is None else head.bias.float()
    assert before.dtype == torch.bfloat16 and after.dtype == out.dtype == torch.float32
    assert torch.equal(out, hidden.float() @ head.weight.float().T + bias)
    Policy(model, 1.0).logp(micro).logp.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in model.parameters())


def test_policy_and_reference_of_unlike_vocabularies_are_refused_with_both_sizes(sentence):
    check_vocabulary_sizes(40, 40)
    with pytest.raises(ConfigError) as caught:
        check_vocabulary_sizes(40, 41)
    assert_refused(caught, 2, "40 tokens", where="model.ref_path")
    sentence(caught)
