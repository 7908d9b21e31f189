"""The gradient of a step of `grpo` is that of TRL 1.16.0's GRPOTrainer on the same completions.

As in `test_trl.py`: every case has 16 completions, most of them 4 prompts' in two accumulation
steps. Each makes two updates from one step, so that the second one has ratios that moved. Below
stand the differences, each side by its own formula.
"""

import functools

import pytest
import torch
from loop_cases import ENDS, PLAIN, apart, digits, row_logp
from loop_cases import gradient as gradient_of
from trl_cases import both, gaps, vector

from rloo_cli.config.compose import compose_config

pytestmark = pytest.mark.trl

A, ONE, TWO = "algorithm.", "train.micro_batch_size=16", "train.micro_batch_size=8"
GRPO = (*PLAIN, ENDS, "algorithm=grpo", f"{A}num_generations=4", TWO)
STALE = (f"{A}num_iterations=2", "train.learning_rate=0.1")
BASE = (*GRPO, *STALE)
STILL = (*GRPO, "train.learning_rate=1e-12")  # weights stay what they were
KL = f"{A}beta=0.3"
CLOSE = 1e-5  # 1e-4 was asked for
LATER = 1e-4  # later updates start from the rounding of the first


def kind(name, *more):
    return (f"{A}loss_type={name}", *more)


def without(*rows):
    """`digits`, with no score for these rows."""

    def score(completion_ids, **_):
        return [None if i in rows else s for i, s in enumerate(digits(completion_ids))]

    return score


def length(completion_ids, **_):
    """A second reward, which has nothing to say about every fifth row."""
    return [None if i % 5 == 1 else len(ids) / 4 for i, ids in enumerate(completion_ids)]


def flat_group(completion_ids, **_):
    """`digits`, but the third group's scores are equal, and such that their mean is exact."""
    return [2.5 if 8 <= i < 12 else s for i, s in enumerate(digits(completion_ids))]


