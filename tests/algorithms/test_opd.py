"""On-policy distillation: the divergence's vectors, expected gradients in fp64, and its rules."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from algorithm_cases import column, micro
from hook_calls import of_name
from torch import Tensor, tensor

from rloo_cli.algorithms.common.forward_plan import forward_plan
from rloo_cli.algorithms.opd import discount_later_tokens
from rloo_cli.cli.config import explain_key
from rloo_cli.cli.plan import dry_run_text, dry_run_values
from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.policy.divergence import blockwise_jsd, generalized_jsd
from rloo_cli.utils import paths
from rloo_cli.utils.errors import ConfigError

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())
KL_G, JSD = VECTORS["KL-G"], VECTORS["JSD"]
opd = of_name("opd")
URL = "http://node7:8000"
SERVED = ["+recipe=smoke", "algorithm=opd", f"algorithm.teacher.base_url={URL}"]
TAUGHT = ["+recipe=smoke", "algorithm=opd", "model.ref_path=make:tiny"]


def config(*words: str, algorithm: str = "opd") -> Any:
    values = compose_config([f"algorithm={algorithm}", *words]).values["algorithm"]
    return opd.resolved(opd.Config(**values), "transformers")


def logits(values: list[float]) -> Tensor:
    return tensor([values], dtype=torch.float64)


def near(found: Tensor, expected: Any, atol: float = 1e-6) -> None:
    wanted = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found.double().reshape(wanted.shape), wanted, rtol=0, atol=atol)


@pytest.mark.parametrize("case", JSD["cases"], ids=str)
def test_the_divergence_and_its_gradient_are_those_worked_out_by_hand(case: dict[str, Any]) -> None:
    student = logits(JSD["student"]).requires_grad_()
    found = generalized_jsd(student, logits(JSD["teacher"]), 1.0, case["beta"])
    near(found.detach(), [case["divergence"]])
    near(torch.autograd.grad(found.sum(), student)[0], [case["gradient"]])


def test_the_ends_of_the_divergence_are_the_two_kls_of_the_other_vector() -> None:
    student, teacher = logits(KL_G["policy"]).requires_grad_(), logits(KL_G["ref"])
    for beta, name in ((1.0, "forward"), (0.0, "backward")):
        found = generalized_jsd(student, teacher, 1.0, beta).sum()
        near(torch.autograd.grad(found, student)[0], [KL_G[name]])


def test_the_divergence_in_blocks_has_the_values_and_gradients_of_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw = torch.Generator().manual_seed(0)
    teacher = torch.randn(7, 11, generator=draw, dtype=torch.float64)
    student = torch.randn(7, 11, generator=draw, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, generator=draw, dtype=torch.float64)
    found = {}
    for size in (10**6, 22):
        monkeypatch.setattr("rloo_cli.policy.divergence.BLOCK_LOGITS", size)
        d = blockwise_jsd(student, teacher, 0.7, 0.3)
        found[size] = (d.detach(), torch.autograd.grad((weight * d).sum(), student)[0])
    for whole, blocks in zip(*found.values(), strict=True):
        torch.testing.assert_close(blocks, whole, rtol=1e-12, atol=1e-14)
    check_by = lambda x: generalized_jsd(x, teacher, 0.7, 0.3)  # noqa: E731
    assert torch.autograd.gradcheck(check_by, (student,))


def taught_gradient(*words: str) -> Tensor:
    """The expected gradient at the logits of one token that is sampled, with a score of 0."""
    c = config("algorithm.baseline=none", *words)
    student = logits(KL_G["policy"])[0].requires_grad_()
    logp, teacher = student.log_softmax(0), logits(KL_G["ref"])[0].log_softmax(0)
    zero, total = torch.zeros(1, 1, dtype=torch.float64), torch.zeros(())
    for action, p in enumerate(logp.detach().exp()):
        x, q = logp[action : action + 1], teacher[action : action + 1]
        a = opd.advantages(zero, (x.detach() - q)[None], zero == 0, c).advantage[0]
        total = total + p * opd.loss(x, x.detach(), q, micro([1]), a, c, 1.0).total
    return torch.autograd.grad(total, student)[0]


@pytest.mark.slow_cases("reinforce")
@pytest.mark.parametrize("policy_loss", ["clip", "reinforce", "cispo"])
def test_the_expected_gradient_of_a_token_is_that_of_the_reverse_kl(policy_loss: str) -> None:
    words = ["algorithm.epsilon_high=5.0"] if policy_loss == "cispo" else []
    found = taught_gradient(f"algorithm.policy_loss={policy_loss}", *words)
    near(found, KL_G["forward"])
    near(taught_gradient("algorithm.beta=0.25"), 0.25 * found)


def two_tokens(c: Any, table: Tensor, teacher: Tensor, score: Tensor) -> Tensor:
    """The exact expectation of the loss over all completions of two tokens of three.

    `table` (4, 3): logits of the first token, and of the second after each first one.
    """
    logp, q = table.log_softmax(-1), teacher.log_softmax(-1)
    m, total = micro([2]), torch.zeros(())
    for first in range(3):
        for second in range(3):
            x = torch.stack([logp[0, first], logp[1 + first, second]])
            y = torch.stack([q[0, first], q[1 + first, second]])
            a = score[first, second].reshape(1)
            total = total + x.detach().sum().exp() * opd.loss(x, x.detach(), y, m, a, c, 1.0).total
    return total


@pytest.mark.parametrize("discount", [0.0, 1.0])
def test_over_all_completions_the_gradient_is_that_of_score_minus_kl(discount: float) -> None:
    """kl_discount=1: of the completions' KL; 0: of each token's own, the states held still."""
    draw = torch.Generator().manual_seed(3)
    table, teacher = torch.randn(2, 4, 3, generator=draw, dtype=torch.float64)
    score = torch.randn(3, 3, generator=draw, dtype=torch.float64)
    table.requires_grad_()
    c = config(f"algorithm.kl_discount={discount}", "algorithm.beta=0.7")
    found = torch.autograd.grad(two_tokens(c, table, teacher, score), table)[0]
    p, q = table.softmax(-1), teacher.log_softmax(-1)
    kl = (p * (p.log() - q)).sum(-1)  # (4,), of each state
    reached = torch.cat([torch.ones(1), p[0] if discount else p[0].detach()])
    expected = (p[0][:, None] * p[1:] * score).sum() - 0.7 * (reached * kl).sum()
    near(found, -torch.autograd.grad(expected, table)[0], atol=1e-12)


@pytest.mark.parametrize("discount", [0.0, 0.3, 1.0])
def test_later_tokens_are_discounted_within_a_completion(discount: float) -> None:
    lengths = [1, 4, 7, 2]
    values = torch.randn(14, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = []
    for row in values.split(lengths):
        expected += [
            sum(float(discount ** (u - t)) * row[u] for u in range(t, len(row)))
            for t in range(len(row))
        ]
    found = discount_later_tokens(values, micro(lengths), discount)
    torch.testing.assert_close(found, torch.stack(expected))


def test_a_masked_token_is_charged_nothing_and_charges_nobody() -> None:
    c, m = config("algorithm.kl_discount=1"), micro([3])
    m.mask = tensor([1.0, 0.0, 1.0])
    logp = column([[-1.0, -2.0, -3.0]]).requires_grad_()
    teacher, zero = column([[-1.5, -0.5, -2.0]]), torch.zeros(1, dtype=torch.float64)
    loss = opd.loss(logp, logp.detach(), teacher, m, zero, c, 1.0).total
    # d: 0.5, left out, -1
    near(torch.autograd.grad(loss, logp)[0], [0.5 - 1.0, 0.0, -1.0])


def test_in_the_loss_the_divergence_is_added_with_its_weight_and_as_tokens_are() -> None:
    c = config("algorithm.beta=0.5", algorithm="gkd")
    logp = column([[-1.0, -2.0], [-3.0]]).requires_grad_()
    d = column([[0.1, 0.2], [0.4]]).requires_grad_()
    a = tensor([1.0, -1.0], dtype=torch.float64)
    found = opd.loss(logp, logp.detach(), logp.detach(), micro([2, 1]), a, c, 3.0, divergence=d)
    near(found.kl, 0.5 * 0.7 / 3)
    near(found.total.detach(), found.policy + found.kl)
    by_logp, by_divergence = torch.autograd.grad(found.total, (logp, d))
    near(by_logp, [-1 / 3, -1 / 3, 1 / 3])
    near(by_divergence, [0.5 / 3] * 3)


def test_without_a_weighted_reward_every_completion_has_the_score_zero() -> None:
    nan = float("nan")
    for raw, weights in ((torch.zeros(0, 2, 3), []), (tensor([[[nan] * 3] * 2]), [0.0])):
        score, scorable = opd.combine(raw.double(), weights, config())
        assert scorable.all() and score.shape == (2, 3) and not score.any()
    score, scorable = opd.combine(tensor([[[nan, 2.0]]]).double(), [1.0], config())
    assert scorable.tolist() == [[False, True]] and score.tolist() == [[0.0, 2.0]]


def refused(*words: str, base: Sequence[str] = TAUGHT) -> dict[str, str]:
    """Where, and the way out, of each problem of a run."""
    try:
        check.check_config(compose_config([*base, *words]))
    except ConfigError as error:
        return {str(p.where): str(p.fix) for p in error.problems}
    return {}


@pytest.mark.parametrize("words", [[], ["reward=[]"], ["algorithm=gkd"], ["algorithm.kl_in=loss"]])
def test_a_run_with_a_teacher_is_accepted_with_and_without_a_reward(words: list[str]) -> None:
    assert refused(*words) == {}


REFUSED = {
    "model.ref_path=null": "a larger model",
    "algorithm.beta=0": "algorithm.beta=1.0",
    "algorithm.kl_in=none": "kl_in=reward",
    "model.ref_sync.every=4": "model.ref_sync.every=0",
    "algorithm.ratio_level=sequence": "ratio_level=token",
    "algorithm.kl_in_baseline=true": "kl_in_baseline=false",
    "algorithm.kl_credit=to_go": "kl_credit=sequence",
    "algorithm.zero_std_groups=drop": "zero_std_groups=keep",
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_a_teacher_cannot_have_is_refused_with_a_way_out(word: str) -> None:
    assert any(REFUSED[word] in fix for fix in refused(word).values()), refused(word)


def test_whole_distributions_need_whole_models_on_the_device() -> None:
    assert "algorithm.kl_in=reward" in " ".join(
        refused("algorithm=gkd", "model.ref_offload=true").values()
    )
    fixes = refused("algorithm=gkd", "distributed=fsdp2", "distributed.num_processes=2")
    assert any("distributed=ddp" in fix for fix in fixes.values())


def test_only_a_distillation_may_have_no_reward(sentence) -> None:
    with pytest.raises(ConfigError) as caught:
        check.check_config(compose_config(["+recipe=smoke", "reward=[]"]))
    sentence(caught, folder=paths.CONF)


def test_whose_rewards_are_only_metrics_is_not_warned_of_them() -> None:
    rewards = {"exact": SimpleNamespace(weight=0.0)}
    run = check.check_config(compose_config([*TAUGHT, "reward.length_tokens.weight=0",
                                             "reward.unique_chars.weight=0"]))  # fmt: skip
    assert set(run.rewards) and rewards
    assert not [w for w in opd.warnings(run) if "weight 0" in w]


def served(*words: str) -> Any:
    return check.check_config(compose_config([*SERVED, *words]))


def test_a_teacher_by_its_address_needs_no_reference_and_no_reward() -> None:
    for words in ([], ["reward=[]"], ["algorithm.teacher.base_url=https://teacher.example"]):
        run = served(*words)
        assert not run.algorithm.needs_reference and run.algorithm.teacher_server is not None
        assert forward_plan(run, run.algorithm).reference
    assert check.check_config(compose_config(TAUGHT)).algorithm.teacher_server is None


SERVED_REFUSED = {
    "model.ref_path=make:tiny": "model.ref_path=null",
    "algorithm=gkd": "algorithm=opd (kl_in=reward)",
    "algorithm.teacher.base_url=node7:8000": "algorithm.teacher.base_url=http://node7:8000",
    "generation.temperature=0.7": "algorithm.kl_temperature=one",
    "algorithm.beta=0": "algorithm.beta=1.0",
    "model.ref_sync.every=4": "model.ref_sync.every=0",
}


@pytest.mark.parametrize("word", SERVED_REFUSED)
def test_what_a_server_cannot_be_asked_for_is_refused_with_a_way_out(word: str) -> None:
    fixes = [*refused(word, base=SERVED).values()]
    assert len(fixes) == 1 and SERVED_REFUSED[word] in fixes[0], fixes


def test_sampling_masks_do_not_go_with_a_teachers_server() -> None:
    words = ["generation.return_sampling_mask=true", "generation.top_k=4"]
    assert "model.ref_path=TEACHER" in " ".join(refused(*words, base=SERVED).values())
    assert refused(*words) == {}


def test_at_another_temperature_the_kl_is_of_temperature_one() -> None:
    assert served("generation.temperature=0.7", "algorithm.kl_temperature=one")


def test_where_a_teacher_is_served_is_no_part_of_the_experiment_and_its_model_is() -> None:
    teacher = "algorithm.teacher"
    one = check.config_hash(served())
    elsewhere = [f"{teacher}.base_url=http://b:1", f"{teacher}.retries=5"]
    assert check.config_hash(served(*elsewhere, f"{teacher}.max_in_flight=3")) == one
    assert check.config_hash(served(f"{teacher}.model=other")) != one


def test_explain_tells_which_keys_of_a_teachers_server_act() -> None:
    got = explain_key("algorithm.teacher.base_url", SERVED)
    assert f'value    "{URL}"' in got and "from     command line" in got and "idle" not in got
    assert "no effect" in explain_key("algorithm.teacher.retries", TAUGHT)
    assert "no effect" not in explain_key("algorithm.teacher.retries", SERVED)
    only = "no effect: only with algorithm.teacher.base_url=null"
    assert only in explain_key("model.ref_offload", SERVED)


def test_a_dry_run_and_a_plan_tell_the_teachers_address() -> None:
    line = f"\nteacher    at {URL}: not loaded locally\n"
    assert line in dry_run_text(served())
    assert line in dry_run_text(served("model.path=some/model"))  # of which nothing is known
    assert dry_run_values(served())["plan"]["teacher"] == URL
    assert "teacher    " not in dry_run_text(check.check_config(compose_config(TAUGHT)))


def test_with_debug_the_model_itself_stands_in_for_a_served_teacher(tmp_path: Path) -> None:
    recipe = tmp_path / "served.yaml"
    teacher = f"algorithm: {{teacher: {{base_url: {URL!r}}}}}"
    recipe.write_text(f"defaults:\n  - override /algorithm: opd\nmax_steps: 2\n{teacher}\n")
    words = [f"+recipe={recipe}", "+debug=cpu"]
    run = check.check_config(compose_config(words))
    assert run.algorithm.teacher_server is None and run.model.ref_path == run.model.path
    url = "algorithm.teacher.base_url=http://127.0.0.1:1"
    run = check.check_config(compose_config([*words, url]))
    assert run.algorithm.teacher_server is not None and run.model.ref_path is None
