"""What does not go together with sampling while training goes on is refused, with a way out."""

import pytest

from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.utils.errors import ConfigError

AHEAD, CARRY = "generation.overlap=ahead", "generation.overlap=carry"
UNCORRECTED = ("algorithm.correction.mode=none", "generation.allow_uncorrected=true")
# words -> the key that is named, and what is told
REFUSED = {
    "colocated": (["generation=vllm_colocate"], "generation.overlap", "generation=vllm_server"),
    "two iterations": (["algorithm.num_iterations=2"], "algorithm.num_iterations", "2 * 1 = 2"),
    "mini-batches": (["algorithm.num_minibatches=2"], "algorithm.num_minibatches", "1 * 2 = 2"),
    "ppo": (["algorithm=ppo"], "generation.overlap", "per-token advantages"),
    "reinforce++": (["algorithm=reinforce_pp"], "generation.overlap", "per-token advantages"),
    "uncorrected": (
        ["algorithm.correction.mode=none"], "algorithm.correction.mode", "allow_uncorrected=true",
    ),
    "the KL's temperature": (
        ["algorithm.kl_temperature=one", "generation.temperature=0.8"],
        "algorithm.kl_temperature", "kl_temperature=sampling",
    ),
    "a bent sampler": (["generation.top_p=0.9"], "algorithm.correction.mode", "top_p=1.0"),
    "an adapter": (["lora=default"], "model.lora", "generation=vllm_server"),
    "two ranks": (
        ["distributed=ddp", "distributed.num_processes=2"], "generation.overlap",
        "distributed=single",
    ),
    "an agent": (
        ["agent=tools", "agent.tools=[rloo_cli.data.synthetic.tool_tasks:multiply]"],
        "generation.overlap", "agent",
    ),
}  # fmt: skip


# Of carry alone, which refuses all of these, too.
REFUSED_CARRIED = REFUSED | {
    "min_tokens": (["generation.min_tokens=2", *UNCORRECTED], "generation.min_tokens", "request"),
    "a penalty": (
        ["generation.repetition_penalty=1.1", *UNCORRECTED], "generation.repetition_penalty",
        "generation.repetition_penalty=1.0",
    ),
    "greedy answers": (["algorithm=remax"], "generation.overlap", "greedy"),
}  # fmt: skip


def refusals(*words: str) -> str:
    with pytest.raises(ConfigError) as raised:
        check.check_config(compose_config(["+recipe=smoke", *words]))
    return "\n".join(str(problem) for problem in raised.value.problems)


@pytest.mark.parametrize(("words", "key", "got"), REFUSED.values(), ids=REFUSED)
def test_what_ahead_does_not_go_with_is_refused(words: list[str], key: str, got: str) -> None:
    said = refusals(AHEAD, *words)
    assert key in said and got in said


@pytest.mark.parametrize(("words", "key", "got"), REFUSED_CARRIED.values(), ids=REFUSED_CARRIED)
def test_what_carry_does_not_go_with_is_refused(words: list[str], key: str, got: str) -> None:
    said = refusals(CARRY, *words)
    assert key in said and got in said


def test_a_bound_below_one_update_is_refused() -> None:
    assert "generation.max_lag" in refusals(CARRY, "generation.max_lag=0")


@pytest.mark.parametrize(
    "words",
    [
        ("generation=vllm_server",),
        ("algorithm.correction.mode=none", "generation.allow_uncorrected=true"),
        ("algorithm.correction.mode=bypass",),
        ("algorithm=grpo",),
        ("algorithm=remax",),
    ],
)
def test_what_goes_with_it_is_let_through(words: tuple[str, ...]) -> None:
    assert check.check_config(compose_config(["+recipe=smoke", AHEAD, *words]))


@pytest.mark.parametrize(
    "words",
    [
        ("generation=vllm_server", "generation.max_lag=3"),
        ("generation=vllm_server", "lora=default"),
        UNCORRECTED,
        ("algorithm.correction.mode=bypass",),
        ("algorithm.zero_std_groups=resample",),
        ("algorithm=grpo",),
    ],
)
def test_what_goes_with_carry_is_let_through(words: tuple[str, ...]) -> None:
    assert check.check_config(compose_config(["+recipe=smoke", CARRY, *words]))


@pytest.mark.parametrize("overlap", [AHEAD, CARRY])
def test_auto_stands_for_token_weights_and_a_trust_region(overlap: str) -> None:
    run = check.check_config(compose_config(["+recipe=smoke", overlap]))
    rule = check.resolve_config(run).algorithm.correction  # type: ignore[attr-defined]
    assert (rule.mode, rule.level, rule.cap) == ("truncate", "token", 2.0)
    assert rule.geometric_range == [0.8, 1.25]
    alone = check.check_config(compose_config(["+recipe=smoke"]))
    rule = check.resolve_config(alone).algorithm.correction  # type: ignore[attr-defined]
    assert (rule.mode, rule.level, rule.geometric_range) == ("none", "sequence", None)
