"""Rewards as people write them: the seeds' functions through `score`, and shipped rewards."""

import asyncio
import math
import os
import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from reward_cases import CHAT, PLAIN, shipped
from reward_cases import reward as reward_of

from rloo_cli.config import registry
from rloo_cli.data.batch import Group, Rollout
from rloo_cli.rewards.common import math_equal
from rloo_cli.rewards.common.text import last_boxed_content
from rloo_cli.rewards.engine.arguments import HIDDEN_COLUMNS, REWARD_KWARGS, RewardContext
from rloo_cli.rewards.engine.columns import check_reward_columns
from rloo_cli.rewards.engine.scoring import RewardFailed, score_groups
from rloo_cli.utils.errors import MachineError
from rloo_cli.utils.worker_pool import WorkerPool

CONF = Path(__file__).parents[2] / "conf" / "reward"


def group(*texts: str, ids: Any = None, prompt: str = "Say", **row: Any) -> Group:
    ids = ids or [[1] for _ in texts]
    rollouts = [Rollout(i, t, "stop", True, 0, 0) for t, i in zip(texts, ids, strict=True)]
    return Group(0, row, prompt, [1, 2], rollouts)


def values(reward: Any, *groups: Group, context: RewardContext = PLAIN) -> list[float | None]:
    flat = score_groups([reward], groups, context).raw.flatten().tolist()
    return [None if math.isnan(x) else x for x in flat]


def test_example_1_counts_tokens_under_either_name() -> None:
    step = group(" blue.", " in the sky.", ids=[[6303, 13], [304, 279, 12884, 13]])

    def documented(completions_ids, **kwargs):  # the name of TRL's documentation
        return [float(len(ids)) for ids in completions_ids]

    def passed(completion_ids, **kwargs):  # the name TRL really passes
        return [float(len(ids)) for ids in completion_ids]

    assert values(reward_of(documented), step) == values(reward_of(passed), step) == [2.0, 4.0]
    assert values(shipped("length_tokens"), step) == [2.0, 4.0]


def test_example_1_1_counts_characters() -> None:
    def reward_func(completions, **kwargs):
        return [float(len(completion)) for completion in completions]

    step = group(" blue.", " in the sky.")
    assert values(reward_of(reward_func), step) == [6.0, 12.0]
    assert values(shipped("length_chars"), step) == [6.0, 12.0]
    assert values(shipped("length_chars"), step, context=CHAT) == [6.0, 12.0]


def test_example_2_wants_the_answer_format_and_allows_newlines_in_it() -> None:
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"

    def format_reward_func(completions, **kwargs):
        contents = [completion[0]["content"] for completion in completions]
        return [1.0 if re.match(pattern, content) else 0.0 for content in contents]

    good = "<think>1 + 2 = 3, times 4 is 12.</think><answer>(1 + 2) * 4 = 12</answer>"
    step = group(good, "The sum of 3 and 1 is 4. So (3 + 1) * 2 = 8.")
    for reward in (reward_of(format_reward_func), shipped("answer_tags")):
        assert values(reward, step, context=CHAT) == [1.0, 0.0]
    lines = group(good.replace(" = 3", "\n= 3"))
    assert values(reward_of(format_reward_func), lines, context=CHAT) == [0.0]
    assert values(shipped("answer_tags"), lines, context=CHAT) == [1.0]
    assert values(shipped("regex", pattern=pattern), lines, context=CHAT) == [1.0]
    assert values(shipped("regex", pattern=pattern, dotall=False), lines) == [0.0]


def test_answer_tags_allow_white_space_between_the_blocks_only_when_told() -> None:
    step = group("<think>a</think>\n<answer>b</answer>\n")
    assert values(shipped("answer_tags"), step) == [0.0]
    assert values(shipped("answer_tags", white_space=True), step) == [1.0]


def test_example_3_compares_boxed_answers_with_matched_braces() -> None:
    first = group(r" The solution is \boxed{2}.", ground_truth="2")
    second = group(r" The solution is \boxed{6}.", ground_truth="5")
    reward = shipped("exact_match")
    assert values(reward, first, second) == [1.0, 0.0]
    assert values(reward, group(r"\boxed{\frac{1}{2}}", ground_truth=r"\frac{1}{2}")) == [1.0]
    assert values(reward, group(r"\boxed{1} or \boxed{\{2\}}", ground_truth=r"\{2\}")) == [1.0]
    assert values(reward, group(r"\boxed{x \}}", ground_truth=r"x \}")) == [1.0]
    assert values(reward, group("none", ground_truth="2")) == [0.0]
    assert values(reward, group(r"\boxed{2", ground_truth="2")) == [0.0]


