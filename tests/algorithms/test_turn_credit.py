"""Rewards of turns: what an episode's score has of them, and a turn's credit by hand.

Four episodes of one prompt with 2, 2, 1 and 3 turns. What turns earned, and what the environment
said of the whole episode, are in TURNS and WHOLE; the numbers below were worked out on paper.
"""

from types import SimpleNamespace

import pytest
import torch
from assert_refused import assert_refused

from rloo_cli.agents.common.episode import episode_reward
from rloo_cli.algorithms.common.base import load_algorithm
from rloo_cli.algorithms.common.hooks import StepTokens
from rloo_cli.algorithms.common.token_advantage import (
    collect_step_tokens,
    subtract_turn_baseline,
)
from rloo_cli.config import check, registry
from rloo_cli.config.compose import compose_config
from rloo_cli.data.batch import Group, Rollout, Turn
from rloo_cli.plugin import LossInputs
from rloo_cli.utils import paths
from rloo_cli.utils.errors import ConfigError

TURNS = ([1.0, 0.5], [0.0, 1.0], [0.25], [0.0, None, 1.0])
WHOLE = (2.0, None, 1.0, None)
SCORES = [3.5, 1.0, 1.25, 1.0]
# Returns to go 3.5 2.5 | 1 1 | 1.25 | 1 1 1; the third turn of the last has no sibling, and is
# compared with the last turns of all: (2.5 + 1 + 1.25) / 3.
BY_TURN = [
    [3.5 - 3.25 / 3, 2.5 - 1.0],
    [1.0 - 5.75 / 3, 1.0 - 1.75],
    [1.25 - 5.5 / 3],
    [1.0 - 5.75 / 3, 1.0 - 1.75, 1.0 - 4.75 / 3],
]
LENGTHS = ([2, 1], [1, 1], [3], [1, 2, 1])  # sampled tokens of each turn
SWITCHES = ("algorithm.turn_rewards=credit", "algorithm.policy_loss=reinforce")
RUN = (
    "+recipe=game_mini", "distributed.threads=1", "algorithm.policy_loss=reinforce",
    "algorithm.turn_rewards=credit",
)  # fmt: skip


def algorithm(*words):
    values = compose_config(["algorithm.correction.mode=none", *SWITCHES, *words]).values
    values = values["algorithm"]
    return load_algorithm(registry.config_class("algorithms", values["name"])(**values))


def batch():
    rows = []
    for rewards, lengths in zip(TURNS, LENGTHS, strict=True):
        turns = [
            Turn([9], [3] * n, [0.0] * n, "", "stop", 0, reward=reward)
            for reward, n in zip(rewards, lengths, strict=True)
        ]
        rows.append(Rollout.from_turns(turns, True, 0))
    return SimpleNamespace(
        groups=[Group(0, {}, "", [5], rows)],
        masked=torch.zeros(1, 4, dtype=torch.bool),
        shaped=torch.tensor([SCORES], dtype=torch.float64),
    )


def step_tokens(weight=1.0, old=None, ref=None, masked=()):
    made = batch()
    for k in masked:
        made.masked[0, k] = True
    for name, values in (("old_logp", old), ("ref_logp", ref)):
        column = None if values is None else torch.split(values, [sum(n) for n in LENGTHS])
        setattr(made.groups[0], name, column and [*column])
    return collect_step_tokens(made, [(0, k) for k in range(4)], weight)[0]


def by_token(by_turn):
    pairs = zip(by_turn, LENGTHS, strict=True)
    rows = [
        a for row, lengths in pairs for a, n in zip(row, lengths, strict=True) for _ in range(n)
    ]
    return torch.tensor(rows, dtype=torch.float64)


