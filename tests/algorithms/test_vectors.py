"""The test vectors of the specification, run against the code. The numbers are in vectors.json."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from algorithm_cases import advantages, column, config, corrected, micro, row_gradient, table
from hook_calls import HookCalls, rloo
from torch import Tensor, tensor

from rloo_cli.algorithms.common import family, importance_weights
from rloo_cli.data.segments import target_logprobs
from rloo_cli.utils.rng import sampling_seed

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())
ESTIMATORS = ["k1", "k2", "k3"]


@pytest.fixture(params=["straight", "family"], autouse=True)
def road(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain RLOO is computed by rloo.py, and by common/family.py, to the same numbers."""
    monkeypatch.setattr(HookCalls, "by_family", request.param == "family")


def near(found: Tensor, expected: Any, atol: float = 1e-6) -> None:
    wanted = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found.double().reshape(wanted.shape), wanted, rtol=0, atol=atol)


def test_blog_leave_one_out_of_three_prompts() -> None:
    v = VECTORS["BLOG"]
    near(advantages(v["prompt_major"]), [v["advantage_each_row"]] * 3)


def test_blog_k_major_indices_name_the_same_rows() -> None:
    v = VECTORS["BLOG"]
    k_major = advantages(v["prompt_major"]).T.reshape(-1)
    for index, expected in v["k_major_flat"].items():
        near(k_major[int(index)], expected)


@pytest.mark.parametrize("policy_loss", ["clip", "reinforce"])
def test_grad_of_one_action_is_softmax_minus_one_hot(policy_loss: str) -> None:
    v = VECTORS["GRAD"]
    logits = tensor([v["logits"]], dtype=torch.float32, requires_grad=True)
    logp = target_logprobs(logits, tensor([v["action"]]), 1.0)
    near(logp.detach(), [v["logp"]])
    a = tensor([float(v["advantage"])]).double()
    out = rloo.loss(logp, logp.detach(), None, micro([1]), a, config(policy_loss=policy_loss), 1.0)
    out.total.backward()
    assert logits.grad is not None
    near(logits.grad, v["loss_gradient"], atol=5e-5)


def test_loo_is_k_over_k_minus_1_times_the_group_mean_form() -> None:
    v = VECTORS["K/(K-1)"]
    near(advantages(v["scores"]), v["loo"])
    near(advantages(v["scores"], baseline="group_mean"), v["group_mean"])


@pytest.mark.parametrize("case", VECTORS["ONEHOT"])
def test_onehot_scores_with_none_rows(case: dict[str, Any]) -> None:
    near(advantages(case["scores"]), case["advantage"])


def test_none_leaves_the_baseline_and_is_not_zero() -> None:
    v = VECTORS["NONE"]
    nan = float("nan")
    raw = tensor([[[nan if x is None else x for x in r]] for r in v["rewards"]]).double()
    score, scorable = rloo.combine(raw, v["weights"], config())
    assert scorable.tolist() == [[x is not None for x in v["score"]]]
    near(score, [x or 0 for x in v["score"]])
    near(rloo.advantages(score, None, scorable, config()).advantage, v["advantage"])
    as_zero = rloo.advantages(score, None, torch.ones_like(scorable), config())
    near(as_zero.advantage, v["none_as_zero"])


@pytest.mark.parametrize("score", VECTORS["EQ"]["scores"])
@pytest.mark.parametrize("k", [2, 3, 5, 8])
def test_equal_scores_have_an_advantage_of_exactly_zero(score: float, k: int) -> None:
    assert advantages([score] * k).abs().max() == 0.0


def test_kl_estimators_and_rewards() -> None:
    v = VECTORS["KL"]
    old, ref, m = column([v["logp"]]), column([v["ref"]]), micro([3])
    near(family.estimate_kl(old - ref, config()), v["d"])
    near(family.estimate_kl(old - ref, config(kl_estimator="k3")), v["k3"])
    for name, total in v["sum"].items():
        near(rloo.sequence_kl(old, ref, m, config(kl_estimator=name)), [total])
    row = torch.ones(1, 2, dtype=torch.float64)
    for beta, reward in v["reward"].items():
        c = config(beta=float(beta))
        pull = rloo.sequence_kl(old, ref, m, c).expand(1, 2)
        near(rloo.advantages(row, pull, row > 0, c).reward, [[reward, reward]])
    for beta, rewards in v["token_rewards"].items():
        near(tensor([0, 0, v["score"]]) - float(beta) * (old - ref), rewards)