def test_example_4_scores_each_row_of_a_mixed_data_set_by_its_task() -> None:
    def math_reward(prompts, completions, task, **kwargs):
        return [(1.0 if c == "4" else -1.0) if t == "math" else None
                for c, t in zip(completions, task, strict=True)]  # fmt: skip

    def code_reward(prompts, completions, task, **kwargs):
        return [(1.0 if "def" in c else -1.0) if t == "code" else None
                for c, t in zip(completions, task, strict=True)]  # fmt: skip

    step = [
        group("4", task="math"),
        group("def f(): pass", task="code"),
        group("5", task="math"),
        group("sorry", task="code"),
    ]
    both = [reward_of(math_reward, "math"), reward_of(code_reward, "code")]
    scores = score_groups(both, step, PLAIN)
    assert scores.raw.shape == (2, 4, 1)
    assert values(both[0], *step) == [1.0, None, -1.0, None]
    assert values(both[1], *step) == [None, 1.0, None, -1.0]
    assert (~scores.raw.isnan()).sum(dim=0).flatten().tolist() == [1, 1, 1, 1]
    assert not scores.warnings
    assert scores.error_rate == {"math": 0.0, "code": 0.0}


def test_example_5_starts_the_second_async_reward_before_the_first_ends() -> None:
    events: list[str] = []

    def make(name: str) -> Any:
        async def reward_func(completions, **kwargs):
            events.append(f"{name} starts")
            await asyncio.sleep(0.01)
            events.append(f"{name} ends")
            # The text: a list of messages is always true.
            return [1.0 if completion[0]["content"] else 0.0 for completion in completions]

        return reward_of(reward_func, name)

    scores = score_groups([make("a"), make("b")], [group("text", "")], CHAT)
    assert scores.raw.flatten(1).tolist() == [[1.0, 0.0], [1.0, 0.0]]
    assert events.index("b starts") < events.index("a ends")
    assert events.index("a starts") < events.index("b ends")


def test_example_6_counts_different_characters() -> None:
    assert values(shipped("unique_chars"), group("hello world", "aaa")) == [8.0, 1.0]


def test_example_7_adds_length_and_diversity() -> None:
    got = values(shipped("length_diversity"), group("a b a", "one two three four", ""))
    assert got == pytest.approx([0.06 + 2 / 3, 1.08, 0.0])


@pytest.mark.process
def test_example_8_accuracy_compares_fractions() -> None:
    step = group(r"So \boxed{\frac{1}{3}}", r"So \boxed{\frac{1}{2}}", solution=r"\frac{1}{3}")
    assert values(shipped("accuracy"), step) == [1.0, 0.0]
    assert values(shipped("accuracy"), step, context=CHAT) == [1.0, 0.0]
    assert values(shipped("accuracy"), group(r"So \boxed{0.5}", solution="1/2")) == [1.0]
    assert values(shipped("accuracy"), group(r"So \boxed{2}", solution=2)) == [1.0]


def test_an_unparseable_gold_answer_scores_nobody() -> None:
    step = group(r"\boxed{2}", solution="no number in here, sorry")
    assert values(shipped("accuracy"), step) == [None]
    assert values(shipped("accuracy"), group(r"\boxed{2}", solution=None)) == [None]


def test_reasoning_accuracy_reads_only_what_follows_the_reasoning() -> None:
    step = group(
        r"<think> hm </think> The final answer is \boxed{\frac{1}{3}}",
        r"<think> \boxed{\frac{1}{3}} </think> The final answer is \boxed{\frac{1}{2}}",
        r"<think> partial \boxed{\frac{1}{3}} but no end",
        r"<think> \boxed{\frac{1}{3}} </think> Surely.",
        solution=r"\frac{1}{3}",
    )
    assert values(shipped("reasoning_accuracy"), step) == [1.0, 0.0, 0.0, 0.0]


def test_an_answer_too_large_to_compute_is_wrong_and_stops_nothing() -> None:
    # One C call that holds Python's lock: no deadline in this process could end it.
    step = group(r"\boxed{9^{9^{9^9}}}", r"\boxed{4}", solution="4")
    assert values(shipped("accuracy", answer_timeout_s=1), step) == [0.0, 1.0]


@pytest.mark.process
def test_a_math_process_that_ends_by_itself_is_a_failure_and_not_a_zero(monkeypatch) -> None:
    # The message is no argument of its `answer`.
    broken = SimpleNamespace(prepare=os.getpid, start=os.getpid, answer=os.getpid)
    with monkeypatch.context() as patched:
        patched.setattr(math_equal, "_pool", WorkerPool(broken, "a broken math-verify", keep=1))
        with pytest.raises(RewardFailed, match=r"math-verify.* exit code 1"):
            values(shipped("accuracy"), group(r"\boxed{2}", solution="2"))
    assert values(shipped("accuracy"), group(r"\boxed{2}", solution="2")) == [1.0]