def near(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_an_episodes_score_has_the_sum_of_its_turns_rewards_or_the_last_of_them():
    pairs = [*zip(WHOLE, TURNS, strict=True)]
    assert [episode_reward(own, earned, "sum") for own, earned in pairs] == SCORES
    assert [episode_reward(own, earned, "credit") for own, earned in pairs] == SCORES
    assert [episode_reward(own, earned, "last") for own, earned in pairs] == [2.5, 1.0, 1.25, 1.0]
    assert episode_reward(None, [0.5, None], "last") == 0.5  # of the last that earned something
    assert episode_reward(None, [None, None], "sum") is None
    assert episode_reward(0.0, [], "last") == 0.0


def test_a_turns_tokens_get_what_is_earned_from_there_on_less_the_siblings_at_that_turn():
    near(algorithm().token_advantages(step_tokens()).advantage, by_token(BY_TURN))
    plain = [[3.5, 2.5], [1.0, 1.0], [1.25], [1.0, 1.0, 1.0]]
    found = algorithm("algorithm.baseline=none").token_advantages(step_tokens())
    near(found.advantage, by_token(plain))


def test_what_turns_earn_is_weighted_as_their_reward_is():
    half = [[3.5, 3.0], [1.0, 1.0], [1.25], [1.0, 1.0, 1.0]]
    found = algorithm("algorithm.baseline=none").token_advantages(step_tokens(0.5))
    near(found.advantage, by_token(half))


def test_with_as_many_turns_and_no_rewards_of_theirs_it_is_leave_one_out():
    returns = torch.tensor([[3.0, 3.0], [1.0, 1.0], [2.0, 2.0]], dtype=torch.float64)
    turns, group = torch.tensor([2, 2, 2]), torch.zeros(3).long()
    found = subtract_turn_baseline(returns, turns, group, "loo")
    near(found, torch.tensor([[1.5] * 2, [-1.5] * 2, [0.0] * 2], dtype=torch.float64))


def test_groups_are_compared_apart():
    returns = torch.tensor([[3.0], [1.0], [100.0], [0.0]], dtype=torch.float64)
    found = subtract_turn_baseline(returns, torch.ones(4).long(), torch.tensor([0, 0, 4, 4]), "loo")
    near(found, torch.tensor([[2.0], [-2.0], [100.0], [-100.0]], dtype=torch.float64))


def test_masked_tokens_have_none_and_their_returns_stay_in_the_baseline():
    wanted = by_token(BY_TURN)
    wanted[3:5] = 0.0
    found = algorithm().token_advantages(step_tokens(masked=[1])).advantage
    near(found, wanted)


def logprobs():
    tokens = sum(map(sum, LENGTHS))
    return torch.linspace(-1, -0.2, tokens).double(), torch.linspace(-0.4, -0.9, tokens).double()


def test_the_kl_is_the_episodes_or_each_tokens_and_of_those_after_it():
    old, ref = logprobs()
    old, ref = old.float().double(), ref.float().double()
    step = step_tokens(old=old.float(), ref=ref.float())
    parts = torch.split(0.1 * (old - ref), [sum(n) for n in LENGTHS])
    totals = [float(p.sum()) for p in parts]
    scored = [s - kl for s, kl in zip(SCORES, totals, strict=True)]
    found = algorithm("algorithm.beta=0.1", "algorithm.baseline=none").token_advantages(step)
    plain = [[0.0, 1.0], [0.0, 0.0], [0.0], [0.0, 0.0, 0.0]]
    wanted = [[s - e for e in row] for s, row in zip(scored, plain, strict=True)]
    near(found.advantage, by_token(wanted))
    words = ("algorithm.beta=0.1", "algorithm.kl_in_baseline=false", "algorithm.kl_credit=to_go")
    to_go = torch.cat([p.flip(0).cumsum(0).flip(0) for p in parts])
    near(algorithm(*words).token_advantages(step).advantage, by_token(BY_TURN) - to_go)
    alone = algorithm(*words[:2]).token_advantages(step).advantage
    near(
        alone,
        by_token(BY_TURN) - by_token([[t] * len(n) for t, n in zip(totals, LENGTHS, strict=True)]),
    )


@pytest.mark.parametrize(
    "words", [(), ("algorithm.policy_loss=clip", "algorithm.ratio_level=token")]
)
def test_the_gradient_is_the_credit_of_each_token_over_the_number_of_episodes(words):
    made, old = algorithm(*words), logprobs()[0]
    logp = old.clone().requires_grad_()
    step = step_tokens()
    sequence = SimpleNamespace(
        sequence_ids=step.sequence, mask=step.mask, num_sequences=4, behaviour_logp=None
    )
    advantage = made.token_advantages(step).advantage
    made.loss(LossInputs(logp, old, None, sequence, advantage, denominator=4.0)).total.backward()
    near(logp.grad, -by_token(BY_TURN) / 4)


@pytest.mark.parametrize(
    ("words", "key", "fix"),
    [
        (
            ("algorithm.normalize_advantages=true",),
            "normalize_advantages",
            "algorithm.normalize_advantages=false",
        ),
        (("algorithm.baseline=batch_mean",), "baseline", "algorithm.baseline=loo"),
        (("algorithm.advantage_scale=group",), "advantage_scale", "algorithm.advantage_scale=none"),
        (
            ("algorithm.normalize_rewards=true",),
            "normalize_rewards",
            "algorithm.normalize_rewards=false",
        ),
        (
            ("algorithm.reward_clip_range=[-1,1]",),
            "reward_clip_range",
            "algorithm.reward_clip_range=null",
        ),
        (("algorithm.zero_std_groups=drop",), "zero_std_groups", "algorithm.zero_std_groups=keep"),
        (
            ("algorithm.missing_eos_penalty={mode: replace, value: -1.0}",),
            "missing_eos_penalty",
            "algorithm.missing_eos_penalty={mode: none",
        ),
        (("algorithm.policy_loss=clip",), "ratio_level", "algorithm.ratio_level=token"),
        (("algorithm.dialect=trl",), "dialect", "algorithm.dialect=null"),
        (
            ("algorithm=ppo", "algorithm.ratio_level=token"),
            "turn_rewards",
            "algorithm.turn_rewards=sum",
        ),
        (("reward=unique_chars",), "turn_rewards", "agent=class reward=environment"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_key_and_a_way_out(words, key, fix):
    with pytest.raises(ConfigError) as caught:
        check.check_config(compose_config([*RUN, *words]))
    said = str(caught.value)
    assert f"algorithm.{key}" in said and f"fix      {fix}" in said, said


@pytest.mark.parametrize("how", ["last", "credit"])
def test_without_an_agent_no_turn_can_have_a_reward(how, sentence):
    words = ("+recipe=smoke", "algorithm.policy_loss=reinforce", f"algorithm.turn_rewards={how}")
    with pytest.raises(ConfigError) as caught:
        check.check_config(compose_config(words))
    assert_refused(caught, 2, f"algorithm.turn_rewards={how}")
    sentence(caught, folder=paths.CONF)


def test_a_run_with_credit_or_the_last_turns_reward_is_accepted():
    assert check.check_config(compose_config(RUN)).algorithm.by_token
    last = check.check_config(compose_config([*RUN, "algorithm.turn_rewards=last"]))
    assert not last.algorithm.by_token


def test_step_tokens_without_episodes_stay_as_they_were():
    made = batch()
    step, _ = collect_step_tokens(made, [(0, 0)])
    assert isinstance(step, StepTokens) and step.turn is None and step.turn_reward is None
