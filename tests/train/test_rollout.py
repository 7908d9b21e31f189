"""Groups laid out for a forward pass and back, a step's table, and its cut into updates."""

import math
from types import SimpleNamespace

import pytest
import torch
from algorithm_cases import config
from hook_calls import rloo
from policy_cases import groups, packed, rollout

from rloo_cli.data.batch import Batch, Group
from rloo_cli.data.bin_packing import ForwardCost, ForwardLimits, split_chunks
from rloo_cli.data.packing import store_column
from rloo_cli.distributed.world import cpu_world
from rloo_cli.train.minibatches import plan_updates

LENGTHS = [9, 7, 9, 2, 5, 7]  # of the rows of `groups`, prompt included


def test_rows_are_padded_on_the_right_and_told_apart_by_length_alone():
    micro = packed(groups(), [0, 1, 2])
    assert micro.num_sequences == 6 and micro.input_ids.shape == (6, 9)
    assert micro.attention_mask.sum(1).tolist() == LENGTHS  # though ids of 0 are in the rows
    places = torch.arange(9).expand(6, 9)
    assert torch.equal(micro.attention_mask, (places < torch.tensor(LENGTHS)[:, None]).long())
    assert torch.equal(micro.position_ids, places * micro.attention_mask)
    assert micro.input_ids[3].tolist() == [0, 0] + [0] * 7
    assert micro.input_ids[5].tolist() == [20, 1, 21, 1, 0, 24, 25, 0, 0]


def test_every_completion_token_is_predicted_by_the_place_before_it():
    chosen = groups()
    micro = packed(chosen, [0, 1, 2])
    flat = micro.input_ids.reshape(-1)
    rows = [r.completion_ids for g in chosen for r in g.rollouts]
    assert micro.target.tolist() == [token for row in rows for token in row]
    assert torch.equal(flat[micro.logit_index + 1], micro.target)
    last = [micro.logit_index[micro.sequence_ids == i][0] % 9 for i in range(6)]
    assert last == [5, 5, 0, 0, 2, 2]  # the prompts' last tokens
    assert micro.sequence_ids.tolist() == [i for i, row in enumerate(rows) for _ in row]
    assert micro.mask.tolist() == [1.0] * 19


def test_groups_are_packed_in_the_order_asked_for():
    micro = packed(groups(), [2, 0])
    assert micro.group_indices == [2, 0] and micro.num_sequences == 4
    assert micro.target.tolist() == [22, 23, 1, 0, 24, 25, 11, 12, 1, 13]


def test_dropped_rows_keep_their_place_and_lose_their_mask():
    dropped = torch.tensor([[False, True], [False, False], [True, False]])
    whole, micro = packed(groups(), [2, 0]), packed(groups(), [2, 0], dropped)
    assert torch.equal(micro.target, whole.target) and torch.equal(
        micro.sequence_ids, whole.sequence_ids
    )
    assert micro.mask.tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 1, 0]


def test_tokens_that_the_policy_did_not_sample_are_read_and_never_predicted():
    chosen = groups()
    chosen[0].rollouts[0] = rollout([11, 12, 1], mask=[1, 0, 1])
    micro = packed(chosen, [0], torch.tensor([[False, False]]))
    assert micro.target.tolist() == [11, 1, 13] and micro.mask.tolist() == [1, 1, 1]
    assert micro.sequence_ids.tolist() == [0, 0, 1] and 12 in micro.input_ids.flatten().tolist()
    assert chosen[0].rollouts[0].length == 2 and chosen[0].rollouts[1].length == 1


def test_what_the_sampler_did_not_say_is_not_a_number():
    chosen = groups()
    assert packed(chosen, [0]).behaviour_logp is None
    chosen[0].rollouts[0] = rollout([11, 12, 1], behaviour_logp=[-1.0, -2.0, -3.0])
    found = packed(chosen, [0]).behaviour_logp
    assert found[:3].tolist() == [-1.0, -2.0, -3.0] and math.isnan(found[3])


