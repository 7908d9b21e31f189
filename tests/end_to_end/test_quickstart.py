"""`rloo train +recipe=quickstart`, the first command anybody runs: it learns, and shows that."""

import re
from pathlib import Path

import pytest
from cli_cases import Ended, Rloo, strict, surroundings

from rloo_cli.utils.files import read_json

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Rloo, Ended]:
    """A folder in which the quickstart was run, and what it said."""
    base = tmp_path_factory.getbasetemp()
    rloo = Rloo(tmp_path_factory.mktemp("quickstart"), surroundings(base))
    return rloo, rloo("train", "+recipe=quickstart", timeout=1500)


@pytest.fixture(scope="module")
def run(quickstart: tuple[Rloo, Ended]) -> Path:
    return quickstart[0].folder / "runs" / "quickstart"


def test_the_quickstart_learns_to_add(quickstart: tuple[Rloo, Ended], run: Path) -> None:
    _, ended = quickstart
    assert ended.code == 0 and not ended.own_err, ended.said
    summary = read_json(run / "summary.json")
    assert summary["before"] < 0.5 and summary["after"] > 0.9
    assert summary["steps"] == summary["updates"] == 80
    assert read_json(run / "run.json")["state"] == "finished"


def test_the_quickstart_shows_its_progress_on_plain_lines(
    quickstart: tuple[Rloo, Ended],
) -> None:
    out = quickstart[1].out
    assert "\r" not in out and "\x1b" not in out
    steps = re.findall(r"^step (\d+)/80  reward ", out, re.MULTILINE)
    assert [int(step) for step in steps] == list(range(1, 81))
    held_out = re.findall(r"^step (\d+)/80  held-out ([\d.]+)", out, re.MULTILINE)
    assert [int(step) for step, _ in held_out] == [0, 20, 40, 60, 80]
    assert float(held_out[0][1]) < 0.5 and float(held_out[-1][1]) > 0.9
    assert "kl " in out and "entropy " in out and " s/step" in out and "eta " in out


def test_the_quickstart_ends_with_a_table_and_three_problems(
    quickstart: tuple[Rloo, Ended],
) -> None:
    lines = [line.split() for line in quickstart[1].out.splitlines()]
    (header,) = [i for i, words in enumerate(lines) if words[:2] == ["held", "out"]]
    assert lines[header] == ["held", "out", "before", "after", "change"]
    # Of `reward 0.366 (0.325 to 0.98 (0.964 to +0.614`: the intervals end on the next line.
    reward = next(words for words in lines[header:] if words[:1] == ["reward"])
    before, after, change = map(float, (reward[1], reward[4], reward[-1]))
    assert before < 0.5 and after > 0.9 and change == pytest.approx(after - before, abs=0.01)
    problems = [words for words in lines[header:] if words and re.fullmatch(r"\d+\+\d+=", words[0])]
    assert len(problems) == 3
    for prompt, answer, first, last in problems:
        a, b = prompt.rstrip("=").split("+")
        assert int(answer) == int(a) + int(b)
        assert (first == answer) != (last == answer)  # chosen because training changed them


def test_the_quickstart_leaves_curves_samples_and_a_model(run: Path) -> None:
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "final" / "model.safetensors").is_file()
    assert {p.name for p in (run / "samples").glob("step_*")} == {
        f"step_{step:06d}.jsonl" for step in range(10, 81, 10)
    }
    assert len(strict(run / "samples" / "step_000080.jsonl")) == 32 * 8
    rows = strict(run / "metrics.jsonl")
    rewards = [row["reward"] for row in rows if "reward" in row]
    assert len(rewards) == 80
    assert sum(rewards[-10:]) / 10 > 0.2 + sum(rewards[:10]) / 10


def test_the_quickstart_again_is_nothing_to_do(quickstart: tuple[Rloo, Ended], run: Path) -> None:
    before = (run / "metrics.jsonl").read_bytes()
    ended = quickstart[0]("train", "+recipe=quickstart", timeout=30)
    assert ended.code == 0 and "nothing to do" in ended.out
    assert (run / "metrics.jsonl").read_bytes() == before
