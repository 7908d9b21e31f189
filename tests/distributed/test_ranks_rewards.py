"""Rewards that fail on two ranks do what they do in one process, whatever `on_error` says."""

import asyncio
import math
import time
from dataclasses import replace
from typing import Any

import pytest
from cli_cases import strict
from fork_cases import on_ranks
from resume_cases import update_apart
from reward_cases import PLAIN, group, reward
from test_ranks import WORDS, spread

from rloo_cli.distributed.world import World, is_shared_error
from rloo_cli.generation import GeneratorBase
from rloo_cli.generation.common import across_ranks
from rloo_cli.rewards.engine.scoring import ScoringStep
from rloo_cli.utils.errors import RewardError
from rloo_cli.utils.files import read_json
from rloo_cli.utils.timers import StepTimer

pytestmark = pytest.mark.ranks

SHORT = ("max_steps=2", "eval.at_start=false", "eval.max_samples=2", "train.prompts_per_step=4",
         "algorithm.normalize_advantages=false")  # fmt: skip
# A step has four prompts of which each rank scores two; it fails on the first prompts' rows alone,
# so that one rank has all failures of the step.
REWARD = """
import math, time
tries = {}
def fails(prompts, completion_ids, trainer_state, **_):
    seen = []
    for prompt, ids in zip(prompts, completion_ids):
        bad = sum(map(ord, prompt)) % 4 == 0 and sum(ids) % 2 == 0
        if bad:
            key = (prompt, tuple(ids))
            tries[key] = tries.get(key, 0) + 1
            WHAT
        seen.append(float(sum(ids) % 7))
    return seen
"""
WHATS = {
    "raises": "raise KeyError('it is mine')",
    "is not a number": "seen.append(math.nan); continue",
    "is a word": "seen.append('good'); continue",
    "takes for ever": "time.sleep(3)",
    "succeeds when tried again": "\n            if tries[key] < 2: raise KeyError('once')",
}


def words(folder, what: str, *more: str) -> list[str]:
    (folder / "mine.py").write_text(REWARD.replace("WHAT", WHATS[what]))
    keys = ["reward=function", "reward.function.path=mine.py:fails", "reward.function.scope=row",
            "reward.function.max_error_rate=1"]  # fmt: skip
    return [*WORDS, *SHORT, *keys, *more]