SEVERAL = {"digits": without(0, 1, 6), "length": length}
MASKED = f"{A}mask_truncated_completions=true"
DAPO = "dapo"
CASES = {  # overrides, rewards, the case whose last gradient must be another
    DAPO: (kind("dapo"), None, "grpo"),
    "grpo": (kind("grpo"), None, DAPO),
    "dr_grpo": (kind("dr_grpo"), None, DAPO),
    "bnpo, one micro-batch": (kind("bnpo", ONE), None, "grpo"),
    "gspo": (kind("gspo", f"{A}epsilon=0.02", f"{A}epsilon_high=0.03"), None, "grpo"),
    "cispo": (kind("cispo", f"{A}epsilon_high=1.05"), None, DAPO),
    "sapo": (kind("sapo"), None, "grpo"),
    "std of the step": ((f"{A}advantage_scale=batch",), None, DAPO),
    "no std": ((f"{A}advantage_scale=none",), None, DAPO),
    "KL": ((KL,), None, DAPO),
    "KL, ratio-weighted": ((KL, f"{A}kl_ratio_weighted=true"), None, "KL"),
    "narrow": ((f"{A}epsilon=0.05", f"{A}epsilon_high=0.1"), None, DAPO),
    "delta": ((f"{A}delta=1.3", f"{A}epsilon=0.1"), None, DAPO),
}
MORE = {  # the same, `slow`
    "luspo": (kind("luspo", f"{A}epsilon=0.02", f"{A}epsilon_high=0.03"), None, "gspo"),
    "vespo": (kind("vespo"), None, DAPO),
    "grpo, KL": (kind("grpo", KL), None, "grpo"),
    "dr_grpo, no std": (kind("dr_grpo", f"{A}advantage_scale=none"), None, "dr_grpo"),
    "bnpo, KL": (kind("bnpo", ONE, KL), None, "bnpo, one micro-batch"),
    "gspo, KL": (kind("gspo", KL), None, "gspo"),
    "cispo, KL": (kind("cispo", f"{A}epsilon_high=1.05", KL), None, "cispo"),
    "sapo, KL": (kind("sapo", KL), None, "sapo"),
    "luspo, KL": (kind("luspo", KL), None, "luspo"),
    "vespo, KL": (kind("vespo", KL), None, "vespo"),
    "truncated masked": ((MASKED,), None, DAPO),
    "grpo, truncated masked, KL": (kind("grpo", MASKED, KL), None, "grpo, KL"),
    "rows without a score": ((), {"digits": without(1, 4, 5, 6, 7, 12, 14, 15)}, DAPO),
    "two rewards": (
        ("reward.digits.weight=0.7", "reward.length.weight=-0.4"),
        SEVERAL,
        DAPO,
    ),
    "two rewards, each normalized": (
        (f"{A}multi_reward=normalize_then_sum", f"{A}advantage_scale=none",
         f"{A}baseline=none"),
        SEVERAL,
        "two rewards",
    ),
    "a group of equal scores": ((), {"flat_group": flat_group}, DAPO),
    "temperature": (("generation.temperature=0.7",), None, DAPO),
    "eight completions each": (
        (f"{A}num_generations=8", "train.prompts_per_step=2"),
        None,
        DAPO,
    ),
    "one accumulation step": ((ONE,), None, None),
    "four accumulation steps": (("train.micro_batch_size=4",), None, None),
    "two mini-batches of grpo": (
        kind("grpo", f"{A}num_minibatches=2", f"{A}num_iterations=1", "train.micro_batch_size=8"),
        None,
        "grpo",
    ),
    "entropy bonus, one micro-batch": ((ONE, f"{A}entropy_coef=0.2"), None, DAPO),
    "off-policy completions left out": ((f"{A}off_policy_threshold=0.01",), None, DAPO),
    "all at once": (
        kind(
            "grpo", KL, MASKED, "generation.temperature=1.3", f"{A}epsilon=0.1",
            f"{A}epsilon_high=0.2", f"{A}delta=1.5", f"{A}advantage_scale=batch",
            f"{A}kl_ratio_weighted=true", "reward.length.weight=-0.4",
        ),
        SEVERAL,
        "grpo, KL",
    ),
}  # fmt: skip
ALL = CASES | MORE
NAMES = [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """Both sides of one of the cases, computed once."""

    @functools.cache
    def found(name):
        words, rewards, _ = ALL[name]
        folder = tmp_path_factory.mktemp("case")
        return both(folder, *BASE, *words, rewards=rewards, trainer="GRPO")

    return found


@pytest.mark.slow_cases(
    "dapo",
    "KL, ratio-weighted",
    "narrow",
    "std of the step",
    "delta",
    "bnpo, one micro-batch",
    "dr_grpo",
    "sapo",
    "no std",
)
@pytest.mark.parametrize("name", NAMES)
def test_gradient_loss_and_advantages_are_those_of_trl(case, name):
    ours, theirs = case(name)
    first, *later = gaps(ours, theirs)
    print(f"{name}: {first:.1e}", *(f"{gap:.1e}" for gap in later))
    assert first < CLOSE and all(gap < LATER for gap in later) and len(later) == 1
    assert all(float(vector(g).norm()) > 1e-4 for g in ours.gradients)
    assert apart(ours.weights, theirs.weights) < CLOSE
    assert apart(ours.batch.advantage, theirs.advantages(ours.batch)) < CLOSE
    expected = sum(theirs.parts) / len(theirs.gradients)  # divided by their number already
    assert ours.row["loss"] == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.slow_cases(
    "dapo",
    "grpo",
    "dr_grpo",
    "bnpo, one micro-batch",
    "gspo",
    "cispo",
    "sapo",
    "std of the step",
    "no std",
    "KL",
    "KL, ratio-weighted",
    "narrow",
    "delta",
)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in MORE else [])
        for name in ALL
        if ALL[name][2]
    ],
)
def test_gradient_without_what_a_case_is_about_is_another(case, name):
    # Else the test before this one would say nothing about the case.
    other = case(ALL[name][2])[1].gradients[-1]
    mine = case(name)[0].gradients[-1]
    assert apart(vector(mine), vector(other)) > 0.02


# Where the two differ.


@pytest.mark.slow
def test_trl_divides_the_rounding_of_equal_scores_by_1e_4_and_ours_are_0(tmp_path):
    def same(completion_ids, **_):
        return [0.7] * len(completion_ids)

    words = (*STILL, f"{A}num_generations=8", "train.prompts_per_step=2")
    ours, theirs = both(tmp_path, *words, rewards={"same": same}, trainer="GRPO")
    assert float(ours.batch.advantage.abs().max()) == 0.0
    assert 1e-5 < float(theirs.advantages(ours.batch).abs().max()) < 1e-2
    assert float(vector(ours.gradients[0]).abs().max()) == 0.0
    assert float(vector(theirs.gradients[0]).norm()) > 0


