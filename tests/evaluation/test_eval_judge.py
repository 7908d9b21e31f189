"""Held-out completions against references and other models: who is asked what, and what counts."""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from assert_refused import assert_refused
from cli_cases import strict
from endpoint_cases import chats, in_turn
from loop_cases import checked, flat, make

from rloo_cli.cli import eval_target
from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.evaluation import worker
from rloo_cli.evaluation.evaluate import evaluate_run
from rloo_cli.evaluation.judges import judge as judging
from rloo_cli.evaluation.judges import llm
from rloo_cli.evaluation.judges.win_rate import compute_win_rate
from rloo_cli.reporting import eval_lines
from rloo_cli.utils.errors import ConfigError, DataError, RewardError
from rloo_cli.utils.files import read_json

pytestmark = pytest.mark.wide

SMALL = ["eval.max_samples=6"]
RULE = """
def digits(completions, **_):
    return [float(sum(c.isdigit() for c in text)) for text in completions]

def some(completions, **_):
    return [None if c.isdigit() else float(len(c)) for c in completions]
"""


def sides(question: str) -> tuple[str, str]:
    found = re.search(r"=== answer A ===\n(.*)\n=== answer B ===\n(.*)\n=== end", question, re.S)
    assert found is not None
    return found[1], found[2]


def shorter(question: str) -> str:
    a, b = sides(question)
    return "A" if len(a) < len(b) else "B" if len(b) < len(a) else "TIE"


def words(url: str, *more: str) -> list[str]:
    given = ["judge=openai", "eval.judge.model=m", f"eval.judge.base_url={url}/v1"]
    return [*given, *SMALL, *(f"eval.judge.{word}" for word in more)]


def judged(folder: Path, *given: str) -> tuple[dict[str, Any], list[dict[str, Any]], Any]:
    """Metrics, pairs and the run of one evaluation in training."""
    run = make(folder, *given)
    row = evaluate_run(run)
    return row, strict(run.folder / "samples" / "pairs_000000.jsonl"), run


# A language model, asked.


def test_each_pair_is_asked_in_both_orders_with_both_sides_stripped(
    serve: Any, tmp_path: Path
) -> None:
    stub = serve(chats(shorter))
    row, pairs, _ = judged(tmp_path, *words(stub.url, "system=Be fair."))
    assert (row["eval_win_rate"], row["eval_win_rate/losses"]) == (0.0, 6)
    assert row["judge/win_rate"] == 0.0 and row["judge/invalid"] == 0
    questions = [b["messages"][1]["content"] for _, b in stub.asked[1:]]  # the first: is it there?
    assert len(questions) == 12
    for pair in pairs:
        assert pair["theirs"] == pair["theirs"].strip() and pair["ours"] == pair["ours"].strip()
        both = [q for q in questions if pair["prompt"] in q]
        found = [sides(q) for q in both]
        assert sorted(found) == sorted(
            [(pair["ours"], pair["theirs"]), (pair["theirs"], pair["ours"])]
        )
        assert [v["a"] for v in pair["verdicts"]] == ["ours", "theirs"]
        assert [v["said"] for v in pair["verdicts"]] == ["B", "A"]
    assert {b["temperature"] for _, b in stub.asked} == {0.0}
    assert stub.asked[1][1]["messages"][0] == {"role": "system", "content": "Be fair."}


def test_a_judge_of_places_gives_every_pair_one_half(serve: Any, tmp_path: Path) -> None:
    row, pairs, _ = judged(tmp_path, *words(serve(chats(lambda q: "A")).url))
    assert row["eval_win_rate"] == 0.5 and row["eval_win_rate/ties"] == 6
    assert {p["value"] for p in pairs} == {0.5}


def test_with_one_order_the_seed_draws_who_stands_first(serve: Any, tmp_path: Path) -> None:
    given = words(serve(chats(lambda q: "A")).url, "both_orders=false")
    one, pairs, _ = judged(tmp_path, *given)
    assert 0 < one["eval_win_rate"] < 1  # a judge of places, as it is
    assert all(p["value"] == float(p["verdicts"][0]["a"] == "ours") for p in pairs)
    (tmp_path / "again").mkdir()
    assert judged(tmp_path / "again", *given)[1] == pairs
    (tmp_path / "other").mkdir()
    other = judged(tmp_path / "other", *given, "seed=5")[1]
    assert [p["value"] for p in other] != [p["value"] for p in pairs]