def test_reinf_loss_of_a_completion_and_of_its_tokens() -> None:
    v, logp = VECTORS["REINF"], VECTORS["KL"]["logp"]
    x, m, c = column([logp]), micro([3]), config(policy_loss="reinforce")
    whole = tensor([v["sequence_advantage"]], dtype=torch.float64)
    near(rloo.loss(x, x, None, m, whole, c, 1.0).total, v["sequence_loss"])
    near(
        tensor(VECTORS["KL"]["token_rewards"]["1"]) - tensor(v["baselines"]), v["token_advantages"]
    )
    tokens = tensor(v["token_advantages"], dtype=torch.float64)
    near(family.policy_term(x, x, tokens, m, c, None), v["token_losses"])
    mean = config(policy_loss="reinforce", loss_agg="token_mean")
    near(rloo.loss(x, x, None, m, tokens, mean, 3.0).total, v["token_mean"])


def expected_gradient(in_loss: bool, **keys: Any) -> Tensor:
    """Sum over actions of their probability times the loss's gradient at the logits."""
    v = VECTORS["KL-G"]
    logits = tensor(v["policy"], dtype=torch.float64, requires_grad=True)
    logp = logits.log_softmax(0)
    ref = tensor(v["ref"], dtype=torch.float64).log_softmax(0)
    p, m = logp.detach().exp(), micro([1])
    c = config(beta=1.0, kl_in="loss" if in_loss else "reward", baseline="none", **keys)
    total = logp.sum() * 0
    for action in range(3):
        x, r = logp[action : action + 1], ref[action : action + 1]
        score = torch.zeros(1, 1, dtype=torch.float64)
        pull = rloo.sequence_kl(x.detach(), r, m, c)[None]
        a = rloo.advantages(score, pull, score == 0, c).advantage[0]
        total = total + p[action] * rloo.loss(x, x.detach(), r, m, a, c, 1.0).total
    total.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    return logits.grad


@pytest.mark.parametrize("name", ESTIMATORS)
def test_kl_g_gradient_of_each_estimator_in_the_reward(name: str) -> None:
    near(expected_gradient(False, kl_estimator=name), VECTORS["KL-G"]["in_reward"][name])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_kl_g_gradient_of_each_estimator_in_the_loss(name: str) -> None:
    near(expected_gradient(True, kl_estimator=name), VECTORS["KL-G"]["in_loss"][name])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_kl_g_gradient_of_each_ratio_weighted_estimator(name: str) -> None:
    found = expected_gradient(True, kl_estimator=name, kl_ratio_weighted=True)
    near(found, VECTORS["KL-G"]["in_loss_ratio_weighted"][name])


@pytest.mark.parametrize("sign", ["positive", "negative", "negative_delta"])
@pytest.mark.parametrize("level", ["sequence", "token", "geometric"])
def test_clip_losses_and_gradients(sign: str, level: str) -> None:
    v = VECTORS["CLIP"]
    delta = float(v["delta"]) if sign == "negative_delta" else None
    c = config(epsilon=v["epsilon"], delta=delta, ratio_level=level)
    logp = tensor(v["ratios"], dtype=torch.float64).log().requires_grad_()
    a = torch.ones(4, dtype=torch.float64) * (1 if sign == "positive" else -1)
    m, old = micro([1] * 4), torch.zeros(4, dtype=torch.float64)
    found = family.policy_term(logp.detach(), logp.detach().exp(), a, m, c, None)
    near(found, v[sign]["loss"])
    out = rloo.loss(logp, old, None, m, a, c, 1.0)
    near(out.total, sum(v[sign]["loss"]))
    out.total.backward()
    assert logp.grad is not None
    near(logp.grad, v[sign]["gradient"])
    assert out.high.tolist() == [sign == "positive" and r > 1.2 for r in v["ratios"]]
    assert out.low.tolist() == [sign != "positive" and r < 0.8 for r in v["ratios"]]
    assert out.delta.tolist() == [delta is not None and r > delta for r in v["ratios"]]


@pytest.mark.parametrize("level", ["sequence", "token", "geometric"])
def test_level_of_the_ratio(level: str) -> None:
    v = VECTORS["LEVEL"]
    logp, a = column([v["log_ratios"]]), torch.ones(1, dtype=torch.float64)
    out = rloo.loss(logp, logp * 0, None, micro([3]), a, config(ratio_level=level), 1.0)
    near(out.ratio, v[level])
    if level == "sequence":
        near(out.total, v["sequence_clipped_loss"])


@pytest.mark.parametrize("case", VECTORS["IS"]["cases"])
def test_is_weights_after_each_mode(case: dict[str, Any]) -> None:
    v = VECTORS["IS"]
    rule = {k: case[k] for k in ("level", "mode", "cap", "floor")}
    m = micro([3], behaviour=tensor(v["behaviour"]))
    found = importance_weights.correction_weights(column([v["old"]]), m, corrected(**rule))
    assert found is not None
    near(found.weight, case["weight"])
    near(found.raw, v["raw"][case["level"]])