@pytest.mark.parametrize("name", ["old_logp", "kl_logp", "ref_logp"])
def test_a_column_comes_back_whatever_the_cut(name):
    chosen = groups()
    assert getattr(packed(chosen, [0, 1, 2]), name) is None
    for index in ([1], [2, 0]):
        micro = packed(chosen, index)
        store_column(micro.target.float().requires_grad_(), micro.group_slices, chosen, name)
    for group in chosen:
        for part, row in zip(getattr(group, name), group.rollouts, strict=True):
            assert part.tolist() == row.completion_ids and not part.requires_grad
    again = packed(chosen, [0, 1, 2])
    assert torch.equal(getattr(again, name), again.target.float())
    store_column(None, again.group_slices, chosen, name)
    assert getattr(chosen[0], name) is not None


def test_a_column_is_there_only_when_every_group_has_it():
    chosen = groups()
    micro = packed(chosen, [0])
    store_column(micro.target.float(), micro.group_slices, chosen, "ref_logp")
    assert packed(chosen, [0]).ref_logp is not None and packed(chosen, [0, 1]).ref_logp is None


def test_the_kl_is_measured_from_its_own_column_where_there_is_one():
    micro = packed(groups(), [0])
    micro.old_logp = micro.target.float()
    assert micro.kl_old_logp is micro.old_logp
    micro.kl_logp = -micro.old_logp
    assert micro.kl_old_logp is micro.kl_logp


P, K = 5, 3


def batch(**changes):
    """Five groups of three; row (p, k) has p + k + 1 tokens."""
    made = [
        Group(p, {}, "", [5], [rollout([6] * (p + k + 1), mask=None) for k in range(K)])
        for p in range(P)
    ]
    zeros, no = torch.zeros(P, K, dtype=torch.float64), torch.zeros(P, K, dtype=torch.bool)
    values = {
        "step": 3, "groups": made, "names": [], "raw": zeros[None], "score": zeros,
        "shaped": zeros, "scorable": ~no, "masked": no, "active": list(range(P)), "draws": P,
    }  # fmt: skip
    return Batch(**values | changes)


def test_a_table_holds_an_attribute_of_every_rollout():
    assert batch().rollout_values("length").tolist() == [
        [p + k + 1 for k in range(K)] for p in range(P)
    ]
    assert batch().rollout_values("terminated").dtype is torch.bool


def settled(index, value, skipped=False):
    rows = torch.full((len(index), K), value, dtype=torch.float64)
    return SimpleNamespace(reward=rows, advantage=-rows, usable=rows > 0, norm_skipped=skipped)


def kl(rows, value):
    return torch.full((rows, K), value, dtype=torch.float64)


def test_groups_are_settled_in_any_order_and_the_rest_stays_nothing():
    step = batch()
    step.add_kl([3, 1], kl(2, 7.0))
    step.add_kl([0], kl(1, 1.0))
    step.set_advantages([3, 1], settled([3, 1], 2.0))
    step.set_advantages([0], settled([0], 5.0, skipped=True))
    step.set_advantages([2], settled([2], 0.0))
    assert step.reward[:, 0].tolist() == [5, 2, 0, 2, 0]
    assert step.advantage[:, 2].tolist() == [-5, -2, 0, -2, 0]
    assert step.usable[:, 1].tolist() == [True, True, False, True, False]
    assert step.kl[:, 0].tolist() == [1, 7, 0, 7, 0]
    assert step.norm_skipped


def test_without_a_reference_there_is_no_kl():
    step = batch()
    step.set_advantages([0, 1], settled([0, 1], 1.0))
    assert step.kl is None and not step.norm_skipped


def run(num_minibatches=1, micro_groups=2, **changes):
    settings = config(num_minibatches=num_minibatches, num_generations=K, **changes)
    generation = SimpleNamespace(max_completion_length=100)
    train = SimpleNamespace(forward_all=True)
    whole = SimpleNamespace(seed=1, algorithm=settings, generation=generation, train=train)
    whole.agent = None
    limits = ForwardLimits(ForwardCost(1, 1, 1, 1, 1), 1000, 1000, K * micro_groups)
    engine = SimpleNamespace(lockstep=False)
    return SimpleNamespace(
        config=whole,
        algorithm=rloo.of(whole.algorithm),
        forward_limits=limits,
        world=cpu_world(),
        engine=engine,
        policy=SimpleNamespace(layout="shared"),
    )


def parts(plans):
    return [sorted(i for micro in plan.micro_batches for i, _ in micro) for plan in plans]


def test_slices_are_consecutive_and_hold_at_most_so_many():
    assert split_chunks([4, 2, 0, 1, 3], 2) == [[4, 2], [0, 1], [3]]
    assert split_chunks([], 2) == [] and split_chunks([1], 9) == [[1]]


