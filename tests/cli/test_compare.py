"""`rloo compare`: runs of several seeds are one configuration, and what is said of it is so."""

import csv
import io
import json
import math
import os
from pathlib import Path
from statistics import stdev

import pytest
from assert_refused import assert_refused
from cli_cases import Rloo
from compare_cases import judged, write

from rloo_cli.cli import compare
from rloo_cli.cli.compare import charts, configurations, results
from rloo_cli.inspection import run_folders, run_record
from rloo_cli.reporting import statistics
from rloo_cli.utils.errors import ConfigError

pytestmark = pytest.mark.wide


@pytest.fixture(autouse=True)
def in_a_folder(request, tmp_path, monkeypatch):
    """Without pictures, which take a second, but where a test says `pictures`."""
    monkeypatch.chdir(tmp_path)
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr(charts, "draw_comparison", lambda got, out, title: out)


@pytest.fixture
def pictures():
    """They are drawn."""


def two(**keys) -> Path:
    """rloo and grpo, three seeds each, in runs/; `keys` are those of grpo's."""
    root = Path("runs")
    for seed in (1, 2, 3):
        write(root, f"rloo-{seed}", seed, (0.0, 0.5, 0.9 + 0.01 * seed))
        write(root, f"grpo-{seed}", seed, (0.0, 0.4, 0.8), algorithm__name="grpo", **keys)
    return root


def groups(*folders: Path, unfinished: bool = False) -> list[configurations.Configuration]:
    return configurations.group_by_configuration(
        [run_record.read_run_record(f) for f in folders], unfinished
    )


def said(capsys, *words: str) -> str:
    assert compare.run(list(words)) == 0
    return " ".join(capsys.readouterr().out.split())


def written() -> dict:
    """The table that the last comparison of runs/ wrote."""
    return json.loads(Path("runs/comparison/table.json").read_text())


def refused(*words: str) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        compare.run(list(words))
    return error.value


# Intervals.


@pytest.mark.parametrize(
    ("freedom", "t"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (10, 2.2281), (99, 1.9842)],
)
def test_students_quantile_is_that_of_the_tables(freedom, t):
    assert statistics.student_t_quantile(freedom) == pytest.approx(t, abs=1e-4)


def test_the_interval_of_three_known_numbers():
    got = statistics.mean_with_interval([1.0, 2.0, 3.0])
    assert (got.mean, got.n) == (2.0, 3)
    assert got.half_width == pytest.approx(4.302653 / math.sqrt(3))
    assert got.text() == "2.000 ± 2.484"


def test_one_seed_has_no_interval_and_none_has_no_mean():
    got = statistics.mean_with_interval([1.5])
    assert got.half_width is None and got.low == got.high == 1.5 and got.text() == "1.500"
    assert statistics.mean_with_interval([]) is None


def test_a_difference_is_taken_seed_by_seed_over_those_that_both_have():
    ours, theirs = {1: 1.0, 2: 5.0, 3: 9.0, 4: 99.0}, {1: 0.9, 2: 4.8, 3: 8.7, 5: -99.0}
    got = statistics.paired_difference(ours, theirs)
    assert got.n == 3 and got.mean == pytest.approx(0.2)
    assert got.half_width == pytest.approx(4.302653 * 0.1 / math.sqrt(3))
    assert statistics.describe_difference(got) == "not told apart"
    assert statistics.paired_difference({1: 1.0}, {2: 1.0}) is None


def test_the_words_for_a_difference(sentence):
    ours = ([1.0, 1.01, 0.99], [-1.0, -1.01, -0.99], [1.0, -1.0, 0.5], [0.0] * 3, [3.0])
    got = [statistics.paired_difference(dict(enumerate(o)), dict.fromkeys(range(9), 0.0))
            for o in ours]  # fmt: skip
    sentence("\n".join(map(statistics.describe_difference, [*got, None])))


# Finding and grouping.


def test_runs_are_found_by_folder_name_pattern_and_in_folders(tmp_path):
    root = two()
    (root / "notes").mkdir()
    names = [
        p.name for p in run_folders.find_compared_runs(["runs/rloo-1", "rloo-2", "grpo-*", "runs"])
    ]
    assert names == ["rloo-1", "rloo-2", "grpo-1", "grpo-2", "grpo-3", "rloo-3"]
    assert run_folders.find_compared_runs([str(tmp_path / "runs" / "rloo-*")])[0].name == "rloo-1"


