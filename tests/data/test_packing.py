"""Layouts of completions for a forward pass: where everything stands, and that all say the same."""

import functools
import math

import pytest
import torch
from layout_cases import SEVERAL, gradients, laid, made, policy, worst
from policy_cases import alone, fresh, groups, rollout

from rloo_cli.data.packing import LAYOUTS, pack_micro_batch, store_column

layouts = pytest.mark.parametrize("layout", LAYOUTS)
SOME = [(4, (0, 2)), (0, (1,)), (3, (0,))]  # in this order, and not all of each


def test_a_shared_row_is_all_prompts_and_then_all_completions_without_their_last_token():
    micro = laid(groups(), "shared")
    prompts = [5, 6, 7, 8, 9, 10, 0, 20, 1, 21]
    completions = [[11, 12], [], [0, 0, 14, 15, 16, 17, 18], [], [22], [1, 0, 24]]
    assert micro.input_ids.tolist() == [prompts + [i for ids in completions for i in ids]]
    assert micro.attention_mask is None
    positions = [0, 1, 2, 3, 4, 5, 0, 0, 1, 2]  # and each completion goes on from its prompt
    positions += [6, 7, 1, 2, 3, 4, 5, 6, 7, 3, 3, 4, 5]
    assert micro.position_ids.tolist() == [positions]


def test_a_shared_rows_bounds_are_those_of_every_segment_and_of_every_groups_completions():
    plan = laid(groups(), "shared").shared_layout
    assert plan.segment_lengths == [6, 1, 3, 2, 0, 7, 0, 1, 3] and plan.prompt_lengths == [6, 1, 3]
    assert plan.group_lengths == [2, 7, 4] and plan.prompt_tokens == 10
    assert plan.cu_seqlens.tolist() == [0, 6, 7, 10, 12, 12, 19, 19, 20, 23]
    assert plan.cu_seqlens_prompt.tolist() == [0, 6, 7, 10]
    assert plan.cu_seqlens_group.tolist() == [0, 2, 9, 13]
    assert plan.max_seqlen == 6 + 2 == 1 + 7 and plan.attention_calls == [0]
    assert {t.dtype for t in (plan.cu_seqlens, plan.cu_seqlens_prompt, plan.cu_seqlens_group)} == {
        torch.int32
    }


def test_only_a_shared_row_has_a_plan_and_each_has_its_own():
    first, second = (laid(groups(), "shared").shared_layout for _ in range(2))
    assert first.attention_calls is not second.attention_calls
    assert (
        laid(groups(), "packed").shared_layout is None
        and laid(groups(), "padded").shared_layout is None
    )


def test_a_packed_row_has_the_prompt_again_and_positions_from_0_for_every_completion():
    micro = laid(groups()[:1], "packed")
    assert micro.input_ids.tolist() == [[5, 6, 7, 8, 9, 10, 11, 12, 5, 6, 7, 8, 9, 10]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5]]
    assert micro.attention_mask is None
    assert micro.logit_index.tolist() == [5, 6, 7, 13]


def before(micro, index):
    """The tokens that a place of a row stands after, itself included, read off the positions."""
    ids, positions = micro.input_ids.flatten().tolist(), micro.position_ids.flatten().tolist()
    if micro.shared_layout is None:
        return ids[index - positions[index] : index + 1]
    bounds = micro.shared_layout.cu_seqlens.tolist()
    segment = max(
        s for s, n in enumerate(micro.shared_layout.segment_lengths) if n and bounds[s] <= index
    )
    own, count = ids[bounds[segment] : index + 1], len(micro.shared_layout.prompt_lengths)
    if segment < count:
        return own
    first = bounds[segment] - micro.shared_layout.prompt_tokens  # counted from the first completion
    starts = micro.shared_layout.cu_seqlens_group.tolist()
    group = max(
        g for g, n in enumerate(micro.shared_layout.group_lengths) if n and starts[g] <= first
    )
    return ids[bounds[group] : bounds[group + 1]] + own


@layouts
@pytest.mark.parametrize("parts", [None, SOME])
def test_every_target_is_predicted_by_the_row_that_has_seen_prompt_and_completion(layout, parts):
    chosen = made()
    micro = laid(chosen, layout, parts)
    rows = [
        (chosen[i].prompt_ids, chosen[i].rollouts[k]) for i, ks in micro.group_slices for k in ks
    ]
    assert micro.num_sequences == len(rows)
    assert micro.target.tolist() == [x for _, r in rows for x in r.completion_ids]
    assert micro.sequence_ids.tolist() == [
        s for s, (_, r) in enumerate(rows) for _ in r.completion_ids
    ]
    expected = [p + r.completion_ids[:n] for p, r in rows for n in range(len(r.completion_ids))]
    assert [before(micro, index) for index in micro.logit_index.tolist()] == expected
    reach = micro.position_ids.flatten()[micro.logit_index]
    assert reach.tolist() == [len(ids) - 1 for ids in expected]


@pytest.mark.parametrize("layout", ["shared", "packed"])
def test_the_last_token_of_a_completion_is_not_forwarded(layout):
    found = [laid(made(), layout, [(0, ks)]).input_ids.shape[1] for ks in [(0,), (1,), (0, 1, 2)]]
    assert found == ([11, 7, 13] if layout == "shared" else [11, 7, 7 * 3 + 6])


