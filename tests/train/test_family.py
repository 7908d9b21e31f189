"""The family inside whole steps: gradients by hand, the fast path, memory, greedy answers."""

import json
import math
import random

import pytest
import torch
from loop_cases import (
    ENDS,
    PLAIN,
    alone,
    apart,
    flat,
    gradient,
    make,
    row_logp,
    sampled,
    step,
    updated,
)
from resume_cases import attempt, differing, left

from rloo_cli.checkpoint import manifest
from rloo_cli.checkpoint.step_state import dump_step, load_step
from rloo_cli.config.compose import compose_config
from rloo_cli.policy.shared_attention import native_attention
from rloo_cli.run import StepProgress
from rloo_cli.train.advantages import update_algorithm_state
from rloo_cli.utils.errors import ConfigError

CLOSE = 5e-5  # an update read off weights of 1, twice rounded
A, PP = "algorithm.", "algorithm=reinforce_pp"
ADAPTIVE = "adaptive_entropy={target:9.0,delta:0.05,min:0.0,max:0.3}"
REGION = "trust_region={kind:tv,level:token,low:1e-6,high:1e-6}"
CHOICES = {
    "reinforce": [],
    "reinforce, moving average": ["baseline=ema"],
    "reinforce_pp": [],
    "reinforce_pp, discounted": ["gamma=0.9", "num_iterations=2"],
    "reinforce_pp, no KL": ["beta=0"],
    "reinforce_pp_baseline": ["num_minibatches=2"],
    "grpo": ["beta=0.1", "num_iterations=2"],
    "grpo, batch std": ["advantage_scale=batch"],
    "grpo, loss_type grpo": ["loss_type=grpo"],
    "grpo, bnpo": ["loss_type=bnpo"],
    "grpo, luspo": ["loss_type=luspo", "num_iterations=2"],
    "grpo, vespo": ["loss_type=vespo", "num_iterations=2"],
    "dr_grpo": [],
    "dapo": ["num_iterations=2"],
    "gspo": ["num_iterations=2", "beta=0.1"],
    "cispo": ["num_iterations=2"],
    "sapo": ["num_iterations=2"],
    "remax": [],
    "rloo, entropy bonus": ["entropy_coef=0.1"],
    "rloo, off-policy threshold": ["off_policy_threshold=0.01", "num_iterations=3"],
    "rloo, top entropies": ["top_entropy_quantile=0.3", "entropy_coef=0.1", "num_iterations=2"],
    "dapo, adaptive entropy": [ADAPTIVE, "top_entropy_quantile=0.5", "num_minibatches=2"],
    "rloo, trust region": [REGION, "num_iterations=3"],
    "rloo, pass at k": ["pass_at_k=2", "kl_in_baseline=false"],
    "grpo, MaxRL": ["advantage_scale=mean"],
}


def words(name: str) -> list[str]:
    return [f"algorithm={name.partition(',')[0]}", *(A + word for word in CHOICES[name])]


@pytest.mark.slow_but(
    "reinforce",
    "reinforce_pp, discounted",
    "grpo",
    "grpo, luspo",
    "dapo",
    "sapo",
    "rloo, off-policy threshold",
)
@pytest.mark.parametrize("name", CHOICES)
def test_every_algorithm_makes_a_step_with_finite_numbers(tmp_path, name):
    run = alone(tmp_path, *PLAIN, ENDS, *words(name))
    moved, row, _ = step(run)
    assert moved.isfinite().all() and float(moved.norm()) > 0
    assert json.loads((run.folder / "metrics.jsonl").read_text()) == row
    assert run.state.updates == run.config.updates_per_step
    assert ("cispo_clip_ratio" in row) == (name == "cispo")


@pytest.mark.slow_but("reinforce_pp_baseline", "gspo")
@pytest.mark.parametrize("name", [n for n in CHOICES if "bnpo" not in n])
def test_an_update_does_not_depend_on_how_it_was_cut(tmp_path, name):
    moves = []
    for cut in ("train.micro_batch_tokens=null", "train.micro_batch_tokens=60"):
        folder = tmp_path / cut[-4:]
        folder.mkdir()
        moves.append(step(alone(folder, *PLAIN, ENDS, cut, *words(name)))[0])
    assert apart(moves[1], moves[0]) < 2e-4