def test_a_sweep_is_its_trials_which_lie_beside_it():
    trials = [{"name": name} for name in ("rloo-2", "grpo-1", "not-begun")]
    (swept := two() / "swept").mkdir()
    (swept / "sweep.json").write_text(json.dumps({"members": trials}))
    found = [p.name for p in run_folders.find_compared_runs(["swept", "runs/swept"])]
    assert found == ["grpo-1", "rloo-2"]


def test_a_word_that_names_no_run_is_refused_with_a_near_one():
    two()
    assert_refused(refused("rloo-1", "grpo-11"), key="'grpo-11'", fix="rloo compare grpo-1")
    assert_refused(refused("nothing-*"), key="'nothing-*'")


def test_one_run_is_too_few(sentence):
    two()
    assert_refused(refused(), key="found 0")
    error = refused("rloo-1")
    assert_refused(error, key="found 1")
    sentence(error)


def test_runs_that_differ_in_seed_and_free_keys_are_one_configuration():
    root = two(train__learning_rate=2e-4)
    write(root, "rloo-4", 4, logging__every=5, reward__exact_match__timeout_s=1.0)
    found = groups(*run_folders.find_compared_runs(["runs"]))
    assert [(one.label, one.seeds) for one in found] == [
        ("rloo learning_rate=0.0001", [1, 2, 3, 4]),
        ("grpo learning_rate=0.0002", [1, 2, 3]),
    ]


def test_a_label_says_what_most_do_not_have():
    root = Path("runs")
    for i, beta in enumerate((0.05, 0.05, 0.1, 0.2)):
        write(root, f"run-{i}", algorithm__beta=beta, train__learning_rate=1e-4 * (1 + (i == 1)))
    found = groups(*run_folders.find_compared_runs(["runs"]))
    labels = {run.name: one.label for one in found for run in one.runs}
    assert labels["run-1"] == "rloo beta=0.05 learning_rate=0.0002"
    assert labels["run-2"] == "rloo beta=0.1" and len({*labels.values()}) == 4


def test_a_path_with_the_seed_in_it_is_the_same_for_all_seeds():
    root = Path("runs")
    one, other = (write(root, f"a-{s}", s, model__path=f"m/sft-seed-{s}/final") for s in (1, 2))
    assert len(groups(one, other)) == 1
    wrong = write(root, "a-3", 3, model__path="m/sft-seed-2/final")
    assert len(groups(one, other, wrong)) == 2


def test_a_seed_twice_in_one_configuration_is_refused_and_names_both(sentence):
    write(Path("runs"), "a")
    write(Path("runs"), "b")
    write(Path("runs"), "c", seed=2)
    error = refused("a", "b", "c")
    assert_refused(error, key="seed 1", where="seed")
    sentence(error)


def test_runs_that_differ_only_in_how_they_ran_are_told_apart_by_that():
    found = groups(write(Path("runs"), "a"), write(Path("runs"), "b", train__layout="padded"))
    assert [one.label for one in found] == ["rloo layout=auto", "rloo layout=padded"]


# Refusals.


@pytest.mark.slow_but("{'fingerprint': 'f2'}-data", "{'eval__max_samples': 5}-eval.max_samples")
@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"fingerprint": "f2"}, "data"),
        ({"fingerprint": "f2", "data__path": "other.jsonl"}, "data.path"),
        ({"reward__exact_match__weight": 2.0}, "reward.exact_match.weight"),
        ({"model__path": "make:other"}, "model.path"),
        ({"generation__max_completion_length": 9}, "generation.max_completion_length"),
        ({"eval__max_samples": 5}, "eval.max_samples"),
    ],
    ids=str,
)
def test_runs_of_something_else_are_refused_by_the_key(keys, key, capsys, sentence):
    two(**keys)
    error = refused("rloo-*", "grpo-*")
    assert assert_refused(error, key="not comparable", where=key, fix="--anyway").where == key
    assert not Path("runs/comparison").exists()
    said(capsys, "rloo-*", "grpo-*", "--anyway")
    assert any("not comparable" in note for note in written()["notes"])
    if key in ("data", "model.path"):
        sentence(error)


def test_another_budget_machine_or_missing_seed_is_said(capsys, sentence):
    root = two(max_steps=6)
    write(root, "rloo-4", 4)
    facts = json.loads((root / "grpo-1" / "run.json").read_text())
    (root / "grpo-1" / "run.json").write_text(json.dumps(facts | {"host": "there"}))
    said(capsys, "runs")
    sentence("\n".join(written()["notes"]))


