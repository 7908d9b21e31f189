"""Every metric of docs/metrics.md on batches whose numbers can be worked out on paper."""

import json
import math
from types import SimpleNamespace

import algorithm_cases as cases
import pytest
import torch
from hook_calls import rloo
from loop_cases import ENDS, make, sampled, step

from rloo_cli.data.batch import Batch, Group, Rollout
from rloo_cli.reporting import step_metrics
from rloo_cli.reporting.update_metrics import UpdateMetrics
from rloo_cli.utils.timers import StepTimer

NAN = float("nan")
LENGTHS = [[2, 4, 4, 6], [3, 3, 3, 3], [1, 8, 8, 8]]
ENDED = [[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
FIRST = [[1, 2, 3, 4], [5, 5, 5, 5], [NAN, NAN, 1, NAN]]
SECOND = [[0, 2, 0, 2], [NAN] * 4, [NAN] * 4]
SCORE = [[1, 3, 3, 5], [5, 5, 5, 5], [0, 0, 1, 0]]  # FIRST + SECOND / 2
SHAPED = [[1, 3, 3, 4], [5, 5, 5, 5], [0, 0, 0, 0]]  # truncated: -1
KL = [[1, 2, 3, 4], [2, 2, 2, 0], [9, 9, 5, 9]]


def numbers(rows):
    return torch.tensor(rows, dtype=torch.float64)


def batch(**changes):
    """Three groups of four: one whose scores differ, one flat, one with a single score."""
    groups = [
        Group(p, {}, "ab", [5, 6], [
            Rollout([p if n == 3 else 10 * p + k] * n, "x", "stop", bool(e), k, 0)
            for k, (n, e) in enumerate(zip(LENGTHS[p], ENDED[p], strict=True))
        ])
        for p in range(3)
    ]  # fmt: skip
    raw = numbers([FIRST, SECOND])
    fields = {
        "step": 0, "groups": groups, "names": ["first", "second"], "raw": raw,
        "score": numbers(SCORE), "shaped": numbers(SHAPED), "scorable": ~raw.isnan().all(0),
        "masked": torch.zeros(3, 4, dtype=torch.bool), "active": [0, 1, 2], "draws": 3,
        "facts": {"groups/dropped": 0.0, "reward/first/time": 0.5},
    }  # fmt: skip
    return Batch(**fields | changes)


def near(expected):
    return pytest.approx(expected, rel=1e-6)


def test_lengths_and_ends_of_completions():
    row = step_metrics.rollout_metrics(batch())
    assert row["completions/mean_length"] == near(53 / 12)
    assert (row["completions/min_length"], row["completions/max_length"]) == (1, 8)
    assert row["completions/mean_terminated_length"] == near(23 / 8)
    assert row["completions/min_terminated_length"] == 1
    assert row["completions/max_terminated_length"] == 4
    assert row["completions/clipped_ratio"] == near(4 / 12)
    assert row["val/num_eos_tokens"] == 8
    assert row["groups/duplicates"] == 3  # the second group says one thing four times
    assert row["completions/unique_ratio"] == near(9 / 12)


def test_the_most_common_completion_counts_where_prompts_differ():
    made = batch()
    assert "completions/most_common_frac" not in step_metrics.rollout_metrics(made)
    made.groups[0].prompt_ids = [7]
    row = step_metrics.rollout_metrics(made)
    assert row["completions/most_common_frac"] == near(4 / 12)


def test_scores_and_their_spread():
    row = step_metrics.rollout_metrics(batch())
    assert row["reward"] == near(33 / 9)
    assert row["reward_std"] == near(math.sqrt(8 / 3) / 2)  # of the two groups with n >= 2
    assert row["reward_std_batch"] == near(float(numbers([1, 3, 3, 5, 5, 5, 5, 5, 1]).std()))
    assert row["frac_reward_zero_std"] == 0.5
    assert row["groups/unscorable"] == 1 and row["reward/valid_frac"] == near(9 / 12)
    assert row["reward/first/mean"] == near(31 / 9) and row["reward/second/mean"] == 1
    assert row["reward/second/std"] == near(math.sqrt(4 / 3))
    assert row["reward/first/none_frac"] == near(3 / 12)
    assert row["reward/second/none_frac"] == near(8 / 12)
    assert row["reward/first/time"] == 0.5 and row["groups/dropped"] == 0
    assert step_metrics.rollout_metrics(batch(), std_over_step=True)["reward_std"] == near(
        row["reward_std_batch"]
    )


def test_zero_spread_is_of_scores_and_not_of_rewards_after_kl():
    differing = numbers([[5.0, 5.1, 5.2, 5.3]] * 3)
    row = step_metrics.rollout_metrics(batch(reward=differing, advantage=differing))
    assert row["frac_reward_zero_std"] == 0.5


def test_zero_spread_is_of_scores_after_penalties_as_advantages_are():
    penalized = numbers([[1, 3, 3, 5], [5, 4, 5, 5], [0, 0, 1, 0]])
    assert step_metrics.rollout_metrics(batch(shaped=penalized))["frac_reward_zero_std"] == 0
    alike = numbers([[1, 1, 1, 1], [5, 5, 5, 5], [0, 0, 1, 0]])
    assert step_metrics.rollout_metrics(batch(shaped=alike))["frac_reward_zero_std"] == 1
    row = step_metrics.rollout_metrics(batch(), by_group=False)  # as with baseline=batch_mean
    assert "frac_reward_zero_std" not in row


def settled(beta=0.1, **changes):
    found = batch(**changes)
    value = rloo.advantages(found.shaped, numbers(KL), found.scorable, cases.config(beta=beta))
    found.add_kl([0, 1, 2], numbers(KL))
    found.set_advantages([0, 1, 2], value)
    return found


def test_reward_after_kl_is_score_minus_beta_kl_over_rows_that_have_an_advantage():
    found = settled()
    row = step_metrics.advantage_metrics(found, 0.1)
    assert row["objective/scores"] == near((11 + 20) / 8)  # the third's lone row has none
    assert row["objective/kl"] == near((10 + 6) / 8)
    assert row["objective/non_score_reward"] == near(-0.1 * 16 / 8)
    assert row["objective/rlhf_reward"] == near(31 / 8 - 1.6 / 8)
    assert row["objective/rlhf_reward"] == near(float(found.reward[found.usable].mean()))


def test_reward_after_kl_is_of_the_groups_that_were_trained_on():
    row = step_metrics.advantage_metrics(settled(active=[0]), 0.1)
    assert row["objective/scores"] == near(11 / 4) and row["objective/kl"] == near(2.5)
    assert row["objective/rlhf_reward"] == near(11 / 4 - 0.25)


def test_masked_completions_are_in_no_mean_of_what_was_trained_on():
    masked = torch.zeros(3, 4, dtype=torch.bool)
    masked[0, 3] = True
    row = step_metrics.advantage_metrics(settled(masked=masked), 0.1)
    assert row["objective/scores"] == near((7 + 20) / 7)
    assert row["objective/kl"] == near((6 + 6) / 7)
    every = step_metrics.advantage_metrics(settled(masked=masked), 0.1, every_kl=True)
    assert every["objective/kl"] == near((6 + 6 + 32) / 11)  # as with a KL in the loss
    assert every["objective/scores"] == row["objective/scores"]


def test_what_an_environment_said_counts_as_tokens_that_are_read():
    found = batch()
    found.groups[0].rollouts[3].mask = [1, 0, 0, 1, 1, 1]
    assert found.groups[0].rollouts[3].length == 4
    assert found.num_tokens == 12 * 2 + 53


def test_advantages_are_measured_over_the_rows_that_have_one():
    found = settled(beta=0.0)
    row = step_metrics.advantage_metrics(found, 0.0)
    value = [-7 / 3, 1 / 3, 1 / 3, 5 / 3, 0, 0, 0, 0]
    assert row["advantages/mean"] == pytest.approx(0, abs=1e-12)
    assert row["advantages/std"] == near(float(numbers(value).std()))
    assert row["advantages/abs_max"] == near(7 / 3)
    assert row["advantages/zero_frac"] == 0.5 and row["advantages/norm_skipped"] == 0


def test_what_has_no_data_is_absent():
    silent = numbers([[[NAN] * 4] * 3] * 2)
    zeros = torch.zeros(3, 4, dtype=torch.bool)
    found = batch(raw=silent, scorable=zeros)
    for group in found.groups:
        for rollout in group.rollouts:
            rollout.terminated = False
    row = step_metrics.rollout_metrics(found) | step_metrics.advantage_metrics(found, 0.1)
    row |= UpdateMetrics().to_metrics()
    for name in ("reward", "reward_std", "frac_reward_zero_std", "reward/first/mean", "kl", "loss",
                 "completions/mean_terminated_length", "objective/scores", "advantages/mean",
                 "entropy", "clip_ratio/low_mean", "sampling/ess", "reward_std_batch"):  # fmt: skip
        assert name not in row, name
    assert row["reward/first/none_frac"] == 1 and row["reward/valid_frac"] == 0
    assert all(math.isfinite(value) for value in row.values())


def updated(ratios, value, lengths=None, mask=None, entropy=None, behaviour=None, **keys):
    """The row of one update of rows with these ratios, each at a row's first token."""
    lengths = lengths or [1] * len(ratios)
    m = cases.micro(lengths, mask, behaviour)
    old = -torch.ones(sum(lengths), dtype=torch.float64)
    logp = old.clone()
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    logp[starts] += torch.tensor(ratios, dtype=torch.float64).log()
    m.old_logp, config = old, cases.config(beta=0.0, **keys)
    found = UpdateMetrics()
    found.add_old_logprobs(m, None)
    loss = rloo.loss(logp, old, None, m, numbers(value), config, float(len(ratios)))
    found.add_micro_batch(loss, m, entropy)
    found.add_update(SimpleNamespace(max_grad_norm=1.0, learning_rate=0.5), float(loss.total), 3.0)
    return found.to_metrics()


def test_clipping_counts_with_the_sign_of_the_advantage():
    row = updated([0.5, 1.5, 0.5, 1.5, 0.5], [-1, -1, 1, 1, -1])
    assert row["clip_ratio/low_mean"] == 0.4 and row["clip_ratio/high_mean"] == 0.2
    assert row["clip_ratio/region_mean"] == row["policy/clipfrac_avg"] == near(0.6)
    assert row["clip_ratio/low_min"] == 0 and row["clip_ratio/high_max"] == 1
    assert row["val/ratio"] == near(0.9) and row["val/ratio_var"] == near(0.24)
    assert (row["ratio/min"], row["ratio/max"]) == near((0.5, 1.5))
    logs = [math.log(r) ** 2 for r in (0.5, 1.5, 0.5, 1.5, 0.5)]
    assert row["policy/approxkl_avg"] == near(sum(logs) / 10)
    assert updated([4.0, 1.0], [-1, -1], delta=3.0)["delta_ratio"] == 0.5


def test_clipping_of_tokens_is_a_share_of_tokens_and_its_extremes_are_of_rows():
    row = updated([1.5, 1.5], [1, 1], [2, 4], ratio_level="token")
    assert row["clip_ratio/high_mean"] == near(2 / 6) and row["clip_ratio/high_max"] == 0.5


def test_masked_rows_are_in_no_ratio_entropy_or_extreme():
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0])
    entropy = torch.tensor([1.0, 100.0, 2.0, 6.0])
    behaviour = torch.tensor([-1.0, -9.0, -1.0, -1.0])
    row = updated([0.5, 5.0, 0.5], [-1, 1, -1], [1, 1, 2], mask, entropy, behaviour)
    assert row["entropy"] == row["policy/entropy_avg"] == 3
    assert row["ratio/max"] == near(0.5) and row["clip_ratio/low_mean"] == 1
    assert row["clip_ratio/low_min"] == 1 and row["clip_ratio/high_max"] == 0
    assert row["objective/entropy"] == 1.5  # three tokens of -1 nat in two completions
    assert row["sampling/logp_diff_max"] == 0