@pytest.mark.parametrize(
    ("first", "second", "value"),
    [("A", "B", 1.0), ("B", "A", 0.0), ("A", "A", 0.5), ("TIE", "TIE", 0.5), ("A", "TIE", 0.5)],
)
def test_what_two_verdicts_come_to(
    serve: Any, tmp_path: Path, first: str, second: str, value: float
) -> None:
    def say(question: str) -> str:
        return second if sides(question)[0].isdigit() else first  # references are numbers

    row, pairs, _ = judged(tmp_path, *words(serve(chats(say)).url, "max_pairs=2"))
    assert [p["value"] for p in pairs] == [value] * 2 and row["eval_win_rate"] == value


VERDICTS = {
    "A": "A", " B.\n": "B", '"TIE"': "TIE", "**A**": "A", "<think>B or A</think>\nB": "B",
    "A is better": None, "A and B": None, "a": None, "": None, "C": None,
    "AB": None, "Answer": None,
}  # fmt: skip


@pytest.mark.parametrize("said", VERDICTS)
def test_an_answer_is_read_strictly(said: str) -> None:
    keys = check.check_config(compose_config(["+recipe=smoke", *words("http://x")])).eval.judge
    thought = said.rpartition("</think>")[2]
    assert llm.parse_preference(thought, keys.pattern) == VERDICTS[said]  # type: ignore[union-attr]


def test_what_is_no_verdict_is_asked_for_again_then_left_out_and_counted(
    serve: Any, tmp_path: Path
) -> None:
    lines = {"What is 74 + 4?": "I would say A"}

    def say(question: str) -> str:
        return next((v for k, v in lines.items() if k in question), "A")

    stub = serve(chats(say))
    run = make(tmp_path, *words(stub.url))
    notes: list[str] = []
    run.log.note = notes.append  # type: ignore[method-assign]
    row = evaluate_run(run)
    pairs = strict(run.folder / "samples" / "pairs_000000.jsonl")
    (odd,) = [p for p in pairs if p["value"] is None]
    assert odd["prompt"] == "What is 74 + 4?"
    assert odd["verdicts"][0]["said"] == "I would say A" and odd["verdicts"][0]["why"]
    assert row["judge/invalid"] == row["eval_win_rate/invalid"] == 1
    assert row["eval_win_rate"] == 0.5 and row["eval_win_rate/ties"] == 5
    assert sum("What is 74 + 4?" in b["messages"][0]["content"] for _, b in stub.asked) == 4
    assert any("1 of 6 pairs" in note for note in notes)
    assert str(run.log.metrics_lines[-1]["eval_reward"])  # and the scores are there as ever


def test_a_pair_with_one_lost_order_is_no_half(serve: Any, tmp_path: Path) -> None:
    say = lambda q: "A" if sides(q)[0].isdigit() else "?"  # noqa: E731
    row, pairs, _ = judged(tmp_path, *words(serve(chats(say)).url))
    assert "eval_win_rate" not in row and "judge/win_rate" not in row
    assert row["judge/invalid"] == 6 and {p["value"] for p in pairs} == {None}


# When it cannot be asked.


def test_a_judge_that_is_not_there_is_missed_before_the_model_loads(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "rloo_cli.policy.load.load_causal_lm", lambda *_: pytest.fail("it was loaded")
    )
    stub = serve(in_turn((404, {"error": {"message": "no model m"}})))
    with pytest.raises(RewardError) as refused:
        make(tmp_path, *words(stub.url))
    assert_refused(refused, 5, key="no model m")
    monkeypatch.delenv("NOT_THERE", raising=False)
    with pytest.raises(ConfigError, match="export NOT_THERE"):
        make(tmp_path, *words(stub.url, "api_key_env=NOT_THERE"))


