"""Every algorithm and dialect against its vector: advantages, loss, and the gradient of each token.

What is tested is the YAML: a config is composed from conf/algorithm/ as `rloo train` composes it,
and only what the vector says is set over it. The numbers are in vectors.json; the gradients there
are worked out by hand, in vectors_made.py, and not by the code that is tested.
"""

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from algorithm_cases import column, micro, table
from hook_calls import HookCalls, of_name
from torch import Tensor, tensor

from rloo_cli.algorithms.common.hooks import StepTokens
from rloo_cli.config.compose import compose_config

HERE = Path(__file__).parent
VECTORS = json.loads((HERE / "vectors.json").read_text())
DIAL, GRPO = VECTORS["DIAL"], VECTORS["LOSS-GRPO"]
LENGTHS = [len(row) for row in DIAL["old"]]
STEPS = {"at_old": 0.0, "at_new": 1.0}
Case = tuple[str, str, str | None, str]


def near(found: Tensor, expected: Any, atol: float = 1e-6) -> None:
    wanted = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found.double().reshape(wanted.shape), wanted, rtol=0, atol=atol)


@functools.cache
def built(algorithm: str, dialect: str | None, words: str) -> tuple[HookCalls, Any]:
    """What an algorithm does, and its config: the YAML's values, and `words` (JSON) over them."""
    chosen = [f"algorithm={algorithm}", *([f"algorithm.dialect={dialect}"] if dialect else [])]
    over = [f"algorithm.{name}={json.dumps(value)}" for name, value in json.loads(words).items()]
    values = compose_config([*chosen, *over]).values["algorithm"]
    own = of_name(values["name"])
    return own, own.resolved(own.Config(**values), "transformers")


def of_case(row: dict[str, Any], common: dict[str, Any]) -> tuple[HookCalls, Any]:
    keys = common | row["keys"]
    if row["dialect"] == "paper":
        keys = {k: v for k, v in keys.items() if not k.startswith("epsilon")}  # it has no ratio
    return built(row["algorithm"], row["dialect"], json.dumps(keys))


def named(cases: dict[str, Any]) -> list[Any]:
    """A case for every way its YAML can be chosen."""
    return [
        pytest.param(name, row, id=" ".join(map(str, (name, *row.values()))))
        for name, case in cases.items()
        if isinstance(case, dict) and "yaml" in case
        for row in case["yaml"]
    ]


def dial_advantages(own: HookCalls, c: Any) -> tuple[Tensor, Tensor]:
    """Of the four completions of DIAL: (4,) of the rows, and what the loss is given."""
    old, ref, m = column(DIAL["old"]), column(DIAL["ref"]), micro(LENGTHS)
    score, scorable = table(DIAL["scores"])
    pull = own.sequence_kl(old, ref, m, c).reshape(1, 4)
    greedy = torch.full((1,), 0.25, dtype=torch.float64)
    found = own.advantages(score, pull, scorable, c, greedy_score=greedy)
    if c.by_token:
        step = StepTokens(score[0], torch.zeros(4).long(), m.sequence_ids, m.mask, old, ref, None)
        return found.advantage[0], own.token_table(step, c).advantage
    used = own.token_advantages(found.advantage[0], found.usable[0], old, ref, m, c)
    return found.advantage[0], used


def dial_loss(own: HookCalls, c: Any, step: float, a: Tensor) -> tuple[Any, Tensor]:
    """The loss at old + step, in one micro-batch, and its gradient at every token."""
    old, ref, m = column(DIAL["old"]), column(DIAL["ref"]), micro(LENGTHS)
    logp = (old + step * column(DIAL["step"])).requires_grad_()
    n = own.denominator(c, 4, sum(LENGTHS), 1, 8)
    out = own.loss(logp, old, ref, m, a, c, n)
    out.total.backward()
    assert logp.grad is not None
    return out, logp.grad


@pytest.mark.process
def test_the_gradients_in_the_file_are_those_worked_out_by_hand() -> None:
    words = [sys.executable, "-P", str(HERE / "vectors_made.py"), "--check"]
    assert subprocess.run(words, capture_output=True, text=True).stderr == ""


@pytest.mark.parametrize(("name", "row"), named(DIAL["cases"]))
def test_dial_advantages_losses_and_gradients(name: str, row: dict[str, Any]) -> None:
    case = DIAL["cases"][name]
    own, c = of_case(row, DIAL["common"])
    rows, used = dial_advantages(own, c)
    if "advantage" in case:
        near(rows, case["advantage"])
    if "token_advantages" in case:
        near(used, case["token_advantages"])
    for where, step in STEPS.items():
        out, gradient = dial_loss(own, c, step, used)
        near(out.policy, case[where])
        near(out.kl, case.get(f"kl_{where}", 0.0))
        near(out.total.detach(), out.policy + out.kl)
        near(gradient, case[f"token_gradient_{where}"])
    if "high_mean" in case:
        near(out.high.double().mean(), case["high_mean"])