@pytest.mark.slow
def test_trl_divides_a_mini_batch_by_the_steps_tokens_and_we_by_its_own(tmp_path):
    ours, theirs = both(tmp_path, *STILL, f"{A}num_minibatches=2", trainer="GRPO")
    total = float(ours.batch.rollout_values("length").sum())
    tokens = [
        float(sum(m["completion_mask"].sum() for m in theirs.micros[i : i + 1])) for i in (0, 1)
    ]
    assert sum(tokens) == total and tokens[0] != tokens[1]
    for own, mine, other in zip(tokens, ours.gradients, theirs.gradients, strict=True):
        assert apart(vector(mine) * own / (total / 2), vector(other)) < CLOSE


def token_means(batch, micros):
    """On-policy loss of bnpo: the mean over micro-batches of the mean over their tokens."""
    a, n = batch.advantage.flatten(), batch.rollout_values("length").flatten()
    return sum(float(-(a * n)[rows].sum() / n[rows].sum()) for rows in micros) / len(micros)


@pytest.mark.slow
def test_trl_cuts_micro_batches_of_bnpo_from_shuffled_rows_and_we_from_whole_groups(tmp_path):
    ours, theirs = both(tmp_path, *STILL, *kind("bnpo"), trainer="GRPO")
    cut = theirs.rows(ours.batch)
    assert sum(theirs.parts) == pytest.approx(token_means(ours.batch, cut), abs=1e-6)
    cut = [list(range(8)), list(range(8, 16))]
    assert ours.row["loss"] == pytest.approx(token_means(ours.batch, cut), abs=1e-6)
    assert gaps(ours, theirs)[0] > 0.01


def with_weighted_kl(run, batch, beta, by_row):
    """The gradient of gspo on-policy, k3 in the loss weighted by the row's or token's ratio."""
    total = torch.zeros(())
    for p, group in enumerate(batch.groups):
        for k, a in enumerate(batch.advantage[p].tolist()):
            logp = row_logp(run.policy, batch, p, k)
            d, own = logp - logp.detach(), logp - group.ref_logp[k]
            ratio = d.mean().exp()
            k3 = (-own).exp() - 1 + own
            term = -ratio * a + beta * k3 * (ratio if by_row else d.exp())
            total = total + term.mean() / batch.score.numel()
    return gradient_of(run, total)


@pytest.mark.slow
def test_trl_weights_the_kl_of_gspo_by_the_rows_ratio_and_we_by_the_tokens(tmp_path):
    words = (*STILL, *kind("gspo", KL, f"{A}kl_ratio_weighted=true"))
    ours, theirs = both(tmp_path, *words, trainer="GRPO")
    names = [name for name, _ in ours.run.policy.model.named_parameters()]
    for by_row, found in ((False, ours.gradients[0]), (True, theirs.gradients[0])):
        flat = torch.cat([found[name].reshape(-1) for name in names if name in found])
        assert apart(flat, with_weighted_kl(ours.run, ours.batch, 0.3, by_row)) < 1e-4
    assert gaps(ours, theirs)[0] > 0.01


@pytest.mark.slow
def test_trl_averages_the_entropy_of_micro_batches_and_we_that_of_all_tokens(tmp_path):
    words = (*STILL, f"{A}entropy_coef=0.2")
    ours, theirs = both(tmp_path, *words, trainer="GRPO")
    assert 1e-3 < gaps(ours, theirs)[0] < 0.5
    # As one micro-batch they agree: the case "entropy bonus, one micro-batch".


@pytest.mark.slow
def test_trl_weights_the_kl_by_its_ratio_and_divides_dr_grpo_by_a_std_unless_told_not_to():
    from trl import GRPOConfig

    theirs = GRPOConfig(loss_type="dr_grpo", use_cpu=True, bf16=False)
    assert theirs.use_bias_correction_kl and theirs.scale_rewards == "group"
    dr_grpo = compose_config(["algorithm=dr_grpo"]).values["algorithm"]
    assert not dr_grpo["kl_ratio_weighted"] and dr_grpo["advantage_scale"] == "none"
    assert theirs.loss_type == dr_grpo["loss_type"] and theirs.beta == dr_grpo["beta"] == 0
