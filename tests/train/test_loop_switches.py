"""Every switch of the algorithm inside a whole step: what enters the loss, and what does not."""

import json
import math

import pytest
import torch
from loop_cases import (
    ENDS,
    PLAIN,
    apart,
    flat,
    gradient,
    leave_one_out,
    make,
    policy_gradient,
    row_logp,
    sampled,
    step,
    table,
)

from rloo_cli.train import loop
from rloo_cli.utils.errors import NumbersError

pytestmark = pytest.mark.wide

CLOSE = 5e-5  # an update read off weights of 1, twice rounded
A = "algorithm."
SWITCHES = {
    "k2 in the loss": ["kl_in=loss", "kl_estimator=k2"],
    "k3 in the loss": ["kl_in=loss", "kl_estimator=k3"],
    "ratio-weighted k3": ["kl_in=loss", "kl_estimator=k3", "kl_ratio_weighted=true"],
    "KL only logged": ["kl_in=none"],
    "KL to go": ["kl_credit=to_go", "kl_in_baseline=false", "ratio_level=token"],
    "KL outside the baseline": ["kl_in_baseline=false"],
    "k3 in the reward": ["kl_estimator=k3"],
    "reinforce": ["policy_loss=reinforce"],
    "reinforce, to go": ["policy_loss=reinforce", "kl_credit=to_go", "kl_in_baseline=false"],
    "stale reinforce": ["policy_loss=reinforce", "num_iterations=2", "allow_stale=true"],
    "token ratio": ["ratio_level=token", "num_iterations=2"],
    "geometric ratio": ["ratio_level=geometric", "num_iterations=2"],
    "delta": ["delta=3.0", "num_iterations=2"],
    "sequence_mean": ["loss_agg=sequence_mean"],
    "token_mean": ["loss_agg=token_mean"],
    "constant": ["loss_agg=constant"],
    "token_mean_local": ["loss_agg=token_mean_local"],
    "valid rows": ["loss_denominator=valid"],
    "masked": ["mask_truncated_completions=true"],
    "dropped": ["mask_truncated_completions=drop"],
    "EOS subtract": ["missing_eos_penalty=1.0"],
    "EOS replace": ["missing_eos_penalty={mode:replace,value:-1.0}"],
    "overlong": ["overlong_penalty={max_length:16,cache:8,weight:1.0}"],
    "clipped rewards": ["reward_clip_range=[-1.0,1.0]"],
    "normalized rewards": ["normalize_rewards=true"],
    "normalized advantages": ["normalize_advantages=true"],
    "GDPO": ["multi_reward=normalize_then_sum"],
    "group std": ["advantage_scale=group"],
    "loo std": ["advantage_scale=loo_std"],
    "group mean": ["baseline=group_mean"],
    "no baseline": ["baseline=none"],
    "drop flat groups": ["zero_std_groups=drop"],
    "resample": ["zero_std_groups=resample"],
    "truncate": ["correction.mode=truncate"],
    "truncate tokens": ["correction.mode=truncate", "correction.level=token"],
    "mask": ["correction.mode=mask", "correction.level=geometric"],
    "filter": ["correction.mode=filter", "correction.floor=0.5"],
    "bypass": ["correction.mode=bypass"],
}


@pytest.mark.slow_but(
    "k2 in the loss",
    "KL only logged",
    "k3 in the reward",
    "stale reinforce",
    "delta",
    "constant",
    "masked",
    "overlong",
    "normalized advantages",
    "loo std",
    "drop flat groups",
    "truncate tokens",
    "bypass",
)
@pytest.mark.parametrize("name", SWITCHES)
def test_every_switch_makes_a_step_with_finite_numbers(tmp_path, name):
    run = make(tmp_path, *PLAIN, ENDS, *(A + word for word in SWITCHES[name]))
    moved, row, _ = step(run)
    assert moved.isfinite().all() and float(moved.norm()) > 0
    written = (run.folder / "metrics.jsonl").read_text()
    assert json.loads(written) == row and "NaN" not in written
    assert {"loss", "grad_norm", "reward", "kl", "entropy", "ratio/max"} <= row.keys()
    assert run.state.updates == run.config.updates_per_step


