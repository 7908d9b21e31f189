"""Whatever a completion says and a reward gives: scored, shown and kept, or one clear error."""

import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from fuzz_cases import SOUND_TEXTS, TEXTS, TREES, clear_error, count_case, effort
from hypothesis import given
from hypothesis import strategies as st
from reward_cases import PLAIN, group, run, shipped

from rloo_cli.agents.common import call_parsers
from rloo_cli.rewards.engine.scoring import score_groups
from rloo_cli.utils.console import show_control_characters

ESCAPE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
PARSERS = ("hermes", "llama3_json", "mistral", "pythonic")
CALLS = st.lists(
    st.one_of(
        TEXTS, TREES.map(lambda tree: json.dumps(tree)),
        st.sampled_from([
            "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", '{"name":',
            '"f"', '"arguments":', "{", "}", "[", "]", "f(", ")", "a=1", ",", "NaN", "1e999",
            "[" * 5000, '"' * 3, "f(x=-1)", "f(**{})", "f(x:=1)", "1" * 5000, "(" * 300,
        ]),
    ),
    max_size=6,
).map("".join)  # fmt: skip


@effort(60)
@given(CALLS, st.sampled_from(PARSERS))
def test_whatever_a_turn_says_its_calls_are_read_or_it_is_told_why_not(
    text: str, name: str
) -> None:
    count_case()
    found = getattr(call_parsers, f"parse_{name}")(text)
    for call in found.calls:
        assert type(call["name"]) is str
        json.dumps(call["arguments"], allow_nan=False)  # they go to another process as JSON
    assert all(type(why) is str for why in found.unreadable)


ENTRIES = st.one_of(
    TREES, st.floats(), st.integers(-(10**400), 10**400), st.binary(max_size=3),
    st.floats(width=32).map(np.float32), st.floats(width=32).map(torch.tensor),
    st.sampled_from([np.array([1.0, 2.0]), torch.ones(1), np.bool_(True), 1j, object(), {1}]),
)  # fmt: skip
RETURNED = st.one_of(
    st.lists(ENTRIES, min_size=2, max_size=2),
    st.lists(st.floats(), min_size=2, max_size=2).map(np.array),
    st.lists(st.floats(), min_size=2, max_size=2).map(torch.tensor),
    st.lists(ENTRIES, max_size=3), st.lists(ENTRIES, max_size=3).map(tuple), ENTRIES,
)  # fmt: skip


@effort(60)
@given(RETURNED, st.booleans(), st.sampled_from(["raise", "none"]))
def test_whatever_a_reward_returns_becomes_finite_scores_or_a_failure(
    returned: Any, nan_is_none: bool, on_error: str
) -> None:
    with clear_error():
        found = run(
            lambda **_: returned, group("a", "b"), nan_is_none=nan_is_none, on_error=on_error
        )
        scores = found.raw.flatten().tolist()
        assert len(scores) == 2 and all(abs(x) <= 1e30 for x in scores if x == x)


SHIPPED: dict[str, dict[str, Any]] = {
    "answer_tags": {}, "contains": {}, "exact_match": {}, "length_chars": {}, "ifeval": {},
    "regex": {"pattern": "(a|b)+$"}, "repetition": {}, "think_format": {}, "unique_chars": {},
    "cosine_length": {"max_length": 8}, "length_diversity": {},
}  # fmt: skip
COLUMN = st.one_of(SOUND_TEXTS, TREES)


@pytest.fixture(scope="module")
def rewards() -> dict[str, Any]:
    """Shipped rewards, as their YAML has them."""
    return {name: shipped(name, **keys) for name, keys in SHIPPED.items()}


@pytest.mark.wide
@effort(30)
@given(TEXTS, TEXTS, COLUMN, COLUMN)
def test_whatever_completions_and_columns_hold_shipped_rewards_score_or_say_why_not(
    rewards: dict[str, Any], first: str, second: str, answer: Any, other: Any
) -> None:
    columns = {"answer": answer, "instruction_id_list": other, "kwargs": answer}
    for name, reward in rewards.items():
        with clear_error():
            raw = score_groups([reward], [group(first, second, **columns)], PLAIN).raw
            assert all(abs(x) <= 1e30 for x in raw.flatten().tolist() if x == x), name


@effort(40)
@given(TEXTS)
def test_no_text_moves_the_cursor(text: str) -> None:
    count_case()
    assert not ESCAPE.search(show_control_characters(text).replace("\n", "").replace("\t", ""))
