"""Episodes of several turns: flat ids, and what is computed for each token."""

import math

import pytest
import torch
from layout_cases import gradients, laid, policy, worst
from policy_cases import fresh

from rloo_cli.data.batch import Group, Rollout, Turn
from rloo_cli.data.packing import LAYOUTS, store_column

layouts = pytest.mark.parametrize("layout", LAYOUTS)


def turn(got, said, logp=0.0):
    return Turn(list(got), list(said), [logp] * len(said), "", "stop", 3)


def episode(*parts, ended=True):
    return Rollout.from_turns([turn(got, said) for got, said in parts], ended, seed=1)


def episodes():
    """Two groups of two: several turns, one turn, and one that begins with an observation."""
    return [
        Group(0, {}, "", [5, 6, 7], [episode(([], [8, 9]), ([10, 11, 12], [13, 2])),
                                     episode(([], [8, 14, 2]))]),
        Group(1, {}, "", [5], [episode(([21, 22], [23]), ([24], [25]), ([26, 27], [28, 2])),
                               episode(([], [3]), ([4], [2]))]),
    ]  # fmt: skip


def test_flat_ids_mask_and_log_probabilities_are_derived_from_the_turns():
    made = Rollout.from_turns([turn([], [8, 9], -0.5), turn([10], [2], -1.0)], True, seed=7)
    assert made.completion_ids == [8, 9, 10, 2] and made.mask == [1, 1, 0, 1]
    assert made.behaviour_logp[:2] == [-0.5, -0.5] and math.isnan(made.behaviour_logp[2])
    assert made.length == 3 and made.sampled_ids == [8, 9, 2]
    assert made.sampled_logp == [-0.5, -0.5, -1.0] and made.weight_version == 3
    silent = Rollout.from_turns([Turn([], [8], None, "", "stop", 0)], True, seed=7)
    assert silent.behaviour_logp is None and silent.sampled_logp is None


@layouts
def test_what_a_tool_said_is_read_and_its_log_probability_is_never_asked_for(layout):
    groups = episodes()
    micro = laid(groups, layout)
    sampled = [i for group in groups for row in group.rollouts for i in row.sampled_ids]
    assert micro.target.tolist() == sampled and micro.mask.tolist() == [1.0] * len(sampled)
    assert micro.group_lengths == [(3, [7, 3]), (1, [9, 3])]  # the work that a forward pass is
    assert not micro.behaviour_logp.isnan().any()
    store_column(micro.target.float(), micro.group_slices, groups, "ref_logp")
    assert groups[1].ref_logp[0].tolist() == groups[1].rollouts[0].sampled_ids


WEIGHTS = torch.tensor([0.7, -1.1, 1.3, -0.4], dtype=torch.float64)  # as advantages would be


def model_of():
    return fresh("gpt_neox", initializer_range=0.08).double()


def rows_apart():
    """Gradients of every row alone, with the tools' tokens masked."""
    plain, sums = model_of(), []
    for group in episodes():
        for row in group.rollouts:
            ids = torch.tensor([group.prompt_ids + row.completion_ids])
            logits = plain(input_ids=ids).logits[0, len(group.prompt_ids) - 1 : -1] / 0.7
            logp = logits.log_softmax(-1).gather(1, torch.tensor(row.completion_ids)[:, None])
            sums.append((logp[:, 0] * torch.tensor(row.mask)).sum())
    (torch.stack(sums) * WEIGHTS).sum().backward()
    return gradients(plain)


def test_the_gradient_is_that_of_rows_trained_apart_with_tool_tokens_masked():
    """In float64 throughout: the policy's own log-probabilities are float32."""
    model, micro = model_of(), laid(episodes(), "padded")
    logits = model(
        input_ids=micro.input_ids,
        attention_mask=micro.attention_mask,
        position_ids=micro.position_ids,
    ).logits
    logp = (logits.flatten(0, 1)[micro.logit_index] / 0.7).log_softmax(-1)
    found = logp.gather(1, micro.target[:, None])[:, 0]
    (found * micro.mask * WEIGHTS[micro.sequence_ids]).sum().backward()
    assert worst(gradients(model), rows_apart()) <= 1e-12


@layouts
def test_every_layout_has_that_gradient(layout):
    model = model_of()
    ours = policy("gpt_neox", layout, fused=False, model=model)
    micro = laid(episodes(), layout)
    found = ours.logp(micro).logp
    (found * micro.mask * WEIGHTS[micro.sequence_ids]).sum().backward()
    assert worst(gradients(model), rows_apart()) <= 1e-6