def test_a_training_goes_on_without_its_judge_and_an_evaluation_does_not(
    serve: Any, tmp_path: Path
) -> None:
    stub = serve(chats(shorter))
    run = make(tmp_path, *words(stub.url))
    notes: list[str] = []
    run.log.note = notes.append  # type: ignore[method-assign]
    stub.answer = in_turn((401, "go away"))
    row = evaluate_run(run)
    assert row["judge/invalid"] == 6 and "eval_win_rate" not in row and "eval_reward" in row
    assert any("go away" in note for note in notes)
    run.judge.training = False
    with pytest.raises(RewardError, match="go away"):
        evaluate_run(run)


def test_judging_moves_nothing_in_the_run(serve: Any, tmp_path: Path) -> None:
    from rloo_cli.utils import rng

    run = make(tmp_path, *words(serve(chats(shorter)).url))
    before, weights, state = rng.capture_random_states(), flat(run), run.state.dump()
    evaluate_run(run)
    after = rng.capture_random_states()
    assert str(after) == str(before)
    assert bool((flat(run) == weights).all()) and run.state.dump() == state


# References.


def rows_of(monkeypatch: pytest.MonkeyPatch, column: Any) -> None:
    """The tiny data with a column `got`."""
    from rloo_cli.data.synthetic import tiny

    plain = tiny.tiny_examples
    monkeypatch.setattr(
        tiny, "tiny_examples", lambda split: [r | {"told": column} for r in plain(split)]
    )


