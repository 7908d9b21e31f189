"""Held-out sets in the config: what they inherit, what is refused before weights load, the end."""

import io
import json
import re

import pytest
from assert_refused import assert_refused
from loop_cases import ENDS, checked, make
from rich.console import Console
from test_evaluate import SETS, samples_of

from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.evaluation.evaluate import evaluate_run
from rloo_cli.policy import load
from rloo_cli.reporting.display import Display
from rloo_cli.reporting.panel import render_panel
from rloo_cli.train import loop, summary
from rloo_cli.utils.errors import ConfigError, DataError, RunError


def held_out(*words):
    return check.check_config(compose_config(["+recipe=smoke", *words])).held_out


# What a set is.


def test_without_sets_the_split_of_data_is_the_one_set():
    (only,) = held_out("data.max_samples=7").items()
    assert only[0] == "" and (only[1].split, only[1].max_samples) == ("test", 7)
    assert held_out("data.eval_split=null") == {}


def test_a_set_says_what_differs_from_data():
    words = ["data.template='Q: {prompt}'", "data.max_prompt_length=40", "data.max_samples=9"]
    sets = held_out(*words, "eval.sets.hard={split: 'test[:3]', max_samples: null}")
    hard = sets.pop("hard")
    assert not sets  # data.eval_split is one more set only where it is named
    assert (hard.path, hard.split, hard.max_samples) == ("make:tiny", "test[:3]", None)
    assert (hard.template, hard.max_prompt_length) == ("Q: {prompt}", 40)


def test_a_set_of_another_path_does_not_inherit_where_the_first_one_is(tmp_path):
    words = ["data.path=org/name", "data.name=main", "data.revision=abc"]
    there = held_out(*words, "eval.sets.a={path: other/name, split: test}")["a"]
    assert (there.path, there.name, there.revision) == ("other/name", None, None)
    given = held_out(*words, "eval.sets.a={path: other/name, name: x, split: test}")["a"]
    assert given.name == "x"
    same = held_out(*words, "eval.sets.a={split: test}")["a"]
    assert (same.path, same.name, same.revision) == ("org/name", "main", "abc")


def test_a_set_that_names_no_split_has_the_one_that_is_held_out(tmp_path):
    (tmp_path / "hard.jsonl").write_text("")

    def split_of(*words):
        return held_out(*words)["hard"].split

    same = "+eval.sets.hard={max_samples: 3}"
    assert split_of(same) == "test"  # smoke's data.eval_split
    assert split_of(same, "data.eval_split='train[:4]'") == "train[:4]"
    assert split_of(same, "data.eval_split=null") == "test"
    other = "data.eval_split=validation"
    assert split_of("+eval.sets.hard={path: other/name}", other) == "test"
    assert (
        split_of(f"+eval.sets.hard={{path: '{tmp_path}/hard.jsonl'}}", other) == "train"
    )  # its only one


def test_what_is_read_back_from_a_run_has_the_same_sets(tmp_path):
    import yaml

    run = check.check_config(compose_config(["+recipe=smoke", *SETS]))
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(check.dump_config(run)))
    assert check.read_config(path).held_out == run.held_out


def test_debug_cpu_takes_every_set_from_its_own_data():
    sets = held_out("eval.sets.big={path: org/huge, split: test, template: X}", "+debug=cpu")
    assert (sets["big"].path, sets["big"].split, sets["big"].template) == (
        "make:tiny",
        "test",
        None,
    )


def test_sets_do_not_make_a_run_another_experiment():
    plain, more = (check.check_config(compose_config(["+recipe=smoke", *w])) for w in ([], SETS))
    assert check.config_hash(plain) == check.config_hash(more)


