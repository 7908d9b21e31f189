"""Each health rule fires once, only when it should, and names keys that exist."""

import math
import random
import re

import pytest
import yaml

from rloo_cli.config.schema import GenerationConfig, RunConfig
from rloo_cli.reporting.health.advisor import CHECKS, Advisor, advice_text
from rloo_cli.utils.paths import CONF

QUIET = {
    "kl": 0.02,
    "entropy": 2.0,
    "clip_ratio/region_mean": 0.05,
    "frac_reward_zero_std": 0.3,
    "completions/clipped_ratio": 0.1,
    "completions/most_common_frac": 0.2,
    "reward_std_batch": 0.5,
    "sampling/ess": 0.95,
    "sampling/logp_diff_rms": 0.002,
    "grad_clip_fraction": 0.5,
}
# A healthy start of this many steps, then these values: exactly this advice must come.
CASES = {
    "reward is flat": (0, {"reward": 0.5}),
    "clip_ratio/region_mean": (0, {"clip_ratio/region_mean": 0.25}),
    "kl went from": (30, {"kl": 0.4}),
    "entropy fell": (3, {"entropy": 0.19}),
    "completions/most_common_frac": (0, {"completions/most_common_frac": 0.96}),
    "frac_reward_zero_std": (0, {"frac_reward_zero_std": 0.9}),
    "completions/clipped_ratio": (0, {"completions/clipped_ratio": 0.6}),
    "sampling/ess": (0, {"sampling/ess": 0.4}),
    "sampling/logp_diff_rms": (3, {"sampling/logp_diff_rms": 0.1}),
    "every update was clipped": (0, {"grad_clip_fraction": 1.0}),
}


def healthy(step):
    wobble = 0.05 if step % 2 else -0.05
    return QUIET | {"step": step, "reward": 0.01 * step + wobble}


def said(rows):
    advisor = Advisor()
    return [advice_text(*pair) for row in rows for pair in advisor.advise(row).items()]


def test_entropy_of_all_completions_is_what_a_collapse_is_read_from_where_it_is_known():
    rows = [healthy(s) | {"sampling/entropy": 2.0} for s in range(1, 10)]
    moved = [healthy(s) | {"sampling/entropy": 2.0, "entropy": 0.1} for s in range(10, 20)]
    assert said([*rows, *moved]) == []  # only another share of the groups was forwarded
    fallen = [healthy(s) | {"sampling/entropy": 0.1} for s in range(10, 20)]
    assert [text.split(" fell")[0] for text in said([*rows, *fallen])] == ["sampling/entropy"]


def test_groups_without_spread_that_resampling_threw_away_count():
    rows = [healthy(s) | {"frac_reward_zero_std": 0.0} for s in range(1, 10)]
    rows = [row | {"sampled_frac_reward_zero_std": 0.9} for row in rows]
    assert [text.split(" is")[0] for text in said(rows)] == ["sampled_frac_reward_zero_std"]


def test_a_healthy_run_hears_nothing():
    assert said(healthy(step) for step in range(1, 300)) == []


@pytest.mark.parametrize("start", CASES)
def test_each_rule_fires_exactly_once_when_its_metric_goes_wrong(start):
    after, wrong = CASES[start]
    rows = [healthy(s) | (wrong if s > after else {}) for s in range(1, 150)]
    found = said(rows)
    assert len(found) == 1
    assert start in found[0]


def test_no_learning_signal_is_said_after_twenty_steps_beside_the_zero_spread_rule():
    rows = [healthy(s) | {"frac_reward_zero_std": 1.0} for s in range(1, 20)]
    assert len(said(rows)) == 1
    found = said([*rows, healthy(20) | {"frac_reward_zero_std": 1.0}])
    assert len(found) == 2
    assert "no learning signal" in found[1]


def test_every_rule_has_a_case_here():
    own_tests = {
        "reward_falling", "reward_swinging", "no_signal", "held_out_falling", "high_variance"
    }  # fmt: skip
    assert len(CASES) + len(own_tests) == len(CHECKS)