@pytest.mark.slow_cases("k3-1.0")
@pytest.mark.parametrize(("estimator", "at"), [("k2", 1.0), ("k3", 1.0), ("k3", 0.7)])
def test_kl_in_the_loss_is_summed_per_row_with_gradient_and_leaves_the_advantages(
    tmp_path, estimator, at
):
    words = [f"{A}kl_in=loss", f"{A}kl_estimator={estimator}", f"{A}beta=0.3"]
    words += [f"generation.temperature={at}", f"{A}kl_temperature=one"]
    run = make(tmp_path, *PLAIN, ENDS, *words)
    batch = sampled(run)
    value = leave_one_out(batch.raw[0].tolist())
    total = torch.zeros(())
    for p in range(4):
        for k in range(4):
            now = row_logp(run.policy, batch, p, k, at)
            d = row_logp(run.policy, batch, p, k) - row_logp(run.reference, batch, p, k)
            kl = d.square() / 2 if estimator == "k2" else (-d).exp() - 1 + d
            total = total - value[p][k] * now.sum() + 0.3 * kl.sum()
    expected = gradient(run, total / 16)
    moved, row, _ = step(run, batch)
    assert apart(-moved / 0.01, expected) < CLOSE
    assert row["kl_loss"] == pytest.approx(0.3 * row["objective/kl"], rel=1e-4)


def test_kl_to_go_gives_each_token_what_is_left_of_its_completion(tmp_path):
    words = ["kl_credit=to_go", "kl_in_baseline=false", "policy_loss=reinforce", "beta=0.3"]
    run = make(tmp_path, *PLAIN, ENDS, *(A + word for word in words))
    batch = sampled(run)
    value = leave_one_out(batch.raw[0].tolist())
    total = torch.zeros(())
    for p in range(4):
        for k in range(4):
            now = row_logp(run.policy, batch, p, k)
            d = (now - row_logp(run.reference, batch, p, k)).detach()
            to_go = d.flip(0).cumsum(0).flip(0)
            total = total - ((value[p][k] - 0.3 * to_go) * now).sum()
    expected = gradient(run, total / 16)
    assert apart(-step(run, batch)[0] / 0.01, expected) < CLOSE


@pytest.mark.parametrize("how", ["true", "drop"])
def test_truncated_completions_leave_the_loss_and_with_drop_the_baseline_too(tmp_path, how):
    words = [f"{A}mask_truncated_completions={how}", f"{A}beta=0.3"]
    run = make(tmp_path, *PLAIN, ENDS, *words)
    batch = sampled(run)
    ended = batch.rollout_values("terminated")
    assert 0 < ended.sum() < 16 and torch.equal(batch.masked, ~ended)
    now, ref = table(run.policy, batch), table(run.reference, batch)
    reward: list[list[float | None]] = []
    for p in range(4):
        kl = [float((n - r).sum()) for n, r in zip(now[p], ref[p], strict=True)]
        kept = [float(s) - 0.3 * x for s, x in zip(batch.raw[0, p], kl, strict=True)]
        out = [None if how == "drop" else float(s) for s in batch.raw[0, p]]  # masked: no KL
        reward.append([kept[k] if ended[p, k] else out[k] for k in range(4)])
    value = leave_one_out(reward)
    value = [[a if ended[p, k] else 0.0 for k, a in enumerate(row)] for p, row in enumerate(value)]
    expected = policy_gradient(run, batch, value)
    moved, row, _ = step(run, batch)
    assert apart(-moved / 0.01, expected) < CLOSE
    used = [n - r for p in range(4) for n, r in zip(now[p], ref[p], strict=True)]
    used = [d for d, e in zip(used, ended.flatten(), strict=True) if e]
    assert row["kl"] == pytest.approx(float(torch.cat(used).mean()), abs=1e-5)