def reworded():
    """The same episodes, told other things and of another length: only an observation's last token
    is as it was, from which the next turn's first is predicted."""
    groups = episodes()
    groups[0].rollouts[0] = episode(([], [8, 9]), ([15, 16, 17, 18, 12], [13, 2]))
    groups[1].rollouts[0] = episode(([19, 22], [23]), ([24], [25]), ([27], [28, 2]))
    return groups


def gradient_without_attention(groups, layout, read):
    """The gradient of log-probabilities and a KL; `read` False: no token sees another."""
    model = fresh("gpt_neox", initializer_range=0.08)
    for name, weight in model.named_parameters():
        if "attention.dense" in name and not read:
            weight.data.zero_()
    ours = policy("gpt_neox", layout, fused=False, model=model)
    micro = laid(groups, layout)
    found = ours.logp(micro).logp
    kl = (-2.0 - found).exp() - 1 + found
    total = found * WEIGHTS[micro.sequence_ids] + 0.3 * kl
    (total * micro.mask).sum().backward()
    return {n: g for n, g in gradients(model).items() if "attention" not in n}


@layouts
def test_no_gradient_comes_from_what_a_tool_said(layout):
    got = gradient_without_attention(episodes(), layout, read=False)
    assert worst(gradient_without_attention(reworded(), layout, read=False), got) <= 1e-5
    # It is read all the same: what the policy says after it depends on it.
    got = gradient_without_attention(episodes(), layout, read=True)
    assert worst(gradient_without_attention(reworded(), layout, read=True), got) > 1e-2


def row_of_its_own(got, said):
    """A turn whose history was written anew: it reads nothing of what came before."""
    return Turn(list(got), list(said), [0.0] * len(said), "", "stop", 3, begins_row=True)


def several_rows():
    """Episodes of three rows, of one, and of two, the second of which goes on for two turns."""
    cut = [turn([], [8, 9]), row_of_its_own([30, 31], [13, 2]), row_of_its_own([32], [14])]
    on = [turn([21], [23, 2]), row_of_its_own([24, 25, 26], [27]), turn([28], [29, 2])]
    return [
        Group(0, {}, "", [5, 6, 7], [Rollout.from_turns(cut, True, 1), episode(([], [8, 14, 2]))]),
        Group(1, {}, "", [5], [Rollout.from_turns(on, True, 1), episode(([], [3]), ([4], [2]))]),
    ]  # fmt: skip


# Each row alone: (the completion it is of, its ids, which of them are the policy's own).
ROWS = [
    (0, [5, 6, 7, 8, 9], [3, 4]), (0, [30, 31, 13, 2], [2, 3]), (0, [32, 14], [1]),
    (1, [5, 6, 7, 8, 14, 2], [3, 4, 5]),
    (2, [5, 21, 23, 2], [2, 3]), (2, [24, 25, 26, 27, 28, 29, 2], [3, 5, 6]),
    (3, [5, 3, 4, 2], [1, 3]),
]  # fmt: skip


def gradient_of_rows():
    """Gradients of these rows, each forwarded alone; a completion's rows share its weight."""
    plain, total = model_of(), torch.zeros((), dtype=torch.float64)
    for completion, ids, own in ROWS:
        logp = (plain(input_ids=torch.tensor([ids])).logits[0] / 0.7).log_softmax(-1)
        said = sum(logp[index - 1, ids[index]] for index in own)
        total = total + said * WEIGHTS[completion]
    total.backward()
    return gradients(plain)


def test_an_episode_of_several_rows_is_one_completion_whose_tokens_are_all_counted():
    groups = several_rows()
    cut, on = groups[0].rollouts[0], groups[1].rollouts[0]
    assert cut.row_starts == [2, 6] and on.row_starts == [3]
    assert episode(([], [8])).row_starts == [] and cut.length == 5 and on.length == 5
    assert cut.completion_ids == [8, 9, 30, 31, 13, 2, 32, 14]
    assert cut.mask == [1, 1, 0, 0, 1, 1, 0, 1]


@layouts
def test_rows_of_an_episode_read_nothing_of_each_other_and_share_its_advantage(layout):
    model, groups = model_of(), several_rows()
    ours = policy("gpt_neox", layout, fused=False, model=model)
    micro = laid(groups, layout)
    assert micro.target.tolist() == [i for g in groups for r in g.rollouts for i in r.sampled_ids]
    assert micro.num_sequences == 4
    found = ours.logp(micro).logp
    (found * micro.mask * WEIGHTS[micro.sequence_ids]).sum().backward()
    assert worst(gradients(model), gradient_of_rows()) <= 1e-6
    store_column(micro.target.float(), micro.group_slices, groups, "ref_logp")
    assert groups[0].ref_logp[0].tolist() == groups[0].rollouts[0].sampled_ids
