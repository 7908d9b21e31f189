"""Marks decide which command runs a test: tests/support/suite_marks.py, seen from outside."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUITE = """
import subprocess, sys, time
import pytest

@pytest.fixture
def fast():
    pass

def test_plain(): pass
def test_with_a_process_by_its_fixture(fast): pass
@pytest.mark.ranks
def test_with_ranks(): pass
@pytest.mark.process
@pytest.mark.smoke
def test_that_newcomers_run(): pass
@pytest.mark.parametrize("n", ["one", "two", "three"])
@pytest.mark.slow_but("one")
def test_of_one_quick_case(n): pass
@pytest.mark.parametrize("n", ["one", "two", "three"])
@pytest.mark.slow_cases("one", "two")
def test_of_two_slow_cases(n): pass
"""
OFFENDERS = """
import multiprocessing, subprocess, sys, time
import pytest, suite_marks

suite_marks.LIMIT_S = 1.0
@pytest.fixture(scope="module")
def started():
    subprocess.run([sys.executable, "-c", ""])

def test_that_starts_a_python(): subprocess.run([sys.executable, "-c", ""])
def test_whose_fixture_starts_a_python(started): pass
def test_that_spawns():
    child = multiprocessing.get_context("spawn").Process(target=print)
    child.start(); child.join()
def work():
    began = time.process_time()
    while time.process_time() - began < 1.5: pass

def test_that_takes_long(): work()
def test_that_is_quick(): subprocess.run(["true"])
@pytest.mark.slow
def test_that_may_take_long(): work()
"""


def outcomes(folder: Path, suite: str, *words: str, **variables: str) -> dict[str, str]:
    """Name of a test -> PASSED or FAILED."""
    (folder / "test_suite.py").write_text(suite)
    command = [sys.executable, "-m", "pytest", "-p", "suite_marks", "-p", "no:cacheprovider", "-v"]
    config = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), "-o", "addopts="]
    kept = {k: v for k, v in os.environ.items() if k not in ("CI", "PYTEST_ADDOPTS")}
    kept["PYTHONPATH"] = f"{ROOT / 'tests/support'}{os.pathsep}{ROOT}"
    said = subprocess.run(
        [*command, *config, str(folder), *words],
        cwd=folder, env=kept | variables, capture_output=True, text=True,
    ).stdout  # fmt: skip
    return dict(re.findall(r"::(test_\S+) (PASSED|FAILED)", said))


@pytest.mark.process
def test_marks_and_fixtures_choose_the_command_that_runs_a_test(tmp_path: Path) -> None:
    chosen = re.findall(r"-m '(.*)'", (ROOT / "Makefile").read_text())
    newcomers, engines, everything = dict.fromkeys(chosen)
    assert {*outcomes(tmp_path, SUITE, "-m", newcomers)} == {
        "test_plain", "test_that_newcomers_run",
        "test_of_one_quick_case[one]", "test_of_two_slow_cases[three]",
    }  # fmt: skip
    by_engines = outcomes(tmp_path, SUITE, "-m", engines)
    assert {*by_engines} == {"test_with_a_process_by_its_fixture", "test_with_ranks"}
    assert len(outcomes(tmp_path, SUITE, "-m", everything)) == 10


@pytest.mark.process
@pytest.mark.parametrize("ci", [True, False])
def test_a_test_without_a_mark_starts_no_python_and_in_ci_it_is_short(tmp_path, ci: bool) -> None:
    found = outcomes(tmp_path, OFFENDERS, **({"CI": "true"} if ci else {}))
    assert {name for name, outcome in found.items() if outcome == "FAILED"} == {
        "test_that_starts_a_python", "test_whose_fixture_starts_a_python", "test_that_spawns",
        *(["test_that_takes_long"] if ci else []),
    }  # fmt: skip
    assert len(found) == 6