CASES = [
    ("raises", "none"), ("raises", "-1.0"), ("is not a number", "none"), ("is a word", "-1.0"),
    ("takes for ever", "none"), ("succeeds when tried again", "raise"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
@pytest.mark.parametrize(("what", "on_error"), CASES)
def test_a_reward_that_fails_leaves_out_the_rows_that_one_process_leaves_out(
    forked, what, on_error, engine
):
    more = [f"reward.function.on_error={on_error}", "reward.function.retries=1"]
    more += ["reward.function.timeout_s=0.5"] if what == "takes for ever" else []
    one, two = (forked.folder / "runs" / name for name in ("one", "two"))
    assert forked(*words(forked.folder, what, *more), "name=one") == 0, forked.said()
    more += spread(engine)
    assert forked(*words(forked.folder, what, *more), "name=two", ranks=2) == 0, forked.said()
    assert update_apart(one, two) < 1e-4
    rows = [[r for r in strict(run / "metrics.jsonl") if "loss" in r] for run in (one, two)]
    rates = [[r["reward/function/error_rate"] for r in own] for own in rows]
    assert rates[0] == pytest.approx(rates[1])
    assert (max(rates[0]) > 0) == (what != "succeeds when tried again")
    assert [r["reward"] for r in rows[0]] == pytest.approx([r["reward"] for r in rows[1]], rel=1e-5)


@pytest.mark.parametrize(
    ("rate", "code"), [("0.02", 5), pytest.param("0.9", 0, marks=pytest.mark.slow)]
)
def test_too_many_failures_are_those_of_the_whole_step_and_said_once(forked, rate, code):
    own = words(forked.folder, "raises", "reward.function.on_error=none")
    own += [f"reward.function.max_error_rate={rate}", *spread("ddp"), "name=r"]
    assert forked(*own, ranks=2) == code, forked.said()
    said = forked.said()
    assert said.count("error: reward") == (code == 5), said
    if code:
        assert "reward.function.max_error_rate = 0.02" in said
        detail = read_json(forked.folder / "runs" / "r" / "debug" / "reward_error.json")
        assert "it is mine" in str(detail)


# Rows 0 to 7 of a step are rank 0's, 8 to 15 rank 1's: bad rows, the rate, whether the run stops.
RATES = [
    ((0, 1, 2), 0.2, False),  # 3 of 16, though 3 of the 8 that rank 0 has
    ((0, 1, 8, 9), 0.2, True),  # 4 of 16, though no rank has more than 2
    ((0, 8, 9), 0.2, False),
    ((0, 1, 2, 3), 0.2, True),
]


def rated(world: World) -> list[str]:
    """What each of RATES came to on this rank: "" or the error."""
    found = []
    for bad, rate, _ in RATES:

        def score(completion_ids: Any, bad: Any = bad, **_: Any) -> list[float]:
            if completion_ids[0][0] in bad:
                raise KeyError("mine")
            return [1.0]

        groups = [group("", "", "", "") for _ in range(4)]
        for row, rollout in enumerate(r for g in groups for r in g.rollouts):
            rollout.completion_ids = [row]
        one = reward(score, scope="row", on_error="none", max_error_rate=rate)
        try:
            across_ranks.sample_and_score(
                world, GeneratorBase(), groups,
                lambda places, arrived: [arrived(i) for i in range(len(places))],
                lambda own, one=one: ScoringStep([one], own, PLAIN, 4), StepTimer(),
            )  # fmt: skip
            found.append("")
        except RewardError as error:
            found.append(f"{error.problems[0].why}\n{is_shared_error(error)}")
    return found


def test_the_rate_that_may_fail_is_of_the_step_and_not_of_a_ranks_share(fast, tmp_path):
    one, other = on_ranks(fast, tmp_path, f"{__file__}:rated")
    assert one == other and [bool(text) for text in one] == [stops for *_, stops in RATES]
    for text, (bad, *_) in zip(one, RATES, strict=True):
        assert not text or f"{len(bad)} of 16 rows failed" in text
        assert not text or text.endswith("True")  # all ranks leave with it, and can save


class Unsendable(Exception):
    """An error that no other process can be sent as it is."""

    def __init__(self, one: object, two: object) -> None:
        super().__init__("mine")
        self.one = lambda: (one, two)


RAISED = (
    KeyError("mine"), AssertionError(), ZeroDivisionError("mine"), StopIteration(), SystemExit(0),
    SystemExit(3), GeneratorExit(), RecursionError("mine"), MemoryError(), OSError(28, "full"),
    TimeoutError("mine"), asyncio.CancelledError(), Unsendable(1, 2),
)  # fmt: skip
RETURNED: tuple[Any, ...] = (
    [], [1.0, 2.0], ["good"], [math.nan], [-math.inf], [1 + 2j], {"score": 1.0}, "1", [[1.0]], 3.0,
)  # fmt: skip
TOO_LATE = object()
FAILING = (*RAISED, *RETURNED, TOO_LATE)  # what each of these rewards does with one row of rank 1's


def score_or_fail(world: World, what: Any, on_error: Any) -> Any:
    """A step whose reward fails in one row: its scores and how many failed, or code and error."""

    def score(completion_ids: Any, **_: Any) -> Any:
        if completion_ids[0][0] != 9:
            return [float(completion_ids[0][0])]
        if isinstance(what, BaseException):
            raise what
        if what is TOO_LATE:
            time.sleep(20)
        return what

    groups = [group("", "", "", "") for _ in range(4)]
    for row, rollout in enumerate(r for g in groups for r in g.rollouts):
        rollout.completion_ids = [row]
    limit = 0.5 if what is TOO_LATE else 20.0
    mine = reward(score, scope="row", on_error=on_error, timeout_s=limit)
    try:
        scores = across_ranks.sample_and_score(
            world, GeneratorBase(), groups,
            lambda places, arrived: [arrived(i) for i in range(len(places))],
            lambda own: ScoringStep([mine], own, PLAIN, 4), StepTimer(),
        )  # fmt: skip
    except RewardError as error:
        return [error.code, error.problems[0].what]
    return [str(scores.raw.flatten().tolist()), scores.error_rate["mine"]]


def failed(world: World) -> list[Any]:
    """What each of FAILING comes to by each `on_error`, on all ranks, and in one process."""
    alone = replace(world, rank=0, size=1)
    return [
        [score_or_fail(ranks, what, on_error) for ranks in (world, alone)]
        for what in FAILING
        for on_error in ("raise", "none", -1.0)
    ]


def test_every_way_to_fail_on_one_of_two_ranks_comes_to_the_same_as_in_one_process(fast, tmp_path):
    one, other = on_ranks(fast, tmp_path, f"{__file__}:failed")
    assert one == other and len(one) == 3 * len(FAILING) > 60
    for number, (ranks, alone) in enumerate(one):
        stops = number % 3 == 0
        assert ranks == alone and (ranks[0] == 5) == stops, (FAILING[number // 3], ranks, alone)
        assert stops or ranks[1] == 1 / 16