@pytest.mark.parametrize(
    ("name", "limit", "over"),
    [
        ("clip_ratio/region_mean", 0.2, 0.01),
        ("frac_reward_zero_std", 0.8, 0.01),
        ("completions/clipped_ratio", 0.5, 0.01),
        ("completions/most_common_frac", 0.95, 0.01),
        ("sampling/ess", 0.5, -0.01),
    ],
)
def test_a_share_at_its_limit_is_silent_and_just_beyond_it_speaks(name, limit, over):
    assert said(healthy(s) | {name: limit} for s in range(1, 40)) == []
    assert len(said(healthy(s) | {name: limit + over} for s in range(1, 40))) == 1


def test_one_unlucky_row_is_no_reason_to_speak():
    rows = [healthy(s) for s in range(1, 40)]
    rows[0] |= {"frac_reward_zero_std": 1.0, "completions/clipped_ratio": 1.0}
    rows[20] |= {"frac_reward_zero_std": 1.0, "clip_ratio/region_mean": 0.5}
    assert said(rows) == []


def test_a_flat_reward_needs_fifty_steps():
    flat = [healthy(s) | {"reward": 0.5} for s in range(1, 51)]
    assert said(flat[:49]) == []
    assert len(said(flat)) == 1


def test_a_slow_noisy_rise_is_not_flat():
    rows = [healthy(s) | {"reward": 0.005 * s + (0.2 if s % 2 else -0.2)} for s in range(1, 200)]
    assert said(rows) == []


def test_rows_logged_every_tenth_step_count_for_ten_steps():
    rows = [healthy(s) | {"reward": 0.5} for s in range(10, 51, 10)]
    assert said(rows[:4]) == []
    assert len(said(rows)) == 1


def test_kl_that_grows_slowly_or_from_nearly_nothing_is_silent():
    assert said(healthy(s) | {"kl": 0.05 * 1.05**s} for s in range(1, 80)) == []  # x2.7 in 20
    assert said(healthy(s) | {"kl": 0.0004 * s} for s in range(1, 200)) == []
    assert len(said(healthy(s) | {"kl": 0.05 * 1.07**s} for s in range(1, 80))) == 1  # x3.9 in 20


def test_entropy_just_above_a_tenth_of_its_start_is_silent():
    assert said(healthy(s) | {"entropy": 2.0 if s == 1 else 0.21} for s in range(1, 40)) == []


def test_a_difference_of_log_probabilities_within_bfloat16s_own_is_silent():
    rows = [healthy(s) | {"sampling/logp_diff_rms": 0.01 if s < 5 else 0.039} for s in range(1, 40)]
    assert said(rows) == []


def test_nineteen_clipped_updates_are_silent():
    assert said(healthy(s) | {"grad_clip_fraction": 1.0} for s in range(1, 20)) == []


def test_missing_keys_none_and_nan_are_no_data():
    nan = float("nan")
    rows = [{}, {"step": 1}, {"step": 2, "reward": None, "kl": nan, "entropy": "x"}]
    assert said(rows * 100) == []


def keys_of(section):
    if section == "algorithm":  # an algorithm brings its own keys; its YAML lists them all
        return yaml.safe_load((CONF / "algorithm" / "rloo.yaml").read_text())
    field = RunConfig.model_fields[section].annotation
    return getattr(field, "model_fields", None) or GenerationConfig.model_fields


def test_every_advice_names_a_key_that_exists():
    everything_wrong = {key: bad for _, wrong in CASES.values() for key, bad in wrong.items()}
    everything_wrong["frac_reward_zero_std"] = 1.0
    texts = said(healthy(s) | (everything_wrong if s > 30 else {}) for s in range(1, 120))
    texts += said(noisy(lambda s: 0.8 - 0.004 * s))
    texts += said(noisy(lambda s: 0.5 + 0.3 * math.cos(s)))
    texts += said(held_out([0.4, 0.1, 0.1]))
    texts += said(row | {"reward_std_batch": 0.0} for row in noisy(lambda s: 0.5))
    assert len(set(texts)) == len(CHECKS)
    for text in texts:
        named = re.findall(r"\b(train|algorithm|generation|model|data)\.(\w+)", text)
        assert named, text
        for section, key in named:
            assert key in keys_of(section), f"{section}.{key}"


def held_out(scores, **more):
    """Lines of evaluations with 50 samples each."""
    return [
        {"step": 10 * i, "eval_reward": score, "eval_samples": 50}
        | {name: value for name, value in more.items() if value is not None}
        for i, score in enumerate(scores)
    ]