REFUSED = {
    "eval.sets.hard={split: test, pathh: x}": ["eval.sets.hard.pathh is not a key", "hard.path"],
    "eval.sets.hard=test": ["eval.sets.hard = 'test' is not valid"],
    "eval.sets.hard={split: test, shuffle: true}": ["eval.sets.hard.shuffle is not a key"],
    "eval.sets.json={split: test}": ["cannot have this name"],
    "eval.sets.a-b={split: test}": ["cannot have this name"],
    "eval.sets._a={split: test}": ["cannot have this name"],
    "eval.sets.a={split: test, path: ./no.jsonl}": ["eval.sets.a.path", "does not exist"],
    "eval.sets.a={split: test, path: make:no}": ["eval.sets.a.path", "unknown data set"],
    "eval.num_generations=0": ["eval.num_generations = 0"],
    "eval.temperature=0": ["eval.temperature = 0"],
    "eval.pass_at=[4]": ["asks for pass@4", "eval.num_generations=4"],
    "eval.pass_at=[0]": ["greater than or equal to 1"],
    "eval.pass_reward=unique": ["not a reward", "eval.pass_reward=NAME"],
    "eval=3": ["eval = 3 is not"],
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_is_wrong_with_a_set_is_said_of_its_key(word):
    with pytest.raises(ConfigError) as refused:
        check.check_config(compose_config(["+recipe=smoke", word]))
    for part in REFUSED[word]:
        assert part in str(refused.value)


# What only the data can say.


@pytest.fixture
def rows(tmp_path):
    def write(name, *lines):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    return write


def refused(tmp_path, monkeypatch, *words, rewards=None):
    monkeypatch.setattr(load, "load_causal_lm", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(RunError) as got:
        make(tmp_path, *words, rewards=rewards)
    return got.value


def needs(completion_ids, gold):
    return [0.0 for _ in completion_ids]


def test_a_split_that_is_not_there_is_said_of_the_key_that_names_it(tmp_path, monkeypatch):
    error = refused(tmp_path, monkeypatch, "data.eval_split=nothing")
    assert isinstance(error, DataError) and "data.eval_split" in str(error)
    assert "data.split" not in str(error)
    error = refused(tmp_path, monkeypatch, "eval.sets.hard={split: nothing}")
    assert isinstance(error, DataError) and "eval.sets.hard.split" in str(error)


def test_columns_that_rewards_need_are_looked_for_in_every_set(tmp_path, monkeypatch, rows):
    train = rows("train", *[{"prompt": f"a{i}", "gold": "b"} for i in range(8)])
    other = rows("other", {"prompt": "a"})
    words = [f"data.path={train}", "data.eval_split=null"]
    set_of = f"eval.sets.hard={{path: {other}, split: train}}"
    error = refused(tmp_path, monkeypatch, *words, set_of, rewards={"needs": needs})
    assert_refused(error, 4, "'gold'", where="eval.sets.hard", fix="eval.sets.hard.columns")


def test_a_column_that_clashes_in_a_set_is_renamed_there(tmp_path, monkeypatch, rows):
    other = rows("other", {"prompt": "a", "prompt_ids": 3})
    error = refused(tmp_path, monkeypatch, f"eval.sets.hard={{path: {other}, split: train}}")
    assert isinstance(error, ConfigError) and "eval.sets.hard.columns" in error.problems[0].where


def test_prompts_that_are_too_long_are_refused_or_counted(tmp_path, monkeypatch, rows, capsys):
    long = rows("long", *[{"prompt": "x" * n} for n in (5, 6, 90)])
    hard = f"path: {long}, split: train, max_prompt_length: 60"
    error = refused(tmp_path, monkeypatch, f"eval.sets.hard={{{hard}, overlong: error}}")
    assert isinstance(error, DataError) and "eval.sets.hard.max_prompt_length" in str(error)
    assert "longer than 60 tokens" in str(error)
    monkeypatch.undo()
    capsys.readouterr()
    run = make(tmp_path, f"eval.sets.hard={{{hard}}}")
    assert evaluate_run(run)["eval_hard_samples"] == 2
    assert "1 prompts of hard" in capsys.readouterr().out


def test_sets_may_be_conversations_and_plain_text_side_by_side(tmp_path):
    def kind(completions, **_):
        return [float(isinstance(c, list)) for c in completions]

    chat = "eval.sets.chat={path: make:tiny_chat, split: test}"
    row = evaluate_run(make(tmp_path, chat, SETS[0], rewards={"kind": kind}))
    assert (row["eval_chat_reward"], row["eval_hard_reward"]) == (1.0, 0.0)


# The end of a run, and what is shown on the way.


def said(run, capsys):
    capsys.readouterr()
    summary.print_report(run)
    return capsys.readouterr().out


def test_the_end_compares_the_first_evaluation_with_the_last(tmp_path, capsys):
    words = [ENDS, "train.learning_rate=3e-3", "checkpoint.every=0", "eval.num_generations=2"]
    run = make(tmp_path, *words, "max_steps=3", "eval.every=1")
    loop.run_training_loop(run)
    rows = [r for r in run.log.metrics_lines if "eval_reward" in r]
    ends = {"before": rows[0]["eval_reward"], "after": rows[-1]["eval_reward"]}
    assert len(rows) == 4 and ends["before"] != ends["after"]
    for when, row in (("before", rows[0]), ("after", rows[-1])):
        ends |= {when + part: row["eval_reward" + part] for part in ("/se", "/low", "/high")}
    assert summary.summarize_run(run) == ends
    text = said(run, capsys)
    for part in ("held out", "before", "after", "reward ", "avg@2", "pass@2", "metrics.jsonl"):
        assert part in text
    assert "samples  " not in text.split("prompt")[0]  # a count that is the same on both sides
    first = [s for s in samples_of(run) if s["greedy"]]
    last = [s for s in samples_of(run, step=3) if s["greedy"]]
    changed = [i for i in range(16) if first[i]["score"] != last[i]["score"]]
    assert len(changed) >= 3
    for i in changed[:3]:  # longer ones are broken into lines
        assert first[i]["prompt"][:20] in text and first[i]["row"]["answer"] in text


def test_the_end_shows_greedy_answers_whose_score_has_changed_first(tmp_path, capsys):
    run = make(tmp_path, ENDS, "checkpoint.every=0", "eval.num_generations=2")
    loop.run_training_loop(run)
    for step, word in ((0, "old"), (2, "new")):
        samples = samples_of(run, step=step)
        for s in samples:
            s["score"] = float(step) if s["draw"] in (5, 9) else 1.0
            s["completion"] = f"{word}{s['draw']}" if s["greedy"] else "sampled"
        text = "".join(json.dumps(s) + "\n" for s in samples)
        (run.folder / f"samples/eval_{step:06d}.jsonl").write_text(text)
    text = said(run, capsys)
    shown = [re.search(rf"old{i} +new{i}\b", text) for i in range(16)]
    assert [i for i, found in enumerate(shown) if found] == [0, 5, 9]
    assert text.index("old5") < text.index("old9") < text.index("old0") and "sampled" not in text


def test_the_end_is_told_from_files_and_not_from_memory(tmp_path, capsys):
    run = make(tmp_path, ENDS, "checkpoint.every=0")
    loop.run_training_loop(run)
    expected = summary.summarize_run(run), said(run, capsys)
    run.log.metrics_lines = []
    run.log.restore({"pending": [], "counts": []})  # as a resumed run does
    assert (summary.summarize_run(run), said(run, capsys)) == expected and expected[0]["before"]
    for file in (run.folder / "samples").iterdir():
        file.write_bytes(b"\xa1")
    assert summary.summarize_run(run) == expected[0] and "reward" in said(run, capsys)


@pytest.mark.slow_cases("words1")
@pytest.mark.parametrize("words", [["data.eval_split=null"], ["eval.at_start=false"], [*SETS]])
def test_the_end_is_told_without_before_without_anything_and_for_several_sets(
    tmp_path, capsys, words
):
    run = make(tmp_path, ENDS, "checkpoint.every=0", *words)
    loop.run_training_loop(run)
    ends, text = summary.summarize_run(run), said(run, capsys)
    assert "metrics.jsonl" in text
    if words == ["data.eval_split=null"]:
        assert ends == {"before": None, "after": None} and "held out" not in text
    elif words == ["eval.at_start=false"]:
        assert ends["before"] is None and ends["after"] == run.log.metrics_lines[-1]["eval_reward"]
        assert "before" not in text and "clipped_ratio" in text
    else:
        assert ends["before"] == run.log.metrics_lines[0]["eval_hard_reward"]
        assert "hard_reward" in text and "seen_reward" in text


def test_a_first_evaluation_after_the_start_is_named_by_its_step(tmp_path, capsys):
    run = make(tmp_path, ENDS, "checkpoint.every=0", "eval.at_start=false", "eval.every=1")
    loop.run_training_loop(run)
    text = said(run, capsys)
    assert "step 1" in text and "before  " not in text.split("prompt")[0]


def test_samples_that_are_gone_leave_the_table(tmp_path, capsys):
    run = make(tmp_path, ENDS, "checkpoint.every=0")
    loop.run_training_loop(run)
    (run.folder / "samples/eval_000000.jsonl").unlink()
    assert "clipped_ratio" in said(run, capsys)


def test_an_evaluation_is_one_short_line_on_a_plain_terminal(tmp_path):
    run, out = make(tmp_path, ENDS, "eval.num_generations=2", *SETS), io.StringIO()
    run.log.display = Display({"max_steps": 2}, "plain", file=out)
    evaluate_run(run)
    line = out.getvalue().splitlines()[-1]
    for part in ("step 0/2  held-out hard ", "  avg@2 ", "  pass@2 ", "  held-out seen "):
        assert part in line
    assert len(out.getvalue().splitlines()) == 2  # the phase, and this


def test_the_panel_has_a_line_for_every_set():
    rows = [{"step": 0, "eval_hard_reward": 0.25, "eval_easy_reward": 0.75, "eval_hard_avg@4": 0.5}]
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(render_panel(rows, [], {"name": "x"}, 100))
    lines = console.export_text().splitlines()
    assert any("hard" in line and "0.25" in line for line in lines)
    assert any("easy" in line and "0.75" in line for line in lines)
    assert not any("avg" in line for line in lines)


def test_explain_knows_sets_and_says_what_is_idle(capsys):
    from rloo_cli.cli import config as tool

    for words, expected in (
        (["eval.sets.hard.path", *SETS], "make:tiny"),
        (["eval.sets.NAME.split"], "Split to use"),
        (["data.eval_split", *SETS], "only with eval.sets=null"),
        (["eval.pass_at"], "only with eval.num_generations>1"),
        (["eval.every", "data.eval_split=null"], "only with data.eval_split or eval.sets"),
    ):
        assert expected in tool.explain_key(words[0], ["+recipe=smoke", *words[1:]])
    acts = tool.explain_key("eval.every", ["+recipe=smoke", "data.eval_split=null", *SETS])
    assert "idle" not in acts
    sets = tool.recipe_json_schema(["+recipe=smoke"])["$defs"]["Sets"]
    assert sets["additionalProperties"] == {"$ref": "#/$defs/SetConfig"}


def test_the_whole_config_of_a_run_with_sets_is_checked_like_any_other():
    assert checked((), SETS).held_out.keys() == {"hard", "seen"}