@pytest.mark.slow_but("reinforce", "cispo")
@pytest.mark.parametrize("name", ["reinforce", "grpo", "dr_grpo", "remax", "sapo", "cispo"])
def test_the_training_forwards_log_probabilities_are_as_good_as_a_pass_of_their_own(tmp_path, name):
    moves = []
    for way in ("auto", "separate"):
        folder = tmp_path / way
        folder.mkdir()
        kind = [f"algorithm={name}", f"{A}beta=0.1", f"train.old_logp={way}"]
        run = alone(folder, *PLAIN, ENDS, *kind)
        assert (run.forward_plan.separate is None) == (way == "auto" and name != "reinforce")
        moves.append(step(run)[0])
    assert apart(moves[1], moves[0]) < CLOSE


def by_hand(run, batch, value, divide) -> torch.Tensor:
    """Gradient of -sum of value * logp / divide; value per completion or per token."""
    total = torch.zeros(())
    for p, row in enumerate(value):
        for k, a in enumerate(row):
            total = total - (torch.as_tensor(a) * row_logp(run.policy, batch, p, k)).sum() / divide
    return gradient(run, total)


def test_reinforce_takes_the_steps_mean_off(tmp_path):
    run = alone(tmp_path, *PLAIN, ENDS, "algorithm=reinforce", f"{A}beta=0")
    batch = sampled(run)
    score = batch.raw[0]
    expected = by_hand(run, batch, (score - score.mean()).float(), 16)
    assert apart(-step(run, batch)[0] / 0.01, expected) < CLOSE


def test_a_moving_average_is_of_earlier_steps_alone_and_is_kept_in_a_checkpoint(tmp_path):
    run = alone(tmp_path, *PLAIN, ENDS, "algorithm=reinforce", f"{A}beta=0", f"{A}baseline=ema")
    first = sampled(run)
    updated(run, first)
    assert torch.equal(first.advantage, first.raw[0])  # nothing is known before the first step
    update_algorithm_state(run, first)
    mean = float(first.raw[0].mean())
    assert run.state.memory == pytest.approx({"ema": 0.1 * mean, "ema_weight": 0.1})
    second = sampled(run)
    updated(run, second)
    torch.testing.assert_close(second.advantage, second.raw[0] - mean)
    update_algorithm_state(run, second)
    both = 0.09 * mean + 0.1 * float(second.raw[0].mean())
    assert run.state.memory == pytest.approx({"ema": both, "ema_weight": 0.19})
    assert run.state.dump()["memory"] == run.state.memory


def test_grpo_divides_by_the_groups_std_and_means_over_all_tokens(tmp_path):
    run = alone(tmp_path, *PLAIN, ENDS, "algorithm=grpo", f"{A}beta=0")
    batch = sampled(run)
    score = batch.raw[0]
    value = (score - score.mean(1, keepdim=True)) / (score.std(1, keepdim=True) + 1e-4)
    tokens = int(batch.rollout_values("length").sum())
    expected = by_hand(run, batch, value.float(), tokens)
    assert apart(-step(run, batch)[0] / 0.01, expected) < 2 * CLOSE


def returns_by_hand(run, batch, beta, gamma):
    """Each token's discounted rest of -beta * KL and the score on the last one."""
    found = []
    for p, group in enumerate(batch.groups):
        for k in range(len(group.rollouts)):
            with torch.no_grad():
                d = row_logp(run.policy, batch, p, k) - row_logp(run.reference, batch, p, k)
            earned = (-beta * d.double()).tolist()
            earned[-1] += float(batch.raw[0, p, k])
            for t in range(len(earned) - 2, -1, -1):
                earned[t] += gamma * earned[t + 1]
            found.append(torch.tensor(earned, dtype=torch.float64))
    return found


