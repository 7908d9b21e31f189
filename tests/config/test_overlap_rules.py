"""What does not go together with sampling while training goes on is refused, with a way out."""

import pytest

from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.utils.errors import ConfigError

AHEAD = "generation.overlap=ahead"
# words -> the key that is named, and what is told
REFUSED = {
    "colocated": (["generation=vllm_colocate"], "generation.overlap", "generation=vllm_server"),
    "two iterations": (["algorithm.num_iterations=2"], "algorithm.num_iterations", "2 * 1 = 2"),
    "mini-batches": (["algorithm.num_minibatches=2"], "algorithm.num_minibatches", "1 * 2 = 2"),
    "ppo": (["algorithm=ppo"], "generation.overlap", "single tokens"),
    "reinforce++": (["algorithm=reinforce_pp"], "generation.overlap", "single tokens"),
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


def refusals(*words: str) -> str:
    with pytest.raises(ConfigError) as raised:
        check.check_config(compose_config(["+recipe=smoke", AHEAD, *words]))
    return "\n".join(str(problem) for problem in raised.value.problems)


@pytest.mark.parametrize(("words", "key", "told"), REFUSED.values(), ids=REFUSED)
def test_what_ahead_does_not_go_with_is_refused(words: list[str], key: str, told: str) -> None:
    said = refusals(*words)
    assert key in said and told in said


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


def test_auto_stands_for_token_weights_and_a_trust_region() -> None:
    run = check.check_config(compose_config(["+recipe=smoke", AHEAD]))
    rule = check.resolve_config(run).algorithm.correction  # type: ignore[attr-defined]
    assert (rule.mode, rule.level, rule.cap) == ("truncate", "token", 2.0)
    assert rule.geometric_range == [0.8, 1.25]
    alone = check.check_config(compose_config(["+recipe=smoke"]))
    rule = check.resolve_config(alone).algorithm.correction  # type: ignore[attr-defined]
    assert (rule.mode, rule.level, rule.geometric_range) == ("none", "sequence", None)