def test_without_math_verify_accuracy_names_the_line_that_installs_it(monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name in ("accuracy", "reasoning_accuracy"):
        with pytest.raises(MachineError, match=r"pip install 'rloo-cli\[math\]'"):
            shipped(name)


def test_example_9_scales_right_and_wrong_answers_by_length() -> None:
    right, wrong = r"\boxed{\frac{1}{3}}", r"\boxed{\frac{1}{2}}"
    lengths = [50, 0, 100, 200]
    step = group(
        *[right] * 4, *[wrong] * 4, ids=[[1] * n for n in lengths * 2], solution=r"\frac{1}{3}"
    )
    got = values(shipped("cosine_length", max_length=100), step)
    assert got == pytest.approx([0.75, 1.0, 0.5, 0.5, -0.75, -1.0, -0.5, -0.5])


def test_example_10_penalises_repeated_tokens() -> None:
    step = group("", "", "", ids=[[1, 2, 3, 4], [5, 5, 5, 5, 5], [5]])
    assert values(shipped("repetition", ngram=2), step) == [0.0, -0.75, 0.0]


def test_example_11_wants_a_closed_think_block() -> None:
    step = group(
        "<think>\nreasons\n</think>\nanswer",
        "<think>\nreasons\nanswer",
        "x <think>a</think>",
        "<think>a</think> <think>b</think>",
    )
    assert values(shipped("think_format"), step) == [1.0, 0.0, 0.0, 0.0]


def test_overlong_grows_from_the_soft_limit_to_the_hard_one() -> None:
    step = group(*[""] * 5, ids=[[1] * n for n in (80, 90, 100, 101, 0)])
    reward = shipped("overlong", max_length=100, soft_cache=20)
    assert values(reward, step) == [0.0, -0.5, -1.0, -1.0, 0.0]
    sharp = shipped("overlong", max_length=100, soft_cache=0)
    assert values(sharp, step) == [0.0, 0.0, 0.0, -1.0, 0.0]
    with pytest.raises(ValueError, match=r"soft_cache 101 .* 100"):
        shipped("overlong", max_length=100, soft_cache=101)


def test_regex_looks_where_it_is_told_and_refuses_what_does_not_compile() -> None:
    step = group("say Yes now", "yes", "no")
    assert values(shipped("regex", pattern="yes"), step) == [0.0, 1.0, 0.0]
    assert values(shipped("regex", pattern="yes", ignore_case=True), step) == [1.0, 1.0, 0.0]
    assert values(shipped("regex", pattern="Y.s|y", where="start"), step) == [0.0, 1.0, 0.0]
    assert values(shipped("regex", pattern="y", where="whole"), step) == [0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="not a regular expression"):
        shipped("regex", pattern="(")


@pytest.mark.parametrize(
    ("extract", "text", "gold", "expected"),
    [
        ("text", " 42 ", "42", 1.0),
        ("text", "it is 42", "42", 0.0),
        ("answer_tag", "<answer>a</answer> no <answer>\nb\n</answer>", "b", 1.0),
        ("last_line", "thus\n\n42\n", 42, 1.0),
        ("last_number", "first 7, then 1,234.", "1234", 1.0),
        ("last_number", "it is 1, 2", ["2", "3"], 1.0),
        ("last_number", "nothing", "2", 0.0),
        ("last_number", "it is .5", "0.5", 1.0),
        ("last_number", "it is 1/2", "1/2", 1.0),
        ("last_number", "it is 1/2", "2", 0.0),
        ("last_number", "it is 1e5.", "1e5", 1.0),
        ("last_number", "it is 1 234", "1,234", 1.0),
        ("last_number", "5-3", "3", 1.0),
        ("last_number", "5-3", "-3", 0.0),
        ("last_number", "it is \N{MINUS SIGN}5", "-5", 1.0),
        ("last_number", "x=-3.5e-2", "-3.5e-2", 1.0),
        ("last_number", "48/2 = 24", "24", 1.0),
        ("last_number", "12 apples, 100 pears", "100", 1.0),
        ("boxed", r"\boxed{2}", None, None),
        ("boxed", r"\boxed{}", "", None),
        ("boxed", "no box", [" ", None], None),
        ("boxed", r"\boxed{ }", ["", "x"], 0.0),
        ("last_number", "none", ",", None),
    ],
)
def test_exact_match_extracts(extract: str, text: str, gold: Any, expected: float | None) -> None:
    reward = shipped("exact_match", extract=extract, column="answer")
    assert values(reward, group(text, answer=gold)) == [expected]


def test_the_last_box_is_found_in_one_pass() -> None:
    assert last_boxed_content(r"\boxed{1} \boxed{a {\boxed{2}} \} b") == "2"
    assert last_boxed_content(r"\boxed{1} } \\boxed{3} \boxed{\}") == "3"
    start = time.process_time()
    assert last_boxed_content("\\boxed{" * 20_000) is None  # by the second that took 600 s
    assert time.process_time() - start < 5


def test_exact_match_reads_the_gold_answer_out_of_a_solution() -> None:
    keys = {"extract": "last_number", "gold_extract": "last_number", "column": "answer"}
    reward = shipped("exact_match", **keys)
    gold = "He has 3 + 4 = <<3+4=7>>7 of 1,007.\n#### 1,007"
    step = [group("so 1007", "7", answer=gold), group("7", "8", answer="nobody knows")]
    assert values(reward, *step) == [1.0, 0.0, None, None]


NO_GOLD = {"none": None, "empty": "", "blank": " \n", "list": [], "blanks": ["", None, " \t"]}
WITH_GOLD = {
    "contains": ({"column": "gold"}, "keywords"),
    "exact_match": ({"column": "gold"}, ""),
    "accuracy": ({"column": "gold"}, r"\boxed{2}"),
    "reasoning_accuracy": ({"column": "gold"}, "<think> no end"),
    "cosine_length": ({"column": "gold", "max_length": 100}, r"\boxed{2}"),
    "ifeval": ({"column": "gold", "arguments_column": "gold"}, "a"),
    "code_tests": ({"column": "gold", "sandbox": "unsafe_subprocess"}, "no code"),
    "judge": ({"template": "{completion} {gold}", "model": "m", "base_url": "http://x"}, "a"),
}


@pytest.mark.process
@pytest.mark.parametrize("gold", NO_GOLD.values(), ids=NO_GOLD)
@pytest.mark.parametrize("name", WITH_GOLD)
def test_a_gold_answer_that_is_empty_does_not_apply(name: str, gold: Any) -> None:
    keys, text = WITH_GOLD[name]
    if name == "code_tests" and isinstance(gold, list):
        pytest.skip("a list without a test is refused by its row (test_code_tests.py)")
    assert values(shipped(name, **keys), group(text, gold=gold)) == [None]


def test_every_reward_that_reads_a_column_is_in_the_list_of_those_with_a_gold_answer() -> None:
    names = {n for n in registry.registry_names("rewards")
             if hasattr(registry.registered_module("rewards", n), "needs")}  # fmt: skip
    # reasoning_gym is tested with its package; http and model hand columns to a service or model.
    assert names - {"reasoning_gym", "http", "model"} == {*WITH_GOLD}


def test_the_empty_ones_of_several_gold_answers_do_not_count() -> None:
    assert values(shipped("contains", column="gold"), group("a x", "a", gold=["", "x"])) == [1, 0]
    step = group(r"\boxed{2}", r"\boxed{3}", r"\boxed{4}", gold=["", "2", "3"])
    assert values(shipped("accuracy", column="gold", answer_timeout_s=20), step) == [1.0, 1.0, 0.0]
    exact = shipped("exact_match", column="gold", extract="text")
    assert values(exact, group("", "x", gold=["", "x"])) == [0, 1]
    assert values(shipped("contains", column="gold"), group("a 0", "a", gold=0)) == [1, 0]


def test_every_reward_has_a_yaml_a_docstring_and_known_columns() -> None:
    needed = {"regex": {"pattern": "x"}, "function": {"path": f"{__file__}:shipped"}}
    needed |= {name: {"max_length": 100} for name in ("overlong", "cosine_length")}
    names = registry.registry_names("rewards")
    entries = [
        entry for p in CONF.glob("*.yaml") for entry in yaml.safe_load(p.read_text()).values()
    ]
    assert set(names) == {entry["type"] for entry in entries}
    needed |= {"model": {"path": "make:tiny_reward"}}
    for name in names:
        assert registry.registered_module("rewards", name).__doc__
        if name == "reasoning_gym" and find_spec(name) is None:
            continue  # its own tests are skipped, too, and say so
        reward = shipped(name, **needed.get(name, {}))
        if name != "function":
            columns = ["solution", "ground_truth", "keywords", "tests", "entry"]
            columns += ["instruction_id_list", "kwargs"]
            assert set(reward.required_columns) <= {*columns}
            check_reward_columns([reward], columns)
    assert not REWARD_KWARGS & (HIDDEN_COLUMNS - {"completion_ids"})


@pytest.mark.process
def test_no_reward_file_needs_torch() -> None:
    code = (
        "import sys; from rloo_cli.config import registry; import rloo_cli.rewards.engine.build;"
        "[registry.registered_module('rewards', n).Config for n in "
        "registry.registry_names('rewards')];"
        "sys.exit('torch' in sys.modules or 'math_verify' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0