def test_reinforce_pp_whitens_the_returns_of_all_tokens_of_the_step(tmp_path):
    more = [f"{A}beta=0.3", f"{A}gamma=0.9"]
    run = alone(tmp_path, *PLAIN, ENDS, "algorithm=reinforce_pp", *more)
    batch = sampled(run)
    rest = returns_by_hand(run, batch, 0.3, 0.9)
    every = torch.cat(rest)
    white = [((g - every.mean()) / (every.var() + 1e-8).sqrt()).float() for g in rest]
    value = [white[4 * p : 4 * p + 4] for p in range(4)]
    expected = by_hand(run, batch, value, len(every))
    moved, row, batch = step(run, batch)
    assert apart(-moved / 0.01, expected) < 2 * CLOSE
    assert row["advantages/norm_skipped"] == 0
    torch.testing.assert_close(batch.groups[1].advantage[2], white[6], atol=1e-4, rtol=1e-4)


def test_reinforce_pp_minus_its_groups_mean_spreads_the_difference_over_the_tokens(tmp_path):
    run = alone(tmp_path, *PLAIN, ENDS, "algorithm=reinforce_pp_baseline", f"{A}beta=0")
    batch = sampled(run)
    score = batch.raw[0] - batch.raw[0].mean(1, keepdim=True)
    length = batch.rollout_values("length")
    every = torch.repeat_interleave(score.reshape(-1), length.reshape(-1))
    value = ((score - every.mean()) / (every.var() + 1e-8).sqrt()).float()
    expected = by_hand(run, batch, value, len(every))
    assert apart(-step(run, batch)[0] / 0.01, expected) < 2 * CLOSE


def test_a_step_of_equal_scores_is_not_whitened(tmp_path):
    def same(prompts, **_):
        return [1.0] * len(prompts)

    kind = ["algorithm=reinforce_pp", f"{A}beta=0.01"]
    run = alone(tmp_path, *PLAIN, ENDS, *kind, rewards={"same": same})
    _, row, batch = step(run)
    assert row["advantages/norm_skipped"] == 1
    most = max(float(a.abs().max()) for g in batch.groups for a in g.advantage)
    assert most < 1.5  # not the KL's few hundredths times a thousand


def test_masked_completions_have_no_part_in_the_whitening(tmp_path):
    kind = [PP, f"{A}mask_truncated_completions=true", f"{A}beta=0", "train.forward_all=true"]
    run = alone(tmp_path, *PLAIN, ENDS, *kind)
    batch = sampled(run)
    ended = batch.rollout_values("terminated")
    assert 0 < ended.sum() < 16
    every = torch.repeat_interleave(batch.raw[0][ended], batch.rollout_values("length")[ended])
    value = (batch.raw[0] - every.mean()) / (every.var() + 1e-8).sqrt() * ended
    expected = by_hand(run, batch, value.float(), len(every))
    assert apart(-step(run, batch)[0] / 0.01, expected) < CLOSE


def test_remax_compares_with_a_greedy_answer_that_is_not_trained_on(tmp_path):
    run = alone(tmp_path, *PLAIN, ENDS, "algorithm=remax", f"{A}beta=0", f"{A}num_generations=2")
    batch = sampled(run)
    others = [type(g)(g.prompt_offset, g.example, g.prompt, g.prompt_ids) for g in batch.groups]
    run.generator.generate(others, [[0]] * 4, greedy=True)
    scores = [sum((7 * i + 3) % 11 for i in ids) / 10 - len(ids) / 2
              for ids in (g.rollouts[0].completion_ids for g in others)]  # fmt: skip
    assert batch.greedy.tolist() == pytest.approx(scores)
    assert all(len(g.rollouts) == 2 for g in batch.groups)
    value = (batch.raw[0] - batch.greedy[:, None]).float()
    expected = by_hand(run, batch, value, 8)
    moved, row, _ = step(run, batch)
    assert apart(-moved / 0.01, expected) < CLOSE
    assert row["objective/greedy_scores"] == pytest.approx(sum(scores) / 4)