def test_the_gap_to_the_sampler_is_known_by_the_position_in_the_completion():
    m = cases.micro([70, 3])
    m.old_logp = torch.zeros(73, dtype=torch.float64)
    m.behaviour_logp = torch.tensor([0.1] * 64 + [0.5] * 6 + [0.3, NAN, 0.3], dtype=torch.float64)
    found = UpdateMetrics()
    found.add_old_logprobs(m, None)
    row = found.to_metrics()
    assert row["sampling/logp_diff_from0"] == near(((64 * 0.01 + 2 * 0.09) / 66) ** 0.5)
    assert row["sampling/logp_diff_from64"] == near(0.5)
    assert "sampling/logp_diff_from512" not in row and "sampling/logp_diff_from4096" not in row


def test_numbers_of_an_update_are_means_over_updates_before_clipping():
    found = UpdateMetrics()
    m = cases.micro([1])
    m.old_logp = torch.zeros(1, dtype=torch.float64)
    for value, norm in ((1.0, 0.5), (3.0, 2.5)):
        loss = rloo.loss(m.old_logp, m.old_logp, None, m, numbers([value]), cases.config(), 1.0)
        found.add_micro_batch(loss, m, None)
        found.add_update(SimpleNamespace(max_grad_norm=1.0, learning_rate=0.5), -value, norm)
    row = found.to_metrics()
    assert row["loss"] == row["policy_loss"] == row["loss/policy_avg"] == -2
    assert row["grad_norm"] == 1.5 and row["grad_clip_fraction"] == 0.5
    assert row["learning_rate"] == row["lr"] == 0.5 and row["kl_loss"] == 0
    found.add_update(SimpleNamespace(max_grad_norm=None, learning_rate=0.5), 0.0, 9.0)
    assert found.to_metrics()["grad_clip_fraction"] == near(1 / 3)


