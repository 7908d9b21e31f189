"""Conflicts and warnings between keys of an algorithm: each is found, named, and has a way out."""

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from algorithm_cases import YAML, micro
from hook_calls import rloo
from pydantic import ValidationError

from rloo_cli.algorithms import rloo as rloo_algorithm
from rloo_cli.algorithms.common import family, rules
from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.config.registry import registered_module, registry_names
from rloo_cli.utils.errors import ConfigError

GENERATION = {"backend": "transformers", "max_completion_length": 256, "top_p": 1.0, "top_k": 0}
GENERATION |= {"min_p": None, "repetition_penalty": 1.0, "min_tokens": 0, "ignore_eos": False}
GENERATION |= {"kwargs": {}, "stop_token_ids": [], "overlap": "none", "allow_uncorrected": False}
GENERATION |= {"return_sampling_mask": False}
CORRECTION = {"mode": "auto", "level": "sequence", "cap": 3.0, "floor": 0.0}
CORRECTION |= {"geometric_range": None}


def a_run(
    prompts: int = 16,
    dropout: bool = True,
    correction: Any = None,
    rewards: Any = None,
    **keys: Any,
) -> Any:
    """A stand-in for RunConfig: keys of generation go there, the rest to the algorithm."""
    generation = GENERATION | {k: keys.pop(k) for k in list(keys) if k in GENERATION}
    values = (
        yaml.safe_load(YAML.read_text()) | keys | {"correction": CORRECTION | (correction or {})}
    )
    return SimpleNamespace(
        algorithm=rloo.Config(**values),
        generation=registered_module("generation", generation["backend"]).Config.model_construct(
            **generation
        ),
        train=SimpleNamespace(prompts_per_step=prompts, old_logp="auto"),
        model=SimpleNamespace(disable_dropout=dropout),
        rewards={name: SimpleNamespace(weight=weight) for name, weight in (rewards or {}).items()},
    )


def found(**keys: Any) -> list[Any]:
    return list(rloo.problems(a_run(**keys)))


def warned(**keys: Any) -> str:
    return "\n".join(rloo.warnings(a_run(**keys)))


def test_the_defaults_have_no_problem_and_no_warning() -> None:
    assert found() == []
    assert warned() == ""


LOSS = {"kl_in": "loss"}
TO_GO = {"kl_credit": "to_go", "kl_in_baseline": False, "ratio_level": "token"}


@pytest.mark.parametrize(
    ("keys", "where", "got"),
    [
        (LOSS, "kl_estimator", "expected gradient is zero"),
        (
            LOSS | {"kl_estimator": "k2", "kl_ratio_weighted": True},
            "kl_ratio_weighted",
            "k1 and k3",
        ),
        (TO_GO | {"kl_in_baseline": True}, "kl_credit", "kl_in_baseline=false"),
        (TO_GO | {"ratio_level": "sequence"}, "kl_credit", "ratio_level=token"),
        (TO_GO | {"kl_in": "none"}, "kl_credit", "kl_in=reward"),
        (TO_GO | {"normalize_advantages": True}, "kl_credit", "normalize_advantages=false"),
        ({"policy_loss": "reinforce", "num_iterations": 2}, "policy_loss", "2 * 1 = 2 updates"),
        ({"policy_loss": "reinforce", "num_minibatches": 2}, "policy_loss", "1 * 2 = 2 updates"),
        ({"delta": 1.2}, "delta", "found 1.2; must be above 1 + epsilon_high = 1.2"),
        ({"delta": 3.0, "epsilon_high": 2.5}, "delta", "= 3.5"),
        ({"reward_clip_range": [1.0, -1.0]}, "reward_clip_range", "below the second"),
        ({"reward_clip_range": [1.0, 1.0]}, "reward_clip_range", "below the second"),
        ({"missing_eos_penalty": -1.0}, "missing_eos_penalty", "subtracted"),
        ({"correction": {"floor": 4.0}}, "correction.floor", "floor 4 is above cap 3"),
        ({"correction": {"geometric_range": [1.1, 1.2]}}, "correction.geometric_range", "1.1"),
        ({"baseline": "greedy"}, "baseline", "only remax"),
        ({"baseline": "value"}, "baseline", "only ppo"),
        ({"policy_loss": None}, "policy_loss", "and algorithm.loss_type"),
        ({"policy_loss": "cispo"}, "epsilon_high", "every weight of 1 or more"),
        ({"policy_loss": "luspo", "ratio_level": "token"}, "ratio_level", "luspo weighs"),
    ],
)
def test_a_conflict_is_named_with_its_arithmetic(
    keys: dict[str, Any], where: str, got: str
) -> None:
    (problem,) = found(**keys)
    assert problem.where == f"algorithm.{where}"
    assert got in problem.why
    assert problem.fix


