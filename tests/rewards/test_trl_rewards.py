"""The six rewards that TRL ships score as ours of the same kind do, row by row."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from reward_cases import CHAT
from test_reward_examples import group, shipped, values

pytestmark = pytest.mark.trl

ROWS = 200


def fraction(draw: random.Random) -> tuple[int, int]:
    return draw.randint(-9, 20), draw.randint(2, 9)


def rows() -> list[tuple[str, str, list[int]]]:
    """A gold answer, a completion and its ids: right and wrong answers, in several spellings."""
    draw, found = random.Random(7), []
    for _ in range(ROWS):
        top, bottom = fraction(draw)
        other, below = (top, bottom) if draw.random() < 0.5 else fraction(draw)
        wrote = draw.choice([
            rf"\boxed{{\frac{{{other}}}{{{below}}}}}", rf"so it is $\frac{{{other}}}{{{below}}}$",
            rf"$\boxed{{{other}/{below}}}$", rf"\boxed{{{other / below}}}", f"{other}/{below}", "",
        ])  # fmt: skip
        opened, closed = draw.choice([("<think>", "</think>"), ("", "</think>"), ("<think>", ""),
                                      ("", ""), ("\n<think>\n", "\n</think>\n")])  # fmt: skip
        text = f"{opened}I try {top}.{closed}{wrote}"
        ids = [draw.randint(1, 6) for _ in range(draw.randint(1, 40))]
        gold = draw.choice([rf"$\frac{{{top}}}{{{bottom}}}$", f"${top}/{bottom}$"])
        found.append((gold, text, ids))
    return found


def by_trl(function: Callable[..., Any]) -> list[float | None]:
    golds, texts, ids = zip(*rows(), strict=True)
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    return function(completions=completions, solution=list(golds), completion_ids=list(ids))


def by_us(name: str, **keys: Any) -> list[float | None]:
    reward = shipped(name, **keys)
    groups = [group(text, ids=[ids], solution=gold) for gold, text, ids in rows()]
    return values(reward, *groups, context=CHAT)


def same(ours: list[float | None], theirs: list[float | None]) -> None:
    assert len(ours) == len(theirs) == ROWS
    assert len(set(theirs)) > 1  # else nothing is told apart
    different = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True))
                 if a is None or b is None or abs(a - b) > 1e-6]  # fmt: skip
    assert [(i, rows()[i], ours[i], theirs[i]) for i in different if ours[i] is not theirs[i]] == []


def test_accuracy_is_that_of_trl() -> None:
    from trl.rewards import accuracy_reward

    same(by_us("accuracy", timeout_s=200.0), by_trl(accuracy_reward))


def test_reasoning_accuracy_is_that_of_trl() -> None:
    from trl.rewards import reasoning_accuracy_reward

    same(by_us("reasoning_accuracy", timeout_s=200.0), by_trl(reasoning_accuracy_reward))


def test_cosine_length_is_that_of_trl() -> None:
    from trl.rewards import get_cosine_scaled_reward

    same(
        by_us("cosine_length", max_length=30, timeout_s=200.0), by_trl(get_cosine_scaled_reward(30))
    )


def test_think_format_is_that_of_trl() -> None:
    from trl.rewards import think_format_reward

    same(by_us("think_format"), by_trl(think_format_reward))


def test_the_penalty_of_long_completions_is_that_of_trl() -> None:
    from trl.rewards import get_soft_overlong_punishment

    same(
        by_us("overlong", max_length=30, soft_cache=12),
        by_trl(get_soft_overlong_punishment(30, 12)),
    )


def test_the_penalty_of_repetition_is_that_of_trl() -> None:
    from trl.rewards import get_repetition_penalty_reward

    same(by_us("repetition", ngram=2), by_trl(get_repetition_penalty_reward(2)))