def test_sampler_differences_leave_out_what_the_sampler_did_not_say():
    behaviour = torch.tensor([-1.2, NAN, -0.4, -1.0])
    row = updated([1.0, 1.0], [1, 1], [2, 2], behaviour=behaviour)
    gaps = [0.2, 0.6, 0.0]
    assert row["sampling/logp_diff_mean"] == near(0.8 / 3)
    assert row["sampling/logp_diff_rms"] == near(math.sqrt(sum(g * g for g in gaps) / 3))
    assert row["sampling/logp_diff_max"] == near(0.6) and row["sampling/missing_frac"] == 0.25
    assert row["sampling/kl"] == near((-0.2 + 0.6) / 2)


def test_correction_weights_are_measured_after_and_their_worth_before_the_mode():
    rule = {"mode": "truncate", "level": "sequence", "cap": 2.0, "floor": 0.0}
    rule |= {"geometric_range": None}
    behaviour = -1 - torch.tensor([3.0, 1.0, 0.5]).log()
    row = updated([1.0] * 3, [1] * 3, behaviour=behaviour, correction=rule)
    name = "sampling/importance_sampling_ratio"
    assert (row[f"{name}/min"], row[f"{name}/max"]) == near((0.5, 2.0))
    assert row[f"{name}/mean"] == near(3.5 / 3)
    assert row["sampling/ess"] == near(4.5**2 / (3 * 10.25))
    assert row["sampling/capped_frac"] == near(1 / 3) and row["sampling/masked_frac"] == 0
    assert "cispo_clip_ratio" not in row
    row = updated([1.0] * 3, [1] * 3, behaviour=behaviour, correction=rule | {"mode": "mask"})
    assert row["sampling/masked_frac"] == near(1 / 3) and row["sampling/capped_frac"] == 0