@pytest.mark.parametrize(
    "keys",
    [
        LOSS | {"kl_ratio_weighted": True},
        LOSS | {"beta": 0.0},
        LOSS | {"kl_estimator": "k2"},
        LOSS | {"kl_estimator": "k3", "kl_ratio_weighted": True},
        TO_GO,
        TO_GO | {"ratio_level": "sequence", "policy_loss": "reinforce"},
        {"policy_loss": "reinforce", "num_iterations": 2, "allow_stale": True},
        {"policy_loss": "reinforce"},
        {"delta": 1.3},
        {"reward_clip_range": [-1.0, 1.0]},
        {"missing_eos_penalty": {"mode": "replace", "value": -1.0}},
    ],
)
def test_what_is_no_conflict_is_let_through(keys: dict[str, Any]) -> None:
    assert found(**keys) == []


FILTERS = [{"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.1}, {"repetition_penalty": 1.1}]
FILTERS += [{"min_tokens": 5}]  # without a stop id among the tokens, every other one is likelier


@pytest.mark.parametrize("mode", ["truncate", "mask", "filter", "bypass"])
@pytest.mark.parametrize("keys", FILTERS)
def test_correction_and_a_sampling_filter_have_two_ways_out(
    mode: str, keys: dict[str, Any]
) -> None:
    (problem,) = found(correction={"mode": mode}, **keys)
    name = next(iter(keys))
    assert problem.where == "algorithm.correction.mode"
    assert f"generation.{name}=" in problem.why and f"generation.{name}=" in problem.fix
    assert problem.fix.endswith("or algorithm.correction.mode=none")


def test_auto_correction_follows_the_backend() -> None:
    assert found(top_p=0.9) == []
    assert "top_p=0.9" in warned(top_p=0.9)
    (problem,) = found(top_p=0.9, backend="vllm_server")
    assert "auto (truncate " in problem.why
    assert found(top_p=0.9, backend="vllm_colocate", correction={"mode": "none"}) == []


def test_min_tokens_that_ban_no_stop_id_leave_the_sampler_as_it_is() -> None:
    assert "min_tokens=5" in warned(min_tokens=5)
    assert warned(min_tokens=5, ignore_eos=True) == ""
    assert "min_tokens=5" in warned(min_tokens=5, ignore_eos=True, stop_token_ids=[7])
    assert found(min_tokens=5, ignore_eos=True, backend="vllm_server") == []


def of(*words: str) -> list[Any]:
    """The problems of a whole config, as the command finds them; [] where it is accepted."""
    try:
        check.check_config(compose_config(["+recipe=smoke", *words]))
    except ConfigError as error:
        return list(error.problems)
    return []


A = "algorithm."


@pytest.mark.parametrize(
    ("words", "where", "fix"),
    [
        ("reinforce_pp_baseline ratio_level=sequence", "ratio_level", "ratio_level=token"),
        ("reinforce_pp_baseline ratio_level=geometric", "ratio_level", "ratio_level=token"),
        (
            "reinforce_pp ratio_level=sequence policy_loss=sapo kl_in=none kl_credit=sequence",
            "ratio_level",
            "ratio_level=token",
        ),
        ("reinforce_pp kl_credit=sequence", "kl_credit", "kl_credit=to_go"),
        ("reinforce_pp ratio_level=sequence", "ratio_level", "ratio_level=token"),
        (
            "reinforce num_generations=1 multi_reward=normalize_then_sum",
            "multi_reward",
            "multi_reward=sum",
        ),
        ("reinforce num_generations=1 zero_std_groups=drop", "zero_std_groups", "=keep"),
        ("remax num_generations=1 zero_std_groups=resample", "zero_std_groups", "=keep"),
        ("reinforce_pp num_generations=1 zero_std_groups=drop", "zero_std_groups", "=keep"),
        ("reinforce num_generations=1 advantage_scale=group", "advantage_scale", "=batch"),
    ],
)
def test_what_would_crash_or_mean_nothing_is_refused(words: str, where: str, fix: str) -> None:
    name, *keys = words.split()
    problems = of(f"algorithm={name}", *(f"{A}{key}" for key in keys))
    (problem,) = [p for p in problems if f"{A}{where}" in p.where]
    assert problem.fix.endswith(fix)
    assert not any("kl_credit=sequence" in p.fix for p in problems)
    # No way out leads into another refusal.
    assert of(f"algorithm={name}", *(f"{A}{key}" for key in keys), *fixes(problems)) == []


def fixes(problems: list[Any]) -> list[str]:
    return [word for p in problems for word in p.fix.partition(", or")[0].split()]


def test_rewards_that_are_all_of_weight_0_are_warned_of() -> None:
    assert "weight 0 (one, two)" in warned(rewards={"one": 0.0, "two": 0.0})
    assert warned(rewards={"one": 0.0, "two": 0.5}) == ""


def test_groups_left_out_although_they_have_advantages_are_warned_of() -> None:
    for key, least in (("drop", "leaves out groups"), ("resample", "leaves out groups")):
        assert least in warned(zero_std_groups=key, baseline="batch_mean")
        assert least not in warned(zero_std_groups=key)
    assert "has no effect" in warned(advantage_scale="loo_std", num_generations=2)
    assert warned(advantage_scale="loo_std") == ""


@pytest.mark.parametrize(
    ("prompts", "minibatches", "why", "fix"),
    [
        (16, 3, "16 = 5 * 3 + 1", "num_minibatches=2 or 4, or train.prompts_per_step=15 or 18"),
        (4, 9, "4 = 0 * 9 + 4", "num_minibatches=4, or train.prompts_per_step=9"),
    ],
)
def test_minibatches_divide_the_prompts(prompts: int, minibatches: int, why: str, fix: str) -> None:
    (problem,) = found(prompts=prompts, num_minibatches=minibatches)
    assert why in problem.why and fix in problem.fix
    assert found(prompts=prompts, num_minibatches=2) == []


def test_overlong_penalty_that_starts_before_the_first_token_is_a_conflict() -> None:
    rule = {"max_length": 10, "cache": 11, "weight": 1.0}
    (problem,) = found(overlong_penalty=rule)
    assert problem.where == "algorithm.overlong_penalty.cache"


@pytest.mark.parametrize(
    ("keys", "got"),
    [
        ({"kl_estimator": "k2"}, "kl_estimator=k2 in the reward"),
        ({"kl_estimator": "k3"}, "kl_estimator=k3 in the reward"),
        ({"kl_in": "none"}, "beta=0.05 is ignored"),
        ({"kl_ratio_weighted": True}, "does nothing unless kl_in=loss"),
        ({"mask_truncated_completions": True}, "use drop"),
        ({"zero_std_groups": "drop"}, "also drops"),
        ({"num_iterations": 2, "max_completion_length": 512}, "clips 37%"),
        ({"num_minibatches": 2, "max_completion_length": 2048}, "clips 65%"),
        ({"loss_agg": "token_mean_local"}, "micro-batch size"),
        ({"overlong_penalty": {"max_length": 300, "cache": 20, "weight": 1.0}}, "never charged"),
        *((f, "logp then differs") for f in FILTERS),
    ],
)
def test_what_is_seldom_meant_is_warned_of(keys: dict[str, Any], got: str) -> None:
    assert got in warned(**keys)


@pytest.mark.parametrize(
    "keys",
    [
        {"kl_estimator": "k3", "beta": 0.0},
        {"kl_estimator": "k3", "kl_in": "loss"},
        {"max_completion_length": 2048},
        {"num_iterations": 4, "max_completion_length": 53},
        {"num_iterations": 4, "max_completion_length": 2048, "ratio_level": "token"},
        {"mask_truncated_completions": True, "beta": 0.0},
        {"mask_truncated_completions": "drop"},
    ],
)
def test_what_is_fine_is_not_warned_of(keys: dict[str, Any]) -> None:
    assert warned(**keys) == ""


def test_the_share_clipped_by_noise_is_the_specification_s() -> None:
    c = a_run().algorithm
    shares = [round(100 * rules.clipped_by_noise(c, t), 1) for t in (53, 512, 2048)]
    assert shares[0] == 0.7 and [round(s) for s in shares[1:]] == [37, 65]


def test_the_share_that_is_predicted_is_the_share_that_noise_takes_out() -> None:
    tokens, completions = 512, 3000
    algorithm = a_run().algorithm
    noise = torch.randn(completions, tokens, generator=torch.Generator().manual_seed(0))
    logp = (rules.TOKEN_NOISE * noise).double().flatten()
    batch = micro([tokens] * completions)
    ratio = family.policy_ratios(logp, torch.zeros_like(logp), batch, algorithm)
    outside = (ratio < 1 - algorithm.epsilon) | (ratio > algorithm.upper)
    predicted = rules.clipped_by_noise(algorithm, tokens)
    assert float(outside.double().mean()) == pytest.approx(predicted, abs=0.03)


def test_epsilon_tokens_keep_the_share_that_noise_clips_as_it_is_at_that_length() -> None:
    plain, wide = (a_run(epsilon_tokens=n).algorithm for n in (None, 53))
    at_53 = rules.clipped_by_noise(plain, 53)
    assert [rules.clipped_by_noise(wide, n) for n in (53, 512, 2048)] == pytest.approx([at_53] * 3)
    assert rules.clipped_by_noise(wide, 10) == rules.clipped_by_noise(plain, 10)


@pytest.mark.parametrize(
    "keys", [{"ratio_level": "token"}, {"policy_loss": "reinforce"}, {"delta": 3.0}], ids=str
)
def test_epsilon_tokens_are_refused_where_no_ratio_is_of_a_completion(keys: dict[str, Any]) -> None:
    assert "algorithm.epsilon_tokens" in [p.where for p in found(epsilon_tokens=100, **keys)]


def test_old_logp_is_free_for_one_minibatch_without_dropout() -> None:
    free = [{}, {"num_iterations": 3}, {"normalize_advantages": True}]
    free += [{"beta": 0.0, "baseline": "batch_mean"}, {"beta": 0.0, "advantage_scale": "batch"}]
    assert [rloo.why_separate(a_run(**keys)) for keys in free] == [None] * 5


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"num_minibatches": 2}, "num_minibatches"),
        ({"dropout": False}, "dropout"),
        ({"baseline": "batch_mean"}, "every group's KL"),
        ({"advantage_scale": "batch"}, "every group's KL"),
        ({"normalize_advantages": True, "advantage_scale": "loo_std"}, "every group's KL"),
        ({"normalize_advantages": True, "kl_in_baseline": False}, "every group's KL"),
        ({"normalize_advantages": True, "baseline": "none"}, "every group's KL"),
    ],
)
def test_old_logp_has_a_pass_of_its_own_where_the_training_forward_is_not_it(
    keys: dict[str, Any], why: str
) -> None:
    assert why in (rloo.why_separate(a_run(**keys)) or "")


