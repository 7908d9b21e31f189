"""The names of other trainers, and misspelt ones."""

import pytest

from rloo_cli import names, registry, schema
from rloo_cli.tools.migrate import SWIFT_REWARDS, TRL_REWARDS
from rloo_cli.tools.migrate_recipe import ours


def test_every_old_name_has_one_row():
    listed = [name for row in names.ROWS for name in row.names]
    assert len(listed) == len(set(listed)) > 200


def test_every_key_of_the_table_has_a_section_of_the_schema_or_of_the_plan():
    planned = {"checkpoint", "agent", "resume"}  # not in this version
    for row in names.ROWS:
        section = (row.new or "seed").partition(".")[0]
        assert section in {*schema.RunConfig.model_fields, *planned}, row


def test_rows_for_keys_of_the_algorithm_name_real_ones():
    later = ["loss_type", "off_policy_threshold", "top_entropy_quantile", "router_aux_loss_coef"]
    later += ["whiten_rewards", "gamma", "lam", "vf_coef", "epsilon_value"]  # PPO's and GRPO's
    for row in names.ROWS:
        section, _, key = (row.new or "").partition(".")
        if section == "algorithm" and key and key not in later:
            top = key.partition(".")[0]
            assert f"algorithm.{top}" in ours(), row


@pytest.mark.parametrize(
    ("key", "new"),
    [
        ("algorithm.rloo_k", "algorithm.num_generations"),
        ("kl_coef", "algorithm.beta"),
        ("algorithm.cliprange", "algorithm.epsilon"),
        ("num_ppo_epochs", "algorithm.num_iterations"),
        ("generation.response-length", "generation.max_completion_length"),
        ("reward_weights", "reward.<name>.weight"),
        ("train.per_device_train_batch_size", "train.prompts_per_step"),
    ],
)
def test_an_old_name_is_answered_with_todays(key, new):
    assert names.old_name(key).new == new


def test_a_name_of_nobodys_is_no_old_name():
    assert names.old_name("algorithm.frobnicate") is None


@pytest.mark.parametrize(
    ("key", "best"),
    [
        ("algorithm.num_generation", "algorithm.num_generations"),
        ("num_generation", "algorithm.num_generations"),
        ("betta", "algorithm.beta"),
        ("generation.temprature", "generation.temperature"),
        ("algoritm.beta", "algorithm.beta"),
        ("tldr_1B", "tldr_1b"),
        ("frobnicate", None),
    ],
)
def test_the_nearest_key_is_guessed(key, best):
    known = [*ours(), "tldr_1b", "tldr_6_9b"]
    guesses = names.nearest(key, known)
    assert guesses[:1] == ([best] if best else [])
    assert len(guesses) <= 3


def test_rewards_of_the_tables_are_in_the_registry():
    wanted = {*SWIFT_REWARDS.values(), *TRL_REWARDS.values()}
    assert wanted <= set(registry.names("rewards"))