def test_a_prompt_whose_greedy_answer_has_no_score_is_left_out(tmp_path):
    def first_only(completion_ids, prompts, **_):
        if len(prompts) == 4:  # the greedy ones
            return [None, 1.0, 1.0, 1.0]
        return [float(len(ids)) for ids in completion_ids]

    kind = ["algorithm=remax", f"{A}beta=0", f"{A}num_generations=2"]
    run = alone(tmp_path, *PLAIN, ENDS, *kind, rewards={"first_only": first_only})
    _, _, batch = step(run)
    assert math.isnan(float(batch.greedy[0])) and not batch.usable[0].any()
    assert batch.usable[1:].all() and float(batch.advantage[0].abs().max()) == 0


def test_a_greedy_score_is_kept_in_a_checkpoint_inside_a_step(tmp_path):
    run = alone(tmp_path, *PLAIN, ENDS, "algorithm=remax")
    batch = sampled(run)
    tensors, plain = dump_step(StepProgress(batch))
    again = load_step(tensors, json.loads(json.dumps(plain)), run.prompts)
    assert torch.equal(again.batch.greedy, batch.greedy)


def test_an_entropy_bonus_adds_the_gradient_of_the_tokens_mean_entropy(tmp_path):
    plain, bonus = (
        alone(tmp_path, *PLAIN, ENDS, f"{A}entropy_coef={c}", f"name={name}")
        for name, c in (("plain", 0.0), ("bonus", 0.5))
    )
    batch = sampled(bonus)
    total, count = torch.zeros(()), 0
    for group in batch.groups:
        for rollout in group.rollouts:
            ids = torch.tensor([group.prompt_ids + rollout.completion_ids])
            with native_attention(bonus.policy.model):
                logits = bonus.policy.model(ids).logits[0, len(group.prompt_ids) - 1 : -1]
            logp = logits.float().log_softmax(-1)
            total = total - (logp.exp() * logp).sum()
            count += len(rollout.completion_ids)
    expected = gradient(bonus, 0.5 * total / count)
    moved = [step(run)[0] for run in (plain, bonus)]
    assert bonus.layout_choice.head == "model" and "entropy" in bonus.layout_choice.why
    assert apart((moved[1] - moved[0]) / 0.01, expected) < 1e-3


def test_an_entropy_bonus_is_of_rows_without_an_advantage_too(tmp_path):
    def same(prompts, **_):
        return [1.0] * len(prompts)

    words = [f"{A}entropy_coef=0.5", f"{A}beta=0"]
    run = alone(tmp_path, *PLAIN, ENDS, *words, rewards={"same": same})
    moved, row, _ = step(run)
    assert float(moved.norm()) > 0 and row["loss"] == pytest.approx(-0.5 * row["entropy"], rel=1e-4)


def test_token_advantages_are_kept_in_a_checkpoint_inside_a_step(tmp_path):
    run = alone(tmp_path, *PLAIN, ENDS, PP)
    batch = sampled(run)
    updated(run, batch)
    tensors, plain = dump_step(StepProgress(batch, prepared=True))
    again = load_step(tensors, json.loads(json.dumps(plain)), run.prompts)
    for group, other in zip(batch.groups, again.batch.groups, strict=True):
        for one, two in zip(group.advantage, other.advantage, strict=True):
            assert torch.equal(one, two)