def test_phases_of_a_step_and_idle_sum_to_its_time():
    clock = StepTimer()
    with clock.phase("update"), clock.phase("reference"):
        sum(range(1000))
    row = clock.lap()
    assert sum(v for k, v in row.items() if k.startswith("time/")) == near(row["step_time"])
    assert min(row.values()) >= 0 and "time/reference" in row
    assert "time/update" not in clock.lap()


APPLY = """
num_tokens step_time completions/mean_length completions/clipped_ratio reward reward_std
reward/digits/mean reward/digits/std reward/digits/none_frac reward/digits/error_rate
reward/digits/time reward/valid_frac reward_std_batch frac_reward_zero_std entropy kl
clip_ratio/low_mean clip_ratio/high_mean clip_ratio/region_mean clip_ratio/low_min
clip_ratio/high_max delta_ratio advantages/mean advantages/std advantages/abs_max
advantages/zero_frac advantages/norm_skipped loss policy_loss kl_loss learning_rate lr grad_norm
grad_clip_fraction objective/scores objective/kl objective/non_score_reward objective/rlhf_reward
objective/entropy policy/approxkl_avg policy/clipfrac_avg loss/policy_avg val/ratio val/ratio_var
ratio/min ratio/max val/num_eos_tokens eps episode epoch sampling/logp_diff_mean
sampling/logp_diff_rms sampling/logp_diff_max sampling/logp_diff_from0 sampling/missing_frac
sampling/kl staleness/mean staleness/max groups/unscorable groups/dropped groups/resampled
groups/duplicates
completions/unique_ratio data/dropped_long data/truncated time/generation time/reward
time/reference time/update time/optimizer time/data time/idle perf/completions_per_s
perf/tokens_per_s perf/padding_frac perf/rollout_wait_frac
"""