def test_dial_of_reinforce_pp_is_whitened_returns_to_go() -> None:
    case = DIAL["cases"]["reinforce_pp"]
    g = tensor(case["g"], dtype=torch.float64)
    near(g.mean(), case["mean"])
    near(g.std(), case["std"])
    near((g - g.mean())[:2] / g.std(), case["first_row"])
    near(tensor(case["token_advantages"])[:2], case["first_row"])
    minus = DIAL["cases"]["reinforce_pp, minus_group_mean"]
    each = [[a] * n for a, n in zip(minus["row_advantages"], LENGTHS, strict=True)]
    near(column(each), minus["token_advantages"])


@pytest.mark.parametrize(("name", "row"), named(GRPO))
def test_loss_grpo_losses_and_gradients(name: str, row: dict[str, Any]) -> None:
    case = GRPO[name]
    own, c = of_case(row, GRPO["common"])
    a = tensor(GRPO["advantage"], dtype=torch.float64)
    for where, step in STEPS.items():
        out, gradient = dial_loss(own, c, step, a)
        near(out.total.detach(), case[where])
        near(gradient, case[f"token_gradient_{where}"])


def test_loss_grpo_of_bnpo_at_one_completion_per_micro_batch_is_grpo() -> None:
    own, c = built("grpo", None, json.dumps(GRPO["common"] | {"loss_type": "bnpo"}))
    n, total = own.denominator(c, 4, sum(LENGTHS), 4, 8), 0.0
    for i, (old, step) in enumerate(zip(DIAL["old"], DIAL["step"], strict=True)):
        x, a = column([old]), tensor(GRPO["advantage"][i : i + 1], dtype=torch.float64)
        total += float(own.loss(x + column([step]), x, None, micro([len(old)]), a, c, n).total)
    near(tensor(total), GRPO["grpo"]["at_new"])


def test_loss_grpo_advantages_are_of_the_batch_of_dial() -> None:
    own, c = built("grpo", None, "{}")
    score, scorable = table(DIAL["scores"])
    near(own.advantages(score, None, scorable, c).advantage, GRPO["advantage"])


def test_sapo_losses_and_gradients() -> None:
    v = VECTORS["SAPO"]
    own, c = built("sapo", None, "{}")
    for ratio, a, loss, slope in zip(
        v["ratio"], v["advantage"], v["loss"], v["gradient"], strict=True
    ):
        logp = tensor([ratio], dtype=torch.float64).log().requires_grad_()
        one = tensor([float(a)], dtype=torch.float64)
        out = own.loss(logp, torch.zeros(1).double(), None, micro([1]), one, c, 1.0)
        out.total.backward()
        near(out.total.detach(), loss)
        near(logp.grad, slope)


@pytest.mark.parametrize(("a", "temperature"), [(1.0, 2.0), (-1.0, 3.0)])
def test_sapo_takes_the_temperature_of_the_advantages_sign(a: float, temperature: float) -> None:
    own, c = built("sapo", None, '{"sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0}')
    logp = tensor([1.5], dtype=torch.float64).log()
    one = tensor([a], dtype=torch.float64)
    out = own.loss(logp, torch.zeros(1).double(), None, micro([1]), one, c, 1.0)
    gate = tensor(temperature * 0.5, dtype=torch.float64).sigmoid() * 4 / temperature
    near(out.total, float(-gate * a))


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_norm_of_grpo_by_the_std_of_a_group_or_of_the_step(scale: str) -> None:
    v = VECTORS["NORM"]
    own, c = built("grpo", None, json.dumps({"advantage_scale": scale}))
    score, scorable = table(v["scores"])
    found = own.advantages(score, None, scorable, c).advantage
    near(found if scale == "batch" else found[0], v[scale])


@pytest.mark.parametrize("dialect", [None, "trl", "trl_0_21"])
def test_norm_divides_by_what_the_dialect_adds_to_the_std(dialect: str | None) -> None:
    v, of = VECTORS["NORM"], " trl_0_21" if dialect == "trl_0_21" else ""
    own, c = built("rloo", dialect, '{"normalize_advantages": true}')
    score, scorable = table(v["scores"])
    near(own.advantages(score, None, scorable, c).advantage, v[f"normalized{of}"])
    alone = own.advantages(score[:1], None, scorable[:1], c).advantage
    near(alone[0, 0], v[f"first_alone{of}"], atol=1e-7)


