"""A key that names a column may name a field inside of one: `reward_model.ground_truth`."""

import json
from typing import Any

import pytest
from assert_refused import assert_refused
from cli_cases import Rloo
from loop_cases import checked, make
from prompt_cases import config, tokenizer
from reward_cases import CHAT, group, shipped

from rloo_cli.config import template
from rloo_cli.config.column_names import column_of_field, field_value, is_field_of_rows
from rloo_cli.data import dataset, prompts, splits
from rloo_cli.evaluation.judges.pairs import check_reference_column, reference_text
from rloo_cli.rewards.engine.columns import check_reward_splits
from rloo_cli.rewards.engine.scoring import score_groups
from rloo_cli.train.supervised.rows import _require_column
from rloo_cli.utils.errors import DataError

ROWS: list[dict[str, Any]] = [
    {
        "task": {"text": f"p{i}", "level": str(i % 3)},
        "reward_model": {"ground_truth": f"g{i}", "style": {"name": "rule"}},
        "extra": None if i == 2 else {"i": i},
    }
    for i in range(6)
]
HOW = pytest.mark.parametrize("how", [{}, {"streaming": True, "max_samples": 9}], ids=["", "rows"])


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return path


def opened(path, **changes):
    settings = config(path=str(path), **({"prompt_column": "task.text"} | changes))
    return dataset.open_split(settings, "train"), settings


@HOW
def test_prompts_and_filters_read_nested_fields(file, how):
    split, settings = opened(file, filter={"task.level": ["1", "2"]}, **how)
    assert split.filtered_out == 2
    found = prompts.tokenize_prompts(split.dataset, settings, tokenizer(), {}, None, 1)
    assert found.prompts == ["p1", "p2", "p4", "p5"]
    assert [*found.examples[0]] == ["task", "reward_model", "extra"]


@HOW
def test_a_field_is_renamed_and_converted(file, how):
    keys = {"columns": {"reward_model.ground_truth": "answer"}, "types": {"task.level": "int"}}
    split, _ = opened(file, **keys, filter={"task.level": [1, 2]}, **how)
    assert split.dataset["answer"][:] == ["g1", "g2", "g4", "g5"]
    assert split.dataset["reward_model"][0] == ROWS[1]["reward_model"]
    split, _ = opened(file, columns={"extra.i": "number"}, **how)
    assert split.dataset["number"][:] == [0, 1, None, 3, 4, 5]


@HOW
def test_a_field_that_no_row_has_is_refused_like_a_column(file, how):
    for where, changes, key in (
        ("data.prompt_column", {"prompt_column": "task.txt"}, "'task.txt'"),
        ("data.filter", {"filter": {"tusk.level": 1}}, "'tusk.level'"),
        ("data.columns", {"columns": {"tusk.level": "level"}}, "'tusk.level'"),
    ):
        with pytest.raises(DataError) as caught:
            opened(file, **changes, **how)
        assert_refused(caught, 4, key, where=where)


def test_a_column_of_exactly_that_name_comes_first():
    row = {"a.b": 1, "a": {"b": 2, "c": {"d": 3}}, "a.c": {"d": 4}, "n": None, "s": "x"}
    assert field_value(row, "a.b") == 1 and field_value(row, "a.c.d") == 4
    assert field_value(row, "n.x.y") is None
    assert field_value({"a": {"c": {"d": 3}}}, "a.c.d") == 3
    for wrong in ("b", "b.a", "s.x"):
        with pytest.raises(KeyError):
            field_value(row, wrong)
    assert column_of_field(row, "a.c.d") == "a.c" and column_of_field(row, "b.c") is None
    assert is_field_of_rows([{"a": None}, row], "a.b") and not is_field_of_rows([row], "s.x")


def test_rewards_get_nested_fields_in_the_check_and_in_the_call(file):
    split, settings = opened(file)
    run = checked((), (f"data.path={file}", "data.prompt_column=task.text"))
    good = shipped("exact_match", column="reward_model.ground_truth", extract="text",
                   only={"task.level": "1"})  # fmt: skip
    check_reward_splits(run, {None: split}, [good])
    wrong = shipped("exact_match", column="reward_model.groundtruth")
    with pytest.raises(DataError) as caught:
        check_reward_splits(run, {None: split}, [wrong])
    assert_refused(caught, 4, "'reward_model.groundtruth'")
    found = prompts.tokenize_prompts(split.dataset, settings, tokenizer(), {}, None, 1)
    groups = [group("g1", "x", **found.examples[1]), group("g2", "x", **found.examples[2])]
    scores = score_groups([good], groups, CHAT).raw
    assert scores[0, 0].tolist() == [1.0, 0.0] and scores[0, 1].isnan().all()


def test_templates_and_references_read_nested_fields(file):
    filled = template.fill_template("{task.text}: {reward_model.style.name}", ROWS[3])
    assert filled == "p3: rule"
    assert template.template_names("{a.b} {c}") == ["a.b", "c"]
    split, settings = opened(file, template="{prompt} {task.level}")
    found = prompts.tokenize_prompts(split.dataset, settings, tokenizer(), {}, None, 1)
    assert found.prompts[:2] == ["p0 0", "p1 1"]
    check_reference_column("", found, "reward_model.ground_truth", "key")
    assert reference_text(found.examples[4], "reward_model.ground_truth") == "g4"
    with pytest.raises(DataError) as caught:
        check_reference_column("", found, "reward_model.gone", "key")
    assert_refused(caught, 4, "'reward_model.gone'")


def test_completions_of_sft_and_preferences_may_be_nested_fields(file):
    data = opened(file)[0].dataset
    column = _require_column(data, "reward_model.ground_truth", "sft.completion_column")
    assert list(column) == [row["reward_model"]["ground_truth"] for row in ROWS]


def test_a_run_takes_dotted_names_on_the_command_line(file, tmp_path):
    words = (f"data.path={file}", "data.prompt_column=task.text", "data.eval_split=null",
             "data.columns={extra.i: number}", "reward=exact_match",
             "reward.exact_match.column=reward_model.ground_truth")  # fmt: skip
    run = make(tmp_path, *words)
    assert run.prompts.examples[3]["number"] == 3
    assert splits.split_configs(run.config, True)[None].columns == {"extra.i": "number"}


def test_rloo_reward_test_reads_a_nested_gold_answer(rloo: Rloo, file):
    words = (f"data.path={file}", "data.prompt_column=task.text", "data.eval_split=null",
             "reward.exact_match.column=reward_model.ground_truth",
             "reward.exact_match.extract=text")  # fmt: skip
    done = rloo("reward", "test", "exact_match", "+recipe=smoke", *words, "--json")
    assert done.code in (0, 20) and not done.err, done.said  # 20: it found something to say
    assert "ground_truth" not in done.err and '"error"' not in done.out