def test_a_reference_may_be_the_end_of_a_conversation(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = [{"role": "user", "content": "U"}, {"role": "assistant", "content": " the end \n"}]
    rows_of(monkeypatch, talk)
    url = serve(chats(shorter)).url
    _, pairs, _ = judged(tmp_path, *words(url, "reference_column=told", "max_pairs=3"))
    assert [p["theirs"] for p in pairs] == ["the end"] * 3


def test_an_empty_reference_is_no_win(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sentence: Callable[..., None]
) -> None:
    rows_of(monkeypatch, None)
    stub = serve(chats(lambda q: "A"))
    row, pairs, _ = judged(tmp_path, *words(stub.url, "reference_column=told"))
    assert row["judge/invalid"] == 6 and len(stub.asked) == 1
    sentence(pairs[0]["verdicts"][0]["why"])


def test_a_column_that_has_no_texts_is_refused(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_of(monkeypatch, 3)
    url = serve(chats(shorter)).url
    for word, key in (
        ("reference_column=told", "int"),
        ("reference_column=nothing", "'nothing'"),
        ("reference_column=completion", "data.columns={completion: reference}"),
        ("template='{prompt}{a}{b}{nothing}'", "{nothing}"),
    ):
        with pytest.raises(DataError) as refused:
            make(tmp_path, *words(url, word))
        assert_refused(refused, 4, key=key)


# A reward as the judge.


def by_rule(tmp_path: Path, name: str, *more: str) -> list[str]:
    (tmp_path / "mine.py").write_text(RULE)
    return ["judge=rule", f"eval.judge.reward.path={tmp_path}/mine.py:{name}", *SMALL, *more]


def test_a_rule_scores_both_sides_and_equal_scores_are_a_tie(tmp_path: Path) -> None:
    row, pairs, run = judged(tmp_path, *by_rule(tmp_path, "digits"))
    for pair in pairs:
        ours, theirs = (sum(c.isdigit() for c in pair[side]) for side in ("ours", "theirs"))
        assert pair["verdicts"] == [{"ours": ours, "theirs": theirs}]
        assert pair["value"] == (1.0 if ours > theirs else 0.5 if ours == theirs else 0.0)
    assert row["eval_win_rate"] == sum(p["value"] for p in pairs) / 6
    assert run.judge.description.startswith("the reward function ")


def test_a_rule_that_does_not_apply_leaves_the_pair_out(tmp_path: Path) -> None:
    row, pairs, _ = judged(tmp_path, *by_rule(tmp_path, "some"))
    assert row["judge/invalid"] == 6 and pairs[0]["verdicts"][0]["theirs"] is None


def test_a_reward_model_reads_both_sides_alike_with_the_end_of_those_that_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rloo_cli.evaluation.judges import reward

    seen: list[Any] = []
    plain = reward.score_groups
    monkeypatch.setattr(reward, "score_groups", lambda r, g, c: (seen.extend(g), plain(r, g, c))[1])
    given = ["judge=reward_model", "eval.judge.reward.path=make:tiny_reward", *SMALL]
    row, pairs, run = judged(tmp_path, *given)
    assert row["judge/invalid"] == 0 and len(seen) == 6
    for group, pair in zip(seen, pairs, strict=True):
        ours, theirs = group.rollouts
        assert (ours.text, theirs.text) == (f" {pair['ours']}", f" {pair['theirs']}")
        end = run.tokenizer.eos_token_id
        assert theirs.finish_reason == "stop" and theirs.completion_ids[-1] == end
        assert (ours.completion_ids[-1] == end) == (ours.finish_reason == "stop")
    got = judging.JudgedSets([], {"": compute_win_rate([1.0], [(1, 1)])}, {}, [])
    title = str(judging.judge_table(run.judge, got).title)
    assert "make:tiny_reward" in title
    assert "not a" in title


# `rloo eval`.


def evaluated(tmp_path: Path, *given: str) -> Path:
    """The folder of an evaluation by the process of `rloo eval`, without the process."""
    settings = checked((), tuple(given))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(check.dump_config(settings)))
    about = {"source": "x", "run": None, "state": {}, "steps": 2, "prompts": 0}
    (tmp_path / "about.json").write_text(json.dumps(about))
    worker.run_evaluation(tmp_path)
    return tmp_path


def test_an_evaluation_keeps_every_pair_the_judge_and_its_question(
    serve: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stub = serve(chats(shorter))
    sets = "eval.sets={easy: {split: 'test[:3]'}, hard: {split: 'test[3:8]'}}"
    root = evaluated(tmp_path, *words(stub.url), sets)
    row, about = read_json(root / "metrics.json"), read_json(root / "judge.json")
    assert row["eval_easy_win_rate"] == row["eval_hard_win_rate"] == 0.0
    assert row["eval_hard_win_rate/losses"] == 5 and row["judge/win_rate"] == 0.0
    assert [p["set"] for p in strict(root / "pairs.jsonl")] == ["easy"] * 3 + ["hard"] * 5
    assert about["judge"] == f"m, a language model at {stub.url}/v1"
    assert len(about["question_sha256"]) == 64 and about["keys"]["both_orders"] is True
    assert about["sets"]["hard"]["losses"] == 5
    said = capsys.readouterr().out
    for part in (
        "preferred by m, a language model",
        "the texts of reference",
        "0 of 5",
        "95 % interval",
    ):
        assert part in said
    other = evaluated(tmp_path, *words(stub.url, "system=Other"), sets)
    assert read_json(other / "judge.json")["question_sha256"] != about["question_sha256"]


def test_against_another_model_its_answers_to_the_same_prompts_are_sampled(
    serve: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = serve(chats(shorter)).url
    root = evaluated(tmp_path, *words(url, "against=make:tiny", "max_pairs=4"))
    pairs = strict(root / "pairs.jsonl")
    assert len(pairs) == 4 and all(p["ours"] == p["theirs"] for p in pairs)  # it is the same model
    with (root / "pairs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(r["ours"], float(r["value"])) for r in rows] == [(p["ours"], 0.5) for p in pairs]
    assert read_json(root / "metrics.json")["eval_win_rate"] == 0.5
    assert "over make:tiny" in capsys.readouterr().out


def a_run(folder: Path) -> Path:
    """The folder of a finished run, as far as an evaluation looks at it."""
    root = folder / "runs" / "smoke"
    (root / "final").mkdir(parents=True)
    (root / "config.yaml").write_text(yaml.safe_dump(check.dump_config(checked((), ()))))
    facts = {"progress": {"step": 2, "updates": 2}, "plan": {"max_steps": 2}, "prompts": 64}
    (root / "run.json").write_text(json.dumps(facts))
    for name in ("config.json", "tokenizer.json"):
        (root / "final" / name).write_text("{}")
    return root


def test_a_run_is_given_a_judge_and_keeps_its_own_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    root = a_run(tmp_path)
    (tmp_path / "mine.py").write_text(RULE)
    plain = eval_target.eval_target_of_run(str(root), [])
    given = ["eval.judge.reward.path=mine.py:digits", "judge=rule"]  # in whatever order
    subject = eval_target.eval_target_of_run(str(root), given)
    judge: Any = subject.config.eval.judge
    assert judge.reward.path == "mine.py:digits" and judge.reward.on_error == "raise"
    assert subject.output_dir != plain.output_dir and plain.config.eval.judge is None
    assert subject.config.reward.model_dump() == plain.config.reward.model_dump()
    again = {"eval.judge.model": "m", "eval.judge.both_orders": "false"}
    subject = eval_target.eval_target_of_run(
        str(root), ["judge=openai", *map("=".join, again.items())]
    )
    assert subject.config.eval.judge.both_orders is False  # type: ignore[union-attr]
    assert eval_target.eval_target_of_run(str(root), ["judge=null"]).config.eval.judge is None
    wrong = {"judge=opnai": "judge=openai", "judge=rule": "eval.judge.reward.path"}
    for word, said in wrong.items():
        with pytest.raises(ConfigError, match=said):
            eval_target.eval_target_of_run(str(root), [word])


def test_a_training_compares_with_references_only(serve: Any, tmp_path: Path) -> None:
    url = serve(chats(shorter)).url
    with pytest.raises(ConfigError) as refused:
        make(tmp_path, *words(url, "against=make:tiny"))
    assert_refused(refused, key="eval.judge.against")


def test_the_recipe_of_the_paper_runs_small_without_a_network(tmp_path: Path) -> None:
    given = ["+recipe=tldr_judge", "+debug=cpu", "distributed.threads=1", "eval.max_samples=4"]
    run = check.check_config(compose_config(given))
    assert run.eval.judge is not None and run.eval.judge.type == "reward"  # type: ignore[attr-defined]
    real = check.check_config(compose_config(["+recipe=tldr_judge", "eval.judge.model=m"]))
    judge: Any = real.eval.judge
    assert (judge.against, judge.both_orders, judge.temperature) == ("reference", True, 0.0)
    assert (real.eval.max_samples, real.generation.max_completion_length) == (1000, 200)
    assert real.data.template is None and judge.reference_column == "messages"


REFUSED = {
    "eval.judge.template='{prompt} {a}'": "{b}",
    "eval.judge.type=person": "eval.judge.type",
    "eval.judge.both_order=true": "eval.judge.both_order",
    "eval.judge=yes": "eval.judge",
    "data.eval_split=null": "eval.judge",
    "eval.judge.against=./nothing": "eval.judge.against",
}


@pytest.mark.parametrize("word", REFUSED)
def test_a_key_that_is_wrong_is_named(word: str, sentence: Callable[..., None]) -> None:
    with pytest.raises(ConfigError) as refused:
        check.check_config(compose_config(["+recipe=smoke", *words("http://x"), word]))
    assert_refused(refused, key=REFUSED[word])
    if word.startswith("eval.judge."):
        sentence(refused, folder=Path.cwd())


def test_rollout_servers_sample_no_second_model(sentence: Callable[..., None]) -> None:
    given = [*words("http://x", "against=make:tiny"), "generation=vllm_server"]
    with pytest.raises(ConfigError) as refused:
        check.check_config(compose_config(["+recipe=smoke", *given]))
    assert_refused(refused, key="eval.judge.against")
    sentence(refused)


def test_the_rewards_of_a_judge_are_checked_as_all_are() -> None:
    for word, said in {
        "type=nothing": "eval.judge.reward.type = 'nothing'",
        "path=nothing.py:f": "nothing.py does not exist",
        "paht=x.py:f": "eval.judge.reward.paht is not a key",
    }.items():
        given = ["judge=rule", "eval.judge.reward.path=math:f", f"eval.judge.reward.{word}"]
        with pytest.raises(ConfigError) as refused:
            check.check_config(compose_config(["+recipe=smoke", *given]))
        assert said in str(refused.value)


def test_a_win_rate_is_shown_while_a_run_goes_on() -> None:
    row = {"eval_hard_win_rate": 0.5, "eval_win_rate": 1.0, "eval_win_rate/wins": 3}
    assert eval_lines.headline_metrics(row) == [
        ("wins hard", "eval_hard_win_rate"),
        ("wins", "eval_win_rate"),
    ]
