"""`algorithm.trust_region`: DPPO's mask (arXiv 2602.04879), as verl 0.9.1 has it.

The vectors of VERL were computed by its `compute_policy_loss_dppo_tv` and `..._dppo_kl` with
clip_ratio_low .1, clip_ratio_high .15 (kl: .05, .1) and loss_agg_mode token-mean; `python
bench/dialects.py` runs these functions beside ours on 200 random batches.
"""

import pytest
import torch
from algorithm_cases import column, config, micro
from assert_refused import assert_refused
from hook_calls import rloo

from rloo_cli.algorithms.common.family import trust_region_mask
from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.reporting.update_metrics import UpdateMetrics
from rloo_cli.utils import paths
from rloo_cli.utils.errors import ConfigError

OLD = [[-0.2, -1.6, -3.0], [-0.9, -0.05], [-1.1, -0.4, -2.2, -0.7]]
NEW = [[-0.6, -1.0, -2.9], [-0.5, -0.6], [-1.9, -0.1, -0.9, -0.75]]
A = [1.5, -0.5, -1.0]
LENGTHS = [len(row) for row in OLD]
# verl's mask: tokens that stay; its loss; its gradient at every token.
VERL = {
    "tv": (
        [1, 0, 1, 1, 0, 0, 1, 1, 1], 0.0985611567,
        [-0.1117200077, 0, -0.184195153, 0.0828791499, 0, 0, 0.149984312, 0.4076996297,
         0.1056921583],
    ),
    "kl": (
        [1, 1, 1, 1, 0, 0, 1, 1, 1], 0.4022476235,
        [-0.1117200077, -0.3036864667, -0.184195153, 0.0828791499, 0, 0, 0.149984312,
         0.4076996297, 0.1056921583],
    ),
}  # fmt: skip
LIMITS = {"tv": {"low": 0.1, "high": 0.15}, "kl": {"low": 0.05, "high": 0.1}}


def region(kind, level="token", **limits):
    return {"kind": kind, "level": level} | LIMITS[kind] | limits


def loss(keys, behaviour=None, chosen=None, a=A):
    """The loss at NEW, and its gradient at every token."""
    c = config(**{"ratio_level": "token", "loss_agg": "token_mean"} | keys)
    m = micro(LENGTHS, behaviour=behaviour)
    new = column(NEW).requires_grad_()
    given = torch.tensor(a, dtype=torch.float64)
    found = rloo.loss(new, column(OLD), None, m, given, c, float(sum(LENGTHS)), chosen=chosen)
    (gradient,) = torch.autograd.grad(found.total, new)
    return found, gradient


CISPO = {"policy_loss": "cispo", "epsilon_high": 20.0}  # verl truncates the ratio at clip_ratio_c


@pytest.mark.parametrize("kind", VERL)
def test_mask_loss_and_gradient_are_verls(kind):
    kept, total, expected = VERL[kind]
    found, gradient = loss(CISPO | {"trust_region": region(kind)})
    assert found.kept.long().tolist() == kept
    assert float(found.total.detach()) == pytest.approx(total, abs=1e-6)
    torch.testing.assert_close(gradient, column([expected]), rtol=0, atol=1e-6)
    without = loss(CISPO)[1]
    out = ~found.kept
    assert bool((without[out] != 0).all()) and torch.equal(gradient[~out], without[~out])


def test_a_token_that_moves_back_or_against_its_advantage_stays():
    high = {"low": 1e-9, "high": 1e-9}
    found, _ = loss(CISPO | {"trust_region": region("tv", **high)})
    a = torch.tensor(A).repeat_interleave(torch.tensor(LENGTHS))
    assert torch.equal(found.kept, (column(NEW) > column(OLD)) != (a > 0))


@pytest.mark.parametrize("level", ["sequence", "geometric", "token"])
@pytest.mark.parametrize("kind", ["clip", "reinforce", "cispo", "sapo", "luspo", "vespo"])
def test_the_gradient_of_a_masked_token_is_0_under_every_loss(kind, level):
    if kind == "luspo" and level == "token":
        return
    keys = {"policy_loss": kind, "ratio_level": level, "epsilon": 0.9, "epsilon_high": 30.0}
    found, gradient = loss(keys | {"trust_region": region("tv")})
    assert gradient[~found.kept].tolist() == [0.0] * int((~found.kept).sum())
    assert bool((gradient[found.kept] != 0).all())
    torch.testing.assert_close(gradient[found.kept], loss(keys)[1][found.kept])