@pytest.mark.parametrize(
    ("scores", "speaks"),
    [
        ([0.4, 0.5, 0.1, 0.1], True),
        ([0.4, 0.5, 0.1], False),  # one evaluation may be bad luck
        ([0.4, 0.5, 0.1, 0.5, 0.1], False),  # not in a row
        ([0.4, 0.5, 0.4, 0.35], False),  # within the noise of 50 samples
        ([0.1, 0.2, 0.4, 0.5], False),
    ],
)
def test_a_held_out_score_speaks_below_its_best_by_more_than_noise_twice_in_a_row(scores, speaks):
    found = said(held_out(scores))
    assert len(found) == speaks
    for part in ("eval_reward", "0.5", "step 10"):
        assert all(part in text for text in found)


def test_the_recorded_standard_error_of_a_held_out_score_comes_before_the_bound_of_a_share():
    scores = [0.4, 0.5, 0.4, 0.35]
    assert len(said(held_out(scores, **{"eval_reward/se": 0.01}))) == 1
    assert said(held_out([0.4, 0.5, 0.1, 0.1], **{"eval_reward/se": 0.2})) == []
    assert said(held_out([4.0, 5.0, 1.0, 1.0])) == []  # no share, and no error is recorded
    assert len(said(held_out([4.0, 5.0, 1.0, 1.0], **{"eval_reward/se": 0.5}))) == 1


def test_a_set_of_its_own_name_and_the_best_of_long_ago_are_judged_too():
    scores = [0.6, *[0.55] * 15, 0.3, 0.3]
    rows = [
        {"step": 10 * i, "eval_hard_reward": score, "eval_hard_samples": 200, "eval_reward": 0.5}
        for i, score in enumerate(scores)
    ]
    (text,) = said(rows)
    assert text.startswith("eval_hard_reward") and "0.6" in text and "step 0" in text


def test_evaluations_between_steps_change_no_other_rule():
    steps = [healthy(s) | {"reward": 0.5} for s in range(1, 50)]
    assert said([*steps, *held_out([0.5] * 20)]) == []


def test_a_level_reward_of_few_completions_hears_to_take_more_and_not_larger_updates():
    for seed in range(5):
        found = said(row | {"reward_std_batch": 0.05} for row in noisy(lambda s: 0.5, seed))
        assert len(found) == 1 and "train.prompts_per_step" in found[0], (seed, found)
        assert UPWARD not in found[0]


def noisy(level, seed=0, size=0.05):
    """Rows whose reward is `level(step)` with noise."""
    dice = random.Random(seed)
    return [healthy(s) | {"reward": level(s) + dice.gauss(0, size)} for s in range(1, 151)]


UPWARD = "raise train.learning_rate"


@pytest.mark.parametrize("seed", range(5))
def test_a_falling_reward_hears_to_lower_the_learning_rate_and_never_to_raise_it(seed):
    for level in (
        lambda s: 0.8 - 0.004 * s,  # from the start
        lambda s: 0.8 - 0.0015 * s,  # slowly
        lambda s: 0.01 * s if s < 70 else 0.7 - 0.01 * (s - 70),  # after a rise
        lambda s: 0.7 if s < 30 else 0.1,  # at once
    ):
        found = said(noisy(level, seed))
        assert [text for text in found if text.startswith("reward fell from")]
        assert "Lower train.learning_rate" in found[0] and "algorithm.beta" in found[0]
        assert UPWARD not in " ".join(found)


@pytest.mark.parametrize("period", [2, 5, 8, 12, 20])
def test_an_oscillating_reward_hears_that_updates_overshoot_and_not_to_raise_anything(period):
    for seed in range(3):
        found = said(noisy(lambda s: 0.5 + 0.3 * math.cos(2 * math.pi * s / period), seed))
        assert len(found) == 1 and found[0].startswith("reward swings between"), found
        assert "Lower train.learning_rate" in found[0] and UPWARD not in found[0]


def test_noise_around_a_level_is_flat_and_neither_falls_nor_swings():
    for seed in range(20):
        found = said(noisy(lambda s: 0.5, seed))
        assert len(found) == 1 and UPWARD in found[0], (seed, found)


def test_a_rise_that_wavers_hears_nothing_of_its_reward():
    for seed in range(5):
        rise = noisy(lambda s: 0.01 * s + 0.05 * math.cos(s), seed, size=0.03)
        assert said(rise) == []
