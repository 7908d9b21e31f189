"""Metrics against those TRL 1.16.0 logs for the same step: equal where they mean the same.

Where they do not, the test's name says what either means, and both are compared with their own
formula.
"""

import functools

import pytest
import torch
from loop_cases import ENDS, PLAIN, digits
from trl_cases import both

from rloo_cli.data import segments
from rloo_cli.policy.shared_attention import native_attention

pytestmark = pytest.mark.trl

A, KL, TWO = "algorithm.", "algorithm.beta=0.3", "train.micro_batch_size=8"
ONE = "train.micro_batch_size=16"
EVERY = "train.forward_all=true"  # TRL measures rows too that are not trained on
BASE = (*PLAIN, ENDS, KL)
STILL = (*BASE, "train.learning_rate=1e-12")  # weights stay what they were
STALE = (*BASE, TWO, "algorithm.num_iterations=2", "train.learning_rate=0.003")
MASKED = "algorithm.mask_truncated_completions=true"


def length(completion_ids, **_):
    return [None if i % 5 == 1 else len(ids) / 4 for i, ids in enumerate(completion_ids)]


def some(completion_ids, **_):
    """`digits`, with no score for one row of the first group and for the whole second one."""
    return [None if i in (1, 4, 5, 6, 7) else s for i, s in enumerate(digits(completion_ids))]


CASES = {
    "one forward": ((*BASE, ONE), None),
    "no KL": ((*BASE, ONE, "algorithm.beta=0"), None),
    "two accumulation steps": ((*BASE, TWO), None),
    "two iterations": (STALE, None),
    "masked": ((*BASE, ONE, MASKED), None),
    "rows without a score": ((*BASE, ONE, EVERY, "reward.some.weight=0.5"), {"some": some}),
    "two rewards": (
        (*BASE, ONE, EVERY, f"{A}reward_clip_range=[-1,1]"),
        {"some": some, "length": length},
    ),
    "tempered": ((*BASE, ONE, "generation.temperature=0.7"), None),
}


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """Both sides of one of CASES, computed once."""

    @functools.cache
    def found(name):
        words, rewards = CASES[name]
        return both(tmp_path_factory.mktemp("case"), *words, rewards=rewards)

    return found


LENGTHS = [f"completions/{m}_{what}" for m in ("mean", "min", "max")
           for what in ("length", "terminated_length")]  # fmt: skip
SAME = {name: name for name in [
    *LENGTHS, "completions/clipped_ratio", "num_tokens", "learning_rate", "reward",
    "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean",
]} | {"reward_std": "reward_std_batch"}  # fmt: skip
ONE_FORWARD = ["entropy", "clip_ratio/low_min", "clip_ratio/high_max"]  # of each is its mean


@pytest.mark.slow_but("two iterations", "two rewards")
@pytest.mark.parametrize("name", CASES)
def test_metrics_that_mean_the_same_are_equal(case, name):
    ours, theirs = case(name)
    same = dict(SAME)
    for reward in ours.batch.names:
        same |= {f"rewards/{reward}/{what}": f"reward/{reward}/{what}" for what in ("mean", "std")}
    if ours.run.config.algorithm.beta:
        same["kl"] = "kl"
    if name not in ("two accumulation steps", "two iterations"):
        same |= {n: n for n in ONE_FORWARD}
    if name != "two iterations":
        same["grad_norm"] = "grad_norm"
    if name != "masked":
        same["loss"] = "loss"
    for his, our in same.items():
        expected = pytest.approx(theirs.row[his], rel=2e-5, abs=1e-6)
        assert ours.row[our] == expected, (his, our)


def test_every_metric_of_trl_is_compared_or_known_to_differ(case):
    ours, theirs = case("two rewards")
    rewards = {f"rewards/{n}/{w}" for n in ours.batch.names for w in ("mean", "std")}
    differ = {"frac_reward_zero_std", "grad_norm", "loss", *ONE_FORWARD}  # some of the time
    clocks = {"step_time", "epoch", "step"}
    assert set(theirs.row) == {*SAME, "kl", *rewards, *differ, *clocks}