@layouts
def test_columns_of_some_completions_come_back_and_the_others_are_not_numbers(layout):
    chosen = made()
    micro = laid(chosen, layout, SOME)
    store_column(micro.target.double().requires_grad_(), micro.group_slices, chosen, "old_logp")
    kept = {(i, k) for i, ks in SOME for k in ks}
    for i, group in enumerate(chosen):
        if i in (1, 2):
            assert group.old_logp is None
            continue
        for k, (column, row) in enumerate(zip(group.old_logp, group.rollouts, strict=True)):
            assert column.shape == (len(row.completion_ids),) and not column.requires_grad
            assert (
                column.isnan().all()
                if (i, k) not in kept
                else column.tolist() == row.completion_ids
            )
    again = laid(chosen, layout, SOME)
    assert torch.equal(again.old_logp, again.target.double()) and again.ref_logp is None
    assert laid(chosen, layout, [*SOME, (1, (0,))]).old_logp is None


@layouts
def test_parts_of_a_group_that_come_back_one_after_the_other_are_all_there(layout):
    chosen = made()
    for ks in ((1,), (0, 2)):
        micro = laid(chosen, layout, [(0, ks)])
        store_column(micro.target.float(), micro.group_slices, chosen, "ref_logp")
    for column, row in zip(chosen[0].ref_logp, chosen[0].rollouts, strict=True):
        assert column.tolist() == row.completion_ids


@layouts
def test_rows_say_where_a_completion_stands_among_its_groups(layout):
    three = ((2, (1, 2, 3)), (3, (2, 2, 2)), (1, (4, 1, 1)))
    micro = laid(made(three), layout, [(2, (1, 2)), (0, (0,))])
    assert micro.group_indices == [2, 0] and micro.completion_index.tolist() == [1, 2, 3]


@layouts
def test_masked_completions_and_tokens_that_were_not_sampled_are_not_trained_on(layout):
    chosen = groups()
    chosen[2].rollouts[0] = rollout([22, 23], mask=[0, 1], behaviour_logp=[-1.0, -2.0])
    out = torch.tensor([[False, True], [False, False], [False, True]])
    micro = laid(chosen, layout, [(2, (0, 1)), (0, (1,))], out)
    assert micro.mask.tolist() == [1, 0, 0, 0, 0, 0] and micro.mask.dtype == torch.float32
    assert micro.target[0] == 23 and micro.behaviour_logp[:1].tolist() == [-2.0]
    assert all(map(math.isnan, micro.behaviour_logp[1:].tolist()))


def test_everything_is_put_on_the_device():
    micro = pack_micro_batch(groups(), [(0, (0, 1))], device="meta", layout="shared")
    held = [*vars(micro).values(), *vars(micro.shared_layout).values()]
    assert {t.device.type for t in held if isinstance(t, torch.Tensor)} == {"meta"}


# The layouts give equal numbers.

LENGTHS = ((11, (30, 1, 17)), (5, (2, 44, 9)), (1, (3, 3)), *SEVERAL)
FAMILIES = {
    "qwen3": {"initializer_range": 0.08},
    "gpt_neox": {"initializer_range": 0.08},
}  # .02 x 4


@functools.cache
def truth(name):
    """Sums of log-probabilities of every completion alone, and the gradients of all. (S,)"""
    model, sums = fresh(name, **FAMILIES[name]), []
    for group in made(LENGTHS):
        for row in group.rollouts:
            sums.append(alone(model, group.prompt_ids, row.completion_ids, 0.7)[0].sum())
    found = torch.stack(sums)
    (found * weights(len(found))).sum().backward()
    return found.detach(), gradients(model)


def weights(count):
    """Of the completions in the loss, as advantages would be."""
    return torch.linspace(-1, 1.5, count, dtype=torch.float64)


@layouts
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_every_layout_gives_the_log_probabilities_and_gradients_of_the_rows_alone(
    name, layout, fused, checkpointed
):
    expected, whole = truth(name)
    ours = policy(name, layout, fused, checkpointed, fresh(name, **FAMILIES[name]))
    micro = laid(made(LENGTHS), layout)
    logp = ours.logp(micro).logp.double()
    sums = logp.new_zeros(micro.num_sequences).index_add(0, micro.sequence_ids, logp)
    assert float(expected.min()) < -80
    assert float((sums - expected).detach().abs().max()) <= 5e-4
    (sums * weights(len(sums))).sum().backward()
    assert worst(gradients(ours.model), whole) <= 2e-5


@layouts
@pytest.mark.parametrize("name", ["qwen3", "gpt_neox", "gpt2", "llama"])
def test_completions_left_out_change_no_number_of_the_others(name, layout):
    chosen, ours = made(), policy(name, layout)
    micro = laid(chosen, layout)
    with torch.no_grad():
        store_column(ours.logp(micro).logp, micro.group_slices, chosen, "old_logp")
        found = laid(chosen, layout, SOME)
        torch.testing.assert_close(ours.logp(found).logp, found.old_logp, rtol=0, atol=2e-5)