@pytest.mark.parametrize("micro_groups", [1, 2, 3, 9])
def test_one_update_has_all_groups_in_whole_micro_batches(micro_groups):
    (plan,) = plan_updates(run(micro_groups=micro_groups), batch(), 0)
    assert [i for micro in plan.micro_batches for i, _ in micro] == [0, 1, 2, 3, 4]
    assert all(rows == (0, 1, 2) for micro in plan.micro_batches for _, rows in micro)
    assert max(map(len, plan.micro_batches)) <= micro_groups
    assert plan.denominator == P * K
    assert plan.num_tokens == sum(p + k + 1 for p in range(P) for k in range(K))


@pytest.mark.parametrize("updates", [2, 3, 5])
def test_every_group_is_in_one_update_of_each_iteration(updates):
    for iteration in range(4):
        plans = plan_updates(run(updates), batch(), iteration)
        assert len(plans) == updates
        assert sorted(i for part in parts(plans) for i in part) == [0, 1, 2, 3, 4]
        assert max(map(len, parts(plans))) - min(map(len, parts(plans))) <= 1
        assert sum(plan.denominator for plan in plans) == P * K


def test_updates_are_permuted_anew_in_each_iteration_step_and_seed():
    def cut(iteration=0, step=3, seed=1):
        found = run(5)
        found.config.seed = seed
        return str(parts(plan_updates(found, batch(step=step), iteration)))

    assert cut() == cut()
    assert len({cut(i) for i in range(6)}) > 3
    assert len({cut(step=i) for i in range(6)}) > 3
    assert len({cut(seed=i) for i in range(6)}) > 3


def test_a_single_update_is_not_permuted():
    assert parts(plan_updates(run(), batch(), 1)) == parts(plan_updates(run(), batch(), 2))


def test_groups_left_out_still_count_unless_only_the_valid_do():
    scorable = torch.ones(P, K, dtype=torch.bool)
    scorable[1] = False
    step = batch(active=[0, 2, 4], scorable=scorable)
    (plan,) = plan_updates(run(), step, 0)
    assert [[i for i, _ in micro] for micro in plan.micro_batches] == [[0, 2], [4]]
    assert plan.denominator == P * K
    (plan,) = plan_updates(run(loss_denominator="valid"), step, 0)
    assert plan.denominator == (P - 1) * K


def some():
    """Of group 0 one row is unscorable, of 1 all but one, of 2 all; of 3 one row is masked."""
    scorable, masked = torch.ones(P, K, dtype=torch.bool), torch.zeros(P, K, dtype=torch.bool)
    scorable[0, 0] = scorable[1, 0] = scorable[1, 1] = False
    scorable[2], masked[3, 2] = False, True
    return batch(scorable=scorable, masked=masked)


@pytest.mark.parametrize(
    "agg, every, valid",
    [
        ("sequence_sum", 15, 2 + 0 + 0 + 2 + 3),
        ("sequence_mean", 15, 7),
        # lengths: 0: 1 2 3, 1: 2 3 4, 2: 3 4 5, 3: 4 5 (6), 4: 5 6 7
        ("token_mean", 6 + 9 + 12 + 9 + 18, 5 + 0 + 0 + 9 + 18),
        ("constant", 1500, 700),
        ("token_mean_local", 3, 3),
    ],
)
def test_an_update_is_divided_by_what_the_aggregation_counts(agg, every, valid):
    for denominator, expected in (("all", every), ("valid", valid)):
        settings = run(loss_agg=agg, loss_denominator=denominator)
        (plan,) = plan_updates(settings, some(), 0)
        assert plan.denominator == expected
        assert plan.num_tokens == 5 + 9 + 18


def test_an_update_without_a_row_to_learn_from_says_so():
    nothing = torch.zeros(P, K, dtype=torch.bool)
    (plan,) = plan_updates(run(loss_denominator="valid"), batch(scorable=nothing), 0)
    assert plan.num_tokens == 0 and plan.denominator == 1.0
    (plan,) = plan_updates(run(), batch(active=[]), 0)
    assert plan.num_tokens == 0 and plan.micro_batches == [] and plan.denominator == P * K
    (plan,) = plan_updates(run(), batch(masked=~nothing), 0)
    assert plan.num_tokens == 0
