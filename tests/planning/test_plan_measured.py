"""A plan against real runs: the page of what was measured, and one run measured here."""

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_cases import Rloo

from rloo_cli.planning import device

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_page_is_what_the_bench_would_write_and_its_median_is_under_15_percent() -> None:
    command = [sys.executable, "-P", "bench/plan.py", "--check"]
    path = {"PYTHONPATH": f"{ROOT}:{ROOT / 'bench'}", "PATH": ""}
    ended = subprocess.run(command, cwd=ROOT, env=path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    text = (ROOT / "docs" / "scale.md").read_text()
    count, _, rest = text.partition("Median error of ")[2].partition(" configurations: **")
    assert int(count) >= 10 and float(rest.partition("%")[0]) < 15


def test_a_run_says_what_it_took_and_what_was_predicted(rloo: Rloo) -> None:
    ended = rloo("train", "+recipe=smoke", "logging.console=plain")
    assert ended.code == 0 and "memory: " in ended.out and " predicted (" in ended.out
    got = json.loads((rloo.folder / "runs" / "smoke" / "run.json").read_text())["memory"]
    assert got["measured_bytes"] > 0 and got["predicted_bytes"] > 0
    assert sum(got["predicted_parts"].values()) == pytest.approx(got["predicted_bytes"], rel=1e-6)


# In a process of its own: one that ran other tests may give back memory while this one takes some.
READ_ITSELF = """
import mmap
from rloo_cli.train import memory_check

before = memory_check.reset_peak_memory()
block = mmap.mmap(-1, 50_000_000)
block.write(b"x" * 50_000_000)
assert memory_check._process_status_bytes("VmHWM") - before >= 45_000_000
assert memory_check._process_status_bytes("VmNothing") == 0.0
"""


@pytest.mark.slow
def test_what_a_process_holds_is_read_in_bytes() -> None:
    ended = subprocess.run([sys.executable, "-c", READ_ITSELF], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """bench/plan.py as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("plan")


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / "bench" / name).read_text().splitlines()]


def test_a_plan_is_within_15_percent_of_every_measured_run(bench: Any) -> None:
    latest = {row["name"]: row["measured_bytes"] for row in rows("plan.jsonl")}
    del latest["fsdp2"]  # its plan leaves out what loading takes (docs/scale.md)
    planned = {name: bench.predict(bench.SETTINGS[name]).peak_bytes for name in latest}
    assert len(planned) >= 14 and planned == pytest.approx(latest, rel=0.15)


def test_a_plan_is_within_15_percent_of_what_an_h100_took(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (row,) = (row for row in rows("gpu.jsonl") if row["row"] == "memory, plain")
    sizes, setting = row["sizes"], bench.SETTINGS["plain"]
    h100 = device.rank_device("cuda", 79.6 * device.GIB, row["machine"])
    monkeypatch.setattr(bench.device, "cpu_device", lambda: h100)
    monkeypatch.setitem(bench.MODELS, "qwen3", bench.MODELS["qwen3"] | sizes["model"])
    words = (*setting.words, *sizes["words"], "model.dtype=float32")
    planned = bench.predict(replace(setting, words=words, prompt=sizes["prompt"]))
    assert planned.peak_bytes / 1e9 == pytest.approx(row["facts"]["measured_gb"], rel=0.15)


@pytest.mark.slow
def test_a_measured_run_is_near_its_plan(bench: Any) -> None:
    row = bench.measure("no logits")
    assert row["predicted_bytes"] == pytest.approx(row["measured_bytes"], rel=0.25)