def test_the_sampler_is_what_a_token_moved_from():
    keys = CISPO | {"trust_region": region("tv"), "num_iterations": 2}
    same = loss(keys, behaviour=column(NEW).float())[0]
    assert bool(same.kept.all())  # the policy is where the sampler was, wherever old_logp is
    unknown = torch.full((len(column(OLD)),), float("nan"))
    assert torch.equal(loss(keys, behaviour=unknown)[0].kept, loss(keys)[0].kept)


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_a_completion_is_left_out_by_the_mean_of_its_tokens(kind):
    p, q = column(NEW).exp(), column(OLD).exp()
    far = (p - q).abs()
    if kind == "kl":
        far = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
    means = [float(x.mean()) for x in far.split(LENGTHS)]
    # The first rises on the whole (A > 0), the second falls and the third rises (A < 0).
    limits = {"low": means[1] * 0.999, "high": means[0] * 0.999}
    found, gradient = loss({"trust_region": region(kind, "sequence", **limits), "epsilon": 0.9})
    assert found.kept.tolist() == [False, False, True]
    assert gradient.split(LENGTHS)[0].tolist() == [0.0] * 3
    limits = {"low": means[1] * 1.001, "high": means[0] * 1.001}
    assert bool(loss({"trust_region": region(kind, "sequence", **limits)})[0].kept.all())
    by_token = [1.5, 1.5, -1.5, -0.5, -0.5, -1.0, -1.0, -1.0, -1.0]  # each its own advantage
    limits = {"low": means[1] * 0.999, "high": means[0] * 0.999}
    found, _ = loss({"trust_region": region(kind, "sequence", **limits)}, a=by_token)
    assert found.kept.long().tolist() == [0, 0, 1, 0, 0, 1, 1, 1, 1]


def test_a_kl_in_the_loss_is_of_masked_tokens_too():
    keys = {"kl_in": "loss", "kl_estimator": "k3", "beta": 0.1, "ratio_level": "token"}
    c = config(**keys, loss_agg="token_mean", trust_region=region("tv", low=1e-9, high=1e-9))
    new, ref = column(NEW).requires_grad_(), column(OLD) - 0.3
    a = torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64)
    found = rloo.loss(new, column(OLD), ref, micro(LENGTHS), a, c, 9.0)
    (gradient,) = torch.autograd.grad(found.total, new)
    k3 = 0.1 * (1 - (ref - column(NEW)).exp()) / 9
    assert int((~found.kept).sum()) > 2
    torch.testing.assert_close(gradient[~found.kept], k3[~found.kept])


def test_a_region_beside_a_sampler_that_is_cut_is_refused(sentence):
    words = ["+recipe=smoke", "generation.top_p=0.9"]
    words += ["algorithm.trust_region={kind:tv,level:token,low:0.1,high:0.1}"]
    with pytest.raises(ConfigError) as caught:
        check.check_config(compose_config(words))
    assert_refused(caught, key="algorithm.trust_region", fix="generation.return_sampling_mask=true")
    sentence(caught, folder=paths.CONF)
    check.check_config(compose_config([*words, "generation.return_sampling_mask=true"]))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_metric_is_the_share_of_what_was_left_out(level):
    found, _ = loss(CISPO | {"trust_region": region("tv", level, low=0.1, high=0.09)})
    updates = UpdateMetrics()
    updates.add_micro_batch(found, micro(LENGTHS), None)
    left_out = int((~found.kept).sum()) / len(found.kept)
    assert 0 < left_out < 1
    assert updates.to_metrics()["trust_region/masked_share"] == pytest.approx(left_out)
    plain = UpdateMetrics()
    plain.add_micro_batch(loss(CISPO)[0], micro(LENGTHS), None)
    assert "trust_region/masked_share" not in plain.to_metrics()


def test_without_a_region_there_is_no_mask():
    args = (column(NEW), column(OLD), torch.tensor(A), micro(LENGTHS), config())
    assert trust_region_mask(*args) is None