def test_a_run_that_is_not_finished_is_named_and_does_not_count(capsys, sentence):
    root = two()
    write(root, "grpo-4", 4, (0.0,), "failed", 1, algorithm__name="grpo")
    got = said(capsys, "runs")
    why = "grpo, seed 4 (runs/grpo-4): failed (exit 7) at step 1 of 4"
    assert f"excluded: {why}" in got
    grpo = written()["configurations"][1]
    assert grpo["seeds"] == [1, 2, 3] and grpo["left_out"][0]["run"] == "runs/grpo-4"
    sentence("\n".join(written()["notes"]))
    table = (root / "comparison" / "table.md").read_text()
    assert "3 (1 left out)" in table and "runs/grpo-4" in table


def test_runs_that_are_not_finished_count_where_it_is_asked(capsys, sentence):
    for name in ("rloo", "grpo"):
        write(Path("runs"), name, state="training", steps=2, algorithm__name=name)
    error = refused("rloo", "grpo")
    assert_refused(error, key="runs/grpo", fix="--unfinished")
    sentence(error)
    got = said(capsys, "rloo", "grpo", "--unfinished")
    assert "0.500" in got
    assert any(note.startswith("grpo, seed 1 ") for note in written()["notes"])


def test_a_metric_or_configuration_that_is_not_there_is_refused_with_those_that_are():
    two()
    error = refused("runs", "--metric", "eval_rewards")
    assert_refused(error, where="--metric", fix="--metric eval_reward")
    assert_refused(refused("runs", "--against", "ppo"), key="rloo, grpo", where="--against")


def test_a_folder_that_is_no_run_of_training_is_refused():
    folder = write(Path("runs"), "a")
    (folder / "config.yaml").write_text("[]")
    with pytest.raises(ConfigError) as error:
        run_record.read_run_record(folder)
    assert_refused(error, key="config.yaml")


# Figures.


def figures(**keys) -> results.Comparison:
    two(**keys)
    found = groups(*run_folders.find_compared_runs(["runs"]))
    return results.compare_configurations(found, "eval_reward", 0, [])


def test_the_figures_of_a_configuration():
    got = figures(second=3.0)
    rloo, grpo = got.results
    assert (
        rloo.mean_over_seeds("final").mean == pytest.approx(0.92)
        and grpo.mean_over_seeds("final").mean == 0.8
    )
    assert rloo.mean_over_seeds("kl").mean == pytest.approx(0.8)  # the last of four steps
    assert rloo.mean_over_seeds("reward").mean == pytest.approx(0.42)
    assert (rloo.mean_over_seeds("step_s").mean, grpo.mean_over_seeds("step_s").mean) == (1.0, 3.0)
    assert (
        rloo.mean_over_seeds("peak_gib").mean == 1.0 and rloo.mean_over_seeds("updates").mean == 4
    )
    assert [x for x, _ in rloo.curves["held_out"]] == [0.0, 16.0, 32.0]
    assert got.differences["grpo"].mean == pytest.approx(-0.12)
    assert len(results.conclusion_lines(got)) == 1


def test_the_threshold_lies_between_the_start_and_the_best_end():
    got = figures()
    assert got.threshold == pytest.approx(0.9 * 0.92)
    rloo, grpo = got.results
    assert rloo.figures["reached"] == {1: 32.0, 2: 32.0, 3: 32.0} and not grpo.figures["reached"]


def test_a_threshold_below_zero_is_still_reached_from_below():
    root = Path("runs")
    for name, last in (("rloo", -1.0), ("grpo", -2.0)):
        write(root, name, scores=(-6.0, -3.0, last), algorithm__name=name)
    got = results.compare_configurations(
        groups(*run_folders.find_compared_runs(["runs"])), "eval_reward", 0, []
    )
    assert got.threshold == pytest.approx(-1.5)
    assert [o.figures["reached"] for o in got.results] == [{1: 32.0}, {}]


def test_without_evaluations_the_training_reward_is_compared_and_called_so(capsys):
    for name in ("rloo", "grpo"):
        write(Path("runs"), name, scores=(), algorithm__name=name)
    got = said(capsys, "rloo", "grpo")
    assert (written()["held_out"], written()["score"]) == (False, "reward")
    assert "held-out" not in got


def test_a_judges_win_rate_is_a_mean_over_seeds_or_has_the_judges_own_interval(capsys, pictures):
    root = two()
    for seed, rate in ((1, 0.5), (2, 0.6), (3, 0.7)):
        judged(root / f"rloo-{seed}", rate)
    judged(root / "grpo-1", 0.4)
    table, head = root / "comparison" / "table.md", "| win rate against reference |"
    got = said(capsys, "runs")
    assert "reference: -0.100: one seed" in got
    assert "| 60.0% ± 24.8 |" in table.read_text() and head in table.read_text()
    said(capsys, "rloo-1", "grpo-1")
    assert "| 50.0% (40.0% to 60.0% over pairs) |" in table.read_text()
    assert "<!-- Win rate -->" in (root / "comparison" / "curves.svg").read_text()