def test_is_geometric_weight_and_a_missing_sampler_logp() -> None:
    v = VECTORS["IS"]
    old, m = column([v["old"]]), micro([3], behaviour=tensor(v["behaviour"]))
    geometric = importance_weights.correction_weights(old, m, corrected("geometric", "truncate"))
    assert geometric is not None
    near(geometric.weight, v["raw"]["geometric"])
    assert m.behaviour_logp is not None
    m.behaviour_logp[1] = float("nan")
    for level, weight in v["second_missing"].items():
        found = importance_weights.correction_weights(old, m, corrected(level, "truncate"))
        assert found is not None
        near(found.weight, weight)


AGGS = ["sequence_sum", "sequence_mean", "token_mean", "constant", "token_mean_local"]


@pytest.mark.parametrize("agg", AGGS)
def test_agg_with_one_row_per_micro_batch(agg: str) -> None:
    v, c = VECTORS["AGG"], config(loss_agg=agg)
    n = family.update_denominator(c, 2, 6, 2, v["max_completion_length"])
    parts = [family.aggregate_loss(column([row]), micro([len(row)]), c) / n for row in v["terms"]]
    near(parts[0] + parts[1], v[agg])


@pytest.mark.parametrize("agg", AGGS[:4])
def test_agg_in_one_micro_batch_is_the_same_also_for_row_terms(agg: str) -> None:
    v, c = VECTORS["AGG"], config(loss_agg=agg)
    n = family.update_denominator(c, 2, 6, 1, v["max_completion_length"])
    near(family.aggregate_loss(column(v["terms"]), micro([2, 4]), c) / n, v[agg])
    rows = tensor([1.0, 2.0], dtype=torch.float64)
    once = 1.5  # a row-level term counts once per row under sequence_sum
    near(
        family.aggregate_loss(rows, micro([2, 4]), c) / n,
        once if agg == "sequence_sum" else v[agg],
    )


def test_norm_of_advantages_over_the_step() -> None:
    v = VECTORS["NORM"]
    near(advantages(v["scores"], normalize_advantages=True), v["normalized"])
    first = advantages(v["scores"][0], normalize_advantages=True)
    near(first[0, 0], v["first_alone"])


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_norm_by_a_std_of_scores_is_grpo_with_a_group_mean(scale: str) -> None:
    v = VECTORS["NORM"]
    found = advantages(v["scores"], baseline="group_mean", advantage_scale=scale)
    near(found if scale == "batch" else found[0], v[scale])