@pytest.mark.slow_cases("reinforce_pp")
@pytest.mark.parametrize(
    "kind",
    ["reinforce_pp", *(pytest.param(k, marks=pytest.mark.slow) for k in ("remax", "grpo"))],
)
def test_a_run_stopped_inside_a_step_goes_on_with_the_same_advantages(tmp_path, kind):
    updates = [f"{A}num_iterations=2", f"{A}num_minibatches=2"] if kind != "remax" else []
    given = (
        f"algorithm={kind}",
        *updates,
        "train.learning_rate=0.01",
        ENDS,
        "data.eval_split=null",
    )
    given = (*given, "max_steps=3")
    looks: list[int] = []
    assert attempt(tmp_path / "whole", *given, looks=looks)
    draw, stops = random.Random(5), 0
    while not attempt(
        tmp_path / "cut", *given, stop_at=draw.randrange(20, len(looks) // 2) if stops < 5 else None
    ):
        stops += 1
    assert stops
    assert manifest.newest_checkpoint(tmp_path / "cut" / "smoke")[1] == []  # none was passed over
    assert not differing(left(tmp_path / "whole" / "smoke"), left(tmp_path / "cut" / "smoke"))


@pytest.mark.parametrize(
    ("given", "where", "got"),
    [
        (["algorithm=grpo", f"{A}dialect=trl"], "algorithm.dialect", "is a dialect of rloo"),
        (["algorithm=remax", f"{A}normalize_rewards=true"], "normalize_rewards", "greedy"),
        ([PP, f"{A}minus_group_mean=true"], "minus_group_mean", "kl_in=reward"),
        ([f"{PP}_baseline", f"{A}num_generations=1"], "num_generations", "siblings"),
        (["algorithm=remax", f"{A}baseline=loo"], "algorithm.baseline", "only remax"),
        (["algorithm=reinforce", f"{A}num_iterations=2"], "policy_loss", "off-policy"),
        (["algorithm=nothing.py"], "algorithm", "nothing.py"),
        ([PP, f"{A}normalize_advantages=true"], "normalize_advantages", "it would have no effect"),
        ([PP, f"{A}baseline=loo"], "algorithm.baseline", "mean over the step's tokens"),
        ([f"{A}name=nothing.py"], "nothing.py", "is not a file"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(tmp_path, given, where, got):
    with pytest.raises(ConfigError) as refused:
        make(tmp_path, *given)
    said = refused.value.render()
    assert where in said and got in said


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("1 / 0\n", "ZeroDivisionError"),
        ("x = 1\n", "is not an algorithm"),
        ("def\n", "SyntaxError"),
    ],
)
def test_a_file_that_is_no_algorithm_is_refused(tmp_path, text, got):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ConfigError) as refused:
        make(tmp_path, f"{A}name={tmp_path}/mine.py")
    assert got in refused.value.render() and "mine.py" in refused.value.render()


def test_a_key_set_beside_a_dialect_wins_and_is_told(tmp_path, sentence):
    run = alone(tmp_path, f"{A}dialect=openrlhf", f"{A}epsilon=0.3", f"{A}beta=0.02")
    settings = run.config.algorithm
    assert (settings.epsilon, settings.beta, settings.kl_credit) == (0.3, 0.02, "to_go")
    got = [w for w in run.algorithm.warnings(run.config) if "dialect" in w]
    sentence("\n".join(sorted(got)))


def test_a_recipe_cannot_name_a_dialect_without_its_keys(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("# Mine.\ndefaults: [smoke]\nalgorithm: {dialect: trl}\n")
    with pytest.raises(ConfigError) as refused:
        compose_config([f"+recipe={recipe}"])
    assert "override /algorithm/dialect: trl" in refused.value.render()


def test_rows_whose_tokens_fell_are_left_out_of_the_policy_term(tmp_path):
    kind = [f"{A}off_policy_threshold=0.05", f"{A}beta=0"]
    run = alone(tmp_path, *PLAIN, ENDS, *kind)
    run.generator.tolerance = 1.0
    batch = sampled(run)
    for i, rollout in enumerate(r for g in batch.groups for r in g.rollouts):
        far = 0.1 if i % 2 else 0.0  # the sampler thought more of these
        rollout.behaviour_logp = [x + far for x in rollout.behaviour_logp]
    score = batch.raw[0]
    value = (4 / 3 * (score - score.mean(1, keepdim=True))).float()
    odd = torch.arange(16).view(4, 4) % 2 == 1
    value = value.masked_fill(odd & (value < 0), 0.0)
    before = flat(run)
    expected = by_hand(run, batch, value, 16)
    assert apart(-step(run, batch)[0] / 0.01, expected) < CLOSE
    assert not torch.equal(before, flat(run))
