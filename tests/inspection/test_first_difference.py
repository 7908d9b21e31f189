"""`rloo compare A B --first-difference`: the first thing in which two runs part, and its causes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from assert_refused import assert_refused
from compare_cases import write
from fork_cases import Forked

from rloo_cli.cli import compare
from rloo_cli.inspection.first_difference import find_first_difference
from rloo_cli.utils.errors import ConfigError


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def two_runs() -> tuple[Path, Path]:
    """Two equal runs with samples, by hand."""
    folder = write(Path("runs"), "one")
    (folder / "samples").mkdir()
    for step in (1, 2, 3):
        samples = [
            {"draw": draw, "k": k, "prompt": f"p{draw}", "seed": 10 * draw + k,
             "completion": f"the answer is {draw}{k}", "score": 0.5, "rewards": {"right": 0.5},
             "advantage": 0.1, "weight_version": step - 1}
            for draw in (2 * step, 2 * step + 1)
            for k in (0, 1)
        ]  # fmt: skip
        text = "".join(json.dumps(sample) + "\n" for sample in samples)
        (folder / f"samples/step_{step:06d}.jsonl").write_text(text)
    shutil.copytree(folder, "runs/two")
    return folder, Path("runs/two")


def change_sample(folder: Path, step: int, index: int, **fields: Any) -> None:
    path = folder / f"samples/step_{step:06d}.jsonl"
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    samples[index] |= fields
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))


def change_metric(folder: Path, step: int, **metrics: float) -> None:
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["step"] == step and "step_time" in line:
            line |= metrics
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_equal_runs_have_none_whatever_their_clocks_say() -> None:
    one, two = two_runs()
    change_metric(two, 2, step_time=9.0, eps=3.0)
    found = find_first_difference(one, two)
    assert not found.found and found.causes == [] and found.steps_compared == 4


def test_the_earliest_step_and_in_it_the_earliest_cause_is_told() -> None:
    one, two = two_runs()
    change_metric(two, 2, reward=7.0)
    change_sample(two, 2, 3, score=1.0, rewards={"right": 1.0}, advantage=0.9)
    change_sample(two, 3, 0, prompt="another")
    parting = find_first_difference(one, two).parting
    assert parting is not None
    assert (parting.step, parting.what, parting.where) == (
        2,
        "reward right",
        "draw 5, completion 1",
    )
    change_sample(two, 2, 1, completion="the answer was 41")
    parting = find_first_difference(one, two).parting
    assert parting is not None and parting.what == "completion"
    assert parting.where == "draw 4, completion 1, character 11" and "was" in parting.second


def test_causes_are_keys_versions_and_data() -> None:
    one, two = two_runs()
    for folder, torch in ((one, "2.12"), (two, "2.13")):
        (folder / "env.json").write_text(json.dumps({"packages": {"torch": torch}}))
    config = (two / "config.yaml").read_text()
    (two / "config.yaml").write_text(config.replace("beta: 0.05", "beta: 0.1"))
    about = json.loads((two / "run.json").read_text())
    (two / "run.json").write_text(json.dumps(about | {"fingerprint": "f2"}))
    found = find_first_difference(one, two)
    assert [(d.what, d.first, d.second) for d in found.causes] == [
        ("algorithm.beta", "0.05", "0.1"), ("packages.torch", "2.12", "2.13"),
        ("data (fingerprint)", "f1", "f2"),
    ]  # fmt: skip
    assert not found.found


def test_a_tolerance_lets_near_numbers_be_equal() -> None:
    one, two = two_runs()
    change_metric(two, 1, reward=0.1100001)
    assert find_first_difference(one, two).found
    assert not find_first_difference(one, two, tolerance=1e-4).found


def test_the_verb_exits_with_20_and_refuses_three_runs(
    capsys: pytest.CaptureFixture[str], sentence
) -> None:
    _, two = two_runs()
    assert compare.run(["one", "two", "--first-difference"]) == 0
    assert "no difference in 4" in capsys.readouterr().out
    change_sample(two, 1, 0, seed=3)
    assert compare.run(["one", "two", "--first-difference"]) == 20
    sentence(capsys.readouterr().out)
    assert compare.run(["one", "two", "--first-difference", "--json"]) == 20
    assert json.loads(capsys.readouterr().out)["parting"]["step"] == 1
    for words, key in (["one"], "two"), (["one", "two", "--tolerance", "2"], "--tolerance"):
        with pytest.raises(ConfigError) as caught:
            compare.run([*words, "--first-difference"])
        assert_refused(caught, 2, key)


def test_damaged_runs_are_compared_as_far_as_they_can_be() -> None:
    one, two = two_runs()
    (two / "samples/step_000001.jsonl").write_text("{")
    (two / "config.yaml").write_text("[")
    change_sample(two, 2, 0, score=0.9)
    found = find_first_difference(one, two)
    assert found.parting is not None and found.parting.step == 2 and found.notes


@pytest.mark.slow
def test_real_runs_part_where_their_configs_say(forked: Forked) -> None:
    short = ("train", "+recipe=smoke", "train.prompts_per_step=2", "algorithm.num_generations=2")
    for name, words in {
        "a": (),
        "b": (),
        "c": ("train.learning_rate=3e-3",),
        "d": ("seed=2",),
    }.items():
        assert forked(*short, f"name={name}", *words) == 0
    runs = {name: forked.folder / "runs" / name for name in "abcd"}
    assert not find_first_difference(runs["a"], runs["b"]).found
    rate = find_first_difference(runs["a"], runs["c"])
    assert [d.what for d in rate.causes] == ["train.learning_rate"]
    assert rate.parting is not None and (rate.parting.step, rate.parting.what) == (
        1,
        "learning_rate",
    )
    seed = find_first_difference(runs["a"], runs["d"]).parting
    assert seed is not None and seed.step == 1 and seed.what in ("row of the data", "prompt")
