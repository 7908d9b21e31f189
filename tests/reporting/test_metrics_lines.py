"""Lines of metrics read in little memory: the same values as from json, and a file that grows."""

import json
import math
import tracemalloc
from pathlib import Path

import pytest
from assert_refused import assert_refused

from rloo_cli.inspection.run_record import RunRecord
from rloo_cli.inspection.run_screen import RunScreen
from rloo_cli.reporting.curves import smooth_values
from rloo_cli.reporting.health.advisor import Advisor, advice_text
from rloo_cli.reporting.metrics_lines import (
    LinePacker,
    MetricsReader,
    read_metrics_lines,
    read_training_lines,
)
from rloo_cli.utils.errors import ConfigError

LINES = [
    {"step": 1, "reward": 0.1, "kl": -1e-300, "updates": 3},
    {"step": 2, "reward": 1, "kl": math.pi, "updates": 2**53 + 1},  # an int where a float was
    {"step": 3, "reward": 0.1 + 0.2, "kl": float("inf"), "updates": -(2**63)},
    {"step": 4, "updates": 2**63},  # more than eight bytes
    {"step": 5, "passed": True, "note": "text", "list": [1], "none": None},
    {"step": 6},
]


def write(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_packed_line_reads_as_the_dict_that_it_was() -> None:
    packer = LinePacker()
    for line in LINES:
        packed = packer.pack(line)
        assert dict(packed) == line and list(packed) == list(line) and len(packed) == len(line)
        assert repr(dict(packed)) == repr(line)  # 1 is not 1.0
        assert packed.get("reward") == line.get("reward") and packed.get("no", 7) == 7
        assert "step" in packed and "no" not in packed
        with pytest.raises(KeyError):
            packed["no"]


def test_a_file_read_is_its_lines_in_the_order_of_their_steps(tmp_path: Path) -> None:
    path = write(tmp_path / "metrics.jsonl", *LINES[3:], *LINES[:3])
    assert [dict(line) for line in read_metrics_lines(path)] == LINES
    reader = MetricsReader(path)
    numbers = [{k: v for k, v in row.items() if isinstance(v, int | float)} for row in LINES]
    numbers[2].pop("kl")  # Infinity is no JSON, and left out by whoever reads what it can
    assert [dict(line) for line in reader.read()] == numbers and reader.problems == []


def test_a_reader_follows_a_file_that_is_cut_back_and_grows_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"

    def lines(*steps: int) -> str:
        rows = [{"step": 0, "eval_reward": 1.0}, *({"step": s, "step_time": 0.1} for s in steps)]
        return "".join(json.dumps(row) + "\n" for row in rows)

    def steps() -> list[int]:
        return [row["step"] for row in reader.read()]

    reader = MetricsReader(path)
    assert steps() == []
    path.write_text(lines(1, 2, 3) + '{"step": 4, "ste')
    assert steps() == [0, 1, 2, 3] == steps()
    path.write_text(lines(1))
    assert steps() == [0, 1]
    path.write_text(lines(1, 2, 3, 4))
    assert steps() == [0, 1, 2, 3, 4]
    path.write_text(lines(1, 2, 3).replace("0.1", "0.25") + lines(4, 5, 6))  # longer than before
    assert steps() == [0, 0, 1, 2, 3, 4, 5, 6] and reader.lines[2]["step_time"] == 0.25
    path.unlink()
    assert steps() == []


def test_a_reader_reads_what_is_new_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, parsed = write(tmp_path / "metrics.jsonl", *LINES[:2]), list[int]()
    reader, add_line = MetricsReader(path), MetricsReader._add_line
    monkeypatch.setattr(
        MetricsReader, "_add_line", lambda *given: parsed.append(1) or add_line(*given)
    )
    reader.read()
    with path.open("a") as file:
        file.write('{"step": 3}\nnonsense\n{"step": 4')
    assert [row["step"] for row in reader.read()] == [1, 2, 3] and len(parsed) == 4
    (problem,) = reader.problems
    assert problem.startswith(f"{path}:4: ")


def test_lines_of_training_are_those_that_a_reward_saw_or_a_refusal(tmp_path: Path) -> None:
    rows = [{"step": s, "step_time": 1.5} for s in (1, 2, 3)]
    path = write(tmp_path / "metrics.jsonl", {"step": 0, "eval_reward": 1.0}, *rows)
    path.write_bytes(path.read_bytes() + b'{"step": 2, "step_t')
    assert read_training_lines(path, 2) == rows[:2]
    assert read_training_lines(tmp_path / "none.jsonl", 2) == []
    path.write_bytes(b"\xa1\n" + path.read_bytes())
    with pytest.raises(ConfigError) as caught:
        read_training_lines(path, 2)
    assert_refused(caught, 2, "JSON", where=f"{path}:1")


def test_a_line_takes_eight_bytes_a_number_and_not_its_names_again(tmp_path: Path) -> None:
    names = [f"a/metric/with/a/name/{i}" for i in range(80)]
    rows = ({"step": s} | {name: s + i / 7 for i, name in enumerate(names)} for s in range(2000))
    path = write(tmp_path / "metrics.jsonl", *rows)
    for read in (read_metrics_lines, lambda path: MetricsReader(path).read()):
        tracemalloc.start()
        lines = read(path)
        size = tracemalloc.get_traced_memory()[0] / len(lines)
        tracemalloc.stop()
        assert size < 81 * 8 + 300  # as dicts, some twelve kilobytes


def test_the_smoothing_of_a_long_run_is_that_of_a_short_one_and_not_quadratic() -> None:
    def fitted(values: list[float], i: int, half: int) -> float:
        window = range(max(0, i - half), min(len(values), i + half + 1))
        x, y = sum(window) / len(window), sum(values[j] for j in window) / len(window)
        slope = sum((j - x) * (values[j] - y) for j in window) / sum((j - x) ** 2 for j in window)
        return y + slope * (i - x)

    for count in (2, 40, 3000):
        values = [1e6 + math.sin(i / 50) + (i * 7919 % 13) / 13 for i in range(count)]
        smooth, half = smooth_values(values), max(3, count // 30)
        for i in {0, 1, count // 2, count - 1}:
            assert smooth[i] == pytest.approx(fitted(values, i, half), abs=1e-6)
    assert len(smooth_values([0.5] * 300_000)) == 300_000  # hours, where each window is summed


def test_completions_sampled_are_those_of_the_last_step_that_says_it() -> None:
    # Half of them were thrown away.
    steps = [{"step": 2, "episode": 10, "sampled_completions": 20}, {"step": 4, "step_time": 1.0},
             {"step": 5, "episode": 25, "sampled_completions": 50}]  # fmt: skip
    config = {"train": {"prompts_per_step": 3}, "algorithm": {"num_generations": 2}}
    record = RunRecord(Path(), {}, config, steps)
    assert [record.completions_sampled(s) for s in (1, 2, 4, 5, 9)] == [6, 20, 20, 50, 50]


def test_a_screen_that_looks_again_tells_of_the_lines_since(tmp_path: Path) -> None:
    rows = [{"step": s, "step_time": 0.1, "grad_clip_fraction": 1.0} for s in range(1, 41)]
    write(tmp_path / "metrics.jsonl", *rows[:10])
    screen = RunScreen(tmp_path)
    assert screen.screen_values()["step"] == 10 and screen.advice == []
    write(tmp_path / "metrics.jsonl", *rows)
    screen.refresh_run()
    assert screen.screen_values()["step"] == 40
    advisor = Advisor()
    got = [(r["step"], advice_text(*pair)) for r in rows for pair in advisor.advise(r).items()]
    assert screen.advice == got and len(got) == 1