# Verdicts need evidence.


def test_seeds_that_differ_by_the_same_are_no_verdict(capsys):
    root = Path("runs")
    for seed in (1, 2):
        write(root, f"rloo-{seed}", seed, (0.0, 0.5))
        write(root, f"grpo-{seed}", seed, (0.0, 0.5625), algorithm__name="grpo")
    got = said(capsys, "runs")
    assert f"+0.062, 2 seeds: {statistics.NO_SPREAD}" in got
    table = written()
    assert "low" not in table["differences"]["grpo"]
    assert "low" not in table["configurations"][0]["figures"]["final"]


def test_a_spread_below_the_scores_own_error_is_not_believed(capsys):
    for name, scores in (("rloo", (0.5, 0.5)), ("grpo", (0.5625, 0.578125))):
        for seed, last in enumerate(scores, 1):
            at = f"{name}-{seed}"
            write(Path("runs"), at, seed, (0.0, last), algorithm__name=name, samples=64)
    said(capsys, "runs")
    table = written()
    assert table["differences"]["grpo"]["verdict"] == "not told apart"
    assert table["configurations"][0]["figures"]["final"]["error_by_seed"]["1"] == pytest.approx(
        0.0612, abs=1e-3
    )
    assert table["differences"]["grpo"]["low"] < -0.3


def test_the_training_reward_has_the_error_of_its_last_steps(capsys):
    for name in ("rloo", "grpo"):
        for seed in (1, 2):
            write(Path("runs"), f"{name}-{seed}", seed, (), steps=40, algorithm__name=name)
    said(capsys, "runs")
    final = written()["configurations"][0]["figures"]["final"]
    steps = [0.1 * step for step in (37, 38, 39, 40)]
    assert final["error_by_seed"]["1"] == pytest.approx(stdev(steps) / 2)


def test_a_single_seed_has_the_interval_over_its_prompts(capsys):
    for name in ("rloo", "grpo"):
        write(Path("runs"), name, 1, (0.0, 0.5), algorithm__name=name, samples=64)
    said(capsys, "rloo", "grpo")
    table = Path("runs/comparison/table.md").read_text()
    assert "| 0.500 (0.380 to 0.620 over prompts) |" in table
    assert "- grpo minus rloo: +0.000: one seed" in table


def test_win_rates_count_for_the_warning_about_many_comparisons(capsys):
    root, warning = two(), "one in twenty misleads"
    assert warning not in said(capsys, "runs")
    for seed in (1, 2):
        judged(root / f"rloo-{seed}", 0.5)
        judged(root / f"grpo-{seed}", 0.6)
    assert warning in said(capsys, "runs")


# Judges.


def verdicts_of_judges(got: str) -> int:
    return got.count("against reference: ")


def test_a_checkpoints_judge_is_not_the_runs_even_if_it_is_newer(capsys):
    root = two()
    for name, rate in (("rloo-1", 0.5), ("grpo-1", 0.4)):
        judged(root / name, rate)
        judged(root / name, 0.9, "checkpoint-2", step=2)
        os.utime(root / name / "eval" / "final" / "judge.json", (1, 1))
    assert "against reference: -0.100" in said(capsys, "runs")


@pytest.mark.parametrize(
    ("model", "step", "keys", "key"),
    [
        ("checkpoint-2", 2, {}, ""),
        ("final", 2, {}, ""),
        ("final", 4, {"model": "b"}, "model b, not a"),
        ("final-1a2b3c", 4, {"both_orders": False}, "both_orders false, not true"),
    ],
)
def test_another_model_judge_or_order_is_no_verdict_and_named(
    model, step, keys, key, capsys, sentence
):
    root = two()
    for seed in (1, 2, 3):
        judged(root / f"rloo-{seed}", 0.5 + 0.01 * seed)
        judged(root / f"grpo-{seed}", 0.8, model, step, **keys)
    assert not verdicts_of_judges(said(capsys, "runs"))
    found = [note for note in written()["notes"] if f"runs/grpo-1/eval/{model} " in note]
    assert len(found) == 1 and found[0].startswith("grpo, seed 1: ") and key in found[0]
    sentence(found[0])
    assert [len(one["figures"].get("wins/reference", [])) > 0
            for one in written()["configurations"]] == [True, False]  # fmt: skip


