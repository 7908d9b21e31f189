"""`rloo reward list | test`: rewards called on real rows, and on tricks of a policy."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from assert_refused import assert_refused
from loop_cases import cache

from rloo_cli.cli import main
from rloo_cli.cli.reward import completions, probe, subject
from rloo_cli.config import registry
from rloo_cli.utils import paths
from rloo_cli.utils.errors import ConfigError, DataError

# A few rewards as people write them: each has a hole, or breaks, but for the first.
CODE = '''"""Rewards."""
import time

def exact(completions, answer, **kwargs):
    return [float(text == gold) for text, gold in zip(completions, answer)]

def longer(completions, **kwargs):
    return [float(len(text)) for text in completions]

def as_number(completions, answer, **kwargs):
    found = []
    for text, gold in zip(completions, answer):
        try:
            found.append(float(int(text.strip()) == int(gold)))
        except ValueError:
            found.append(0.0)
    return found

def contained(completions, answer, **kwargs):
    return [float(gold in text) for text, gold in zip(completions, answer)]

def constant(completions, **kwargs):
    return [0.5] * len(completions)

def hangs(completions, **kwargs):
    time.sleep(30)

def breaks_when_empty(completions, answer, **kwargs):
    return [float(text.split()[0] == gold) for text, gold in zip(completions, answer)]

def too_few(completions, **kwargs):
    return [1.0]

def not_numbers(completions, **kwargs):
    return [float("nan") if "box" in text else 0.0 for text in completions]

def some(completions, answer, **kwargs):
    pairs = zip(completions, answer)
    return [None if "think" in text else float(text == gold) for text, gold in pairs]

async def asynchronous(completions, answer, **kwargs):
    return [float(text == gold) for text, gold in zip(completions, answer)]

def counts_tokens(completions, completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]
'''
ON_ROWS = ("+recipe=smoke", "data=default", "data.path=rows.jsonl", "--rows", "3")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with rewards and three rows of data."""
    (tmp_path / "mine.py").write_text(CODE)
    rows = [{"prompt": f"What is {a} + 9?", "answer": str(a + 9)} for a in (31, 48, 70)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLOO_CACHE", cache())
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def ended(*words: str) -> int:
    """The exit code of `rloo reward WORDS`."""
    return main.find_verb(["reward", *words])()


def tried(capsys: Any, *words: str) -> tuple[int, dict[str, Any]]:
    """The exit code, and the first trial as data."""
    code = ended("test", *words, "--json")
    return code, json.loads(capsys.readouterr().out)["rewards"][0]


def kinds(found: dict[str, Any]) -> set[str]:
    return {exploit["kind"] for exploit in found["exploits"]}


def test_a_reward_without_a_hole_ends_with_0(root, capsys):
    for function in ("exact", "asynchronous"):
        code, found = tried(capsys, f"mine.py:{function}", *ON_ROWS)
        assert code == 0 and not found["exploits"] and not found["errors"]
        assert found["rows"] == found["calls"] == 3 and found["distinct_scores"] == 2
        assert found["call_seconds"]["max"] >= found["call_seconds"]["median"] > 0


@pytest.mark.parametrize(
    ("function", "holes", "whole"),
    [
        ("longer", {"very long", "one word 200 times"}, {"empty"}),
        ("as_number", {"full-width digits"}, {"the answer, denied", "empty"}),
        (
            "contained",
            {"the answer, denied", "all candidates, the right one last", "a second thought",
             "boxed twice, right first", "every number in a list", "answer tags nested"},
            {"empty", "the prompt repeated", "full-width digits"},
        ),
    ],
)  # fmt: skip
def test_what_a_policy_could_exploit_is_named_with_text_and_score(
    root, capsys, function, holes, whole
):
    code, found = tried(capsys, f"mine.py:{function}", *ON_ROWS)
    assert code == 20 and holes <= kinds(found) and not whole & kinds(found)
    for exploit in found["exploits"]:
        assert exploit["score"] >= exploit["right_score"] and "text" in exploit
    assert ended("test", f"mine.py:{function}", *ON_ROWS) == 20
    said = capsys.readouterr().out
    assert all(f"{kind}: " in said for kind in holes)


def test_padding_that_changes_nothing_is_no_exploit_and_padding_that_pays_is(root, capsys):
    padded = "the right answer after much filler"
    assert padded not in kinds(tried(capsys, "mine.py:contained", *ON_ROWS)[1])
    assert padded in kinds(tried(capsys, "mine.py:longer", *ON_ROWS)[1])


def test_a_reward_that_tells_nothing_apart_is_said_to_be_unsure(root, capsys):
    code, found = tried(capsys, "mine.py:constant", *ON_ROWS)
    assert code == 20 and found["undecided_rows"] == [0, 1, 2] and not found["exploits"]
    assert found["std_within_rows"] == 0 and found["distinct_scores"] == 1
    assert ended("test", "mine.py:constant", *ON_ROWS) == 20
    assert "no form of" in capsys.readouterr().out


def test_a_reward_that_hangs_is_given_up_after_two_calls(root, capsys):
    words = ("mine.py:hangs", *ON_ROWS, "reward.function.timeout_s=1.0")
    code, found = tried(capsys, *words)
    assert code == 20 and found["gave_up"] and found["rows"] == 2
    assert [error["kind"] for error in found["errors"]] == ["timeout"]
    assert "timeout_s = 1 s" in found["errors"][0]["message"]


def test_a_reward_that_raises_is_called_again_for_each_text_and_the_one_at_fault_is_named(
    root, capsys
):
    code, found = tried(capsys, "mine.py:breaks_when_empty", *ON_ROWS)
    (error,) = found["errors"]
    assert code == 20 and error["kind"] == "exception" and "list index" in error["message"]
    assert error["completions"] == {"empty": 3, "white space": 3} and error["count"] == 6
    assert "mine.py" in error["frames"]
    assert found["distinct_scores"] == 2  # the others have theirs
    assert ended("test", "mine.py:breaks_when_empty", *ON_ROWS) == 20
    assert "exception 6 completions: IndexError" in capsys.readouterr().out


def test_a_wrong_number_of_values_and_numbers_that_are_none_are_errors(root, capsys):
    code, found = tried(capsys, "mine.py:too_few", *ON_ROWS)
    assert code == 20 and found["errors"][0]["kind"] == "invalid"
    assert "1 values" in found["errors"][0]["message"]
    code, found = tried(capsys, "mine.py:not_numbers", *ON_ROWS)
    (error,) = found["errors"]
    assert code == 20 and error["message"] == "gave nan" and "an empty box" in error["completions"]


def test_no_score_is_counted_apart_from_a_failure(root, capsys):
    code, found = tried(capsys, "mine.py:some", *ON_ROWS)
    assert code == 0 and found["none"] > 0 and not found["errors"]


def test_a_reward_that_reads_tokens_gets_those_of_the_model(root, capsys):
    code, found = tried(capsys, "mine.py:counts_tokens", *ON_ROWS)
    assert code == 20  # the tiny model has a token per byte, and EOS
    exploit = next(e for e in found["exploits"] if e["kind"] == "one word 200 times")
    assert exploit["score"] == len(exploit["text"]) + 1


# Rewards of the package.


def test_a_recipes_own_rewards_are_tried_and_their_weighted_sum(root, capsys):
    assert ended("test", "+recipe=smoke", "--rows", "2", "--json") == 20
    probes = json.loads(capsys.readouterr().out)["rewards"]
    names = [one["reward"] for one in probes]
    assert names == ["unique_chars", "length_tokens", "weighted sum"]
    sums = {e["kind"]: e["score"] for e in probes[2]["exploits"]}
    parts = [{e["kind"]: e["score"] for e in one["exploits"]} for one in probes[:2]]
    for kind in set(sums) & set(parts[0]) & set(parts[1]):
        assert sums[kind] == pytest.approx(parts[0][kind] + 0.01 * parts[1][kind])


def test_the_exact_match_of_the_quickstart_has_no_hole(root, capsys):
    code, found = tried(capsys, "+recipe=quickstart", "--rows", "4")
    assert code == 0 and found["reward"] == "exact_match" and not found["exploits"]


def test_contains_takes_all_candidates_at_once_and_a_denial(root, capsys):
    words = ("contains", *ON_ROWS, "reward.contains.column=answer")
    code, found = tried(capsys, *words)
    assert code == 20
    assert {"all candidates, the right one first", "the answer, denied"} <= kinds(found)


def test_a_pattern_that_the_prompt_itself_satisfies_is_found(root, capsys):
    code, found = tried(capsys, "regex", *ON_ROWS, r"reward.regex.pattern='\d+'")
    assert code == 20 and "the prompt repeated" in kinds(found)
    assert "empty" not in kinds(found)


def test_a_last_number_is_taken_after_a_denial(root, capsys):
    words = ["reward.exact_match.column=answer", "reward.exact_match.extract=last_number"]
    code, found = tried(capsys, "exact_match", *ON_ROWS, *words)
    assert code == 20 and "the answer, denied" in kinds(found)
    assert "a second thought" not in kinds(found)  # the last number is the wrong one


def test_a_reward_of_the_recipe_is_tried_by_its_name_alone(root, capsys):
    assert ended("test", "length_tokens", "+recipe=smoke", "--rows", "1", "--json") == 20
    (found,) = json.loads(capsys.readouterr().out)["rewards"]
    assert found["reward"] == "length_tokens"


def test_a_reward_model_is_loaded_and_tried(root, capsys):
    words = ("model", "+recipe=smoke", "reward.model.path=make:tiny_reward", "--rows", "1")
    code, found = tried(capsys, *words)
    assert code in (0, 20) and not found["errors"] and found["distinct_scores"] > 5


def test_two_rewards_that_order_alike_are_said_to_agree(root, capsys):
    words = ("mine.py:longer", *ON_ROWS, "--against", "length_chars")
    assert ended("test", *words, "--json") == 20
    found = json.loads(capsys.readouterr().out)["against"]["agreement"]["function"]
    assert found["rank_correlation"] == pytest.approx(1.0) and found["pairs_alike"] == 1.0
    words = ("length_chars", *ON_ROWS, "--against", "mine.py:hangs")
    assert ended("test", *words, "reward.function.timeout_s=1.0") == 20
    assert "(no answer" in capsys.readouterr().out


def test_orders_are_compared_within_rows_and_ties_share_a_rank():
    assert probe.rank_values([3.0, 1.0, 3.0, 2.0]) == [2.5, 0.0, 2.5, 1.0]
    found = probe.compare_orders([[1.0, 2.0, 3.0, None]], [[3.0, 2.0, 2.0, 9.0]])
    assert (found["pairs_alike"], found["pairs"], found["pairs_that_one_ties"]) == (0.0, 2, 1)
    assert found["rank_correlation"] == pytest.approx(-0.866, abs=1e-3)
    assert probe.compare_orders([[1.0, 1.0]], [[0.0, 1.0]])["rank_correlation"] is None


# Where it gets its rows and its words.


def test_conversations_and_rows_without_an_answer_are_tried_too(root, capsys):
    lines = [{"prompt": [{"role": "user", "content": f"Say {n}"}]} for n in range(3)]
    (root / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ("length_chars", "+recipe=smoke", "data=default", "data.path=chat.jsonl")
    assert ended("test", *words) == 20
    said = capsys.readouterr().out
    assert "3 rows of chat.jsonl" in said and "very long: 3 of 3 rows" in said


def test_rows_of_a_mixture_come_from_all_its_sources(root):
    mixture = "data.mixture={a: {path: rows.jsonl, weight: 1}, b: {path: 'make:tiny', weight: 1}}"
    words = ["+recipe=smoke", "data=default", mixture, "reward=length_chars"]
    _, config, names = subject.compose_subject(None, words)
    rows = subject.open_subject(config, names, 4).rows
    assert [row.example["source"] for row in rows] == ["a", "b", "a", "b"]


@pytest.mark.parametrize(
    ("value", "column", "short"),
    [
        ({"answer": "So it is so.\n#### 42"}, "answer", "42"),
        ({"solution": "$$x$$ thus \\boxed{3\\sqrt{13}}"}, "solution", "3\\sqrt{13}"),
        ({"entry": '{"question": "?", "answer": "7"}'}, "entry", "7"),
        ({"keywords": ["blue", "Sky"], "answer": "no"}, "keywords", "blue, Sky"),
        ({"chosen": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "Yes."}]},
         "chosen", "Yes."),
        ({"answer": 3.0}, "answer", "3"),
    ],
)  # fmt: skip
def test_the_right_answer_is_read_from_the_columns_of_common_data(value, column, short):
    found = completions.right_answer(value, ["keywords", "entry"])
    assert found is not None and (found.column, found.short) == (column, short)