@pytest.mark.parametrize("dialect", [None, "trl", "trl_0_21"])
def test_norm_kl_noise_is_blown_up_by_the_dialects_that_do(dialect: str | None) -> None:
    v = VECTORS["NORM-KL"]
    keys = {"beta": v["beta"], "normalize_advantages": True}
    own, c = built("rloo", dialect, json.dumps(keys))
    score, scorable = table(v["scores"])
    found = own.advantages(score, tensor([v["kl"]], dtype=torch.float64), scorable, c)
    wanted = {None: "advantage", "trl": "unguarded", "trl_0_21": "unguarded trl_0_21"}
    near(found.advantage, v[wanted[dialect]])
    assert found.norm_skipped == (dialect is None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loo_std_of_equal_siblings_divides_nothing_in_nemo_rl_either(dtype: torch.dtype) -> None:
    v = VECTORS["LOO-STD"]
    own, c = built("rloo", "nemo_rl", "{}")
    score = tensor([[v["equal"]] * v["count"] + [v["last"]]], dtype=dtype)
    near(own.advantages(score, None, score > 0, c).advantage[0, -1], v["last_advantage"])


@pytest.mark.parametrize("dialect", [None, "ms_swift"])
def test_none_counts_as_zero_in_ms_swift_only(dialect: str | None) -> None:
    v, nan = VECTORS["NONE"], float("nan")
    own, c = built("rloo", dialect, "{}")
    raw = tensor([[[nan if x is None else x for x in r]] for r in v["rewards"]]).double()
    score, scorable = own.combine(raw, v["weights"], c)
    found = own.advantages(score, None, scorable, c).advantage
    near(found, v["none_as_zero" if dialect else "advantage"])


def test_openrlhf_clips_the_advantage_and_not_the_score() -> None:
    own, c = built("rloo", "openrlhf", "{}")
    score, scorable = table([100.0, 99.0, 60.0, 61.0])
    shaped = own.shape(score, scorable, torch.ones(1, 4), scorable, c)
    near(shaped, score)
    near(own.advantages(shaped, None, scorable, c).advantage, [[10, 10, -10, -10]])


def test_openrlhf_charges_no_token_more_than_ten_nats() -> None:
    own, c = built("rloo", "openrlhf", '{"beta": 0.1}')
    old, m = column([[-1.0, -1.0], [-1.0, -1.0]]), micro([2, 2])
    ref = old - tensor([30.0, 1.0, -30.0, 0.0])
    near(own.sequence_kl(old, ref, m, c), [11, -10])
    zero = torch.zeros(2).double()
    used = own.token_advantages(zero, zero == 0, old, ref, m, c)
    near(used, [-1.1, -0.1, 1.0, 0.0])


@pytest.mark.parametrize("distance", [3.0, 30.0, -30.0])
def test_nemo_rl_clamps_a_tokens_kl_and_then_also_its_sampling_gradient(distance: float) -> None:
    """k3 of a clamped log-ratio, at most 10; where either clamp acts, the token is not pulled."""
    own, c = built("rloo", "nemo_rl", '{"beta": 1.0, "advantage_scale": "none"}')
    logp = tensor([-40.0], dtype=torch.float64, requires_grad=True)
    ref, a = logp.detach() - distance, torch.zeros(1).double()
    out = own.loss(logp, logp.detach(), ref, micro([1]), a, c, 1.0)
    out.total.backward()
    inside = distance == 3.0
    near(out.kl, float(torch.tensor(-3.0).double().exp()) + 2 if inside else 10.0)
    assert logp.grad is not None
    pull = 1 - float(torch.tensor(-3.0).double().exp())
    near(logp.grad, [pull + float(out.kl) if inside else 0.0])


def ppo(**keys: Any) -> tuple[HookCalls, Any]:
    return built("ppo", None, json.dumps({"beta": 0.05} | keys))


def test_gae_advantages_returns_and_whitening() -> None:
    v, k = VECTORS["GAE"], VECTORS["KL"]  # its token rewards are KL's, at beta .05
    own, c = ppo()
    old, ref, m = column([k["logp"]]), column([k["ref"]]), micro([3])
    value = tensor(v["value"], dtype=torch.float64)
    score = tensor([float(k["score"])], dtype=torch.float64)
    step = StepTokens(score, torch.zeros(1).long(), m.sequence_ids, m.mask, old, ref, value)
    found = own.token_table(step, c)
    assert found.returns is not None
    near(found.returns, v["returns"])
    near(found.returns - value, v["advantage"])
    near(found.advantage, v["whitened"])


def test_gae_clipped_value_loss_and_its_gradient() -> None:
    v, c, m = VECTORS["GAE"], ppo()[1], micro([3])
    m.value = tensor(v["value"], dtype=torch.float64)
    m.returns = tensor(v["returns"], dtype=torch.float64)
    new = tensor(v["new_value"], dtype=torch.float64, requires_grad=True)
    out = of_name("ppo").value_loss(new, m, c, 3.0)
    out.total.backward()
    assert new.grad is not None
    near(out.total.detach(), c.vf_coef * v["value_loss"])
    near(new.grad, c.vf_coef * tensor(v["value_gradient"], dtype=torch.float64))
    near(out.clipped.double().mean(), v["clip_share"])


def test_a_value_is_clipped_where_it_left_the_range_and_not_where_floats_round() -> None:
    m = micro([3])
    m.value = tensor([0.1, 0.7, 0.3])
    m.returns = tensor([1.0, 1.0, 1.0])
    new = tensor([0.3, 0.2, 0.9])
    for epsilon, share in ((1000.0, 0.0), (0.4, 2 / 3)):
        c = ppo(epsilon_value=epsilon)[1]
        near(of_name("ppo").value_loss(new, m, c, 3.0).clipped.double().mean(), share)