@pytest.mark.parametrize(
    "keys",
    [
        {"num_generations": 1},
        {"beta": -0.1},
        {"delta": 1.0},
        {"epsilon": -0.1},
        {"log_ratio_clamp": 0.0},
        {"reward_clip_range": [1.0]},
        {"baseline": "median"},
        {"mask_truncated_completions": "maybe"},
        {"missing_eos_penalty": "1"},
        {"betta": 1.0},
        {"beta": float("nan")},
    ],
)
def test_a_value_out_of_its_limits_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        rloo.Config(**(yaml.safe_load(YAML.read_text()) | keys))


def test_a_bare_eos_penalty_is_subtracted() -> None:
    eos = a_run(missing_eos_penalty=1.0).algorithm.eos_penalty
    assert (eos.mode, eos.value) == ("subtract", 1.0)


def test_the_yaml_has_every_key_and_no_other() -> None:
    assert set(yaml.safe_load(YAML.read_text())) == set(rloo.Config.model_fields)


def test_every_file_of_the_room_is_an_algorithm_and_what_they_share_is_not() -> None:
    room = Path(rloo_algorithm.__file__).parent
    assert set(registry_names("algorithms")) == {p.stem for p in room.glob("*.py")} - {"__init__"}
    assert not {p.stem for p in (room / "common").glob("*.py")} & set(registry_names("algorithms"))


def test_every_key_has_its_line_of_meaning() -> None:
    for name, field in rloo.Config.model_fields.items():
        assert field.description, name


def test_the_formula_is_read_in_one_go_and_its_parts_fit_a_screen() -> None:
    room = Path(rloo_algorithm.__file__).parent
    assert len((room / "rloo.py").read_text().splitlines()) <= 150
    for file in room.glob("*.py"):
        assert len(file.read_text().splitlines()) <= 250, file
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 50, (file, node.name)