@pytest.mark.slow
def test_trl_has_the_std_over_the_step_and_we_the_mean_of_the_groups_own(case):
    ours, theirs = case("one forward")
    scores = ours.batch.raw[0]
    assert theirs.row["reward_std"] == pytest.approx(float(scores.std()), rel=1e-5)
    assert ours.row["reward_std"] == pytest.approx(float(scores.std(dim=1).mean()), rel=1e-9)
    assert ours.row["reward_std"] != pytest.approx(theirs.row["reward_std"], rel=0.01)


def two_flat(completion_ids, **_):
    """The first and the third group's scores are equal."""
    found = digits(completion_ids)
    return [1.0 if i // 4 in (0, 2) else s for i, s in enumerate(found)]


@pytest.mark.slow
@pytest.mark.parametrize(("beta", "found"), [("0", 0.5), ("0.3", 0.0)])
def test_trl_tests_zero_std_after_the_kl_and_we_before(tmp_path, beta, found):
    words = (*BASE, ONE, f"{A}beta={beta}")
    ours, theirs = both(tmp_path, *words, rewards={"two_flat": two_flat})
    assert theirs.row["frac_reward_zero_std"] == found
    assert ours.row["frac_reward_zero_std"] == 0.5


@pytest.mark.slow
def test_trl_counts_groups_without_two_scores_among_those_of_some_std_and_we_leave_them_out(
    tmp_path,
):
    def lone(completion_ids, **_):
        found = two_flat(completion_ids)
        return [None if i in (4, 5, 6) else s for i, s in enumerate(found)]

    ours, theirs = both(tmp_path, *BASE, ONE, f"{A}beta=0", rewards={"lone": lone})
    assert theirs.row["frac_reward_zero_std"] == 2 / 4
    assert ours.row["frac_reward_zero_std"] == pytest.approx(2 / 3)


def row_entropy(ours, i):
    """Of the policy at each token of one completion. (T,)"""
    group, k = ours.batch.groups[i // 4], i % 4
    ids = group.rollouts[k].completion_ids
    with torch.no_grad(), native_attention(ours.run.policy.model):
        logits = ours.run.policy.model(torch.tensor([group.prompt_ids + ids])).logits[0]
    return segments.token_entropy(logits[len(group.prompt_ids) - 1 : -1], 1.0)


@pytest.mark.slow
def test_trl_averages_the_entropy_of_micro_batches_and_we_take_it_over_tokens(tmp_path):
    ours, theirs = both(tmp_path, *STILL, TWO)
    rows = [row_entropy(ours, i) for i in range(16)]
    means = [float(torch.cat([rows[i] for i in part]).mean()) for part in theirs.rows(ours.batch)]
    assert ours.row["entropy"] == pytest.approx(float(torch.cat(rows).mean()), rel=1e-6)
    assert theirs.row["entropy"] == pytest.approx(sum(means) / 2, rel=1e-6)
    assert abs(ours.row["entropy"] - theirs.row["entropy"]) > 2e-5


@pytest.mark.slow
def test_trl_logs_a_length_of_0_where_nothing_terminated_and_we_log_none(tmp_path):
    said = [[40 + 3 * i + j for j in range(16)] for i in range(16)]
    ours, theirs = both(tmp_path, *PLAIN, KL, TWO, completions=said)
    for how in ("mean", "min", "max"):
        assert theirs.row[f"completions/{how}_terminated_length"] == 0.0
        assert f"completions/{how}_terminated_length" not in ours.row
    assert theirs.row["completions/clipped_ratio"] == ours.row["completions/clipped_ratio"] == 1.0


@pytest.mark.slow
def test_trl_logs_a_reward_that_said_nothing_as_null_and_we_leave_it_out(tmp_path):
    def silent(completion_ids, **_):
        return [None] * len(completion_ids)

    ours, theirs = both(tmp_path, *BASE, ONE, rewards={"digits": digits, "silent": silent})
    for what in ("mean", "std"):
        assert theirs.row[f"rewards/silent/{what}"] is None
        assert f"reward/silent/{what}" not in ours.row
    assert ours.row["reward/silent/none_frac"] == 1.0


@pytest.mark.slow
def test_trl_counts_masked_rows_among_those_not_clipped_and_we_do_not(tmp_path):
    ours, theirs = both(tmp_path, *STALE, MASKED)
    kept = int((~ours.batch.masked).sum())
    assert 0 < kept < 16
    for side in ("low", "high", "region"):
        name = f"clip_ratio/{side}_mean"
        assert ours.row[name] * kept == pytest.approx(theirs.row[name] * 16, abs=1e-6)
    assert theirs.row["clip_ratio/region_mean"] > 0


@pytest.mark.slow
def test_trl_averages_the_extremes_of_clipping_over_micro_batches_and_ours_are_true(case):
    ours, theirs = case("two iterations")
    assert ours.row["clip_ratio/high_mean"] > 0
    assert ours.row["clip_ratio/high_max"] == 1.0 and ours.row["clip_ratio/low_min"] == 0.0
    # Nothing is clipped in the first update's two micro-batches, whose ratios are 1.
    assert theirs.row["clip_ratio/high_max"] in (0.25, 0.5)


@pytest.mark.slow
def test_trl_logs_the_gradient_norm_of_the_last_update_and_we_the_mean(case):
    ours, theirs = case("two iterations")
    norms = [float(torch.cat([g.flatten() for g in u.values()]).norm()) for u in theirs.gradients]
    assert theirs.row["grad_norm"] == pytest.approx(norms[1], rel=1e-5)
    assert ours.row["grad_norm"] == pytest.approx(sum(norms) / 2, rel=1e-4)
    assert abs(norms[0] - norms[1]) > 1


# Two steps in one line.


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """Of the second step's completions most have no score."""

    def sparse(completion_ids, trainer_state, **_):
        few, found = trainer_state.global_step == 1, digits(completion_ids)
        return [None if few and i % 8 > 2 else s for i, s in enumerate(found)]

    words = (*BASE, TWO, EVERY, "train.learning_rate=0.003", "seed=4")
    return both(tmp_path_factory.mktemp("two"), *words, rewards={"sparse": sparse}, steps=2)


@pytest.mark.slow
def test_trl_averages_smallest_and_largest_lengths_of_steps_and_ours_are_true(two_steps):
    ours, theirs = two_steps
    lengths = [batch.rollout_values("length") for batch in ours.batches]
    ended = [
        n[batch.rollout_values("terminated")]
        for n, batch in zip(lengths, ours.batches, strict=True)
    ]
    for name, found in (("length", lengths), ("terminated_length", ended)):
        for how, true in (("min", min), ("max", max)):
            values = [int(getattr(n, how)()) for n in found]
            assert theirs.row[f"completions/{how}_{name}"] == sum(values) / 2
            assert ours.row[f"completions/{how}_{name}"] == true(values)
    shortest = [int(n.min()) for n in lengths]
    assert shortest[0] != shortest[1]  # so that a mean of the two is neither


@pytest.mark.slow
def test_trl_averages_steps_and_we_weigh_them_by_what_they_counted(two_steps):
    ours, theirs = two_steps
    columns = {
        "reward": [b.score[b.scorable] for b in ours.batches],
        "kl": [log_ratios(b) for b in ours.batches],
        "completions/mean_terminated_length": [
            b.rollout_values("length")[b.rollout_values("terminated")].double()
            for b in ours.batches
        ],
    }
    for name, (one, two) in columns.items():
        both_steps = float(torch.cat([one, two]).mean())
        assert theirs.row[name] == pytest.approx(float(one.mean() + two.mean()) / 2, rel=1e-5)
        assert ours.row[name] == pytest.approx(both_steps, rel=1e-5)
        assert abs(ours.row[name] - theirs.row[name]) > 1e-4, name


def log_ratios(batch):
    """old_logp - ref_logp of every token. (N,)"""
    pairs = [p for g in batch.groups for p in zip(g.old_logp, g.ref_logp, strict=True)]
    return torch.cat([old.double() - ref.double() for old, ref in pairs])