def test_a_real_step_reports_every_metric_that_applies_in_strict_json(tmp_path):
    run = make(tmp_path, ENDS)
    _, row, found = step(run)
    assert not [name for name in APPLY.split() if name not in row]
    written = json.loads((run.folder / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert written == row
    tokens = sum(len(g.prompt_ids) + r.length for g in found.groups for r in g.rollouts)
    assert row["num_tokens"] == tokens and row["episode"] == 16 and row["epoch"] == 4 / 64
    assert row["kl"] == near(row["objective/kl"] * 16 / int(found.rollout_values("length").sum()))
    assert row["staleness/max"] == 0
    assert sum(v for k, v in row.items() if k.startswith("time/")) == near(row["step_time"])
    assert row["perf/tokens_per_s"] == near(tokens / row["step_time"])


def test_without_beta_there_is_no_kl_and_staleness_counts_updates(tmp_path):
    run = make(tmp_path, ENDS, "algorithm.beta=0")
    step(run)  # the generator is not told of this update
    _, row, _ = step(run, sampled(run))
    assert "kl" not in row and "objective/kl" not in row and "time/reference" not in row
    assert row["objective/rlhf_reward"] == row["objective/scores"]
    assert row["staleness/mean"] == row["staleness/max"] == 1


@pytest.mark.parametrize("where", ["loss", "none", "reward"])
def test_the_number_that_must_rise_is_one_sum_wherever_the_kl_goes(tmp_path, where):
    words = [f"algorithm.kl_in={where}", "algorithm.kl_estimator=k3", "algorithm.beta=0.5"]
    _, row, _ = step(make(tmp_path, ENDS, *words))
    beta = 0.0 if where == "none" else 0.5
    assert row["objective/kl"] > 0
    assert row["objective/non_score_reward"] == near(-beta * row["objective/kl"])
    total = row["objective/scores"] + row["objective/non_score_reward"]
    assert row["objective/rlhf_reward"] == near(total)