def test_norm_kl_noise_is_not_blown_up() -> None:
    v = VECTORS["NORM-KL"]
    score, scorable = table(v["scores"])
    pull = tensor([v["kl"]], dtype=torch.float64)
    c = config(beta=v["beta"], normalize_advantages=True)
    found = rloo.advantages(score, pull, scorable, c)
    near(found.advantage, v["advantage"])
    assert found.norm_skipped
    a = found.advantage
    near(a / (a.std() + 1e-4), v["unguarded"])


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_norm_kl_noise_is_not_divided_by_a_std_of_equal_scores_either(scale: str) -> None:
    v = VECTORS["NORM-KL"]
    found = advantages(v["scores"], v["kl"], beta=v["beta"], advantage_scale=scale)
    near(found, v["advantage"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loo_std_of_equal_siblings_divides_nothing(dtype: torch.dtype) -> None:
    v = VECTORS["LOO-STD"]
    score = tensor([[v["equal"]] * v["count"] + [v["last"]]], dtype=dtype)
    found = rloo.advantages(score, None, score > 0, config(advantage_scale="loo_std"))
    near(found.advantage[0, -1], v["last_advantage"])


@pytest.mark.parametrize("rule", ["none", "subtract 1", "replace -1"])
def test_eos_penalty_before_the_baseline(rule: str) -> None:
    v = VECTORS["EOS"]
    mode, _, value = rule.partition(" ")
    c = config(missing_eos_penalty={"mode": mode, "value": float(value or 0)})
    score, scorable = table(v["scores"])
    shaped = rloo.shape(score, scorable, torch.ones(1, 4), tensor([v["terminated"]]), c)
    near(shaped, v[rule]["score"])
    near(rloo.advantages(shaped, None, scorable, c).advantage, v[rule]["advantage"])


def test_eos_penalty_as_a_bare_number_is_subtracted() -> None:
    v = VECTORS["EOS"]
    score, scorable = table(v["scores"])
    ended = tensor([v["terminated"]])
    shaped = rloo.shape(score, scorable, ended, ended, config(missing_eos_penalty=1.0))
    near(shaped, v["subtract 1"]["score"])


@pytest.mark.parametrize("rule", [False, True, "drop"])
def test_trunc_rows_leave_the_loss_or_the_baseline_too(rule: bool | str) -> None:
    v = VECTORS["TRUNC"]
    expected = v[str(rule).lower()]
    score, scorable = table(v["scores"])
    c = config(mask_truncated_completions=rule)
    scorable, masked = rloo.truncation(scorable, tensor([v["terminated"]]), c)
    found = rloo.advantages(score, None, scorable, c).advantage
    near(found, expected["advantage"])
    m, x = micro([1] * 4, mask=(~masked[0]).float()), torch.zeros(4, dtype=torch.float64)
    out = rloo.loss(x, x, None, m, found[0], c, 1.0)
    assert int(out.unit_mask.sum()) == expected["rows_in_loss"]


def test_long_completions_pay_linearly() -> None:
    v = VECTORS["LONG"]
    rule = {"max_length": v["max_length"], "cache": v["cache"], "weight": 1.0}
    lengths = tensor([v["lengths"]])
    zero = torch.zeros(lengths.shape, dtype=torch.float64)
    shaped = rloo.shape(zero, zero == 0, lengths, lengths > 0, config(overlong_penalty=rule))
    near(shaped, v["penalty"])


@pytest.mark.parametrize("text", VECTORS["SEED"])
def test_seed_of_a_completion(text: str) -> None:
    seed, phase, step, prompt, k, turn = text.split("/")
    found = sampling_seed(int(seed), phase, int(step), int(prompt), int(k), int(turn))
    assert found == VECTORS["SEED"][text]


DIAL = VECTORS["DIAL"]
LENGTHS = [len(row) for row in DIAL["old"]]


def dialect_loss(keys: dict[str, Any], step: float, given: Any = None) -> tuple[Any, ...]:
    """Advantages, the advantages handed to the loss, the loss, its gradient: at old + step."""
    c = config(**({"beta": 0.1} | keys))
    old, ref, m = column(DIAL["old"]), column(DIAL["ref"]), micro(LENGTHS)
    logp = (old + step * column(DIAL["step"])).requires_grad_()
    score, scorable = table(DIAL["scores"])
    pull = rloo.sequence_kl(old, ref, m, c).reshape(1, 4)
    found = rloo.advantages(score, pull, scorable, c)
    a = found.advantage[0] if given is None else tensor(given, dtype=torch.float64)
    used = rloo.token_advantages(a, found.usable[0], old, ref, m, c)
    n = family.update_denominator(c, 4, sum(LENGTHS), 1, 8)
    out = rloo.loss(logp, old, ref, m, used, c, n)
    out.total.backward()
    assert logp.grad is not None
    return found, used, out, logp.grad, m


def test_dial_kl_and_reward() -> None:
    old, ref, m = column(DIAL["old"]), column(DIAL["ref"]), micro(LENGTHS)
    near(rloo.sequence_kl(old, ref, m, config()), DIAL["kl"])
    near(dialect_loss({}, 0)[0].reward, DIAL["reward"])


@pytest.mark.parametrize("name", [k for k, v in DIAL["cases"].items() if "keys" in v])
def test_dial_advantages_and_losses(name: str) -> None:
    case = DIAL["cases"][name]
    for where, step in (("at_old", 0.0), ("at_new", 1.0)):
        found, used, out, gradient, m = dialect_loss(case["keys"], step)
        near(found.advantage, case["advantage"])
        near(out.policy, case[where])
        if "token_advantages" in case:
            near(used, case["token_advantages"])
        if f"gradient_{where}" in case:
            near(row_gradient(gradient, m), case[f"gradient_{where}"])
        if f"mean_k3_{where}" in case:
            near(out.kl, 0.1 * case[f"mean_k3_{where}"])
            near(out.total.detach(), out.policy + out.kl)
    if "high_mean" in case:
        near(out.high.double().mean(), case["high_mean"])


@pytest.mark.parametrize("name", [k for k, v in VECTORS["LOSS-GRPO"].items() if "keys" in v])
def test_loss_grpo_is_reached_with_the_shared_switches(name: str) -> None:
    v = VECTORS["LOSS-GRPO"]
    for where, step in (("at_old", 0.0), ("at_new", 1.0)):
        out = dialect_loss({"beta": 0.0} | v[name]["keys"], step, v["advantage"])[2]
        near(out.total.detach(), v[name][where])