def test_one_completion_that_ended_is_learnt_from_though_its_siblings_are_masked(tmp_path):
    run = make(tmp_path, *PLAIN, ENDS, f"{A}mask_truncated_completions=true", f"{A}beta=0")
    batch = sampled(run)
    for group in batch.groups:
        for k, rollout in enumerate(group.rollouts):
            rollout.terminated = k == 0
    batch.masked = ~batch.rollout_values("terminated")
    value = [[row[0], 0, 0, 0] for row in leave_one_out(batch.raw[0].tolist())]
    expected = policy_gradient(run, batch, value)
    assert apart(-step(run, batch)[0] / 0.01, expected) < CLOSE


def test_rows_without_a_score_leave_baseline_and_gradient(tmp_path):
    def sometimes(completion_ids, **_):
        return [None if i % 3 == 0 or i < 3 else i * i / 9 for i in range(len(completion_ids))]

    run = make(tmp_path, *PLAIN, ENDS, f"{A}beta=0", rewards={"sometimes": sometimes})
    batch = sampled(run)
    reward = [[None if math.isnan(s) else s for s in row] for row in batch.raw[0].tolist()]
    assert [sum(r is not None for r in row) for row in reward] == [0, 3, 3, 2]
    expected = policy_gradient(run, batch, leave_one_out(reward))
    moved, row, _ = step(run, batch)
    assert apart(-moved / 0.01, expected) < CLOSE
    assert row["groups/unscorable"] == 1 and row["reward/valid_frac"] == 0.5


def test_sampler_correction_multiplies_each_completions_term(tmp_path):
    words = [f"{A}correction.mode=truncate", f"{A}correction.cap=1.5", f"{A}beta=0"]
    run = make(tmp_path, *PLAIN, ENDS, *words)
    run.generator.tolerance = 1.0  # a sampler that is far off, on purpose
    batch = sampled(run)
    for i, rollout in enumerate(r for g in batch.groups for r in g.rollouts):
        shift = 0.1 * (i % 5 - 2)
        rollout.behaviour_logp = [x + shift for x in rollout.behaviour_logp]
    value, weights = leave_one_out(batch.raw[0].tolist()), []
    for p, group in enumerate(batch.groups):
        for k, rollout in enumerate(group.rollouts):
            delta = row_logp(run.policy, batch, p, k).detach().sum() - sum(rollout.behaviour_logp)
            weights.append(min(math.exp(float(delta)), 1.5))
            value[p][k] *= weights[-1]
    expected = policy_gradient(run, batch, value)
    moved, row, _ = step(run, batch)
    assert apart(-moved / 0.01, expected) < CLOSE
    name = "sampling/importance_sampling_ratio"
    assert row[f"{name}/mean"] == pytest.approx(sum(weights) / 16, rel=1e-4)
    assert row[f"{name}/max"] == 1.5 and row[f"{name}/min"] == pytest.approx(min(weights), rel=1e-4)
    assert row["sampling/capped_frac"] == weights.count(1.5) / 16
    assert row["sampling/logp_diff_max"] == pytest.approx(0.2, abs=1e-4)


def flat_on_names(prompts, completion_ids, **_):
    """The same score for every completion of a prompt that asks for names."""
    return [
        0.5 if prompt.startswith("Name") else sum(ids) % 97 / 10
        for prompt, ids in zip(prompts, completion_ids, strict=True)
    ]


def flat_prompts(batch):
    return [g.prompt.startswith("Name") for g in batch.groups]


@pytest.mark.parametrize("denominator", ["all", "valid"])
def test_dropped_groups_have_no_gradient_and_still_count(tmp_path, denominator):
    words = [f"{A}zero_std_groups=drop", f"{A}beta=0.3", f"{A}loss_denominator={denominator}"]
    run = make(
        tmp_path, *PLAIN, ENDS, *words, "data.shuffle=false", rewards={"flat": flat_on_names}
    )
    batch = sampled(run)
    names = flat_prompts(batch)
    assert sum(names) == 1 and batch.active == [i for i in range(4) if not names[i]]
    now, ref = table(run.policy, batch), table(run.reference, batch)
    reward = [
        [None if names[p] else float(batch.raw[0, p, k] - 0.3 * (now[p][k] - ref[p][k]).sum())
         for k in range(4)]
        for p in range(4)
    ]  # fmt: skip
    expected = policy_gradient(run, batch, leave_one_out(reward))
    moved, row, _ = step(run, batch)
    assert apart(-moved / 0.01, expected) < CLOSE
    assert row["groups/dropped"] == sum(names)
    assert row["frac_reward_zero_std"] == sum(names) / 4
    assert row["objective/rlhf_reward"] == pytest.approx(
        row["objective/scores"] + row["objective/non_score_reward"]
    )