def test_other_pairs_are_no_verdict(capsys):
    root = two()
    for name, prompt in (("rloo-1", "a"), ("grpo-1", "b")):
        judged(root / name, 0.5)
        pair = {"set": None, "row": 0, "prompt": prompt, "theirs": "c"}
        (root / name / "eval" / "final" / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    got = said(capsys, "runs")
    assert not verdicts_of_judges(got) and "pairs 100 pairs " in got


def test_of_several_judges_the_one_that_both_sides_have_is_compared(capsys):
    root = two()
    judged(root / "rloo-1", 0.5)
    judged(root / "grpo-1", 0.6)
    for seed in (1, 2, 3):
        judged(root / f"rloo-{seed}", 0.9, "final-b", 4, model="b")
    assert "against reference: +0.100" in said(capsys, "runs")


def test_how_a_judge_is_reached_and_the_runs_own_seed_make_no_other_judge(capsys):
    root = two()
    for seed in (1, 2):
        keys = {"base_url": f"http://node{seed}/v1", "model": f"judge-seed-{seed}"}
        judged(root / f"rloo-{seed}", 0.5 + seed / 100, concurrency=seed, **keys)
        judged(root / f"grpo-{seed}", 0.6 + seed / 100, **keys)
    assert verdicts_of_judges(got := said(capsys, "runs")) == 1 and "2 seeds" in got


# What is written.


def test_charts_and_tables_are_written_and_hold_the_labels(capsys, pictures, sentence):
    root = two()
    said(capsys, "runs", "--out", "there")
    out = Path("there")
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    svg = (out / "curves.svg").read_text()
    for words in ("rloo (n = 3)", "grpo (n = 3)", "Reward against KL", "Held-out score", "Memory"):
        assert f"<!-- {words} -->" in svg
    assert "no data" not in svg
    table = (out / "table.md").read_text()
    sentence(table)
    rows = [*csv.DictReader(io.StringIO((out / "table.csv").read_text()))]
    final = next(r for r in rows if r["configuration"] == "rloo" and r["figure"] == "final")
    assert float(final["mean"]) == pytest.approx(0.92) and final["n"] == "3"
    got = json.loads((out / "table.json").read_text())
    assert got["configurations"][0]["figures"]["final"]["by_seed"]["3"] == pytest.approx(0.93)
    assert got["differences"]["grpo"]["verdict"] == "lower" and root.is_dir()


def test_the_same_runs_make_the_same_files(capsys, pictures):
    two()
    written = []
    for out in ("a", "b"):
        said(capsys, "runs", "--out", out)
        written.append({p.name: p.read_bytes() for p in Path(out).iterdir()})
    assert written[0] == written[1] and len(written[0]) == 5


def test_two_runs_also_say_what_differs_in_their_configs(capsys):
    write(Path("runs"), "a", 1)
    write(Path("runs"), "b", 2, algorithm__beta=0.1)
    got = said(capsys, "a", "b")
    assert "a -> b seed: 1 -> 2 algorithm.beta: 0.05 -> 0.1" in got
    assert written()["differences"]["rloo beta=0.1"]["n"] == 0


def test_keys_that_differ_are_shown_side_by_side(capsys):
    two(algorithm__beta=0.04)
    assert "algorithm.beta 0.05 0.04" in said(capsys, "runs")


def test_all_figures_can_be_had_as_json(capsys):
    two()
    got = json.loads(said(capsys, "runs", "--json"))
    assert got["against"] == "rloo" and got["score"] == "eval_reward"
    assert said(capsys, "runs", "--against", "grpo").count("rloo minus grpo") == 1


def test_a_run_without_some_metrics_has_dashes_and_pictures_without_data(capsys, pictures):
    root = two()
    for path in root.glob("grpo-*/metrics.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        kept = [{k: v for k, v in row.items() if k != "objective/kl"} for row in rows]
        path.write_text("".join(json.dumps(row) + "\n" for row in kept))
    for path in root.glob("grpo-*/run.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"memory": {}}))
    said(capsys, "runs")
    line = next(
        text
        for text in Path("runs/comparison/table.md").read_text().splitlines()
        if text.startswith("| grpo")
    )
    assert line.count("–") == 2
    assert "no data" in Path("runs/comparison/curves.svg").read_text()


def test_the_verb_imports_no_torch(rloo_without_torch: Rloo):
    write(Path("runs"), "a", 1)
    write(Path("runs"), "b", 2)
    ended = rloo_without_torch("compare", "runs")
    assert ended.code == 0, ended.said
    assert "written to runs/comparison" in ended.out
    refused = rloo_without_torch("compare", "c", "--errors=json")
    assert refused.code == 2 and json.loads(refused.err)[0]["where"] == "command line"
