"""docs/results/speed.md says what was measured, and all of it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = {
    "device": "x86_64", "cores": 2, "threads": 1, "dtype": "float32", "version": "0", "commit": "a",
    "torch": "2", "transformers": "5", "peer_version": "1.16.0", "date": "2026-01-02T03:04:05",
    "workload": "W1", "above_base_mb": 10.0, "loadavg": 1.0, "gradient_rel_diff": 1e-6,
    "note": "as it comes", "split": {"update": 1.0}, "completions_per_s": 3.0, "mfu": 0.5,
    "level": "padded", "attention": "sdpa",
    "roofline": 80.0, "tokens": {"padded": 30, "real": 20, "computed": 30},
}  # fmt: skip


def row(tool: str, setting: str, seconds: list[float], peak: float = 100.0, **other) -> dict:
    """One tool's row of a run; the processor's seconds are half of the wall's."""
    found = {**RUN, "tool": tool, "setting": setting, "peak_mb": peak}
    for kind in ("step", "train"):
        middle = sorted(seconds)[len(seconds) // 2]
        found |= {f"s_{kind}": middle, f"s_{kind}s": seconds}
        found |= {f"cpu_s_{kind}": middle / 2, f"cpu_s_{kind}s": [s / 2 for s in seconds]}
    return found | other


def both(theirs: list[float], ours: list[float], **other) -> list[dict]:
    """A run of two tools."""
    return [row("trl", "best", theirs, **other), row("rloo", "exact", ours, **other)]


@pytest.fixture
def page(monkeypatch):
    """What makes the page of rows."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    import speed_page

    return speed_page.page


def lines(text: str, word: str) -> list[str]:
    """The lines of a table that begin with a tool's name."""
    return [line for line in text.splitlines() if line.startswith(f"| {word}")]


def section(text: str, name: str) -> str:
    """From a workload's title to the next one."""
    return text.split(f"## {name}")[1].split("\n## ")[0]


@pytest.mark.process
def test_the_page_is_made_from_the_results():
    asked = [sys.executable, ROOT / "bench" / "speed_page.py", "--check"]
    ended = subprocess.run(asked, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_a_page_that_says_something_else_is_found(monkeypatch, tmp_path, page):
    import speed_page

    monkeypatch.setattr(speed_page, "PAGE", tmp_path / "speed.md")
    monkeypatch.setattr(sys, "argv", ["speed_page.py"])
    speed_page.main()
    monkeypatch.setattr(sys, "argv", ["speed_page.py", "--check"])
    speed_page.main()
    (tmp_path / "speed.md").write_text(speed_page.PAGE.read_text().replace("K = 4", "K = 5"))
    with pytest.raises(SystemExit) as ended:
        speed_page.main()
    assert ended.value.code


@pytest.mark.parametrize("name", ["W5", "W6", "W7"])
def test_a_workload_for_a_gpu_refers_to_the_page_of_the_gpu(page, name):
    assert "On a GPU: [docs/results/gpu.md](gpu.md)." in section(page(both([2.0], [1.0])), name)


def test_a_workload_without_rows_is_said_to_be_not_yet_run(page):
    assert "Not yet run." in section(page([]), "W1")


def test_a_row_where_rloo_loses_is_kept_and_marked(page):
    (line,) = lines(page(both([1.0, 0.9], [2.0, 2.0])), "TRL best")
    assert line.count("0.47x (0.45 - 0.50) **`rloo` loses**") == 2


def test_a_row_where_rloo_wins_is_not_marked(page):
    (line,) = lines(page(both([3.0, 4.0, 5.0], [2.0, 2.0, 2.0])), "TRL best")
    assert "2.00x (1.50 - 2.50)" in line and "loses" not in line


def test_more_memory_is_marked_as_a_loss(page):
    rows = [row("trl", "default", [2.0], peak=90.0), row("rloo", "exact", [1.0], peak=100.0)]
    (line,) = lines(page(rows), "TRL default")
    assert "90 **`rloo` loses**" in line


def test_the_latest_run_of_each_device_is_shown(page):
    old, new = both([9.0], [1.0]), both([4.0], [2.0], date="2026-02-02T00:00:00")
    text = page([*old, *both([8.0], [1.0], device="H200"), *new])
    assert [line.split("|")[3].strip()[:5] for line in lines(text, "TRL best")] == [
        "2.00x",
        "8.00x",
    ]


def test_seconds_are_the_processors_where_the_machine_was_crowded(page):
    (line,) = lines(page(both([4.0], [2.0], loadavg=2.5)), "`rloo` |")
    assert "1.00 (1.00 - 1.00)" in line


def test_a_sampler_slower_than_trl_is_marked(page):
    common = {"workload": "rollout", "device": "x86_64", "parameters": 1_000_000, "K": 4, "B": 8,
              "length": 24, "threads": 1, "vllm": "0.32.0", "completions_per_s": 8.0,
              "tokens_per_s": 90.0, "s_sync": None, "date": "2026-01-02"}  # fmt: skip
    times = {"s_batch_least": 1.0, "s_batch_most": 3.0}
    trl = {**common, **times, "tool": "trl", "backend": "trl", "s_batch": 1.5}
    ours = {**common, **times, "tool": "rloo", "backend": "transformers", "s_batch": 2.0}
    text = section(page([ours, trl]), "Sampling")
    assert [("loses" in line) for line in lines(text, "x86_64")] == [True, False]