def test_resampling_draws_on_until_every_group_differs_and_the_place_moves_along(tmp_path):
    words = [f"{A}zero_std_groups=resample", f"{A}max_resample=20", "max_steps=2"]
    run = make(tmp_path, ENDS, *words, rewards={"flat": flat_on_names})
    seen = []
    for _ in range(2):
        batch = sampled(run)
        assert not any(flat_prompts(batch)) and batch.active == [0, 1, 2, 3]
        draws = [g.prompt_offset for g in batch.groups]
        assert draws == sorted(set(draws)) and run.state.place <= draws[0]
        assert draws[-1] < run.state.place + batch.draws
        assert batch.draws == 4 + batch.facts["groups/resampled"]
        seeds = [r.seed for g in batch.groups for r in g.rollouts]
        assert len(set(seeds)) == 16
        seen += [draws, batch.draws]
        before = run.state.place
        step(run, batch)
        assert run.state.place == before + batch.draws
    assert sum(seen[1::2]) > 8
    assert run.state.episodes == 32


def test_scores_normalised_over_a_step_are_so_over_all_rounds_and_reward_is_their_plain_sum(
    tmp_path,
):
    words = [f"{A}zero_std_groups=resample", f"{A}max_resample=20", f"{A}normalize_advantages=true"]
    words += [f"{A}multi_reward=normalize_then_sum"]
    run = make(tmp_path, ENDS, *words, rewards={"flat": flat_on_names})
    batch = sampled(run)
    assert batch.facts["groups/resampled"] > 0 and batch.scorable.all()
    (raw,) = batch.raw
    centred = (raw - raw.mean(1, keepdim=True)) / (raw.std(1, keepdim=True) + 1e-4)
    assert torch.allclose(batch.score, centred / (centred.std() + 1e-4), atol=1e-12)
    _, row, _ = step(run, batch)
    plain = float(raw.mean())
    assert abs(plain) > 0.1 and row["reward"] == pytest.approx(plain)
    assert row["objective/scores"] == pytest.approx(plain)
    assert row["reward_std_batch"] == pytest.approx(float(raw.std()))


def test_resampling_is_bounded_and_what_is_still_flat_is_dropped(tmp_path):
    def rarely(prompts, completion_ids, **_):
        return [
            float(sum(ids)) if "11" in prompt else 1.0
            for prompt, ids in zip(prompts, completion_ids, strict=True)
        ]

    words = [f"{A}zero_std_groups=resample", f"{A}max_resample=15"]
    run = make(tmp_path, *words, "data.shuffle=false", rewards={"rarely": rarely})
    batch = sampled(run)
    assert batch.draws == 4 + 15 * 3 and len(batch.groups) == 4
    assert len(batch.active) == 1 and "11" in batch.groups[batch.active[0]].prompt
    _, row, _ = step(run, batch)
    assert row["groups/resampled"] == 45 and row["groups/dropped"] == 3


def test_resampling_that_finds_nothing_to_learn_from_stops_the_run(tmp_path):
    def constant(completion_ids, prompts, **_):
        return [float(sum(map(ord, p)) % 2) for p in prompts]

    words = [f"{A}zero_std_groups=resample", f"{A}max_resample=2"]
    run = make(tmp_path, *words, rewards={"constant": constant})
    before = flat(run)
    with pytest.raises(NumbersError) as caught:
        loop.run_training_loop(run)
    assert caught.value.code == 7 and "12 sampled" in str(caught.value)
    assert "score 1, the highest" in str(caught.value) and "0, the lowest" in str(caught.value)
    assert torch.equal(flat(run), before) and run.state.step == 0
