"""Each health rule fires once, only when it should, and names keys that exist."""

import re

import pytest
import yaml

from rloo_cli.advice import RULES, Advisor
from rloo_cli.paths import CONF
from rloo_cli.schema import GenerationConfig, RunConfig

QUIET = {
    "kl": 0.02,
    "entropy": 2.0,
    "clip_ratio/region_mean": 0.05,
    "frac_reward_zero_std": 0.3,
    "completions/clipped_ratio": 0.1,
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
    "frac_reward_zero_std": (0, {"frac_reward_zero_std": 0.9}),
    "completions/clipped_ratio": (0, {"completions/clipped_ratio": 0.6}),
    "sampling/ess": (0, {"sampling/ess": 0.4}),
    "sampling/logp_diff_rms": (3, {"sampling/logp_diff_rms": 0.1}),
    "every update clipped": (0, {"grad_clip_fraction": 1.0}),
}


def healthy(step):
    wobble = 0.05 if step % 2 else -0.05
    return QUIET | {"step": step, "reward": 0.01 * step + wobble}


def said(rows):
    advisor = Advisor()
    return [text for row in rows for text in advisor.look(row)]


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
    assert len(CASES) + 1 == len(RULES)


@pytest.mark.parametrize(
    ("name", "limit", "over"),
    [
        ("clip_ratio/region_mean", 0.2, 0.01),
        ("frac_reward_zero_std", 0.8, 0.01),
        ("completions/clipped_ratio", 0.5, 0.01),
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
    assert len(texts) == len(RULES)
    for text in texts:
        named = re.findall(r"\b(train|algorithm|generation|model|data)\.(\w+)", text)
        assert named, text
        for section, key in named:
            assert key in keys_of(section), f"{section}.{key}"