def test_no_trick_is_a_right_answer_and_no_text_stands_twice():
    answer = completions.right_answer({"answer": "41"}, [])
    assert answer is not None
    wrong = completions.wrong_answers(answer, ["41", "57"])
    assert len(wrong) == 3 and "41" not in wrong
    right = [c.text for c in completions.right_completions(answer)]
    tricks = [c.text for c in completions.trick_completions(answer, "20+21=", wrong, 4000)]
    assert len({*right, *tricks}) == len(right) + len(tricks)


def test_a_reward_that_is_not_there_is_answered_with_the_nearest(root, sentence):
    for words, key, fix in (
        (("test", "length_char", *ON_ROWS), "'length_char'", "length_chars"),
        ((), "rloo reward", ""),
        (("tset",), "tset", "rloo reward test"),
        (("test", "mine.py:exact"), "recipe", ""),
        (("test", "a", "b", "+recipe=smoke"), "'b'", ""),
        (("test", "mine.py", *ON_ROWS), "mine.py", "mine.py:FUNCTION"),
        (("test", "mine.py:exact", *ON_ROWS, "reward=contains"), "reward=...", ""),
        (("test", "mine.py:exact", "+recipe=smoke", "--rows", "0"), "--rows", ""),
        (("test", "mine.py:nothing", *ON_ROWS), "'nothing'", ""),
    ):
        with pytest.raises(ConfigError) as caught:
            ended(*words)
        assert_refused(caught, key=key, fix=fix)
        if words == ("test", "mine.py:exact"):
            sentence(caught)


