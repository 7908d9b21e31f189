"""Rules about the completions of a step: too few per prompt, turns without rewards, older weights.

If older weights sampled them (generation.overlap), only the importance weight makes an update
correct, so it cannot be off; and what the policy was when it sampled is known only from the sampler
(docs/generation.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rloo_cli.algorithms.common.config import Switches, correction_mode
from rloo_cli.config.schema import RunConfig
from rloo_cli.utils.errors import Problem, clash_problems

TURNS = "algorithm.turn_rewards"
ENVIRONMENT = "environment"  # the type of the reward through which turns' rewards are scored


def sibling_problems(config: Switches) -> Iterator[Problem]:
    """Settings that compare a completion with its siblings have no meaning without siblings."""
    if config.num_generations > 1:
        return
    refused = {  # key -> whether it is set so, its effect, the fix
        "zero_std_groups": (
            config.zero_std_groups != "keep",
            "every group would count as one of equal scores, and none would be trained on",
            "keep",
        ),
        "multi_reward": (
            config.multi_reward == "normalize_then_sum",
            "each reward minus its group's mean would be 0, and nothing would be learned",
            "sum",
        ),
        "advantage_scale": (
            config.advantage_scale in ("group", "loo_std"),
            "one score has no std, and nothing would be divided",
            "batch",
        ),
    }
    yield from switch_problems(config, "a prompt's only completion (num_generations=1)", refused)


def sibling_warnings(config: Switches) -> Iterator[str]:
    """Combinations that are allowed but rarely intended, in one sentence each."""
    minus_group_mean = getattr(config, "minus_group_mean", False)
    compared = minus_group_mean or config.baseline in ("loo", "group_mean")
    if config.zero_std_groups != "keep" and not compared:
        yield (
            f"algorithm.zero_std_groups={config.zero_std_groups} leaves out groups of equal scores,"
            f" although they have advantages with baseline={config.baseline}: also groups in"
            " which every completion is right, or every one wrong"
        )
    if config.advantage_scale == "loo_std" and config.num_generations == 2:
        yield (
            "algorithm.advantage_scale=loo_std has no effect with num_generations=2: the score of"
            " one sibling has no std"
        )


def turn_reward_problems(run: RunConfig, config: Switches) -> Iterator[Problem]:
    """Conflicts of `turn_rewards` with other keys. `config`: the algorithm's switches."""
    how = config.turn_rewards
    if how == "sum":
        return
    if run.agent is None or not any(r.type == ENVIRONMENT for r in run.rewards.values()):
        why = "agent is null" if run.agent is None else "no reward has the type environment"
        why += "; an environment's turns are scored by reward=environment"
        fix = "agent=class reward=environment, or algorithm.turn_rewards=sum"
        yield Problem(f"turn_rewards={how}, but no turn can have a reward", TURNS, why, fix)
    if how == "credit":
        yield from _credit_problems(config)


def _credit_problems(config: Switches) -> Iterator[Problem]:
    """Settings under which a turn has no advantage of its own, or which only see one score."""
    setting = f"{TURNS}=credit"
    if config.name in ("ppo", "reinforce_pp"):
        why = f"{config.name} computes an advantage per token"
        fix = f"{TURNS}=sum, or algorithm=rloo"
        yield from clash_problems(setting, [(True, TURNS, f"algorithm={config.name}", why, fix)])
        return
    fits: dict[str, tuple[bool, str]] = {  # key -> whether it fits, and a value that does
        "dialect": (config.dialect is None, "null"),
        "baseline": (config.baseline in ("loo", "none"), "loo"),
        "advantage_scale": (config.advantage_scale == "none", "none"),
        "normalize_advantages": (not config.normalize_advantages, "false"),
        "normalize_rewards": (not config.normalize_rewards, "false"),
        "pass_at_k": (config.pass_at_k is None, "null"),
        "multi_reward": (config.multi_reward == "sum", "sum"),
        "reward_clip_range": (config.reward_clip_range is None, "null"),
        "missing_eos_penalty": (config.eos_penalty.mode != "replace", "{mode: none, value: 0.0}"),
        "zero_std_groups": (config.zero_std_groups == "keep", "keep"),
        "ratio_level": (config.has_token_terms, "token"),
    }  # fmt: skip
    why = "it needs one advantage per completion, but here every turn has its own"
    refused = {n: (not fit, why, f"{value}, or {TURNS}=sum") for n, (fit, value) in fits.items()}
    yield from switch_problems(config, setting, refused)


def switch_problems(
    config: Switches, setting: str, refused: Mapping[str, tuple[bool, str, str]]
) -> Iterator[Problem]:
    """The problems of switches of the algorithm that do not go with a setting.

    refused: switch -> whether its value is refused, why, and the value to use instead.
    """
    for name, (is_refused, why, value) in refused.items():
        key, found = f"algorithm.{name}", getattr(config, name)
        shown = str(found).lower() if isinstance(found, bool) else found
        clash = (is_refused, key, f"{key}={shown}", why, f"{key}={value}")
        yield from clash_problems(setting, [clash])


def needed_value_problems(
    config: Switches, setting: str, needed: Mapping[str, object], why: str
) -> Iterator[Problem]:
    """`switch_problems` of the switches that have another value than the one in `needed`."""
    texts = {n: "null" if v is None else str(v).lower() for n, v in needed.items()}
    refused = {n: (getattr(config, n) != v, why, texts[n]) for n, v in needed.items()}
    yield from switch_problems(config, setting, refused)


def lagging_problems(run: RunConfig, config: Switches) -> Iterator[Problem]:
    """Settings of an algorithm that do not work with completions sampled by older weights."""
    generation, overlap = run.generation, "generation.overlap"
    if generation.overlap == "none":
        return
    passes, parts = config.num_iterations, config.num_minibatches
    measured = config.needs_reference or config.teacher_server is not None
    mode = correction_mode(config, generation.backend, generation.overlap)
    clashes = [
        (
            passes * parts > 1,
            f"algorithm.{'num_iterations' if passes > 1 else 'num_minibatches'}",
            "more than one update of a step's completions",
            f"num_iterations * num_minibatches = {passes} * {parts} = {passes * parts}: the next"
            f" completions would be {passes * parts} updates old instead of one",
            f"algorithm.num_iterations=1 algorithm.num_minibatches=1, or {overlap}=none",
        ),
        (
            config.by_token or config.baseline == "value",
            overlap,
            f"algorithm={config.name}",
            "per-token advantages need values that older weights did not provide",
            f"{overlap}=none",
        ),
        (
            config.needs_greedy and generation.overlap == "carry",
            overlap,
            f"algorithm={config.name}",
            "it compares completions with a greedy one, which would come from other weights",
            f"{overlap}=ahead",
        ),
        (
            measured and config.kl_temperature == "one" and generation.temperature != 1,
            "algorithm.kl_temperature",
            "algorithm.kl_temperature=one",
            "the KL uses the sampler's log-probabilities, which are at temperature"
            f" {generation.temperature:g}",
            "algorithm.kl_temperature=sampling, or generation.temperature=1",
        ),
        (
            mode == "none" and not generation.allow_uncorrected,
            "algorithm.correction.mode",
            "algorithm.correction.mode=none",
            "the completions come from older weights than those being trained: without an"
            " importance weight the gradient belongs to another objective",
            "algorithm.correction.mode=auto, or generation.allow_uncorrected=true for a comparison",
        ),
    ]
    yield from clash_problems(f"{overlap}={generation.overlap}", clashes)