def test_a_column_that_is_not_there_is_named_as_a_run_names_it(root):
    with pytest.raises(DataError, match="'keywords'"):
        ended("test", "contains", *ON_ROWS)


@pytest.mark.process
def test_no_torch_is_imported_for_a_function_on_made_data(root):
    words = ["reward", "test", "mine.py:exact", "+recipe=quickstart", "--rows", "2"]
    program = (
        "import sys\nfrom rloo_cli.cli.main import find_verb\n"
        f"code = find_verb({words!r})()\nassert 'torch' not in sys.modules\nsys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# list


def test_the_list_has_every_reward_with_its_columns_and_extras(rloo_without_torch):
    done = rloo_without_torch("reward", "list", "--json")
    entries = {entry["name"]: entry for entry in json.loads(done.out)}
    assert set(registry.registry_names("rewards")) <= set(entries)
    assert set(paths.group_choices([])["reward"]) <= set(entries)
    assert entries["contains"]["columns"] == ["keywords"]
    assert entries["accuracy"]["extra"] == "rloo-cli[math]"
    assert entries["tldr_rm"]["type"] == "model"
    assert entries["ifeval"]["columns"] == ["instruction_id_list", "kwargs"]
    assert all(entry["meaning"] for entry in entries.values())


def test_every_reward_that_refuses_a_machine_says_in_the_list_what_it_wants():
    for name in registry.registry_names("rewards"):
        module = registry.registered_module("rewards", name)
        assert hasattr(module, "preflight") <= hasattr(module, "EXTRA"), name


def test_the_list_is_readable(capsys):
    assert ended("list") == 0
    said = capsys.readouterr().out
    assert "needs rloo-cli[math]" in said and "column keywords" in said
    assert max(map(len, said.splitlines())) <= 130
